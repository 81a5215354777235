"""Every file that rowmesh reads, damaged: a sentence, never a raw exception."""

import functools
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.cli.workload import read_workload
from rowmesh.cost import Calibration, Rates, load_calibration, save_calibration
from rowmesh.data.sequence_files import read_lines, read_ratings
from rowmesh.files import parse_json, read_array
from rowmesh.placement.hot import make_hot_set
from rowmesh.profile import load_profile, save_profile
from rowmesh.profile.collect import profile_source
from rowmesh.runtime.tensor_files import open_array, open_tensors, write_tensors
from rowmesh.topology import Topology
from rowmesh.train.checkpoint.document import decode
from rowmesh.train.folder import MetricsFile
from rowmesh.train.recipes import config_to_json, load_recipe
from tests.sources import CLICKS
from tests.test_hot import plan, table

MUTATIONS = 60
WORDS = [
    *(b"9" * 5000, b"[" * 100_000, b'{"a":' * 3000, b"-1", b"1e999", b"null", b"[]", b"{}"),
    *(b"\xff\xfe\x00", b'"\\ud800"', b"2000000000000000000", b"true", b"NaN", b'"../x"', b"0.5"),
]


def write_hot(path: Path) -> Any:
    rm.save_plan(plan(table(hot=[5, 3])), path.parent / "plan.json")
    next(path.parent.glob("hot_t_*.npy")).replace(path)
    text = (path.parent / "plan.json").read_text()
    return lambda _: _load_beside(path, text)


def _load_beside(path: Path, text: str) -> Any:
    file = path.parent / "p.json"
    hot = make_hot_set("t", np.array([3, 5]))
    file.write_text(text.replace(hot.file, path.name))
    return rm.load_plan(file)


def write_text(text: str, reader: Callable[[Any], Any], path: Path) -> Any:
    path.write_text(text)
    return reader


def write_calibration(path: Path) -> Any:
    save_calibration(Calibration(topology=Topology(), rates=Rates()), path)
    return load_calibration


def write_profile(path: Path) -> Any:
    save_profile(profile_source(CLICKS, CLICKS.tables(4), num_steps=4), path)
    return lambda file: (load_profile(file).stats(), load_profile(file).figures)


def write_plan(path: Path) -> Any:
    rm.save_plan(plan(table()), path)
    return lambda file: str(rm.load_plan(file))


def write_npy(path: Path) -> Any:
    np.save(path, np.ones((3, 2), dtype=np.float32))
    return functools.partial(open_array, name="t")


def write_safetensors(path: Path) -> Any:
    write_tensors({"a": torch.ones(3, 2)}, path)
    return open_tensors


def write_index(path: Path) -> Any:
    pytest.importorskip("safetensors")
    write_tensors({"a": torch.ones(3, 2)}, path.parent / "m.safetensors")
    path.write_text(json.dumps({"weight_map": {"a": "m.safetensors"}}))
    return open_tensors


def read_metrics(path: Path) -> None:
    MetricsFile(path, log_every=1, after=3).close()


