"""A small training run in which rank 1 goes wrong in the way its argument says."""

import functools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import rowmesh as rm

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = 40


def mark(name: str) -> None:
    """Note when something happened, for the test to read."""
    (FOLDER / name).write_text(str(time.time()))


def batches(rank: int) -> Iterator[rm.Batch]:
    steps = 3 if rank == 1 and HOW.startswith("short") else 8 if HOW.startswith("short") else STEPS
    for step in range(steps):
        ids = torch.tensor([1, 2, 3, 4 + step % 3])
        if rank == 1 and step == 5 and HOW != "short":
            mark("event")
            if HOW == "bad-id":
                ids[2] = 100
            elif HOW in ("loader", "loader-late"):
                raise OSError("the disk with part-7 is gone")
            elif HOW in ("killed", "traced"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif HOW == "silent":
                time.sleep(8)
        if rank == 2 and step == 5 and HOW == "loader-late":
            time.sleep(2.0)  # so long after the others it learns of rank 1's end
        yield rm.Batch(
            dense_features=torch.ones(4, 3),
            sparse_features=rm.KeyedJaggedTensor.from_dense({"item": ids}),
            labels=torch.tensor([0.0, 1.0, 1.0, 0.0]),
        )


class Picky(rm.models.DLRM):
    """Cannot run a batch without samples."""

    def forward(self, batch: rm.Batch) -> torch.Tensor:
        batch.dense_features.reshape(len(batch.labels), -1)
        return super().forward(batch)


def main() -> None:
    torch.set_num_threads(1)
    mesh = rm.init_mesh(timeout_s=3.0 if HOW == "silent" else 60.0)
    table = rm.EmbeddingBagConfig(
        name="items", num_embeddings=100, embedding_dim=4, feature_names=["item"]
    )
    kind = Picky if HOW == "short-picky" else rm.models.DLRM
    model = kind(rm.EmbeddingBagCollection([table], device="meta"), 3, (4,), (4, 1))
    rm.shard(model, rm.make_plan(model, mesh.topology, split="row_wise"), mesh)
    optimizer = rm.Optimizer(
        model, dense=functools.partial(torch.optim.SGD, lr=0.1), sparse=rm.SGD(lr=0.1)
    )
    loader = batches(mesh.rank)
    steps = 0
    for batch in loader if HOW == "short-plain" else mesh.batches(loader):
        if HOW == "traced" and not mesh.trace.is_on:
            mesh.trace.begin_step(steps)
        mesh.mean(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    (FOLDER / f"steps-{mesh.rank}").write_text(str(steps))
    if HOW == "short-plain" and mesh.rank == 1:
        mark("event")


if __name__ == "__main__":
    if HOW == "loader-late":  # as with a mesh of one's own in a with statement
        with rm.init_mesh():
            main()
    else:
        main()
