"""The arms of the comparison, the data sets they run on, and how a model learns from each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from rowmesh.data import ParquetClicks, Source, SyntheticClicks
from rowmesh.errors import InputError, check_range
from rowmesh.train.recipes import load_recipe

__all__ = [
    *("CONTROL_GROUPS", "SETS", "Arm", "Learning", "Quality", "TrialSet"),
    *("arms_of", "trial_sets"),
]

SETS = ("planted", "few", "dcn", "clicks")
CONTROL_GROUPS = 4  # M of the verdicts, and of all sets but the first


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """How the groups of one run work together.

    Args:
        groups: M; 1 is full model parallelism.
        mode: As of `Sync`.
        scale: c, as of `MomentumScaledRowwiseAdagrad`.
        period: Steps between syncs.
        ranks: Virtual ranks, a multiple of M; 0 for M. More of them only change the order of sums.
    """

    groups: int = 1
    mode: Literal["gradients", "weights", "moments-first"] = "weights"
    scale: float = 1.0
    period: int = 1
    ranks: int = 0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.ranks % self.groups:
            raise InputError(f"{self.ranks} virtual ranks do not make {self.groups} groups")

    @property
    def world(self) -> int:
        """Virtual ranks."""
        return self.ranks or self.groups

    @property
    def name(self) -> str:
        """As ``full``, ``weights c=M``, ``moments-first``, with ``k=4`` where it is not 1."""
        if self.groups == 1:
            return "full"
        words: list[str] = [self.mode]
        if self.mode == "weights":
            known = {1.0: "1", float(self.groups): "M", math.sqrt(self.groups): "sqrt(M)"}
            words.append(f"c={known.get(self.scale, f'{self.scale:g}')}")
        return " ".join([*words, f"k={self.period}"] if self.period > 1 else words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """How every arm learns; both learning rates fall to 0 in a line.

    Args:
        steps: Training steps.
        dim: Columns of the table.
        model: `Additive`, or a DCN of one cross layer.
        dense_layers: Of the MLP on dense features of a DCN.
        dense_lr: Of Adam, on everything but the table.
        eps: Of row-wise AdaGrad.
    """

    steps: int
    dim: int = 1
    model: Literal["additive", "dcn"] = "additive"
    dense_layers: tuple[int, ...] = ()
    dense_lr: float = 0.02
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSet:
    """A data set, the arms and rates that are tried on it, and how they learn.

    Args:
        name: In the report and in the names of stored runs.
        kind: ``planted``: `SyntheticClicks` of ``tables`` x ``rows``; ``clicks``: the recipe
            ``clicks`` on the files at ``path``, whose batch sizes count.
        arms: The first is full model parallelism.
        rates: Learning rates of the table, ascending.
        how: How all arms learn.
    """

    name: str
    kind: Literal["planted", "clicks"] = "planted"
    arms: tuple[Arm, ...]
    rates: tuple[float, ...]
    how: Learning
    tables: int = 8
    rows: int = 250
    batch: int = 512
    held_out: int = 40
    path: str = ""

    def source(self, seed: int) -> Source:
        """The data of a seed: another truth and other samples, or another order of them."""
        if self.kind == "clicks":
            return _clicks_at(self.path, seed)
        return SyntheticClicks(
            cardinalities=(self.rows,) * self.tables,
            batch_size=self.batch,
            held_out_batches=self.held_out,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How much is tried; a seed is a data set and initial values that all arms share.

    ``groups`` and ``periods`` are of the first planted set; the others have 4 groups that sync
    every step. On clicks a run is an epoch, if that has no more than ``steps``.
    """

    seeds: Annotated[tuple[int, ...], "paired, as 11-15 or 11,12; from 2 to 30"] = (
        *(11, 12, 13, 14, 15),
    )
    groups: Annotated[tuple[int, ...], "values of M on planted data, 4 among them"] = (2, 4, 8, 16)
    periods: Annotated[tuple[int, ...], "steps between syncs that are tried besides 1"] = (4, 16)
    sets: Annotated[tuple[str, ...], "data sets: " + ", ".join(SETS), SETS] = SETS
    steps: Annotated[int, "most training steps of a run"] = 300
    held_out: Annotated[int, "batches of planted data to evaluate on"] = 40
    clicks: Annotated[Path, "folder of display-ad clicks, which are left out without it"] = Path(
        "../shared/data/clicks"
    )

    def __post_init__(self) -> None:
        check_range("number of seeds", len(set(self.seeds)), 2, 30)
        check_range("smallest seed", min(self.seeds), 0, 2**32 - 1)
        check_range("steps", self.steps, 1)
        check_range("held_out", self.held_out, 1)
        for count in self.groups:
            check_range("groups", count, 2, 512)
        for period in self.periods:
            check_range("period", period, 2)
        if CONTROL_GROUPS not in self.groups:
            raise InputError(f"groups {self.groups} lack {CONTROL_GROUPS}, which is judged")


def arms_of(count: int, *, with_root: bool = True) -> tuple[Arm, ...]:
    """The ways in which ``count`` groups step apart, c = 1 first."""
    scales = (1.0, math.sqrt(count), float(count)) if with_root else (1.0, float(count))
    arms = [Arm(groups=count, scale=scale) for scale in scales]
    return (*arms, Arm(groups=count, mode="moments-first"))


def trial_sets(what: Quality) -> list[TrialSet]:
    """The sets in the order in which they run; clicks only where they are found.

    ``planted``: every row is seen often, many by one group a step; ``few``: 10,000 rows a table,
    most of them seen a few times; ``dcn``: ``planted`` learnt by a DCN; ``clicks``.
    """
    every = [arm for count in what.groups for arm in arms_of(count)]
    last = arms_of(CONTROL_GROUPS)
    every += [replace(arm, period=period) for period in what.periods for arm in (last[0], last[2])]
    few = (Arm(), *arms_of(CONTROL_GROUPS, with_root=False))
    planted = TrialSet(
        name="planted",
        arms=(Arm(), *every),
        rates=(0.2, 0.4, 0.8),
        how=Learning(steps=what.steps, dense_lr=0.02),
        held_out=what.held_out,
    )
    deep = Learning(steps=what.steps, model="dcn", dim=8, dense_layers=(16,), dense_lr=0.005)
    found = [
        planted,
        replace(planted, name="few", arms=few, rows=10_000),
        replace(planted, name="dcn", arms=few, rates=(0.02, 0.05, 0.1), how=deep),
    ]
    if what.clicks.is_dir():
        found.append(_clicks(str(what.clicks.resolve()), few, what.steps))
    return [s for s in found if s.name in what.sets]


def _clicks(path: str, arms: Sequence[Arm], most: int) -> TrialSet:
    config = load_recipe("clicks")
    steps = _clicks_at(path, 1).steps_per_epoch
    assert steps is not None
    return TrialSet(
        name="clicks",
        kind="clicks",
        arms=tuple(arms),
        rates=(0.5, 1.0, 2.0),
        how=Learning(
            steps=min(steps, most),
            model="dcn",
            dim=config.model.dim,
            dense_layers=config.model.dense_layers,
            dense_lr=config.optimiser.dense_lr,
            eps=config.optimiser.sparse_eps or 1e-8,
        ),
        path=path,
    )


def _clicks_at(path: str, seed: int) -> ParquetClicks:
    found = load_recipe("clicks").data
    assert isinstance(found, ParquetClicks)
    return replace(found, path=path, seed=seed, read_ahead=0)
