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
import hashlib
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from racing.goals import goal_shapes
from racing.judge import refusal
from racing.machine import cpu_name
from racing.peer import TORCHREC, default_folder, ensure
from racing.report import write_report
from racing.session import Settings, run_group
from racing.shapes import ALL, Shape, parse_shapes
from racing.stored import check_stored, is_stored, store, stored_files

from rowmesh.errors import InputError
from rowmesh.lab import check_permitted

REPOSITORY = Path(__file__).resolve().parent.parent
LEAST = {"rounds": 5, "steps": 2, "trial_steps": 2, "batches": 1}  # rounds: docs/measuring.md


def main() -> None:
    """Run what is not stored yet, then report."""
    try:
        args = parse_args(sys.argv[1:])
        shapes = choose_shapes(args)
        check(args, shapes)
        session = describe_session(args)
        todo = [s for s in shapes if args.again or not is_stored(args.out, s, session)]
        check_stored(args.out, session, todo=todo)
        peer = ensure(args.peer_env) if todo else ""
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"{len(todo)} of {len(shapes)} shapes to run beside TorchRec {TORCHREC}", flush=True)
    settings = Settings(**session["settings"], peer=peer, folder=args.out.resolve())
    for stale in args.out.glob("*.topology") if args.again else ():
        stale.unlink()
    run(todo, settings, session=session, out=args.out)
    results = [json.loads(path.read_text()) for path in stored_files(args.out)]
    write_report(results, args.out)
    print(f"{args.out}.md")
    sys.exit(1 if any("refused" in result for result in results) else 0)


def make_parser() -> argparse.ArgumentParser:
    """The race's flags; from --cap on they are the model's and both scripts get them."""
    p = argparse.ArgumentParser(
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


def describe_session(args: argparse.Namespace) -> dict[str, Any]:
    """What ran, where and of which code; stored with every shape."""
    given = {field.name for field in dataclasses.fields(Settings)} & set(vars(args))
    commit = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(commit, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return {
        "settings": {name: getattr(args, name) for name in sorted(given)},
        "commit": found.stdout.strip() or None,
        "code": code_hash(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {cpu_name()}, {os.cpu_count()} cores",
        "command": describe_command(args),
    }


def describe_command(args: argparse.Namespace) -> str:
    """What gives the same again: the flags that are not as by default, no path of this machine."""
    words = ["python", "benchmarks/race.py", "--out", args.out.name]
    for name, value in vars(args).items():
        if name in ("out", "peer_env") or value == make_parser().get_default(name):
            continue
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        words += [f"--{name.replace('_', '-')}", *[shown] * (value is not True)]
    return shlex.join(words)


def code_hash() -> str:
    """Of the package and the benchmarks as they are, so that a commit of a page changes nothing."""
    digest = hashlib.sha256()
    folders = [REPOSITORY / name for name in ("src", "benchmarks")]
    code = (".py", ".c", ".h")
    for path in sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in code):
        digest.update(f"{path.relative_to(REPOSITORY)}\n".encode() + path.read_bytes())
    for name, value in sorted(os.environ.items()):
        if name.startswith("ROWMESH_"):  # switches of the code
            digest.update(f"{name}={value}\n".encode())
    return digest.hexdigest()[:12]


def run(todo: list[Shape], settings: Settings, *, session: dict[str, Any], out: Path) -> None:
    """Group after group; a shape is stored, good or refused, as soon as that is known."""
    started, done = time.monotonic(), 0
    out.mkdir(parents=True, exist_ok=True)
    for _, group in itertools.groupby(todo, key=lambda shape: shape.group):
        left = list(group)
        try:
            for shape, result in run_group(list(left), settings, say):
                reason = refusal(result)
                given = {"refused": reason} if reason else {}
                store(out, shape, result | given, session=session)
                left.remove(shape)
                done += 1
                say(f"{shape.name}: {reason or 'done'}; {remaining(started, done, len(todo))}")
        except (RuntimeError, InputError) as error:
            for shape in left:
                say(f"{shape.name}: refused: {error}")
                store(out, shape, {"refused": str(error)}, session=session)
            done += len(left)


def remaining(started: float, done: int, total: int) -> str:
    """An estimate from the shapes so far."""
    minutes = (time.monotonic() - started) / 60
    left = minutes / done * (total - done)
    return f"{done} of {total} shapes in {minutes:.0f} min, about {left:.0f} min left"


def say(line: str) -> None:
    """A line of progress."""
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)


if __name__ == "__main__":
    main()
