"""How long planning takes: a JSON line with the seconds for three sizes.

::

    python benchmarks/bench_planner.py

Tables of 10 to 30 million rows, dims 16 to 128, poolings 1 to 50, drawn from a seed; ids are
assumed Zipf(1.05), which is part of the time.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from collections import Counter
from typing import Any

import numpy as np

import rowmesh as rm
from rowmesh.planners import blank_table, plan_tables

SIZES = ((26, 1, 8), (200, 8, 8), (850, 16, 8))  # tables, hosts, ranks a host


def main() -> None:
    """Plan, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="the median is printed")
    args = parser.parse_args()
    result = {
        "sizes": [measure(*size, seed=args.seed, rounds=args.rounds) for size in SIZES],
        "args": vars(args),
        "commit": commit(),
        "versions": {"numpy": np.__version__, "rowmesh": rm.__version__},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print(json.dumps(result))


def measure(num_tables: int, hosts: int, local: int, *, seed: int, rounds: int) -> dict[str, Any]:
    """Median seconds of the wall and of the processor to plan so many tables."""
    configs, factors = draw_tables(num_tables, np.random.default_rng(seed))
    topology, times = rm.Topology(hosts=hosts, local=local), []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        stats = rm.Stats.assume(configs, batch_size=2048, pooling_factors=factors)
        plan = plan_tables([blank_table(c) for c in configs], topology, stats=stats)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall_s, cpu_s = np.median(times, axis=0)
    return {
        "tables": num_tables,
        "ranks": topology.world,
        "wall_s": round(float(wall_s), 3),
        "cpu_s": round(float(cpu_s), 3),
        "plan": dict(Counter(f"{t.word}/{t.exchange}" for t in plan.tables)),
    }


def draw_tables(
    number: int, rng: np.random.Generator
) -> tuple[list[rm.EmbeddingBagConfig], dict[str, float]]:
    """Tables and the mean number of ids in their bags."""
    configs = [
        rm.EmbeddingBagConfig(
            name=f"t{i:04}",
            num_embeddings=int(10 ** rng.uniform(1, 7.5)),
            embedding_dim=int(rng.choice([16, 32, 64, 128])),
            feature_names=[f"f{i}"],
        )
        for i in range(number)
    ]
    return configs, {c.name: float(rng.choice([1, 1, 3, 10, 50])) for c in configs}


def commit() -> str:
    """The commit that is measured."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
