"""The benchmark contract: DLRM on synthetic clicks under torchrun, one RESULT line.

::

    torchrun --nproc-per-node 2 benchmarks/bench_dlrm.py --plan auto

Rank 0 prints ``RESULT`` and a JSON object. Times are medians on rank 0 (exchanges lock the ranks
together); a loss is the mean over all samples of all ranks; ``ms_dense`` is a step of the dense
layers alone, on all ranks at once, with no communication. The flags are the peer script's.
"""

import argparse
import functools
import itertools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from racing.gates import Gate
from racing.rounds import nic_bytes, timed
from torch import Tensor

import rowmesh as rm
from rowmesh.data.synthetic import SyntheticClicks
from rowmesh.models.layers import seed_dense
from rowmesh.placement import load_plan
from rowmesh.storage import keep_freed_memory

EPS = 1e-8
DENSE = {
    "adagrad": functools.partial(torch.optim.Adagrad, eps=EPS),
    "sgd": torch.optim.SGD,
}


def main() -> None:
    """Train, measure, print."""
    args = parse_args()
    torch.set_num_threads(1)
    if not args.default_malloc:
        keep_freed_memory()
    mesh = rm.init_mesh(timeout_s=180.0 if args.gate else 60.0)
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
    batches = [clicks.batch_at(mesh.rank, i) for i in range(args.batches)]

    def step(number: int) -> Tensor:
        batch = batches[number % len(batches)]
        loss = mesh.mean(model(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step(i) for i in range(args.warmup)]
    if args.gate:
        serve(args, model=model, mesh=mesh, step=step, losses=losses, plan=plan, batch=batches[0])
        return
    mesh.total(0)
    before = nic_bytes() or (0, 0)
    mesh.ledger.reset()
    cpu, marks = time.process_time(), [time.perf_counter()]
    for i in range(args.steps):
        losses.append(step(args.warmup + i))
        marks.append(time.perf_counter())
    cpu = time.process_time() - cpu
    sent = mesh.ledger.by_edge()
    mesh.total(0)
    moved = (nic_bytes() or (0, 0))[0] - before[0]
    times = [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
    result = {
        "ms_median": round(median(times), 2),
        "ms_min": round(min(times), 2),
        "samples_s": round(args.batch * mesh.world / median(times) * 1e3),
        "cpu_ms": round(1e3 * cpu / args.steps, 1),
        "ms_dense": round(dense_only(args, model, mesh, batches[0]), 2),
        "mb_host_step": host_megabytes(mesh, moved / args.steps),
        "ledger_bytes": average(mesh.gather_objects(sent), args.steps),
        "plan": summary(plan),
        "plan_s": round(plan_s, 3),
        "exactness": plan.exactness.value,
        "losses": mesh.total(torch.stack(losses)).tolist() if args.losses else None,
        "world": mesh.world,
        "hosts": mesh.topology.hosts,
        "args": vars(args),
        "commit": commit(),
        "versions": {"torch": torch.__version__, "rowmesh": rm.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if mesh.rank == 0:
        print("RESULT " + json.dumps(result), flush=True)


def parse_args() -> argparse.Namespace:
    """The flags of the peer script that make sense here, and the plan's."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--plan", default="auto", help="auto, table_wise, row_wise, data_parallel, FILE")
    p.add_argument("--exchange", default="auto", choices=["auto", "rows", "pooled"])
    p.add_argument("--no-dedup", action="store_true", help="ask for every id, not every distinct")
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
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--batches", type=int, default=10, help="distinct batches, cycled")
    p.add_argument("--seed", type=int, default=0, help="of the initial weights")
    p.add_argument("--default-malloc", action="store_true", help="return freed memory every step")
    p.add_argument("--losses", action="store_true", help="print the loss of every step")
    p.add_argument("--gate", help="after the warm-up, step when this folder says so (race.py)")
    return p.parse_args()


def sizes(text: str) -> list[int]:
    """``"512,256"`` as numbers."""
    return [int(word) for word in text.split(",")]


def choose_plan(args: argparse.Namespace, model: Any, mesh: rm.Mesh, clicks: Any) -> rm.Plan:
    """A plan file, or a plan from the accesses of three batches (rank 0's, the same everywhere)."""
    if Path(args.plan).suffix == ".json":
        return load_plan(args.plan)
    sample = [clicks.batch_at(0, i).sparse_features for i in range(3)]
    stats = rm.Stats.from_batches(clicks.tables(args.dim), sample)
    return rm.make_plan(
        model,
        mesh.topology,
        stats=stats,
        split=args.plan,
        exchange=args.exchange,
        dedup=not args.no_dedup,
    )


def serve(
    args: argparse.Namespace,
    *,
    model: Any,
    mesh: rm.Mesh,
    step: Callable[[int], Tensor],
    losses: list[Tensor],
    plan: rm.Plan,
    batch: rm.Batch,
) -> None:
    """Take part in a race: the steps go on from the warm-up, so many at every gate."""
    numbers, local = itertools.count(args.warmup), mesh.topology.local

    def steps(count: int) -> dict[str, Any]:
        sent = mesh.ledger.by_link()["cross"]
        found = timed(lambda: step(next(numbers)), count=count, barrier=lambda: mesh.total(0))
        sent = mesh.ledger.by_link()["cross"] - sent
        ranks = mesh.gather_objects((found["nic"], sent))
        hosts = [ranks[i : i + local] for i in range(0, mesh.world, local)]
        return {
            "ms": found["ms"],
            "nic": [host[0][0] for host in hosts],
            "ledger": [sum(number for _, number in host) for host in hosts],
        }

    ready = {
        "losses": mesh.total(torch.stack(losses)).tolist(),
        "plan": summary(plan),
        "exactness": plan.exactness.value,
        "versions": {"torch": torch.__version__, "rowmesh": rm.__version__},
    }
    gate = Gate(args.gate, rank=mesh.rank)
    gate.serve(ready, {"steps": steps, "dense": lambda n: dense_parts(args, model, mesh, batch, n)})


def dense_only(args: argparse.Namespace, model: Any, mesh: rm.Mesh, batch: rm.Batch) -> float:
    """Median ms of forward, backward and step of the dense layers on fixed embeddings."""
    return dense_parts(args, model, mesh, batch, 6)["ms"]


def dense_parts(
    args: argparse.Namespace, model: Any, mesh: rm.Mesh, batch: rm.Batch, count: int
) -> dict[str, float]:
    """Median ms of a dense step, and of what waits for the embeddings: ``fwd`` and ``bwd`` of the
    interaction and the top layers. Two steps come before those counted."""
    copy = rm.models.DLRM(
        rm.EmbeddingBagCollection(model.embedding_bag_collection.configs(), device="meta"),
        dense_in_features=13,
        dense_arch_layer_sizes=sizes(args.bottom),
        over_arch_layer_sizes=sizes(args.top),
    )
    layers = [*copy.dense_arch.parameters(), *copy.over_arch.parameters()]
    optimizer = DENSE[args.dense_opt](layers, lr=args.lr)
    width = args.dim * len(model.embedding_bag_collection.readers)
    pooled = (torch.randn(args.batch, width) / 100).requires_grad_()
    loss = torch.nn.BCEWithLogitsLoss()
    times = []
    mesh.total(0)
    for _ in range(2 + count):
        marks = [time.perf_counter()]
        bottom = copy.dense_arch(batch.dense_features)
        inner = bottom.detach().requires_grad_()
        marks.append(time.perf_counter())
        losses = loss(copy.over_arch(copy.interaction(inner, pooled)).squeeze(1), batch.labels)
        marks.append(time.perf_counter())
        losses.backward()
        marks.append(time.perf_counter())
        bottom.backward(inner.grad)
        optimizer.step()
        optimizer.zero_grad()
        pooled.grad = None
        marks.append(time.perf_counter())
        times.append([1e3 * (b - a) for a, b in itertools.pairwise(marks)])
    kept = times[2:]
    return {
        "ms": median(sum(parts) for parts in kept),
        "fwd": median(parts[1] for parts in kept),
        "bwd": median(parts[2] for parts in kept),
    }


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


def summary(plan: rm.Plan) -> dict[str, int]:
    """Tables of each kind."""
    words = [f"{t.word}/{t.exchange}" for t in plan.tables]
    return {word: words.count(word) for word in sorted(set(words))}


def commit() -> str | None:
    """The checkout's commit, if it is one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


if __name__ == "__main__":
    main()
