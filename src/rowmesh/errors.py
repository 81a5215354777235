"""Every exception rowmesh raises on purpose.

::

    RowmeshError
    ├── InputError        a batch, a table or an option is wrong (also a ValueError)
    ├── PlanError         a plan is not valid, or not for this model and mesh (also a ValueError)
    │   └── NotExecutable a valid plan that this version's runtime cannot run yet
    ├── StepError         forward, backward and step were called in an order that has no meaning
    ├── DivergedError     a run's numbers are not finite any more (also an ArithmeticError)
    ├── PeerError         another rank failed, left or went silent (also a RuntimeError)
    └── LabError          making or removing the hosts of a lab failed (also a RuntimeError)

What is worth a word but no error is a `RowmeshWarning`, which is a UserWarning.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "DivergedError",
    "InputError",
    "LabError",
    "NotExecutable",
    "PeerError",
    "PlanError",
    "RowmeshError",
    "RowmeshWarning",
    "StepError",
    "check_range",
    "did_you_mean",
    "printable",
    "shown",
]

_MOST_SHOWN = 200  # characters of a value from outside in a sentence


class RowmeshError(Exception):
    """Base of all errors raised by rowmesh; names in its sentence cannot steer a terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(RowmeshError, ValueError):
    """A batch, a table or an option is wrong; the message names the value and the limit."""


class PlanError(RowmeshError, ValueError):
    """A plan breaks a rule of the format, or does not fit the model or the mesh."""


class NotExecutable(PlanError):  # noqa: N818 - reads as the statement it makes
    """A valid plan asks for something the runtime of this version does not run yet."""


class StepError(RowmeshError, RuntimeError):
    """The order of forward, backward, step and zero_grad has no meaning."""


class DivergedError(RowmeshError, ArithmeticError):
    """Losses, predictions or weights of a run are not finite; the message names the step."""


class PeerError(RowmeshError, RuntimeError):
    """Another rank failed, left or did not answer; the message is that rank's sentence."""


class LabError(RowmeshError, RuntimeError):
    """Making or removing the hosts of a lab failed; the message names the command."""


class RowmeshWarning(UserWarning):
    """Something works otherwise than one may think; the message says how, and the way out."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``": did you mean 'x'?"`` for the nearest known word, else the list of known words."""
    names = sorted(known)
    near = difflib.get_close_matches(word[:_MOST_SHOWN], names, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f": known are {', '.join(names)}"


def check_range(option: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise `InputError` unless ``low <= value <= high``."""
    if not low <= value <= high:
        limit = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
        raise InputError(f"{option} is {value}, but must be {limit}")


def printable(text: str) -> str:
    """``text`` with control characters, which a terminal would obey, as escapes like ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def shown(value: object) -> str:
    """The ``repr`` of a value from outside, cut where it is too long for a sentence."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; lists in lists
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
