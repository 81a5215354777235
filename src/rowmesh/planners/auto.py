"""`make_plan`: from a model's tables, a topology and statistics to a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from torch import nn

from rowmesh.cost import DenseCost, Load, Rates, expect_plan, step_seconds
from rowmesh.errors import InputError, PlanError
from rowmesh.placement import Plan, Predicted, Sync, TablePlan
from rowmesh.placement.dense import bucket_elements
from rowmesh.placement.memory import rule_state
from rowmesh.planners.codecs import choose_codecs
from rowmesh.planners.constraints import Constraints
from rowmesh.planners.depth import choose_depth, parse_depth
from rowmesh.planners.groups import list_meshes
from rowmesh.planners.merging import parse_merge
from rowmesh.planners.options import Wishes
from rowmesh.planners.placing import Problem
from rowmesh.planners.tiers import parse_tiers
from rowmesh.stats import Stats
from rowmesh.tables import (
    PoolingType,
    TableConfig,
    check_unsharded,
    dense_parameters,
    dtype_name,
    is_trainable,
    is_weighted,
    named_collections,
    warn_of_plain,
)
from rowmesh.topology import Topology

__all__ = ["blank_table", "blank_tables", "make_plan", "plan_tables"]

_GRADIENTS: Final = Sync()


def make_plan(
    model: nn.Module,
    topology: Topology,
    *,
    stats: Stats | None = None,
    split: str = "auto",
    exchange: str = "auto",
    dedup: bool = True,
    batch_size: int = 2048,
    constraints: Constraints | None = None,
    rates: Rates | None = None,
    sparse: str = "rowwise_adagrad",
    allow_inexact: bool = False,
    tiers: str = "off",
    cost: DenseCost | None = None,
    groups: str | int = "off",
    layout: str = "auto",
    sync: Sync = _GRADIENTS,
    depth: str | int = 1,
    merge: str = "auto",
    codecs: str = "fp32",
    allow_lossy: bool = False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Plan:
    """A plan for ``model`` on ``topology``, by reading its table configurations only.

    Args:
        model: Its collections may be on ``meta``, and may be TorchRec's.
        topology: ``mesh.topology``, or that of a cluster far away. No rank holds more than its
            ``memory_bytes``, if known.
        stats: Measured accesses; without them ids are assumed Zipf(1.05).
        split: ``auto``, or one split for all tables: data_parallel, table_wise, row_wise,
            column_wise, table_row_wise, grid. Tables that cannot be cut by columns stay whole.
        exchange: ``auto`` (the fastest that keeps the plan bit-exact), rows, pooled.
        dedup: Ask for each distinct row once (`rows` exchange).
        batch_size: Samples per rank, where ``stats`` are not given.
        constraints: Pins, tables kept together, a cap on the bytes of a rank.
        rates: How fast the cluster is; the plan then predicts the seconds of a step too.
        sparse: Update rule of the tables, whose state takes memory: rowwise_adagrad,
            momentum_scaled_rowwise_adagrad, adagrad, adam or sgd.
        allow_inexact: Whether ``auto`` may choose `pooled` for row-wise tables.
        tiers: Hot rows, copied to every rank: ``off``, ``auto`` (as many as make a step shortest),
            or ``hot:K`` (K over all tables). Needs ``stats`` of counted batches.
        cost: Of the model's dense layers on the cluster, under which gradients travel; they
            count as nothing if it is not given.
        groups: Ranks in a shard group, over which one copy of the tables is spread: ``off`` (all
            ranks), ``auto`` (the number that makes a step shortest), or the number itself.
        layout: Of groups: contiguous, strided, or ``auto`` for the better one.
        sync: How replicas are kept together where there are several groups.
        depth: Batches begun at a time (`rowmesh.Pipeline`), or ``auto``: what makes a step
            shortest, if ``cost`` is given; else 2 on several hosts and 1 on one.
        merge: Whether a host asks for a row once for all its ranks, and sends its gradients added
            up: ``on``, ``off``, or ``auto``, if a step is at least 2.5 % shorter so.
        codecs: How vectors and gradients travel: fp32, fp16, bf16, int8, or as in
            ``forward=fp16,backward=bf16,dense=bf16``. All but fp32 are lossy; rows are placed as
            if all were fp32.
        allow_lossy: Whether to take bf16, or int8 for all but the dense layers, where a step is
            then at least 2.5 % shorter; ``codecs`` must not name others.
        on_progress: Called now and then with the share of the work done, from 0 to 1.

    Raises:
        InputError: If a word or a constrained table is unknown, or a table has no statistics.
        PlanError: If no placement obeys the constraints, or fits the memory of the ranks; or the
            model is sharded already.
    """
    check_unsharded(model, "rm.make_plan")
    warn_of_plain(model)
    configs = [c for _, _, members in named_collections(model) for c in members]
    tables, dense = blank_tables(model)
    return plan_tables(
        tables,
        topology,
        stats=stats or Stats.assume(configs, batch_size=batch_size),
        dense=dense,
        split=split,
        exchange=exchange,
        dedup=dedup,
        constraints=constraints,
        rates=rates,
        sparse=sparse,
        allow_inexact=allow_inexact,
        tiers=tiers,
        cost=cost,
        groups=groups,
        layout=layout,
        sync=sync,
        depth=depth,
        merge=merge,
        codecs=codecs,
        allow_lossy=allow_lossy,
        on_progress=on_progress,
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
    constraints: Constraints | None = None,
    rates: Rates | None = None,
    sparse: str = "rowwise_adagrad",
    allow_inexact: bool = False,
    tiers: str = "off",
    cost: DenseCost | None = None,
    groups: str | int = "off",
    layout: str = "auto",
    sync: Sync = _GRADIENTS,
    depth: str | int = 1,
    merge: str = "auto",
    codecs: str = "fp32",
    allow_lossy: bool = False,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Plan:
    """Fill in the tiers and exchanges of ``tables``; `make_plan` for tables without a model."""
    count = parse_tiers(tiers)
    if count != 0 and all(accesses.heat is None for accesses in stats.tables.values()):
        raise InputError(
            f"tiers {tiers!r} needs the accesses of single rows, which are not known: count "
            f"batches of the data, or give a profile"
        )
    names = [table.name for table in tables]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise PlanError(f"tables planned more than once: {twice}")
    if not isinstance(sync, Sync):
        raise InputError(f"sync must be an rm.Sync, as rm.Sync(mode='weights'), got {sync!r}")
    constraints = constraints or Constraints()
    problem = Problem(
        tables=tuple(tables),
        topology=topology,
        stats=stats,
        dense=dense,
        wishes=Wishes(split=split, exchange=exchange, dedup=dedup, allow_inexact=allow_inexact),
        constraints=constraints,
        rates=rates or Rates(),
        state=rule_state(sparse),
        limit=_limit(topology, constraints),
        hot=count,
        cost=cost,
        sync=sync,
        merge=parse_merge(merge),
    )
    constraints.check(tables, topology)
    meshes = list_meshes(topology, groups=groups, layout=layout)
    plan = choose_depth(problem, meshes, parse_depth(depth), on_progress=on_progress)
    plan = choose_codecs(
        plan,
        stats,
        codecs=codecs,
        allow_lossy=allow_lossy,
        rates=problem.rates,
        cost=cost,
        state=problem.state,
    )
    on_progress(1.0)
    total = expect_plan(plan, stats.tables, state=problem.state, rates=problem.rates)
    predicted = _predicted(total, topology, rates)
    return replace(plan, predicted=predicted)


def _limit(topology: Topology, constraints: Constraints) -> int | None:
    known = [topology.memory_bytes, constraints.max_bytes_per_rank]
    return min((limit for limit in known if limit is not None), default=None)


def _predicted(total: Load, topology: Topology, rates: Rates | None) -> Predicted:
    return Predicted(
        host_bytes=float(total.sent_host.mean()),
        cross_bytes=float(total.sent_cross.mean()),
        step_s=None if rates is None else step_seconds(total, topology=topology, rates=rates),
    )


def blank_tables(model: nn.Module) -> tuple[list[TablePlan], tuple[int, ...]]:
    """The tables of a model, not yet placed, and the elements of its dense buckets."""
    tables = [
        blank_table(
            config,
            path,
            trainable=is_trainable(module, config.name),
            weighted=is_weighted(module),
        )
        for path, module, members in named_collections(model)
        for config in members
    ]
    sizes = [p.numel() for p in dense_parameters(model) if p.requires_grad]
    return tables, bucket_elements(sizes)


def blank_table(
    config: TableConfig, path: str = "", *, trainable: bool = True, weighted: bool = False
) -> TablePlan:
    """A table of the collection at ``path``, not yet placed."""
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