TABLES = {"name": "t", "num_embeddings": 9, "embedding_dim": 4, "feature_names": ["a"]}
DOCUMENT = {"step": 1, "world": 1, "tables": {}, "rule": None, "sparse_group": None}
DOCUMENT |= {"dense_optimizer": None, "plan": None, "extra": {}, "files": ["a"], "tensors": {}}
READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": write_plan,
    "hot_x.npy": write_hot,
    "topology.json": write_calibration,
    "profile.npz": write_profile,
    "recipe.toml": functools.partial(
        write_text, '[data]\nkind = "synthetic"\ncap = 9\n[model]\ndim = 8\n', load_recipe
    ),
    "config.json": functools.partial(
        write_text,
        config_to_json(load_recipe("demo", ["plan.constraints.pin.t.split=row_wise"])),
        load_recipe,
    ),
    "tables.json": functools.partial(
        write_text,
        json.dumps({"tables": [TABLES]}),
        functools.partial(read_workload, batch_size=8, alpha=1.0),
    ),
    "metrics.jsonl": functools.partial(
        write_text, '{"kind": "train", "step": 1}\n{"kind": "eval", "step": 2}\n', read_metrics
    ),
    "sequences.txt": functools.partial(write_text, "1 2 3\n2 3 4 5\n", read_lines),
    "ratings.dat": functools.partial(write_text, "1::2::3::4\n2::2::3::9\n", read_ratings),
    "a.npy": write_npy,
    "a.safetensors": write_safetensors,
    "model.safetensors.index.json": write_index,
}


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, or with words of another kind, size or depth in it."""
    at = rng.randrange(len(content))
    kind = rng.randrange(4)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    word = rng.choice(WORDS)
    if kind == 2:
        return content[:at] + word + content[at + rng.randrange(4) :]
    ends = [i for i, c in enumerate(content) if c in b":=,[ "] or [at]  # where values begin
    begin = rng.choice(ends) + 1
    stop = next((i for i in range(begin, len(content)) if content[i] in b",}]\n: "), len(content))
    return content[:begin] + word + content[stop:]


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    if "safetensors" in name:
        pytest.importorskip("safetensors")
    path = tmp_path / name
    read = READERS[name](path)
    read(path)
    refused: list[str]
    content, rng, refused = path.read_bytes(), random.Random(name), []
    for _ in range(MUTATIONS):
        path.write_bytes(mutate(content, rng))
        try:
            read(path)
        except (rm.InputError, rm.PlanError) as error:
            refused.append(str(error))
    assert max(map(len, refused), default=0) < 2000
    assert all(sentence.replace("\n", " ").isprintable() for sentence in refused)
    assert refused or name == "metrics.jsonl"


def test_damaged_metadata_is_one_sentence() -> None:
    from rowmesh.train.checkpoint.document import encode

    rng = random.Random(1)
    whole = encode(DOCUMENT)
    assert decode(whole, Path("m"))["step"] == 1
    damaged = {mutate(whole, rng) for _ in range(MUTATIONS)} - {whole}
    for data in damaged:
        with pytest.raises(rm.InputError):
            decode(data, Path("m"))


def test_an_array_is_as_long_as_its_header_says() -> None:
    stream = io.BytesIO()
    np.save(stream, np.arange(5))
    whole = stream.getvalue()
    assert read_array(io.BytesIO(whole), num_bytes=len(whole)).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="speaks of 40 bytes, but 48 follow"):
        read_array(io.BytesIO(whole + bytes(8)), num_bytes=len(whole) + 8)
    stream = io.BytesIO()
    np.save(stream, np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="objects"):
        read_array(io.BytesIO(stream.getvalue()), num_bytes=len(stream.getvalue()))


def test_documents_are_64_levels_deep_at_most() -> None:
    assert parse_json("[" * 64 + "]" * 64, where="it")
    for levels in (66, 900, 200_000):
        with pytest.raises(rm.InputError, match="it is nested deeper than 64 levels"):
            parse_json("[" * levels + "]" * levels, where="it")


def test_an_index_stays_in_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write_tensors({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(rm.InputError, match="is no file beside it"):
            open_tensors(folder)


def one_sentence(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("rowmesh: ").strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("train --ranks two", "--ranks is 'two': input should be a valid integer"),
        ("train --ranks 99999999999999999999", "--ranks is '99999999999999999999': "),
        ("plan --hosts nine", "--hosts is 'nine': "),
        ("plan --hosts 1000000", "are more than 65,536 ranks"),
        ("trian", "No such command 'trian'"),
        ("plan --tiers auto --set plan.tiers=off demo", "give one of them"),
        ("train --plan a.json --set plan.file=b.json", "give one of them"),
        ("train clicks --set training.steps=2 --set training.epochs=1", "exclude each other"),
        ("plan demo --set plan.file=x.json", "plan.file is x.json, which is used as it is"),
        ("train --set seed=0x" + "f" * 5000, "must be below 2^63"),
        ("train --set seed=" + "9" * 5000, "seed must be int"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_one_sentence(arguments: str, sentence: str) -> None:
    assert sentence in one_sentence(*arguments.split())


def test_every_table_is_printed_when_asked_for() -> None:
    words = ["--tables", "45", "--why", "--cap", "500", "--dim", "4"]
    few = CliRunner().invoke(app, ["plan", *words])
    assert few.stdout.count("... and 5 more tables; --all prints them") == 2
    every = CliRunner().invoke(app, ["plan", *words, "--all"])
    assert "more tables" not in every.stdout
    assert every.stdout.count("t_cat_44 ") == 2
