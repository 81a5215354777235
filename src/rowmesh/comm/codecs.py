"""Codecs: blocks of fp32 vectors as fewer bytes on the wire, and back into fp32 memory.

A `Message` is one buffer of bytes made of blocks ``[n, D]``, each with its codec: the sender
encodes once, however many ranks it sends to; the receiver decodes when the bytes are there. Sums
are always of decoded fp32. fp32 is no codec at all: `coded` then returns the tensor itself, and
nothing is copied (docs/codecs.md).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from rowmesh import native
from rowmesh.placement.codecs import CHUNK, GRADIENT_EDGES, WireForm

__all__ = [
    "PLAIN",
    "Codec",
    "Codecs",
    "Message",
    "coded",
    "coded_flat",
    "make_codecs",
    "settle",
    "wire_bytes",
]

_MOST = 127.0  # of an int8
_BIAS, _MANTISSA = 127, 23  # of an fp32's exponent, and its bits below it
_TOP = 14  # the largest of a scaled row is made [2**14, 2**15): fp16 ends at 65504


class Codec(Protocol):
    """How one block travels; an encoded block is some parts of one dtype each.

    ``numbers`` is the part with one entry for every number of the block, in order.
    """

    @property
    def numbers(self) -> int: ...

    def parts(self, num_rows: int, dim: int) -> list[tuple[torch.dtype, int]]:
        """Dtype and size of each part of an encoded ``[num_rows, dim]`` block."""

    def encode(self, block: Tensor, parts: Sequence[Tensor]) -> None:
        """Write ``block``, fp32, into ``parts``, flat."""

    def decode(self, parts: Sequence[Tensor], block: Tensor) -> None:
        """Write what ``parts`` say into ``block``, fp32."""


class Rounded:
    """Every number by itself, to another dtype: fp32 (as it is), bf16, or fp16.

    bf16 has fp32's range and 8 bits: |error| <= 2**-8 |x|. fp16 has 11 bits from 6.1e-5 to 65504:
    |error| <= 2**-11 |x| there; below, it is at most 2**-25; above, numbers become infinite. NaN
    and infinities stay what they are.
    """

    numbers = 0

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def parts(self, num_rows: int, dim: int) -> list[tuple[torch.dtype, int]]:
        """All numbers."""
        return [(self.dtype, num_rows * dim)]

    def encode(self, block: Tensor, parts: Sequence[Tensor]) -> None:
        """Round to nearest, ties to even."""
        parts[0].view(block.shape).copy_(block)

    def decode(self, parts: Sequence[Tensor], block: Tensor) -> None:
        """Exact."""
        block.copy_(parts[0].view(block.shape))


class ScaledHalf:
    """fp16 with a power of two for every row, in a byte: for gradients, of any size.

    A row is multiplied by 2**k so that its largest number is in [2**14, 2**15): nothing overflows,
    and |error| <= 2**-11 |x| down to 2**-28 of the largest, below which it is at most 2**-39 of
    the largest. A power of two loses no bits itself. One for every row, not for a message: then
    what a row becomes does not depend on which others travel with it, one large gradient does not
    wipe out small ones, nothing is remembered from step to step, and the bytes are those of rows
    alone.

    -114 < k <= 126, so that 2**k and 2**-k are normal numbers: rows below 2**-112 lose bits. A row
    with a NaN or an infinity has k = 0.
    """

    numbers = 0

    def parts(self, num_rows: int, dim: int) -> list[tuple[torch.dtype, int]]:
        """Numbers, and k."""
        return [(torch.float16, num_rows * dim), (torch.int8, num_rows)]

    def encode(self, block: Tensor, parts: Sequence[Tensor]) -> None:
        """Scale and round."""
        exponent = _largest(block).view(torch.int32).bitwise_right_shift(_MANTISSA)
        k = (_TOP + _BIAS - exponent).clamp_(max=_BIAS - 1)
        k.masked_fill_(exponent == 255, 0)
        parts[0].view(block.shape).copy_(block * _power(k))
        parts[1].copy_(k)

    def decode(self, parts: Sequence[Tensor], block: Tensor) -> None:
        """Exact, but for what is below fp32's normal numbers."""
        torch.mul(parts[0].view(block.shape).float(), _power(-parts[1].int()), out=block)


class RowInt8:
    """Whole steps from -127 to 127 of a row's scale = max|x| / 127: |error| <= scale / 2.

    A row of zeros has scale 0. A row with a NaN or an infinity has a scale that is one, and each of
    its numbers decodes to NaN or an infinity: divergence is not hidden.
    """

    numbers = 1

    def parts(self, num_rows: int, dim: int) -> list[tuple[torch.dtype, int]]:
        """Scales, and steps."""
        return [(torch.float32, num_rows), (torch.int8, num_rows * dim)]

    def encode(self, block: Tensor, parts: Sequence[Tensor]) -> None:
        """Round to the nearest step."""
        if native.encode_int8(block, parts[0], parts[1]):
            return
        scale = parts[0]
        torch.div(_largest(block), _MOST, out=scale)
        steps = block / torch.where(scale == 0.0, 1.0, scale).unsqueeze(1)
        # The scale of subnormal numbers is rough; what a NaN becomes here does not matter.
        parts[1].view(block.shape).copy_(steps.round_().clamp_(-_MOST, _MOST))

    def decode(self, parts: Sequence[Tensor], block: Tensor) -> None:
        """Steps times scale, in fp32."""
        if native.decode_int8(parts[0], parts[1], block):
            return
        torch.mul(parts[1].view(block.shape).float(), parts[0].unsqueeze(1), out=block)


