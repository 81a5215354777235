"""A run's folder against links, full disks and damaged lines; and data that is not there."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.placement import HotSet, Tier
from rowmesh.train.folder import MetricsFile, RunFolder
from tests.processes import Fork, environment, finish, settings
from tests.test_hot import plan, table

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def one_sentence(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert (result.exit_code, result.stdout) == (2, ""), (result.output, result.exception)
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("rowmesh: ").strip()


def test_the_lock_follows_no_link_and_cuts_nothing(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / ".lock").symlink_to(treasure)
    with pytest.raises(rm.InputError, match=r"cannot write .*\.lock: "), folder.lock():
        pass
    assert treasure.read_text() == "gold"
    (folder.path / ".lock").unlink()
    os.link(treasure, folder.path / ".lock")
    with folder.lock():
        assert treasure.read_text() == "gold"


@pytest.mark.parametrize("name", ["config.json", "../hot.npy", "/hot.npy", "hot\x1b.npy", "", "."])
def test_a_hot_set_has_a_file_of_its_own(name: str, tmp_path: Path) -> None:
    given = plan(table(hot=[5, 3]))
    tiers = given.tables[0].tiers
    rows = HotSet(count=2, sha256="0" * 64, file=name)
    hot = Tier(ranks=tiers[0].ranks, copies=tiers[0].copies, rows=rows)
    with pytest.raises(rm.PlanError, match="must be in a file"):
        plan(table(tiers=(hot, *tiers[1:]))).validate()


def test_metrics_that_are_no_text_lose_their_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"kind": "train", "step": 1}\n'
    deep = b'{"step": ' + b"[" * 100_000 + b"\n"
    path.write_bytes(good + b"\xff\xfe\n" + deep + b'{"step": ' + b"9" * 5000 + b"}\n")
    MetricsFile(path, log_every=1, after=5).close()
    assert path.read_bytes() == good


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_metrics_on_a_full_disk_name_the_file(tmp_path: Path) -> None:
    words = ["rowmesh", "train", "--folder", str(tmp_path / "run"), "--json"]
    words += settings("training.log_every=1", "training.steps=200", "data.cardinalities=[9]")
    process = Fork(words, env=environment(), preexec_fn=_small_files)
    code, out, err = finish(process)
    assert (code, out) == (2, ""), err
    assert f"cannot write {tmp_path / 'run' / 'metrics.jsonl'}: File too large" in err
    assert err.count("\n") == 1


def write_clicks(file: Path, *, labels: list[int] | None, checksum: bool = True) -> None:
    columns: dict[str, Any] = {"user": list(range(64))}
    columns |= {} if labels is None else {"label": labels}
    pq.write_table(pa.table(columns), file, write_page_checksum=checksum, compression="none")


def recipe(tmp_path: Path) -> str:
    text = '[data]\nkind = "parquet"\npath = "{}"\nlabel = "label"\nbatch_size = 16\n'
    text += "held_out_fraction = 0.5\n[data.sparse]\nuser = 64\n[model]\ndim = 4\n"
    (tmp_path / "r.toml").write_text(text.format(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return str(tmp_path / "r.toml")


def test_a_missing_label_is_named(tmp_path: Path) -> None:
    file = recipe(tmp_path)
    write_clicks(tmp_path / "data" / "a.parquet", labels=None)
    assert "has no column 'label'" in one_sentence("train", file, "--ranks", "2")
    assert "has no column 'label'" in one_sentence(
        "profile", file, "--out", str(tmp_path / "p.npz")
    )


@pytest.mark.parametrize("checksum", [True, False])
def test_flipped_bits_of_pages_with_checksums_are_found(checksum: bool, tmp_path: Path) -> None:
    file = recipe(tmp_path)
    path = tmp_path / "data" / "a.parquet"
    write_clicks(path, labels=[0, 1] * 32, checksum=checksum)
    source = rm.data.ParquetClicks(path=str(path), label="label", sparse={"user": 64}, read_ahead=0)
    next(source.batches(rank=0, world=1))  # a file without checksums is read too
    content = bytearray(path.read_bytes())
    at = content.index((7).to_bytes(8, "little") + (8).to_bytes(8, "little"))
    content[at] ^= 1
    path.write_bytes(content)
    assert file
    again = rm.data.ParquetClicks(path=str(path), label="label", sparse={"user": 64}, read_ahead=0)
    if checksum:
        with pytest.raises(rm.InputError, match="cannot be read as Parquet"):
            next(again.batches(rank=0, world=1))
    else:
        next(again.batches(rank=0, world=1))


def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    told = one_sentence("train", "clicks", "--set", f"data.path={tmp_path}")
    assert "the folder has no *.parquet file" in told
    (tmp_path / "a.parquet").mkdir()
    told = one_sentence("train", "clicks", "--set", f"data.path={tmp_path}")
    assert "a.parquet" in told
