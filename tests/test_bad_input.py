"""Bad input is one sentence, the same on all ranks, with exit code 2 and nothing lost."""

import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.comm.mesh import Mesh
from rowmesh.train.config import RunConfig, TrainingConfig
from rowmesh.train.launch import exit_code
from rowmesh.train.model import ModelConfig
from rowmesh.train.trainer import Trainer
from tests.processes import ROOT, finish, settings, start_ranks
from tests.ranks import run_on_ranks
from tests.sources import BadClicks, write_recipe

LIMIT_S = 30.0  # on a busy machine; a peer that said nothing would be waited for longer

SENTENCES = {
    "nan": "rank 1: step 3: dense column 2, sample 5 is nan, but must be finite",
    "label": "rank 1: step 3: the label of sample 7 is inf, but must be 0 or 1",
    "soft label": "rank 1: step 3: the label of sample 7 is 0.5, but must be 0 or 1",
    "large id": "rank 1: feature 'cat_0', sample 4: id 50 is outside table 't_cat_0' (50 rows)",
    "negative id": "rank 1: feature 'cat_0', sample 4: id -1 is outside table 't_cat_0' (50 rows)",
    "dtype of ids": "rank 1: ids must be int32 or int64, got torch.float32",
    "dtype of dense": "rank 1: step 3: dense features must be float32 of shape [32, 3], got "
    "torch.float64 of shape [32, 3]",
    "columns": "rank 1: step 3: dense features must be float32 of shape [32, 3], got "
    "torch.float32 of shape [32, 2]",
    "lengths": "rank 1: lengths add up to 65, but 64 ids were given",
    "missing feature": "rank 1: feature 'cat_1' is missing from the batch: did you mean 'cat_0'?",
    "source": "rank 1: step 3: part-3.parquet is not a Parquet file",
    "gone": "rank 1: step 3: cannot read the data: No such file or directory (part-3.parquet)",
}


def train_on(mesh: Mesh, how: str) -> tuple[str, str, int, int]:
    """The error of a run with bad data: its type, its sentence, steps done, its exit code."""
    config = RunConfig(
        data=BadClicks(how=how),
        model=ModelConfig(dim=4, dense_layers=(4,), over_layers=(4,)),
        training=TrainingConfig(steps=4),
    )
    trainer = Trainer(config, mesh)
    try:
        trainer.run()
    except rm.RowmeshError as error:
        return type(error).__name__, str(error), trainer.step, exit_code(error)
    return "none", "", trainer.step, 0


@pytest.mark.parametrize("how", SENTENCES)
def test_a_bad_batch_of_one_rank_is_one_sentence_on_all(how: str) -> None:
    found = run_on_ranks(2, train_on, how)
    assert found == [("InputError", SENTENCES[how], 2, 2)] * 2


def test_a_bad_held_out_batch_too() -> None:
    sentence = "rank 1: held-out batch 1: dense column 2, sample 5 is nan, but must be finite"
    assert run_on_ranks(2, train_on, "held-out nan") == [("InputError", sentence, 4, 2)] * 2


def test_good_data_is_not_complained_about() -> None:
    assert run_on_ranks(2, train_on, "well") == [("none", "", 4, 0)] * 2


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def steps_in(folder: Path) -> list[int]:
    """The steps that metrics.jsonl tells of."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def one_sentence(result: Any) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return str(result.stderr).removeprefix("rowmesh: ").strip()


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan for four ranks."""
    file = tmp_path / "plan.json"
    options = ["--ranks-per-host", "4", "--dim", "4", "--cap", "500", "--batch", "64"]
    assert run("plan", *options, "--out", str(file)).exit_code == 0
    return file


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text[:100], "the plan is not JSON"),
        (lambda text: text.replace('"tables"', '"tabels"', 1), "did you mean 'tables'?"),
        (lambda text: text.replace('"version": ', '"version": 9'), "plan version 9"),
    ],
)
def test_a_corrupt_plan(damage: Any, sentence: str, plan_file: Path) -> None:
    plan_file.write_text(damage(plan_file.read_text()))
    told = one_sentence(run("train", "--plan", str(plan_file), *settings()))
    assert told.startswith(str(plan_file))
    assert sentence in told
    told = one_sentence(run("verify", "demo", "--plan", str(plan_file), *settings()))
    assert sentence in told


def test_a_constraint_on_an_unknown_table() -> None:
    pin = "plan.constraints.pin.t_cat_99.split=row_wise"
    told = one_sentence(run("train", *settings(pin)))
    assert told.startswith("constraints name table 't_cat_99': did you mean 't_cat_9'?")
    pin = "plan.constraints.pin.t_cat_9.splitt=row_wise"
    told = one_sentence(run("train", *settings(pin)))
    assert told.endswith("unknown field 'splitt': did you mean 'split'?")


