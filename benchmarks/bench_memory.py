"""Peak resident memory of a rank against the bytes of its tables and optimiser state.

::

    torchrun --nproc-per-node 2 benchmarks/bench_memory.py --gib 4

Builds a model of so many GiB of fp32 tables on ``meta``, shards it row-wise, trains a few steps.
"""

import argparse
import functools
import json
import resource

import torch

import rowmesh as rm
from rowmesh.placement.text import bytes_per_rank


def main() -> None:
    """Build, train, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--split", default="row_wise")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh = rm.init_mesh()
    rows = int(args.gib * 2**30 / args.tables / args.dim / 4)
    clicks = rm.data.SyntheticClicks(cardinalities=[1000] * args.tables, batch_size=args.batch)
    tables = [
        rm.EmbeddingBagConfig(
            name=t.name, num_embeddings=rows, embedding_dim=args.dim, feature_names=t.feature_names
        )
        for t in clicks.tables(args.dim)
    ]
    start = resident_bytes()
    model = rm.models.DLRM(
        rm.EmbeddingBagCollection(tables, device="meta"), 13, (64, args.dim), (64, 1)
    )
    plan = rm.make_plan(model, mesh.topology, split=args.split)
    rm.shard(model, plan, mesh)
    optimizer = rm.Optimizer(
        model,
        dense=functools.partial(torch.optim.Adagrad, lr=0.01),
        sparse=rm.RowwiseAdagrad(lr=0.01),
    )
    for step in range(args.steps):
        mesh.mean(model(clicks.batch_at(mesh.rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = bytes_per_rank(plan)[mesh.rank]
    result = {
        "rank": mesh.rank,
        "held_gib": round(held / 2**30, 3),
        "peak_gib": round(resident_bytes() / 2**30, 3),
        "before_gib": round(start / 2**30, 3),
        "limit_gib": round(1.25 * held / 2**30 + 1, 3),
    }
    everyone = mesh.gather_objects(result)
    if mesh.rank == 0:
        print("RESULT " + json.dumps(everyone), flush=True)


def resident_bytes() -> int:
    """Peak resident set of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
