"""Time over k: plans with more and more hot rows on one mesh, in turn, beside their model."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from benchmarks.harness.beside import Contest, Known, Told, compare
from benchmarks.harness.hosts import check_experiment
from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration
from rowmesh.data import SyntheticClicks
from rowmesh.errors import check_range
from rowmesh.placement import Plan
from rowmesh.placement.memory import RULE_STATES
from rowmesh.planners import HotRows
from rowmesh.train.config import RunConfig
from rowmesh.train.model import ModelConfig

__all__ = ["Curves"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """What is measured: every alpha with and without dedup is a curve of time over k."""

    shapes: Annotated[tuple[tuple[int, int], ...], "hosts x ranks on each"] = ((2, 2), (4, 1))
    rates: Annotated[tuple[str, ...], "of a host's link"] = ("200mbit", "1gbit")
    alphas: Annotated[tuple[float, ...], "Zipf exponents of the ids"] = (1.05, 1.2)
    dedup: Annotated[tuple[bool, ...], "ask for each distinct row once"] = (False, True)
    cap: Annotated[int, "most rows of a table of Criteo's sizes"] = 100_000
    dim: Annotated[int, "columns of the tables"] = 64
    batch: Annotated[int, "samples per rank and step"] = 2048
    points: Annotated[int, "values of k between none and all rows asked for"] = 8
    rounds: Annotated[int, "every plan runs once in a round"] = 7
    depth: Annotated[int, "batches begun at a time"] = 2

    def __post_init__(self) -> None:
        check_experiment(self, about="hot rows", least_1=("cap", "dim", "batch", "points"))
        for alpha in self.alphas:
            check_range("alpha", alpha, 0, 100)

    def config(self, alpha: float | None = None) -> RunConfig:
        """The model and its data."""
        alpha = self.alphas[0] if alpha is None else alpha
        return RunConfig(
            data=SyntheticClicks(cap=self.cap, alpha=alpha, batch_size=self.batch),
            model=ModelConfig(dim=self.dim, dense_layers=(512, 256), over_layers=(512, 512, 256)),
        )

    def cases(self) -> list[tuple[float, bool]]:
        """Alpha and dedup of every curve."""
        return [(alpha, dedup) for alpha in self.alphas for dedup in self.dedup]

    def measure(
        self, case: tuple[float, bool], mesh: Mesh, calibration: Calibration
    ) -> dict[str, Any]:
        """A curve: every plan's milliseconds, model and bytes; the same on all ranks.

        Plans: no hot rows, k on a geometric grid, every row on every rank, and the model's own
        where it is none of these.

        Collective:
            All ranks.
        """
        (alpha, dedup), config = case, self.config(case[0])

        def choose() -> tuple[list[Told], Plan]:
            known = Known.of(config, mesh, calibration)
            return _plans(known, dedup=dedup, depth=self.depth, points=self.points)

        plans, chosen = on_rank_0(mesh, choose)
        rows = compare(Contest(config=config, rounds=self.rounds), plans, mesh)
        assert chosen.hot is not None
        marks = [{"is_model": told.plan == chosen} for told in plans]
        return {
            "alpha": alpha,
            "dedup": dedup,
            "depth": self.depth,
            "model": dataclasses.asdict(chosen.hot),
            "rows": [row | mark for row, mark in zip(rows, marks, strict=True)],
        }


def _plans(known: Known, *, dedup: bool, depth: int, points: int) -> tuple[list[Told], Plan]:
    """Plans with the seconds of a step that the model tells; and the one that it chooses."""
    cold = known.plan(split="row_wise", exchange="rows", dedup=dedup, depth=depth)
    hot = HotRows(
        [cold],
        known.stats,
        rates=known.rates,
        cost=known.cost,
        state=RULE_STATES["rowwise_adagrad"],
        per_host=False,
    )
    grid = [round(hot.most ** (i / points)) for i in range(1, points + 1)]
    grid = [k for k in dict.fromkeys(grid) if k >= 64]
    named = [("cold", cold), *((f"k={k}", hot.choose(k)) for k in grid), ("all", hot.replicate())]
    chosen = hot.choose(None)
    if chosen not in [plan for _, plan in named]:
        named.append(("model", chosen))
    return [known.tell(name, plan) for name, plan in named], chosen
