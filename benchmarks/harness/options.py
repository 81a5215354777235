"""Settings as flags: a dataclass says them once, with their defaults and what they mean."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

from rowmesh.errors import InputError, RowmeshError, did_you_mean
from rowmesh.train.launch import exit_code
from rowmesh.train.stop import INTERRUPTED

__all__ = ["Parser", "Report", "one_sentence", "parse", "parse_shape"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What all reports take."""

    out: Annotated[Path, "path of the report without a suffix"] = Path()
    again: Annotated[bool, "also what is stored"] = False
    quick: Annotated[bool, "tiny settings: shows that it works"] = False
    json: Annotated[bool, "print the summary as JSON"] = False


class Parser(argparse.ArgumentParser):
    """Of flags; a wrong one raises `InputError` with one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise."""
        raise InputError(f"{message}; --help lists the flags")


def parse(
    words: Sequence[str],
    *kinds: type[Any],
    command: str,
    about: str | None,
    quick: Mapping[str, Any] | None = None,
) -> list[Any]:
    """An instance of each of the dataclasses ``kinds``, from flags.

    A field is a flag, ``--its-name``, of the type of its default: a tuple is written with commas,
    ``False`` is a switch. It is annotated with what it means, and with the words that a tuple may
    have if they are few.

    Args:
        words: Of the command line.
        kinds: With fields of names of their own.
        command: What the words follow, for --help.
        about: For --help.
        quick: Defaults that --quick changes.

    Raises:
        InputError: If a word is no flag, or cannot be read.
    """
    p = Parser(description=about, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False)
    flags = [_Flag.of(kind, field) for kind in kinds for field in dataclasses.fields(kind)]
    for flag in flags:
        flag.add_to(p)
    given = vars(p.parse_args(words))
    values = {
        flag.name: flag.read(given[flag.name])
        for flag in flags
        if given[flag.name] not in (None, False)
    }
    if values.get("quick"):
        values = {**(quick or {}), **values}
    return [
        kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})
        for kind in kinds
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    default: Any
    told: str
    known: Sequence[str]

    @classmethod
    def of(cls, kind: type[Any], field: "dataclasses.Field[Any]") -> "_Flag":
        hint = get_type_hints(kind, include_extras=True)[field.name]
        told, known = (*hint.__metadata__, ())[:2]
        return cls(field.name, field.default, told, known)

    def add_to(self, p: argparse.ArgumentParser) -> None:
        flag = f"--{self.name.replace('_', '-')}"
        if self.default is False:
            p.add_argument(flag, action="store_true", help=self.told)
        else:
            told = f"{self.told} (default {_written(self.default)})"
            p.add_argument(flag, metavar="", help=told.replace("%", "%%"))

    def read(self, given: Any) -> Any:
        if isinstance(given, bool):
            return given
        if not isinstance(self.default, tuple):
            return _one(self.name, given, self.default)
        words, like = given.split(","), self.default[0]
        for word in words if self.known else ():
            if word not in self.known:
                close = did_you_mean(word, self.known)
                raise InputError(f"--{self.name}: {word!r} is unknown{close}")
        if isinstance(like, int) and not isinstance(like, bool):
            words = [number for word in words for number in _numbers(word)]
        return tuple(_one(self.name, word, like) for word in words)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, tuple):
        return str(value)
    return ",".join("x".join(map(str, v)) if isinstance(v, tuple) else _written(v) for v in value)


def _numbers(word: str) -> list[str]:
    """``11-13`` is 11, 12 and 13."""
    first, _, last = word.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        return [word]
    return [str(number) for number in range(int(first), int(last) + 1)]


def _one(name: str, word: str, like: Any) -> Any:
    if isinstance(like, tuple):
        return parse_shape(word)
    if isinstance(like, bool):
        if word not in ("on", "off"):
            raise InputError(f"--{name} {word!r}: say on, off, or off,on")
        return word == "on"
    try:
        return type(like)(word)
    except ValueError:
        kind = "a whole number" if isinstance(like, int) else "a number"
        raise InputError(f"--{name}: {word!r} is not {kind}") from None


def parse_shape(word: str) -> tuple[int, int]:
    """``2x3`` as 2 hosts and 3 ranks on each.

    Raises:
        InputError: If it is not said so.
    """
    hosts, _, local = word.partition("x")
    if not (hosts.isdecimal() and local.isdecimal() and int(hosts) > 0 and int(local) > 0):
        raise InputError(f"shape {word!r}: say hosts x ranks, as 2x2")
    return int(hosts), int(local)


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """End with one sentence on stderr: 2 for bad input, 130 for Ctrl-C, 1 for other failures."""
    try:
        yield
    except RowmeshError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
