"""Rows a second that one reader turns into batches, against pyarrow alone on the same file.

::

    python benchmarks/bench_parquet.py --rows 400000 --groups 4

Writes a file of 40 columns (a label, 13 counts with nulls, 26 ids with nulls), then alternates:
pyarrow reads it row group by row group and turns every column into a numpy array, one thread; and
`ParquetClicks` runs through an epoch, with its hashing, shuffling and batches, one reader thread.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import rowmesh as rm

NUM_DENSE, NUM_SPARSE = 13, 26


def main() -> None:
    """Write, read, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clicks.parquet"
        pq.write_table(clicks(args.rows), path, row_group_size=-(-args.rows // args.groups))
        data = rm.data.ParquetClicks(
            path=str(path),
            label="label",
            dense=[f"i{i}" for i in range(NUM_DENSE)],
            sparse={f"c{i}": 100_000 for i in range(NUM_SPARSE)},
            batch_size=args.batch,
            streams=args.streams,
        )
        rounds = [
            (seconds(lambda: read_arrays(path)), seconds(lambda: read_batches(data)))
            for _ in range(args.rounds)
        ]
    arrow_s, ours_s = (median(times) for times in zip(*rounds, strict=True))
    result = {
        "rows_per_s": round(args.rows / ours_s),
        "arrow_rows_per_s": round(args.rows / arrow_s),
        "share_of_arrow": round(median(arrow / ours for arrow, ours in rounds), 3),
        "rounds_s": [[round(t, 4) for t in pair] for pair in rounds],
        "args": vars(args),
        "commit": commit(),
        "versions": {
            "torch": torch.__version__,
            "rowmesh": rm.__version__,
            "pyarrow": pa.__version__,
            "numpy": np.__version__,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    print("RESULT " + json.dumps(result), flush=True)


def clicks(num_rows: int) -> pa.Table:
    """Counts and ids as skewed, and as often null, as those of click logs."""
    rng = np.random.default_rng(1)
    columns = {"label": pa.array((rng.random(num_rows) < 0.03).astype(np.int8))}
    for i in range(NUM_DENSE):
        counts = np.floor(rng.exponential(50, num_rows)).astype(np.float32)
        columns[f"i{i}"] = pa.array(counts, mask=rng.random(num_rows) < 0.2)
    for i in range(NUM_SPARSE):
        popular = np.floor(10 ** (rng.random(num_rows) * 5)).astype(np.int64)
        columns[f"c{i}"] = pa.array(popular * 7_919_000_003, mask=rng.random(num_rows) < 0.05)
    return pa.table(columns)


def read_arrays(path: Path) -> int:
    """What any loader must do: decode every column of every row group."""
    file = pq.ParquetFile(path)
    total = 0
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False)
        total += sum(len(column.to_numpy()) for column in table.columns)
    return total


def read_batches(data: rm.data.ParquetClicks) -> int:
    """One epoch as the trainer sees it."""
    batches = data.batches(rank=0, world=1)
    return sum(len(batch.labels) for batch in islice(batches, data.steps_per_epoch))


def seconds(work: Callable[[], int]) -> float:
    """Wall clock time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def commit() -> str | None:
    """The commit of the tree this file lies in."""
    run = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or None


if __name__ == "__main__":
    main()
