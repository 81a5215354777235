"""Files of sequences: what is read, what is drawn, and who gets which samples."""

import dataclasses
import itertools
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.comm.mesh import Mesh
from rowmesh.data import ItemSequences
from rowmesh.data.negatives import Negatives
from rowmesh.data.sequence_files import Sequences, read_lines, read_ratings
from rowmesh.errors import InputError
from rowmesh.features import Batch
from rowmesh.runtime.oracle import materialise
from rowmesh.train.config import RunConfig, TrainingConfig
from rowmesh.train.model import ModelConfig, build_model
from rowmesh.train.planning import assume_stats
from rowmesh.train.recipes import config_to_json, load_recipe
from rowmesh.train.trainer import Trainer
from tests.ranks import run_on_ranks

law = settings(max_examples=60, deadline=None, derandomize=True)
LINES = "30 7 5 9 5\n10 5 1\n20 13\n40 1 3 5 7 9 11\n"
RATINGS = """\
2::50::8::300
1::70::7::100
1::50::10::400
2::70::9::200
3::90::1::350
1::90::7::300
2::20::5::500
"""
REAL = Path(os.environ.get("ROWMESH_DATA", Path(__file__).parents[2] / "shared/data"))


@pytest.fixture
def lines(tmp_path: Path) -> str:
    (tmp_path / "lines.txt").write_text(LINES)
    return str(tmp_path / "lines.txt")


@pytest.fixture
def ratings(tmp_path: Path) -> str:
    (tmp_path / "ratings.dat").write_text(RATINGS)
    return str(tmp_path / "ratings.dat")


def rows_of(batch: Batch) -> list[tuple[tuple[int, ...], int, float, int]]:
    """History, candidate, label and group of every sample."""
    features = batch.sparse_features
    assert batch.groups is not None
    return [
        (tuple(history.tolist()), int(candidate), float(label), int(group))
        for history, candidate, label, group in zip(
            features["history"].to_dense(),
            features["candidate"].values(),
            batch.labels,
            batch.groups,
            strict=True,
        )
    ]


def events_of(batches: Any) -> list[tuple[tuple[int, ...], int]]:
    """History and item of the positives."""
    return [(h, c) for batch in batches for h, c, label, _ in rows_of(batch) if label == 1.0]


def test_lines_become_rows_by_ascending_id(lines: str) -> None:
    found = read_lines(lines)
    assert (found.num_users, found.num_items, found.times) == (4, 7, None)
    assert found.offsets.tolist() == [0, 2, 3, 7, 13]  # of users 10, 20, 30, 40
    assert found.items.tolist() == [2, 0, 6, 3, 2, 4, 2, 0, 1, 2, 3, 4, 5]


def test_ratings_are_ordered_by_user_and_time(ratings: str) -> None:
    found = read_ratings(ratings)
    assert found.offsets.tolist() == [0, 3, 6, 7]
    assert found.times is not None
    assert found.times.tolist() == [100, 300, 400, 200, 300, 500, 350]
    assert found.items.tolist() == [2, 3, 1, 2, 1, 0, 3]  # of 20, 50, 70, 90


def test_ratings_of_one_time_keep_the_order_of_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "r"
    file.write_text("1::9::1::5\n1::3::1::5\n\n1::7::1::5\n1::1::1::4\n")
    assert read_ratings(str(file)).items.tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_lines, "1 2 3\n\n2 x 4\n", r"f, line 3: 'x' is no whole number"),
        (read_lines, "1 2 3\n2 1.5\n", r"line 2: '1.5' is no whole number"),
        (read_lines, f"1 {2**70}\n", r"line 1: '1180591620717411303424' is no whole number"),
        (read_lines, "1 2\n7 2\n3 2\n7 5\n", r"user 7 has two lines"),
        (read_lines, "", "has no item"),
        (read_lines, "1\n2\n", "has no item"),
        (read_ratings, "1::2::3\n", r"rating 1 is '1::2::3', but must be user::item::rating::time"),
        (read_ratings, "1::2::3::4\n1::b::3::4\n", r"line 2: 'b' is no whole number"),
        (read_ratings, "\n", "has no item"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, read: Any, text: str, message: str) -> None:
    file = tmp_path / "f"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read(str(file))


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No such file.*--set data.path=FILE"):
        read_lines(str(tmp_path / "nothing"))
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is no text"):
        read_lines(str(tmp_path / "b"))


sequences = st.lists(st.lists(st.integers(0, 8), max_size=12), min_size=1, max_size=5)


def as_sequences(lists: list[list[int]], num_items: int) -> Sequences:
    return Sequences(
        items=np.array([i for one in lists for i in one], dtype=np.int64),
        offsets=np.cumsum([0, *map(len, lists)], dtype=np.int64),
        num_items=num_items,
    )


