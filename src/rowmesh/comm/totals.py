"""Sums and objects of all ranks. What ranks bring is compared first: they may not mean the same."""

from typing import Any, Final

import torch
from torch import Tensor

from rowmesh.comm.exchange import DTYPES, Channel, Lane, Wire
from rowmesh.comm.seals import seal, unseal
from rowmesh.errors import InputError

__all__ = ["Totals"]

_HEAD: Final = 8  # bytes of what each rank says first: call, dtype and number of elements
_CALLS: Final = ("total", "gather_objects")


class Totals:
    """Of one mesh.

    Two messages a use at most: the first holds what the rank calls, the dtype and number of its
    elements, and their first 8 bytes, which is all of one number; the second the others. So a rank
    that brings something else is noticed by all, and nobody posts a receive that does not fit.

    Args:
        wire: Of the mesh.
        device: Where tensors live.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire, self._device = wire, device
        self._channels: list[Channel] = [
            wire.channel(name, Lane.CONTROL) for name in ("totals", "rest of totals", "gather")
        ]
        self._uses = 0

    def total(self, value: float | Tensor, *, edge: str | None, call: str = "total") -> Tensor:
        """`Mesh.total`."""
        mine = torch.as_tensor(value, device=self._device).detach()
        if mine.dtype in (torch.int32, torch.bool):
            mine = mine.long()
        if mine.dtype not in DTYPES:
            raise InputError(f"total adds up numbers, got a tensor of {mine.dtype}")
        self._uses += 1
        data = mine.reshape(-1).contiguous().view(torch.uint8)
        found = data.new_empty((self._wire.world, len(data)))
        found[self._wire.rank] = data
        code = (mine.numel() * len(DTYPES) + DTYPES.index(mine.dtype)) * len(_CALLS)
        heads = self._head(code + _CALLS.index(call), data, edge)
        found[:, :_HEAD] = heads[:, _HEAD : _HEAD + len(data)]
        if len(data) > _HEAD:
            rest = [part[_HEAD:] for part in found]
            self._post(1, data[_HEAD:].contiguous(), rest, edge)
        parts = found.view(mine.dtype) if len(data) else found.to(mine.dtype)
        result = parts[0].clone()
        for part in parts[1:]:
            result += part
        return result.view(mine.shape)

    def _head(self, code: int, data: Tensor, edge: str | None) -> Tensor:
        """What every rank says first, if all bring the same kind of thing."""
        mine = torch.zeros(2 * _HEAD, dtype=torch.uint8, device=self._device)
        mine[:_HEAD] = torch.tensor([code], device=self._device).view(torch.uint8)
        mine[_HEAD : _HEAD + len(data)] = data[:_HEAD]
        found = mine.expand(self._wire.world, -1).contiguous()
        self._post(0, mine, list(found), edge)
        codes = found[:, :_HEAD].contiguous().view(torch.int64).squeeze(1).tolist()
        for rank, theirs in enumerate(codes):
            if theirs != codes[0]:
                raise InputError(
                    f"ranks disagree: rank 0 calls {_describe(codes[0])}, rank {rank} "
                    f"{_describe(theirs)}: all ranks must call the same, with one dtype and shape "
                    f"(a Python int is int64, a float is float32)"
                )
        return found

    def gather(self, value: Any, *, edge: str | None) -> list[Any]:
        """`Mesh.gather_objects`."""
        secret = self._wire.secret
        data = torch.frombuffer(seal(value, secret), dtype=torch.uint8).to(self._device)
        sizes = torch.zeros(self._wire.world, dtype=torch.int64, device=self._device)
        sizes[self._wire.rank] = len(data)
        sizes = self.total(sizes, edge=edge, call="gather_objects")
        found = [data.new_empty(int(n)) for n in sizes.tolist()]
        found[self._wire.rank] = data
        self._post(2, data, found, edge)
        parts = [part.cpu().numpy().tobytes() for part in found]
        return [unseal(part, secret, rank=rank) for rank, part in enumerate(parts)]

    def _post(self, which: int, data: Tensor, found: list[Tensor], edge: str | None) -> None:
        peers = self._wire.peers()
        self._channels[which].post(
            self._uses,
            sends=[(p, data) for p in peers],
            receives=[(p, found[p]) for p in peers],
            edge=edge,
        ).wait()


def _describe(code: int) -> str:
    """What a rank calls."""
    code, call = divmod(code, len(_CALLS))
    if _CALLS[call] != "total":
        return "gather_objects"
    count, dtype = divmod(code, len(DTYPES))
    return f"total of {count} x {str(DTYPES[dtype]).removeprefix('torch.')}"
