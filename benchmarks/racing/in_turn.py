"""Settings of ours alone on one shape: alive at once, in turn round by round, timed and traced."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rowmesh.files import write_whole

from .contestants import Entry, Place
from .judge import round_ms
from .machine import cpu_name
from .session import Settings
from .shapes import Shape, parse_shapes

__all__ = ["Rounds", "add_turn_flags", "figures", "report_turns"]

Rounds = Sequence[Mapping[str, Mapping[str, Any]]]
LEAST = {"rounds": 5, "steps": 2, "traced": 1}


def add_turn_flags(p: argparse.ArgumentParser, *, shapes: str) -> None:
    """Those of the shapes, the rounds and the model, whose defaults are the race's."""
    p.add_argument("--out", type=Path, required=True, help="path of the report without a suffix")
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

    Args:
        args: With `add_turn_flags`.
        title: Lines of the page before the shapes.
        entries_of: Lists of the settings of a shape, with the file of its calibration: those of a
            list are alive at once and take turns.
        describe: The lines of a shape's ``shape``, ``plans`` and ``rounds``.
        is_enough: Whether a list needs no more rounds.
    """
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about, found = _about(args), []
    page = [title[0], "", _about_line(about), "", *title[1:], ""]
    for shape in parse_shapes(args.shapes, pooling=str(args.pooling), alpha=str(args.alpha)):
        found.append(_take_turns(args, shape, entries_of, is_enough))
        lines = describe(found[-1])
        print("\n".join(lines), flush=True)
        page += [*lines, ""]
        document = json.dumps({"about": about, "shapes": found}, indent=1) + "\n"
        write_whole(args.out.with_name(args.out.name + ".json"), document)
        write_whole(args.out.with_name(args.out.name + ".md"), "\n".join(page))


def _take_turns(
    args: argparse.Namespace,
    shape: Shape,
    entries_of: Callable[[Shape, Path], Sequence[Sequence[Entry]]],
    is_enough: Callable[[Rounds], bool],
) -> dict[str, Any]:
    """The rounds of all settings of a shape, and their plans."""
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / f"{shape.layout}.topology"
        settings = _settings(args, topology.parent)
        flags, plans = settings.script_flags(shape), {}
        rounds: list[dict[str, Any]] = [{} for _ in range(args.rounds)]
        for number, entries in enumerate(entries_of(shape, topology)):
            with Place(shape.hosts, shape.local, flags=flags, peer="") as place:
                place.set_rate(shape.rate)
                if not number:
                    _say(f"{shape.name}: rowmesh calibrate")
                    place.calibrate(topology, settings.model_settings())
                for entry in entries:
                    place.start(entry)
                    _say(f"{shape.name}: {entry.name} is ready")
                place.set_rate(shape.rate)
                alive = {entry.name: contestant for entry, contestant in place.alive.items()}
                plans |= {name: contestant.ready["plan"] for name, contestant in alive.items()}
                for turn, found in enumerate(rounds):
                    for name in list(alive) if turn % 2 == 0 else list(reversed(alive)):
                        steps = alive[name].steps(args.steps)
                        found[name] = steps | {"trace": alive[name].trace(args.traced)}
                    _say(f"{shape.name}: round {turn + 1} of {args.rounds}")
                    if is_enough(rounds[: turn + 1]):
                        break
    rounds = [turn for turn in rounds if turn]
    return {"shape": shape.name, "plans": plans, "rounds": rounds}


def _settings(args: argparse.Namespace, folder: Path) -> Settings:
    return Settings(
        rounds=args.rounds,
        steps=args.steps,
        trial_steps=0,
        cap=args.cap,
        dim=64,
        batch=args.batch,
        bottom="512,256,64",
        top="512,512,256,1",
        batches=10,
        seed=0,
        dense_opt="adagrad",
        default_malloc=False,
        peer="",
        folder=folder,
    )


def figures(rounds: Rounds, name: str) -> dict[str, list[float]]:
    """Of every round: ms a step, exposed ms, MB a host sends a step."""
    found: dict[str, list[float]] = {key: [] for key in ("ms", "exposed", "mb")}
    for mine in (turn[name] for turn in rounds):
        found["ms"].append(round_ms(mine["ms"]))
        found["exposed"].append(mine["trace"]["communication"][0]["exposed_ms"])
        found["mb"].append(fmean(mine["ledger"]) / len(mine["ms"]) / 1e6)
    return found


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """What ran; no path of this machine."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    here = Path(__file__).parent
    commit = subprocess.run(git, cwd=here, capture_output=True, text=True, check=False)
    return {
        "args": {k: v for k, v in vars(args).items() if k != "out"},
        "commit": commit.stdout.strip() or None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
    }


def _about_line(found: Mapping[str, Any]) -> str:
    """The same for people."""
    flags = " ".join(f"{key}={value}" for key, value in found["args"].items())
    return f"{found['date']}; commit {found['commit']}; {found['machine']}; {flags}."


def _say(line: str) -> None:
    """A line of progress."""
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", file=sys.stderr, flush=True)
