"""Nanoseconds to encode and decode a number, by codec and columns; one JSON line.

::

    python benchmarks/bench_codecs.py --dims 16 64 128

One thread, medians of ``--repeats``; fp32 is a copy, for comparison. The cost model's constants
(`rowmesh.cost.codecs`) are the figures of 64 columns.
"""

import argparse
import json
import platform
import time
from statistics import median

import torch

from rowmesh.comm.codecs import Codec, Message, Rounded, RowInt8, ScaledHalf

CODECS: dict[str, Codec] = {
    "fp32": Rounded(torch.float32),
    "bf16": Rounded(torch.bfloat16),
    "fp16 rows": Rounded(torch.float16),
    "fp16 gradients": ScaledHalf(),
    "int8": RowInt8(),
}


def main() -> None:
    """Measure, print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    p.add_argument("--numbers", type=int, default=1_000_000, help="in a message")
    p.add_argument("--repeats", type=int, default=15)
    args = p.parse_args()
    torch.set_num_threads(1)
    found = {
        f"{name}, {dim} columns": measure(codec, args.numbers // dim, dim, args.repeats)
        for dim in args.dims
        for name, codec in CODECS.items()
    }
    about = {"args": vars(args), "torch": torch.__version__, "machine": platform.machine()}
    print("RESULT " + json.dumps({"ns_encode_decode": found, **about}), flush=True)


def measure(codec: Codec, num_rows: int, dim: int, repeats: int) -> tuple[float, float]:
    """Nanoseconds of a number, at the sender and at the receiver."""
    block = torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(0)) * 1e-3
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        message = Message([(block, codec)])
        marks = [time.perf_counter()]
        for work in (message.sent, message.decode):
            work()
            marks.append(time.perf_counter())
        for spent, first, last in zip(times, marks, marks[1:], strict=False):
            spent.append(last - first)
    encode, decode = (round(1e9 * median(spent) / block.numel(), 2) for spent in times)
    return encode, decode


if __name__ == "__main__":
    main()
