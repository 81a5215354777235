"""Ranks that add up a vector together: each one chunk of it, whose sum it sends to the others."""

from collections.abc import Sequence

from torch import Tensor

from rowmesh.comm.codecs import Codec, Message, coded_flat, parcel_bytes, settle
from rowmesh.comm.exchange import ChannelPool, Handle, Lane
from rowmesh.comm.mesh import Mesh

__all__ = ["Ring"]


class Ring:
    """Ranks that each add up one chunk of a vector and send the sum to the others.

    The first ``num_coded`` numbers of the vector travel in ``codec``, the others as they are.
    """

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        ranks: Sequence[int],
        vector: Tensor,
        num_coded: int,
        edge: str,
        pool: ChannelPool,
        codec: Codec,
    ) -> None:
        self._edge, self._codec = edge, codec
        self.ranks, self._place = list(ranks), list(ranks).index(mesh.rank)
        chunks = vector.split(max(1, -(-len(vector) // len(ranks))))
        self.chunks = [*chunks, *(vector[:0],) * (len(ranks) - len(chunks))]
        left = [num_coded - i * len(self.chunks[0]) for i in range(len(ranks))]
        self.num_coded = [min(max(n, 0), len(c)) for n, c in zip(left, self.chunks, strict=True)]
        self._ledger = mesh.ledger
        parcels = [self._coded(chunk, i) for i, chunk in enumerate(self.chunks)]
        self._sizes = [parcel_bytes(parcel) for parcel in parcels]
        self._found = vector.new_empty((len(ranks), len(self.chunks[self._place])))
        self._parts = pool.channel(name, Lane.GRADS)
        self._sums = pool.channel(f"{name}, sums", Lane.GRADS)

    @property
    def _others(self) -> list[int]:
        return [i for i in range(len(self.ranks)) if i != self._place]

    def record(self) -> None:
        """Count the bytes of one sum: they belong to the step that begins it."""
        for i in self._others:
            for num_bytes in (self._sizes[i], self._sizes[self._place]):
                self._ledger.record(self._edge, self.ranks[i], num_bytes)

    def send_parts(self, sequence: int) -> Handle:
        """Every rank's part of every chunk to the rank that adds it up; `record` counts it."""
        others = self._others
        return self._parts.post(
            sequence,
            sends=[(self.ranks[i], self._coded(self.chunks[i], i)) for i in others],
            receives=[(self.ranks[i], self._coded(self._found[i], self._place)) for i in others],
            edge=None,
        )

    def _coded(self, vector: Tensor, chunk: int) -> Tensor | Message:
        return coded_flat(vector, self._codec, self.num_coded[chunk])

    def add_up(self) -> None:
        """Make this rank's chunk the sum of all ranks', in their order."""
        mine = self.chunks[self._place]
        self._found[self._place] = mine
        total = self._found[0]
        for part in self._found[1:]:
            total += part
        mine.copy_(total)

    def send_sums(self, sequence: int) -> Handle:
        """This rank's chunk to all, theirs to this rank; `record` counts it."""
        others = self._others
        parcels = [self._coded(chunk, i) for i, chunk in enumerate(self.chunks)]
        if others:
            settle(parcels[self._place])
        return self._sums.post(
            sequence,
            sends=[(self.ranks[i], parcels[self._place]) for i in others],
            receives=[(self.ranks[i], parcels[i]) for i in others],
            edge=None,
        )
