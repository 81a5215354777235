"""rowmesh beside TorchRec on this machine: interleaved rounds, medians, spread, ratios.

::

    python benchmarks/compare.py --peer-python PEER/bin/python --rounds 5

PEER is a virtual environment with TorchRec (CONTRIBUTING.md says how). Both train the same DLRM
on the same ids from the same initial weights. Before any timing the first ten losses at a
learning rate that trains are compared; if they differ by more than 1e-3 nothing is reported.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
OURS = {
    "rowmesh auto": ["--plan", "auto"],
    "rowmesh table-wise": ["--plan", "table_wise", "--exchange", "pooled"],
}
PEERS = {
    "torchrec table-wise": ["--sharding", "table_wise"],
    "torchrec table-wise + pipeline": ["--sharding", "table_wise", "--pipeline", "sparse_dist"],
    "torchrec planner": ["--sharding", "planner"],
    "torchrec planner + pipeline": ["--sharding", "planner", "--pipeline", "sparse_dist"],
}


def main() -> None:
    """Check the losses, then race."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True, help="interpreter with TorchRec installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", help="also write the figures to this JSON file")
    args, flags = parser.parse_known_args()
    gap = loss_gap(args, flags)
    print(f"first 10 losses, largest difference: {gap:.2e}", flush=True)
    if gap > 1e-3:
        sys.exit("the losses differ by more than 1e-3: the comparison is void")
    rows: dict[str, list[dict[str, float]]] = {}
    for number in range(args.rounds):
        for name in (*OURS, *PEERS):
            result = run(args, name, flags)
            rows.setdefault(name, []).append(
                {key: result[key] for key in ("ms_median", "samples_s", "ms_dense")}
            )
            print(f"round {number + 1}, {name}: {result['ms_median']:.0f} ms", flush=True)
    report(rows)
    if args.out:
        Path(args.out).write_text(json.dumps({"loss_gap": gap, "rounds": rows}, indent=2) + "\n")


def run(args: argparse.Namespace, name: str, flags: list[str]) -> dict[str, object]:
    """One run under torchrun; its RESULT."""
    ours = name in OURS
    python = sys.executable if ours else args.peer_python
    script = HERE / ("bench_dlrm.py" if ours else "peer_torchrec.py")
    command = [python, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]
    done = subprocess.run(
        [*command, *(OURS | PEERS)[name], *flags],
        env=os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    sys.exit(f"{name} gave no result:\n{done.stderr[-3000:]}")


def loss_gap(args: argparse.Namespace, flags: list[str]) -> float:
    """Largest difference of the first ten losses at a learning rate that trains."""
    extra = [*flags, "--lr", "0.01", "--warmup", "0", "--steps", "10", "--losses"]
    found = [run(args, name, extra)["losses"] for name in ("rowmesh auto", "torchrec table-wise")]
    ours, theirs = (list(losses) for losses in found)  # type: ignore[call-overload]
    print("losses", [round(x, 5) for x in ours])
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def report(rows: dict[str, list[dict[str, float]]]) -> None:
    """Medians over rounds with their range, and the two ratios that matter."""
    print(
        f"\n{'':32} {'ms/step':>9} {'range':>13} {'samples/s':>10} {'dense ms':>9} {'other ms':>9}"
    )
    middle = {}
    for name, rounds in rows.items():
        times = [r["ms_median"] for r in rounds]
        dense = median(r["ms_dense"] for r in rounds)
        other = median(r["ms_median"] - r["ms_dense"] for r in rounds)
        middle[name] = (median(r["samples_s"] for r in rounds), other)
        print(
            f"{name:32} {median(times):9.1f} {min(times):6.0f}-{max(times):<6.0f} "
            f"{middle[name][0]:10.0f} {dense:9.1f} {other:9.1f}"
        )
    best = max(PEERS, key=lambda name: middle[name][0])
    speed = middle["rowmesh auto"][0] / middle[best][0]
    share = middle["rowmesh table-wise"][1] / middle["torchrec table-wise"][1]
    print(f"\nrowmesh auto / best of TorchRec ({best}): {speed:.2f}x samples/s")
    print(f"time outside the dense layers, table-wise: {share:.2f}x of TorchRec's")


if __name__ == "__main__":
    main()
