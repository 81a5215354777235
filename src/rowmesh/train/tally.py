"""What ranks tell each other once a step: loss, samples, bytes, and the wish to stop."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from rowmesh.comm.exchange import ChannelPool, Handle, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.topology import Link

__all__ = ["StepRecord", "Tally"]

_EDGES: Final = (
    *("status", "counts", "ids", "sample weights", "look-ahead bits", "rows", "pooled"),
    *("backward", "column squares", "hot gradients", "dense", "tower gradients"),
    *("replica sync", "tier move", "checkpoint", "other"),
)
_LINKS: Final = (Link.HOST.value, Link.CROSS.value)
_LOSS, _SAMPLES, _STOP, _HEADER = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step, over all ranks.

    Args:
        step: Steps done, from 1.
        loss: Mean over the global batch; nan without samples.
        samples: Of the global batch.
        lr: Learning rate of the tables.
        seconds: On this rank, with the making of the batch.
        sent: ``{edge: {link: bytes}}`` sent by all ranks.
        is_stopping: Whether a rank asked for a stop.
        bad_ranks: Those with a loss that is not finite.
    """

    step: int
    loss: float
    samples: int
    lr: float
    seconds: float
    sent: dict[str, dict[str, int]]
    is_stopping: bool
    bad_ranks: tuple[int, ...] = ()

    def by_link(self) -> dict[str, int]:
        """``{link: bytes}``."""
        return {link: sum(e.get(link, 0) for e in self.sent.values()) for link in _LINKS}


class Tally:
    """Sums over ranks that are one step behind, so that no step waits for them.

    The sum of step s is posted after it and read after step s + 1: a stop that any rank wants
    during step s is known to all ranks after the same step.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._pool = ChannelPool(mesh.wire)
        self._channel = self._pool.channel("tally", Lane.CONTROL)
        self._size = _HEADER + len(_EDGES) * len(_LINKS)
        self._before: dict[str, dict[str, int]] = {}
        self._open: tuple[Handle, Tensor, int, float, float] | None = None
        self._number = 0

    def begin(self) -> None:
        """Count bytes from here: what is sent between steps is no step's."""
        self._before = self._mesh.ledger.by_edge()

    def end(
        self, step: int, *, losses: Tensor, lr: float, seconds: float, wants_stop: bool
    ) -> StepRecord | None:
        """Post this rank's part of ``step``; returns the step before, once complete.

        Collective:
            All ranks, after every step.
        """
        mine = torch.zeros(self._size, dtype=torch.float64)
        mine[_SAMPLES], mine[_STOP] = len(losses), wants_stop
        mine[_HEADER:] = torch.tensor(self._sent(), dtype=torch.float64)
        mine = mine.to(self._mesh.device)
        mine[_LOSS] = losses.detach().double().sum()
        earlier = self.flush()
        world, rank, peers = self._mesh.world, self._mesh.rank, self._mesh.peers()
        found = mine.new_empty((world, self._size))
        found[rank] = mine
        self._number += 1
        handle = self._channel.post(
            self._number,
            sends=[(p, mine) for p in peers],
            receives=[(p, found[p]) for p in peers],
            edge="counts",
        )
        self._open = (handle, found, step, lr, seconds)
        return earlier

    def flush(self) -> StepRecord | None:
        """The last step posted, unless it has been returned already.

        Collective:
            All ranks.
        """
        if self._open is None:
            return None
        handle, found, step, lr, seconds = self._open
        self._open = None
        handle.wait()
        total = found[0].clone()
        for part in found[1:]:
            total += part
        loss, samples, stop, *sent = total.tolist()
        amounts = iter(sent)
        by_edge = {edge: {link: int(next(amounts)) for link in _LINKS} for edge in _EDGES}
        return StepRecord(
            step=step,
            loss=loss / samples if samples else float("nan"),
            samples=int(samples),
            lr=lr,
            seconds=seconds,
            sent={edge: links for edge, links in by_edge.items() if any(links.values())},
            is_stopping=stop > 0,
            bad_ranks=tuple((~found[:, _LOSS].isfinite()).nonzero().squeeze(1).tolist()),
        )

    def _sent(self) -> list[float]:
        """Bytes since `begin`, by edge and link in their fixed order."""
        amounts = {(edge, link): 0.0 for edge in _EDGES for link in _LINKS}
        for edge, links in self._mesh.ledger.by_edge().items():
            for link in _LINKS:
                more = links.get(link, 0) - self._before.get(edge, {}).get(link, 0)
                amounts[edge if edge in _EDGES else "other", link] += more
        return list(amounts.values())
