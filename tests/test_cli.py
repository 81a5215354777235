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
    assert len(plan.tables) == 30
    assert shown.stdout.startswith(f"{plan}\nmemory of a rank: not checked")
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
    assert found["bytes"]["host"] > found["bytes"]["cross"] == 0
    assert found["count"] == 2 * 20 * 64
    assert 0.5 < found["auc"] < found["bayes_auc"] < 1
    assert found["bayes_ne"] < found["ne"]


def fail_on_rank_1(mesh: rm.Mesh) -> None:
    """Work for `launch`: one rank fails, the others wait for it."""
    if mesh.rank == 1:
        raise OSError("the disk\nis gone")
    mesh.total(1)


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


def test_an_interrupt_ends_all_ranks() -> None:
    process = subprocess.Popen(
        command("train", "--ranks", "2", "--steps", "100000", *TINY),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(lines).startswith("plan for 1 hosts x 2 ranks")
        step = next(line for line in lines if line.startswith("step "))
        assert all(word in step for word in ("loss", "samples/s", "MB/step"))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # to its end: every rank has closed it
    assert (process.returncode, errors) == (130, "rowmesh: stopped by SIGINT\n")


def test_lines_and_result_of_a_run_in_one_process() -> None:
    result = run("train", "--steps", "3", *TINY)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("plan for 1 hosts x 1 ranks")
    assert lines[-4].startswith("step 3/3  loss ")
    assert "AUC" in lines[-3]
    assert "a perfect model would get AUC" in lines[-2]


def tiny_run(**changes: Any) -> RunConfig:
    data = SyntheticClicks(cardinalities=(50, 40), batch_size=32, num_dense=3)
    return RunConfig(**({"data": data, "dim": 4, "steps": 4, "eval_steps": 2} | changes))


def test_a_run_is_a_function_of_its_config() -> None:
    times = {"train_s", "samples_per_s"}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (
        {k: v for k, v in train(config, rm.init_mesh()).items() if k not in times}
        for config in (tiny_run(), tiny_run(), tiny_run(seed=2))
    )
    assert first == again != other
    assert torch.equal(before, torch.get_rng_state())


def test_learning_rates_fall_to_zero_in_a_line() -> None:
    """A run of n steps equals one by hand with lr * (1 - step / n)."""
    config, mesh = tiny_run(sparse="sgd", dense="sgd", sparse_lr=0.5, dense_lr=0.25), rm.init_mesh()
    losses: list[float] = []
    train(config, mesh, on_step=lambda step, loss: losses.append(loss))
    model = build_model(config)
    rm.shard(model, plan_run(config, model, mesh.topology), mesh)
    optimizer = rm.Optimizer(
        model, dense=lambda p: torch.optim.SGD(p, lr=0.25), sparse=rm.SGD(lr=0.5)
    )
    for step in range(config.steps):
        for group, lr in zip(optimizer.param_groups, (0.25, 0.5), strict=True):
            group["lr"] = lr * (1 - step / config.steps)
        found = model(config.data.batch_at(0, step))
        assert float(found.detach().mean()) == losses[step]
        mesh.mean(found).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["sparse", "dense"])
def test_an_unknown_optimiser_is_told(name: str) -> None:
    with pytest.raises(rm.InputError, match=f"unknown {name} optimiser 'adagrab': did you mean"):
        tiny_run(**{name: "adagrab"})


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
