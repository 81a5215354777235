"""The floor on hand-made ids, where every byte can be counted on paper."""

from pathlib import Path

import numpy as np
import pytest
from harness.settings import Settings
from harness.shapes import Shape
from racing.floor import Bytes, count_bytes, dense_parameters, floor
from racing.session import _least

from rowmesh.data.synthetic import SyntheticClicks

DIM = 4  # a vector is 16 bytes
BATCHES = 10


def bags(*ids: int) -> np.ndarray:
    """One id a bag."""
    return np.array(ids, dtype=np.int64).reshape(-1, 1)


def count(steps: list, *, rows: int, hosts: int) -> Bytes:
    """Bytes of one table without dense layers."""
    return count_bytes(
        [[[rank] for rank in step] for step in steps],
        rows=[rows],
        hosts=hosts,
        dim=DIM,
        parameters=0,
    )


def test_a_row_with_another_home_goes_once_each_way_with_its_id() -> None:
    # Host 0 reads 1 (home 1) three times and 2 (home 0); host 1 reads 3 (home 1) alone.
    step = [bags(1, 1, 1, 2), bags(3, 3, 3, 3)]
    assert count([step, step], rows=1000, hosts=2).tables == 4 + 16 + 16


def test_the_ranks_of_a_host_share_what_they_fetch() -> None:
    together = [bags(1, 1), bags(1, 1), bags(3, 3), bags(3, 3)]
    assert count([together, together], rows=1000, hosts=2).tables == 4 + 32
    assert count([together, together], rows=1000, hosts=4).tables == 2 * (4 + 32)


def test_few_bags_of_many_ids_are_pooled_by_the_host_of_the_table() -> None:
    wide = [np.arange(20).reshape(1, 20), np.arange(20, 40).reshape(1, 20)]
    least = count([wide, wide], rows=1000, hosts=2)
    assert least.ways == {"pooled": 1}
    assert least.tables == (2 * 32 + 40 * 4) / 2


def test_a_tiny_table_is_held_whole() -> None:
    step = [bags(*[0, 1] * 50), bags(*[0, 1] * 50)]
    least = count([step, step], rows=2, hosts=2)
    assert least.ways == {"whole": 1}  # rows would send the ids as well
    assert least.tables == 2 * 2 * 16


def test_only_rows_of_both_steps_are_held_up() -> None:
    first, second = [bags(1, 5, 7), bags(1, 1, 1)], [bags(1, 9, 11), bags(3, 3, 3)]
    least = count([first, second], rows=1000, hosts=2)
    assert least.tables == 3 * 36  # 1, 9 and 11 to host 0
    assert least.again == 16 + 16  # the gradient of 1, then the row


def test_bags_are_held_up_by_a_row_of_the_other_step() -> None:
    """The vectors of both bags of the second step, and the gradient of one of the first."""
    first = [np.arange(20).reshape(1, 20), np.arange(20, 40).reshape(1, 20)]
    second = [np.array([[row, *range(start, start + 19)]]) for row, start in ((0, 100), (1, 200))]
    least = count([first, second], rows=1000, hosts=2)
    assert least.ways == {"pooled": 1}
    assert least.again == (2 * 16 + 16) / 2  # half of the bags are of the table's host


def test_rows_held_whole_are_held_up_if_both_steps_read_them() -> None:
    """Rows 1 and 2 of four, to and from two of three hosts."""
    first, second = [bags(*[1, 2] * 20)] * 3, [bags(*[0, 1, 2, 3] * 10)] * 3
    least = count([first, second], rows=4, hosts=3)
    assert least.ways == {"whole": 1}
    assert (least.tables, least.again) == (2 * 4 * 32, 2 * 2 * 32)


def bags_of(clicks: SyntheticClicks, rank: int, step: int) -> list[list[list[int]]]:
    """[table][bag][id] of one batch, in plain lists."""
    features = clicks.batch_at(rank, step).sparse_features
    size = int(clicks.pooling)
    flat = [features[key].values().tolist() for key in features.keys()]  # noqa: SIM118
    return [[ids[i : i + size] for i in range(0, len(ids), size)] for ids in flat]


