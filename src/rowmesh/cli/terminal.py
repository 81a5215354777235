"""What all commands share: options that mean the same everywhere, and how a command ends."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rowmesh.errors import InputError, RowmeshError, printable
from rowmesh.signals import INTERRUPTED, handled, interrupt
from rowmesh.train.launch import exit_code

__all__ = [
    "AllTables",
    "Commands",
    "Ranks",
    "Recipe",
    "Settings",
    "check_twice",
    "one_sentence",
    "say",
    "with_options",
]

_MOST_RANKS = 1024  # processes of one machine; more is a slip of the finger

Recipe = Annotated[
    str | None,
    typer.Argument(
        help="A recipe: a file, or demo, clicks, dcn, sequences, movietweetings, drift.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        help="Processes to start here; default one, or the ranks of torchrun.", max=_MOST_RANKS
    ),
]
AllTables = Annotated[
    bool, typer.Option("--all", help="Print every table, by its whole name, not 40 at most.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting of the recipe, as training.steps=100; may be repeated.",
    ),
]


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """End with one sentence on stderr (of rank 0) and 2 for bad input, 130 for a signal, else 1."""
    try:
        with handled(interrupt):
            yield
        return
    except RowmeshError as error:
        sentence, code = " ".join(str(error).split()), exit_code(error)
    except KeyboardInterrupt as error:
        sentence, code = f"stopped by {str(error) or 'SIGINT'}", INTERRUPTED
    except MemoryError as error:
        reason = " ".join(str(error).split())
        sentence, code = f"memory runs out: {reason}; choose a smaller batch or model", 2
    _complain(sentence)
    raise typer.Exit(code)


class Commands(TyperGroup):
    """Commands whose wrong options end in one sentence and 2, as all bad input does."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "rowmesh",
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; the process ends here unless ``standalone_mode`` is off."""
        words = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(words, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:  # of typer's own click or of click itself, as it is installed
            if not (standalone_mode and hasattr(error, "format_message")):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
            else:
                _complain(_explain(error, words))
            code = 2
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def say(text: str, *, err: bool = False) -> None:
    """Print ``text``, in which no name can steer the terminal."""
    typer.echo(printable(text), err=err)


def check_twice(settings: Sequence[str] | None, options: Mapping[str, Any]) -> None:
    """Refuse a setting of the plan that an option gives too, as ``{"tiers": "auto"}``.

    Raises:
        InputError: Names both.
    """
    for item in settings or ():
        key = item.partition("=")[0].strip()
        value = options.get(key.removeprefix("plan."))
        if key.startswith("plan.") and value is not None:
            raise InputError(f"--set {item} and an option give {value} for it: give one of them")


def with_options(settings: Sequence[str] | None, options: Mapping[str, Any]) -> tuple[str, ...]:
    """``settings`` and the options that are short for some of the plan, as ``{"file": file}``.

    Raises:
        InputError: If both say the same thing.
    """
    check_twice(settings, options)
    more = [f"plan.{key}={value}" for key, value in options.items() if value is not None]
    return (*(settings or ()), *more)


def _explain(error: Any, words: Sequence[str]) -> str:
    """What is wrong with the command line, with the word that is."""
    reason = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    _, colon, rest = reason.partition("': ")
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for i, word in enumerate(words):
            name, equals, value = word.partition("=")
            value = value if equals else next(iter(words[i + 1 :]), "")
            if name == option and colon:
                reason = f"{option} is {value!r}: {rest[:1].lower()}{rest[1:]}"
    path = " ".join(["rowmesh", *(context.command_path.split()[1:] if context else ())])
    return f"{' '.join(reason.split()).rstrip('.?')}; {path} --help tells more"


def _complain(sentence: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        say(f"rowmesh: {sentence}", err=True)
