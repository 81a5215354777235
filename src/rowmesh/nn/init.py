"""Initial values as a counter-based hash, so that every plan and world size starts equal.

No generator state, no broadcast: each rank makes just the rows it holds.
"""

import hashlib

import torch
from torch import Tensor

from rowmesh.errors import InputError
from rowmesh.tables import TableConfig

__all__ = ["fill_initial_values", "fill_table", "initial_values"]

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit integer
_MIX_1 = -0x40A7B892E31B1A47  # the multipliers of SplitMix64's finaliser
_MIX_2 = -0x6B2FB644ECCEEE15
_CHUNK_ELEMENTS = 1 << 18  # keeps the int64 intermediates of a chunk inside the cache


def initial_values(
    config: TableConfig, rows: Tensor, *, seed: int, columns: tuple[int, int] | None = None
) -> Tensor:
    """Values of ``rows`` before the first step: uniform in ``config.init_range()``.

    value(r, c) = low + (high - low) * u, where u takes the top 24 bits of
    mix(mix(key + r * golden) + (c + 1) * golden), key a digest of (seed, table name), and mix
    SplitMix64's finaliser. It depends on (seed, table, row, column) and nothing else. The
    ``zero_row`` of an adopted table, if any, is zero.

    Args:
        config: The table.
        rows: ``[n]`` int64 row numbers.
        seed: Of the model.
        columns: First and last + 1; default all.

    Returns:
        ``[n, columns]`` in fp32 on the device of ``rows``.
    """
    key = _key(config, seed)
    first, last = columns or (0, config.embedding_dim)
    numbers = torch.arange(first + 1, last + 1, device=rows.device)
    low, high = config.init_range()
    bits = _mix(_mix(rows * _GOLDEN + key).unsqueeze(1) + numbers * _GOLDEN)
    uniform = ((bits >> 40) & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)
    values = uniform.mul_(high - low).add_(low)
    zero_row = getattr(config, "zero_row", None)
    return values if zero_row is None else values.masked_fill_((rows == zero_row).unsqueeze(1), 0.0)


def fill_initial_values(
    out: Tensor,
    config: TableConfig,
    rows: Tensor,
    *,
    seed: int,
    columns: tuple[int, int] | None = None,
) -> None:
    """Write the initial values of ``rows`` into ``out``, a chunk at a time."""
    step = max(1, _CHUNK_ELEMENTS // config.embedding_dim)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        out[start : start + step] = initial_values(config, part, seed=seed, columns=columns)


@torch.no_grad()
def fill_table(out: Tensor, config: TableConfig, *, seed: int) -> None:
    """Write the whole table's initial values into ``out``: `initial_values`, then ``init_fn``.

    What ``init_fn`` draws does not depend on what the program has drawn, nor on the device: it is
    given memory on CPU.

    Raises:
        InputError: If ``init_fn`` fails.
    """
    fill_initial_values(out, config, torch.arange(len(out), device=out.device), seed=seed)
    if config.init_fn is None:
        return
    whole = out.cpu()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_key(config, seed))
        try:
            config.init_fn(whole)
        except Exception as error:
            kind = type(error).__name__
            raise InputError(f"init_fn of table {config.name!r} failed: {kind}: {error}") from error
    out.copy_(whole)


def _key(config: TableConfig, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{config.name}".encode()).digest()[:8]
    return int.from_bytes(digest, "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
