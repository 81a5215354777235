"""The floor of a shape: the least time a step can take there, from the ids and two constants.

numpy only; nothing of rowmesh's runtime or cost model. The dense layers are timed as ours and as
torch's own, and the shorter step counts. H hosts, C bytes/s each way a host (full
duplex), D columns in fp32, P dense parameters. Bytes are of all hosts together; a host's share is
1/H of them (perfect balance, which no schedule beats). No latency, no headers, no lookups.

**Least exact bytes**, of these three ways to exchange a table, the least one table by table:

* rows: host h fetches every distinct row that any of its ranks reads and whose home is another
  host (home = row mod H), once, and sends its gradient once: (4 + 8 D) sum_h R_h, 4 for the id;
* pooled: the table is on one host, which sends a vector for every bag of the others and gets its
  gradient: (H-1)/H (8 D bags + 4 ids), the table being any of the hosts';
* whole: every host has the table, gradients are summed: 8 D (H-1) rows.

Copies of single rows do not help: a row that all hosts read costs 8 D (H-1) with a home and with
copies, and one that fewer read costs more with copies. Dense gradients are summed once a host, by
the least an all-reduce can move: 8 (H-1) P.

Outside this floor, and able to send less, are: homes chosen with knowledge of the ids (here they
are chosen without knowing the ids, but the batches go round: give each row the home that reads it
most often, and fewer rows travel); a home that moves; a bag half pooled, half rows; lossy numbers.

**Time**, of whole batches, steps one after another without end, exactly in order. The longest of:

* link: bytes / H / C;
* dense: a step of the dense layers alone, on all ranks at once (measured);
* path: what step i updates and step i+1 reads again ("again" bytes: rows, or bags holding one)
  can leave only between the backward of i and the forward of i+1; dense gradients can travel
  during the backward too: max(F + B + again/(H C), F + (again + dense bytes)/(H C)), with F and B
  the measured forward and backward of the layers that need the embeddings (interaction and top).

All other bytes may hide (rows of i+1 that i does not touch can be fetched early). A step that
hides nothing takes `serial_ms` = dense + link; it is no floor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Floor", "count_bytes", "dense_parameters", "floor"]

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes:
    """Least bytes of a step, all hosts together; ``again`` of ``tables`` are held up by a step."""

    tables: float
    dense: float
    again: float
    ways: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Milliseconds of each bound and megabytes a host and step; ``ms`` is the longest."""

    link_ms: float
    dense_ms: float
    path_ms: float
    serial_ms: float
    megabytes: float
    ms: float


def dense_parameters(
    bottom: Sequence[int], top: Sequence[int], *, features: int, inputs: int
) -> int:
    """Weights and biases of a DLRM's two MLPs, with dot products of all pairs between them."""
    pairs = features * (features + 1) // 2
    layers = [(inputs, *bottom), (bottom[-1] + pairs, *top)]
    return sum((a + 1) * b for sizes in layers for a, b in pairwise(sizes))


def count_bytes(
    steps: Sequence[Sequence[Sequence[Ids]]],
    *,
    rows: Sequence[int],
    hosts: int,
    dim: int,
    parameters: int,
) -> Bytes:
    """Least bytes a step, the mean over consecutive pairs of ``steps``.

    Args:
        steps: Ids of [step][rank][table], as [bags, pooling]; ranks in host order.
        rows: Rows of each table.
        hosts: Number of hosts.
        dim: Columns.
        parameters: Dense parameters.
    """
    ways: dict[str, int] = {}
    totals, again = 0.0, 0.0
    for table, num_rows in enumerate(rows):
        found = np.zeros((3, 2))
        for before, now in pairwise(steps):
            parts = [[rank[table] for rank in step] for step in (before, now)]
            found += _ways(parts[0], parts[1], num_rows=num_rows, hosts=hosts, dim=dim)
        found /= max(len(steps) - 1, 1)
        best = int(found[:, 0].argmin())
        name = ("rows", "pooled", "whole")[best]
        ways[name] = ways.get(name, 0) + 1
        totals, again = totals + found[best, 0], again + found[best, 1]
    dense = 8.0 * (hosts - 1) * parameters
    return Bytes(tables=float(totals), dense=dense, again=float(again), ways=ways)


def floor(
    least: Bytes, *, hosts: int, bytes_per_s: float | None, dense_ms: float, fwd: float, bwd: float
) -> Floor:
    """The floor; ``bytes_per_s`` None is a link that costs nothing; ``fwd``, ``bwd`` in ms."""
    per_ms = np.inf if bytes_per_s is None else bytes_per_s * hosts / 1e3
    link = (least.tables + least.dense) / per_ms
    held = least.again / per_ms
    path = max(fwd + bwd + held, fwd + held + least.dense / per_ms)
    return Floor(
        link_ms=float(link),
        dense_ms=dense_ms,
        path_ms=float(path),
        serial_ms=float(dense_ms + link),
        megabytes=(least.tables + least.dense) / hosts / 1e6,
        ms=float(max(link, dense_ms, path)),
    )


def _ways(
    before: list[Ids], now: list[Ids], *, num_rows: int, hosts: int, dim: int
) -> npt.NDArray[np.float64]:
    """[rows, pooled, whole] x [bytes of step ``now``, bytes held up between the two steps]."""
    old, new = _mask(before, num_rows), _mask(now, num_rows)
    fetched = _remote(now, num_rows, hosts)
    held = (fetched & old).sum() + (_remote(before, num_rows, hosts) & new).sum()
    bags, ids = sum(len(part) for part in now), sum(part.size for part in now)
    held_bags = sum(int(old[part].any(axis=1).sum()) for part in now)
    held_bags += sum(int(new[part].any(axis=1).sum()) for part in before)
    others, vector = hosts - 1, 4.0 * dim
    rows = [(4 + 2 * vector) * fetched.sum(), vector * held]
    pooled = [2 * vector * bags + 4 * ids, vector * held_bags]
    whole = [2 * vector * num_rows, 2 * vector * int((old & new).sum())]
    return np.array([rows, np.multiply(pooled, others / hosts), np.multiply(whole, others)])


def _remote(parts: list[Ids], num_rows: int, hosts: int) -> Mask:
    """[host, row]: the host reads the row, whose home is another host."""
    local = len(parts) // hosts
    read = [_mask(parts[h * local : (h + 1) * local], num_rows) for h in range(hosts)]
    for host, mask in enumerate(read):
        mask[host::hosts] = False
    return np.stack(read)


def _mask(parts: list[Ids], num_rows: int) -> Mask:
    mask = np.zeros(num_rows, dtype=bool)
    for part in parts:
        mask[part.reshape(-1)] = True
    return mask
