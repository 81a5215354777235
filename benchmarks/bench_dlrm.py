"""The benchmark contract: DLRM on synthetic clicks under torchrun, one RESULT line.

::

    torchrun --nproc-per-node 2 benchmarks/bench_dlrm.py --plan auto

Rank 0 prints ``RESULT`` and a JSON object. Times are medians on rank 0 (exchanges lock the ranks
together); a loss is the mean over all samples of all ranks; ``ms_dense`` is a step of the dense
layers alone, on all ranks at once, with no communication. The flags are the peer script's.
``--trace FILE`` traces more steps after the measured ones, which it so does not slow down.
"""

import argparse
import functools
import itertools
import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from choosing import add_plan_flags, choose_plan, summary
from cores import add_own_cores_flag, bind_to_own_cores
from dense_step import DENSE, EPS, dense_parts, least_dense_parts, sizes
from forecasting import Foretold, forecast_ms, pairs
from harness.gates import Gate
from harness.rounds import nic_bytes, timed
from torch import Tensor

import rowmesh as rm
from rowmesh.data.synthetic import SyntheticClicks
from rowmesh.models.layers import seed_dense
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.storage import keep_freed_memory
from rowmesh.trace.summary import summarise
from rowmesh.trace.table import format_summary

MAX_TRACE_STEPS = 1000  # a recorder that is full does not end the steps


