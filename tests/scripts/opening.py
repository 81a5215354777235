"""Ranks that open and close meshes again and again, or fork children that end in their own way."""

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import rowmesh as rm

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = os.environ["RANK"]


def held() -> list[int]:
    """Descriptors and threads, without those that only garbage holds."""
    gc.collect()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(
        thread.name.startswith("rowmesh-") for thread in threading.enumerate()
    ):
        time.sleep(0.01)
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def reopen() -> None:
    """Each mesh sends through every lane, as those of a program do."""
    if HOW == "given":
        dist.init_process_group("gloo")
    counts = []
    for _ in range(5):
        with rm.init_mesh(timeout_s=30.0, shared_memory=HOW != "gloo") as mesh:
            table = rm.EmbeddingBagConfig(
                name="t", num_embeddings=10, embedding_dim=4, feature_names=["t"]
            )
            model = torch.nn.Sequential(rm.EmbeddingBagCollection([table], device="meta"))
            rm.shard(model, rm.make_plan(model, mesh.topology, split="row_wise"), mesh)
            optimizer = rm.Optimizer(model, dense=torch.optim.SGD, sparse=rm.SGD(lr=0.1))
            for _ in range(2):
                ids = rm.KeyedJaggedTensor.from_dense({"t": torch.tensor([1, 2, 3, 4])})
                mesh.mean(model(ids).values().sum(1)).backward()
                optimizer.step()
        del model, optimizer, mesh
        counts.append(held())
    assert dist.is_initialized()
    (FOLDER / f"held-{RANK}").write_text(json.dumps(counts))
    if HOW == "given":
        dist.destroy_process_group()


def fork() -> None:
    """Children of rank 0 end by an exception, an exit, a with statement and a signal."""
    mesh = rm.init_mesh(timeout_s=30.0)
    codes = []
    for how in ("raise", "exit", "with", "signal") if RANK == "0" else ():
        child = os.fork()
        if child == 0:
            if how == "raise":
                raise ValueError("of the child")
            if how == "with":
                with mesh:
                    raise ValueError("of the child")
            if how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            sys.exit(3)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    mesh.total(0)
    (FOLDER / f"held-{RANK}").write_text(json.dumps([codes, mesh.bulletin.published()]))


if __name__ == "__main__":
    fork() if HOW == "fork" else reopen()
