"""Profiles: counts as a naive count gives them, the same bits by any way, bounded memory, files."""

import functools
import itertools
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rowmesh.data import SyntheticClicks
from rowmesh.errors import InputError, PeerError
from rowmesh.features import Batch, JaggedTensor, KeyedJaggedTensor
from rowmesh.profile import (
    Profile,
    TableCounts,
    profile_batches,
    profile_source,
    remove_partial,
    save_profile,
)
from rowmesh.profile.chunks import ProfileConfig
from rowmesh.profile.collect import _same, _work
from rowmesh.profile.counts import Asked
from rowmesh.profile.figures import cover, extend_growth, find_collisions
from rowmesh.profile.partial import Partial, fingerprint
from rowmesh.profile.sketch import (
    SKETCH_ERROR,
    estimate_distinct,
    merge_hashes,
    smallest_hashes,
)
from rowmesh.profile.tallies import TableTally, bin_names, bin_of
from rowmesh.profile.workers import run_workers
from rowmesh.stats import Stats
from rowmesh.tables import EmbeddingBagConfig, EmbeddingConfig

LAW = settings(derandomize=True, deadline=None, max_examples=40)
ROWS = 12
TABLES = [
    EmbeddingBagConfig(name="ab", num_embeddings=ROWS, embedding_dim=2, feature_names=["a", "b"]),
    EmbeddingConfig(name="c", num_embeddings=10**9, embedding_dim=2, feature_names=["c"]),
]
CLICKS = SyntheticClicks(cardinalities=(60, 900, 3), batch_size=24, num_dense=2, pooling=(1, 3, 2))
Steps = list[list[KeyedJaggedTensor]]
Ids, Sets = list[list[list[int]]], list[list[set[int]]]


def draw_steps(seed: int, *, world: int, steps: int, rows: int = ROWS) -> Steps:
    """Ragged batches, some of them empty, low ids more often."""
    rng = np.random.default_rng(seed)

    def feature(samples: int, most: int) -> JaggedTensor:
        lengths = torch.from_numpy(rng.integers(0, 4, samples))
        ids = (most * rng.random(int(lengths.sum())) ** 3).astype(np.int64)
        return JaggedTensor(torch.from_numpy(ids), lengths=lengths)

    def batch() -> KeyedJaggedTensor:
        n = int(rng.integers(0, 6))
        parts = {"a": feature(n, rows), "b": feature(n, rows), "c": feature(n, 40)}
        return KeyedJaggedTensor.from_dict(parts)

    return [[batch() for _ in range(world)] for _ in range(steps)]


def ids_of(batch: KeyedJaggedTensor, table: Any) -> list[int]:
    return [i for name in table.feature_names for i in batch[name].values().tolist()]


def same_file(profile: Profile, other: Profile, folder: Path) -> bool:
    files = [folder / "one.npz", folder / "other.npz"]
    for file, content in zip(files, (profile, other), strict=True):
        save_profile(content, file)
    return files[0].read_bytes() == files[1].read_bytes()


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 9), st.sampled_from([4, 8, 16]))
@LAW
def test_counts_are_those_of_a_naive_count(seed: int, world: int, steps: int, chunk: int) -> None:
    data = draw_steps(seed, world=world, steps=steps + 1)
    found = profile_batches(data, TABLES, num_steps=steps, chunk_steps=chunk)
    for table in TABLES:
        ids = [[ids_of(batch, table) for batch in step] for step in data]
        sets = [[set(i) for i in step] for step in ids]
        own = found.table(table.name)
        _check_rows(own.counts, ids[:steps], sets[:steps])
        _check_figures(own.figures, ids, sets, steps)
        contained = [sum(row in b for s in sets[:steps] for b in s) for row in own.counts.rows]
        assert own.presence.tolist() == [n / (world * steps) for n in contained]
    total = sum(len(ids_of(b, t)) for s in data[:steps] for b in s for t in TABLES)
    assert found.figures["requests"] == total / (world * steps)
    assert found.batch_size == data[0][0].stride()


def _check_rows(
    counts: TableCounts, ids: list[list[list[int]]], sets: list[list[set[int]]]
) -> None:
    presence, requests, again = (Counter[tuple[int, int]]() for _ in range(3))
    for s, step in enumerate(sets):
        before = set().union(*sets[s - 1]) if s else set()
        for rank, rows in enumerate(step):
            presence.update((row, s % 4) for row in rows)
            requests.update((row, s % 2) for row in ids[s][rank])
            again.update((row, 6) for row in rows & before if s % 4 == 3)
    rows = sorted({row for row, _ in presence})
    assert counts.rows.tolist() == rows
    assert counts.error == counts.requests_error == 0
    expected = [
        [*(presence[r, p] for p in range(4)), requests[r, 0], requests[r, 1], again[r, 6]]
        for r in rows
    ]
    assert counts.numbers.tolist() == expected


