"""Every payload byte a rank hands to the transport, by edge and link class."""

import threading
from collections import Counter

from rowmesh.topology import Link, Topology

__all__ = ["Ledger"]


class Ledger:
    """Bytes sent by one rank: numel x itemsize, sender side, debug headers not counted.

    `cost.predict` gives the same numbers without running anything.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self._links = [topology.link(rank, peer) for peer in range(topology.world)]
        self._bytes: Counter[tuple[str, Link]] = Counter()
        self._messages: Counter[tuple[str, Link]] = Counter()
        self._adding = threading.Lock()  # threads of sums, syncs and look-ahead record too

    def record(self, edge: str, peer: int, num_bytes: int) -> None:
        """Count one message to ``peer``; empty ones are not sent and not counted."""
        if num_bytes:
            with self._adding:
                self._bytes[edge, self._links[peer]] += num_bytes
                self._messages[edge, self._links[peer]] += 1

    def by_edge(self) -> dict[str, dict[str, int]]:
        """``{edge: {link: bytes}}`` since the last reset."""
        found: dict[str, dict[str, int]] = {}
        for (edge, link), num_bytes in sorted(self._bytes.items()):
            found.setdefault(edge, {})[link.value] = num_bytes
        return found

    def by_link(self) -> dict[str, int]:
        """``{link: bytes}`` since the last reset."""
        totals = {Link.HOST.value: 0, Link.CROSS.value: 0}
        for (_, link), num_bytes in self._bytes.items():
            totals[link.value] += num_bytes
        return totals

    def num_messages(self) -> int:
        """Messages sent since the last reset."""
        return self._messages.total()

    def reset(self) -> None:
        """Start again from zero."""
        self._bytes.clear()
        self._messages.clear()
