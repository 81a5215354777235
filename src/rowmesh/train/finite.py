"""What a run does when its numbers are not finite: `training.on_nan`."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import DivergedError
from rowmesh.runtime.boxes import table_tensors
from rowmesh.tables import uncompiled
from rowmesh.train.tally import StepRecord

__all__ = ["FiniteWatch", "OnNan"]

OnNan = Literal["stop", "skip", "go on"]

_WAY_OUT: Final = (
    "look at the data of that step, lower optimiser.sparse_lr and optimiser.dense_lr, or raise "
    "optimiser.warmup_steps; training.on_nan=skip leaves such batches out, 'go on' trains on"
)


class FiniteWatch:
    """Looks at a run's losses, at its held-out predictions, and at what it would save.

    A loss tells of the weights that made it, so it is one step late for the update before it:
    weights may be spoilt by a gradient whose loss was finite. That is why a checkpoint's are
    looked at themselves.

    Args:
        on_nan: Of the run.
        model: Sharded.
        mesh: Of the model.
    """

    def __init__(self, on_nan: OnNan, *, model: nn.Module, mesh: Mesh) -> None:
        self._on_nan, self._model, self._mesh = on_nan, model, mesh
        self._num_not_finite = 0

    def may_step(self, losses: Tensor) -> bool:
        """Whether the update of a batch is to be made: the same on all ranks.

        Collective:
            All ranks, one 8-byte sum, if such batches are skipped; else none.
        """
        if self._on_nan != "skip":
            return True
        is_wrong = not bool(losses.detach().isfinite().all())
        return int(self._mesh.total(int(is_wrong))) == 0

    def check_losses(self, records: Sequence[StepRecord | None], *, saved: int | None) -> None:
        """Take note of steps, and end the run at one whose loss is not finite, if it is to stop.

        Args:
            records: The same on all ranks.
            saved: The last step saved with finite numbers.

        Raises:
            DivergedError: On all ranks after the same step.
        """
        for record in records:
            if record is None or not record.bad_ranks:
                continue
            self._num_not_finite += 1
            if self._on_nan == "stop":
                ranks = ", ".join(map(str, record.bad_ranks))
                raise DivergedError(
                    f"the loss of step {record.step} is {record.loss}, because of rank"
                    f"{'s' * (len(record.bad_ranks) > 1)} {ranks}: {_kept(saved)}; {_WAY_OUT}"
                )

    def counts(self) -> dict[str, int]:
        """``not_finite_steps`` so far, and the ``skipped_steps`` among them."""
        skipped = self._num_not_finite if self._on_nan == "skip" else 0
        return {"not_finite_steps": self._num_not_finite, "skipped_steps": skipped}

    def check_predictions(self, step: int, found: dict[str, Any], *, saved: int | None) -> None:
        """End a run that is to stop, if held-out predictions are nan.

        Raises:
            DivergedError: On all ranks.
        """
        if self._on_nan == "stop" and found["nan_predictions"]:
            raise DivergedError(
                f"{found['nan_predictions']:.0f} of {found['count']:.0f} held-out predictions "
                f"after step {step} are nan: {_kept(saved)}; {_WAY_OUT}"
            )

    def may_save(self, step: int, *, saved: int | None) -> bool:
        """Whether what a checkpoint would hold now is finite; if not, only 'go on' saves it.

        Raises:
            DivergedError: On all ranks, if it is not and the run does not go on.

        Collective:
            All ranks, between steps.
        """
        found = [name for name in self._mesh.gather_objects(self._not_finite(), edge=None) if name]
        if found and self._on_nan != "go on":
            raise DivergedError(
                f"after step {step} {found[0]} holds nan or infinity, from gradients that are not "
                f"finite: {_kept(saved)}; {_WAY_OUT}"
            )
        return not found

    def _not_finite(self) -> str | None:
        """The first parameter or table that is not finite on this rank."""
        for name, parameter in uncompiled(self._model).named_parameters():
            if not _is_finite(parameter):
                return f"parameter {name!r}"
        for key, table in table_tensors(self._model).items():
            name, _, what = key.removeprefix("tables.").rpartition(".")
            if what == "weight" and not all(_is_finite(part.tensor) for part in table.parts):
                return f"table {name!r}"
        return None


def _kept(saved: int | None) -> str:
    if saved is None:
        return "there is no checkpoint with finite numbers"
    return f"the last checkpoint with finite numbers is of step {saved}"


def _is_finite(tensor: Tensor) -> bool:
    """In one pass, with no tensor of its size beside it."""
    if not tensor.numel():
        return True
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())