def ways_by_hand(now: list, before: list, *, rows: int, vector: int) -> list[tuple[int, int]]:
    """Bytes of one table on 2 x 2 and those held up: rows, pooled, whole; from [rank][bag][id]."""
    read, was_read = ({i for rank in s for bag in rank for i in bag} for s in (now, before))
    fetched, was_fetched = (
        [
            {i for rank in step[2 * h : 2 * h + 2] for bag in rank for i in bag if i % 2 != h}
            for h in (0, 1)
        ]
        for step in (now, before)
    )
    held = sum(len(f & was_read) for f in fetched) + sum(len(f & read) for f in was_fetched)
    all_bags, old_bags = ([bag for rank in step for bag in rank] for step in (now, before))
    held_bags = sum(not was_read.isdisjoint(bag) for bag in all_bags)
    held_bags += sum(not read.isdisjoint(bag) for bag in old_bags)
    pooled = 2 * vector * len(all_bags) + 4 * sum(len(bag) for bag in all_bags)
    return [
        ((4 + 2 * vector) * sum(len(f) for f in fetched), vector * held),
        (pooled // 2, vector * held_bags // 2),
        (2 * vector * rows, 2 * vector * len(read & was_read)),
    ]


@pytest.mark.parametrize(("pooling", "alpha"), [(1, 1.05), (5, 1.2)])
def test_the_least_bytes_of_a_shape_are_those_of_its_ids(pooling: int, alpha: float) -> None:
    """Counted in sets over ten batches that go round, the first after the last."""
    setting = Settings(
        rounds=1,
        steps=1,
        trial_steps=1,
        cap=50.0,
        dim=DIM,
        batch=8,
        bottom="8,4",
        top="8,1",
        batches=BATCHES,
        seed=0,
        dense_opt="adagrad",
        default_malloc=False,
        peer="",
        folder=Path(),
    )
    shape = Shape(hosts=2, local=2, rate="1gbit", pooling=pooling, alpha=alpha)
    found = _least(shape, setting)
    clicks = SyntheticClicks(cap=50, alpha=alpha, pooling=pooling, batch_size=8)
    steps = [[bags_of(clicks, rank, step) for rank in range(4)] for step in range(BATCHES)]
    tables, again = 0.0, 0.0
    for table, rows in enumerate(clicks.num_rows):
        ids = [[rank[table] for rank in step] for step in steps]
        ways = [ways_by_hand(ids[i], ids[i - 1], rows=rows, vector=4 * DIM) for i in range(BATCHES)]
        sums = [[sum(way[k][part] for way in ways) for part in (0, 1)] for k in range(3)]
        cheapest = min(sums, key=lambda way: way[0])
        tables, again = tables + cheapest[0] / BATCHES, again + cheapest[1] / BATCHES
    assert (found.tables, found.again) == pytest.approx((tables, again))
    # Layers of 13, 8, 4 and, with the products of 27 vectors in pairs, 4 + 351, 8, 1.
    assert found.dense == 8 * (14 * 8 + 9 * 4 + 356 * 8 + 9 * 1)


def test_one_host_sends_nothing() -> None:
    step = [bags(1, 2), bags(1, 3)]
    least = count_bytes([[[r] for r in step]] * 2, rows=[9], hosts=1, dim=DIM, parameters=100)
    assert (least.tables, least.again, least.dense) == (0, 0, 0)
    found = floor(least, hosts=1, bytes_per_s=None, dense_ms=7.0, fwd=2.0, bwd=3.0)
    assert (found.ms, found.megabytes) == (7.0, 0.0)


def test_dense_gradients_are_summed_once_a_host() -> None:
    step = [bags(0)] * 4
    found = [
        count_bytes([[[r] for r in step]] * 2, rows=[9], hosts=h, dim=DIM, parameters=100).dense
        for h in (2, 4)
    ]
    assert found == [2 * 4 * 100 * 1, 2 * 4 * 100 * 3]


@pytest.mark.parametrize(
    ("rate", "longest"),
    [
        (1e9, 10.0),  # the dense step
        (2e5, 2.0 + 4.0 + 15.0),  # forward, backward, 6,000 bytes a host held up
        (None, 10.0),
    ],
)
def test_the_floor_is_the_longest_bound(rate: float | None, longest: float) -> None:
    least = Bytes(tables=7000.0, dense=200.0, again=6000.0, ways={})
    found = floor(least, hosts=2, bytes_per_s=rate, dense_ms=10.0, fwd=2.0, bwd=4.0)
    assert found.ms == pytest.approx(longest)
    assert found.ms == max(found.link_ms, found.dense_ms, found.path_ms)


def test_dense_bytes_cannot_travel_during_the_forward() -> None:
    least = Bytes(tables=0.0, dense=4e6, again=0.0, ways={})
    found = floor(least, hosts=2, bytes_per_s=1e8, dense_ms=1.0, fwd=5.0, bwd=3.0)
    assert found.link_ms == pytest.approx(20.0)
    assert found.ms == pytest.approx(5.0 + 20.0)


def test_parameters_of_the_benchmark_model() -> None:
    assert dense_parameters([512, 256, 64], [512, 512, 256, 1], features=26, inputs=13) == 762_177
