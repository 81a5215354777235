"""`ParquetClicks`: the laws of its order on drawn files, its errors, its thread, real clicks."""

import pickle
import sys
import threading
import tomllib
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.data import ParquetClicks, Source, features_from_columns
from rowmesh.data.streams import Deal, num_streams, streams_of
from rowmesh.errors import InputError
from rowmesh.features import Batch
from rowmesh.tables import EmbeddingBagConfig
from tests.sources import REAL_CLICKS, needs_real_clicks

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'rowmesh[parquet]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow built with Parquet")

LAW = settings(derandomize=True, deadline=None, max_examples=60)
WORLDS = (1, 2, 3, 4)


def write(folder: Path, *files: list[int], name: str = "part", first: int = 0) -> Path:
    """Files of row groups of the given sizes; column ``row`` numbers all rows."""
    folder.mkdir(exist_ok=True)
    for number, groups in enumerate(files):
        tables = []
        for rows in groups:
            ids = np.arange(first, first + rows)
            columns = {"row": ids.astype(np.float64), "label": ids % 3 == 0, "user": ids * 7}
            columns["items"] = pa.array([[i] * (i % 4) for i in ids], pa.list_(pa.int64()))
            tables.append(pa.table(columns))
            first += rows
        with pq.ParquetWriter(folder / f"{name}-{number:02}.parquet", tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
    return folder


def source(path: Path, **options: Any) -> ParquetClicks:
    given = {
        "label": "label",
        "dense": ["row"],
        "sparse": {"user": 1000, "items": 50},
        "transform": "none",
        "batch_size": 12,
        "read_ahead": 0,
    }
    return ParquetClicks(path=str(path), **{**given, **options})


def rows_of(batch: Batch) -> list[int]:
    return batch.dense_features[:, 0].long().tolist()


def assert_same(ours: Batch, theirs: Batch) -> None:
    assert torch.equal(ours.dense_features, theirs.dense_features)
    assert torch.equal(ours.labels, theirs.labels)
    assert ours.sparse_features.keys() == theirs.sparse_features.keys()
    assert torch.equal(ours.sparse_features.values(), theirs.sparse_features.values())
    assert torch.equal(ours.sparse_features.lengths(), theirs.sparse_features.lengths())


def step_rows(data: ParquetClicks, *, world: int, steps: int, start: int = 0) -> list[list[int]]:
    """The rows of each step: those of rank 0, then of rank 1, and so on."""
    ranks = [data.batches(rank=rank, world=world, start=start) for rank in range(world)]
    return [
        [row for batch in batches for row in rows_of(batch)]
        for batches in islice(zip(*ranks, strict=True), steps)
    ]


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    return write(tmp_path / "clicks", [30, 25], [45])


GROUPS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@LAW
@given(GROUPS, st.integers(4, 30), st.integers(4, 9), st.integers(0, 99))
def test_no_overlap_no_loss_and_the_same_steps_for_every_world(
    sizes: list[int], per_stream: int, streams: int, seed: int
) -> None:
    deal = Deal(sizes, streams, per_stream, seed)
    assert deal.num_steps == -(-sum(sizes) // (streams * per_stream))
    read = {}
    for world in WORLDS:
        steps: list[list[tuple[int, int]]] = [[] for _ in range(2 * deal.num_steps)]
        for rank in range(world):
            own = streams_of(streams, rank=rank, world=world)
            queues: dict[int, list[tuple[int, int]]] = {stream: [] for stream in own}
            for part in deal.schedule(own, start=0, end=2 * deal.num_steps):
                order = deal.row_order(part.epoch, part.group)[part.first : part.last]
                queues[part.stream] += [(part.group, int(row)) for row in order]
            for step, rows in enumerate(steps):
                for stream in own:
                    count = deal.rows_at(stream, step)
                    rows += queues[stream][:count]
                    del queues[stream][:count]
            assert not any(queues.values())
        read[world] = steps
    every = {(group, row) for group, size in enumerate(sizes) for row in range(size)}
    for epoch in range(2):
        of_epoch = read[1][epoch * deal.num_steps : (epoch + 1) * deal.num_steps]
        flat = [row for rows in of_epoch for row in rows]
        assert len(flat) == len(every)
        assert set(flat) == every
    assert all(steps == read[1] for steps in read.values())


@LAW
@given(GROUPS, st.integers(1, 30), st.integers(1, 9), st.integers(0, 99), st.data())
def test_a_schedule_from_a_later_step_is_the_end_of_the_whole(
    sizes: list[int], per_stream: int, streams: int, seed: int, data: st.DataObject
) -> None:
    deal = Deal(sizes, streams, per_stream, seed)
    end = 2 * deal.num_steps
    start = data.draw(st.integers(0, end))
    own = range(data.draw(st.integers(0, streams - 1)), streams)

    def rows(stream: int, start: int) -> list[tuple[int, int, int]]:
        parts = (p for p in deal.schedule(own, start=start, end=end) if p.stream == stream)
        return [(p.epoch, p.group, row) for p in parts for row in range(p.first, p.last)]

    for stream in own:
        before = sum(deal.rows_at(stream, step) for step in range(start))
        assert rows(stream, start) == rows(stream, 0)[before:]
    needed = [part.needed for part in deal.schedule(own, start=start, end=end)]
    assert needed == sorted(needed)
    assert not needed or needed[0] >= start


@settings(LAW, max_examples=15)
@given(
    files=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=3), min_size=1, max_size=3),
    batch_size=st.sampled_from([4, 12, 30, 64]),
    read_ahead=st.sampled_from([0, 2]),
)
def test_files_give_every_row_once_and_the_same_steps_for_every_world(
    files: list[list[int]], batch_size: int, read_ahead: int, tmp_path_factory: Any
) -> None:
    total = sum(map(sum, files))
    path = write(tmp_path_factory.mktemp("drawn"), *files)
    data = source(path, batch_size=batch_size, read_ahead=read_ahead)
    if not total:
        with pytest.raises(InputError, match="has no row to train on"):
            _ = data.steps_per_epoch
        return
    steps = data.steps_per_epoch
    assert steps == -(-total // batch_size)
    read = [step_rows(data, world=world, steps=2 * steps) for world in WORLDS]
    assert all(rows == read[0] for rows in read)
    for epoch in range(2):
        flat = [row for rows in read[0][epoch * steps : (epoch + 1) * steps] for row in rows]
        assert sorted(flat) == list(range(total))
    start = steps // 2 + 1
    assert step_rows(data, world=2, steps=steps, start=start) == read[0][start : start + steps]


def test_a_row_keeps_its_label_ids_and_list(two_files: Path) -> None:
    data = source(two_files)
    for batch in islice(data.batches(rank=0, world=1), data.steps_per_epoch):
        rows = rows_of(batch)
        expected = features_from_columns(
            {"user": [row * 7 for row in rows], "items": [[row] * (row % 4) for row in rows]},
            num_rows={"user": 1000, "items": 50},
        )
        assert batch.labels.tolist() == [float(row % 3 == 0) for row in rows]
        assert torch.equal(batch.sparse_features.values(), expected.values())
        assert torch.equal(batch.sparse_features.lengths(), expected.lengths())


@pytest.mark.parametrize("sparse", [{"user": 1000}, {"items": 50}])
def test_columns_that_are_left_out_change_no_other(two_files: Path, sparse: dict[str, int]) -> None:
    whole, part = source(two_files), source(two_files, dense=[], sparse=sparse)
    (name,) = sparse
    both = zip(whole.batches(rank=0, world=1), part.batches(rank=0, world=1), strict=True)
    for full, batch in islice(both, 2 * whole.steps_per_epoch):
        assert batch.dense_features.shape == (len(full.labels), 0)
        assert torch.equal(batch.labels, full.labels)
        assert torch.equal(batch.sparse_features.values(), full.sparse_features[name].values())
        assert torch.equal(batch.sparse_features.lengths(), full.sparse_features[name].lengths())


def test_each_batch_has_memory_of_its_own(two_files: Path) -> None:
    first, second = islice(source(two_files).batches(rank=0, world=1), 2)
    for ours, other in (
        (first.dense_features, second.dense_features),
        (first.labels, second.labels),
        (first.sparse_features.values(), second.sparse_features.values()),
        (first.sparse_features.lengths(), second.sparse_features.lengths()),
    ):
        assert ours.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
        assert ours.numel() == ours.untyped_storage().nbytes() // ours.element_size()


@pytest.mark.parametrize("most", [10, 20_000, 10.5])
def test_logarithms_are_those_of_numpy_for_counts_and_others(tmp_path: Path, most: float) -> None:
    numbers = np.arange(20_000) % most
    columns = {"y": np.zeros(20_000), "x": numbers.astype(np.float32), "u": np.arange(20_000)}
    pq.write_table(pa.table(columns), tmp_path / "one.parquet")
    options = {"path": str(tmp_path), "label": "y", "dense": ["x"], "sparse": {"u": 9}}
    plain, logs = (ParquetClicks(**options, transform=t) for t in ("none", "log1p"))
    both = zip(plain.batches(rank=0, world=1), logs.batches(rank=0, world=1), strict=True)
    for before, after in islice(both, plain.steps_per_epoch):
        expected = np.log1p(before.dense_features.numpy())
        assert np.array_equal(after.dense_features.numpy(), expected)


def test_the_order_follows_seed_and_epoch(two_files: Path) -> None:
    data = source(two_files)
    steps = data.steps_per_epoch
    both = step_rows(data, world=1, steps=2 * steps)
    assert both == step_rows(source(two_files), world=1, steps=2 * steps)
    assert both != step_rows(source(two_files, seed=2), world=1, steps=2 * steps)
    assert both[:steps] != both[steps:]
    first = Counter(row // 10 for row in both[0])
    assert len(first) > 3, "a batch mixes rows from all over the files"


@pytest.mark.parametrize("read_ahead", [0, 1, 5])
@pytest.mark.parametrize("start", [0, 3, 8, 9, 20])
def test_seeking_is_the_same_as_having_come_there(
    two_files: Path, read_ahead: int, start: int
) -> None:
    whole = list(islice(source(two_files).batches(rank=1, world=3), start + 12))
    late = source(two_files, read_ahead=read_ahead).batches(rank=1, world=3, start=start)
    for ours, theirs in zip(islice(late, 12), whole[start:], strict=True):
        assert_same(ours, theirs)
    late.close()  # type: ignore[attr-defined]


def test_what_lies_before_the_start_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks", *[[20]] * 10)
    data = source(path, streams=1)
    steps, start = data.steps_per_epoch, data.steps_per_epoch // 2
    whole = step_rows(data, world=1, steps=steps)
    rest = {row for rows in whole[start:] for row in rows}
    gone = [n for n in range(10) if rest.isdisjoint(range(20 * n, 20 * n + 20))]
    assert len(gone) >= 4
    for number in gone:
        (path / f"part-{number:02}.parquet").unlink()
    assert step_rows(data, world=1, steps=steps - start, start=start) == whole[start:]


def test_a_rank_reads_only_the_row_groups_of_its_streams(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks", *[[20]] * 8)
    data = source(path, batch_size=16, streams=4)
    before = list(islice(data.batches(rank=1, world=4), data.steps_per_epoch))
    needed = {row // 20 for batch in before for row in rows_of(batch)}
    assert len(needed) <= 3
    for number in set(range(8)) - needed:
        (path / f"part-{number:02}.parquet").unlink()
    after = islice(data.batches(rank=1, world=4), data.steps_per_epoch)
    for ours, theirs in zip(after, before, strict=True):
        assert_same(ours, theirs)


def test_ranks_without_rows_get_empty_batches_up_to_the_end(tmp_path: Path) -> None:
    data = source(write(tmp_path / "clicks", [13]), streams=12)
    assert data.steps_per_epoch == 2
    sizes = [
        [len(batch.labels) for batch in islice(data.batches(rank=rank, world=12), 4)]
        for rank in range(12)
    ]
    assert [sum(step) for step in zip(*sizes, strict=True)] == [12, 1, 12, 1]
    empty = list(islice(data.batches(rank=0, world=12), 2))[1]
    assert empty.dense_features.shape == (0, 1)
    assert empty.sparse_features.keys() == ["user", "items"]
    assert empty.sparse_features.stride() == 0


def test_held_out_files_are_the_last_and_never_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks", [20], [20], [7, 8])
    data = source(path, held_out_files=1)
    trained = step_rows(data, world=1, steps=2 * data.steps_per_epoch)
    assert {row for rows in trained for row in rows} == set(range(40))
    for world in WORLDS:
        ranks = [list(data.held_out(rank=rank, world=world)) for rank in range(world)]
        assert {len(batches) for batches in ranks} == {2}
        rows = sorted(row for batches in ranks for batch in batches for row in rows_of(batch))
        assert rows == list(range(40, 55))
    assert list(source(path).held_out(rank=0, world=1)) == []


def test_a_held_out_fraction_is_the_same_for_every_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks", [500, 300], [5] * 100)
    held = []
    for seed in (1, 2):
        data = source(path, held_out_fraction=0.2, seed=seed, batch_size=64)
        out = [row for batch in data.held_out(rank=0, world=1) for row in rows_of(batch)]
        trained = step_rows(data, world=1, steps=data.steps_per_epoch)
        flat = [row for rows in trained for row in rows]
        assert sorted(flat + out) == list(range(1300))
        held.append(out)
    assert held[0] == held[1]
    assert len([row for row in held[0] if row < 800]) == pytest.approx(160, abs=2)
    assert len([row for row in held[0] if row >= 800]) == pytest.approx(100, abs=30)
    assert max(np.diff(sorted(held[0]))) < 60, "spread over each row group"


def test_dense_numbers_are_squashed_and_nulls_are_zero_with_a_flag(tmp_path: Path) -> None:
    table = pa.table(
        {
            "a": pa.array([0, -5, None, 99]),
            "b": pa.array([None, 0.5, 2.0, 1.0], pa.float32()),
            "f": [True, False, None, True],
            "y": [0, 1, 1, 0],
            "u": [1, 2, 3, 4],
        }
    )
    pq.write_table(table, tmp_path / "one.parquet")
    options = {"path": str(tmp_path), "label": "y", "dense": ["a", "b", "f"], "sparse": {"u": 9}}
    data = ParquetClicks(**options, missing_flags=True, held_out_fraction=0.9999)
    (batch,) = data.held_out(rank=0, world=1)
    assert data.num_dense == 6
    log = np.log1p
    shown = batch.dense_features.numpy()
    expected = [
        [0, 0, log(1), 0, 1, 0],
        [0, log(0.5), 0, 0, 0, 0],
        [0, log(2), 0, 1, 0, 1],
        [log(99), log(1), log(1), 0, 0, 0],
    ]
    assert len(shown) in (3, 4)
    for row in shown:
        assert any(np.allclose(row, e) for e in expected)
    plain = ParquetClicks(**options, transform="none")
    batch = next(plain.batches(rank=0, world=1))
    assert plain.num_dense == 3
    assert sorted(batch.dense_features[:, 0].tolist()) == [-5, 0, 0, 99]


def test_strings_and_nulls_in_files_are_hashed_as_columns_are(tmp_path: Path) -> None:
    texts = ["a", None, "b", "a", ""]
    lists = [["x", None], None, [], ["y", "x"], ["z"]]
    table = pa.table({"y": [0, 1, 0, 1, 0], "row": list(range(5)), "t": texts, "l": lists})
    pq.write_table(table, tmp_path / "one.parquet")
    rows = {"t": 1000, "l": 77}
    data = ParquetClicks(
        path=str(tmp_path), label="y", dense=["row"], sparse=rows, transform="none"
    )
    batch = next(data.batches(rank=0, world=1))
    order = rows_of(batch)
    expected = features_from_columns(
        {"t": [texts[i] for i in order], "l": [lists[i] for i in order]}, num_rows=rows
    )
    assert torch.equal(batch.sparse_features.values(), expected.values())
    assert torch.equal(batch.sparse_features.lengths(), expected.lengths())
    only_lists = ParquetClicks(path=str(tmp_path), label="y", sparse={"l": 77})
    batch = next(only_lists.batches(rank=0, world=1))
    assert batch.sparse_features.lengths().sum() == 4
    assert batch.dense_features.shape == (5, 0)


def test_a_source_is_written_in_toml_travels_to_ranks_and_names_its_tables(two_files: Path) -> None:
    text = f"""
        path = "{two_files}/*.parquet"
        label = "label"
        dense = ["row"]
        batch_size = 12
        transform = "none"
        [sparse]
        user = 1000
        items = 50
    """
    data: Source = ParquetClicks(**tomllib.loads(text))
    assert data == source(two_files / "*.parquet", read_ahead=8)
    before = next(data.batches(rank=0, world=1))
    copy = pickle.loads(pickle.dumps(data))
    assert copy == data
    assert hash(copy) == hash(data)
    assert_same(next(copy.batches(rank=0, world=1)), before)
    assert data.tables(8) == [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=rows, embedding_dim=8, feature_names=[name]
        )
        for name, rows in (("user", 1000), ("items", 50))
    ]


def test_a_folder_is_searched_below_and_hidden_names_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "day=1", [5])
    write(tmp_path / "day=2", [5], first=5)
    write(tmp_path / "_temporary", [5], first=10)
    write(tmp_path, [5], name=".hidden", first=15)
    (tmp_path / "notes.txt").write_text("no Parquet")
    assert sorted(step_rows(source(tmp_path), world=1, steps=1)[0]) == list(range(10))
    one = source(tmp_path / "day=2" / "part-00.parquet")
    assert sorted(step_rows(one, world=1, steps=1)[0]) == list(range(5, 10))


def test_the_number_of_streams_divides_the_batch() -> None:
    assert [num_streams(size, 64) for size in (2048, 100, 1, 7, 1009, 96)] == [64, 50, 1, 7, 1, 48]


def spoil(path: Path, *, row_group_size: int = 10, **columns: Any) -> None:
    table = pq.read_table(path)
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    pq.write_table(table, path, row_group_size=row_group_size)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": pa.array(["0"] * 45)}, "column 'label' is string, but a label must be 0 or 1"),
        ({"row": pa.array(["0"] * 45)}, "column 'row' is string, but dense ones are numbers"),
        ({"user": pa.array([0.5] * 45)}, "column 'user' is double, but ids are integers"),
        ({"items": pa.array([1] * 45)}, "column 'items' has single ids, unlike in .*part-00"),
        ({"label": pa.array([0] * 44 + [2])}, "label 'label' is 2 in row 44, but must be 0 or 1"),
        ({"label": pa.array([0.0] * 31 + [None] * 14)}, "label 'label' is null in row 31"),
        ({"label": pa.array([0.0, float("nan")] + [1.0] * 43)}, "label 'label' is nan in row 1,"),
        (
            {"row": pa.array([0.0] * 12 + [float("nan")] + [0.0] * 32)},
            "'row' is nan in row 12, but must be",
        ),
        ({"row": pa.array([None] * 44 + [float("-inf")])}, "'row' is -inf in row 44, but must be"),
    ],
)
def test_wrong_columns_and_values_name_file_column_and_row(
    two_files: Path, columns: dict[str, Any], message: str
) -> None:
    spoil(two_files / "part-01.parquet", **columns)
    for read_ahead in (0, 3):
        data = source(two_files, read_ahead=read_ahead)
        with pytest.raises(InputError, match=f"part-01.parquet: .*{message}"):
            step_rows(data, world=1, steps=data.steps_per_epoch)


