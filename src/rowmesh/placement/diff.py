"""What changed from one plan to another, table by table."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from rowmesh.placement.codecs import describe_codecs
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.placement.plan import Plan, Predicted, TablePlan
from rowmesh.placement.text import shorten

__all__ = ["Change", "PlanDiff", "describe_plan", "diff_plans"]

_GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One setting before and after; ``table`` is None for settings of the whole plan.

    A table that one of the plans does not have changes in ``what`` = ``table``, to or from
    ``none``.
    """

    table: str | None
    what: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDiff:
    """All changes, and the memory (bytes per rank) and predictions of both plans."""

    changes: tuple[Change, ...]
    memory: tuple[tuple[int, ...], tuple[int, ...]]
    predicted: tuple[Predicted, Predicted]
    num_tables: int

    def to_json(self) -> str:
        """As indented JSON; pairs are [before, after]."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def __str__(self) -> str:
        return self.render()

    def render(self, *, is_whole: bool = False) -> str:
        """The changes for people; ``is_whole`` cuts no name or value."""
        tables = {change.table for change in self.changes} - {None}
        lines = [f"{len(tables)} of {self.num_tables} tables differ"]
        rows = [(c.table or "(the plan)", c.what, c.before, c.after) for c in self.changes]
        rows = [("table", "what", "before", "after"), *rows] if rows else []
        limits = (None,) * 4 if is_whole else (24, 14, 29, 29)
        cells = [[shorten(t, n) for t, n in zip(row, limits, strict=True)] for row in rows]
        widths = [max(len(line[i]) for line in cells) for i in range(3)] if cells else []
        widths = [max(pair) for pair in zip((24, 14, 29), widths, strict=False)]
        for *some, last in cells:
            line = [f"{text:<{width}}" for text, width in zip(some, widths, strict=True)]
            lines.append(" ".join([*line, last]))
        full = [max(rank, default=0) / _GIB for rank in self.memory]
        lines.append(f"GiB of the fullest rank: {full[0]:.6f} -> {full[1]:.6f}")
        old, new = self.predicted
        lines.append(
            f"expected MB sent by a rank and step: inside hosts {old.host_bytes / 1e6:.2f} -> "
            f"{new.host_bytes / 1e6:.2f}, across {old.cross_bytes / 1e6:.2f} -> "
            f"{new.cross_bytes / 1e6:.2f}"
        )
        return "\n".join(lines)


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """What changed between two plans; tables are matched by name, their order does not count."""
    changes = _changes(None, _settings(before), _settings(after))
    old = {table.name: table for table in before.tables}
    new = {table.name: table for table in after.tables}
    names = list(dict.fromkeys([*old, *new]))
    for name in names:
        if name in old and name in new:
            changes += _changes(name, _describe(old[name]), _describe(new[name]))
        else:
            words = [plans[name].word if name in plans else "none" for plans in (old, new)]
            changes.append(Change(table=name, what="table", before=words[0], after=words[1]))
    return PlanDiff(
        changes=tuple(changes),
        memory=(tuple(bytes_per_rank(before)), tuple(bytes_per_rank(after))),
        predicted=(before.predicted, after.predicted),
        num_tables=len(names),
    )


def describe_plan(plan: Plan) -> dict[str, str]:
    """Every setting of a plan in words, by what it is called in a sentence.

    What is predicted of it, what follows from them, and why it was chosen, are no settings.
    """
    settings = _settings(plan)
    del settings["exactness"]
    found = {f"the plan's {what}": value for what, value in settings.items()}
    for table in sorted(plan.tables, key=lambda table: table.name):
        found |= {f"table {table.name!r}: its {k}": v for k, v in _describe(table).items()}
    return found


def _changes(
    table: str | None, before: Mapping[str, str], after: Mapping[str, str]
) -> list[Change]:
    return [
        Change(table=table, what=what, before=before[what], after=after[what])
        for what in before
        if before[what] != after[what]
    ]


def _settings(plan: Plan) -> dict[str, str]:
    mesh = plan.mesh
    return {
        "mesh": f"{mesh.hosts} hosts x {mesh.local} ranks",
        "shard groups": f"{mesh.group} {mesh.layout}",
        "sums": plan.tree,
        "exactness": plan.exactness.value,
        "dense": f"{sum(plan.dense):,} in {len(plan.dense)} buckets",
        "towers": ", ".join(plan.towers) or "none",
        "codecs": describe_codecs(plan.codecs),
        "depth": str(plan.depth),
        "sync": f"{plan.sync.mode} every {plan.sync.period}, {plan.sync.form}",
    }


def _ranks(ranks: tuple[int, ...]) -> str:
    """A run of ranks as its ends, others as a list."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _describe(table: TablePlan) -> dict[str, str]:
    """Every setting of a table in words; plans that differ in one differ in its words."""
    tiers = table.tiers
    return {
        "split": table.word,
        "columns": ", ".join(str(tier.split.columns) for tier in tiers),
        "ranks": "; ".join(_ranks(tier.ranks) for tier in tiers),
        "exchange": table.exchange.value,
        "dedup": str(table.dedup).lower(),
        "merged": str(table.merged).lower(),
        "store": ", ".join(tier.store for tier in tiers),
        "sums": ", ".join(tier.sums for tier in tiers),
        "hot rows": ", ".join("rest" if t.rows == "rest" else t.rows.sha256 for t in tiers),
        "rows": f"{table.num_embeddings:,}",
        "dim": str(table.embedding_dim),
        "type": table.data_type,
        "pooling": str(table.pooling),
        "features": ", ".join(table.feature_names),
        "collection": table.collection,
        "virtual shards": str(table.virtual_shards),
        "trainable": str(table.trainable).lower(),
        "weighted": str(table.weighted).lower(),
        "tower": table.tower or "none",
        "shard group": str(table.group or "as the plan"),
    }
