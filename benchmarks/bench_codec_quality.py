"""Is NE of lossy codecs within the seeds' spread of fp32? On planted data and on real clicks.

::

    torchrun --nproc-per-node 2 benchmarks/bench_codec_quality.py --out REPORT --clicks FOLDER

Every arm (fp32, bf16, fp16, int8, fp16 forward with bf16 backward, and a control that must lose)
trains from the same initial values on the same samples, for each seed and learning rate; about 15
minutes on two cores. Writes REPORT.json and REPORT.md; figures do not depend on how busy the
machine is. FOLDER has Parquet files of Criteo's columns; without it, clicks are left out.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from codec_quality.data import Trial, clicks_trial, planted_trial
from codec_quality.report import markdown
from codec_quality.runs import ARMS, prepare, train
from harness.machine import describe_run
from harness.pages import write_page

import rowmesh as rm


def main() -> None:
    """All runs, then the report."""
    args = parse_args()
    torch.set_num_threads(1)
    trials, notes = choose_trials(args)
    code = describe_run()  # as it is now: the runs take long
    started, runs = time.monotonic(), []
    with rm.init_mesh(timeout_s=300.0) as mesh:
        total = len(trials) * len(args.seeds) * len(ARMS) * len(args.rates)
        for trial in trials:
            for seed in args.seeds:
                material = prepare(trial, mesh, seed=seed)
                for arm in ARMS:
                    for rate in trial.rates:
                        runs.append(train(trial, arm, material, mesh, rate=rate, seed=seed))
                    if mesh.rank == 0:
                        say(runs, total, time.monotonic() - started)
        if mesh.rank == 0:
            about = describe(args, mesh.world, time.monotonic() - started) | code
            document = {"about": about, "sets": notes, "runs": runs}
            write_page(args.out, markdown(document), document)
            print(f"{args.out}.md", flush=True)


def parse_args() -> argparse.Namespace:
    """The flags."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--out", type=Path, required=True, help="path of the report without a suffix")
    p.add_argument("--clicks", type=Path, help="folder of display-ad clicks")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    p.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    p.add_argument("--steps", type=int, default=250, help="most steps of a run")
    p.add_argument("--held-out", type=int, default=40, help="planted batches of a rank")
    args = p.parse_args()
    if not 2 <= len(set(args.seeds)) <= 30:
        p.error(f"--seeds are {args.seeds}, but must be from 2 to 30 different ones")
    return args


def choose_trials(args: argparse.Namespace) -> tuple[list[Trial], dict[str, str]]:
    """The sets that can be run, and for each, run or not, a sentence on it."""
    rates = tuple(args.rates)
    planted = planted_trial(steps=args.steps, held_out=args.held_out, rates=rates)
    notes = {"planted": sentence(planted) + " Half of the logit's variance is dense."}
    if args.clicks is None or not args.clicks.is_dir():
        reason = "no --clicks was given" if args.clicks is None else "--clicks is no folder here"
        return [planted], notes | {"clicks": f"Not run: {reason}."}
    clicks = clicks_trial(args.clicks.resolve(), steps=args.steps, rates=rates)
    notes["clicks"] = sentence(clicks) + " Recipe `clicks`, one epoch; the last file is held out."
    return [planted, clicks], notes


def sentence(trial: Trial) -> str:
    """How it learns."""
    tables = f" of {trial.tables} tables x {trial.rows} rows, {trial.batch} samples a rank"
    model = "a linear layer on an MLP and rows" if trial.is_wide else "a DCN"
    return (
        f"{trial.steps} steps{tables * bool(trial.tables)}; {model} of {trial.model.dim} columns; "
        f"row-wise AdaGrad {trial.sparse_lr:g} (eps {trial.eps:g}), Adam {trial.dense_lr:g}, times "
        f"the rate."
    )


def say(runs: list[dict[str, Any]], total: int, seconds: float) -> None:
    """A line of progress."""
    last = runs[-1]
    left = seconds / len(runs) * (total - len(runs)) / 60
    print(
        f"{len(runs)} of {total} runs, about {left:.0f} min left: {last['set']}, seed "
        f"{last['seed']}, {last['arm']}: NE {last['ne']:.5f}",
        file=sys.stderr,
        flush=True,
    )


def describe(args: argparse.Namespace, world: int, seconds: float) -> dict[str, Any]:
    """What ran; no path of this machine."""
    command = f"torchrun --nproc-per-node {world} benchmarks/bench_codec_quality.py"
    command += f" --out {args.out.name}" + " --clicks FOLDER" * (args.clicks is not None)
    for name, default in (("seeds", [1, 2, 3, 4, 5]), ("rates", [0.5, 1.0, 2.0])):
        if getattr(args, name) != default:
            command += f" --{name} {' '.join(f'{v:g}' for v in getattr(args, name))}"
    command += f" --steps {args.steps}" * (args.steps != 250)
    command += f" --held-out {args.held_out}" * (args.held_out != 40)
    return {
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ranks": world,
        "seeds": args.seeds,
        "seconds": round(seconds),
    }


if __name__ == "__main__":
    main()
