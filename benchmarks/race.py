"""rowmesh beside TorchRec on emulated hosts, shape by shape, with the floor of each.

::

    python benchmarks/race.py --out benchmarks/reports/race_cpu2_DATE
    python benchmarks/race.py --out benchmarks/reports/race_goals_cpu2_DATE --goals

The second runs only the shapes that have a goal, and there only whom the goal is about (about half
an hour).
TorchRec is set up in an environment of its own, once. A shape is stored in OUT/ as soon as it is
done and is not run again unless --again; OUT.md, OUT.json and OUT.svg are made from all that are
stored, which must be of one code, settings and machine. Needs root and iproute2 for shapes of
several hosts. Run nothing else meanwhile. Exit code 1 if a shape was refused.
"""

import argparse
import dataclasses
import itertools
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from harness.cells import Cells
from harness.machine import say
from harness.options import Parser, one_sentence
from harness.settings import Settings
from harness.shapes import ALL, Shape, parse_shapes
from racing.goals import goal_shapes
from racing.judge import refusal
from racing.peer import TORCHREC, default_folder, ensure
from racing.report import write_report
from racing.session import run_group

from rowmesh.errors import InputError, LabError
from rowmesh.lab import check_permitted

LEAST = {"rounds": 5, "steps": 2, "trial_steps": 2, "batches": 1}  # rounds: docs/measuring.md


def main() -> None:
    """Run what is not stored yet, then report."""
    args = parse_args(sys.argv[1:])
    shapes = choose_shapes(args)
    check(args, shapes)
    cells = stored_cells(args)
    todo = [s for s in shapes if args.again or cells.find(s.name) is None]
    cells.check(but=[shape.name for shape in todo])
    peer = ensure(args.peer_env) if todo else ""
    print(f"{len(todo)} of {len(shapes)} shapes to run beside TorchRec {TORCHREC}", flush=True)
    given = cells.asked["settings"]
    settings = Settings(**given, peer=peer, folder=args.out.resolve())
    for stale in args.out.glob("*.topology") if args.again else ():
        stale.unlink()
    run(todo, settings, cells)
    results = [cell["found"] | {"session": cell["asked"] | cell["about"]} for cell in cells.every()]
    results.sort(key=lambda result: Shape(**result["shape"]).order)
    write_report(results, args.out)
    print(f"{args.out}.md")
    sys.exit(1 if any("refused" in result for result in results) else 0)


def make_parser() -> argparse.ArgumentParser:
    """The race's flags; from --cap on they are the model's and both scripts get them."""
    p = Parser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--out", type=Path, required=True, help="path of the report without a suffix")
    p.add_argument("--shapes", default=ALL, help=f"default {ALL}")
    p.add_argument("--pooling", default="1,20")
    p.add_argument("--alpha", default="1.05,1.2")
    p.add_argument("--goals", action="store_true", help="of these, shapes that have a goal")
    p.add_argument("--rounds", type=int, default=6, help="six give an interval of 97 %%")
    p.add_argument("--steps", type=int, default=6, help="of a round; the first is left out")
    p.add_argument("--trial-steps", type=int, default=6, help="the first is left out")
    p.add_argument("--peer-env", type=Path, default=default_folder(), help="TorchRec's environment")
    p.add_argument("--again", action="store_true", help="also shapes that are stored")
    p.add_argument("--cap", type=float, default=2e5, help="most rows of a table")
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--batch", type=int, default=2048, help="samples per rank")
    p.add_argument("--bottom", default="512,256,64")
    p.add_argument("--top", default="512,512,256,1")
    p.add_argument("--batches", type=int, default=10, help="distinct batches, cycled")
    p.add_argument("--seed", type=int, default=0, help="of the initial weights")
    p.add_argument("--dense-opt", default="adagrad", choices=["adagrad", "sgd"])
    p.add_argument("--default-malloc", action="store_true", help="return freed memory every step")
    return p


def parse_args(words: list[str]) -> argparse.Namespace:
    """No flag goes through to the scripts unseen: it could change what is raced.

    Raises:
        InputError: Naming the words that are no flags of the race.
    """
    args, unknown = make_parser().parse_known_args(words)
    if unknown:
        raise InputError(
            f"{shlex.join(unknown)}: no flag of the race, which alone says what both scripts run; "
            f"--help lists those it has"
        )
    return args


def choose_shapes(args: argparse.Namespace) -> list[Shape]:
    """All combinations of the flags, or those among them that have a goal.

    Raises:
        InputError: If a word cannot be read, or none has a goal.
    """
    shapes = parse_shapes(args.shapes, pooling=args.pooling, alpha=args.alpha)
    if not args.goals:
        return shapes
    chosen = [shape for shape in shapes if shape in goal_shapes()]
    if not chosen:
        known = ", ".join(shape.name for shape in goal_shapes())
        raise InputError(f"--goals: none of the shapes has a goal; these have: {known}")
    return chosen


def check(args: argparse.Namespace, shapes: list[Shape]) -> None:
    """What can be known to be wrong before anything starts.

    Raises:
        InputError: Naming it.
    """
    for name, least in LEAST.items():
        if getattr(args, name) < least:
            raise InputError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be at least {least}"
            )
    reason = check_permitted() if any(s.hosts > 1 for s in shapes) else None
    if reason is not None:
        raise InputError(f"{reason}; or race --shapes 1x2, which needs no permission")


def stored_cells(args: argparse.Namespace) -> Cells:
    """One a shape, with what ran, where and of which code."""
    given = {field.name for field in dataclasses.fields(Settings)} & set(vars(args))
    settings = {name: getattr(args, name) for name in sorted(given)}
    return Cells.of(args.out, settings, command=describe_command(args))


def stored_results(cells: Cells) -> list[dict[str, Any]]:
    """Of all shapes, in the order of the report."""
    found = [c["found"] | {"session": {**c["asked"], **c["about"]}} for c in cells.every()]
    return sorted(found, key=lambda result: Shape(**result["shape"]).order)


def describe_command(args: argparse.Namespace) -> str:
    """What gives the same again: the flags that are not as by default, no path of this machine."""
    words = ["python", "benchmarks/race.py", "--out", args.out.name]
    for name, value in vars(args).items():
        if name in ("out", "peer_env") or value == make_parser().get_default(name):
            continue
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        words += [f"--{name.replace('_', '-')}", *[shown] * (value is not True)]
    return shlex.join(words)


def run(todo: list[Shape], settings: Settings, cells: Cells) -> None:
    """Group after group; a shape is stored, good or refused, as soon as that is known."""
    started, done = time.monotonic(), 0
    cells.folder.mkdir(parents=True, exist_ok=True)
    for _, group in itertools.groupby(todo, key=lambda shape: shape.group):
        left = list(group)
        try:
            for shape, result in run_group(list(left), settings, say):
                reason = refusal(result)
                given = {"refused": reason} if reason else {}
                cells.store(shape.name, result | given)
                left.remove(shape)
                done += 1
                say(f"{shape.name}: {reason or 'done'}; {remaining(started, done, len(todo))}")
        except (LabError, InputError) as error:
            for shape in left:
                say(f"{shape.name}: refused: {error}")
                refused = {"shape": dataclasses.asdict(shape), "refused": str(error)}
                cells.store(shape.name, refused)
            done += len(left)


def remaining(started: float, done: int, total: int) -> str:
    """An estimate from the shapes so far."""
    minutes = (time.monotonic() - started) / 60
    left = minutes / done * (total - done)
    return f"{done} of {total} shapes in {minutes:.0f} min, about {left:.0f} min left"


if __name__ == "__main__":
    with one_sentence():
        main()
