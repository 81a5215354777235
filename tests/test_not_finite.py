"""A run whose numbers are not finite: it stops, leaves batches out, or goes on and says so."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import DivergedError, InputError
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.export import full_state_dict
from rowmesh.train.config import CheckpointConfig, RunConfig, TrainingConfig
from rowmesh.train.folder import RunFolder
from rowmesh.train.optimiser import OptimiserConfig
from rowmesh.train.planning import PlanConfig
from rowmesh.train.stop import Stop
from rowmesh.train.tally import StepRecord
from rowmesh.train.trainer import Trainer
from tests.processes import finish, settings, start_ranks
from tests.ranks import run_on_ranks
from tests.sources import CLICKS
from tests.test_trainer import MODEL, Log


def config_of(on_nan: Any, *, steps: int = 8, **changes: Any) -> RunConfig:
    parts: dict[str, Any] = {
        "data": CLICKS,
        "model": MODEL,
        "optimiser": OptimiserConfig(schedule="constant"),
        "training": TrainingConfig(steps=steps, on_nan=on_nan),
        "checkpoint": CheckpointConfig(every=2, keep_last=1),
    }
    return RunConfig(**(parts | changes))


class Spoiler(Log):
    """Makes numbers of rank 1 nan or infinite: in step ``at``, or after step 2."""

    def __init__(self, trainer: Trainer, what: str, at: int, stop_at: int) -> None:
        self.stop = Stop(trainer.mesh)
        super().__init__(self.stop, stop_at=stop_at)
        self._trainer, self._what, self._at = trainer, what, at
        if trainer.mesh.rank == 1 and what == "loss":
            trainer.model.register_forward_hook(lambda module, given, out: self._spoil(out))
        if trainer.mesh.rank == 1 and what == "gradient":
            trainer.model.dense_arch.layers[0].weight.register_hook(self._spoil)

    def _spoil(self, numbers: torch.Tensor) -> torch.Tensor:
        is_now = self._trainer.step + 1 == self._at and torch.is_tensor(numbers)
        return numbers * float("nan") if is_now else numbers

    def show_step(self, record: StepRecord) -> None:
        super().show_step(record)
        if self._what == "row" and record.step == 2 and self._trainer.mesh.rank == 1:
            for stack in sharded_engines(self._trainer.model)[0].stacks:
                stack.home[-1:, 0] = float("-inf")


def run(
    mesh: Mesh, path: str, config: RunConfig, at: int, what: str = "loss", stop_at: int = 0
) -> Any:
    """What a run said or found, the steps it showed, the checkpoints left, and the weights."""
    trainer = Trainer(config, mesh, folder=RunFolder(path))
    log = Spoiler(trainer, what, at, stop_at)
    said, found = "", {}
    try:
        found = trainer.run(listeners=[log], stop=log.stop)
    except DivergedError as error:
        said = str(error)
    steps = [record.step for record in log.records]
    return said, found, steps, steps_in(path), full_state_dict(trainer.model)


def steps_in(path: str) -> list[int]:
    found = (Path(path) / "checkpoints").glob("step_*")
    return sorted(int(folder.name.removeprefix("step_")) for folder in found)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("at", "shown"), [(5, 6), (6, 6), (8, 8)])
def test_stop_ends_all_ranks_and_keeps_the_last_checkpoint(
    at: int, shown: int, asynchronous: bool, tmp_path: Path
) -> None:
    checkpoint = CheckpointConfig(every=2, keep_last=1, asynchronous=asynchronous)
    config = config_of("stop", checkpoint=checkpoint)
    found = run_on_ranks(2, run, str(tmp_path), config, at)
    last = (at - 1) // 2 * 2
    for said, _, steps, kept, _ in found:
        assert re.match(rf"the loss of step {at} is nan, because of rank 1: ", said), said
        assert f"the last checkpoint with finite numbers is of step {last};" in said
        assert "optimiser.sparse_lr" in said
        assert steps == list(range(1, shown + 1))
        assert kept == [last]


def test_stop_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    config = config_of("stop", steps=4, checkpoint=CheckpointConfig())
    for said, *_ in run_on_ranks(2, run, str(tmp_path), config, 1):
        assert "because of rank 1: there is no checkpoint with finite numbers;" in said


def test_a_stop_by_a_signal_saves_nothing_that_is_not_finite(tmp_path: Path) -> None:
    found = run_on_ranks(2, run, str(tmp_path), config_of("stop", steps=20), 5, "loss", 5)
    assert [kept for _, _, _, kept, _ in found] == [[4], [4]]
    assert all("the loss of step 5" in said for said, *_ in found)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
@pytest.mark.parametrize(
    ("what", "name", "kept"),
    [
        ("gradient", "after step 4 parameter 'dense_arch.layers.0.weight' holds nan", [2]),
        ("row", "after step 2 table 't_cat_1' holds nan or infinity", []),
    ],
)
def test_weights_spoilt_behind_a_finite_loss_are_not_saved(
    what: str, name: str, kept: list[int], on_nan: str, tmp_path: Path
) -> None:
    plan = PlanConfig(split="row_wise")
    config = config_of(on_nan, plan=plan)
    for said, _, _, found, _ in run_on_ranks(2, run, str(tmp_path), config, 4, what):
        assert name in said
        assert found == kept


@pytest.mark.parametrize("depth", [1, 2])
def test_skip_leaves_the_update_out_on_all_ranks(depth: int, tmp_path: Path) -> None:
    plan = PlanConfig(depth=depth)
    short, spoilt, whole = (
        run_on_ranks(2, run, str(tmp_path / name), config_of("skip", steps=steps, plan=plan), at)
        for name, at, steps in (("short", 99, 3), ("spoilt", 4, 4), ("whole", 4, 8))
    )
    for (_, expected, *_), (said, found, _, kept, _) in zip(short, spoilt, strict=True):
        assert said == ""
        assert (found["not_finite_steps"], found["skipped_steps"]) == (1, 1)
        assert (expected["not_finite_steps"], expected["skipped_steps"]) == (0, 0)
        assert found["logloss"] == expected["logloss"]
        assert kept == [4]
    assert all(torch.equal(short[0][4][key], spoilt[0][4][key]) for key in short[0][4])
    assert whole[0][1]["skipped_steps"] == 1
    assert whole[0][1]["logloss"] < 1.0


def test_go_on_keeps_the_last_finite_checkpoint_beside_the_newest(tmp_path: Path) -> None:
    found = run_on_ranks(2, run, str(tmp_path), config_of("go on"), 5)
    for said, result, steps, kept, weights in found:
        assert said == ""
        assert steps == list(range(1, 9))
        assert result["not_finite_steps"] == 4
        assert result["skipped_steps"] == 0
        assert result["nan_predictions"] == result["count"] > 0
        assert kept == [4, 8]
        assert not weights or any(bool(value.isnan().any()) for value in weights.values())
    again = run_on_ranks(2, resume, str(tmp_path), "go on", 12)
    assert again == [("", [4, 12])] * 2
    said, kept = run_on_ranks(2, resume, str(tmp_path), "stop", 16)[0]
    assert "the last checkpoint with finite numbers is of step 4" in said
    assert kept == [4, 12]


def resume(mesh: Mesh, path: str, on_nan: str, steps: int) -> Any:
    config = config_of(on_nan, steps=steps)
    trainer = Trainer(config, mesh, folder=RunFolder(path), resume=True)
    said = ""
    try:
        trainer.run()
    except DivergedError as error:
        said = str(error)
    return said, steps_in(path)


def spoilt_at_the_end(mesh: Mesh) -> str:
    """The last update is the one that spoils: no loss and no checkpoint can tell."""
    config = config_of("stop", steps=2, checkpoint=CheckpointConfig())
    trainer = Trainer(config, mesh)
    with torch.no_grad():
        trainer.model.over_arch.layers[0].bias.register_hook(lambda grad: grad * float("nan"))
    trainer.num_steps = 1
    try:
        trainer.run()
    except DivergedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [1, 2])
def test_predictions_that_are_nan_stop_a_run_too(world: int) -> None:
    for said in run_on_ranks(world, spoilt_at_the_end):
        count = 64 * world
        assert f"{count} of {count} held-out predictions after step 1 are nan" in said


def test_an_unknown_word_is_named() -> None:
    with pytest.raises(InputError, match="unknown on_nan 'skipp': did you mean 'skip'"):
        TrainingConfig(on_nan="skipp")  # type: ignore[arg-type]


def test_the_command_ends_with_one_sentence_and_code_1(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ["optimiser.dense_lr=1e30", "training.log_every=1", "checkpoint.every=1"]
    arguments = ["rowmesh", "train", "demo", "--folder", str(folder)]
    ended = [finish(rank) for rank in start_ranks([*arguments, *settings(*more)], ranks=2)]
    assert [code for code, _, _ in ended] == [1, 1], ended
    said = re.fullmatch(
        r"rowmesh: the loss of step (\d+) is (?:nan|inf), because of ranks 0, 1: the last "
        r"checkpoint with finite numbers is of step (\d+); .*\n",
        ended[0][2],
    )
    assert said is not None, ended
    assert int(said[1]) == int(said[2]) + 1
    assert steps_in(str(folder))[-1] == int(said[2])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, int(said[1]) + 1))
    assert lines[-1]["loss"] is None
