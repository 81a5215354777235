"""What a codec costs and saves: bytes of a vector on its way, seconds to encode and decode it."""

from dataclasses import dataclass
from typing import Final

from rowmesh.placement import TablePlan
from rowmesh.placement.codecs import CHUNK, GRADIENT_EDGES, WireForm

__all__ = ["Vector", "chunk_on", "vector_on"]

# Seconds to encode and to decode a number, one core of a shared x86 machine, rows of 64; rounded
# (benchmarks/bench_codecs.py). "scaled" is fp16 of gradients.
_SECONDS: Final = {
    "fp32": (0.0, 0.0),
    "fp16": (2e-10, 2e-10),
    "scaled": (1.4e-9, 6e-10),
    "bf16": (2.2e-10, 2e-10),
    "int8": (1.5e-9, 6e-10),
}


@dataclass(frozen=True, slots=True)
class Vector:
    """Of one vector: bytes on the wire, seconds at the sender and at the receiver."""

    num_bytes: float
    encode_s: float
    decode_s: float


def vector_on(edge: str, dim: int, form: WireForm, *, table: TablePlan | None = None) -> Vector:
    """A vector of ``dim`` numbers on an edge; a row of ``table`` as it is if that has 16 bits."""
    if edge == "rows" and table is not None and table.data_type != "fp32":
        return Vector(table.row_bytes / table.embedding_dim * dim, 0.0, 0.0)
    name = form.codec(edge)
    is_scaled = name == "fp16" and edge in GRADIENT_EDGES
    encode_s, decode_s = _SECONDS["scaled" if is_scaled else name]
    return Vector(float(form.vector_bytes(edge, dim)), encode_s * dim, decode_s * dim)


def chunk_on(edge: str, form: WireForm) -> Vector:
    """The mean over the numbers of a bucket: of one of them."""
    whole = vector_on(edge, CHUNK, form)
    return Vector(whole.num_bytes / CHUNK, whole.encode_s / CHUNK, whole.decode_s / CHUNK)
