"""The runs of the quality part: two at a time, each stored when it is done."""

import dataclasses
import functools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cells import find, store
from benchmarks.harness.quality import OneTable
from papers.two_d.arms import CONTROL_GROUPS, Arm, Quality, TrialSet, trial_sets
from papers.two_d.virtual import train, train_arm
from rowmesh.errors import InputError
from rowmesh.lab.signals import exit_on_signals, restore_signals
from rowmesh.profile.workers import run_workers

__all__ = ["Run", "measure_runs", "prove_gradients", "runs_of"]

_FORMAT = 1  # of a stored run; one of another format is made anew


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One arm on one data set with one learning rate and seed."""

    trial: TrialSet
    arm: Arm
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Of its file, as ``planted-m4-weights-c4-k1-lr0.2-seed11``."""
        arm = self.arm
        scale = f"-c{arm.scale:g}" if arm.mode == "weights" else ""
        words = f"m{arm.groups}-{arm.mode}{scale}-k{arm.period}-lr{self.lr:g}-seed{self.seed}"
        return f"{self.trial.name}-{words}"

    def asked(self) -> dict[str, Any]:
        """All that its result depends on."""
        trial = dataclasses.replace(self.trial, arms=(self.arm,), rates=(self.lr,))
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(trial)))
        return {"format": _FORMAT, "seed": self.seed, **plain}


def runs_of(what: Quality) -> list[Run]:
    """Arm by arm, the arms with 4 groups of all sets first: what is stopped can be judged.

    Raises:
        InputError: If there is nothing to train: clicks alone were asked for, and are not there.
    """
    found = []
    for trial in trial_sets(what):
        for arm in trial.arms:
            # other periods at the smallest rate alone: they make a table of their own
            rates = trial.rates if arm.period == 1 else trial.rates[:1]
            for lr in rates:
                found += [Run(trial=trial, arm=arm, lr=lr, seed=seed) for seed in what.seeds]
    if not found:
        raise InputError(f"sets {', '.join(what.sets)}: no data found at {what.clicks}")
    return sorted(found, key=lambda run: run.arm.groups not in (1, CONTROL_GROUPS))


def measure_runs(
    runs: Sequence[Run],
    folder: Path,
    *,
    workers: int = 2,
    again: bool = False,
    on_run: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[dict[str, Any]]:
    """What `train_arm` says of every run, with its set, groups, arm, lr and seed.

    Results are kept in ``folder``, a file a run; those that are there are not made again.

    Args:
        runs: With names of their own.
        folder: For the files; made if it is not there.
        workers: Processes that train, with one thread each; 1 trains in this process. None is left
            when this ends, also by a signal.
        again: Train also those that are stored.
        on_run: Called after every run with the number done, the number of all, and its name.

    Raises:
        InputError: If the folder cannot be made, or data cannot be read.
        PeerError: If a process failed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}; give --out another") from None
    left = [run for run in runs if again or _stored(run, folder) is None]
    done = len(runs) - len(left)
    on_run(done, len(runs), "stored")

    def on_piece(number: int) -> None:
        nonlocal done
        done += 1
        on_run(done, len(runs), left[number].name)

    _make_all(left, folder, workers, on_piece)
    return [_labels(run) | _read(run, folder) for run in runs]


def _labels(run: Run) -> dict[str, Any]:
    arm = {"groups": run.arm.groups, "arm": run.arm.name, "period": run.arm.period}
    return {"set": run.trial.name, **arm, "lr": run.lr, "seed": run.seed}


def _stored(run: Run, folder: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = find(folder / f"{run.name}.json", run.asked())
    return found


def _read(run: Run, folder: Path) -> dict[str, Any]:
    found = _stored(run, folder)
    if found is None:
        raise InputError(f"{folder / run.name}.json was there and is not any more: start again")
    return found


def _make_all(
    runs: Sequence[Run], folder: Path, workers: int, on_piece: Callable[[int], None]
) -> None:
    numbered = list(enumerate(runs))
    if workers == 1:
        for number in _make(folder, numbered):
            on_piece(number)
        return
    before = exit_on_signals()  # by way of the end of the workers
    try:
        parts = [numbered[first::workers] for first in range(min(workers, len(runs)))]
        run_workers(functools.partial(_make, folder), parts, on_piece=on_piece)
    finally:
        restore_signals(before)


def _make(folder: Path, numbered: Sequence[tuple[int, Run]]) -> Iterator[int]:
    """Train and store runs; the number of each when it is done."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        torch.set_num_threads(1)
    for number, run in numbered:
        source, lr = run.trial.source(run.seed), run.lr
        found = train_arm(source, run.trial.how, run.arm, lr=lr, seed=run.seed)
        store(folder / f"{run.name}.json", found, asked=run.asked())
        yield number
        if parent is not None and not parent.is_alive():
            return  # killed: nobody waits for the others


def prove_gradients(what: Quality, *, steps: int = 50) -> dict[str, Any]:
    """Mode gradients beside full model parallelism on the same virtual ranks, on one seed.

    Returns:
        For every M the largest difference of any weight and of any moment after ``steps`` steps.
    """
    trial, seed = trial_sets(dataclasses.replace(what, sets=("planted",)))[0], what.seeds[0]
    source = OneTable(trial.source(seed))
    batches = list(islice(source.batches(rank=0, world=1), steps))
    rows = []
    for count in what.groups:
        weights, moments = [], []
        for arm in (
            Arm(groups=count, mode="gradients"),
            Arm(groups=1, mode="gradients", ranks=count),
        ):
            oracle = train(source, batches, trial.how, arm, lr=trial.rates[0], seed=seed)
            weights.append(oracle.weight("all"))
            moments.append(oracle.states["all"]["v"])
        rows.append(
            {
                "groups": count,
                "weights": float((weights[0] - weights[1]).abs().max()),
                "moments": float((moments[0] - moments[1]).abs().max()),
            }
        )
    return {"seed": seed, "steps": steps, "rows": rows}