@law
@given(lists=sequences, seed=st.integers(0, 2**64 - 1))
def test_negatives_are_items_the_user_never_takes(lists: list[list[int]], seed: int) -> None:
    negatives = Negatives(as_sequences(lists, 10))
    users = np.arange(len(lists))
    found = negatives.draw(users, 3 * users, 40, stream=seed)
    for own, drawn in zip(lists, found, strict=True):
        assert not set(own) & set(drawn.tolist())
        assert drawn.min() >= 0
        assert drawn.max() < 10
    one = negatives.draw(users[-1:], 3 * users[-1:], 40, stream=seed)
    assert np.array_equal(one[0], found[-1])  # alone or among others
    assert not np.array_equal(found, negatives.draw(users, 3 * users, 40, stream=seed ^ 1))


def test_negatives_are_uniform() -> None:
    negatives = Negatives(as_sequences([[0, 3, 3, 9], [5]], 10))
    drawn = negatives.draw(np.zeros(1000, np.int64), np.arange(1000), 7, stream=1)
    counts = Counter(drawn.reshape(-1).tolist())
    assert sorted(counts) == [1, 2, 4, 5, 6, 7, 8]
    assert all(abs(n - 1000) < 5 * 1000**0.5 for n in counts.values())  # five standard deviations


def test_a_user_who_knows_all_items_leaves_no_negative() -> None:
    with pytest.raises(InputError, match="place 1 knows all 3 items"):
        Negatives(as_sequences([[0], [2, 0, 1]], 3))


def test_the_last_item_of_a_user_is_held_out(lines: str) -> None:
    data = ItemSequences(path=lines, positives=50, longest=3)
    assert data.num_items == 7
    assert data.steps_per_epoch == 1
    held = events_of(data.held_out(rank=0, world=1))
    assert sorted(held) == [((2,), 0), ((2, 3, 4), 5), ((3, 2, 4), 2)]
    train = events_of([next(data.batches(rank=0, world=1))])
    expected = [((3,), 2), ((3, 2), 4), ((0,), 1), ((0, 1), 2), ((0, 1, 2), 3), ((1, 2, 3), 4)]
    assert sorted(train) == sorted(expected)
    assert data.mean_requests == 1 + np.mean([len(h) for h, _ in train])


def test_leave_out_holds_out_the_item_before_the_last(lines: str) -> None:
    data = ItemSequences(path=lines, positives=50, longest=3, leave_out=1)
    assert sorted(events_of(data.held_out(rank=0, world=1))) == [((1, 2, 3), 4), ((3, 2), 4)]
    train = events_of([next(data.batches(rank=0, world=1))])
    assert sorted(train) == sorted([((3,), 2), ((0,), 1), ((0, 1), 2), ((0, 1, 2), 3)])


def test_held_out_by_time_and_training_in_time_order(ratings: str) -> None:
    data = ItemSequences(
        path=ratings,
        format="ratings",
        hold_out="time",
        held_out_fraction=0.3,
        order="time",
        positives=1,
        negatives=1,
        held_out_negatives=1,
    )
    # by time: 70 (1), 70 (2), 90 (1), 50 (2), 90 (3), 50 (1), 20 (2); the last two are held out
    assert sorted(events_of(data.held_out(rank=0, world=1))) == [((2, 1), 0), ((2, 3), 1)]
    train = events_of(itertools.islice(data.batches(rank=0, world=1), 4))
    assert train == [((2,), 3), ((2,), 1)] * 2


