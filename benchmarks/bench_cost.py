"""The cost model against steps: calibrate, forecast three plans, run them, compare.

::

    python benchmarks/bench_cost.py --out cost.json

For each shape: `rowmesh calibrate` on those hosts at that rate, then the plans in turn, round by
round, their bytes predicted exactly and their milliseconds forecast. Exit code 1 if a forecast is
off by more than --within, if bytes differ, or if two plans whose times differ by more than --apart
are forecast in the wrong order. Needs root and iproute2 for several hosts.
"""

import argparse
import itertools
import json
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness.contestants import Entry, Place
from harness.figures import round_ms
from harness.shapes import Shape, parse_shapes
from harness.turns import turns

SHAPES = "1x2,2x1@1gbit,2x1@200mbit,2x2@1gbit,2x2@200mbit"
PLANS = {
    "auto": ("--plan", "auto"),
    "table-wise pooled": ("--plan", "table_wise", "--exchange", "pooled"),
    "row-wise rows": ("--plan", "row_wise", "--exchange", "rows"),
}


def main() -> None:
    """Shape by shape."""
    args = parse_args()
    found, wrong = [], []
    for shape in parse_shapes(args.shapes, pooling=args.pooling, alpha=args.alpha):
        rows = run_shape(shape, args)
        found += rows
        wrong += problems(rows, within=args.within, apart=args.apart)
        for row in rows:
            print(line(row), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"rows": found, "problems": wrong}, indent=2) + "\n")
    for sentence in wrong:
        print(sentence)
    sys.exit(1 if wrong else 0)


def parse_args() -> argparse.Namespace:
    """The flags."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--shapes", default=SHAPES)
    p.add_argument("--pooling", default="1")
    p.add_argument("--alpha", default="1.05")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=6, help="of a round; the first is left out")
    p.add_argument("--cap", default="2e5", help="most rows of a table")
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--batch", type=int, default=2048)
    p.add_argument("--within", type=float, default=0.2)
    p.add_argument("--apart", type=float, default=0.1)
    p.add_argument("--out", help="also write the figures to this JSON file")
    return p.parse_args()


def run_shape(shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Forecast and measured milliseconds of every plan."""
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "topology.json"
        flags = shlex.split(
            f"--topology {topology} --pooling {shape.pooling} --alpha {shape.alpha} --warmup 3 "
            f"--cap {args.cap} --dim {args.dim} --batch {args.batch}"
        )
        with Place(shape.hosts, shape.local, flags=flags) as place:
            place.set_rate(shape.rate)
            place.calibrate(topology, model_settings(args))
            entries = [Entry(role="ours", name=n, flags=f) for n, f in PLANS.items()]
            for entry in entries:
                place.start(entry)
            place.set_rate(shape.rate)
            alive = {entry.name: contestant for entry, contestant in place.alive.items()}
            measured = turns(list(alive), lambda name: alive[name].steps(args.steps))
            rounds = list(itertools.islice(measured, args.rounds))
            ready = {entry.name: place.alive[entry].ready for entry in entries}
    return [
        {
            "shape": shape.name,
            "plan": name,
            "forecast": ready[name]["predicted_ms"]["topology"],
            "measured_ms": [round(round_ms(r[name]["ms"]), 2) for r in rounds],
            "bytes_are_exact": all(r[name]["bytes_are_exact"] for r in rounds),
        }
        for name in PLANS
    ]


def model_settings(args: argparse.Namespace) -> list[str]:
    """The model that bench_dlrm.py trains by default, in the words of a recipe."""
    return [
        f"data.batch_size={args.batch}",
        f"model.dim={args.dim}",
        "model.dense_layers=[512,256]",
        "model.over_layers=[512,512,256]",
    ]


def error(row: dict[str, Any]) -> float:
    """Of the forecast, as a share of what was measured."""
    measured = median(row["measured_ms"])
    return float(row["forecast"]["total"] / measured - 1.0)


def problems(rows: list[dict[str, Any]], *, within: float, apart: float) -> list[str]:
    """What the model got wrong about one shape."""
    found = [
        f"{r['shape']}, {r['plan']}: off by {error(r):+.0%}" for r in rows if abs(error(r)) > within
    ]
    found += [f"{r['shape']}, {r['plan']}: bytes differ" for r in rows if not r["bytes_are_exact"]]
    for a, b in itertools.combinations(rows, 2):
        times = [median(r["measured_ms"]) for r in (a, b)]
        told = [r["forecast"]["total"] for r in (a, b)]
        clear = max(times) > (1.0 + apart) * min(times)
        if clear and (times[0] < times[1]) != (told[0] < told[1]):
            found.append(f"{a['shape']}: {a['plan']} and {b['plan']} forecast in the wrong order")
    return found


def line(row: dict[str, Any]) -> str:
    """Of a table."""
    times, parts = row["measured_ms"], {k: v for k, v in row["forecast"].items() if k != "total"}
    told = ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
    return (
        f"{row['shape']:22} {row['plan']:18} measured {median(times):7.1f} "
        f"({min(times):.0f}-{max(times):.0f})  forecast {row['forecast']['total']:7.1f} "
        f"({error(row):+.0%}: {told})"
    )


if __name__ == "__main__":
    main()
