"""Codecs in words: which edges take one, how settings name them, and the bytes they make.

What they do to numbers is in `rowmesh.comm.codecs`; docs/codecs.md has the formulas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rowmesh.errors import InputError, did_you_mean
from rowmesh.placement.plan import Codec, Plan

__all__ = [
    "CHUNK",
    "EXACT",
    "GRADIENT_EDGES",
    "WIRE_CODECS",
    "WireForm",
    "describe_codecs",
    "parse_codecs",
    "wire_form",
]

WIRE_CODECS: Final = ("fp32", "fp16", "bf16", "int8")
CHUNK: Final = 128  # numbers of a dense bucket that are coded as one row
GRADIENT_EDGES: Final = ("backward", "hot gradients", "dense")
_EDGES: Final = ("rows", "pooled", *GRADIENT_EDGES)
_GROUPS: Final = {
    "forward": ("rows", "pooled"),
    "backward": ("backward", "hot gradients"),
    **{edge: (edge,) for edge in ("rows", "pooled", "hot gradients", "dense")},
}


def parse_codecs(text: str) -> tuple[Codec, ...]:
    """A word for all edges, as ``bf16``, or pairs, as ``forward=fp16,backward=bf16,dense=bf16``.

    ``forward`` are the edges rows and pooled, ``backward`` those of gradients of rows (backward and
    hot gradients); an edge may be named by itself. The last pair that names an edge counts; edges
    that none names stay fp32.

    Raises:
        InputError: If a word is unknown.
    """
    chosen: dict[str, str] = {}
    for item in text.split(","):
        key, has_key, name = (part.strip() for part in item.rpartition("="))
        if name not in WIRE_CODECS:
            hint = did_you_mean(name, WIRE_CODECS)
            raise InputError(
                f"codecs {text!r}: unknown codec {name!r}{hint} (one for all edges, or pairs as in "
                f"forward=fp16,backward=bf16)"
            )
        if has_key and key not in _GROUPS:
            raise InputError(f"codecs {text!r}: unknown edge {key!r}{did_you_mean(key, _GROUPS)}")
        chosen |= dict.fromkeys(_GROUPS[key] if has_key else _EDGES, name)
    named = [(edge, chosen.get(edge, "fp32")) for edge in _EDGES]
    return tuple(Codec(edge=edge, stack=(name,)) for edge, name in named if name != "fp32")


def describe_codecs(codecs: Sequence[Codec]) -> str:
    """For people: ``rows: bf16, dense: threshold(0.01)+int8``, or ``none``."""
    return ", ".join(f"{c.edge}: {'+'.join(c.stack)}" for c in codecs) or "none"


@dataclass(frozen=True, slots=True)
class WireForm:
    """Which codec each edge has, by name, and the bytes that follow."""

    names: tuple[tuple[str, str], ...] = ()

    def codec(self, edge: str) -> str:
        """Of an edge: fp32 if nothing else was said."""
        return dict(self.names).get(edge, "fp32")

    def vector_bytes(self, edge: str, dim: int) -> int:
        """Bytes of a vector of ``dim`` fp32 numbers on an edge.

        fp32: 4 D; bf16: 2 D; fp16: 2 D, of a gradient one more for its power of two; int8: D and
        4 for its scale.
        """
        name = self.codec(edge)
        if name == "int8":
            return dim + 4
        if name == "fp16":
            return 2 * dim + (edge in GRADIENT_EDGES)
        return (2 if name == "bf16" else 4) * dim

    def flat_bytes(self, edge: str, elements: int) -> int:
        """Bytes of so many numbers in a row, of which each `CHUNK` is coded as a vector."""
        chunks, rest = divmod(elements, CHUNK)
        whole = chunks * self.vector_bytes(edge, CHUNK)
        return whole + (self.vector_bytes(edge, rest) if rest else 0)


EXACT: Final = WireForm()


def wire_form(plan: Plan) -> WireForm:
    """Of a plan's codecs; stacks of several, and thresholds, have no form yet and count as fp32."""
    single = [c for c in plan.codecs if len(c.stack) == 1 and c.stack[0] in WIRE_CODECS]
    return WireForm(tuple((c.edge, c.stack[0]) for c in single))
