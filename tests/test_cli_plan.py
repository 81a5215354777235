"""`rowmesh plan` of a file, `rowmesh plan diff`, and the memory of this machine."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.cli.plan import _parse_bytes
from rowmesh.cli.workload import Knowledge, read_workload
from rowmesh.placement import Exchange, HotChoice, HotSet, Plan, Predicted, Tier
from rowmesh.placement.diff import Change, diff_plans
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.train import machine
from rowmesh.train.machine import available_bytes, measure_memory

TABLE = {"name": "a", "num_embeddings": 9000, "embedding_dim": 8, "feature_names": ["x"]}
SECOND = TABLE | {"name": "b", "num_embeddings": 2_000_000, "feature_names": ["y", "z"]}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def write(path: Path, document: Any) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def plan_of(path: Path, document: Any, *options: str) -> Plan:
    result = run("plan", write(path / "tables.json", document), *options, "--out", path / "p.json")
    assert result.exit_code == 0, result.output
    return rm.load_plan(path / "p.json")


RECIPE = """
[data]
kind = "synthetic"
cardinalities = [300, 40]
batch_size = 32

[optimiser]
sparse = "adam"

[plan]
split = "row_wise"
exchange = "rows"
tiers = "hot:20"
"""


def test_a_recipe_is_planned_by_its_own_settings(tmp_path: Path) -> None:
    recipe, out = write(tmp_path / "r.toml", RECIPE), tmp_path / "p.json"
    assert run("plan", recipe, "--out", out).exit_code == 0
    planned = rm.load_plan(out)
    assert sum(rows.count for t in planned.tables for _, rows in t.hot) == 20
    assert {t.rest.split.word for t in planned.tables} == {"row-wise"}
    assert (
        run("plan", recipe, "--out", out, "--tiers", "off", "--split", "table_wise").exit_code == 0
    )
    planned = rm.load_plan(out)
    assert not any(t.hot for t in planned.tables)
    assert {t.word for t in planned.tables} == {"table-wise"}
    refused = run("plan", recipe, "--batch", "64")
    assert refused.exit_code == 2
    assert "--batch 64 goes without a file" in refused.stderr


def test_memory_is_told_with_the_state_of_the_recipes_rule(tmp_path: Path) -> None:
    """Adam keeps two numbers an element: a rank holds three times the rows, and more."""
    recipe, out = write(tmp_path / "r.toml", RECIPE), tmp_path / "p.json"
    found = run("plan", recipe, "--depth", "1", "--out", out)
    planned = rm.load_plan(out)
    held = max(bytes_per_rank(planned, state_bytes_per_row=4, state_bytes_per_element=8))
    assert held > 2.5 * max(bytes_per_rank(planned, state_bytes_per_row=0))
    assert f"GiB per rank with the state of adam, largest {held / 2**30:.6f}:" in found.output


def test_a_folder_of_a_recipes_name_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run("plan", "demo").exit_code == 0


def test_what_is_said_of_hot_rows_fits_a_terminal() -> None:
    choice = HotChoice(
        rows=123_456_789,
        host_rows=123_456_789,
        num_bytes=10**11,
        coverage=0.5,
        step_s=1.0,
        step_s_cold=9.0,
    )
    assert max(map(len, str(choice).splitlines())) <= 100
    assert str(choice).endswith("expected ms of a step 1,000.0, without 9,000.0")
    few = replace(choice, rows=5, host_rows=0, num_bytes=10, step_s_cold=0.1, step_s=0.1)
    assert "\n" not in str(few)


def test_tables_of_a_file_are_planned(tmp_path: Path) -> None:
    more = {"pooling_factor": 20, "data_type": "bf16", "pooling": "mean"}
    sequence = SECOND | {"name": "s", "pooling": "none"}
    document = {"tables": [TABLE, SECOND | more, sequence]}
    plan = plan_of(tmp_path, document, "--hosts", "2", "--ranks-per-host", "4")
    a, b, s = plan.tables
    assert (plan.mesh.hosts, plan.mesh.local) == (2, 4)
    assert (a.name, a.num_embeddings, a.embedding_dim, a.data_type) == ("a", 9000, 8, "fp32")
    assert (b.data_type, str(b.pooling), b.feature_names) == ("bf16", "mean", ("y", "z"))
    assert str(s.pooling) == "none"
    rare = plan_of(tmp_path, {"tables": [SECOND | {"pooling_factor": 0.1}]}, "--hosts", "2")
    often = plan_of(tmp_path, {"tables": [SECOND | {"pooling_factor": 5}]}, "--hosts", "2")
    assert rare.predicted.cross_bytes < often.predicted.cross_bytes
    small = plan_of(tmp_path, {"tables": [SECOND]}, "--hosts", "2", "--batch", "64")
    assert small.predicted.cross_bytes < often.predicted.cross_bytes


def test_constraints_of_a_file_are_obeyed(tmp_path: Path) -> None:
    constraints = {"pin": {"b": {"host": 1, "split": "table_wise"}}}
    plan = plan_of(
        tmp_path, {"tables": [TABLE, SECOND], "constraints": constraints}, "--hosts", "2"
    )
    assert plan.table("b").word == "table-wise"
    assert plan.table("b").rest.ranks[0] in (2, 3)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("{", "is not JSON: "),
        ([], "the file must be an object, got []"),
        ({}, "the file: missing tables"),
        ({"table": []}, "the file: unknown field 'table': did you mean 'tables'?"),
        ({"tables": {}}, "the file.tables must be list, got {}"),
        ({"tables": []}, "tables is empty: at least one table is needed"),
        ({"tables": [3]}, "tables[0] must be an object, got 3"),
        ({"tables": [{"name": "a"}]}, "tables[0]: missing num_embeddings, embedding_dim, feature_"),
        (
            {"tables": [TABLE | {"num_embedings": 3}]},
            "tables[0]: unknown field 'num_embedings': did you mean 'num_embeddings'?",
        ),
        (
            {"tables": [TABLE | {"num_embeddings": "3"}]},
            "tables[0].num_embeddings must be int, got '3'",
        ),
        (
            {"tables": [TABLE | {"embedding_dim": True}]},
            "tables[0].embedding_dim must be int, got T",
        ),
        ({"tables": [TABLE | {"num_embeddings": -3}]}, "table 'a' needs at least one row and one"),
        (
            {"tables": [TABLE | {"feature_names": []}]},
            "tables[0].feature_names must be a list of n",
        ),
        ({"tables": [TABLE | {"feature_names": [1]}]}, "tables[0].feature_names must be a list of"),
        ({"tables": [TABLE | {"pooling_factor": -1}]}, "tables[0].pooling_factor is -1, but must"),
        ({"tables": [TABLE | {"pooling": "xyz"}]}, "tables[0]: unknown pooling 'xyz': known are"),
        (
            {"tables": [TABLE | {"pooling": "men"}]},
            "tables[0]: unknown pooling 'men': did you mean",
        ),
        ({"tables": [TABLE | {"data_type": "int8"}]}, "unknown table dtype 'int8': known are fp32"),
        ({"tables": [TABLE, SECOND, TABLE]}, "tables named more than once: a"),
        (
            {"tables": [TABLE], "constraints": {"pins": {}}},
            "constraints: unknown field 'pins': did you mean 'pin'?",
        ),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, document: Any, sentence: str) -> None:
    file = write(tmp_path / "tables.json", document)
    result = run("plan", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rowmesh: {file}")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing.json"], "cannot read nothing.json: No such file or directory"),
        (["nothing.json", "--dim", "3"], "--dim 3 goes without a file, but nothing.json was given"),
        (["--memory-per-rank", "3GB"], "memory-per-rank is '3GB', but must be none or a number of"),
        (["--memory-per-rank", "0"], "memory-per-rank is '0', but must be"),
        (["--memory-per-rank", "1MiB"], "table 't_cat_2' needs at least "),
        (["--hosts", "0"], "a topology needs at least one host"),
        (["--ranks-per-host", "0"], "a topology needs at least one host"),
        (["diff", "nothing.json", "none.json"], "cannot read the plan nothing.json: "),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], sentence: str) -> None:
    result = run("plan", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rowmesh: {sentence}")
    assert result.stderr.count("\n") == 1


def test_a_batch_has_samples(tmp_path: Path) -> None:
    result = run("plan", write(tmp_path / "t.json", {"tables": [TABLE]}), "--batch", "0")
    assert result.exit_code == 2
    assert "batch is 0, but must be at least 1" in result.stderr


def test_help_is_enough_for_both_commands() -> None:
    shown = run("plan", "--help").output
    for word in ("--hosts", "--memory-per-rank", "--why", "num_embeddings", "plan diff A B"):
        assert word in shown
    assert "--json" in run("plan", "diff", "--help").output


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--hosts", "2"], "memory of a rank: not checked; say --memory-per-rank, e.g. 80GiB"),
        (["--memory-per-rank", "none"], "memory of a rank: not checked; say --memory-per-rank, e."),
        (["--memory-per-rank", "9.5GiB"], "memory of a rank: 9.50 GiB, as given"),
        (["--cap", "1000"], "memory of a rank: 3.00 GiB, measured here and shared out"),
    ],
)
def test_a_plan_says_where_its_memory_is_from(
    options: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda root: int(7.5 * 2**30))
    result = run("plan", *options)
    assert result.exit_code == 0, result.output
    assert line in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_memory_of_this_machine_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda root: 1 << 20)
    result = run("plan")
    assert result.exit_code == 2
    assert "table 't_cat_2' needs at least 1.227 GiB on a rank" in result.stderr
    assert run("plan", "--memory-per-rank", "none").exit_code == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("3KiB", 3072), ("0.5 MiB", 1 << 19), ("2GiB", 2 << 30), ("1TiB", 1 << 40)],
)
def test_sizes_have_units(text: str, number: int) -> None:
    assert _parse_bytes(text) == number
    assert _parse_bytes("none") is None


def test_why_is_printed_on_request() -> None:
    options = ("plan", "--hosts", "2", "--cap", "3000")
    assert "runner-up" not in run(*options).stdout
    shown = run(*options, "--why").stdout
    assert "saved against the runner-up" in shown
    assert sum(line.startswith("t_cat_2 ") for line in shown.splitlines()) == 2
    assert max(map(len, shown.splitlines())) <= 100


def plans(tmp_path: Path) -> tuple[Plan, Plan]:
    document = {"tables": [TABLE, SECOND]}
    before = plan_of(tmp_path, document, "--hosts", "2")
    rm.save_plan(before, tmp_path / "before.json")
    after = plan_of(tmp_path, document, "--hosts", "2", "--split", "table_wise")
    return before, after


def test_diff_shows_every_change(tmp_path: Path) -> None:
    before, after = plans(tmp_path)
    found = diff_plans(before, after)
    old, new = before.table("b").rest.ranks, after.table("b").rest.ranks
    assert Change(table="b", what="split", before="row-wise", after="table-wise") in found.changes
    assert Change(table="b", what="ranks", before="0-3", after=str(new[0])) in found.changes
    assert old == (0, 1, 2, 3)
    assert found.memory == (tuple(bytes_per_rank(before)), tuple(bytes_per_rank(after)))
    assert found.predicted == (before.predicted, after.predicted)
    shown = run("plan", "diff", tmp_path / "before.json", tmp_path / "p.json")
    assert (shown.exit_code, shown.stdout) == (0, f"{found}\n")
    assert "2 of 2 tables differ" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
    printed = run("plan", "diff", tmp_path / "before.json", tmp_path / "p.json", "--json")
    assert json.loads(printed.stdout) == json.loads(json.dumps(asdict(found)))


def test_diff_of_equal_plans_is_empty(tmp_path: Path) -> None:
    before, _ = plans(tmp_path)
    turned = replace(before, tables=before.tables[::-1])
    assert diff_plans(before, turned).changes == ()
    assert str(diff_plans(before, turned)).startswith("0 of 2 tables differ\nGiB of the fullest")


def test_diff_sees_every_field(tmp_path: Path) -> None:
    """Whatever is set otherwise in a plan shows up, under one name at least."""
    plan, _ = plans(tmp_path)
    table = plan.table("b")
    hot = Tier(ranks=(0,), rows=HotSet(count=1, sha256="x", file="y"))
    changed: dict[str, Any] = {
        "collection": "c",
        "num_embeddings": 5,
        "embedding_dim": 2,
        "data_type": "fp16",
        "pooling": rm.PoolingType.MEAN,
        "feature_names": ("q",),
        "virtual_shards": 512,
        "tiers": (hot, *table.tiers),
        "exchange": Exchange.POOLED,
        "dedup": False,
        "trainable": False,
        "weighted": True,
        "tower": "t",
    }
    for name, value in changed.items():
        other = replace(plan, tables=(plan.tables[0], replace(table, **{name: value})))
        assert {c.table for c in diff_plans(plan, other).changes} >= {"b"}, name
    for name, value in {"dense": (3,), "tree": "flat", "towers": ("t",)}.items():
        changes = diff_plans(plan, replace(plan, **{name: value})).changes
        assert None in {c.table for c in changes}, name
    faster = replace(plan, predicted=Predicted(host_bytes=1e6))
    assert "inside hosts 1.00 -> " in str(diff_plans(faster, plan))


def test_diff_names_tables_of_one_plan(tmp_path: Path) -> None:
    plan, _ = plans(tmp_path)
    fewer = replace(plan, tables=plan.tables[:1])
    (change,) = diff_plans(plan, fewer).changes
    assert change == Change(table="b", what="table", before="row-wise", after="none")
    assert "1 of 2 tables differ" in str(diff_plans(fewer, plan))


def system(tmp_path: Path, **files: str) -> Path:
    """A file system of the given files, ``__`` for a slash."""
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("-", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


MEMINFO = "MemTotal:  2000 kB\nMemFree:  5 kB\nMemAvailable:    1000 kB\n"


def test_available_memory_is_the_systems(tmp_path: Path) -> None:
    assert available_bytes(root=tmp_path) is None
    assert measure_memory(2, root=tmp_path) is None
    root = system(tmp_path, proc__meminfo=MEMINFO)
    assert available_bytes(root=root) == 1000 * 1024
    assert measure_memory(2, root=root) == int(1000 * 1024 * 0.8) // 2
    with pytest.raises(rm.InputError, match="local is 0, but must be at least 1"):
        measure_memory(0)


@pytest.mark.parametrize("path", ["/", "/job/task", "/not/there"])
@pytest.mark.parametrize("version", [1, 2])
def test_available_memory_is_what_control_groups_leave(
    tmp_path: Path, version: int, path: str
) -> None:
    """Of the group and of all above it; what its page cache can drop counts as free."""
    names = ("memory.max", "memory.current")
    base, line = tmp_path / "sys/fs/cgroup", f"0::{path}"
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        base, line = base / "memory", f"5:cpu,cpuacct:/x\n4:memory:{path}"
    system(tmp_path, proc__meminfo=MEMINFO)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    for folder, limit, used, droppable in (
        (base, "900000", "100000", 5000),
        (base / "job", "600000", "100000", 1),
        (base / "job/task", "max" if version == 2 else str(2**63), "100", 0),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(limit + "\n")
        (folder / names[1]).write_text(used + "\n")
        (folder / "memory.stat").write_text(f"cache 3\ninactive_file {droppable}\n")
    expected = 500_001 if path == "/job/task" else 805_000
    assert available_bytes(root=tmp_path) == expected


def test_memory_of_this_very_machine() -> None:
    found = measure_memory(1)
    assert found is None or 1 << 20 < found < 1 << 50


def test_with_a_calibration_the_dense_layers_count_whatever_is_asked_for() -> None:
    """As in `rowmesh train`: what ``auto`` takes depends on their time."""
    timed = read_workload(
        Path("demo"), batch_size=1, alpha=1.0, knowledge=Knowledge(calibration="any.json")
    )
    assert timed.work is not None
    assert min(timed.work) > 0.0
    assert read_workload(Path("demo"), batch_size=1, alpha=1.0).work is None
