"""The first planner: small tables on every rank, the rest by fewest expected bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from rowmesh.cost import expect_dense, expect_table
from rowmesh.errors import InputError, PlanError, did_you_mean
from rowmesh.placement import (
    Copies,
    Exchange,
    MeshShape,
    Plan,
    Predicted,
    Split,
    TablePlan,
    Tier,
)
from rowmesh.placement.dense import bucket_elements
from rowmesh.placement.text import bytes_per_rank
from rowmesh.stats import Accesses, Stats
from rowmesh.tables import (
    PoolingType,
    TableConfig,
    dense_parameters,
    dtype_name,
    is_trainable,
    is_weighted,
    named_collections,
)
from rowmesh.topology import Topology

__all__ = ["make_plan", "plan_tables"]

SMALL_TABLE_BYTES = 1 << 20
_SPLITS = ("auto", "data_parallel", "row_wise", "table_wise")
_EXCHANGES = ("auto", "pooled", "rows")


def make_plan(
    model: nn.Module,
    topology: Topology,
    *,
    stats: Stats | None = None,
    split: str = "auto",
    exchange: str = "auto",
    dedup: bool = True,
    batch_size: int = 2048,
) -> Plan:
    """A plan for ``model`` on ``topology``, by reading its table configurations only.

    Args:
        model: Its collections may be on ``meta``, and may be TorchRec's.
        topology: ``mesh.topology``, or that of a cluster far away.
        stats: Measured accesses; without them ids are assumed Zipf(1.05).
        split: ``auto``, or one split for all tables: data_parallel, table_wise, row_wise.
        exchange: ``auto`` (fewest expected bytes that keep the plan bit-exact), rows, pooled.
        dedup: Ask for each distinct row once (`rows` exchange).
        batch_size: Samples per rank, where ``stats`` are not given.

    Raises:
        InputError: If a word is unknown or a table has no statistics.
        PlanError: If a rank's memory, where the topology knows it, does not hold its rows.
    """
    tables: list[TablePlan] = []
    configs: list[TableConfig] = []
    for path, module, members in named_collections(model):
        configs += members
        tables += [
            _blank(
                config,
                path,
                trainable=is_trainable(module, config.name),
                weighted=is_weighted(module),
            )
            for config in members
        ]
    stats = stats or Stats.assume(configs, batch_size=batch_size)
    sizes = [p.numel() for p in dense_parameters(model) if p.requires_grad]
    return plan_tables(
        tables,
        topology,
        stats=stats,
        dense=bucket_elements(sizes),
        split=split,
        exchange=exchange,
        dedup=dedup,
    )


def plan_tables(
    tables: Sequence[TablePlan],
    topology: Topology,
    *,
    stats: Stats,
    dense: tuple[int, ...] = (),
    split: str = "auto",
    exchange: str = "auto",
    dedup: bool = True,
) -> Plan:
    """Fill in the tiers and exchanges of ``tables``; `make_plan` for tables without a model."""
    for word, known, what in ((split, _SPLITS, "split"), (exchange, _EXCHANGES, "exchange")):
        if word not in known:
            raise InputError(f"unknown {what} {word!r}{did_you_mean(word, known)}")
    for table in tables:
        if table.name not in stats.tables:
            raise InputError(f"table {table.name!r} has no statistics")
    world = topology.world
    choose = _chooser(split, exchange, dedup, world)
    chosen = [choose(table, stats.tables[table.name]) for table in tables]
    placed = _place_whole_tables(chosen, stats.tables, world)
    total = sum(expect_table(t, stats.tables[t.name], world=world).total for t in placed)
    total += expect_dense(sum(dense), world=world)
    inside = (topology.local - 1) / max(world - 1, 1)
    plan = Plan(
        mesh=MeshShape(hosts=topology.hosts, local=topology.local, group=world),
        tables=tuple(placed),
        dense=dense,
        predicted=Predicted(host_bytes=total * inside, cross_bytes=total * (1 - inside)),
    ).validate()
    _check_memory(plan, topology)
    return plan


def _check_memory(plan: Plan, topology: Topology) -> None:
    needed = bytes_per_rank(plan)
    limit = topology.memory_bytes
    rank = needed.index(max(needed))
    if limit is not None and needed[rank] > limit:
        raise PlanError(
            f"rank {rank} needs {needed[rank] / 2**30:.2f} GiB for its rows and their state, but "
            f"has {limit / 2**30:.2f}: add ranks, or split more tables row_wise"
        )


def _blank(config: TableConfig, path: str, *, trainable: bool, weighted: bool) -> TablePlan:
    return TablePlan(
        name=config.name,
        collection=path,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        data_type=dtype_name(config.data_type),  # type: ignore[arg-type]
        pooling=PoolingType(str(getattr(config, "pooling", "none"))),
        feature_names=tuple(config.feature_names),
        virtual_shards=256,
        tiers=(),
        trainable=trainable,
        weighted=weighted,
    )


def _chooser(
    split: str, exchange: str, dedup: bool, world: int
) -> Callable[[TablePlan, Accesses], TablePlan]:
    ranks = tuple(range(world))
    tiers = {
        "data_parallel": Tier(ranks=ranks, copies=Copies.WORLD),
        "row_wise": Tier(ranks=ranks, split=Split(kind="boxes", rows="all")),
        "table_wise": Tier(ranks=(0,)),
    }

    def options(table: TablePlan) -> list[TablePlan]:
        shards = max(table.virtual_shards, 16 * world)
        table = replace(table, virtual_shards=shards, dedup=dedup)
        sequence = table.pooling is PoolingType.NONE
        found = []
        for name in ("row_wise", "table_wise") if split == "auto" else (split,):
            for word in Exchange if exchange == "auto" else (Exchange(exchange),):
                inexact = name == "row_wise" and word is Exchange.POOLED and world > 1
                if (word is Exchange.POOLED and sequence) or (exchange == "auto" and inexact):
                    continue
                found.append(replace(table, tiers=(tiers[name],), exchange=word))
        if not found:  # a sequence table where `pooled` was asked for
            return [replace(table, tiers=(tiers["row_wise" if split == "auto" else split],))]
        return found

    def choose(table: TablePlan, accesses: Accesses) -> TablePlan:
        small = table.num_embeddings * table.row_bytes <= SMALL_TABLE_BYTES
        if split == "auto" and (small or world == 1):
            shards = max(table.virtual_shards, 16 * world)
            tier = tiers["data_parallel" if small else "row_wise"]
            return replace(table, virtual_shards=shards, tiers=(tier,), dedup=dedup)
        return min(options(table), key=lambda t: expect_table(t, accesses, world=world).total)

    return choose


def _place_whole_tables(
    tables: Sequence[TablePlan], accesses: Mapping[str, Accesses], world: int
) -> list[TablePlan]:
    """Table-wise tables, most expected bytes first, each to the rank with the least so far."""
    load = [0.0] * world
    rank_of: dict[str, int] = {}
    whole = [t for t in tables if t.rest.copies is Copies.GROUP and t.rest.split.kind == "whole"]
    cost = {t.name: expect_table(t, accesses[t.name], world=max(world, 2)).total for t in whole}
    for table in sorted(whole, key=lambda t: (-cost[t.name], t.name)):
        rank = load.index(min(load))
        rank_of[table.name] = rank
        load[rank] += cost[table.name]
    return [
        replace(t, tiers=(replace(t.rest, ranks=(rank_of[t.name],)),)) if t.name in rank_of else t
        for t in tables
    ]
