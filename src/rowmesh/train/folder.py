"""The folder of a run: its resolved config, its plan, its metrics, its checkpoints."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from rowmesh.errors import InputError
from rowmesh.files import parse_json, write_whole
from rowmesh.placement import Plan, load_plan, save_plan
from rowmesh.topology import Topology
from rowmesh.train.config import RunConfig
from rowmesh.train.planning import PlanConfig
from rowmesh.train.recipes import config_to_json, load_plan_settings, load_recipe
from rowmesh.train.tally import StepRecord

__all__ = ["MetricsFile", "RunFolder", "without_nan"]

_MAY_CHANGE: Final = (
    *("training", "checkpoint", "plan", "data.path", "optimiser.sparse_lr", "optimiser.dense_lr"),
    *("optimiser.schedule", "optimiser.warmup_steps"),
)


class RunFolder:
    """``config.json``, ``plan.json``, ``metrics.jsonl``, ``checkpoints/``, ``tensorboard/``.

    Only rank 0 writes the files; checkpoints are written by all ranks.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config, self.plan = self.path / "config.json", self.path / "plan.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints, self.tensorboard = self.path / "checkpoints", self.path / "tensorboard"

    @staticmethod
    def named(name: str) -> "RunFolder":
        """``runs/NAME-TIME``, a folder that does not exist yet."""
        stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = itertools.chain([stem], (Path(f"{stem}-{n}") for n in itertools.count(2)))
        return RunFolder(next(path for path in names if not path.exists()))

    def check_free(self) -> None:
        """Whether a new run may begin here.

        Raises:
            InputError: If the folder exists and is not empty: a run is never overwritten.
        """
        with _writing(self.path):
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise InputError(
                    f"{self.path} exists already: give another --folder, or --resume to continue it"
                )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs out of this folder, also if this process is killed in between.

        Raises:
            InputError: If a run is going on here.
        """
        path = self.path / ".lock"
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # no link is followed, and nothing is cut: somebody else may have made it
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.fdopen(os.open(path, flags, 0o666), "r+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"a run is going on in {self.path}: wait for its end, or give another --folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def load_config(
        self, overrides: Sequence[str] = (), *, data_from: str | None = None
    ) -> RunConfig:
        """The config of the run in this folder, with overrides that leave its state valid.

        Args:
            overrides: As for `load_recipe`.
            data_from: The Python recipe that makes the data, if the run was of one.

        Raises:
            InputError: If there is no run, or an override would change model, data or seed.
        """
        if not self.config.is_file():
            raise InputError(f"there is no run in {self.path} to resume: it has no config.json")
        for item in overrides:
            key = item.partition("=")[0].strip()
            if not any(key == free or key.startswith(f"{free}.") for free in _MAY_CHANGE):
                raise InputError(
                    f"{key} of a run cannot change when it resumes: start a new run, or change "
                    f"only {', '.join(_MAY_CHANGE)}"
                )
        return load_recipe(self.config, overrides, data_from=data_from)

    def write(self, config: RunConfig, plan: Plan) -> None:
        """Write the resolved config and the plan; a reader never sees half of one."""
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.config, config_to_json(config))
            save_plan(plan, self.plan)

    def stored_plan(self, topology: Topology, settings: PlanConfig) -> Plan | None:
        """The run's plan, if it was made by ``settings`` and is for ``topology``.

        A resumed run then goes on with it.
        """
        if not self.plan.is_file() or load_plan_settings(self.config) != settings:
            return None
        plan = load_plan(self.plan)
        return plan if plan.fingerprint == topology.fingerprint() else None


class MetricsFile:
    """metrics.jsonl: an object a line, flushed, without nan; what is not known is null.

    Lines have a ``kind``: ``train`` (step, loss, lr, samples, samples_per_s, bytes by link and by
    edge) and ``eval`` (step and what `ClickMetrics.result` says).

    Args:
        path: Appended to.
        log_every: Write every so many steps.
        after: Drop the lines of later steps first: those of a run that died after its checkpoint.
    """

    def __init__(self, path: Path, *, log_every: int, after: int = 0) -> None:
        self._path, self._log_every = path, log_every
        self._samples, self._seconds = 0, 0.0
        with _writing(path):
            kept = [line for line in _lines(path) if _step_of(line) <= after]
            write_whole(path, "".join(kept))
            self._file: IO[str] = path.open("a")

    def show_plan(self, plan: Plan) -> None:
        """The plan has a file of its own."""

    def show_step(self, record: StepRecord) -> None:
        """Write a step that is due."""
        self._samples += record.samples
        self._seconds += record.seconds
        if record.step % self._log_every:
            return
        found = {"loss": record.loss, "lr": record.lr, "samples": record.samples}
        found |= {"samples_per_s": self._samples / max(self._seconds, 1e-9)}
        sent = {"bytes_by_link": record.by_link(), "bytes_by_edge": record.sent}
        self._samples, self._seconds = 0, 0.0
        self._write({"kind": "train", "step": record.step, **found, **sent})

    def show_evaluation(self, step: int, found: dict[str, Any]) -> None:
        """Write an evaluation."""
        self._write({"kind": "eval", "step": step, **found})

    def close(self) -> None:
        """Close the file; a line that could not be written has been told of, and is dropped."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        with _writing(self._path):
            self._file.write(json.dumps(without_nan(line), allow_nan=False) + "\n")
            self._file.flush()


def without_nan(value: Any) -> Any:
    """JSON has no nan and no infinity: they become None."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _lines(path: Path) -> list[str]:
    text = path.read_text(errors="replace") if path.is_file() else ""
    return text.splitlines(keepends=True)


def _step_of(line: str) -> float:
    """The step of a line; infinite for half a line, as a killed run may leave, or a damaged one."""
    with contextlib.suppress(InputError, ValueError, KeyError, TypeError, OverflowError):
        if line.endswith("\n"):
            return int(parse_json(line, where="a line")["step"])
    return math.inf


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {error.filename or path}: {error.strerror}") from None