def test_errors_come_at_the_step_that_needs_the_file_with_or_without_a_thread(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "clicks", *[[20]] * 10)
    good = step_rows(source(path, streams=2), world=1, steps=17)
    first = {n: [r // 20 == n for rows in good for r in rows].index(True) // 12 for n in range(10)}
    late = max(first, key=lambda number: first[number])
    nans = pa.array([float("nan")] * 20)
    spoil(path / f"part-{late:02}.parquet", row=nans, row_group_size=20)
    steps = []
    for read_ahead in (0, 1, 4):
        done = 0
        with pytest.raises(InputError, match=r"parquet: column 'row' is nan"):  # noqa: PT012
            for _ in source(path, streams=2, read_ahead=read_ahead).batches(rank=0, world=1):
                done += 1
        steps.append(done)
    assert first[late] > 5
    assert steps == [first[late]] * 3


def test_files_that_are_missing_damaged_or_gone(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"nowhere.*no file matches: give a folder, a file or a glob"
    ):
        _ = source(tmp_path / "nowhere*").steps_per_epoch
    with pytest.raises(InputError, match=r"the folder has no \*.parquet file"):
        _ = source(tmp_path).steps_per_epoch
    path = write(tmp_path / "clicks", [30], [20])
    data = source(path, read_ahead=2)
    assert data.steps_per_epoch == 5
    content = (path / "part-01.parquet").read_bytes()
    (path / "part-01.parquet").unlink()
    with pytest.raises(InputError, match=r"part-01.parquet has gone since the files were listed"):
        step_rows(data, world=1, steps=5)
    for damaged in (b"", b"no Parquet at all", content[: len(content) // 2], content[200:]):
        (path / "part-01.parquet").write_bytes(damaged)
        with pytest.raises(InputError, match=r"part-01.parquet has changed since the files"):
            step_rows(data, world=1, steps=5)
        with pytest.raises(InputError, match=r"part-01.parquet cannot be read as Parquet \(.+\): "):
            step_rows(source(path), world=1, steps=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "lable"}, "has no column 'lable': did you mean 'label'"),
        ({"sparse": {"usr": 5}}, "has no column 'usr': did you mean 'user'"),
        ({"held_out_files": 2}, "held_out_files is 2, but .* has 2 files"),
    ],
)
def test_names_and_counts_are_checked_against_the_files(
    two_files: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        source(two_files, **options).batches(rank=0, world=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": "log"}, "unknown transform 'log': did you mean 'log1p'"),
        ({"dense": ["user"]}, "column 'user' is named twice"),
        ({"sparse": {}}, "number of sparse columns is 0, but must be at least 1"),
        ({"sparse": {"user": 0}}, "rows of the table of 'user' is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"held_out_files": -1}, "held_out_files is -1"),
        ({"held_out_fraction": 1.0}, "held_out_fraction is 1.0, but must be from 0 and below 1"),
        ({"held_out_fraction": 0.1, "held_out_files": 1}, "give one of them"),
        ({"seed": 2**32}, "seed is 4294967296, but must be from 0 to 4294967295"),
        ({"streams": 0}, "streams is 0"),
        ({"read_ahead": -1}, "read_ahead is -1"),
    ],
)
def test_arguments_are_checked_before_any_file(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        source(Path("nowhere"), **options)


def test_ranks_and_steps_are_checked_at_once(two_files: Path) -> None:
    data = source(two_files, streams=5)
    with pytest.raises(
        InputError, match=r"6 ranks cannot share the 4 streams .* use at most 4 ranks"
    ):
        data.batches(rank=0, world=6)
    with pytest.raises(InputError, match="rank 2 is not one of a world of 2"):
        data.held_out(rank=2, world=2)
    with pytest.raises(InputError, match="start is -1"):
        data.batches(rank=0, world=1, start=-1)


def readers() -> int:
    return sum(thread.name == "rowmesh-read-ahead" for thread in threading.enumerate())


def test_no_thread_is_left_behind(two_files: Path) -> None:
    data = source(two_files, read_ahead=2, held_out_fraction=0.3)
    unused = data.batches(rank=0, world=1)
    assert readers() == 0, "the thread starts with the first batch"
    del unused
    closed = data.batches(rank=0, world=1)
    next(closed)
    assert readers() == 1
    closed.close()  # type: ignore[attr-defined]
    assert readers() == 0
    dropped = data.batches(rank=0, world=1)
    next(dropped)
    del dropped
    assert readers() == 0
    assert sum(len(batch.labels) for batch in data.held_out(rank=0, world=1)) > 0
    assert readers() == 0, "the last batch ends it"
    (two_files / "part-01.parquet").unlink()
    with pytest.raises(InputError, match="has gone"):
        list(data.batches(rank=0, world=1))
    assert readers() == 0, "an error ends it"


def test_without_pyarrow_the_error_says_what_to_install(
    two_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"pyarrow is needed for .*: pip install 'pyarrow>=16'"):
        _ = source(two_files).steps_per_epoch


@needs_real_clicks
def test_real_clicks_are_read_whole() -> None:
    data = ParquetClicks(
        path=str(REAL_CLICKS),
        label="label",
        dense=[f"i{i}" for i in range(1, 14)],
        sparse={f"c{i}": 10_000 for i in range(1, 27)},
        held_out_files=1,
        missing_flags=True,
    )
    assert data.steps_per_epoch == -(-50_000 // 2048)
    for world in (1, 3):
        samples = clicks = 0
        for rank in range(world):
            for batch in islice(data.batches(rank=rank, world=world), data.steps_per_epoch):
                samples, clicks = samples + len(batch.labels), clicks + int(batch.labels.sum())
                assert batch.dense_features.isfinite().all()
                assert int(batch.sparse_features.values().max()) < 10_000
        assert samples == 50_000
        assert 0.02 < clicks / samples < 0.05
    assert sum(len(batch.labels) for batch in data.held_out(rank=0, world=1)) == 10_000


@pytest.mark.parametrize("read_ahead", [0, 4])
def test_a_rank_that_never_has_a_row_gets_empty_batches(tmp_path: Path, read_ahead: int) -> None:
    data = source(write(tmp_path / "one", [1]), read_ahead=read_ahead)
    counts = [
        [len(batch.labels) for batch in islice(data.batches(rank=rank, world=2), 3)]
        for rank in range(2)
    ]
    assert sorted(counts) == [[0, 0, 0], [1, 1, 1]]
