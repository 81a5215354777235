"""Turns: every arm once a round; and reports of settings of ours, timed and traced in turn."""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from .cells import Cells
from .contestants import Contestant, Entry, Place
from .figures import round_ms
from .machine import say
from .pages import check_out, write_page
from .settings import Settings
from .shapes import Shape, parse_shapes

__all__ = ["Rounds", "add_turn_flags", "figures", "report_turns", "turns"]

Name = TypeVar("Name", str, int)
Found = TypeVar("Found")
Rounds = Sequence[Mapping[str, Mapping[str, Any]]]
LEAST = {"rounds": 5, "steps": 2, "traced": 1}
QUICK = {"shapes": "1x2", "rounds": 5, "steps": 2, "traced": 1, "cap": 500.0, "batch": 64}


def turns(names: Sequence[Name], measure: Callable[[Name], Found]) -> Iterator[dict[Name, Found]]:
    """Round after round without end what ``measure`` finds of every arm.

    Forward through the list, then backward, so that a drift of the machine meets all alike.
    """
    for number in itertools.count():
        order = names if number % 2 == 0 else names[::-1]
        yield {name: measure(name) for name in order}


def add_turn_flags(p: argparse.ArgumentParser, *, shapes: str) -> None:
    """Those of the shapes, the rounds and the model, whose defaults are the race's."""
    p.add_argument("--out", type=Path, required=True, help="path of the report without a suffix")
    p.add_argument("--again", action="store_true", help="also shapes that are stored")
    p.add_argument("--quick", action="store_true", help="one shape without hosts, small batches")
    p.add_argument("--shapes", default=shapes)
    p.add_argument("--pooling", type=int, default=1)
    p.add_argument("--alpha", type=float, default=1.05)
    for name, number, told in (
        ("rounds", 6, "every setting once in each"),
        ("steps", 6, "of a round; the first is left out"),
        ("traced", 4, "steps of a round that are traced"),
    ):
        p.add_argument(f"--{name}", type=_at_least(LEAST[name]), default=number, help=told)
    p.add_argument("--cap", type=float, default=2e5, help="most rows of a table")
    p.add_argument("--batch", type=int, default=2048, help="samples per rank")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least {least}")
        return int(text)

    return number


def report_turns(
    args: argparse.Namespace,
    *,
    title: Sequence[str],
    entries_of: Callable[[Shape, Path], Sequence[Sequence[Entry]]],
    describe: Callable[[Mapping[str, Any]], list[str]],
    is_enough: Callable[[Rounds], bool] = lambda rounds: False,
) -> None:
    """Every shape, printed and written to OUT.json and OUT.md as soon as it is done.

    A shape is stored in OUT/ and is not run again.

    Args:
        args: With `add_turn_flags`.
        title: Lines of the page before the shapes.
        entries_of: Lists of the settings of a shape, with the file of its calibration: those of a
            list are alive at once and take turns.
        describe: The lines of a shape's ``shape``, ``plans`` and ``rounds``.
        is_enough: Whether the rounds of a list are enough.
    """
    check_out(args.out)
    for name, value in QUICK.items() if args.quick else ():
        setattr(args, name, value)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "again")}
    cells = Cells.of(args.out, settings)
    shapes = parse_shapes(args.shapes, pooling=str(args.pooling), alpha=str(args.alpha))
    page, found = [*title[:1], "", *title[1:], ""], []
    for shape in shapes:
        stored = None if args.again else cells.find(shape.name)
        if stored is None:
            stored = _take_turns(args, shape, entries_of, is_enough)
            cells.store(shape.name, stored)
        found.append(stored)
        lines = describe(found[-1])
        print("\n".join(lines), flush=True)
        page += [*lines, ""]
        document = {"about": cells.header(), "shapes": found}
        write_page(args.out, "\n".join(page), document, header=cells.header())


def _take_turns(
    args: argparse.Namespace,
    shape: Shape,
    entries_of: Callable[[Shape, Path], Sequence[Sequence[Entry]]],
    is_enough: Callable[[Rounds], bool],
) -> dict[str, Any]:
    """The rounds of all settings of a shape, and their plans."""
    settings = Settings(rounds=args.rounds, steps=args.steps, cap=args.cap, batch=args.batch)
    plans: dict[str, Any] = {}
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / f"{shape.layout}.topology"
        for number, entries in enumerate(entries_of(shape, topology)):
            with Place(shape.hosts, shape.local, flags=settings.script_flags(shape)) as place:
                place.set_rate(shape.rate)
                if not number:
                    say(f"{shape.name}: rowmesh calibrate")
                    place.calibrate(topology, settings.model_settings())
                for entry in entries:
                    place.start(entry)
                    say(f"{shape.name}: {entry.name} is ready")
                place.set_rate(shape.rate)
                alive = {entry.name: contestant for entry, contestant in place.alive.items()}
                plans |= {name: contestant.ready["plan"] for name, contestant in alive.items()}
                found = _rounds(args, alive, shape, is_enough)
                rounds = [a | b for a, b in itertools.zip_longest(rounds, found, fillvalue={})]
    return {"shape": shape.name, "plans": plans, "rounds": rounds}


def _rounds(
    args: argparse.Namespace,
    alive: Mapping[str, Contestant],
    shape: Shape,
    is_enough: Callable[[Rounds], bool],
) -> list[dict[str, Any]]:
    """Of those alive at once."""

    def measure(name: str) -> dict[str, Any]:
        steps = alive[name].steps(args.steps)
        return steps | {"trace": alive[name].trace(args.traced)}

    found: list[dict[str, Any]] = []
    for turn in itertools.islice(turns(list(alive), measure), args.rounds):
        found.append(turn)
        say(f"{shape.name}: round {len(found)} of {args.rounds}")
        if is_enough(found):
            break
    return found


def figures(rounds: Rounds, name: str) -> dict[str, list[float]]:
    """Of every round: ms a step, exposed ms, MB a host sends a step."""
    found: dict[str, list[float]] = {key: [] for key in ("ms", "exposed", "mb")}
    for mine in (turn[name] for turn in rounds):
        found["ms"].append(round_ms(mine["ms"]))
        found["exposed"].append(mine["trace"]["communication"][0]["exposed_ms"])
        found["mb"].append(fmean(mine["ledger"]) / len(mine["ms"]) / 1e6)
    return found
