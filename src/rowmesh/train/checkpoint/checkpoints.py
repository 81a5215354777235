"""`Checkpoints`: save a run, and go on from there under any plan and number of ranks."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rowmesh.comm.agreement import agree, attempt
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.train.checkpoint.document import DamagedError
from rowmesh.train.checkpoint.folders import Folders
from rowmesh.train.checkpoint.loading import check_all, prepare
from rowmesh.train.checkpoint.saving import Save, take

__all__ = ["Checkpoints", "Loaded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What `Checkpoints.load` found besides what it put into model and optimiser.

    Args:
        step: As given to `Checkpoints.save`.
        extra: As given by rank 0; tuples have become lists.
        plan: plan.json of the run that saved, if the model knew its plan.
    """

    step: int
    extra: dict[str, Any]
    plan: str | None = None


class Checkpoints:
    """Checkpoints of one run in one folder that all ranks share.

    A checkpoint is there wholly or not at all, whatever ends the program while it is written.
    It holds tables and their optimiser state, the dense part and its optimiser, learning rates,
    random generators and ``extra``; docs/checkpoints.md says how.

    Args:
        folder: Made when needed; one run at a time may write there.
        keep_last: How many checkpoints stay; older ones go once a new one is complete.
    """

    def __init__(self, folder: str | Path, *, keep_last: int = 3) -> None:
        if keep_last < 1:
            raise InputError(f"keep_last is {keep_last}, but must be at least 1")
        self._folders, self._keep_last = Folders(Path(folder)), keep_last
        self._pending: tuple[Save, Callable[[], Any], int | None] | None = None

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None. Not collective."""
        return self._folders.latest()

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        mesh: Mesh,
        extra: dict[str, Any] | None = None,
        asynchronous: bool = False,
        spared: int | None = None,
    ) -> None:
        """Save the run as it is now.

        Args:
            step: Names the checkpoint; one saved before under this step is replaced.
            model: Sharded.
            optimizer: None saves tables and dense parameters only.
            mesh: Of the model.
            extra: What else the run needs, for JSON: position in the data, schedulers,
                configuration. Rank 0's counts.
            asynchronous: Copy what this rank holds to host memory, return, and write it in the
                background. The checkpoint is complete after the next `save` or `wait`.
            spared: The step of a checkpoint that stays, however old it is.

        Raises:
            StepError: On all ranks, between backward and step.
            InputError: On all ranks, if one cannot write, or ``extra`` is not for JSON. Nothing
                is left of this checkpoint; earlier ones are untouched.

        Collective:
            All ranks.
        """
        self.wait()
        extra = {} if extra is None else extra

        def begin() -> Save:
            save = take(
                step,
                model=model,
                optimizer=optimizer,
                mesh=mesh,
                extra=extra,
                folders=self._folders,
            )
            save.begin()
            return save

        def on_failure(kind: str) -> str:
            if mesh.rank == 0:
                self._folders.drop(step)
            return ""

        save, problem = attempt(begin)
        steps = agree(mesh, step, problem, on_failure=on_failure)
        if len(set(steps)) > 1:
            on_failure("")
            raise InputError(f"ranks save different steps: {steps}, in rank order")
        assert save is not None
        if asynchronous:
            save = save.staged()
            worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rowmesh-checkpoint")
            self._pending = save, worker.submit(save.write).result, spared
            worker.shutdown(wait=False)
        else:
            self._pending = save, save.write, spared
            self.wait()

    def wait(self) -> None:
        """Return when the last save is complete.

        Raises:
            InputError: On all ranks, if it failed; as `save` does.

        Collective:
            All ranks, if a save is under way; else none.
        """
        if self._pending is not None:
            (save, written, spared), self._pending = self._pending, None
            stay = (save.step, spared)
            keep = functools.partial(self._folders.keep, self._keep_last, spared=stay)
            save.finish(*written(), keep=keep)

    def load(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        mesh: Mesh,
        step: int | None = None,
    ) -> Loaded:
        """Put a checkpoint into a sharded model and its optimiser, bit by bit as it was saved.

        Plan, number of ranks, hosts and virtual shards may be others than when it was saved.
        Each rank reads the rows it holds, and the dense part. Random generators go on where
        they were; with another number of ranks they are seeded from the saved ones and the rank.

        Args:
            model: Sharded.
            optimizer: None loads tables and dense parameters only.
            mesh: Of the model.
            step: Default the newest.

        Raises:
            StepError: On all ranks, between backward and step.
            InputError: On all ranks, and before anything is changed: if there is no checkpoint,
                it is of another model, rule or optimiser, of another version, or damaged; then
                the sentence names the newest older one that is not.

        Collective:
            All ranks.
        """
        self.wait()
        chosen, problem = attempt(lambda: self._choose(step) if mesh.rank == 0 else None)
        step = agree(mesh, chosen, problem)[0]
        assert step is not None

        def intact(kind: str) -> str:
            if kind != DamagedError.__name__:
                return ""
            return self._hint(step) if mesh.rank == 0 else ""

        load, problem = attempt(lambda: prepare(self._folders.of(step), model, optimizer, mesh))
        agree(mesh, None, problem, on_failure=intact)
        assert load is not None
        _, problem = attempt(load.read)
        agree(mesh, None, problem, on_failure=intact)
        load.restore()
        document = load.document
        return Loaded(step=document["step"], extra=document["extra"], plan=document["plan"])

    def _choose(self, step: int | None) -> int:
        steps = self._folders.steps()
        if step is None and not steps:
            raise InputError(f"there is no checkpoint in {self._folders.root}")
        step = steps[-1] if step is None else step
        self._folders.of(step)
        return step

    def _hint(self, step: int) -> str:
        """Where to go on from instead of a damaged checkpoint."""
        for earlier in reversed([s for s in self._folders.steps() if s < step]):
            _, problem = attempt(lambda: check_all(self._folders.of(earlier)))  # noqa: B023
            if problem is None:
                return (
                    f"; the checkpoint of step {earlier} is intact: load step={earlier}, or delete "
                    f"the damaged folder"
                )
        return "; no earlier checkpoint is intact"
