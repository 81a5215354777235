"""Three tiers of a sequence table at budgets of memory: bytes, communication and step time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from benchmarks.harness.beside import Contest, Known, Told, compare
from benchmarks.harness.hosts import check_experiment
from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, Rates
from rowmesh.data import SyntheticSequences
from rowmesh.errors import check_range
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Plan
from rowmesh.placement.memory import RULE_STATES, bytes_per_rank
from rowmesh.planners import RowTiers
from rowmesh.stats import Stats
from rowmesh.train.config import RunConfig
from rowmesh.train.model import ModelConfig

__all__ = ["Tiers", "merged_bytes", "within"]

_COUNTED = 32  # batches of rank 0 that plans are made from
_ID = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """What is measured: with and without dedup, row-wise, hot rows alone and three tiers."""

    shapes: Annotated[tuple[tuple[int, int], ...], "hosts x ranks on each"] = ((2, 2), (4, 1))
    rates: Annotated[tuple[str, ...], "of a host's link"] = ("200mbit",)
    dedup: Annotated[tuple[bool, ...], "ask for each distinct row once"] = (False, True)
    budgets: Annotated[tuple[float, ...], "memory of a rank, relative to row-wise"] = (
        *(1.0, 1.1, 1.25, 1.5),
    )
    alpha: Annotated[float, "Zipf exponent of the items"] = 1.2
    items: Annotated[int, "rows of the table"] = 200_000
    dim: Annotated[int, "columns of the table"] = 64
    batch: Annotated[int, "samples per rank and step"] = 512
    length: Annotated[float, "mean items of a history"] = 20.0
    rounds: Annotated[int, "every plan runs once in a round"] = 5
    depth: Annotated[int, "batches begun at a time"] = 2

    def __post_init__(self) -> None:
        check_experiment(self, about="tiers", least_1=("dim", "batch", "length"))
        for budget in self.budgets:
            check_range("budget", budget, 1.0, 1e6)
        check_range("items", self.items, 2)

    def config(self, *, drift_every: int | None = None) -> RunConfig:
        """The sequence model and its data."""
        data = SyntheticSequences(
            num_items=self.items,
            alpha=self.alpha,
            mean_length=self.length,
            batch_size=self.batch,
            drift_every=drift_every,
        )
        return RunConfig(data=data, model=ModelConfig(kind="din", dim=self.dim))

    def cases(self) -> list[bool]:
        """Dedup of every table."""
        return list(self.dedup)

    def measure(self, case: bool, mesh: Mesh, calibration: Calibration) -> dict[str, Any]:
        """Row-wise, hot rows alone and three tiers at every budget; the same on all ranks.

        Collective:
            All ranks.
        """
        config = self.config()

        def choose() -> tuple[list[Told], float]:
            plans = _plans(self, Known.of(config, mesh, calibration, counted=_COUNTED), case)
            batches = [
                next(config.data.batches(rank=rank, world=mesh.world, start=_COUNTED))
                for rank in range(mesh.world)
            ]
            return plans, merged_bytes(plans[0].plan, [b.sparse_features for b in batches]) / 1e6

        plans, merged = on_rank_0(mesh, choose)
        rows = compare(Contest(config=config, rounds=self.rounds), plans, mesh)
        about = {"alpha": self.alpha, "dedup": case, "depth": self.depth}
        return about | {"merged_mb": merged, "rows": rows}


def _plans(asked: Tiers, known: Known, dedup: bool) -> list[Told]:
    """Row-wise first."""
    row_wise = known.plan(split="row_wise", exchange="rows", dedup=dedup, depth=asked.depth)
    named = [("row-wise", row_wise)]
    kinds = [("hot", False, 0.0), ("hot, forward", False, 1.0)]
    if known.topology.local > 1:
        kinds += [("three tiers", True, 0.0), ("three tiers, forward", True, 1.0)]
    for budget in asked.budgets:
        for word, per_host, hidden in kinds:
            plan = within(
                row_wise, known.stats, known.rates, budget, per_host=per_host, hidden=hidden
            )
            if plan not in [other for _, other in named]:
                named.append((f"{word} {budget}x", plan))
    return [known.tell(name, plan) for name, plan in named]


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
            state=RULE_STATES["rowwise_adagrad"],
            sums=sums,
            per_host=per_host,
            hidden=hidden,
        )
        price = tiers.price_within((budget - 1.0) * held)
        found.append((tiers.seconds_at(price), tiers.at(price)))
    return min(found, key=lambda pair: pair[0])[1]


def merged_bytes(plan: Plan, batches: Sequence[KeyedJaggedTensor]) -> float:
    """Mean bytes that a host sends in a step if a row crosses once for a host, not for a rank.

    Sum over hosts h and rows r that any rank of h asks for and whose home is elsewhere of
    ``id + gradient`` sent by h and ``row`` sent by the home's host, over H.

    Args:
        plan: Without hot rows, its exchange ``rows``.
        batches: Of every rank.
    """
    topology = plan.mesh.topology
    total = 0
    for table in plan.tables:
        ranks = np.asarray(table.rest.ranks)
        for host in range(topology.hosts):
            mine = batches[host * topology.local : (host + 1) * topology.local]
            values = [b[f].values().cpu().numpy() for b in mine for f in table.feature_names]
            rows = np.unique(np.concatenate(values))
            away = ranks[table.homes().owners(rows)] // topology.local != host
            size = _ID + 4 * table.embedding_dim * table.trainable + table.row_bytes
            total += int(away.sum()) * size
    return total / topology.hosts
