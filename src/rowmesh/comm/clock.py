"""How far the clocks of two hosts are apart, from messages there and back."""

import time

import torch

from rowmesh.comm.exchange import Channel, ChannelPool, Lane
from rowmesh.comm.mesh import Mesh

__all__ = ["ClockComparison"]

_ROUNDS = 10


class ClockComparison:
    """Compares every rank's ``time.perf_counter_ns`` with rank 0's.

    Args:
        mesh: All ranks make the same comparisons in one order.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._uses = mesh, 0
        self._pool = ChannelPool(mesh.wire)
        self._there = self._pool.channel("clock", Lane.CONTROL)
        self._back = self._pool.channel("clock, back", Lane.CONTROL)

    def measure(self) -> tuple[int, int]:
        """(offset, error): rank 0's clock = this rank's + offset, within error; nanoseconds.

        A rank asks at t0 and has rank 0's time T at t1. T was read in between, so rank 0's clock
        is ahead by T - (t0 + t1) / 2, wrong by at most (t1 - t0) / 2: the fastest of 10 rounds
        counts. The bytes are not in the ledger.

        Collective:
            All ranks; rank 0 answers them one after the other.
        """
        self._uses += 1
        if self._mesh.rank:
            return min((self._ask(k) for k in range(_ROUNDS)), key=lambda found: found[1])
        for peer in range(1, self._mesh.world):
            for k in range(_ROUNDS):
                self._answer(peer, k)
        return 0, 0

    def _ask(self, round_: int) -> tuple[int, int]:
        sequence, mine, theirs = self._sequence(round_), self._number(1), self._number(0)
        back = self._back.post(sequence, sends=(), receives=[(0, theirs)], edge=None)
        start = time.perf_counter_ns()
        _send(self._there, sequence, 0, mine)
        back.wait()
        end = time.perf_counter_ns()
        return int(theirs) - (start + end) // 2, (end - start + 1) // 2

    def _answer(self, peer: int, round_: int) -> None:
        sequence, asked = self._sequence(round_), self._number(0)
        self._there.post(sequence, sends=(), receives=[(peer, asked)], edge=None).wait()
        _send(self._back, sequence, peer, self._number(time.perf_counter_ns()))

    def _sequence(self, round_: int) -> int:
        return self._uses * _ROUNDS + round_

    def _number(self, value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self._mesh.device)


def _send(channel: Channel, sequence: int, peer: int, value: torch.Tensor) -> None:
    channel.post(sequence, sends=[(peer, value)], receives=(), edge=None).wait()
