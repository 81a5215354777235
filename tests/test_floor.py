"""The floor on hand-made ids, where every byte can be counted on paper."""

import numpy as np
import pytest

from benchmarks.racing.floor import Bytes, count_bytes, dense_parameters, floor

DIM = 4  # a vector is 16 bytes


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
