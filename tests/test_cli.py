"""The command line, the launcher behind it, and the README's example."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.data import SyntheticClicks
from rowmesh.train.launch import exit_code, launch
from rowmesh.train.trainer import RunConfig, build_model, plan_run, train

ROOT = Path(__file__).parent.parent
TINY = ["--batch", "64", "--dim", "4", "--cap", "500"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rowmesh.cli", *arguments]


def environment(**more: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
    return ours | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"} | more


def fenced(text: str, start: str) -> str:
    """The fenced block of a Markdown text that begins with ``start``."""
    return text.split(f"```{start}", 1)[1].split("```", 1)[0]


@pytest.mark.parametrize("arguments", [(), ("train",), ("plan",)])
def test_help_names_the_options(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    wanted = {
        (): ["train", "plan"],
        ("train",): ["--ranks", "--steps", "--split", "--exchange", "--lr", "--json"],
        ("plan",): ["--hosts", "--ranks-per-host", "--tables", "--json", "--out"],
    }[arguments]
    assert [w for w in wanted if w not in result.output] == []


def test_plan_for_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    options = ["plan", "--hosts", "64", "--ranks-per-host", "8", "--tables", "30"]
    shown = run(*options, "--out", str(file))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("plan for 64 hosts x 8 ranks")
    plan = rm.load_plan(file)
    assert len(plan.tables) == 30 and shown.stdout == f"{plan}\n"
    printed = run(*options, "--json").stdout
    assert printed == file.read_text()
    assert json.loads(printed)["mesh"]["hosts"] == 64


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--split", "rowwise"], "unknown split 'rowwise': did you mean 'row_wise'?"),
        (["train", "--exchange", "row"], "unknown exchange 'row': did you mean 'rows'?"),
        (["train", "--batch", "0"], "batch_size is 0, but must be at least 1"),
        (["train", "--steps", "0"], "steps is 0, but must be at least 1"),
        (["train", "--lr", "-1"], "sparse_lr is -1.0, but must be from 0 and finite"),
        (["train", "--ranks", "0"], "ranks is 0, but must be at least 1"),
        (["plan", "--tables", "0"], "number of tables is 0, but must be at least 1"),
        (["plan", "--out", "no/such/place"], "cannot write the plan to no/such/place: "),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"rowmesh: {sentence}")
    assert result.stderr.count("\n") == 1


def test_ranks_of_torchrun_are_joined_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(rm.InputError, match="torchrun started 4 ranks, not 2"):
        launch(lambda mesh: None, ranks=2)


def test_a_peers_bad_input_is_bad_input() -> None:
    assert exit_code(rm.InputError("x")) == exit_code(rm.PlanError("x")) == 2
    assert exit_code(rm.PeerError("rank 1 failed: InputError: x")) == 2
    assert exit_code(rm.PeerError("rank 1 failed: ValueError: x")) == 1
    assert exit_code(ValueError("InputError: x")) == 1


def test_train_on_two_ranks_prints_the_result_as_json() -> None:
    arguments = ["train", "--ranks", "2", "--steps", "30", *TINY, "--json"]
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, env=environment(), timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["ranks"], found["steps"], found["exactness"]) == (2, 30, "E0")
    assert found["bytes"]["host"] > 0 and found["bytes"]["cross"] == 0
    assert found["count"] == 2 * 20 * 64
    assert 0.5 < found["auc"] < found["bayes_auc"] < 1 and found["ne"] > found["bayes_ne"]


def test_a_failing_rank_gives_one_sentence() -> None:
    """`sgd` without an overflow check: a learning rate of 1e30 makes nan; a huge seed is told."""
    arguments = ["train", "--ranks", "2", "--steps", "5", *TINY, "--seed", str(2**32)]
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=environment())
    assert done.returncode == 2 and done.stderr.count("\n") == 1
