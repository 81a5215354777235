"""The time gate: is a step of this code as fast as one of an older commit?

::

    python benchmarks/bench_gate.py --base COMMIT --out REPORT

On the shapes of the race's goals (root and iproute2; a shape of one host needs neither): the older
code, the same again as a control, and this one, alive at once and in turn, round by round, until
the interval of both ratios is at most 2 % wide on each side, or --rounds are over. --native 0 runs
all of them without compiled kernels. Run nothing else meanwhile. Exit code 1 if a step is more than
3 % longer by the median.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.contestants import Entry
from harness.figures import Interval, interval, ratio
from harness.machine import REPOSITORY
from harness.options import Parser, one_sentence
from harness.pages import table
from harness.turns import Rounds, add_turn_flags, figures, report_turns

BEFORE, CONTROL, NOW = "before", "before, again", "now"
MAX_RATIO, HALF_WIDTH, LEAST_ROUNDS = 1.03, 0.02, 6
SHAPES = "1x2,2x1@1gbit,2x1@200mbit,2x2@200mbit"
KINDS = {  # settings whose steps are compared
    "exact": ("--plan", "row_wise", "--exchange", "rows", "--depth", "2"),
    "lossy": ("--plan", "row_wise", "--exchange", "rows", "--depth", "2", "--codecs", "int8"),
    "tables": ("--plan", "table_wise", "--depth", "1"),
    "hot": ("--plan", "row_wise", "--exchange", "rows", "--tiers", "hot:4096", "--depth", "2"),
}


def main() -> None:
    """Every shape, then the verdict."""
    args = parse_args()
    slower: list[str] = []
    with older_tree(args.base) as tree:
        report_turns(
            args,
            title=[
                f"# A step of this code beside one of {args.base}",
                f"Ratios are taken round by round; a step may be at most {MAX_RATIO} times as "
                f"long. The control is the older code beside itself.",
            ],
            entries_of=lambda shape, topology: [
                entries_of(kind, tree, merges=shape.hosts > 1 and shape.local > 1, env=env_of(args))
                for kind in args.kinds.split(",")
            ],
            describe=lambda result: describe(result, slower),
            is_enough=is_enough,
        )
    if slower:
        sys.exit(f"slower than {MAX_RATIO} times: {', '.join(slower)}")


def parse_args() -> argparse.Namespace:
    """The flags; the model's defaults are the race's."""
    p = Parser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add_turn_flags(p, shapes=SHAPES)
    p.set_defaults(rounds=30)
    p.add_argument("--base", required=True, help="the older commit")
    p.add_argument("--kinds", default="exact,lossy", help=f"of {', '.join(KINDS)}")
    p.add_argument("--native", choices=["0", "1"], default="1", help="compiled kernels")
    args = p.parse_args()
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        p.error(f"--kinds {', '.join(sorted(unknown))}: known are {', '.join(KINDS)}")
    return args


def env_of(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """What is added to the environment of all."""
    return () if args.native == "1" else (("ROWMESH_NATIVE", "0"),)


@contextlib.contextmanager
def older_tree(commit: str) -> Iterator[Path]:
    """A work tree of ``commit`` with its compiled code, taken away at the end."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        _run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], REPOSITORY)
        try:
            _run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], tree)
            yield tree
        finally:
            _run(["git", "worktree", "remove", "--force", str(tree)], REPOSITORY)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")


def entries_of(
    kind: str, tree: Path, *, merges: bool, env: tuple[tuple[str, str], ...]
) -> list[Entry]:
    """Three contestants with the same flags."""
    flags = (*KINDS[kind], "--merge", "on" if merges and "row_wise" in KINDS[kind] else "off")
    trees = {BEFORE: tree, CONTROL: tree, NOW: REPOSITORY}
    return [
        Entry(role="ours", name=f"{kind}: {name}", flags=flags, env=env, tree=where)
        for name, where in trees.items()
    ]


def over_before(rounds: Rounds, kind: str, name: str) -> Interval:
    """A step of ``name`` over one of the older code, round by round."""
    return ratio(*(figures(rounds, f"{kind}: {n}")["ms"] for n in (name, BEFORE)))


def kinds_of(names: Sequence[str]) -> list[str]:
    """Kinds that ran."""
    return [kind for kind in KINDS if f"{kind}: {NOW}" in names]


def is_enough(rounds: Rounds) -> bool:
    """Whether both ratios of the kind that ran last are known well enough."""
    if len(rounds) < LEAST_ROUNDS:
        return False
    kind = list(rounds[-1])[-1].split(":")[0]
    found = [over_before(rounds, kind, name) for name in (CONTROL, NOW)]
    return all(f.high - f.mid <= HALF_WIDTH and f.mid - f.low <= HALF_WIDTH for f in found)


def describe(result: Mapping[str, Any], slower: list[str]) -> list[str]:
    """A line for every kind; those that are too slow are added to ``slower``."""
    rows = []
    for kind in kinds_of(list(result["plans"])):
        rounds = [turn for turn in result["rounds"] if f"{kind}: {NOW}" in turn]
        now, control = (over_before(rounds, kind, name) for name in (NOW, CONTROL))
        if now.mid > MAX_RATIO:
            slower.append(f"{result['shape']} {kind}")
        before = interval(figures(rounds, f"{kind}: {BEFORE}")["ms"])
        rows.append([kind, f"{before.mid:.0f}", now.told(3), control.told(3), len(rounds)])
    heads = ["setting", "ms/step before", "now / before", "control", "rounds"]
    return [f"## {result['shape']}", "", *table(heads, rows)]


if __name__ == "__main__":
    with one_sentence():
        main()
