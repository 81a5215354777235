"""Time over k: plans with more and more hot rows on one mesh, in turn, beside their model."""

import dataclasses
import itertools
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, plan_time, predict
from rowmesh.data import SyntheticClicks
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.placement import Plan
from rowmesh.placement.memory import RULE_STATES, bytes_per_rank
from rowmesh.planners import HotRows, make_plan
from rowmesh.reproduce.collisions import share_of_collisions
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.shard import shard
from rowmesh.stats import Stats
from rowmesh.tables import named_collections
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.config import RunConfig
from rowmesh.train.model import build_model

__all__ = ["Setting", "sweep"]

_FIRST_STEP = 1_000  # of the batches that are timed; the statistics are of earlier ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One curve of time over k.

    Args:
        config: The model and its data.
        dedup: Ask for each distinct row once.
        points: Values of k between 0 and all candidates.
        counted: Batches of rank 0 that the statistics are of.
        rounds: In each, every plan runs once.
        steps: Of a plan in a round, after one that is not timed.
    """

    config: RunConfig
    dedup: bool = True
    points: int = 8
    counted: int = 32
    rounds: int = 7
    steps: int = 2


def sweep(setting: Setting, mesh: Mesh, calibration: Calibration) -> dict[str, Any]:
    """Every plan's milliseconds, model and bytes; the same on all ranks.

    Plans: no hot rows, k on a geometric grid, every row on every rank, and the model's own where it
    is none of these. They run round by round, in turn, forward and then backward through the list,
    on the same batches.

    Collective:
        All ranks.
    """
    config = setting.config
    assert isinstance(config.data, SyntheticClicks)
    plans, chosen = on_rank_0(mesh, lambda: _plans(setting, mesh, calibration))
    steps = range(_FIRST_STEP, _FIRST_STEP + setting.steps + 1)
    batches = [config.data.batch_at(mesh.rank, step) for step in steps]
    asked = [
        [config.data.batch_at(rank, step).sparse_features for rank in range(mesh.world)]
        for step in steps
    ]
    runs = [_Run(config, plan, mesh) for _, plan, _ in plans]
    exact = [run.check_bytes(batches[0], asked[0]) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for number in range(setting.rounds):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for i in order:
            runs[i].steps(batches[:1])
            times[i].append(runs[i].steps(batches[1:]) / setting.steps)
    rows = [
        {
            "name": name,
            "is_model": plan == chosen,
            "rows": _num_hot(plan),
            "sums": next((t.sums for x in plan.tables for t, _ in x.hot), ""),
            "mb_a_rank": max(bytes_per_rank(plan)) / 1e6,
            "told_ms": told * 1e3,
            "ms": [1e3 * t for t in measured],
            "median_ms": 1e3 * median(measured),
            "mb_across": _across(run.predicted, mesh),
            "collide": share_of_collisions(plan, asked),
            "bytes_are_exact": is_exact,
        }
        for (name, plan, told), measured, run, is_exact in zip(
            plans, times, runs, exact, strict=True
        )
    ]
    choice = chosen.hot
    assert choice is not None
    return {
        "hosts": mesh.topology.hosts,
        "local": mesh.topology.local,
        "alpha": config.data.alpha,
        "dedup": setting.dedup,
        "model": dataclasses.asdict(choice),
        "rows": rows,
    }


def _plans(
    setting: Setting, mesh: Mesh, calibration: Calibration
) -> tuple[list[tuple[str, Plan, float]], Plan]:
    """Names, plans and seconds of a step that the model tells; and the one that it chooses."""
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
    )
    hot = HotRows([cold], stats, rates=rates, cost=cost, state=state)
    grid = [round(hot.most ** (i / setting.points)) for i in range(1, setting.points + 1)]
    grid = [k for k in dict.fromkeys(grid) if k >= 64]
    named = [("cold", cold), *((f"k={k}", hot.choose(k)) for k in grid)]
    named += [("all", hot.replicate())]
    chosen = hot.choose(None)
    if chosen not in [plan for _, plan in named]:
        named.append(("model", chosen))
    told = [
        (name, plan, plan_time(plan, stats.tables, rates=rates, cost=cost, state=state).total_s)
        for name, plan in named
    ]
    return told, chosen


class _Run:
    """A model under one plan."""

    def __init__(self, config: RunConfig, plan: Plan, mesh: Mesh) -> None:
        self._config, self._plan, self._mesh = config, plan, mesh
        model = build_model(config.model, config.data, seed=config.seed, device=mesh.device)
        self._model = shard(model, plan, mesh)
        settings = config.optimiser
        self._optimizer = Optimizer(self._model, dense=settings.make_dense, sparse=settings.rule)
        self.predicted: list[dict[str, dict[str, int]]] = []

    def check_bytes(self, batch: Batch, asked: list[KeyedJaggedTensor]) -> bool:
        """One step; whether every rank sent what `predict` says of the batches of all."""
        mesh = self._mesh
        self.predicted = predict(self._plan, asked)
        self.steps([batch])
        mesh.ledger.reset()
        self._step(batch)
        sent = mesh.ledger.by_edge()
        return all(mesh.gather_objects(sent == self.predicted[mesh.rank], edge=None))

    def steps(self, batches: list[Batch]) -> float:
        """Seconds from when all ranks begin to when all have ended."""
        self._mesh.total(0.0, edge=None)
        start = time.perf_counter()
        for batch in batches:
            self._step(batch)
        self._mesh.total(0.0, edge=None)
        return time.perf_counter() - start

    def _step(self, batch: Batch) -> None:
        self._mesh.mean(self._model(batch)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _num_hot(plan: Plan) -> int:
    copied = [t.num_embeddings for t in plan.tables if t.rest.copies == "world"]
    return sum(copied) + sum(rows.count for t in plan.tables for _, rows in t.hot)


def _across(predicted: list[dict[str, dict[str, int]]], mesh: Mesh) -> dict[str, float]:
    """MB that a host sends to others in a step, by edge; mean over hosts."""
    found: dict[str, float] = {}
    for ledger in predicted:
        for edge, links in ledger.items():
            found[edge] = found.get(edge, 0.0) + links.get("cross", 0) / 1e6 / mesh.topology.hosts
    return found
