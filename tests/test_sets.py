"""Sets of rows on the wire: what goes in comes out, in the fewest words."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.runtime.sets import decode_set, encode_set, set_words

LAW = settings(derandomize=True, deadline=None, max_examples=50)
DTYPES = st.sampled_from([torch.int32, torch.int64])


def check(rows: list[int], size: int, dtype: torch.dtype) -> torch.Tensor:
    """Encode, count the words, decode; the words."""
    given_rows = torch.tensor(rows, dtype=torch.int64)
    words = encode_set(given_rows, size, dtype=dtype)
    expected = 0 if len(rows) == size else min(len(rows), math.ceil(size / 32))
    assert len(words) == set_words(len(rows), size) == expected
    assert words.dtype == dtype
    found = decode_set(words, len(rows), size)
    assert found.dtype == torch.int64
    assert found.tolist() == rows
    assert given_rows.tolist() == rows
    return words


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], int]:
    size = draw(st.integers(0, 200))
    dense = draw(st.booleans())
    chosen = draw(st.sets(st.integers(0, size - 1), max_size=12)) if size else set()
    return [r for r in range(size) if (r in chosen) != dense], size


@LAW
@given(sets(), DTYPES)
def test_round_trip_of_few_and_of_most_rows(
    drawn: tuple[list[int], int], dtype: torch.dtype
) -> None:
    check(*drawn, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 2, 31, 32, 33, 63, 64, 65, 1000])
def test_the_empty_and_the_full_set_take_no_words(size: int, dtype: torch.dtype) -> None:
    assert len(check([], size, dtype)) == 0
    assert len(check(list(range(size)), size, dtype)) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [33, 64, 65, 96, 97])
def test_every_set_with_one_row_left_out(size: int, dtype: torch.dtype) -> None:
    """Bitmaps in which each bit in turn is the one that is missing."""
    for missing in range(size):
        words = check([r for r in range(size) if r != missing], size, dtype)
        assert len(words) == math.ceil(size / 32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bit_31_is_the_sign(dtype: torch.dtype) -> None:
    rows = [0, 31, 32, 63]
    words = check(rows, 64, dtype)
    assert words.tolist() == [1 - 2**31, 1 - 2**31]
    assert check([1, 31, 40], 64, dtype).tolist() == [2 - 2**31, 2**8]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_as_many_rows_as_bitmap_words_are_a_list(dtype: torch.dtype) -> None:
    assert check([5, 63], 64, dtype).tolist() == [5, 63]
    assert check([5], 64, dtype).tolist() == [5]
    assert len(check([5, 6, 63], 64, dtype)) == 2
    assert check([7], 32, dtype).tolist() == [7]


def test_a_list_keeps_rows_beyond_32_bits() -> None:
    rows = torch.tensor([3, 2**33])
    words = encode_set(rows, 2**34, dtype=torch.int64)
    assert decode_set(words, 2, 2**34).tolist() == [3, 2**33]


def test_rows_may_come_as_words() -> None:
    rows = torch.tensor([0, 2, 31], dtype=torch.int32)
    assert decode_set(encode_set(rows, 40, dtype=torch.int32), 3, 40).tolist() == [0, 2, 31]


def test_words_by_hand() -> None:
    assert [set_words(c, 100) for c in (0, 1, 3, 4, 5, 99, 100)] == [0, 1, 3, 4, 4, 4, 0]
    assert set_words(0, 0) == 0
