"""What all commands share: options that mean the same everywhere, and how a command ends."""

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated

import typer

from rowmesh.errors import RowmeshError
from rowmesh.signals import INTERRUPTED, handled, interrupt
from rowmesh.train.launch import exit_code

__all__ = [
    "Ranks",
    "Recipe",
    "Settings",
    "one_sentence",
]

Recipe = Annotated[
    str | None,
    typer.Argument(
        help="A recipe: a file, or demo, clicks, dcn, sequences, movietweetings, drift.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(help="Processes to start here; default one, or the ranks of torchrun."),
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
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"rowmesh: {sentence}", err=True)
    raise typer.Exit(code)