def _check_figures(found: dict[str, Any], ids: Ids, sets: Sets, steps: int) -> None:
    further, ids, sets = sets[steps], ids[:steps], sets[:steps]
    batches = [rows for step in sets for rows in step]
    seen = set().union(*batches)
    assert found["seen_rows"] == len(seen)
    assert found["distinct"] == sum(map(len, batches)) / len(batches)
    assert found["unseen_share"] == share(
        sum(len(r - seen) for r in further), sum(map(len, further))
    )
    followed = sum(len(rows) for step in sets[1:] for rows in step)
    pairs = list(itertools.pairwise(sets))
    reused = sum(len(a & b) for one, two in pairs for a, b in zip(one, two, strict=True))
    collided = sum(len(set().union(*one) & b) for one, two in pairs for b in two)
    assert found["reuse_share"] == share(reused, followed)
    assert found["collision_share"] == share(collided, followed)
    repeats = [Counter(i for batch in step for i in batch) for step in ids]
    bins = Counter((n - 1).bit_length() for step in repeats for n in step.values())
    whole = sum(bins.values())
    assert found["repeat_histogram"] == [share(bins[j], whole) for j in range(17)]
    asked = Counter(i for step in ids for batch in step for i in batch)
    hottest = sorted(asked.values(), reverse=True)
    half = sum(hottest[: len(seen) // 2]) / max(1, sum(hottest))
    assert found["coverage"]["seen"][-1] == half
    steady = [r for r in seen if sum(r in b for b in batches) > 0.95 * len(batches)]
    assert found["steady_rows"] == len(steady)
    assert found["steady_share"] == share(len(steady), len(seen))
    assert found["steady_requests_share"] == share(sum(asked[r] for r in steady), sum(hottest))


def test_lengths_of_bags_are_counted_by_powers_of_two() -> None:
    lengths = [0, 1, 2, 3, 4, 5, 8, 9, 0]
    batch = KeyedJaggedTensor(
        ["c"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths), stride=len(lengths)
    )
    found = profile_batches([[batch]], TABLES[1:], num_steps=1).table("c").figures
    assert found["pooling_histogram"][:6] == [2, 1, 1, 2, 2, 1]
    assert (found["pooling_mean"], found["pooling_max"]) == (sum(lengths) / len(lengths), 9)
    assert found["unseen_share"] is found["reuse_share"] is None
    assert bin_of(np.array([1, 2, 3, 4, 5, 2**15, 2**15 + 1, 2**40])).tolist() == [
        *(0, 1, 2, 2, 3, 15, 16, 16)
    ]
    assert len(bin_names()) == 17
    assert bin_names()[:4] == ["1", "2", "3-4", "5-8"]
    assert bin_names()[-2:] == ["16385-32768", ">32768"]


@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(4, 9))
@example(seed=5, steps=14, bound=4)
@LAW
def test_what_is_dropped_is_within_the_error(seed: int, steps: int, bound: int) -> None:
    """And the number of rows is never above the bound, whatever was seen."""
    data = draw_steps(seed, world=2, steps=steps)
    found = profile_batches(data, TABLES, num_steps=steps, rows_kept=bound, chunk_steps=4)
    exact = profile_batches(data, TABLES, num_steps=steps, chunk_steps=4)
    for table, whole in zip(found.tables, exact.tables, strict=True):
        counts, true = table.counts, whole.counts
        assert len(counts.rows) <= bound
        assert counts.error or counts.numbers.tolist() == true.numbers.tolist()
        for name, error in (("presence", counts.error), ("requests", counts.requests_error)):
            mine = dict(zip(counts.rows.tolist(), getattr(counts, name).tolist(), strict=True))
            for row, number in zip(true.rows.tolist(), getattr(true, name).tolist(), strict=True):
                assert 0 <= number - mine.get(row, 0) <= error
        assert table.summary.tally.to_vector().tolist() == whole.summary.tally.to_vector().tolist()
        assert table.summary.seen == len(true.rows)  # the sketch is exact for so few


def test_memory_follows_the_bound_not_the_table() -> None:
    """A table of 1e9 rows, every id new: neither the count nor the file grows with what is seen."""

    def steps(number: int) -> Iterator[list[KeyedJaggedTensor]]:
        rng = np.random.default_rng(1)
        for _ in range(number):
            ids = torch.from_numpy(rng.integers(0, 10**9, 2_000))
            yield [KeyedJaggedTensor(["c"], ids, lengths=torch.ones(2_000, dtype=torch.int32))]

    peaks = []
    for number in (16, 160):
        tracemalloc.start()
        found = profile_batches(steps(number), TABLES[1:], num_steps=number, rows_kept=1_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(found.tables[0].counts.rows) <= 1_000
    assert peaks[1] < 1.2 * peaks[0] < 20e6
    own = found.tables[0]
    assert abs(own.summary.seen / (160 * 2_000) - 1) < 4 * SKETCH_ERROR
    assert own.figures["seen_rows_error"] == SKETCH_ERROR
    assert own.accesses.growth[0] == own.figures["distinct"]


def test_the_sketch_counts_distinct_rows() -> None:
    few, many = np.arange(100), np.arange(50, 300_000)
    assert estimate_distinct(smallest_hashes(few)) == 100
    merged = merge_hashes(smallest_hashes(few), smallest_hashes(many))
    assert merged.tolist() == smallest_hashes(np.arange(300_000)).tolist()
    assert abs(estimate_distinct(merged) / 300_000 - 1) < 4 * SKETCH_ERROR


@given(st.integers(0, 10**6), st.integers(1, 33))
@LAW
def test_statistics_are_those_of_the_same_batches(seed: int, steps: int) -> None:
    data = draw_steps(seed, world=1, steps=steps)
    found = profile_batches(data, TABLES, num_steps=steps).stats()
    expected = Stats.from_batches(TABLES, [step[0] for step in data])
    assert found == expected
    for table in TABLES:
        _assert_same_heat(found, expected, table.name)


def _assert_same_heat(found: Stats, expected: Stats, name: str) -> None:
    ours, theirs = found.tables[name].heat, expected.tables[name].heat
    assert ours is not None
    assert theirs is not None
    for part in ("ids", "scores", "requests", "presence"):
        assert getattr(ours, part).tolist() == getattr(theirs, part).tolist()


def test_statistics_of_many_ranks_are_those_of_their_batches() -> None:
    """Growth goes through a step's ranks first; heat tells even from odd steps."""
    data = draw_steps(3, world=2, steps=16)
    found = profile_batches(data, TABLES, num_steps=16).stats()
    by_step = Stats.from_batches(TABLES, [batch for step in data for batch in step])
    turned = [data[s + odd][rank] for s in range(0, 16, 2) for rank in range(2) for odd in range(2)]
    assert found == by_step
    for table in TABLES:
        _assert_same_heat(found, Stats.from_batches(TABLES, turned), table.name)


def test_growth_goes_on_beyond_the_chunk() -> None:
    assert extend_growth([10.0, 15.0], []) == [10.0, 15.0]
    assert extend_growth([10.0, 15.0], [(2, 15.0), (4, 20.0), (8, 30.0)]) == [10, 15, 20, 30]
    assert extend_growth([10.0], [(3, 30.0)]) == [10.0, pytest.approx(20.0)]
    assert extend_growth([10.0, 15.0], [(4, 12.0)]) == [10.0, 15.0, 15.0]
    assert extend_growth([0.0], [(2, 0.0), (4, 5.0)]) == [0.0, 0.0, 5.0]
    assert extend_growth([0.0], [(4, 5.0)]) == [0.0, 0.0, 5.0]


def test_coverage_counts_whole_rows() -> None:
    assert cover(np.array([1, 6, 3]), [0.9, 1.0, 2.5, 99.0], total=20) == [0.0, 0.3, 0.45, 0.5]
    assert cover(np.array([], dtype=np.int64), [1.0], total=0) == [0.0]


def test_collisions_with_copies_are_of_the_rows_that_are_left() -> None:
    """Row 7 is hot by steps 0 and 1; rows 7 and 8 collide from step 2 to 3, 9 and 10 do not."""

    def step(*rows: int) -> list[Asked]:
        ones = np.ones(len(rows), dtype=np.int64)
        return [Asked(rows=np.array(rows), counts=ones, lengths=ones)]

    steps = [step(7), step(7, 8), step(7, 8), step(7, 8, 9, 10)]
    counts, tally = TableCounts.of_steps(steps), TableTally.of_steps(steps)
    given_sums = {"followed": int(tally.followed[3]), "collided": int(tally.collided[3])}
    found = find_collisions([counts], (0, 1, 2, 3), **given_sums)
    assert found == [(0, 2 / 4), (1, 1 / 3), (2, 0.0)]  # rows 9 and 10 are no candidates
    assert find_collisions([counts], (0,), followed=0, collided=0) == []


def test_copies_of_hot_rows_lower_the_share_that_collides() -> None:
    data = SyntheticClicks(cardinalities=(40_000,), batch_size=512, num_dense=0, labels="coin")
    found = profile_source(data, data.tables(2), world=2, num_steps=24)
    shares = {p["copies"]: p["share"] for p in found.figures["collisions_with_copies"]}
    assert list(shares) == [0, 1_000]  # fewer than 10,000 rows were seen
    assert shares[1_000] < 0.5 * shares[0]
    assert abs(shares[0] - found.figures["collision_share"]) < 0.05


@dataclass(frozen=True)
class Watched:
    """`CLICKS` of one epoch that notes which steps are made; a step of ``broken`` is wrong."""

    steps_per_epoch: int = 40
    num_dense: int = 2
    broken: int = -1
    made: list[int] = field(default_factory=list, repr=False)

    def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        return CLICKS.tables(embedding_dim)

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        return CLICKS.held_out(rank=rank, world=world)

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        for step in itertools.count(start):
            self.made.append(step)
            if step == self.broken:
                raise InputError(f"step {step} is broken")
            yield CLICKS.batch_at(rank, step)


class StoppedError(Exception):
    """As a Ctrl-C would be."""


def test_a_stopped_pass_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    source, partial = Watched(), tmp_path / "out.partial"
    whole = profile_source(source, source.tables(2), world=2)
    assert whole.num_steps == 40
    progress: list[int] = []

    def stop(steps: int) -> None:
        progress.append(steps)
        if len(progress) == 2:
            raise StoppedError

    options: dict[str, Any] = {"world": 2, "partial": partial, "on_progress": stop}
    with pytest.raises(StoppedError):
        profile_source(source, source.tables(2), **options)
    (partial / "chunk-00000000.npz").unlink()  # chunks may come in any order
    source.made.clear()
    found = profile_source(source, source.tables(2), **options)
    assert progress == [16, 32, 32, 40]
    assert set(source.made) == {*range(16), *range(31, 40)}
    assert same_file(whole, found, tmp_path)
    source.made.clear()
    assert same_file(whole, profile_source(source, source.tables(2), **options), tmp_path)
    assert source.made == []
    remove_partial(partial)
    assert not partial.exists()


def test_stretches_in_any_order_come_to_the_same_bits(tmp_path: Path) -> None:
    """What two processes do, done here: the work is pickled, and the later stretch comes first."""
    source, partial = Watched(steps_per_epoch=60), tmp_path / "p"
    options: dict[str, Any] = {"world": 2, "num_steps": 50}
    whole = profile_source(source, source.tables(2), **options)
    config = ProfileConfig(tables=tuple(source.tables(2)), **options)
    kept = Partial(partial, fingerprint(config, source=repr(source)))
    kept.open()
    work = pickle.loads(pickle.dumps(functools.partial(_work, functools.partial(_same, source))))
    for stretch in ([2, 3], [0, 1]):
        assert list(work(config, kept, stretch)) == stretch
    source.made.clear()
    found = profile_source(source, source.tables(2), partial=partial, **options)
    assert set(source.made) == {50}  # the step after the last
    assert same_file(whole, found, tmp_path)


@pytest.mark.nightly
def test_two_processes_come_to_the_same_bits(tmp_path: Path) -> None:
    source = Watched(steps_per_epoch=60)
    whole = profile_source(source, source.tables(2), world=2, num_steps=50)
    progress: list[int] = []
    found = profile_source(
        source,
        source.tables(2),
        world=2,
        num_steps=50,
        processes=2,
        partial=tmp_path / "p",
        on_progress=progress.append,
    )
    assert same_file(whole, found, tmp_path)
    assert sorted(progress) == [16, 32, 48, 50]
    assert set(source.made[100:]) <= {50}  # the others were made elsewhere


@pytest.mark.nightly
def test_a_workers_sentence_arrives(tmp_path: Path) -> None:
    source = Watched(broken=20)
    with pytest.raises(InputError, match=r"^step 20 is broken$"):
        profile_source(source, source.tables(2), processes=2, partial=tmp_path / "p")


def fail(part: int) -> Iterator[int]:
    yield part
    raise ZeroDivisionError("no")


@pytest.mark.nightly
def test_a_failing_worker_ends_all() -> None:
    pieces: list[int] = []
    with pytest.raises(PeerError, match="a worker process failed: ZeroDivisionError: no"):
        run_workers(fail, [3], on_piece=pieces.append)
    assert pieces == [3]


def test_chunks_of_other_settings_are_refused(tmp_path: Path) -> None:
    source, partial = Watched(), tmp_path / "p"
    tables, options = source.tables(2), {"num_steps": 8, "partial": partial}
    profile_source(source, tables, **options)
    for other in ({"num_steps": 9}, {"world": 2}, {"rows_kept": 8}, {"chunk_steps": 4}):
        with pytest.raises(InputError, match="p holds a pass with other settings that was stopped"):
            profile_source(source, tables, **(options | other))
    with pytest.raises(InputError, match=r"other settings .* begin anew with --again"):
        profile_source(Watched(num_dense=3), tables, **options)
    again = profile_source(source, tables, **(options | {"world": 2, "again": True}))
    assert again.world == 2
    (partial / "chunk-00000000.npz").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"is no profile, or is damaged: .*; begin anew with --ag"):
        profile_source(source, tables, **(options | {"world": 2}))
    (partial / "mine.txt").write_text("not of a profile")
    remove_partial(partial)
    assert [p.name for p in partial.iterdir()] == ["mine.txt"]
    with pytest.raises(InputError, match="holds a pass with other settings"):
        profile_source(source, tables, **options)


def test_chunks_do_not_change_what_is_exact() -> None:
    """Growth is of runs inside chunks; every other figure is the same for all sizes of chunk."""
    data = draw_steps(8, world=2, steps=21)
    found = [profile_batches(data, TABLES, num_steps=20, chunk_steps=c) for c in (4, 8, 16)]
    figures = [profile.figures for profile in found]
    for one in figures:
        for own in one["tables"].values():
            own.pop("growth")
    assert figures[0] == figures[1] == figures[2]
    numbers = [[t.counts.numbers.tolist() for t in profile.tables] for profile in found]
    assert numbers[0] == numbers[1] == numbers[2]


def bad(ids: Sequence[int] | torch.Tensor, *, key: str = "c") -> list[KeyedJaggedTensor]:
    values = torch.as_tensor(ids)
    lengths = torch.ones(len(values), dtype=torch.int32)
    return [KeyedJaggedTensor([key], values, lengths=lengths)]


@pytest.mark.parametrize(
    ("steps", "number", "sentence"),
    [
        ([bad([1])], 2, "2 steps were to be counted, but the data ends after 1: ask for fewer"),
        ([], 1, "a profile needs at least one step"),
        ([bad([1])], 0, "batches is 0, but must be at least 1"),
        ([bad([1, 10**9])], 1, "step 0, rank 0: id 1000000000 is outside table 'c'"),
        ([bad([1]), bad([3, -2])], 2, "step 1, rank 0: id -2 is outside table 'c'"),
        ([bad([1.5])], 1, "step 0, rank 0: ids must be whole numbers, but are torch.float32"),
        ([bad([1], key="d")], 1, "unknown feature 'c'"),
        ([bad([1]), bad([1]) * 2], 2, "step 1 has 2 batches, but 1 ranks are profiled"),
    ],
)
def test_bad_batches_are_one_sentence(steps: Steps, number: int, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        profile_batches(steps, TABLES[1:], num_steps=number)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"world": 0}, "ranks is 0, but must be at least 1"),
        ({"rows_kept": 3}, "rows-kept is 3, but must be at least 4"),
        ({"chunk_steps": 6}, "chunk_steps is 6, but must be a multiple of 4"),
        ({"tables": ()}, "number of tables is 0, but must be at least 1"),
    ],
)
def test_bad_settings_are_one_sentence(option: dict[str, Any], sentence: str) -> None:
    given_options: dict[str, Any] = {"tables": tuple(TABLES), "world": 1, "num_steps": 1}
    with pytest.raises(InputError, match=sentence):
        ProfileConfig(**(given_options | option))
    with pytest.raises(InputError, match="processes is 2, which needs a folder"):
        profile_source(CLICKS, CLICKS.tables(2), num_steps=4, processes=2)