class _Flagged:
    """A block whose last numbers are counts, which are not scaled: exact up to 127, never lost.

    Args:
        codec: Of the numbers before them.
        num_values: How many these are.
    """

    def __init__(self, codec: Codec, num_values: int) -> None:
        self._codec, self._num_values = codec, num_values
        self.parts, self.numbers = codec.parts, codec.numbers

    def encode(self, block: Tensor, parts: Sequence[Tensor]) -> None:
        values = block.clone()
        values.view(-1)[self._num_values :] = 0.0
        self._codec.encode(values, parts)
        counts = block.view(-1)[self._num_values :].clamp(max=_MOST)
        parts[self.numbers][self._num_values :].copy_(counts)

    def decode(self, parts: Sequence[Tensor], block: Tensor) -> None:
        self._codec.decode(parts, block)
        block.view(-1)[self._num_values :].copy_(parts[self.numbers][self._num_values :])


def _largest(block: Tensor) -> Tensor:
    """max|x| of every row, NaN if there is one: without their sign, bits of fp32 are in order."""
    return (block.view(torch.int32) & 0x7FFFFFFF).amax(1).view(torch.float32)


def _power(k: Tensor) -> Tensor:
    """2**k as a column, by its bits: a vectorised pow may round."""
    return ((k + _BIAS) << _MANTISSA).view(torch.float32).unsqueeze(1)


Codecs = Mapping[str, Codec]
"""The codec of every edge that takes one."""
_PLAIN = Rounded(torch.float32)
PLAIN: Codecs = dict.fromkeys(("rows", "pooled", *GRADIENT_EDGES), _PLAIN)


def make_codecs(form: WireForm) -> Codecs:
    """The codec of every edge that takes one."""
    found: dict[str, Codec] = {}
    for edge in PLAIN:
        scaled = edge in GRADIENT_EDGES
        found[edge] = {
            "fp32": _PLAIN,
            "fp16": ScaledHalf() if scaled else Rounded(torch.float16),
            "bf16": Rounded(torch.bfloat16),
            "int8": RowInt8(),
        }[form.codec(edge)]
    return found


class Message:
    """Blocks in one buffer of bytes: wide parts first, so that each is aligned.

    Args:
        blocks: fp32 ``[n, D]`` each, and their codecs. They are read by `sent`, written by
            `decode`.
    """

    def __init__(self, blocks: Sequence[tuple[Tensor, Codec]]) -> None:
        self._blocks = [(block, codec) for block, codec in blocks if block.numel()]
        shapes = [part for b, c in self._blocks for part in c.parts(b.shape[0], b.shape[1])]
        sizes = [dtype.itemsize * count for dtype, count in shapes]
        order = sorted(range(len(shapes)), key=lambda i: -shapes[i][0].itemsize)
        ends = [0, *accumulate(sizes[i] for i in order)]
        device = self._blocks[0][0].device if self._blocks else None
        self._wire = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        begins = dict(zip(order, ends, strict=False))
        self._parts = [
            self._wire[begins[i] : begins[i] + sizes[i]].view(dtype)
            for i, (dtype, _) in enumerate(shapes)
        ]
        self._is_encoded = False

    def sent(self) -> Tensor:
        """The bytes to send; blocks are read the first time only."""
        if not self._is_encoded:
            for (block, codec), parts in self._by_block():
                codec.encode(block, parts)
            self._is_encoded = True
        return self._wire

    def received(self) -> Tensor:
        """The bytes to receive into."""
        return self._wire

    def decode(self) -> None:
        """Write the blocks: of what arrived, or, at a sender, as the receivers will have them."""
        for (block, codec), parts in self._by_block():
            codec.decode(parts, block)

    def _by_block(self) -> list[tuple[tuple[Tensor, Codec], list[Tensor]]]:
        found, at = [], 0
        for block, codec in self._blocks:
            count = len(codec.parts(*block.shape))
            found.append(((block, codec), self._parts[at : at + count]))
            at += count
        return found


def coded(
    tensor: Tensor, codec: Codec, *, others: tuple[int, Codec] | None = None
) -> Tensor | Message:
    """What to post for ``tensor``: itself if it travels as it is, else a message.

    Args:
        tensor: ``[n, D]``; of a 16-bit dtype it travels as it is.
        codec: Of its rows.
        others: The first row that has another codec, and that.
    """
    first, other = (len(tensor), codec) if others is None else others
    is_plain = all(c is _PLAIN for c in (codec, other)) or tensor.dtype != torch.float32
    return tensor if is_plain else Message([(tensor[:first], codec), (tensor[first:], other)])


def coded_flat(vector: Tensor, codec: Codec, num_values: int) -> Tensor | Message:
    """What to post for a flat ``vector`` of so many numbers and then counts, in rows of `CHUNK`.

    Counts have the codec's dtype but no scale, so that they stay counts and the bytes follow from
    the length alone.
    """
    if codec is _PLAIN:
        return vector
    pure, whole = (CHUNK * (n // CHUNK) for n in (num_values, len(vector)))
    blocks: list[tuple[Tensor, Codec]] = [(vector[:pure].view(-1, CHUNK), codec)]
    for first, last, width in ((pure, whole, CHUNK), (whole, len(vector), -1)):
        if first < last:
            flagged = _Flagged(codec, max(0, num_values - first))
            blocks.append((vector[first:last].view(-1 if width > 0 else 1, width), flagged))
    return Message(blocks)


def settle(parcel: Tensor | Message) -> None:
    """Make what this rank has of a parcel that it sends what the receivers will have of it."""
    if isinstance(parcel, Message):
        parcel.sent()
        parcel.decode()


def wire_bytes(block: Tensor, codec: Codec) -> int:
    """Bytes of ``block`` in what `coded` makes of it."""
    if block.dtype != torch.float32:
        return block.numel() * block.element_size()
    return sum(dtype.itemsize * count for dtype, count in codec.parts(*block.shape))
