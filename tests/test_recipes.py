"""Recipes: what a file and ``key=value`` give, and that it can be written and read back."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.data import ParquetClicks, SyntheticClicks
from rowmesh.errors import InputError
from rowmesh.optim import RowwiseAdagrad
from rowmesh.topology import Topology
from rowmesh.train.config import CheckpointConfig, RunConfig, TrainingConfig
from rowmesh.train.folder import RunFolder
from rowmesh.train.model import ModelConfig
from rowmesh.train.optimiser import OptimiserConfig
from rowmesh.train.planning import PlanConfig
from rowmesh.train.recipes import config_to_json, find_recipe, load_recipe
from tests.processes import ROOT
from tests.sources import BadClicks, write_recipe

law = settings(max_examples=60, deadline=None, derandomize=True)
sizes = st.lists(st.integers(1, 4096), max_size=3).map(tuple)
rates = st.floats(0, 1e9, allow_nan=False)
counts = st.integers(1, 10**9)
maybe = st.none() | counts
widths = st.integers(1, 1 << 16)

configs = st.builds(
    RunConfig,
    data=st.builds(
        SyntheticClicks,
        cardinalities=st.just("criteo-kaggle") | st.lists(counts, min_size=2, max_size=2),
        cap=maybe,
        alpha=st.floats(0, 100),
        pooling=st.integers(1, 9),
        labels=st.sampled_from(["coin", "optimisers"]),
        seed=st.integers(0, 2**32 - 1),
    ),
    model=st.builds(
        ModelConfig,
        kind=st.sampled_from(["dlrm", "dcn", "din"]),
        dim=widths,
        dense_layers=sizes,
        low_rank=st.none() | widths,
    ),
    optimiser=st.builds(
        OptimiserConfig,
        sparse=st.sampled_from(["adagrad", "adam", "rowwise_adagrad"]),
        sparse_eps=st.none() | st.floats(1e-9, 1.0),
        sparse_lr=rates,
        schedule=st.sampled_from(["linear", "constant"]),
    ),
    plan=st.builds(PlanConfig, file=st.none() | st.text(min_size=1)),
    training=st.builds(
        TrainingConfig,
        steps=counts,
        epochs=maybe,
        tensorboard=st.sampled_from([True, False, "auto"]),
    ),
    checkpoint=st.builds(CheckpointConfig, every=maybe, asynchronous=st.booleans()),
    seed=st.integers(0, 2**40),
)


def assignments(part: Any, where: str = "") -> list[str]:
    """Every field of a config as somebody would type it."""
    found = []
    for field in dataclasses.fields(part):
        value, key = getattr(part, field.name), f"{where}{field.name}"
        if not field.init or field.name == "recipe":
            continue
        if field.name == "steps" and part.epochs is not None:
            continue  # it does not count, and both on one command line are an error
        if dataclasses.is_dataclass(value):
            found += assignments(value, f"{key}.")
        elif isinstance(value, tuple):
            found.append(f"{key}={list(value)}")
        else:
            found.append(f"{key}={str(value).lower() if value in (True, False) else value}")
    return found


@law
@given(config=configs)
def test_a_written_config_reads_back_equal(
    config: RunConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "config.json"
    file.write_text(config_to_json(config))
    assert load_recipe(file) == config


def test_a_written_parquet_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_recipe("clicks")
    (tmp_path / "config.json").write_text(config_to_json(config))
    assert load_recipe(tmp_path / "config.json") == config


@law
@given(config=configs)
def test_every_setting_can_be_typed(config: RunConfig) -> None:
    plan = dataclasses.replace(config.plan, file=None)  # `none` and blanks at the ends are lost
    config = dataclasses.replace(config, plan=plan)
    found = load_recipe("demo", assignments(config))
    steps = config.training.steps if config.training.epochs is None else found.training.steps
    training = dataclasses.replace(config.training, steps=steps)
    assert found == dataclasses.replace(config, training=training)


def test_the_demo_recipe_is_the_default() -> None:
    assert load_recipe("demo") == RunConfig()


@pytest.mark.parametrize("name", ["clicks", "dcn", "demo", "drift", "movietweetings", "sequences"])
def test_recipes_that_come_with_rowmesh_are_found_by_name(name: str) -> None:
    config = load_recipe(name, ["training.steps=7"])
    assert config.training.steps == 7
    assert Path(str(config.recipe)) == find_recipe(name).resolve()


def test_what_a_toml_file_does_not_say_keeps_its_default(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nkind = "dcn"\n[data]\ncap = "none"\n[training]\nsteps = 5\n')
    found = load_recipe(file, ["model.low_rank=8", "model.over_layers=[]"])
    assert found.model == ModelConfig(kind="dcn", low_rank=8, over_layers=())
    assert found.data == SyntheticClicks()
    assert found.training == TrainingConfig(steps=5)


def test_values_that_depend_on_each_other_are_set_together() -> None:
    found = load_recipe("demo", ["data.pooling=[1, 2]", "data.cardinalities=[9, 8]"])
    assert isinstance(found.data, SyntheticClicks)
    assert found.data.pooling_factors == (1, 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("trainig.steps=3", "unknown key 'trainig': did you mean 'training'?"),
        ("training.step=3", "unknown key 'training.step': did you mean 'steps'?"),
        ("data.capp=3", "unknown key 'data.capp': did you mean 'cap'?"),
        ("data._cache=3", "unknown key 'data._cache'"),
        ("data.kind=synthetics", "unknown data.kind 'synthetics': did you mean 'synthetic'?"),
        ("training.steps=many", "training.steps must be int, got 'many'"),
        ("training.steps=2.5", "training.steps must be int, got 2.5"),
        ("training.tensorboard=1", "training.tensorboard: unknown value 1: known are auto"),
        ("training.epochs=two", "training.epochs must be int, got 'two'"),
        ("training.steps=none", "training.steps must be int, got None"),
        ("model.dense_layers=64", "model.dense_layers must be a list, got 64"),
        ("model.dense_layers=[6, a]", "model.dense_layers must be a list, got '[6, a]'"),
        ("model.dense_layers=[6, 'a']", "model.dense_layers[1] must be int, got 'a'"),
        ("model.kind=dlmr", "model.kind: unknown value 'dlmr': did you mean 'dlrm'?"),
        ("model=dlrm", "model must be an object, got 'dlrm'"),
        ("data=clicks", "data must be an object, got 'clicks'"),
        ("model.dim.x=3", "model.dim must be int, got {'x': '3'}"),
        ("training.steps", "'training.steps' is not key=value, as in training.steps=100"),
        ("=3", "'=3' is not key=value"),
        ("training.steps=0", "training.steps is 0, but must be at least 1"),
        ("checkpoint.every=0", "checkpoint.every is 0, but must be at least 1"),
        ("seed=-1", "seed is -1, but must be at least 0"),
        ("seed=9999999999999999999999", "seed is 9999999999999999999999, but must be below 2^63"),
        ("model.dim=99999999999", "model.dim is 99999999999, but must be at most 65536"),
        ("data.batch_size=99999999999999", "batch_size is 99999999999999, but must be from 1 to"),
        ("model.dim=0", "model.dim is 0, but must be at least 1"),
        ("plan.batches=-1", "plan.batches is -1, but must be at least 0"),
        ("optimiser.sparse=adagrab", "unknown sparse optimiser 'adagrab': did you mean 'adagrad'"),
        ("optimiser.dense=adagrab", "unknown dense optimiser 'adagrab': did you mean 'adagrad'"),
        ("optimiser.dense_lr=nan", "optimiser.dense_lr is nan, but must be from 0 and finite"),
        ("optimiser.sparse_eps=0", "optimiser.sparse_eps is 0.0, but must be above 0"),
        ("optimiser.warmup_steps=-1", "optimiser.warmup_steps is -1, but must be from 0"),
    ],
)
def test_a_wrong_setting_is_one_sentence(given: str, sentence: str) -> None:
    with pytest.raises(InputError) as told:
        load_recipe("demo", [given])
    assert sentence in str(told.value)


def test_sgd_has_no_eps() -> None:
    with pytest.raises(InputError, match="sgd, which has no eps"):
        OptimiserConfig(sparse="sgd", sparse_eps=1.0)
    assert OptimiserConfig(sparse_eps=0.5).rule == RowwiseAdagrad(lr=0.05, eps=0.5)


def test_the_clicks_recipe_reads_parquet() -> None:
    found = load_recipe("clicks", ["data.path=there", "data.sparse.c3=77"])
    assert isinstance(found.data, ParquetClicks)
    assert found.data.path == "there"
    assert found.data.num_dense == 26
    rows = {t.feature_names[0]: t.num_embeddings for t in found.data.tables(4)}
    assert rows == {f"c{i}": 77 if i == 3 else 10_000 for i in range(1, 27)}


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(InputError, match="does not go with the other values set"):
        load_recipe("demo", ["model.dim=3", "model.dim.x=3"])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("bad.toml", "steps = ", "cannot be read: "),
        ("bad.json", "[1]", "must be an object, got list"),
        ("bad.toml", "[training]\nsteps = '9'", "training.steps must be int, got '9'"),
        ("bad.py", "x = 1", "has no function recipe"),
        ("bad.py", "def recipe(): return 3", "recipe() must return a RunConfig, got int"),
        ("bad.py", "import nothing_at_all", "failed with ModuleNotFoundError: "),
        ("bad.py", "import sys; sys.exit(5)", "failed with SystemExit: 5"),
        ("bad.json", '{"data": 3}', "data must be a table of settings, got 3"),
    ],
)
def test_a_wrong_recipe_is_named(name: str, text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as told:
        load_recipe(tmp_path / name)
    assert str(told.value).startswith(f"recipe {tmp_path / name}: ")
    assert sentence in str(told.value)


def test_an_unknown_recipe() -> None:
    with pytest.raises(InputError, match=r"no recipe 'demos', .*: did you mean 'demo'\?"):
        load_recipe("demos")


def test_data_of_a_python_recipe_is_read_from_it_again(tmp_path: Path) -> None:
    config = load_recipe(write_recipe(tmp_path, "well", at=4), ["data.at=5", "seed=2"])
    assert isinstance(config.data, BadClicks)
    assert config.data.at == 5
    stored = tmp_path / "config.json"
    stored.write_text(config_to_json(config))
    again = load_recipe(stored, data_from=str(tmp_path / "bad.py"))
    assert again == config  # with what the command line had set of the data
    assert again.recipe == config.recipe
    folder = RunFolder(tmp_path)
    assert folder.load_config(data_from=str(tmp_path / "bad.py")) == config
    with pytest.raises(InputError, match="is no Python recipe, from which the data of this run"):
        load_recipe(stored, data_from="demo")


@pytest.mark.parametrize("name", ["config.json", "mine.toml"])
def test_a_document_that_names_a_python_file_runs_no_code(name: str, tmp_path: Path) -> None:
    mark, code = tmp_path / "ran", tmp_path / "evil.py"
    code.write_text(f"open({str(mark)!r}, 'w')\n")
    text = f'[data]\nkind = "recipe"\nfile = "{code}"\n'
    if name.endswith(".json"):
        text = json.dumps({"data": {"kind": "recipe", "file": str(code)}})
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=r"only a recipe that is named runs code: give .*evil\.py"):
        load_recipe(tmp_path / name)
    folder = RunFolder(tmp_path)
    if name == "config.json":
        with pytest.raises(InputError, match="only a recipe that is named runs code"):
            folder.load_config()
        (tmp_path / "plan.json").write_text("{}")  # not read: it is of other settings
        assert folder.stored_plan(Topology(), PlanConfig(depth=2)) is None
    assert not mark.exists()


def test_a_recipe_beside_a_run_that_needs_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_to_json(RunConfig()))
    with pytest.raises(InputError, match="comes from no Python recipe: leave out dcn"):
        RunFolder(tmp_path).load_config(data_from="dcn")


@pytest.mark.parametrize(
    ("recipe", "given", "found"),
    [
        ("clicks", ["training.steps=20"], {"training.epochs": None, "training.steps": 20}),
        ("clicks", ["training.epochs=2"], {"training.epochs": 2}),
        ("clicks", ["training.steps=20", "training.epochs=none"], {"training.steps": 20}),
        ("clicks", ["training.steps=20", "training.steps=30"], {"training.steps": 30}),
        ("clicks", ["data.held_out_fraction=0.1"], {"data.held_out_files": 0}),
        ("clicks", ["data.held_out_fraction=0.00"], {"data.held_out_files": 1}),
        ("movietweetings", ["data.held_out_fraction=0.2"], {"data.held_out_fraction": 0.2}),
        ("mine", ["plan.split=row_wise"], {"plan.file": None, "plan.split": "row_wise"}),
        ("mine", ["plan.constraints.pin.t.split=row_wise"], {"plan.file": None}),
        ("mine", ["plan.batches=9"], {"plan.profile": None, "plan.file": "p.json"}),
        ("mine", ["plan.tiers=auto", "plan.refresh=5"], {"plan.file": "p.json"}),
        ("mine", ["plan.tiers=auto", "plan.refresh=none"], {"plan.file": None}),
        ("mine", ["plan.file=q.json"], {"plan.file": "q.json"}),
    ],
)
def test_what_is_set_beats_what_the_recipe_chose_instead(
    recipe: str, given: list[str], found: dict[str, Any], tmp_path: Path
) -> None:
    if recipe == "mine":
        recipe = str(tmp_path / "mine.toml")
        Path(recipe).write_text('[plan]\nfile = "p.json"\nprofile = "p.npz"\n')
    config = load_recipe(recipe, given)
    for key, value in found.items():
        assert functools.reduce(getattr, key.split("."), config) == value, key


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("training.steps=20", "training.epochs=2"),
        ("data.held_out_files=2", "data.held_out_fraction=0.1"),
        ("plan.profile=p.npz", "plan.batches=8"),
        ("plan.file=p.json", "plan.split=row_wise"),
        ("plan.file=p.json", "plan.constraints.pin.t.split=row_wise"),
        ("plan.file=p.json", "plan.tiers=auto"),
        ("plan.file=p.json", "plan.codecs=fp16"),
    ],
)
def test_settings_that_exclude_each_other_are_an_error(
    first: str, second: str, tmp_path: Path
) -> None:
    sentence = f"{first.partition('=')[0]} and {second.partition('=')[0][:16]}"
    for both in ([first, second], [second, first]):
        with pytest.raises(InputError, match="exclude each other: give one of them") as told:
            load_recipe("clicks", both)
        assert sentence in str(told.value)
    tables: dict[str, list[str]] = {}
    for item in (first, second):
        part, _, rest = item.partition(".")
        key, _, value = rest.partition("=")
        value = value if value[0].isdigit() else f'"{value}"'
        tables.setdefault(part, []).append(f"{key} = {value}")
    text = "".join("\n".join([f"[{part}]", *lines, ""]) for part, lines in tables.items())
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(InputError, match="exclude each other"):
        load_recipe(tmp_path / "mine.toml")


def test_a_resumed_run_takes_settings_that_leave_its_state_valid(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(InputError, match="there is no run in"):
        folder.load_config()
    folder.config.write_text(config_to_json(RunConfig()))
    found = folder.load_config(["training.steps=9", "optimiser.sparse_lr=0.5"])
    assert (found.training.steps, found.optimiser.sparse_lr) == (9, 0.5)
    for item in ("model.dim=3", "seed=3", "data.cap=3", "optimiser.sparse=sgd", "trainings=1"):
        with pytest.raises(InputError, match="cannot change when it resumes"):
            folder.load_config([item])


def test_the_recipe_of_the_first_steps_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "start.md").read_text()
    (tmp_path / "mine.toml").write_text(text.split("```toml\n", 1)[1].split("```", 1)[0])
    config = load_recipe(tmp_path / "mine.toml")
    assert isinstance(config.data, ParquetClicks)
    assert config.plan.constraints.pin["t_user"].split == "row_wise"
    parts = [f.name for f in dataclasses.fields(RunConfig) if f.name not in ("data", "recipe")]
    for part in parts:
        names = dataclasses.fields(value) if is_part(value := getattr(config, part)) else ()
        missing = [f.name for f in names if f"`{f.name}`" not in text]
        assert not missing, f"docs/start.md does not name {missing} of {part}"


def is_part(value: Any) -> bool:
    return dataclasses.is_dataclass(value)
