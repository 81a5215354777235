"""Settings of which one alone can count: what is given beats what a recipe says.

Note: without this a setting would be ignored in silence. The same key given twice is its last
value; two keys that exclude each other are an error where one person wrote both, on one command
line or in one TOML file; a key of the command line switches off what the recipe chose instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rowmesh.errors import InputError
from rowmesh.typed import Text

__all__ = ["check_choices", "settle_choices"]

_PLANNED: Final = (
    *("split", "exchange", "allow_inexact", "constraints", "tiers", "groups", "layout", "sync"),
    *("depth", "merge", "codecs", "allow"),
)
_PAIRS: Final = (
    ("training.steps", "training.epochs"),
    ("data.held_out_files", "data.held_out_fraction"),
    ("plan.profile", "plan.batches"),
    *(("plan.file", f"plan.{name}") for name in _PLANNED),
)
_OFF: Final = {  # what a setting is that leaves the choice to the other one
    "training.epochs": "none",
    "data.held_out_files": "0",
    "data.held_out_fraction": "0.0",
    "plan.profile": "none",
    "plan.file": "none",
    "plan.refresh": "none",
}


def settle_choices(base: Any, given: Mapping[str, Text]) -> dict[str, Text]:
    """``given`` settings, and what they switch off of ``base``.

    Args:
        base: A recipe: a `RunConfig`, or the objects of a document.
        given: By dotted key.

    Raises:
        InputError: If two of ``given`` exclude each other.
    """
    made = dict(given)
    known = _with_parts(given)
    for pair in _PAIRS:
        is_refreshed = _is_on(known, "plan.refresh") or _is_on(base, "plan.refresh")
        if pair[1] == "plan.tiers" and is_refreshed:
            continue  # a plan from a file whose hot rows are chosen again as these say
        if _both(known, pair):
            raise InputError(_sentence(pair))
        for mine, other in (pair, pair[::-1]):
            if _is_on(known, mine) and other in _OFF and _is_on(base, other) and other not in made:
                made[other] = Text(_OFF[other])
    return made


def check_choices(document: Mapping[str, Any]) -> None:
    """Refuse a recipe that says two things of which one alone can count.

    Raises:
        InputError: Names both.
    """
    for pair in _PAIRS:
        if pair[1] == "plan.tiers" and _is_on(document, "plan.refresh"):
            continue
        if _both(document, pair):
            raise InputError(_sentence(pair))


def _sentence(pair: Sequence[str]) -> str:
    return f"{pair[0]} and {pair[1]} exclude each other: give one of them"


def _with_parts(given: Mapping[str, Text]) -> dict[str, Any]:
    """Dotted keys as objects in objects; of keys as long as ``plan.constraints.pin`` the part."""
    found: dict[str, Any] = {}
    for key, text in given.items():
        part, _, name = key.partition(".")
        found.setdefault(part, {})[name.partition(".")[0]] = text.text
    return found


def _both(base: Any, pair: Sequence[str]) -> bool:
    return all(_is_on(base, key) for key in pair)


def _is_on(base: Any, key: str) -> bool:
    """Whether a setting is there and chooses something."""
    for name in key.split("."):
        base = base.get(name) if isinstance(base, Mapping) else getattr(base, name, None)
    return not (base is None or (key in _OFF and _is_nothing(base)))


def _is_nothing(value: Any) -> bool:
    try:
        return str(value).lower() == "none" or float(value) == 0
    except (TypeError, ValueError, OverflowError):
        return False
