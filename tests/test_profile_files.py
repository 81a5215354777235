"""Profiles as files and pages, `rowmesh profile`, and plans that are made from them."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.data import ParquetClicks, SyntheticClicks
from rowmesh.errors import InputError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.profile import Profile, load_profile, profile_source, render_page, save_profile
from rowmesh.tables import EmbeddingBagConfig
from rowmesh.topology import Topology
from rowmesh.train.config import RunConfig
from rowmesh.train.model import build_model
from rowmesh.train.planning import PlanConfig, check_plan, count_accesses, plan_run
from tests.processes import finish, start
from tests.sources import REAL_CLICKS, needs_real_clicks

CLICKS = SyntheticClicks(cardinalities=(300, 9000), batch_size=64, num_dense=2, labels="coin")
SMALL = ["data.batch_size=64", "data.cardinalities=[300, 9000]", "data.labels=coin"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def small(*more: str) -> list[str]:
    return [word for item in (*SMALL, *more) for word in ("--set", item)]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_source(CLICKS, CLICKS.tables(4), world=2, num_steps=20)


def test_a_file_gives_back_the_profile(tmp_path: Path, profile: Profile) -> None:
    save_profile(profile, tmp_path / "a.npz")
    found = load_profile(tmp_path / "a.npz")
    assert found.figures == profile.figures
    assert found.stats() == profile.stats()
    save_profile(found, tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    with pytest.raises(InputError, match=r"cannot write the profile to .*absent"):
        save_profile(profile, tmp_path / "absent" / "a.npz")


def rewritten(path: Path, **changes: Any) -> Path:
    """The file with arrays or fields of the header changed."""
    with np.load(path) as arrays:
        content = dict(arrays)
    header = json.loads(content["header"].tobytes())
    for name, value in changes.items():
        if name in content:
            content[name] = value
        else:
            header[name] = value
    content["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with path.open("wb") as file:
        np.savez(file, **content)
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2}, "version 2 is not 1: make it anew with rowmesh profile"),
        ({"worlds": 2}, "header: unknown field 'worlds': did you mean 'world'?"),
        ({"num_steps": "x"}, "header.num_steps must be int, got 'x'"),
        ({"num_steps": 0}, "its header does not fit its counts"),
        ({"tables": []}, "its header does not fit its counts"),
        ({"errors": [[0, 0]]}, "its header does not fit its counts"),
        ({"errors": [[0, -1], [0, 0]]}, "a count of table 0 is negative"),
        ({"errors": 3}, "is no profile, or is damaged"),
        ({"rows_0": np.arange(5)}, "table 0 has counts of shape"),
        ({"rows_0": np.arange(3.0)}, "counts are float64, not whole numbers"),
        ({"tally_1": np.arange(5)}, "sums of a table are"),
        ({"hashes_1": np.arange(5)}, "the hashes of table 1 are int64"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    tmp_path: Path, profile: Profile, changes: dict[str, Any], sentence: str
) -> None:
    save_profile(profile, tmp_path / "p.npz")
    with pytest.raises(InputError) as error:
        load_profile(rewritten(tmp_path / "p.npz", **changes))
    assert str(error.value).startswith(str(tmp_path / "p.npz"))
    assert sentence in str(error.value)


def test_rows_of_a_file_ascend_and_lie_in_their_table(tmp_path: Path, profile: Profile) -> None:
    rows = profile.tables[0].counts.rows
    for wrong, sentence in (
        (rows[::-1], "the rows of table 0 do not ascend from 0"),
        (rows - 1 - rows[0], "the rows of table 0 do not ascend from 0"),
        (rows + 300, "its header does not fit its counts"),
    ):
        save_profile(profile, tmp_path / "p.npz")
        with pytest.raises(InputError, match=sentence):
            load_profile(rewritten(tmp_path / "p.npz", rows_0=wrong))


def test_damage_is_noticed(tmp_path: Path, profile: Profile) -> None:
    file = tmp_path / "p.npz"
    save_profile(profile, file)
    whole = file.read_bytes()
    place = whole.index(profile.tables[1].counts.rows[:64].astype(np.uint16).tobytes())
    flipped = bytearray(whole)
    flipped[place] ^= 1
    for content in (b"", b"{}", whole[: len(whole) // 2], bytes(flipped)):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"p\.npz is no profile, or is damaged: "):
            load_profile(file)
    with pytest.raises(InputError, match=r"cannot read .*: No such file or directory"):
        load_profile(tmp_path / "absent.npz")


def test_statistics_are_for_the_same_tables_and_batch_size(profile: Profile) -> None:
    tables = CLICKS.tables(4)
    assert profile.stats(tables[1:], batch_size=64).tables.keys() == {"t_cat_1"}
    with pytest.raises(InputError, match="the profile is of 64 samples a rank and batch, but this"):
        profile.stats(tables, batch_size=128)
    with pytest.raises(InputError, match="no table 't_cat_2': did you mean 't_cat_"):
        profile.stats([replace(tables[0], name="t_cat_2")])
    with pytest.raises(InputError, match="'t_cat_0' has 7 rows, but the profile is of 300"):
        profile.stats([replace(tables[0], num_embeddings=7)])


def test_the_page_needs_nothing_else(profile: Profile) -> None:
    page = render_page(profile)
    assert not re.search(r"https?:|src=|href=|@import|url\(|<script|<link", page)
    assert page.count("<polyline") == 3  # two tables and all together
    assert "prefers-color-scheme: dark" in page
    covered = profile.figures["tables"]["t_cat_1"]["coverage"]["all"]
    for share in covered:
        assert f"<td>{100 * share:.1f} %</td>" in page
    points = re.findall(r'<polyline points="([^"]*)"', page)
    for line in points:
        x, y = np.array([p.split(",") for p in line.split()], dtype=float).T
        assert (np.diff(x) > 0).all()
        assert (np.diff(y) <= 0).all()  # downwards on the screen is less
        assert abs(y[-1] - 16.0) < 0.1  # all rows take all requests


def test_names_are_escaped_on_the_page() -> None:
    table = EmbeddingBagConfig(name="<b>", num_embeddings=1, embedding_dim=1, feature_names=["c"])
    batch = KeyedJaggedTensor(["c"], torch.tensor([0, 0]), lengths=torch.tensor([1, 1]))
    page = render_page(rm.profile.profile_batches([[batch]], [table], num_steps=1))
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_the_command_writes_and_prints(tmp_path: Path) -> None:
    out, page = tmp_path / "p.npz", tmp_path / "p.html"
    options = ("profile", *small(), "--batches", 20, "--ranks", 2, "--out", out)
    shown = run(*options, "--html", page)
    assert shown.exit_code == 0, shown.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.html", "p.npz"]
    assert page.read_text() == render_page(load_profile(out))
    assert max(map(len, shown.stdout.splitlines())) <= 100
    assert shown.stdout.startswith("20 steps of 2 ranks, 64 samples each\n")
    assert f"written to {page}" in shown.stdout.replace("\n", " ")
    lines = {line.split()[0]: line for line in shown.stdout.splitlines() if line}
    figures = load_profile(out).figures
    for name, own in figures["tables"].items():
        assert f"{100 * own['reuse_share']:.1f} %" in lines[name]
    before = out.read_bytes()
    printed = run(*options, "--json")
    assert json.loads(printed.stdout) == json.loads(json.dumps(figures))
    assert out.read_bytes() == before


def test_a_wide_profile_fits_the_terminal(tmp_path: Path) -> None:
    """26 tables of up to 1e7 rows, some too large to be counted whole."""
    more = ("--set", "data.batch_size=256", "--set", "data.cap=60000", "--set", "data.labels=coin")
    shown = run("profile", *more, "--batches", 5, "--rows-kept", 500, "--out", tmp_path / "p.npz")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("t_cat_") for line in lines) == 26
    assert "~: the hottest 500 rows were counted; others are in at most" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batches", 0], "batches is 0, but must be at least 1"),
        (["--ranks", 0], "ranks is 0, but must be at least 1"),
        (["--processes", 0], "processes is 0, but must be at least 1"),
        (["--rows-kept", 1], "rows-kept is 1, but must be at least 4"),
        (["--out", "no/such/p.npz"], "cannot write the profile to no/such/p.npz: "),
        (["--html", "no/such/p.html"], "cannot write the profile to no/such/p.html: "),
        (["nothing.toml"], "no recipe 'nothing.toml', neither a file nor a name"),
    ],
)
def test_bad_options_are_one_sentence(
    arguments: list[object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("profile", *arguments, *([] if arguments[0] == "nothing.toml" else small()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rowmesh: {sentence}")
    assert result.stderr.count("\n") == 1


def test_a_stopped_pass_is_gone_on_with_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "p.npz", tmp_path / "whole.npz"
    options = ("profile", *small(), "--batches", 40)
    assert run(*options, "--out", whole).exit_code == 0
    made: list[int] = []
    draw = SyntheticClicks.batch_at

    def batch_at(self: SyntheticClicks, rank: int, step: int) -> Any:
        made.append(step)
        if len(made) == 20:
            raise KeyboardInterrupt
        return draw(self, rank, step)

    monkeypatch.setattr(SyntheticClicks, "batch_at", batch_at)
    stopped = run(*options, "--out", out)
    assert stopped.exit_code == 130
    assert stopped.stderr == "rowmesh: stopped by SIGINT; the same command goes on from here\n"
    assert (tmp_path / "p.npz.partial" / "chunk-00000000.npz").exists()
    refused = run(*options[:-1], 41, "--out", out)
    assert refused.exit_code == 2
    assert "p.npz.partial holds a pass with other settings that was stopped" in refused.stderr
    made.clear()
    made += range(100)
    assert run(*options, "--out", out).exit_code == 0
    assert made[100:] == list(range(15, 41))
    assert out.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "p.npz.partial").exists()
    (tmp_path / "p.npz.partial").mkdir()
    (tmp_path / "p.npz.partial" / "settings.sha256").write_text("another")
    assert run(*options, "--out", out).exit_code == 2
    assert run(*options, "--out", out, "--again").exit_code == 0


@pytest.mark.nightly
def test_a_signal_stops_processes_and_the_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "p.npz"
    options = [*small("data.cardinalities=[300, 9000, 200000]"), "--batches", "2500"]
    process = start("profile", *options, "--processes", "2", "--out", str(out))
    partial = tmp_path / "p.npz.partial"
    deadline = time.monotonic() + 60.0
    while not list(partial.glob("chunk-*.npz")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()  # of its workers none may stay: they hold its stdout
    code, _, err = finish(process)
    assert (code, err.splitlines()[-1]) == (
        130,
        "rowmesh: stopped by SIGTERM; the same command goes on from here",
    )
    code, _, err = finish(start("profile", *options, "--processes", "2", "--out", str(out)))
    assert code == 0, err
    assert run("profile", *options, "--out", tmp_path / "whole.npz").exit_code == 0
    assert out.read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_an_epoch_of_files_is_counted_whole(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'rowmesh[parquet]'")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow built with Parquet")
    ids = np.arange(500) % 40
    pq.write_table(pa.table({"label": ids % 2 == 0, "user": ids}), tmp_path / "a.parquet")
    data = ParquetClicks(
        path=str(tmp_path), label="label", sparse={"user": 1000}, batch_size=24, streams=4
    )
    found = profile_source(data, data.tables(2), world=2, partial=tmp_path / "p")
    assert found.num_steps == data.steps_per_epoch == 21
    own = found.table("t_user")
    assert own.figures["seen_rows"] <= 40
    assert own.counts.requests.sum() == found.num_samples == 500
    assert own.figures["unseen_share"] is None
    assert found.batch_size == 12


@needs_real_clicks
def test_real_clicks_are_profiled(tmp_path: Path) -> None:
    out = tmp_path / "p.npz"
    shown = run(
        *("profile", "clicks", "--set", f"data.path={REAL_CLICKS}", "--set", "data.read_ahead=0"),
        *("--batches", 8, "--out", out),
    )
    assert shown.exit_code == 0, shown.output
    found = load_profile(out)
    assert len(found.tables) == 26
    assert found.batch_size == 256
    assert 0.3 < found.figures["coverage"]["seen"][4] < 1.0  # the hottest 10 %
    assert 0.0 < found.figures["unseen_share"] < 0.5


def saved(profile: Profile, folder: Path) -> str:
    save_profile(profile, folder / "profile.npz")
    return str(folder / "profile.npz")


def test_a_run_plans_by_its_profile(tmp_path: Path, profile: Profile) -> None:
    file, topology = saved(profile, tmp_path), Topology(local=2)
    config = RunConfig(data=CLICKS, plan=PlanConfig(profile=file, tiers="hot:50", batches=0))
    model = build_model(config.model, CLICKS, seed=1)
    check_plan(config.plan, model, topology)
    stats = count_accesses(config.plan, model, CLICKS, topology)
    assert stats == profile.stats()
    plan = plan_run(config.plan, model, CLICKS, topology)
    hot = {t.name: rows.ids.tolist() for t in plan.tables for _, rows in t.hot}
    assert sum(map(len, hot.values())) == 50
    for name, ids in hot.items():
        heat = stats.tables[name].heat
        assert heat is not None
        assert ids == sorted(heat.ids[: len(ids)].tolist())
    larger = replace(CLICKS, batch_size=65)
    with pytest.raises(InputError, match=r"npz: the profile is of 64 samples .* is for 65:"):
        count_accesses(config.plan, model, larger, topology)
    other = build_model(config.model, replace(CLICKS, cardinalities=(300, 8000)), seed=1)
    with pytest.raises(InputError, match="'t_cat_1' has 8000 rows, but the profile is of 9000"):
        check_plan(config.plan, other, topology)
    with pytest.raises(InputError, match=r"which needs plan\.batches above 0, or a plan\.profile"):
        PlanConfig(tiers="auto", batches=0)


def test_the_plan_command_takes_tiers_and_a_profile(tmp_path: Path, profile: Profile) -> None:
    file, recipe = saved(profile, tmp_path), tmp_path / "r.toml"
    recipe.write_text(
        '[data]\nkind = "synthetic"\ncardinalities = [300, 9000]\nbatch_size = 64\n'
        'num_dense = 2\nlabels = "coin"\n'
    )
    tables = {
        "tables": [
            {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": 16,
                "feature_names": t.feature_names,
            }
            for t in CLICKS.tables(16)
        ]
    }
    (tmp_path / "t.json").write_text(json.dumps(tables))
    out = tmp_path / "plan.json"
    hot = ("--tiers", "hot:30", "--memory-per-rank", "none", "--out", out)
    for arguments in (
        (recipe, "--profile", file),
        (recipe,),  # counts batches of its data
        (tmp_path / "t.json", "--profile", file, "--batch", 64),
    ):
        shown = run("plan", *arguments, *hot)
        assert shown.exit_code == 0, shown.output
        plan = rm.load_plan(out)
        assert sum(rows.count for t in plan.tables for _, rows in t.hot) == 30
    assert run("plan", recipe, "--tiers", "auto").exit_code == 0
    for arguments, sentence in (
        ((recipe, "--tiers", "on"), "tiers 'on': say auto, off, or hot:K"),
        ((tmp_path / "t.json", "--tiers", "auto"), "needs counted accesses: give --profile, or"),
        ((tmp_path / "t.json", "--profile", file), "the profile is of 64 samples a rank and batch"),
        ((recipe, "--profile", "absent.npz"), "cannot read absent.npz: No such file"),
    ):
        refused = run("plan", *arguments)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert sentence in refused.stderr
