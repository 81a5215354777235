"""The command line, the launcher behind it, and the README's example."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.runtime.oracle import materialise
from rowmesh.train.launch import exit_code, launch
from rowmesh.train.model import build_model
from rowmesh.train.recipes import find_recipe, load_recipe
from tests.processes import ROOT, TINY, Fork, environment, finish, settings, start, start_ranks
from tests.sources import write_recipe


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fenced(text: str, start: str) -> str:
    """The fenced block of a Markdown text that begins with ``start``."""
    return text.split(f"```{start}", 1)[1].split("```", 1)[0]


@pytest.mark.parametrize("arguments", [(), ("train",), ("verify",), ("plan",), ("calibrate",)])
def test_help_names_the_options(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    wanted = {
        (): ["train", "verify", "plan", "calibrate"],
        ("calibrate",): ["--ranks", "--set", "--out", "--json", "topology.json"],
        ("train",): [
            "--topology",
            "--ranks",
            "--set",
            "--folder",
            "--resume",
            "--plan",
            "--json",
            "TensorBoard",
        ],
        ("verify",): ["--plan", "--ranks", "--steps", "--json", "module:function"],
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
    assert len(plan.tables) == 30
    assert shown.stdout.startswith(f"{plan}\nmemory of a rank: not checked")
    printed = run(*options, "--json").stdout
    assert printed == file.read_text()
    assert json.loads(printed)["mesh"]["hosts"] == 64


def test_plan_of_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[data]\ncap = 900\n[plan.constraints.pin.t_cat_3]\nsplit = "row_wise"\n')
    shown = run("plan", str(file), "--json")
    assert shown.exit_code == 0, shown.output
    table = json.loads(shown.stdout)["tables"][3]
    assert (table["name"], table["num_embeddings"]) == ("t_cat_3", 900)
    assert table["tiers"][0]["split"]["rows"] == "all"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--set", "training.steps=x"], f"recipe {find_recipe('demo')}: training.steps"),
        (["train", "--set", "plan.split=rowwise"], "unknown split 'rowwise': did you mean"),
        (["train", "--set", "plan.exchange=row"], "unknown exchange 'row': did you mean 'rows'?"),
        (["train", "no.toml"], "no recipe 'no.toml', neither a file nor a name: known are clicks"),
        (["train", "--ranks", "0"], "ranks is 0, but must be at least 1"),
        (["plan", "--tables", "-5"], "--tables is -5, but must be at least 1"),
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


def test_what_a_plan_asks_of_its_ranks_is_for_the_ranks_of_torchrun(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins and merged requests are impossible on one rank, which is all a started rank knows."""
    launched: list[Any] = []
    monkeypatch.setattr("rowmesh.cli.train.launch", lambda work, ranks: launched.append(ranks))
    asked = ["train", "demo", "--set", 'plan.merge="on"']
    asked += ["--set", "plan.constraints.pin.t_cat_1.ranks=[1]"]
    found = run(*asked)
    assert (found.exit_code, launched) == (2, [])
    assert "pinned to rank 1, but there are 1" in found.output
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = run(*asked)
    assert (found.exit_code, launched) == (0, [None])


def test_a_rank_of_the_command_line_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr("rowmesh.train.launch.keep_freed_memory", lambda: kept.append(True))
    assert launch(lambda mesh: len(kept)) == 1


def test_a_peers_bad_input_is_bad_input() -> None:
    assert exit_code(rm.InputError("x")) == exit_code(rm.PlanError("x")) == 2
    assert exit_code(rm.PeerError("rank 1 failed: InputError: x")) == 2
    assert exit_code(rm.PeerError("rank 1 failed: ValueError: x")) == 1
    assert exit_code(ValueError("InputError: x")) == 1


def test_train_on_two_ranks_prints_the_result_as_json(tmp_path: Path) -> None:
    more = ["training.steps=30", "training.tensorboard=true"]
    process = start("train", "--ranks", "2", "--json", *settings(*more), cwd=tmp_path)
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    found = json.loads(out)
    assert (found["ranks"], found["steps"], found["exactness"]) == (2, 30, "E0")
    folder = tmp_path / found["run"]
    assert load_recipe(folder / "config.json") == load_recipe("demo", [*TINY, *more])
    assert rm.load_plan(folder / "plan.json").mesh.local == 2
    assert found["bytes"]["host"] > found["bytes"]["cross"] == 0
    assert found["count"] == 2 * 20 * 64
    assert 0.5 < found["auc"] < found["bayes_auc"] < 1
    assert found["bayes_ne"] < found["ne"]


