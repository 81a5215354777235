"""What shard groups cost: step time of every size and layout on emulated hosts, and bytes."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, plan_time
from rowmesh.data import SyntheticClicks
from rowmesh.errors import InputError, check_range
from rowmesh.lab import parse_rate
from rowmesh.placement.rules import MAX_DEPTH
from rowmesh.planners import list_meshes, make_plan, parse_sync
from rowmesh.reproduce.compare import Contest, Told, compare
from rowmesh.reproduce.hosts import measure_on_hosts
from rowmesh.stats import Stats
from rowmesh.tables import named_collections
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.config import RunConfig
from rowmesh.train.model import ModelConfig, build_model

__all__ = ["Speed", "compare_groups", "config_of", "measure_speed", "steps_of"]

_COUNTED = 32  # batches of rank 0 that statistics are of


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What is timed: on every shape at every rate, every size and layout of groups and sync.

    Args:
        shapes: Hosts and ranks on each.
        rates: Of a host's link.
        syncs: As `rowmesh plan --sync` takes them.
        alpha: Zipf exponent of the ids.
        cap: Most rows of a table of Criteo's sizes.
        dim: Columns of the tables.
        batch: Samples of a rank.
        rounds: In each every plan runs once.
        depth: Batches begun at a time.
    """

    shapes: tuple[tuple[int, int], ...] = ((2, 2), (4, 1))
    rates: tuple[str, ...] = ("200mbit",)
    syncs: tuple[str, ...] = ("gradients", "weights:4")
    alpha: float = 1.05
    cap: int = 100_000
    dim: int = 64
    batch: int = 2048
    rounds: int = 5
    depth: int = 2

    def __post_init__(self) -> None:
        for rate in self.rates:
            if parse_rate(rate) is None:
                raise InputError(f"rate {rate!r} is none: groups are about slow links")
        for sync in self.syncs:
            parse_sync(sync)
        for name in ("cap", "dim", "batch", "rounds"):
            check_range(name, getattr(self, name), 1)
        check_range("alpha", self.alpha, 0, 100)
        check_range("depth", self.depth, 1, MAX_DEPTH)


def config_of(asked: Speed) -> RunConfig:
    """The model and its data: as `rowmesh reproduce p2res` has them."""
    return RunConfig(
        data=SyntheticClicks(cap=asked.cap, alpha=asked.alpha, batch_size=asked.batch),
        model=ModelConfig(dim=asked.dim, dense_layers=(512, 256), over_layers=(512, 512, 256)),
    )


def steps_of(asked: Speed) -> int:
    """Steps of a plan in a round: as many syncs in those of every plan."""
    return math.lcm(2, *(parse_sync(sync).period for sync in asked.syncs))


def compare_groups(asked: Speed, mesh: Mesh, calibration: Calibration) -> dict[str, Any]:
    """Every plan's milliseconds, model and bytes; the same on all ranks.

    Collective:
        All ranks.
    """
    config = config_of(asked)
    plans = on_rank_0(mesh, lambda: _plans(asked, mesh, calibration))
    contest = Contest(config=config, rounds=asked.rounds, steps=steps_of(asked))
    rows = compare(contest, plans, mesh)
    of_plan = [
        {
            "size": told.plan.mesh.group,
            "layout": told.plan.mesh.layout,
            "sync": told.name.rpartition(" ")[2],
        }
        for told in plans
    ]
    return {
        "hosts": mesh.topology.hosts,
        "local": mesh.topology.local,
        "alpha": asked.alpha,
        "depth": asked.depth,
        "rows": [row | more for row, more in zip(rows, of_plan, strict=True)],
    }


def _plans(asked: Speed, mesh: Mesh, calibration: Calibration) -> list[Told]:
    """A plan for every size, layout and sync, with the seconds that the model tells."""
    config, rates = config_of(asked), calibration.rates
    model = build_model(config.model, config.data, seed=config.seed)
    tables = [t for _, _, members in named_collections(model) for t in members]
    source = config.data.batches(rank=0, world=mesh.world)
    first = list(itertools.islice(source, _COUNTED))
    stats = Stats.from_batches(tables, (batch.sparse_features for batch in first))
    assert rates.dense is not None
    flops, parameters = count_dense(config, first[0])
    cost = rates.dense.scaled(flops=flops, parameters=parameters)
    told = []
    for shape in list_meshes(mesh.topology, groups="auto", layout="auto"):
        syncs = asked.syncs if shape.group < mesh.world else ("none",)
        for sync in syncs:
            plan = make_plan(
                model,
                mesh.topology,
                stats=stats,
                rates=rates,
                cost=cost,
                depth=asked.depth,
                groups=shape.group,
                layout=shape.layout,
                sync=parse_sync("gradients" if sync == "none" else sync),
            )
            seconds = plan_time(plan, stats.tables, rates=rates, cost=cost).total_s
            told.append(Told(f"N={shape.group} {shape.layout} {sync}", plan, seconds))
    return told


def measure_speed(
    what: Speed, *, on_stage: Callable[[str], None] = lambda stage: None
) -> Iterator[dict[str, Any]]:
    """`compare_groups` of every shape at every rate, one after the other.

    Raises:
        InputError: Where emulated hosts are not permitted.
        LabError: If the ranks of a shape fail.
    """
    return measure_on_hosts(
        "rowmesh.reproduce.two_d_rank",
        json.dumps(dataclasses.asdict(what)),
        shapes=what.shapes,
        rates=what.rates,
        on_stage=on_stage,
    )