def test_a_plan_that_is_not_there() -> None:
    told = one_sentence(run("train", "--plan", "no/plan.json", *settings()))
    assert told.startswith("cannot read the plan no/plan.json: ")


def test_parquet_that_is_not_there_or_not_parquet(tmp_path: Path) -> None:
    told = one_sentence(run("train", "clicks", "--set", f"data.path={tmp_path / 'no'}"))
    assert str(tmp_path / "no") in told
    (tmp_path / "part-0.parquet").write_bytes(b"PAR1 no more PAR1")
    told = one_sentence(run("train", "clicks", "--set", f"data.path={tmp_path}"))
    assert str(tmp_path / "part-0.parquet") in told


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("flip", marks=pytest.mark.nightly),
        pytest.param("cut", marks=pytest.mark.nightly),
        pytest.param("no metadata", marks=pytest.mark.nightly),
    ],
)
def test_a_damaged_checkpoint(damage: str, tmp_path: Path) -> None:
    options = settings("training.steps=2", "checkpoint.every=1")
    assert run("train", "--folder", str(tmp_path / "run"), *options).exit_code == 0
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    file = next(folder.glob("*.bin"))
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        (folder / "metadata.json").write_text("{")
    told = one_sentence(run("train", "--folder", str(tmp_path / "run"), "--resume"))
    assert str(folder) in told
    assert "the checkpoint of step 1 is intact" in told


def limit_files() -> None:
    """In a new process: no file may grow beyond 16 KiB, as on a disk that is full."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))


def test_a_disk_that_is_full_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    arguments = ["rowmesh", "train", "--folder", str(tmp_path / "run")]
    arguments += settings("data.cap=5000", "checkpoint.every=2")
    ranks = start_ranks(arguments, ranks=2, preexec_fn=limit_files)
    ended = [finish(rank) for rank in ranks]
    assert [code for code, _, _ in ended] == [2, 2]
    assert ended[0][2].count("\n") == 1
    assert "File too large" in ended[0][2]
    assert list((tmp_path / "run" / "checkpoints").glob("step_*")) == []


def test_a_plan_for_another_world_ends_every_rank(plan_file: Path, tmp_path: Path) -> None:
    arguments = ["rowmesh", "train", "--plan", str(plan_file), "--folder", str(tmp_path / "run")]
    arguments += settings()
    ended = [finish(process) for process in start_ranks(arguments, ranks=2)]
    assert [code for code, _, _ in ended] == [2, 2]
    assert ended[0][2] == (
        f"rowmesh: {plan_file} is a plan for 1 hosts x 4 ranks, but this run has 1 x 2: start as "
        f"many ranks, or leave out the plan\n"
    )
    assert not (tmp_path / "run").exists()


def test_bad_data_ends_every_rank_and_keeps_the_checkpoints(tmp_path: Path) -> None:
    recipe, folder = write_recipe(tmp_path, "nan", at=6), tmp_path / "run"
    arguments = ["rowmesh", "train", str(recipe), "--folder", str(folder)]
    arguments += [
        "--set",
        "model.dim=4",
        "--set",
        "training.log_every=1",
        "--set",
        "checkpoint.every=2",
    ]
    arguments += ["--set", "training.tensorboard=false"]
    ended = [finish(process) for process in start_ranks(arguments, ranks=2)]
    assert time.time() - float((tmp_path / "mark").read_text()) < LIMIT_S
    assert [code for code, _, _ in ended] == [2, 2]
    assert ended[0][2] == (
        "rowmesh: rank 1: step 6: dense column 2, sample 5 is nan, but must be finite\n"
    )
    assert ended[1][2] == ""
    assert steps_in(folder) == [1, 2, 3, 4, 5]
    recipe.write_text(recipe.read_text().replace("nan", "well"))
    more = ["--set", "training.steps=8"]
    told = one_sentence(run("train", "--folder", str(folder), "--resume", "--json", *more))
    assert told.endswith(f"or, to resume, rowmesh train {recipe} --folder {folder} --resume")
    resumed = ("train", str(recipe), "--folder", str(folder), "--resume", "--json", *more)
    result = run(*resumed)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 8
    assert steps_in(folder) == [1, 2, 3, 4, 5, 6, 7, 8, 8]


def test_documented_sentences_are_ones_that_rowmesh_says() -> None:
    files = (ROOT / "src" / "rowmesh").rglob("*.py")
    source = "\n".join(file.read_text() for file in files)
    source = re.sub(r'"\n\s*f?"', "", source)  # literals that run on
    source = re.sub(r"\{[^{}]*\}", "…", source)
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    table = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| `")]
    sentences = [s for cell in table for s in re.findall(r"`([^`]+)`", cell)]
    assert len(sentences) > 50
    for sentence in sentences:
        for part in sentence.split("…"):
            words = part.strip(" :,").replace("did you mean", "")
            assert words.split(":")[0] in source, f"{words!r} of {sentence!r} is nowhere"