def fail_on_rank_1(mesh: rm.Mesh) -> None:
    """Work for `launch`: one rank fails, the others wait for it."""
    if mesh.rank == 1:
        raise OSError("the disk\nis gone")
    mesh.total(1)


@pytest.mark.nightly
def test_a_failing_rank_gives_one_sentence_and_no_traceback() -> None:
    script = (
        "from rowmesh.train.launch import launch; from tests.test_cli import fail_on_rank_1\n"
        "try: launch(fail_on_rank_1, ranks=2)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("PeerError rank 1 failed: OSError: the disk is gone")
    assert done.stdout.count("\n") == 1


def wait_for_step(process: "subprocess.Popen[str] | Fork") -> list[str]:
    """What a run prints until its first step, that line included."""
    assert process.stdout is not None
    lines = []
    for line in iter(process.stdout.readline, ""):
        lines.append(line)
        if line.startswith("step "):
            return lines
    raise AssertionError(f"the run ended: {lines}")


def all_gone(process: "subprocess.Popen[str] | Fork") -> bool:
    """Whether every process of its session ends within seconds of the first."""
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline:
        if subprocess.run(["ps", "-s", str(process.pid)], capture_output=True).returncode:
            return True
        time.sleep(0.1)
    return False


LONG = settings("training.steps=100000", "checkpoint.every=100000", "training.log_every=1")


def test_an_interrupt_stops_all_ranks_after_one_step_with_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["rowmesh", "train", "--ranks", "2", "--folder", str(folder), *LONG]
    process = Fork(words, env=environment())
    lines = wait_for_step(process)
    assert lines[0].startswith("plan for 1 hosts x 2 ranks")
    assert all(word in lines[-1] for word in ("loss", "samples/s", "MB/step"))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to launcher and ranks
    code, out, err = finish(process)
    assert (code, err) == (130, "rowmesh: stopped by SIGINT\n")
    assert all_gone(process)
    last = out.splitlines()[-1]
    step = int(last.removeprefix("stopped after step ").split(",")[0])
    assert last == (
        f"stopped after step {step}, saved after step {step}: continue with rowmesh train --folder "
        f"{folder} --resume"
    )
    more = ["--set", f"training.steps={step + 2}", "--json"]
    result = run("train", "--folder", str(folder), "--resume", *more)  # on one rank
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == step + 2
    steps = [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    ]
    assert steps == [*range(1, step + 3), step + 2]


@pytest.mark.nightly
def test_a_signal_to_one_rank_of_a_launcher_stops_all(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks = start_ranks(["rowmesh", "train", "--folder", str(folder), *LONG], ranks=2)
    wait_for_step(ranks[0])
    ranks[1].send_signal(signal.SIGTERM)
    ended = [finish(rank) for rank in ranks]
    assert [code for code, _, _ in ended] == [130, 130]
    assert ended[0][2] == "rowmesh: stopped by SIGTERM\n"
    assert ended[1][1:] == ("", "")
    assert "saved after step" in ended[0][1]


@pytest.mark.nightly
def test_a_second_interrupt_ends_a_run_that_hangs_at_once(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "hang", at=6)
    arguments = ["train", str(recipe), "--ranks", "2", "--folder", str(tmp_path / "run")]
    process = start(*arguments, "--set", "training.tensorboard=false", cwd=ROOT)
    wait_for_step(process)
    while not (tmp_path / "mark").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)  # rank 1 is asleep: there is no end of its step to wait for
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, timeout=15)
    assert (code, err) == (130, "rowmesh: stopped by SIGINT\n")
    assert all_gone(process)


@pytest.mark.nightly
def test_a_reader_that_leaves_stops_the_run(tmp_path: Path) -> None:
    process = start("train", "--ranks", "2", "--folder", str(tmp_path / "run"), *LONG)
    wait_for_step(process)
    assert process.stdout is not None
    process.stdout.close()  # as head does
    process.stdout = None
    code, _, err = finish(process)
    assert (code, err) == (130, "rowmesh: stopped by stdout, which was closed\n")
    assert all_gone(process)


