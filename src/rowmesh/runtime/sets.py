"""Sets of rows on the wire: as a list, as a bitmap, or not at all, whichever is fewest words."""

import torch
from torch import Tensor

__all__ = ["decode_set", "encode_set", "set_words"]


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
