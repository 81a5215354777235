"""The plan of a run: read from a file, or made from what the first batches ask for."""

import itertools
from dataclasses import dataclass, field, replace

from torch import nn

from rowmesh.comm.mesh import Mesh
from rowmesh.cost import load_calibration
from rowmesh.data import Source, SyntheticClicks
from rowmesh.errors import InputError, PlanError
from rowmesh.placement import Plan, load_plan
from rowmesh.planners import Constraints, make_plan
from rowmesh.stats import Stats
from rowmesh.tables import named_collections
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
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Where rows live and how they travel.

    Args:
        split, exchange, allow_inexact, constraints: As for `make_plan`.
        batches: Batches of rank 0 whose accesses are counted; 0 assumes Zipf ids.
        file: A plan.json to use as it is; the other settings then do not count.
        topology: A topology.json of `rowmesh calibrate` on these hosts and ranks: the planner
            uses its speeds, and the run prints how long a step should take.

    Raises:
        InputError: If a number is out of range.
    """

    split: str = "auto"
    exchange: str = "auto"
    allow_inexact: bool = False
    constraints: Constraints = field(default_factory=Constraints)
    batches: int = 4
    file: str | None = None
    topology: str | None = None

    def __post_init__(self) -> None:
        if self.batches < 0:
            raise InputError(f"plan.batches is {self.batches}, but must be at least 0")


def plan_run(
    config: PlanConfig,
    model: nn.Module,
    source: Source,
    topology: Topology,
    *,
    sparse: str = "rowwise_adagrad",
) -> Plan:
    """The plan of a run whose tables learn by the rule ``sparse``.

    Raises:
        InputError: If a word of the settings or a constrained table is unknown.
        PlanError: If the file is no valid plan or for another topology, or memory is short.
    """
    if config.file is not None:
        return read_plan(config.file, topology)
    return _make(config, model, topology, count_accesses(config, model, source, topology), sparse)


def check_plan(config: PlanConfig, model: nn.Module, topology: Topology) -> None:
    """Raise what `plan_run` would raise, as far as it can be told without data or mesh."""
    if config.topology is not None:
        load_calibration(config.topology)
    if config.file is not None:
        load_plan(config.file)
    else:
        blank = replace(config, topology=None)  # it may be of other ranks than are known here
        _make(blank, model, topology, None, "rowwise_adagrad")


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
    config: PlanConfig, model: nn.Module, topology: Topology, stats: Stats | None, sparse: str
) -> Plan:
    calibration = None
    if config.topology is not None:
        calibration = load_calibration(config.topology, topology=topology)
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


def assume_stats(model: nn.Module, source: Source) -> Stats:
    """Accesses of a rank if ids are Zipf: by the source's own law if it is synthetic."""
    tables = [table for _, _, members in named_collections(model) for table in members]
    if not isinstance(source, SyntheticClicks):
        return Stats.assume(tables, batch_size=2048)
    factors = zip((t.name for t in tables), map(float, source.pooling_factors), strict=True)
    return Stats.assume(
        tables, batch_size=source.batch_size, pooling_factors=dict(factors), alpha=source.alpha
    )


def count_accesses(
    config: PlanConfig, model: nn.Module, source: Source, topology: Topology
) -> Stats:
    """Accesses in the first batches of rank 0, as many as the settings say, or assumed ones."""
    if not config.batches:
        return assume_stats(model, source)
    tables = [table for _, _, members in named_collections(model) for table in members]
    batches = source.batches(rank=0, world=topology.world)
    chosen = itertools.islice(batches, config.batches)
    return Stats.from_batches(tables, (batch.sparse_features for batch in chosen))