def test_lines_and_result_of_a_run_in_one_process(in_tmp: Path) -> None:
    result = run("train", *settings("training.steps=3", "training.eval_every=2"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("plan for 1 hosts x 1 ranks")
    assert any(line.startswith("step 2/3  AUC ") for line in lines)
    assert lines[-6].startswith("step 3/3  loss ")
    assert "AUC" in lines[-5]
    assert "a perfect model would get AUC" in lines[-4]
    assert re.fullmatch(
        r"a step took [\d.]+ ms \(run rowmesh calibrate for a forecast\); a rank sent 0.00 MB "
        r"inside its host \(expected 0.00\), 0.00 MB across \(expected 0.00\)",
        lines[-2],
    )
    (folder,) = (in_tmp / "runs").iterdir()
    assert lines[-1] == f"this run is in {folder.relative_to(in_tmp)}"
    assert folder.name.startswith("demo-")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "metrics.jsonl", "plan.json"]
    assert run("train", "--folder", str(folder), *settings()).exit_code == 2


def test_resuming_needs_a_run_and_its_checkpoint(tmp_path: Path) -> None:
    sentence = "--resume takes the run's own config: give --folder FOLDER, no RECIPE"
    for arguments in (["--resume"], ["demo", "--folder", str(tmp_path), "--resume"]):
        assert run("train", *arguments).stderr == f"rowmesh: {sentence}\n"
    result = run("train", "--folder", str(tmp_path), "--resume")
    assert result.stderr.startswith(f"rowmesh: there is no run in {tmp_path} to resume")
    folder = tmp_path / "run"
    assert run("train", "--folder", str(folder), *settings("training.steps=1")).exit_code == 0
    result = run("train", "--folder", str(folder), "--resume")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"rowmesh: there is no checkpoint in {folder / 'checkpoints'}\n"


def make_case() -> tuple[Any, Any]:
    """A model for `rowmesh verify`."""
    config = load_recipe("demo", [*TINY, "data.cap=2000"])
    return (
        lambda: build_model(config.model, config.data, seed=1),
        lambda rank, world: config.data.batches(rank=rank, world=world),
    )


def make_wrong_case() -> tuple[Any, Any]:
    """A model that is another one every time it is built."""
    make_model, batches = make_case()
    number = iter(range(9))

    def make_other() -> Any:
        model = materialise(make_model())
        with torch.no_grad():
            weight = model.embedding_bag_collection.table_modules()["t_cat_2"].weight
            weight[1234, 1] += next(number)  # a row that no batch reads
        return model

    return make_other, batches


def test_verify_a_recipe_and_a_model(tmp_path: Path) -> None:
    result = run("verify", "demo", "--steps", "2", *settings("plan.split=row_wise"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "verified: 2 steps, 66 tensors bit-equal (E0)\n"
    result = run("verify", "tests.test_cli:make_case", "--steps", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "exactness": "E0",
        "num_steps": 1,
        "num_tensors": 65,
        "difference": None,
        "is_bitwise": True,
        "is_equal": True,
    }


def test_verify_names_what_differs() -> None:
    result = run("verify", "tests.test_cli:make_wrong_case", "--json")
    assert result.exit_code == 1
    assert result.stderr == ""
    found = json.loads(result.stdout)["difference"]
    assert (found["what"], found["place"]) == ("table 't_cat_2'", [1234, 1])
    result = run("verify", "tests.test_cli:make_wrong_case")
    assert result.exit_code == 1
    wanted = "NOT equal after 3 steps (E0): table 't_cat_2', row 1234, column 1: "
    assert result.stdout.startswith(wanted)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demos"], "no recipe 'demos', neither a file nor a name: did you mean 'demo'?"),
        (["demo", "--steps", "0"], "steps is 0, but must be at least 1"),
        (["no_module:f"], "cannot call no_module:f: ModuleNotFoundError: "),
        (["tests.test_cli:no"], "cannot call tests.test_cli:no: AttributeError: "),
        (["tests.test_cli:command"], "cannot call tests.test_cli:command: "),
        (["os:getcwd"], "os:getcwd must return two callables, make_model() and batches(rank, "),
        (["os:getcwd", "--set", "seed=1"], "--set changes recipes, but os:getcwd is a model"),
    ],
)
def test_verify_takes_no_nonsense(arguments: list[str], sentence: str) -> None:
    result = run("verify", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rowmesh: {sentence}")
    assert result.stderr.count("\n") == 1


def test_the_readme_quotes_the_example_and_a_true_plan() -> None:
    readme = (ROOT / "README.md").read_text()
    assert fenced(readme, "python\n") == (ROOT / "examples" / "quickstart.py").read_text()
    line, *quoted = fenced(readme, "\n$ ").strip().splitlines()
    program, *arguments = line.split()
    assert program == "rowmesh"
    printed = run(*arguments).stdout.splitlines()
    assert [q for q in quoted if q != "..." and q not in printed] == []


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text()
    for large, small in (("range(200)", "range(21)"), ("cap=100_000", "cap=500, batch_size=64")):
        assert large in code
        code = code.replace(large, small)
    exec(compile(code, "quickstart.py", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["rank 0, step 0", "rank 0, step 20"]
    assert float(printed[1].split()[-1]) < float(printed[0].split()[-1])
