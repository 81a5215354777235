"""The trainer: a run is a function of its config, whether or not it is interrupted."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.data import SyntheticClicks
from rowmesh.features import Batch
from rowmesh.placement import Plan
from rowmesh.train.board import open_board
from rowmesh.train.config import CheckpointConfig, RunConfig, TrainingConfig
from rowmesh.train.folder import MetricsFile, RunFolder
from rowmesh.train.model import ModelConfig, build_model
from rowmesh.train.optimiser import OptimiserConfig
from rowmesh.train.planning import PlanConfig, plan_run
from rowmesh.train.recipes import load_recipe
from rowmesh.train.stop import Stop
from rowmesh.train.tally import StepRecord
from rowmesh.train.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.sources import CLICKS

TIMES = {"train_s", "step_s", "samples_per_s"}
MODEL = ModelConfig(dim=4, dense_layers=(8,), over_layers=(8,))


def tiny_run(**changes: Any) -> RunConfig:
    parts: dict[str, Any] = {"data": CLICKS, "model": MODEL, "training": TrainingConfig(steps=4)}
    return RunConfig(**(parts | changes))


class Log:
    """Keeps what a run tells, and may ask for a stop."""

    def __init__(self, stop: Stop | None = None, *, stop_at: int | None = None) -> None:
        self.plans: list[Plan] = []
        self.records: list[StepRecord] = []
        self.evaluations: list[tuple[int, dict[str, Any]]] = []
        self._stop, self._stop_at = stop, stop_at

    def show_plan(self, plan: Plan) -> None:
        self.plans.append(plan)

    def show_step(self, record: StepRecord) -> None:
        self.records.append(record)
        if self._stop is not None and record.step == self._stop_at:
            self._stop.request("a test")

    def show_evaluation(self, step: int, found: dict[str, Any]) -> None:
        self.evaluations.append((step, found))


def untimed(found: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in found.items() if k not in TIMES}


def test_a_run_is_a_function_of_its_config() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (
        untimed(Trainer(config, rm.init_mesh()).run())
        for config in (tiny_run(), tiny_run(), tiny_run(seed=2))
    )
    assert first == again != other
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("schedule", "warmup"), [("linear", 0), ("linear", 2), ("constant", 1)])
def test_learning_rates_are_a_function_of_the_step(schedule: Any, warmup: int) -> None:
    """A run equals one by hand with lr * min(1, (s + 1) / (w + 1)) * (1 - s / n)."""
    optimiser = OptimiserConfig(
        sparse="sgd",
        dense="sgd",
        sparse_lr=0.5,
        dense_lr=0.25,
        schedule=schedule,
        warmup_steps=warmup,
    )
    config, mesh, log = tiny_run(optimiser=optimiser), rm.init_mesh(), Log()
    Trainer(config, mesh).run(listeners=[log])
    model = build_model(config.model, CLICKS, seed=config.seed)
    rm.shard(model, log.plans[0], mesh)
    optimizer = rm.Optimizer(
        model, dense=lambda p: torch.optim.SGD(p, lr=0.25), sparse=rm.SGD(lr=0.5)
    )
    for step, record in enumerate(log.records):
        factor = min(1, (step + 1) / (warmup + 1))
        factor *= 1 - step / 4 if schedule == "linear" else 1
        for group, lr in zip(optimizer.param_groups, (0.25, 0.5), strict=True):
            group["lr"] = lr * factor
        found = model(CLICKS.batch_at(0, step))
        assert record.loss == float(found.detach().double().sum()) / 32
        assert (record.step, record.lr) == (step + 1, 0.5 * factor)
        mesh.mean(found).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(log.records) == 4


def test_a_dcn_trains_too() -> None:
    model = dataclasses.replace(MODEL, kind="dcn", cross_layers=2, low_rank=3)
    found = Trainer(tiny_run(model=model), rm.init_mesh()).run()
    assert 0 < found["auc"] < 1


@dataclasses.dataclass(frozen=True)
class Uneven:
    """Epochs of 3 steps; rank 1 has no held-out batch, and nobody knows the truth."""

    num_dense = 3
    steps_per_epoch = 3

    def tables(self, embedding_dim: int) -> Any:
        return CLICKS.tables(embedding_dim)

    def batches(self, **place: int) -> Any:
        return map(self._forget, CLICKS.batches(**place))

    def held_out(self, *, rank: int, world: int) -> Any:
        return map(self._forget, CLICKS.held_out(rank=0, world=1)) if rank != 1 else iter(())

    def _forget(self, batch: Batch) -> Batch:
        return dataclasses.replace(batch, true_probabilities=None)


def run_uneven(mesh: Mesh) -> dict[str, Any]:
    config = tiny_run(data=Uneven(), training=TrainingConfig(epochs=2, eval_batches=1))
    return Trainer(config, mesh).run()


def test_epochs_and_held_out_batches_that_not_every_rank_has() -> None:
    found = run_on_ranks(2, run_uneven)
    assert [f["steps"] for f in found] == [6, 6]
    assert [f["count"] for f in found] == [32, 32]
    assert found[0]["bayes_auc"] != found[0]["bayes_auc"]


def test_epochs_of_data_without_an_end() -> None:
    with pytest.raises(rm.InputError, match="SyntheticClicks has no end: set training"):
        Trainer(tiny_run(training=TrainingConfig(epochs=1)), rm.init_mesh())


def records_and_prediction(mesh: Mesh) -> Any:
    plan = PlanConfig(split="row_wise", exchange="rows")
    trainer, log = Trainer(tiny_run(plan=plan), mesh), Log()
    found = trainer.run(listeners=[log])
    predicted = [
        rm.predict(
            trainer.plan, [CLICKS.batch_at(r, step).sparse_features for r in range(mesh.world)]
        )
        for step in range(4)
    ]
    return log.records, predicted, found


def test_a_record_sums_over_ranks_and_its_bytes_are_the_predicted_ones() -> None:
    outcomes = run_on_ranks(2, records_and_prediction)
    (first, predicted, found), (second, _, other) = outcomes
    untimed_records = [
        [dataclasses.replace(r, seconds=0.0) for r in records] for records in (first, second)
    ]
    assert untimed_records[0] == untimed_records[1]
    assert untimed(found) == untimed(other)
    assert [r.samples for r in first] == [64] * 4
    for record, by_rank in zip(first, predicted, strict=True):
        for edge, links in record.sent.items():
            expected = sum(rank.get(edge, {}).get("host", 0) for rank in by_rank)
            assert links == {"host": expected, "cross": 0}
        assert record.by_link()["host"] == sum(
            n for rank in by_rank for links in rank.values() for n in links.values()
        )
    assert found["bytes"]["host"] == sum(r.by_link()["host"] for r in first)


LONG = TrainingConfig(steps=12, eval_every=3, log_every=1, eval_batches=1)


def run_in_folder(
    mesh: Mesh, path: str, stop_at: int | None, resume: bool, changes: dict[str, Any]
) -> dict[str, Any]:
    """A run with its folder; rank 1 alone asks for a stop at ``stop_at``."""
    config = tiny_run(**({"training": LONG, "checkpoint": CheckpointConfig(every=5)} | changes))
    folder, stop = RunFolder(path), Stop(mesh)
    trainer = Trainer(config, mesh, folder=folder, resume=resume)
    asking = Log(stop, stop_at=stop_at) if mesh.rank == mesh.world - 1 else Log()
    listeners: list[Any] = [asking]
    if mesh.rank == 0:
        folder.write(config, trainer.plan)
        listeners.append(MetricsFile(folder.metrics, log_every=1, after=trainer.start))
    found = trainer.run(listeners=listeners, stop=stop)
    if mesh.rank == 0:
        listeners[-1].close()
    return found


def metrics_of(path: Path) -> list[dict[str, Any]]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [untimed(json.loads(line, parse_constant=pytest.fail)) for line in lines]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_stopped_and_resumed_equals_one_that_was_not(
    asynchronous: bool, tmp_path: Path
) -> None:
    changes = {"checkpoint": CheckpointConfig(every=5, asynchronous=asynchronous)}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first = run_on_ranks(2, run_in_folder, str(whole), None, False, changes)
    stopped = run_on_ranks(2, run_in_folder, str(parts), 6, False, changes)
    assert [(f["is_stopped"], f["steps"], f["saved_step"]) for f in stopped] == [(True, 8, 8)] * 2
    resumed = run_on_ranks(2, run_in_folder, str(parts), None, True, changes)
    assert metrics_of(parts) == metrics_of(whole)
    assert [line["step"] for line in metrics_of(whole) if line["kind"] == "eval"] == [3, 6, 9, 12]
    for name in ("auc", "ne", "logloss", "steps", "is_stopped", "saved_step"):
        assert resumed[0][name] == first[0][name], name


def test_lines_of_a_run_that_died_after_its_checkpoint_are_written_again(tmp_path: Path) -> None:
    run_on_ranks(2, run_in_folder, str(tmp_path), None, False, {})
    whole = metrics_of(tmp_path)
    last = RunFolder(tmp_path).checkpoints / "step_000012"
    last.rename(tmp_path / "lost")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # killed while it wrote
    run_on_ranks(2, run_in_folder, str(tmp_path), None, True, {})
    assert metrics_of(tmp_path) == whole


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_resumes_on_another_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(2, run_in_folder, str(tmp_path), 6, False, {})
    found = run_on_ranks(ranks, run_in_folder, str(tmp_path), None, True, {})
    assert [(f["steps"], f["ranks"], f["is_stopped"]) for f in found] == [
        (12, ranks, False)
    ] * ranks
    samples = [m["samples"] for m in metrics_of(tmp_path) if m["kind"] == "train"]
    assert samples == [64] * 8 + [32 * ranks] * 4
    assert rm.load_plan(tmp_path / "plan.json").mesh.local == ranks


def test_a_run_that_resumes_with_other_plan_settings_is_planned_again(tmp_path: Path) -> None:
    run_on_ranks(2, run_in_folder, str(tmp_path), 6, False, {})
    stored = rm.load_plan(tmp_path / "plan.json")
    changes = {"plan": PlanConfig(split="row_wise", exchange="rows", tiers="hot:8")}
    run_on_ranks(2, run_in_folder, str(tmp_path), None, True, changes)
    assert rm.load_plan(tmp_path / "plan.json") != stored
    assert (
        sum(rows.count for t in rm.load_plan(tmp_path / "plan.json").tables for _, rows in t.hot)
        == 8
    )


def test_a_stopped_run_saves_nothing_unless_asked(tmp_path: Path) -> None:
    for checkpoint, saved in (
        (CheckpointConfig(), None),
        (CheckpointConfig(every=100, on_interrupt=False), None),
        (CheckpointConfig(every=5, on_interrupt=False), 5),
        (CheckpointConfig(every=100), 8),
    ):
        changes = {"checkpoint": checkpoint}
        path = tmp_path / f"{checkpoint.every}-{checkpoint.on_interrupt}"
        found = run_on_ranks(2, run_in_folder, str(path), 6, False, changes)
        assert [f["saved_step"] for f in found] == [saved] * 2
        assert "auc" not in found[0]


def test_a_finished_run_resumes_to_an_evaluation(tmp_path: Path) -> None:
    first = run_on_ranks(2, run_in_folder, str(tmp_path), None, False, {})[0]
    again = run_on_ranks(2, run_in_folder, str(tmp_path), None, True, {})[0]
    assert (again["auc"], again["steps"], again["train_s"]) == (first["auc"], 12, 0.0)


def test_a_run_does_not_resume_to_fewer_steps_than_it_has_made(tmp_path: Path) -> None:
    run_on_ranks(2, run_in_folder, str(tmp_path), None, False, {})
    said = run_on_ranks(2, resume_shorter, str(tmp_path))
    assert all("at step 12, beyond the 5 steps" in each for each in said)


def resume_shorter(mesh: Mesh, path: str) -> str:
    config = tiny_run(training=TrainingConfig(steps=5))
    with pytest.raises(rm.InputError) as caught:
        Trainer(config, mesh, folder=RunFolder(Path(path)), resume=True)
    return str(caught.value)


def test_metrics_have_no_nan(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", log_every=2)
    nan = float("nan")
    for step in (1, 2):
        sent = {"rows": {"host": 3, "cross": 4}}
        file.show_step(
            StepRecord(
                step=step, loss=nan, samples=8, lr=0.5, seconds=2.0, sent=sent, is_stopping=False
            )
        )
    file.show_evaluation(2, {"auc": float("inf")})
    file.close()
    assert metrics_of(tmp_path) == [
        {
            "kind": "train",
            "step": 2,
            "loss": None,
            "lr": 0.5,
            "samples": 8,
            "bytes_by_link": {"host": 3, "cross": 4},
            "bytes_by_edge": {"rows": {"host": 3, "cross": 4}},
        },
        {"kind": "eval", "step": 2, "auc": None},
    ]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert line["samples_per_s"] == 16 / 4


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.check_free()
    folder.path.mkdir()
    folder.check_free()
    folder.metrics.write_text("")
    with pytest.raises(rm.InputError, match="exists already: give another --folder, or --resume"):
        folder.check_free()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a run")
    told = pytest.raises(rm.InputError, match=r"a run is going on in .*a run: wait")
    with folder.lock(), told, RunFolder(tmp_path / "a run").lock():
        pass
    with folder.lock():  # free again
        pass


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = Trainer(tiny_run(), rm.init_mesh())
    with pytest.raises(rm.InputError, match=r"cannot write .*file.*: Not a directory"):
        RunFolder(tmp_path / "file" / "run").write(tiny_run(), trainer.plan)


def test_tensorboard_is_written_for_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    board = open_board(tmp_path / "board", log_every=1, rule="sgd")
    assert board is not None
    Trainer(tiny_run(), rm.init_mesh()).run(listeners=[board])
    board.close()
    assert [f.stat().st_size > 0 for f in (tmp_path / "board").iterdir()] == [True]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert open_board(tmp_path / "none", log_every=1, rule="sgd") is None


def test_constraints_of_a_recipe_are_obeyed() -> None:
    pins = ["plan.constraints.pin.t_cat_0.split=row_wise", "plan.constraints.pin.t_cat_1.ranks=[1]"]
    config = load_recipe("demo", ["data.cap=60", "model.dim=4", *pins])
    model = build_model(config.model, config.data, seed=1)
    plan = plan_run(config.plan, model, config.data, rm.Topology(local=2))
    assert plan.table("t_cat_0").rest.split.word == "row-wise"
    assert plan.table("t_cat_1").rest.ranks == (1,)


def test_plans_without_data_assume_its_law() -> None:
    data = SyntheticClicks(cardinalities=(100_000, 40), pooling=(3, 1), batch_size=32, alpha=0.0)
    topology = rm.Topology(local=2)
    for source in (data, Uneven()):
        model = build_model(MODEL, source, seed=1)
        found = plan_run(PlanConfig(batches=0, split="row_wise"), model, source, topology)
        assert found.predicted.host_bytes > 0
