"""The shapes of a race and how they are written: ``1x2``, ``2x1@200mbit``."""

import itertools
import re
from dataclasses import dataclass

from rowmesh.errors import InputError
from rowmesh.lab import parse_rate

__all__ = ["ALL", "Shape", "parse_shapes"]

ALL = "1x2," + ",".join(f"{h}@{r}" for h in ("2x1", "2x2", "4x1") for r in ("1gbit", "200mbit"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Hosts x ranks a host, the rate of a host's link (None: unshaped), and the ids."""

    hosts: int
    local: int
    rate: str | None
    pooling: int
    alpha: float

    @property
    def layout(self) -> str:
        """Hosts, ranks and rate."""
        rate = f"_{self.rate}" if self.rate else ""
        return f"{self.hosts}x{self.local}{rate}"

    @property
    def name(self) -> str:
        """Its file's."""
        return f"{self.layout}_p{self.pooling}_a{self.alpha:g}"

    @property
    def bytes_per_s(self) -> float | None:
        """Of a link, each way."""
        bits = parse_rate(self.rate)
        return None if bits is None else bits / 8

    @property
    def order(self) -> tuple[float, ...]:
        """Of a report: few ranks first, on few hosts, with fast links."""
        world, rate = self.hosts * self.local, self.bytes_per_s or 0.0
        return world, self.hosts, -rate, self.pooling, self.alpha

    @property
    def group(self) -> tuple[int, int, int, float]:
        """Shapes that differ only by the rate run in the same processes."""
        return self.hosts, self.local, self.pooling, self.alpha


def parse_shapes(layouts: str, *, pooling: str, alpha: str) -> list[Shape]:
    """All combinations, those of one group side by side.

    Raises:
        InputError: If a word cannot be read, or a layout of one host has a rate, or of several
            none.
    """
    found = []
    for layout, p, a in itertools.product(layouts.split(","), pooling.split(","), alpha.split(",")):
        match = re.fullmatch(r"(\d+)x(\d+)(?:@(\w+(?:\.\w+)?))?", layout.strip())
        if match is None or (match[1] == "1") != (match[3] is None) or int(match[2]) < 1:
            raise InputError(
                f"shape {layout!r} must be 1xRANKS, or HOSTSxRANKS@RATE as 2x1@200mbit"
            )
        parse_rate(match[3])
        try:
            factor, exponent = int(p), float(a)
        except ValueError:
            raise InputError(f"pooling {p!r} and alpha {a!r} must be numbers") from None
        hosts, local = int(match[1]), int(match[2])
        found.append(Shape(hosts=hosts, local=local, rate=match[3], pooling=factor, alpha=exponent))
    groups = list(dict.fromkeys(shape.group for shape in found))
    return sorted(dict.fromkeys(found), key=lambda shape: groups.index(shape.group))
