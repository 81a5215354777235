"""A plan as a table that fits 100 columns."""

from rowmesh.placement.homes import Homes
from rowmesh.placement.plan import Copies, Plan, TablePlan

__all__ = ["bytes_per_rank", "render"]

_GIB = 1 << 30


def bytes_per_rank(plan: Plan, *, state_bytes_per_row: int = 4) -> list[int]:
    """Bytes of weights and optimiser state on each rank (row-wise AdaGrad: 4 a row).

    Rows of a hot set are counted where they are copied, and their homes too.
    """
    totals = [0] * (plan.mesh.hosts * plan.mesh.local)
    for table in plan.tables:
        for tier in table.tiers:
            num_rows = table.num_embeddings if tier.rows == "rest" else tier.rows.count
            row = table.row_bytes // tier.split.columns + state_bytes_per_row
            whole = tier.split.kind == "whole" or tier.split.rows == "none"
            num_owners = 1 if whole else max(1, len(tier.ranks) // tier.split.columns)
            homes = Homes(num_rows, table.virtual_shards, num_owners)
            for index, rank in enumerate(tier.ranks):
                totals[rank] += homes.num_slots(index % num_owners) * row
    return totals


def _ranks(table: TablePlan, world: int) -> str:
    ranks = table.rest.ranks
    if len(ranks) == world:
        return "all"
    text = ",".join(map(str, ranks))
    return text if len(text) <= 10 else f"{len(ranks)} ranks"


def render(plan: Plan, *, max_tables: int = 40) -> str:
    """The plan for people: a row a table, GiB per rank with optimiser state, exactness."""
    mesh, world = plan.mesh, plan.mesh.hosts * plan.mesh.local
    label = plan.exactness
    lines = [
        f"plan for {mesh.hosts} hosts x {mesh.local} ranks, shard groups of {mesh.group}, "
        f"sums {plan.tree}",
        f"exactness {label}: {label.meaning}",
        f"{'table':<24} {'rows':>13} {'dim':>5} {'type':>4}  {'split':<24} {'exchange':<12} ranks",
    ]
    for table in plan.tables[:max_tables]:
        name = table.name if len(table.name) <= 24 else table.name[:21] + "..."
        word = table.word if len(table.word) <= 24 else table.word[:21] + "..."
        local = all(t.copies is Copies.WORLD for t in table.tiers)
        travels = "none" if local else table.exchange.value
        if not local and table.exchange.value == "rows" and not table.dedup:
            travels += " no dedup"
        lines.append(
            f"{name:<24} {table.num_embeddings:>13,} {table.embedding_dim:>5} "
            f"{table.data_type:>4}  {word:<24} {travels:<12} {_ranks(table, world)}"
        )
    if len(plan.tables) > max_tables:
        lines.append(f"... and {len(plan.tables) - max_tables} more tables")
    gib = [b / _GIB for b in bytes_per_rank(plan)]
    digits = 2 if max(gib) >= 0.1 else 6
    shown = " ".join(f"{g:.{digits}f}" for g in gib[: 8 if digits == 2 else 4])
    lines.append(f"GiB per rank with row-wise AdaGrad's state, largest {max(gib):.{digits}f}:")
    lines.append(f"  {shown}{' ...' if len(shown.split()) < world else ''}")
    predicted = plan.predicted
    if predicted.host_bytes or predicted.cross_bytes:
        lines.append(
            f"expected MB sent by a rank and step: {predicted.host_bytes / 1e6:.2f} inside hosts, "
            f"{predicted.cross_bytes / 1e6:.2f} across"
        )
    return "\n".join(lines)