def main() -> None:
    """Train, measure, print."""
    args = parse_args()
    torch.set_num_threads(1)
    if not args.default_malloc:
        keep_freed_memory()
    mesh = rm.init_mesh(timeout_s=180.0 if args.gate else 60.0)
    tracing = rm.Tracing(mesh, args.trace, num_steps=args.trace_steps) if args.trace else None
    job = build(args, mesh)
    losses = [job.step(i) for i in range(args.warmup)]
    if args.own_cores:  # threads that communicate have started
        bind_to_own_cores()
    if args.gate:
        Work(args, job).serve(losses)
        return
    measured = measure(args, job)
    losses += measured.pop("losses")
    if tracing is not None:
        trace(tracing, job.step, mesh, first=args.warmup + args.steps)
    first = job.clicks.batch_at(mesh.rank, 0)
    result = measured | {
        "ms_dense": round(dense_parts(args, job.model, mesh, first, 6)["ms"], 2),
        "predicted_ms": forecast_ms(args, job.clicks, job.plan),
        "trace": tracing.summary.to_dict() if tracing and tracing.summary else None,
        "losses": mesh.total(torch.stack(losses)).tolist() if args.losses else None,
        **describe(args, job),
    }
    if mesh.rank == 0:
        print("RESULT " + json.dumps(result), flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The model under its plan; ``step`` trains on batch ``number`` and gives the loss."""

    clicks: SyntheticClicks
    mesh: rm.Mesh
    model: Any
    plan: rm.Plan
    plan_s: float
    step: Callable[[int], Tensor]

    def settle(self) -> None:
        """Wait for gradients that follow the last step, and for batches that have been begun ahead.

        Collective:
            All ranks.
        """
        for engine in sharded_engines(self.model):
            engine.rest.finish()
            for fetch in engine.look_ahead.begun:
                fetch.wait()
                for handle in fetch.arriving:
                    handle.wait()

    def ahead_rows(self) -> Counter[str]:
        """Rows so far that owners sent ``early``, under an earlier step, and ``late``; of all
        ranks. At depth 1 none is counted. Of a batch that is being begun some may be.

        Collective:
            All ranks.
        """
        found: Counter[str] = Counter(early=0, late=0)
        ahead = [engine.look_ahead for engine in sharded_engines(self.model)]
        mine = {"early": sum(a.num_early for a in ahead), "late": sum(a.num_late for a in ahead)}
        for rank in self.mesh.gather_objects(mine, edge=None):
            found.update(rank)
        return found


def build(args: argparse.Namespace, mesh: rm.Mesh) -> Job:
    """Data, model, plan and optimiser.

    Collective:
        All ranks.
    """
    clicks = SyntheticClicks(
        cap=int(args.cap),
        alpha=args.alpha,
        pooling=args.pooling,
        batch_size=args.batch,
        labels="coin",
    )
    model = rm.models.DLRM(
        rm.EmbeddingBagCollection(clicks.tables(args.dim), device="meta", seed=args.seed),
        dense_in_features=13,
        dense_arch_layer_sizes=sizes(args.bottom),
        over_arch_layer_sizes=sizes(args.top),
    )
    layers = [*model.dense_arch.named_parameters(), *model.over_arch.named_parameters()]
    seed_dense(layers, args.seed)
    started = time.perf_counter()
    plan = choose_plan(args, model, mesh, clicks)
    plan_s = time.perf_counter() - started
    if mesh.rank == 0 and args.show_plan:
        print(plan, flush=True)
    rm.shard(model, plan, mesh)
    optimizer = rm.Optimizer(
        model,
        dense=functools.partial(DENSE[args.dense_opt], lr=args.lr),
        sparse=rm.RowwiseAdagrad(lr=args.lr, eps=EPS),
    )
    step = make_step(args, model, mesh, clicks=clicks, optimizer=optimizer)
    return Job(clicks=clicks, mesh=mesh, model=model, plan=plan, plan_s=plan_s, step=step)


def make_step(
    args: argparse.Namespace,
    model: Any,
    mesh: rm.Mesh,
    *,
    clicks: SyntheticClicks,
    optimizer: rm.Optimizer,
) -> Callable[[int], Tensor]:
    """A training step on this rank's batches, which go round; steps are numbered from 0 on."""
    batches = [clicks.batch_at(mesh.rank, i) for i in range(args.batches)]
    source = rm.Pipeline(model).batches(itertools.cycle(batches))

    def step(number: int) -> Tensor:
        batch = next(source)
        assert batch is batches[number % len(batches)]
        with mesh.trace.phase("dense forward"):
            loss = mesh.mean(model(batch))
        with mesh.trace.phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Run the steps after the warm-up: their losses, times, and bytes beside the predicted ones.

    Collective:
        All ranks.
    """
    mesh, losses = job.mesh, []
    rows = job.ahead_rows()
    job.settle()
    mesh.total(0)
    before = nic_bytes() or (0, 0)
    mesh.ledger.reset()
    cpu, marks = time.process_time(), [time.perf_counter()]
    for i in range(args.steps):
        losses.append(job.step(args.warmup + i))
        marks.append(time.perf_counter())
    cpu = time.process_time() - cpu
    sent = mesh.ledger.by_edge()
    job.settle()
    mesh.total(0)
    moved = (nic_bytes() or (0, 0))[0] - before[0]
    rows = job.ahead_rows() - rows
    times = [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    foretold = Foretold(job.clicks, job.plan, mesh, args.batches).over(args.warmup, args.steps)
    return {
        "losses": losses,
        "ms_median": round(median(times), 2),
        "ms_min": round(min(times), 2),
        "samples_s": round(args.batch * mesh.world / median(times) * 1e3),
        "cpu_ms": round(1e3 * cpu / args.steps, 1),
        "ahead_rows": {key: round(rows[key] / args.steps, 1) for key in ("early", "late")},
        "mb_host_step": host_megabytes(mesh, moved / args.steps),
        "ledger_bytes": average(mesh.gather_objects(sent), args.steps),
        "predicted_mb": round(
            float(mesh.total(foretold.total())) / mesh.world / args.steps / 1e6, 4
        ),
        "bytes_are_exact": all(mesh.gather_objects(foretold == pairs(sent))),
    }


def describe(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """What ran, where and of which code."""
    return {
        "plan": summary(job.plan),
        "plan_s": round(job.plan_s, 3),
        "exactness": job.plan.exactness.value,
        "world": job.mesh.world,
        "hosts": job.mesh.topology.hosts,
        "args": vars(args),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "rowmesh": rm.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def parse_args() -> argparse.Namespace:
    """The flags of the peer script that make sense here, and the plan's."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add_job_flags(p)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--losses", action="store_true", help="print the loss of every step")
    p.add_argument("--trace", metavar="FILE", help="write a Chrome trace, print its table")
    p.add_argument("--trace-steps", type=int, default=10, help="steps to trace")
    p.add_argument("--gate", help="after the warm-up, step when this folder says so (race.py)")
    args = p.parse_args()
    if not 1 <= args.trace_steps <= MAX_TRACE_STEPS:
        p.error(f"--trace-steps is {args.trace_steps}, but must be from 1 to {MAX_TRACE_STEPS}")
    return args


def add_job_flags(p: argparse.ArgumentParser) -> None:
    """Those of `build`: data, model, plan and optimiser."""
    add_plan_flags(p)
    add_own_cores_flag(p)
    p.add_argument("--show-plan", action="store_true", help="print the plan first")
    p.add_argument("--cap", type=float, default=1e6, help="most rows of a table")
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--batch", type=int, default=2048, help="samples per rank")
    p.add_argument("--pooling", type=int, default=1)
    p.add_argument("--alpha", type=float, default=1.05)
    p.add_argument("--bottom", default="512,256,64")
    p.add_argument("--top", default="512,512,256,1")
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--dense-opt", default="adagrad", choices=sorted(DENSE))
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--batches", type=int, default=10, help="distinct batches, cycled")
    p.add_argument("--seed", type=int, default=0, help="of the initial weights")
    p.add_argument("--default-malloc", action="store_true", help="return freed memory every step")


class Work:
    """What this rank does in a race: the steps go on from the warm-up, so many at every gate."""

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        self.args, self.job, self.mesh, self.number = args, job, job.mesh, args.warmup
        self.foretold = Foretold(job.clicks, job.plan, job.mesh, args.batches)
        self.sent: Counter[tuple[str, str]] = Counter()

    def serve(self, losses: list[Tensor]) -> None:
        """Until the race says stop."""
        ready = {
            "losses": self.mesh.total(torch.stack(losses)).tolist(),
            "plan": summary(self.job.plan),
            "exactness": self.job.plan.exactness.value,
            "predicted_ms": forecast_ms(self.args, self.job.clicks, self.job.plan),
            "versions": {"torch": torch.__version__, "rowmesh": rm.__version__},
        }
        gate = Gate(self.args.gate, rank=self.mesh.rank)
        work = {"steps": self.steps, "dense": self.dense, "trace": self.trace}
        gate.serve(ready, work)

    def steps(self, count: int) -> dict[str, Any]:
        """Times; bytes of every host on its card and in the ledger; whether they were foretold."""
        first, mesh, local = self.number, self.mesh, self.mesh.topology.local
        self.sent.clear()
        found = timed(self.one, count=count, barrier=lambda: mesh.total(0), settle=self.job.settle)
        rows = self.job.ahead_rows()
        exact = self.sent == self.foretold.over(first, count)
        cross = sum(n for (_, link), n in self.sent.items() if link == "cross")
        ranks = mesh.gather_objects((found["nic"], cross, exact))
        hosts = [ranks[i : i + local] for i in range(0, mesh.world, local)]
        return {
            "ms": found["ms"],
            "nic": [host[0][0] for host in hosts],
            "ledger": [sum(number for _, number, _ in host) for host in hosts],
            "ahead_rows": {"step": self.number, **rows},  # since the first step
            "bytes_are_exact": all(exact for _, _, exact in ranks),
        }

    def trace(self, count: int) -> dict[str, Any] | None:
        """The summary of ``count`` traced steps, after one that is not; None if none fitted."""
        mesh = self.mesh
        self.one()
        for _ in range(count):
            mesh.trace.begin_step(self.number)
            self.one()
            if mesh.trace.is_on:  # else there were too many events
                mesh.trace.end_step()
        recording = mesh.trace.take(rank=mesh.rank, host=mesh.topology.host(mesh.rank))
        found = summarise(mesh.gather_objects(recording, edge=None))
        return None if found is None else found.to_dict()

    def one(self) -> None:
        """A step, its bytes counted without those of the barriers around a round."""
        self.mesh.ledger.reset()
        self.job.step(self.number)
        self.sent += pairs(self.mesh.ledger.by_edge())
        self.number += 1

    def dense(self, count: int) -> dict[str, float]:
        """Steps of the dense layers alone."""
        batch = self.job.clicks.batch_at(self.mesh.rank, 0)
        return least_dense_parts(self.args, self.job.model, self.mesh, batch, count)


def trace(tracing: rm.Tracing, step: Callable[[int], Tensor], mesh: rm.Mesh, *, first: int) -> None:
    """Run steps until the trace is written; rank 0 prints its table."""
    for number in itertools.count(first):
        tracing.begin_step(number)
        step(number)
        tracing.end_step()
        if tracing.summary is not None:
            break
    if mesh.rank == 0:
        print(format_summary(tracing.summary), flush=True)


def host_megabytes(mesh: rm.Mesh, sent: float) -> list[float] | None:
    """Megabytes a step that left every host's interface."""
    if "TB_IFNAME" not in os.environ:
        mesh.gather_objects(None)
        return None
    everyone = mesh.gather_objects(sent)
    return [round(b / 1e6, 3) for b in everyone[:: mesh.topology.local]]


def average(ledgers: list[dict[str, dict[str, int]]], steps: int) -> dict[str, dict[str, float]]:
    """Bytes a rank and step, by edge and link, averaged over ranks."""
    found: dict[str, dict[str, float]] = {}
    for ledger in ledgers:
        for edge, links in ledger.items():
            for link, number in links.items():
                row = found.setdefault(edge, {})
                row[link] = round(row.get(link, 0) + number / steps / len(ledgers), 1)
    return found


def commit() -> str | None:
    """The checkout's commit, if it is one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


if __name__ == "__main__":
    main()
