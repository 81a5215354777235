"""`RunConfig`: everything a run depends on, besides the mesh."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from rowmesh.data import Source, SyntheticClicks
from rowmesh.errors import InputError, did_you_mean
from rowmesh.train.finite import OnNan
from rowmesh.train.model import ModelConfig
from rowmesh.train.optimiser import OptimiserConfig
from rowmesh.train.planning import PlanConfig

__all__ = ["CheckpointConfig", "RunConfig", "TrainingConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """How long to train, and what to measure on the way.

    Args:
        steps: Training steps.
        epochs: Passes over the data; where given it counts instead of ``steps``. A recipe file or
            a command line gives one of the two.
        eval_every: Steps between evaluations; None for one at the end only.
        eval_batches: Held-out batches of each rank to evaluate on; None for all.
        log_every: Steps between lines of metrics.jsonl.
        on_nan: What to do about a loss that is nan or infinite. ``stop`` ends the run with exit
            code 1 and saves nothing after it; ``skip`` leaves the batch's update out, on all
            ranks, for an 8-byte sum a step; ``go on`` goes on.
        tensorboard: Whether to write for TensorBoard; ``auto`` for where it is installed.

    Raises:
        InputError: If a number is out of range.
    """

    steps: int = 300
    epochs: int | None = None
    eval_every: int | None = None
    eval_batches: int | None = None
    log_every: int = 10
    on_nan: OnNan = "stop"
    tensorboard: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "eval_every", "eval_batches", "log_every"):
            _check_least("training", self, name, 1)
        if self.on_nan not in get_args(OnNan):
            known = get_args(OnNan)
            raise InputError(f"unknown on_nan {self.on_nan!r}{did_you_mean(self.on_nan, known)}")

    def num_steps(self, source: Source) -> int:
        """Steps of the whole run; reads what the data's files say of themselves.

        Raises:
            InputError: If ``epochs`` is given for data without an end, or the data is not there.
        """
        length = source.steps_per_epoch  # of files: what is wrong is said before ranks start
        if self.epochs is None:
            return self.steps
        if length is None:
            raise InputError(
                f"training.epochs is {self.epochs}, but {type(source).__name__} has no end: set "
                f"training.steps, and training.epochs=none"
            )
        return self.epochs * length


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save the run.

    Args:
        every: Steps between checkpoints, with one at the end; None for none at all.
        keep_last: Checkpoints to keep.
        asynchronous: Whether training goes on while a checkpoint is written.
        on_interrupt: Whether a run that saves checkpoints also saves one when it is stopped.

    Raises:
        InputError: If a number is out of range.
    """

    every: int | None = None
    keep_last: int = 2
    asynchronous: bool = False
    on_interrupt: bool = True

    def __post_init__(self) -> None:
        for name in ("every", "keep_last"):
            _check_least("checkpoint", self, name, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A run; the default learns in about a minute.

    Args:
        data: Where batches and tables come from.
        model, optimiser, plan, training, checkpoint: Each part's settings.
        seed: Of the initial values of tables and layers; the data has its own.
        recipe: The file this was read from, if any.

    Raises:
        InputError: If the seed is negative or 2^63 or more.
    """

    data: Source = field(default_factory=lambda: SyntheticClicks(cap=100_000))
    model: ModelConfig = field(default_factory=ModelConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seed: int = 1
    recipe: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_least("", self, "seed", 0)
        if self.seed >= 1 << 63:
            raise InputError(f"seed is {self.seed}, but must be below 2^63")


def _check_least(part: str, config: object, name: str, limit: int) -> None:
    value = getattr(config, name)
    if value is not None and value < limit:
        key = f"{part}.{name}" if part else name
        raise InputError(f"{key} is {value}, but must be at least {limit}")
