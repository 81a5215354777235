"""The plan of a run: read from a file, or made from what the first batches ask for."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from rowmesh.comm.mesh import Mesh
from rowmesh.cost import load_calibration
from rowmesh.data import ItemSequences, Source, SyntheticClicks, SyntheticSequences
from rowmesh.errors import InputError, PlanError
from rowmesh.placement import Plan, load_plan
from rowmesh.placement.codecs import parse_codecs
from rowmesh.planners import (
    Constraints,
    make_plan,
    parse_allow,
    parse_depth,
    parse_groups,
    parse_layout,
    parse_merge,
    parse_sync,
    parse_tiers,
)
from rowmesh.profile import load_profile
from rowmesh.stats import Stats
from rowmesh.tables import TableConfig, named_collections
from rowmesh.topology import Topology
from rowmesh.train.machine import measure_memory

__all__ = [
    "PlanConfig",
    "assume_stats",
    "check_plan",
    "count_accesses",
    "measured",
    "plan_run",
    "read_plan",
    "read_profile",
]


_LEAST_BATCHES = 16  # to tell hot rows from lucky ones
_ASSUMED_BATCH = 2048  # of data whose ranks are not known


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Where rows live and how they travel.

    Args:
        split, exchange, allow_inexact, constraints: As for `make_plan`.
        tiers: Hot rows, copied to every rank or host: off, auto, or hot:K; as for `make_plan`.
        groups: Ranks in a shard group: off for all, auto, or the number; as for `make_plan`.
        layout: Of groups: auto, contiguous or strided.
        sync: How replicas of groups are kept together: gradients, weights, weights:4 (every 4
            steps), weights:4:dense, moments-first:4.
        depth: Batches begun at a time, from 1 to 8, or auto: above 1 messages travel ahead of
            their forward, and bits stay as they are.
        merge: Whether a host asks for a row once for all its ranks: auto, on or off; as for
            `make_plan`.
        codecs: How vectors and gradients travel: fp32, or lossy fp16, bf16, int8, or as in
            forward=fp16,backward=bf16; as for `make_plan`.
        allow: exact, or lossy: then codecs are taken where they pay.
        refresh: Steps after which hot rows are chosen again from the last 32 batches of rank 0,
            and moved; None leaves them as planned.
        batches: Batches of rank 0 whose accesses are counted; 0 assumes Zipf ids. With hot rows
            at least 16 are counted.
        profile: A file of `rowmesh profile` on this data and batch size, used instead.
        file: A plan.json to use as it is; of the other settings only ``tiers`` for ``refresh`` and
            ``topology`` then count.
        topology: A topology.json of `rowmesh calibrate` on these hosts and ranks: the planner
            uses its speeds, and the run prints how long a step should take.

    Raises:
        InputError: If a number is out of range, or a word of groups or codecs is unknown.
    """

    split: str = "auto"
    exchange: str = "auto"
    allow_inexact: bool = False
    constraints: Constraints = field(default_factory=Constraints)
    tiers: str = "off"
    groups: int | str = "off"
    layout: str = "auto"
    sync: str = "gradients"
    depth: int | str = "auto"
    merge: str = "auto"
    codecs: str = "fp32"
    allow: str = "exact"
    refresh: int | None = None
    batches: int = 4
    profile: str | None = None
    file: str | None = None
    topology: str | None = None

    def __post_init__(self) -> None:
        for name, parse in (
            ("groups", parse_groups),
            ("layout", parse_layout),
            ("sync", parse_sync),
            ("depth", parse_depth),
            ("merge", parse_merge),
            ("codecs", parse_codecs),
            ("allow", parse_allow),
        ):
            try:
                parse(getattr(self, name))
            except InputError as error:
                raise InputError(f"plan.{name}: {error}") from None
        if self.batches < 0:
            raise InputError(f"plan.batches is {self.batches}, but must be at least 0")
        if self.refresh is not None and self.refresh < 1:
            raise InputError(f"plan.refresh is {self.refresh}, but must be at least 1")
        if self.refresh is not None and parse_tiers(self.tiers) == 0:
            raise InputError(
                f"plan.refresh is {self.refresh}, but plan.tiers is off: set plan.tiers to auto or "
                f"hot:K"
            )
        if parse_tiers(self.tiers) != 0 and not self.batches and self.profile is None:
            raise InputError(
                f"plan.tiers is {self.tiers!r}, which needs plan.batches above 0, or a plan.profile"
            )


def plan_run(
    config: PlanConfig,
    model: nn.Module,
    source: Source,
    topology: Topology,
    *,
    sparse: str = "rowwise_adagrad",
    dense: tuple[float, float] | None = None,
) -> Plan:
    """The plan of a run whose tables learn by the rule ``sparse``.

    ``dense`` are flops and parameters of its dense layers, if they are known.

    Raises:
        InputError: If a word of the settings or a constrained table is unknown.
        PlanError: If the file is no valid plan or for another topology, or memory is short.
    """
    if config.file is not None:
        return read_plan(config.file, topology)
    stats = count_accesses(config, model, source, topology)
    return _make(config, model, topology, stats, sparse, dense)


