"""FlexShard again: bytes, communication and step time of three tiers at budgets of memory."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, Rates, plan_time
from rowmesh.data import SyntheticSequences
from rowmesh.errors import InputError, check_range
from rowmesh.lab import parse_rate
from rowmesh.placement import Plan
from rowmesh.placement.memory import RULE_STATES, bytes_per_rank
from rowmesh.placement.rules import MAX_DEPTH
from rowmesh.planners import RowTiers, make_plan
from rowmesh.reproduce.compare import Contest, Told, compare
from rowmesh.reproduce.hosts import measure_on_hosts
from rowmesh.reproduce.merged import merged_bytes
from rowmesh.stats import Stats
from rowmesh.tables import named_collections
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.config import RunConfig
from rowmesh.train.model import ModelConfig, build_model

__all__ = ["FlexShard", "compare_tiers", "config_of", "measure_flexshard", "within"]

_STATE = RULE_STATES["rowwise_adagrad"]
_COUNTED = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class FlexShard:
    """What is measured; every combination of shapes, rates and dedups is a table.

    Args:
        shapes: Hosts and ranks on each.
        rates: Of a host's link.
        dedups: With and without dedup.
        budgets: Memory of a rank, relative to row-wise.
        alpha: Zipf exponent of the items.
        items: Rows of the table.
        dim: Columns of the table.
        batch: Samples of a rank.
        length: Mean items of a history.
        rounds: In each every plan runs once.
        depth: Batches begun at a time.
    """

    shapes: tuple[tuple[int, int], ...] = ((2, 2), (4, 1))
    rates: tuple[str, ...] = ("200mbit",)
    dedups: tuple[bool, ...] = (False, True)
    budgets: tuple[float, ...] = (1.0, 1.1, 1.25, 1.5)
    alpha: float = 1.2
    items: int = 200_000
    dim: int = 64
    batch: int = 512
    length: float = 20.0
    rounds: int = 5
    depth: int = 2

    def __post_init__(self) -> None:
        for rate in self.rates:
            if parse_rate(rate) is None:
                raise InputError(f"rate {rate!r} is none: tiers are about slow links")
        if not (self.shapes and self.rates and self.dedups and self.budgets):
            raise InputError("nothing to measure: shapes, rates and budgets must not be empty")
        for budget in self.budgets:
            check_range("budget", budget, 1.0, 1e6)
        check_range("items", self.items, 2)
        for name in ("dim", "batch", "rounds", "length"):
            check_range(name, getattr(self, name), 1)
        check_range("depth", self.depth, 1, MAX_DEPTH)


def config_of(asked: FlexShard, *, drift_every: int | None = None) -> RunConfig:
    """The sequence model and its data."""
    data = SyntheticSequences(
        num_items=asked.items,
        alpha=asked.alpha,
        mean_length=asked.length,
        batch_size=asked.batch,
        drift_every=drift_every,
    )
    return RunConfig(data=data, model=ModelConfig(kind="din", dim=asked.dim))


def measure_flexshard(
    what: FlexShard, *, on_stage: Callable[[str], None] = lambda stage: None
) -> Iterator[dict[str, Any]]:
    """The tables, one after the other: `compare_tiers` with the rate.

    Raises:
        InputError: Where emulated hosts are not permitted.
        LabError: If the ranks of a shape fail.
    """
    return measure_on_hosts(
        "rowmesh.reproduce.flexshard_rank",
        json.dumps(dataclasses.asdict(what)),
        shapes=what.shapes,
        rates=what.rates,
        on_stage=on_stage,
    )


def compare_tiers(
    asked: FlexShard, dedup: bool, mesh: Mesh, calibration: Calibration
) -> dict[str, Any]:
    """Row-wise, hot rows alone and three tiers at every budget; the same on all ranks.

    Collective:
        All ranks.
    """
    config = config_of(asked)
    plans, merged = on_rank_0(mesh, lambda: _plans(asked, dedup, mesh, calibration))
    rows = compare(Contest(config=config, rounds=asked.rounds), plans, mesh)
    return {
        "hosts": mesh.topology.hosts,
        "local": mesh.topology.local,
        "alpha": asked.alpha,
        "dedup": dedup,
        "depth": asked.depth,
        "merged_mb": merged,
        "rows": rows,
    }


def _plans(
    asked: FlexShard, dedup: bool, mesh: Mesh, calibration: Calibration
) -> tuple[list[Told], float]:
    """The plans; and MB that a host would send if its ranks' requests were merged, by formula."""
    config, rates = config_of(asked), calibration.rates
    source = config.data
    model = build_model(config.model, source, seed=config.seed)
    tables = [t for _, _, members in named_collections(model) for t in members]
    first = list(itertools.islice(source.batches(rank=0, world=mesh.world), _COUNTED))
    stats = Stats.from_batches(tables, (batch.sparse_features for batch in first))
    flops, parameters = count_dense(config, first[0])
    assert rates.dense is not None
    cost = rates.dense.scaled(flops=flops, parameters=parameters)
    row_wise = make_plan(
        model,
        mesh.topology,
        stats=stats,
        split="row_wise",
        exchange="rows",
        dedup=dedup,
        rates=rates,
        cost=cost,
        depth=asked.depth,
    )
    named = [("row-wise", row_wise)]
    kinds = [("hot", False, 0.0), ("hot, forward", False, 1.0)]
    if mesh.topology.local > 1:
        kinds += [("three tiers", True, 0.0), ("three tiers, forward", True, 1.0)]
    for budget in asked.budgets:
        for word, per_host, hidden in kinds:
            plan = within(row_wise, stats, rates, budget, per_host=per_host, hidden=hidden)
            if plan not in [known for _, known in named]:
                named.append((f"{word} {budget}x", plan))
    told = [
        Told(
            name, plan, plan_time(plan, stats.tables, rates=rates, cost=cost, state=_STATE).total_s
        )
        for name, plan in named
    ]
    everyone = [
        next(source.batches(rank=rank, world=mesh.world, start=_COUNTED)).sparse_features
        for rank in range(mesh.world)
    ]
    return told, merged_bytes(row_wise, everyone) / 1e6


def within(
    plan: Plan,
    stats: Stats,
    rates: Rates,
    budget: float,
    *,
    per_host: bool = True,
    hidden: float = 0.0,
) -> Plan:
    """Tiers that take at most ``budget`` times the memory of ``plan``, by the price of memory.

    Of the three ways to add up gradients of rows on every rank, the one with the least time by the
    formulas of `RowTiers`.
    """
    held = max(bytes_per_rank(plan))
    found = []
    for sums in ("sparse", "bucket"):
        tiers = RowTiers(
            plan,
            stats,
            rates=rates,
            state=_STATE,
            sums=sums,
            per_host=per_host,
            hidden=hidden,
        )
        price = tiers.price_within((budget - 1.0) * held)
        found.append((tiers.seconds_at(price), tiers.at(price)))
    return min(found, key=lambda pair: pair[0])[1]
