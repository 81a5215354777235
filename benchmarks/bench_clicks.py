"""Quality of the recipe `clicks`: AUC on the held-out file for several seeds and numbers of ranks.

::

    python benchmarks/bench_clicks.py --data FOLDER --seeds 5 --ranks 1 2 4

FOLDER holds Parquet files of Criteo's columns. Each run is the recipe as it comes, by the command
line; the seed is that of the tables, the layers and the order of the samples. Prints one JSON line.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def train(data: str, seed: int, ranks: int, extra: list[str]) -> dict[str, Any]:
    """One run; what `rowmesh train --json` prints."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"data.path={data}", f"seed={seed}", f"data.seed={seed}", *extra]
        command = [sys.executable, "-m", "rowmesh.cli", "train", "clicks", "--ranks", str(ranks)]
        command += ["--json", "--folder", str(Path(folder) / "run")]
        command += [part for setting in settings for part in ("--set", setting)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode != 0:
            sys.exit(done.stderr)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    """Run all, print the means and spreads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--set", dest="extra", action="append", default=[])
    args = parser.parse_args()
    seeds = range(1, args.seeds + 1)
    auc: dict[int, list[float]] = {r: [] for r in args.ranks}
    ne: dict[int, list[float]] = {r: [] for r in args.ranks}
    for seed in seeds:
        for ranks in args.ranks:
            found = train(args.data, seed, ranks, args.extra)
            auc[ranks].append(found["auc"])
            ne[ranks].append(found["ne"])
            print(
                f"seed {seed}, {ranks} ranks: AUC {found['auc']:.5f}", file=sys.stderr, flush=True
            )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    line = {
        "benchmark": "clicks",
        "seeds": list(seeds),
        "settings": args.extra,
        "auc": {r: [round(a, 5) for a in found] for r, found in auc.items()},
        "mean_auc": {r: round(statistics.mean(found), 5) for r, found in auc.items()},
        "mean_ne": {r: round(statistics.mean(found), 5) for r, found in ne.items()},
        "spread_of_seeds": round(max(statistics.pstdev(found) for found in auc.values()), 5),
        "largest_gap_between_ranks": round(
            max(max(a) - min(a) for a in zip(*auc.values(), strict=True)), 5
        ),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
