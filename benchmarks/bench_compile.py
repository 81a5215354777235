"""What `torch.compile` of the dense layers is worth: eager and compiled steps in turn.

::

    python benchmarks/bench_compile.py
    torchrun --nproc-per-node 2 benchmarks/bench_compile.py

bench_dlrm.py's model, data and plan, twice in one process (or in one on every rank): one stays as
it is, ``model.compile()`` is called on the other. Both train on the same batches, a round of steps
in turn, and whose turn is first changes from round to round. Rank 0 prints ``RESULT`` and a JSON
object: the median over rounds of a round's ms/step, and of the ratio compiled / eager, each with
its 95 % interval; seconds of the first steps, which compile; graphs, and how often one broke; the
difference of the first step's loss, and the largest of all: AdaGrad makes much of the last bits.
Run nothing else meanwhile.
"""

import argparse
import json
import os
import platform
import time
from statistics import fmean
from typing import Any

import torch
from bench_dlrm import Job, add_job_flags, build, commit
from choosing import summary
from cores import bind_to_own_cores
from harness.figures import Interval, interval, round_ms
from harness.rounds import timed
from torch import Tensor
from torch._dynamo.utils import counters

import rowmesh as rm
from rowmesh.storage import keep_freed_memory

ARMS = ("eager", "compiled")


def main() -> None:
    """Compile, warm up, take turns, print."""
    args = parse_args()
    torch.set_num_threads(1)
    if not args.default_malloc:
        keep_freed_memory()
    mesh = rm.init_mesh(timeout_s=600.0)  # a rank that compiles keeps the others waiting
    arms = {name: Arm(args, mesh) for name in ARMS}
    arms["compiled"].job.model.compile(mode=args.mode, dynamic=args.dynamic)
    first_s = {name: arm.warm_up(args.warmup) for name, arm in arms.items()}
    if args.own_cores:  # threads that communicate have started
        bind_to_own_cores()
    compiled = dict(graphs=counters["stats"]["unique_graphs"], breaks=num_breaks())
    rounds: dict[str, list[float]] = {name: [] for name in ARMS}
    for number in range(args.rounds):
        for name in ARMS if number % 2 == 0 else reversed(ARMS):
            rounds[name].append(arms[name].round(args.steps))
    ratios = [c / e for c, e in zip(rounds["compiled"], rounds["eager"], strict=True)]
    losses = {name: mesh.total(torch.stack(arm.losses)) for name, arm in arms.items()}
    apart = (losses["compiled"] - losses["eager"]).abs()
    result = {
        "ms_step": {name: shown(interval(found)) for name, found in rounds.items()},
        "compiled/eager": shown(interval(ratios)),
        "rounds": {name: [round(ms, 3) for ms in found] for name, found in rounds.items()},
        "first_steps_s": {name: round(s, 2) for name, s in first_s.items()},
        **compiled,
        "graphs_after": counters["stats"]["unique_graphs"],  # more: it compiled again while timed
        "difference_of_losses": {"first": float(apart[0]), "largest": float(apart.max())},
        "plan": summary(arms["eager"].job.plan),
        "world": mesh.world,
        "hosts": mesh.topology.hosts,
        "args": vars(args),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "rowmesh": rm.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if mesh.rank == 0:
        print("RESULT " + json.dumps(result), flush=True)


class Arm:
    """One of the two models: its steps go on from round to round."""

    def __init__(self, args: argparse.Namespace, mesh: rm.Mesh) -> None:
        self.job: Job = build(args, mesh)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Train on the next batch."""
        self.losses.append(self.job.step(len(self.losses)))

    def warm_up(self, count: int) -> float:
        """Seconds of the first steps, of which the very first compiles."""
        started = time.perf_counter()
        for _ in range(count):
            self.step()
        self.job.settle()
        return time.perf_counter() - started

    def round(self, count: int) -> float:
        """ms/step of a round, the mean over ranks.

        Collective:
            All ranks.
        """
        mesh = self.job.mesh
        ms = timed(self.step, count=count, barrier=lambda: mesh.total(0), settle=self.job.settle)[
            "ms"
        ]
        return fmean(mesh.gather_objects(round_ms(ms)))


def num_breaks() -> int:
    """Of graphs, so far."""
    return sum(counters["graph_break"].values())


def shown(found: Interval) -> dict[str, Any]:
    """Rounded, for the line."""
    ends = {name: round(getattr(found, name), 4) for name in ("low", "mid", "high")}
    return ends | {"coverage": round(found.coverage, 4)}


def parse_args() -> argparse.Namespace:
    """The flags of the job, and of the turns."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add_job_flags(p)
    p.add_argument("--mode", default="default", help="of torch.compile")
    p.add_argument("--dynamic", action=argparse.BooleanOptionalAction, help="of torch.compile")
    p.add_argument("--rounds", type=int, default=21)
    p.add_argument("--steps", type=int, default=11, help="of a round; the first is not counted")
    args = p.parse_args()
    if args.warmup < 1 or args.rounds < 1 or args.steps < 2:
        p.error("--warmup and --rounds must be at least 1, --steps at least 2")
    return args


if __name__ == "__main__":
    main()
