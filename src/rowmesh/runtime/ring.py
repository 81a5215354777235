"""The sum of a vector over ranks, a chunk a rank.

Flat: each rank adds up one chunk of a bucket and sends the sum to all: 2 (W - 1) / W of the
bucket leaves a rank, the least possible. Host-first: the ranks of a host add up a chunk each, peers
on different hosts add up their chunk, and the sums go back the same way: only 2 (H - 1) / H of a
bucket's L-th part leaves a rank's host. Not torch's DDP, which averages. With a codec gradients are
coded in chunks and flags are not; whoever sends a sum keeps what its receivers decode.
"""

from collections.abc import Sequence

from torch import Tensor

from rowmesh.comm.codecs import Codec, Message, coded_flat, settle
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
        self._found = vector.new_empty((len(ranks), len(self.chunks[self._place])))
        self._parts = pool.channel(name, Lane.GRADS)
        self._sums = pool.channel(f"{name}, sums", Lane.GRADS)

    def send_parts(self, sequence: int) -> Handle:
        """Every rank's part of every chunk to the rank that adds it up."""
        others = [i for i in range(len(self.ranks)) if i != self._place]
        return self._parts.post(
            sequence,
            sends=[(self.ranks[i], self._coded(self.chunks[i], i)) for i in others],
            receives=[(self.ranks[i], self._coded(self._found[i], self._place)) for i in others],
            edge=self._edge,
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
        """This rank's chunk to all, theirs to this rank."""
        others = [i for i in range(len(self.ranks)) if i != self._place]
        parcels = [self._coded(chunk, i) for i, chunk in enumerate(self.chunks)]
        if others:
            settle(parcels[self._place])
        return self._sums.post(
            sequence,
            sends=[(self.ranks[i], parcels[self._place]) for i in others],
            receives=[(self.ranks[i], parcels[i]) for i in others],
            edge=self._edge,
        )
