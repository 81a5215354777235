"""What shard groups cost: step time of every size and layout on emulated hosts, and bytes."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from benchmarks.harness.beside import Contest, Known, Told, compare
from benchmarks.harness.hosts import check_experiment
from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration
from rowmesh.data import SyntheticClicks
from rowmesh.errors import check_range
from rowmesh.planners import list_meshes, parse_sync
from rowmesh.train.config import RunConfig
from rowmesh.train.model import ModelConfig

__all__ = ["Speed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What is timed: on every shape at every rate, every size and layout of groups and sync."""

    shapes: Annotated[tuple[tuple[int, int], ...], "hosts x ranks on each"] = ((2, 2), (4, 1))
    rates: Annotated[tuple[str, ...], "of a host's link"] = ("200mbit",)
    syncs: Annotated[tuple[str, ...], "timed, as rowmesh plan --sync takes them"] = (
        *("gradients", "weights:4"),
    )
    alpha: Annotated[float, "Zipf exponent of the ids that are timed"] = 1.05
    cap: Annotated[int, "most rows of a table of Criteo's sizes that is timed"] = 100_000
    dim: Annotated[int, "columns of the tables that are timed"] = 64
    batch: Annotated[int, "samples per rank and step that are timed"] = 2048
    rounds: Annotated[int, "every plan runs once in a round"] = 5
    depth: Annotated[int, "batches begun at a time, timed"] = 2

    def __post_init__(self) -> None:
        check_experiment(self, about="groups", least_1=("cap", "dim", "batch"))
        for sync in self.syncs:
            parse_sync(sync)
        check_range("alpha", self.alpha, 0, 100)

    @property
    def steps(self) -> int:
        """Of a plan in a round: as many syncs in those of every plan."""
        return math.lcm(2, *(parse_sync(sync).period for sync in self.syncs))

    def config(self) -> RunConfig:
        """The model and its data: as papers/p2res has them."""
        return RunConfig(
            data=SyntheticClicks(cap=self.cap, alpha=self.alpha, batch_size=self.batch),
            model=ModelConfig(dim=self.dim, dense_layers=(512, 256), over_layers=(512, 512, 256)),
        )

    def cases(self) -> list[str]:
        """All plans take turns in one."""
        return ["all"]

    def measure(self, case: str, mesh: Mesh, calibration: Calibration) -> dict[str, Any]:
        """Every plan's milliseconds, model and bytes; the same on all ranks.

        Collective:
            All ranks.
        """
        config = self.config()
        plans = on_rank_0(mesh, lambda: self._plans(Known.of(config, mesh, calibration)))
        contest = Contest(config=config, rounds=self.rounds, steps=self.steps)
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
            "alpha": self.alpha,
            "depth": self.depth,
            "rows": [row | more for row, more in zip(rows, of_plan, strict=True)],
        }

    def _plans(self, known: Known) -> list[Told]:
        """A plan for every size, layout and sync, with the seconds that the model tells."""
        told = []
        for shape in list_meshes(known.topology, groups="auto", layout="auto"):
            for sync in self.syncs if shape.group < known.topology.world else ("none",):
                plan = known.plan(
                    depth=self.depth,
                    groups=shape.group,
                    layout=shape.layout,
                    sync=parse_sync("gradients" if sync == "none" else sync),
                )
                told.append(known.tell(f"N={shape.group} {shape.layout} {sync}", plan))
        return told
