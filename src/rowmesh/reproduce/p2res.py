"""P2RES again: time, bytes and hot rows on emulated hosts, beside what its model says."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rowmesh.data import SyntheticClicks
from rowmesh.errors import InputError, check_range
from rowmesh.lab import parse_rate
from rowmesh.placement.rules import MAX_DEPTH
from rowmesh.reproduce.hosts import measure_on_hosts
from rowmesh.reproduce.sweep import Setting
from rowmesh.train.config import RunConfig
from rowmesh.train.model import ModelConfig

__all__ = ["P2res", "measure_p2res", "settings_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class P2res:
    """What is measured; every combination of the first four is a curve of time over k.

    Args:
        shapes: Hosts and ranks on each.
        rates: Of a host's link.
        alphas: Zipf exponents of the ids.
        dedups: With and without dedup.
        cap: Most rows of a table of Criteo's sizes.
        dim: Columns of the tables.
        batch: Samples of a rank.
        points: Values of k between 0 and all rows that were asked for.
        rounds: In each every plan runs once.
        depth: Batches begun at a time.
    """

    shapes: tuple[tuple[int, int], ...] = ((2, 2), (4, 1))
    rates: tuple[str, ...] = ("200mbit", "1gbit")
    alphas: tuple[float, ...] = (1.05, 1.2)
    dedups: tuple[bool, ...] = (False, True)
    cap: int = 100_000
    dim: int = 64
    batch: int = 2048
    points: int = 8
    rounds: int = 7
    depth: int = 2

    def __post_init__(self) -> None:
        for rate in self.rates:
            if parse_rate(rate) is None:
                raise InputError(f"rate {rate!r} is none: hot rows are about slow links")
        if not (self.shapes and self.rates and self.alphas and self.dedups):
            raise InputError("nothing to measure: shapes, rates and alphas must not be empty")
        for name in ("cap", "dim", "batch", "points", "rounds"):
            check_range(name, getattr(self, name), 1)
        for alpha in self.alphas:
            check_range("alpha", alpha, 0, 100)
        check_range("depth", self.depth, 1, MAX_DEPTH)


def settings_of(asked: dict[str, Any]) -> list[Setting]:
    """The curves of one shape and rate, from the words a rank was started with."""
    return [
        Setting(
            config=RunConfig(
                data=SyntheticClicks(cap=asked["cap"], alpha=alpha, batch_size=asked["batch"]),
                model=ModelConfig(
                    dim=asked["dim"], dense_layers=(512, 256), over_layers=(512, 512, 256)
                ),
            ),
            dedup=dedup,
            points=asked["points"],
            rounds=asked["rounds"],
            depth=asked["depth"],
        )
        for alpha in asked["alphas"]
        for dedup in asked["dedups"]
    ]


def measure_p2res(
    what: P2res, *, on_stage: Callable[[str], None] = lambda stage: None
) -> Iterator[dict[str, Any]]:
    """The curves, one after the other: `rowmesh.reproduce.sweep.sweep` with the rate.

    Raises:
        InputError: Where emulated hosts are not permitted.
        LabError: If the ranks of a shape fail.
    """
    return measure_on_hosts(
        "rowmesh.reproduce.p2res_rank",
        json.dumps(dataclasses.asdict(what)),
        shapes=what.shapes,
        rates=what.rates,
        on_stage=on_stage,
    )
