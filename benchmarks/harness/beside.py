"""Plans of one model side by side on one mesh: time, messages and bytes of each."""

import itertools
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, DenseCost, Rates, plan_time, predict
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.placement import Copies, Plan, TablePlan
from rowmesh.placement.hot import hot_ids
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.planners import make_plan
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.pipeline import Pipeline
from rowmesh.runtime.shard import shard
from rowmesh.stats import Stats
from rowmesh.tables import TableConfig, named_collections
from rowmesh.topology import Topology
from rowmesh.trace.summary import summarise
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.config import RunConfig
from rowmesh.train.model import build_model

from .figures import interval
from .turns import turns

__all__ = [
    *("Contest", "Known", "Told"),
    *("build", "compare", "count_collisions", "share_of_collisions"),
]

_FIRST_STEP = 1_000  # of the batches that are timed; statistics are of earlier ones
_Ledgers = list[dict[str, dict[str, int]]]  # of every rank


class _Drawn(Protocol):
    """Data whose batches can be drawn one by one."""

    def batch_at(self, rank: int, step: int) -> Batch:
        """The batch of a rank at a step."""


@dataclass(frozen=True, slots=True)
class Told:
    """A plan, its name, and the seconds of a step that the model tells."""

    name: str
    plan: Plan
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What plans of a model on a mesh are made from, and told by: counts of batches, and rates."""

    model: Any
    topology: Topology
    stats: Stats
    rates: Rates
    cost: DenseCost

    @classmethod
    def of(
        cls, config: RunConfig, mesh: Mesh, calibration: Calibration, *, counted: int = 32
    ) -> "Known":
        """By the first ``counted`` batches of rank 0."""
        model, tables = build(config)
        source = config.data.batches(rank=0, world=mesh.world)
        first = list(itertools.islice(source, counted))
        stats = Stats.from_batches(tables, (batch.sparse_features for batch in first))
        flops, parameters = count_dense(config, first[0])
        assert calibration.rates.dense is not None
        cost = calibration.rates.dense.scaled(flops=flops, parameters=parameters)
        return cls(
            model=model, topology=mesh.topology, stats=stats, rates=calibration.rates, cost=cost
        )

    def plan(self, **words: Any) -> Plan:
        """As of `make_plan`."""
        known = {"stats": self.stats, "rates": self.rates, "cost": self.cost}
        return make_plan(self.model, self.topology, **known, **words)

    def tell(self, name: str, plan: Plan) -> Told:
        """The plan with the seconds of a step by the calibrated model."""
        found = plan_time(plan, self.stats.tables, rates=self.rates, cost=self.cost)
        return Told(name, plan, found.total_s)


def build(config: RunConfig) -> tuple[Any, list[TableConfig]]:
    """The model of a run, and its tables."""
    model = build_model(config.model, config.data, seed=config.seed)
    return model, [t for _, _, members in named_collections(model) for t in members]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """How plans are compared.

    Args:
        config: The model and its data.
        rounds: In each, every plan runs once.
        steps: Of a plan in a round, after one that is not timed; with replicas whose weights are
            averaged, a multiple of the plans' periods.
    """

    config: RunConfig
    rounds: int = 7
    steps: int = 2


def compare(contest: Contest, plans: Sequence[Told], mesh: Mesh) -> list[dict[str, Any]]:
    """Every plan's milliseconds, messages and bytes; the same on all ranks.

    They run in `turns`, each in a loop of its own over the same batches, as deep as its plan.
    Then a few steps of each are traced.

    Collective:
        All ranks.
    """
    source: _Drawn = contest.config.data  # type: ignore[assignment]
    numbers = range(_FIRST_STEP, _FIRST_STEP + contest.steps + 1)
    batches = [source.batch_at(mesh.rank, step) for step in numbers]
    asked = [
        [source.batch_at(rank, step).sparse_features for rank in range(mesh.world)]
        for step in numbers
    ]
    runs = [_Run(contest.config, told.plan, mesh, batches) for told in plans]
    exact = [run.check_bytes(asked[0]) for run in runs]

    def measure(i: int) -> float:
        runs[i].steps(1)
        return 1e3 * runs[i].steps(contest.steps) / contest.steps

    rounds = list(itertools.islice(turns(range(len(runs)), measure), contest.rounds))
    times = [[found[i] for found in rounds] for i in range(len(runs))]
    flights = [run.trace(contest.steps) for run in runs]
    for run in runs:
        run.close()
    return [
        {
            "name": told.name,
            "rows": _num_hot(told.plan, Copies.WORLD),
            "host_rows": _num_hot(told.plan, Copies.HOST),
            "sums": next((t.sums for x in told.plan.tables for t, _ in x.hot), ""),
            "mb_a_rank": max(bytes_per_rank(told.plan)) / 1e6,
            "told_ms": told.step_s * 1e3,
            "ms": measured,
            "median_ms": interval(measured).mid,
            "mb_across": _sent(run.predicted, mesh, "cross"),
            "mb_inside": _sent(run.predicted, mesh, "host"),
            "in_flight_ms": flight[0],
            "exposed_ms": flight[1],
            "collide": share_of_collisions(told.plan, asked),
            "bytes_are_exact": is_exact,
        }
        for told, measured, run, is_exact, flight in zip(
            plans, times, runs, exact, flights, strict=True
        )
    ]


class _Run:
    """A model under one plan, and its loop, which goes round the batches."""

    def __init__(self, config: RunConfig, plan: Plan, mesh: Mesh, batches: Sequence[Batch]) -> None:
        self._plan, self._mesh, self._first = plan, mesh, batches[0]
        model = build_model(config.model, config.data, seed=config.seed, device=mesh.device)
        self._model = shard(model, plan, mesh)
        settings = config.optimiser
        self._optimizer = Optimizer(self._model, dense=settings.make_dense, sparse=settings.rule)
        self.predicted: list[_Ledgers] = []  # of the steps from one sync of replicas to the next
        self._loop = self._batches(itertools.cycle(batches))

    def _batches(self, loader: Iterable[Batch]) -> Generator[Batch]:
        yield from Pipeline(self._model).batches(loader)

    def close(self) -> None:
        """End its loop."""
        self._loop.close()

    def check_bytes(self, asked: list[KeyedJaggedTensor]) -> bool:
        """A loop from one sync to the one after the next; whether every rank sent what `predict`
        says of all batches."""
        mesh, plan = self._mesh, self._plan
        period = plan.sync.period if plan.has_replicas else 1
        self.predicted = [predict(plan, asked, earlier=[asked] * n) for n in range(period)]
        last = predict(plan, asked, earlier=[asked] * (period - 1), is_last=True)
        mesh.ledger.reset()
        for batch in self._batches([self._first] * (2 * period)):
            self._step(batch)
        self._finish()
        expected: Counter[tuple[str, str]] = Counter()
        for ledgers in (*self.predicted, *self.predicted[:-1], last):
            expected.update(_flat(ledgers[mesh.rank]))
        is_exact = _flat(mesh.ledger.by_edge()) == expected
        return all(mesh.gather_objects(is_exact, edge=None))

    def steps(self, count: int) -> float:
        """Seconds from when all ranks begin to when all have ended, and what follows too."""
        self._mesh.total(0.0, edge=None)
        start = time.perf_counter()
        for _ in range(count):
            self._step(next(self._loop))
        self._finish()
        self._mesh.total(0.0, edge=None)
        return time.perf_counter() - start

    def trace(self, count: int) -> tuple[float, float]:
        """Milliseconds of a step with a message in flight, and with nothing to do but wait."""
        mesh = self._mesh
        for number in range(count):
            mesh.total(0.0, edge=None)
            mesh.trace.begin_step(number)
            self._step(next(self._loop))
            mesh.trace.end_step()
        recording = mesh.trace.take(rank=mesh.rank, host=mesh.topology.host(mesh.rank))
        summary = summarise(mesh.gather_objects(recording, edge=None))
        assert summary is not None
        flights = summary.communication[0]
        return flights.in_flight_ms, flights.exposed_ms

    def _finish(self) -> None:
        """What a step left under way is of that step."""
        for engine in sharded_engines(self._model):
            assert engine.replicas is not None
            engine.replicas.finish()
            engine.rest.finish()

    def _step(self, batch: Batch) -> None:
        self._mesh.mean(self._model(batch)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _flat(ledger: dict[str, dict[str, int]]) -> Counter[tuple[str, str]]:
    return Counter({(edge, at): n for edge, links in ledger.items() for at, n in links.items()})


def _num_hot(plan: Plan, copies: Copies) -> int:
    whole = [t.num_embeddings for t in plan.tables if t.rest.copies is copies]
    hot = [rows.count for t in plan.tables for tier, rows in t.hot if tier.copies is copies]
    return sum(whole) + sum(hot)


def _sent(predicted: list[_Ledgers], mesh: Mesh, link: str) -> dict[str, float]:
    """MB that a host sends over such links in a step, by edge; mean over hosts and steps."""
    found: dict[str, float] = {}
    count = 1e6 * mesh.topology.hosts * len(predicted)
    for ledger in (ledger for ledgers in predicted for ledger in ledgers):
        for edge, links in ledger.items():
            found[edge] = found.get(edge, 0.0) + links.get(link, 0) / count
    return found


def share_of_collisions(plan: Plan, steps: Sequence[Sequence[KeyedJaggedTensor]]) -> float | None:
    """Of the distinct rows without a copy that a rank asks for, those in the step before it.

    ``sum |F(r, i+1) & U(i)| / sum |F(r, i+1)|``, with ``F(r, i)`` the rows that rank r has to
    fetch in step i, and ``U(i)`` those that any rank asks for in it, over all tables, ranks and
    pairs of consecutive steps.

    Args:
        plan: Whose hot rows, and tables on every rank, are read where they are needed.
        steps: Consecutive ones; for each a batch of every rank.

    Returns:
        None if nothing is fetched.
    """
    late, fetched = count_collisions(plan, steps)
    return late / fetched if fetched else None


def count_collisions(plan: Plan, steps: Sequence[Sequence[KeyedJaggedTensor]]) -> tuple[int, int]:
    """The two sums of `share_of_collisions`: late rows, and rows to fetch."""
    late = fetched = 0
    for table in plan.tables:
        if table.rest.copies is Copies.WORLD:
            continue
        asked = [[_cold_rows(table, batch) for batch in step] for step in steps]
        for before, after in itertools.pairwise(asked):
            updated = np.unique(np.concatenate(before))
            fetched += sum(len(rows) for rows in after)
            late += sum(int(np.isin(rows, updated).sum()) for rows in after)
    return late, fetched


def _cold_rows(table: TablePlan, batch: KeyedJaggedTensor) -> NDArray[np.int64]:
    rows = np.unique(np.concatenate([batch[f].values().numpy() for f in table.feature_names]))
    for _, hot in table.hot:
        rows = np.setdiff1d(rows, hot_ids(hot, where=f"table {table.name!r}"), assume_unique=True)
    return rows