def check_plan(config: PlanConfig, model: nn.Module, topology: Topology) -> None:
    """Raise what `plan_run` would raise, as far as it can be told without data or mesh."""
    if config.topology is not None:
        load_calibration(config.topology)
    if config.file is not None:
        load_plan(config.file)
    else:
        if config.profile is not None:
            read_profile(config.profile, list(_tables(model)))
        # The file may be of other ranks than are known here, groups too, and hot rows need data.
        groups = config.groups if topology.world > 1 else "off"
        known = replace(config, topology=None, tiers="off", refresh=None, groups=groups)
        _make(known, model, topology, None, "rowwise_adagrad")


def measured(mesh: Mesh) -> Topology:
    """The mesh's topology with the memory of its smallest host, where ranks compute on CPU.

    Collective:
        All ranks.
    """
    topology = mesh.topology
    mine = measure_memory(topology.local) if mesh.device.type == "cpu" else None
    known = [found for found in mesh.gather_objects(mine) if found is not None]
    return replace(topology, memory_bytes=min(known, default=None))


def _make(
    config: PlanConfig,
    model: nn.Module,
    topology: Topology,
    stats: Stats | None,
    sparse: str,
    dense: tuple[float, float] | None = None,
) -> Plan:
    calibration, cost = None, None
    if config.topology is not None:
        calibration = load_calibration(config.topology, topology=topology)
        timed = calibration.rates.dense
        if timed is not None and dense is not None:
            cost = timed.scaled(flops=dense[0], parameters=dense[1])
    return make_plan(
        model,
        topology,
        stats=stats,
        split=config.split,
        exchange=config.exchange,
        constraints=config.constraints,
        rates=None if calibration is None else calibration.rates,
        sparse=sparse,
        allow_inexact=config.allow_inexact,
        tiers=config.tiers,
        cost=cost,
        groups=config.groups,
        layout=config.layout,
        sync=parse_sync(config.sync),
        depth=config.depth,
        merge=config.merge,
        codecs=config.codecs,
        allow_lossy=parse_allow(config.allow),
    )


def read_plan(file: str, topology: Topology) -> Plan:
    """The plan in ``file``, if it is for ``topology``.

    Raises:
        PlanError: If it is not, or the file holds no valid plan.
    """
    plan = load_plan(file)
    if plan.fingerprint != topology.fingerprint():
        raise PlanError(
            f"{file} is a plan for {plan.mesh.hosts} hosts x {plan.mesh.local} ranks, but this run "
            f"has {topology.hosts} x {topology.local}: start as many ranks, or leave out the plan"
        )
    return plan


def read_profile(
    file: str, tables: Sequence[TableConfig], *, batch_size: int | None = None
) -> Stats:
    """The accesses that `rowmesh profile` wrote to ``file``.

    Raises:
        InputError: If it is no profile, not of these tables, or of another batch size.
    """
    profile = load_profile(file)
    try:
        return profile.stats(tables, batch_size=batch_size)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _tables(model: nn.Module) -> Iterator[TableConfig]:
    return (table for _, _, members in named_collections(model) for table in members)


def assume_stats(model: nn.Module, source: Source) -> Stats:
    """Accesses of a rank if ids are Zipf: by the source's own law if it is synthetic.

    Histories are as long as the source's are in the mean.
    """
    tables = list(_tables(model))
    if isinstance(source, ItemSequences | SyntheticSequences):
        requests = {"item": source.mean_requests / 2}  # of history and of candidate
        if isinstance(source, ItemSequences):
            return Stats.assume(tables, batch_size=_ASSUMED_BATCH, pooling_factors=requests)
        return Stats.assume(
            tables, batch_size=source.batch_size, pooling_factors=requests, alpha=source.alpha
        )
    if not isinstance(source, SyntheticClicks):
        return Stats.assume(tables, batch_size=_ASSUMED_BATCH)
    factors = zip((t.name for t in tables), map(float, source.pooling_factors), strict=True)
    return Stats.assume(
        tables, batch_size=source.batch_size, pooling_factors=dict(factors), alpha=source.alpha
    )


def count_accesses(
    config: PlanConfig, model: nn.Module, source: Source, topology: Topology
) -> Stats:
    """Accesses of a profile, of the first batches of rank 0, or assumed ones, as is set.

    Raises:
        InputError: If the profile is not of these tables, or of another batch size.
    """
    if config.profile is None and not config.batches:
        return assume_stats(model, source)
    tables, batches = list(_tables(model)), source.batches(rank=0, world=topology.world)
    if config.profile is not None:
        (first,) = itertools.islice(batches, 1)
        size = first.sparse_features.stride()
        return read_profile(config.profile, tables, batch_size=size)
    least = 0 if parse_tiers(config.tiers) == 0 else _LEAST_BATCHES
    chosen = itertools.islice(batches, max(config.batches, least))
    return Stats.from_batches(tables, (batch.sparse_features for batch in chosen))
