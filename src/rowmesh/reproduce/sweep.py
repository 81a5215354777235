"""Time over k: plans with more and more hot rows on one mesh, in turn, beside their model."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, plan_time
from rowmesh.data import SyntheticClicks
from rowmesh.placement import Plan
from rowmesh.placement.memory import RULE_STATES
from rowmesh.planners import HotRows, make_plan
from rowmesh.reproduce.compare import Contest, Told, compare
from rowmesh.stats import Stats
from rowmesh.tables import named_collections
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.config import RunConfig
from rowmesh.train.model import build_model

__all__ = ["Setting", "sweep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One curve of time over k.

    Args:
        config: The model and its data.
        dedup: Ask for each distinct row once.
        points: Values of k between 0 and all candidates.
        counted: Batches of rank 0 that the statistics are of.
        rounds: In each, every plan runs once.
        depth: Batches begun at a time.
    """

    config: RunConfig
    dedup: bool = True
    points: int = 8
    counted: int = 32
    rounds: int = 7
    depth: int = 2


def sweep(setting: Setting, mesh: Mesh, calibration: Calibration) -> dict[str, Any]:
    """Every plan's milliseconds, model and bytes; the same on all ranks.

    Plans: no hot rows, k on a geometric grid, every row on every rank, and the model's own where it
    is none of these.

    Collective:
        All ranks.
    """
    config = setting.config
    assert isinstance(config.data, SyntheticClicks)
    plans, chosen = on_rank_0(mesh, lambda: _plans(setting, mesh, calibration))
    rows = compare(Contest(config=config, rounds=setting.rounds), plans, mesh)
    assert chosen.hot is not None
    return {
        "hosts": mesh.topology.hosts,
        "local": mesh.topology.local,
        "alpha": config.data.alpha,
        "dedup": setting.dedup,
        "depth": setting.depth,
        "model": dataclasses.asdict(chosen.hot),
        "rows": [
            row | {"is_model": told.plan == chosen} for row, told in zip(rows, plans, strict=True)
        ],
    }


def _plans(setting: Setting, mesh: Mesh, calibration: Calibration) -> tuple[list[Told], Plan]:
    """Plans with the seconds of a step that the model tells; and the one that it chooses."""
    config, rates, state = setting.config, calibration.rates, RULE_STATES["rowwise_adagrad"]
    source = config.data
    model = build_model(config.model, source, seed=config.seed)
    tables = [t for _, _, members in named_collections(model) for t in members]
    first = list(itertools.islice(source.batches(rank=0, world=mesh.world), setting.counted))
    stats = Stats.from_batches(tables, (batch.sparse_features for batch in first))
    assert rates.dense is not None
    flops, parameters = count_dense(config, first[0])
    cost = rates.dense.scaled(flops=flops, parameters=parameters)
    cold = make_plan(
        model,
        mesh.topology,
        stats=stats,
        split="row_wise",
        exchange="rows",
        dedup=setting.dedup,
        rates=rates,
        cost=cost,
        depth=setting.depth,
    )
    hot = HotRows([cold], stats, rates=rates, cost=cost, state=state, per_host=False)
    grid = [round(hot.most ** (i / setting.points)) for i in range(1, setting.points + 1)]
    grid = [k for k in dict.fromkeys(grid) if k >= 64]
    named = [("cold", cold), *((f"k={k}", hot.choose(k)) for k in grid)]
    named += [("all", hot.replicate())]
    chosen = hot.choose(None)
    if chosen not in [plan for _, plan in named]:
        named.append(("model", chosen))
    told = [
        Told(
            name,
            plan,
            plan_time(plan, stats.tables, rates=rates, cost=cost, state=state).total_s,
        )
        for name, plan in named
    ]
    return told, chosen
