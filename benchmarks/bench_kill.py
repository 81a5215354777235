"""Kill a run from outside at random moments, many times; every time a checkpoint must load.

::

    python benchmarks/bench_kill.py --kills 50 --ranks 2

A run saves after every step, in turn synchronously and asynchronously, and is resumed from its
newest checkpoint after every kill (SIGKILL to all ranks, by process id). What is loaded must have
the bits of an uninterrupted run at that step. Prints one JSON line.
"""

import argparse
import functools
import hashlib
import json
import multiprocessing as mp
import os
import platform
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rowmesh as rm
from rowmesh.runtime.export import full_sparse_state

STEPS = 100_000


def build(mesh: rm.Mesh, rows: int) -> tuple[Any, rm.Optimizer, rm.data.SyntheticClicks]:
    """A small DLRM with row-wise tables."""
    clicks = rm.data.SyntheticClicks(cardinalities=[rows] * 4, batch_size=64)
    tables = rm.EmbeddingBagCollection(clicks.tables(16), device="meta")
    torch.manual_seed(1)
    model = rm.models.DLRM(tables, clicks.num_dense, (16, 16), (16, 1))
    split = "row_wise" if mesh.world > 1 else "auto"
    rm.shard(model, rm.make_plan(model, mesh.topology, split=split), mesh)
    dense = functools.partial(torch.optim.Adagrad, lr=0.05)
    return model, rm.Optimizer(model, dense=dense, sparse=rm.RowwiseAdagrad(lr=0.05)), clicks


def digest(model: Any) -> str:
    """Of all weights and sparse state, on rank 0."""
    found = hashlib.sha256()
    tensors: dict[str, Any] = dict(rm.full_state_dict(model))
    for table, state in full_sparse_state(model).items():
        tensors |= {f"{table}.{name}": value for name, value in state.items()}
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def serve(rank: int, ranks: int, turn: str, args: dict[str, Any]) -> None:
    """One rank: resume, note what was loaded, train and save until killed or done."""
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{turn}.store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = rm.init_mesh()
    model, optimizer, clicks = build(mesh, args["rows"])
    checkpoints = rm.Checkpoints(args["folder"])
    first = 0
    if checkpoints.latest() is not None and args["resume"]:
        first = checkpoints.load(model=model, optimizer=optimizer, mesh=mesh).step
    for step in range(first, args["steps"]):
        state = digest(model)
        if rank == 0:
            with Path(f"{turn}.digests").open("a") as log:
                log.write(f"{step} {state}\n")
        mesh.mean(model(clicks.batch_at(rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if args["resume"]:
            checkpoints.save(
                step + 1, model=model, optimizer=optimizer, mesh=mesh, asynchronous=step % 2 == 1
            )
    checkpoints.wait()


def start(ranks: int, turn: str, args: dict[str, Any]) -> list[Any]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "rowmesh"])
    found = [context.Process(target=serve, args=(r, ranks, turn, args)) for r in range(ranks)]
    for process in found:
        process.start()
    return found


def digests(turn: str) -> dict[int, str]:
    """By step; a line cut short by the kill is left out."""
    path = Path(f"{turn}.digests")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {int(n.split()[0]): n.split()[1] for n in lines if n.endswith("\n")}


def kill_one_run(turn: str, args: dict[str, Any], ranks: int, chance: random.Random) -> str:
    """Start, let it train, kill at a random moment; what the folder was caught in."""
    before = rm.Checkpoints(args["folder"]).latest() or 0
    processes = start(ranks, turn, args)
    deadline = time.monotonic() + 120
    while (rm.Checkpoints(args["folder"]).latest() or 0) <= before:
        if time.monotonic() > deadline or not all(p.is_alive() for p in processes):
            raise SystemExit(f"the run did not go on from step {before}")
        time.sleep(0.005)
    time.sleep(chance.random() * 0.2)  # the random moment
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join(timeout=30)
    return "write" if list(Path(args["folder"]).glob("*.partial")) else "between writes"


def main() -> None:
    """Kill, resume, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    caught: dict[str, int] = {"write": 0, "between writes": 0}
    loaded: list[int] = []
    with tempfile.TemporaryDirectory() as place:
        args = {"folder": f"{place}/saved", "rows": options.rows, "steps": STEPS, "resume": True}
        seen: dict[int, set[str]] = {}
        for kill in range(options.kills):
            turn = f"{place}/{kill}"
            caught[kill_one_run(turn, args, options.ranks, chance)] += 1
            found = digests(turn)
            loaded.append(min(found))
            for step, state in found.items():
                seen.setdefault(step, set()).add(state)
        plain = args | {"resume": False, "steps": max(seen) + 1}
        for process in start(options.ranks, f"{place}/plain", plain):
            process.join(timeout=600)
        expected = digests(f"{place}/plain")
    wrong = [step for step, states in seen.items() if states != {expected[step]}]
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "benchmark": "kill",
        "kills": options.kills,
        "ranks": options.ranks,
        "rows": options.rows,
        "killed_in": caught,
        "steps_reached": max(seen),
        "resumed_from": sorted(set(loaded)),
        "steps_with_other_bits": wrong,
        "commit": commit,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(result), flush=True)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