@pytest.mark.parametrize("order", ["shuffled", "time"])
def test_every_world_sees_the_same_samples_in_the_same_order(ratings: str, order: Any) -> None:
    text = "".join(f"{u}::{(u * k * k) % 17}::5::{k}\n" for u in range(1, 9) for k in range(6))
    Path(ratings).write_text(text)
    data = ItemSequences(path=ratings, format="ratings", order=order, positives=7, negatives=2)
    steps = 2 * data.steps_per_epoch + 1

    def samples(world: int, *, held: bool) -> list[Any]:
        ranks = [
            list(data.held_out(rank=r, world=world))
            if held
            else list(itertools.islice(data.batches(rank=r, world=world), steps))
            for r in range(world)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        return [[row for b in step for row in rows_of(b)] for step in zip(*ranks, strict=True)]

    for held in (False, True):
        whole = samples(1, held=held)
        assert all(samples(world, held=held) == whole for world in (2, 3, 16))
    first, second = (
        sorted(row for step in part for row in step if row[2])
        for part in (
            samples(1, held=False)[: data.steps_per_epoch],
            samples(1, held=False)[data.steps_per_epoch : 2 * data.steps_per_epoch],
        )
    )
    assert first == second  # every event once an epoch
    assert len(first) == 8 * 4


def test_the_step_is_the_position_and_epochs_differ(lines: str) -> None:
    data = ItemSequences(path=lines, positives=2)
    batches = [rows_of(b) for b in itertools.islice(data.batches(rank=0, world=1), 9)]
    for start in (1, 3, 4, 7):
        assert rows_of(next(data.batches(rank=0, world=1, start=start))) == batches[start]
    again = pickle.loads(pickle.dumps(data))
    assert rows_of(next(again.batches(rank=0, world=1))) == batches[0]
    other = dataclasses.replace(data, seed=2)
    assert rows_of(next(other.batches(rank=0, world=1))) != batches[0]
    held, same = (list(d.held_out(rank=0, world=1)) for d in (data, other))
    assert [rows_of(b) for b in held] == [rows_of(b) for b in same]  # the same for every seed
    epoch = data.steps_per_epoch
    assert batches[:epoch] != batches[epoch : 2 * epoch]
    negatives = [
        sorted(row for rows in part for row in rows if not row[2])
        for part in (batches[:epoch], batches[epoch : 2 * epoch])
    ]
    assert negatives[0] != negatives[1]


def test_samples_of_an_event_are_a_group_with_negatives_the_user_never_takes(lines: str) -> None:
    data = ItemSequences(path=lines, positives=3, negatives=2, held_out_negatives=5)
    known = {(2,): {2, 0}, (3, 2, 4): {3, 2, 4}, (0, 1, 2, 3, 4): {0, 1, 2, 3, 4, 5}}
    for batch in data.held_out(rank=0, world=1):
        rows = rows_of(batch)
        for _, group in itertools.groupby(rows, key=lambda row: row[3]):
            samples = list(group)
            assert [s[2] for s in samples] == [1.0] + [0.0] * 5
            assert len({s[0] for s in samples}) == 1
            assert not {s[1] for s in samples[1:]} & known[samples[0][0]]
    train = next(data.batches(rank=0, world=1))
    assert train.labels.tolist() == [1.0, 0.0, 0.0] * 3
    assert train.dense_features.shape == (9, 0)


def test_the_first_held_out_batches_are_a_fair_part_of_all(tmp_path: Path) -> None:
    file = tmp_path / "many"
    file.write_text("".join(f"{u} {u} {u + 1} {u + 2}\n" for u in range(400)))
    data = ItemSequences(path=str(file), positives=50, negatives=1, held_out_negatives=9)
    groups = [batch.groups for batch in itertools.islice(data.held_out(rank=0, world=1), 8)]
    chosen = torch.cat([g for g in groups if g is not None]).unique()
    assert len(chosen) == 80  # of 400
    assert abs(float((chosen // 3).double().mean()) - 199.5) < 5 * 400 / 12**0.5 / 80**0.5


def test_users_may_be_a_feature(lines: str) -> None:
    data = ItemSequences(path=lines, with_users=True, positives=50, negatives=1)
    assert [(t.name, t.num_embeddings, t.feature_names) for t in data.tables(4)] == [
        ("item", 7, ["history", "candidate"]),
        ("user", 4, ["user"]),
    ]
    batch = next(data.batches(rank=0, world=1))
    users = batch.sparse_features["user"].values().tolist()
    assert sorted(users) == [2] * 4 + [3] * 8
    model = materialise(build_model(ModelConfig(kind="din", dim=4), data, seed=1))
    assert model(batch).shape == (12,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "csv"}, "unknown format 'csv'"),
        ({"hold_out": "lost"}, "unknown hold_out 'lost': did you mean 'last'"),
        ({"order": "tine"}, "unknown order 'tine': did you mean 'time'"),
        ({"order": "time"}, "order is 'time', but files of format 'lines'"),
        ({"hold_out": "time"}, "hold_out is 'time', but files of format 'lines'"),
        ({"longest": 0}, "longest is 0"),
        ({"positives": 0}, "positives is 0"),
        ({"negatives": 0}, "negatives is 0"),
        ({"held_out_negatives": 0}, "held_out_negatives is 0"),
        ({"held_out_fraction": 1.5}, "held_out_fraction is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"format": "ratings", "hold_out": "time", "leave_out": 1}, "leave_out is 1"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ItemSequences(path="x", **changes)


def test_a_rank_outside_the_world_and_data_without_an_event(lines: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rank 2 is not one of a world of 2"):
        ItemSequences(path=lines).batches(rank=2, world=2)
    with pytest.raises(InputError, match="start is -1"):
        ItemSequences(path=lines).batches(rank=0, world=1, start=-1)
    (tmp_path / "short").write_text("1 5 6\n2 7\n")
    with pytest.raises(InputError, match="no item to train on"):
        _ = ItemSequences(path=str(tmp_path / "short")).steps_per_epoch


@pytest.mark.parametrize("name", ["sequences", "movietweetings", "drift"])
def test_recipes_read_back_equal(name: str, tmp_path: Path) -> None:
    config = load_recipe(name)
    assert config.model.kind == "din"
    (tmp_path / "config.json").write_text(config_to_json(config))
    assert load_recipe(tmp_path / "config.json") == config


def planted_file(path: Path) -> str:
    """Users walk on a ring of 60 items: the next item is one further, as it never is by chance."""
    rng = np.random.default_rng(0)
    text = [
        f"{u} " + " ".join(str((start + k) % 60) for k in range(8))
        for u, start in enumerate(rng.integers(0, 60, 300))
    ]
    path.write_text("\n".join(text))
    return str(path)


def ring_run(path: str, *, steps: int) -> RunConfig:
    base = load_recipe("sequences")
    return dataclasses.replace(
        base,
        data=ItemSequences(path=path, longest=4, positives=64, held_out_negatives=40),
        model=dataclasses.replace(base.model, dim=8),
        optimiser=dataclasses.replace(base.optimiser, sparse_lr=0.02, dense_lr=0.01),
        training=TrainingConfig(steps=steps, eval_batches=2),
    )


def train_ring(mesh: Mesh, path: str, steps: int) -> dict[str, Any]:
    return Trainer(ring_run(path, steps=steps), mesh).run()


def test_a_run_learns_to_rank(tmp_path: Path) -> None:
    path = planted_file(tmp_path / "ring")
    found = train_ring(rm.init_mesh(), path, 100)
    assert found["hr_at_10"] > 0.8  # by chance 10 / 41
    assert found["ndcg_at_10"] <= found["hr_at_10"]


def test_all_ranks_together_rank_the_same_groups(tmp_path: Path) -> None:
    path = planted_file(tmp_path / "ring")
    alone = train_ring(rm.init_mesh(), path, 3)
    ranks = run_on_ranks(2, train_ring, path, 3)
    assert alone["groups"] == 2 * (64 * 5 // 41)
    for found in ranks:
        assert found["groups"] == alone["groups"]
        assert found["count"] == alone["count"] == 41 * alone["groups"]
        assert found["hr_at_10"] == ranks[0]["hr_at_10"] == pytest.approx(alone["hr_at_10"])


def test_assumed_accesses_are_of_the_histories_mean_length(lines: str) -> None:
    data = ItemSequences(path=lines)
    model = build_model(ModelConfig(kind="din", dim=4), data, seed=1)
    assert assume_stats(model, data).tables["item"].requests == pytest.approx(
        2048 * data.mean_requests
    )


@pytest.mark.skipif(not REAL.is_dir(), reason="no data in $ROWMESH_DATA or ../shared/data")
def test_the_real_files_are_as_their_readme_says() -> None:
    beauty = ItemSequences(path=str(REAL / "sequences/Beauty.txt"), positives=512)
    assert beauty.num_items == 12_101
    batch = next(beauty.held_out(rank=0, world=1))
    assert int(batch.labels.sum()) == 512 * 5 // 100
    movies = read_ratings(str(REAL / "movietweetings/ratings.dat"))
    assert (movies.num_users, movies.num_items, len(movies.items)) == (16_554, 10_506, 100_000)
    assert torch.equal(batch.sparse_features["candidate"].lengths(), torch.ones(2500).long())


def command(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, words)
    return found.exit_code, found.output


def test_profile_and_plan_take_sequences(tmp_path: Path) -> None:
    setting = ("--set", f"data.path={planted_file(tmp_path / 'ring')}")
    profile = str(tmp_path / "p.npz")
    count = ("--batches", "4", "--ranks", "2", "--out", profile)
    code, text = command("profile", "sequences", *setting, *count)
    assert (code, "2 ranks, 1280 samples each" in text) == (0, True)
    code, text = command("plan", "sequences", *setting, "--profile", profile, "--tiers", "hot:5")
    assert code == 0
    assert "item" in text


@pytest.mark.parametrize("words", [(), ("tables.json",)])
def test_settings_of_a_plan_are_those_of_a_recipe(words: tuple[str, ...]) -> None:
    code, text = command("plan", *words, "--set", "data.path=x")
    assert (code, "--set data.path=x changes a recipe" in text) == (2, True)
