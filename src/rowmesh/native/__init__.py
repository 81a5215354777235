"""Compiled loops for the hot paths of a step, where a compiler was there at installation.

Every function returns what the torch path beside its caller would, bit for bit (pairwise dots: but
for the order of their sums), or None (False) if it cannot: no library, or tensors that are not
contiguous, on the CPU, or of a dtype it knows. See docs/kernels.md.
"""

from rowmesh.native.bags import Places, flatten, ids_fit, make_keys
from rowmesh.native.codecs import decode_int8, encode_int8
from rowmesh.native.dots import pairwise_dots, pairwise_dots_backward
from rowmesh.native.library import describe, is_available
from rowmesh.native.runs import (
    keep_terms,
    mark_pooled,
    move_runs,
    run_numbers,
    run_starts,
    stable_sort,
)
from rowmesh.native.steps import block_squares, step_rowwise_adagrad
from rowmesh.native.sums import coalesce

__all__ = [
    "Places",
    "block_squares",
    "coalesce",
    "decode_int8",
    "describe",
    "encode_int8",
    "flatten",
    "ids_fit",
    "is_available",
    "keep_terms",
    "make_keys",
    "mark_pooled",
    "move_runs",
    "pairwise_dots",
    "pairwise_dots_backward",
    "run_numbers",
    "run_starts",
    "stable_sort",
    "step_rowwise_adagrad",
]
