"""Sets of rows on the wire: as a list, as a bitmap, or not at all, whichever is fewest words; a bit
for every row of a list."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["clean_first", "decode_set", "encode_set", "pack_bits", "set_words", "unpack_bits"]


def set_words(count: int, size: int) -> int:
    """Words that tell which ``count`` of ``size`` rows are meant.

    0 if all are, else min(count, ceil(size / 32)); a word has the dtype of ids, 4 or 8 bytes.
    """
    return 0 if count == size else min(count, -(-size // 32))


def encode_set(rows: Tensor, size: int, *, dtype: torch.dtype) -> Tensor:
    """The words of a set; ``rows`` ascending and distinct in 0 .. size - 1."""
    words = set_words(len(rows), size)
    if words == 0 or words == len(rows):
        return rows[:words].to(dtype)
    bits = torch.zeros(words * 32, dtype=torch.int64, device=rows.device)
    bits[rows.long()] = 1
    shifts = torch.arange(32, device=rows.device)
    return ((bits.view(words, 32) << shifts).sum(1) - (bits[31::32] << 32)).to(dtype)


def decode_set(words: Tensor, count: int, size: int) -> Tensor:
    """The rows that `encode_set` was given."""
    if count == size:
        return torch.arange(size, device=words.device)
    if count == len(words):
        return words.long()
    shifts = torch.arange(32, device=words.device)
    bits = (words.long().unsqueeze(1) >> shifts) & 1
    return bits.view(-1).nonzero().squeeze(1)


def pack_bits(parts: Sequence[Tensor]) -> Tensor:
    """Bools as bytes, eight in each, every part from a byte of its own."""
    if not parts:
        return torch.empty(0, dtype=torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=parts[0].device)
    padded = [torch.nn.functional.pad(part.to(torch.uint8), (0, -len(part) % 8)) for part in parts]
    return (torch.cat(padded).view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def unpack_bits(words: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts that `pack_bits` was given."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = ((words.unsqueeze(1) >> shifts) & 1).view(-1).bool()
    begins = accumulate((8 * -(-n // 8) for n in sizes), initial=0)
    return [bits[first : first + n] for first, n in zip(begins, sizes, strict=False)]


def clean_first(late: Tensor) -> tuple[Tensor, int]:
    """Where each row goes when those that are not late come first; and how many these are."""
    order = torch.argsort(late, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(late), device=late.device)
    return place, len(late) - int(late.sum())
