"""Where ranks are: hosts, local ranks, and the class of the link between two ranks."""

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from rowmesh.errors import InputError

__all__ = ["MAX_RANKS", "Link", "Topology"]

MAX_RANKS = 1 << 16  # of a plan, which lists them


class Link(StrEnum):
    """What lies between two ranks: nothing, one host's memory, or the network."""

    SELF = "self"
    HOST = "host"
    CROSS = "cross"


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """``hosts * local`` ranks; rank = host * local + local rank.

    Args:
        hosts: Number of hosts.
        local: Ranks on each host.
        memory_bytes: Memory of one rank that tables and optimiser state may use, if known.
    """

    hosts: int = 1
    local: int = 1
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.hosts * self.local > MAX_RANKS:
            raise InputError(
                f"{self.hosts} hosts x {self.local} ranks are more than {MAX_RANKS:,} ranks"
            )
        if self.hosts < 1 or self.local < 1:
            raise InputError(
                f"a topology needs at least one host and one rank per host, "
                f"got hosts={self.hosts}, local={self.local}"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.hosts * self.local

    def host(self, rank: int) -> int:
        """The host of ``rank``."""
        return rank // self.local

    def link(self, source: int, target: int) -> Link:
        """The class of the link from ``source`` to ``target``."""
        if source == target:
            return Link.SELF
        return Link.HOST if self.host(source) == self.host(target) else Link.CROSS

    def fingerprint(self) -> str:
        """A short digest that a plan keeps, so that it is not run on another topology."""
        text = json.dumps(asdict(self) | {"memory_bytes": None}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
