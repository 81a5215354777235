"""Each sentence of `features_from_columns` and of the hashing behind it."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.data import features_from_columns
from rowmesh.data.hashing import hash_ids, mix, string_keys
from rowmesh.errors import InputError

pa = pytest.importorskip(
    "pyarrow", reason="Arrow columns need pyarrow: pip install rowmesh[parquet]"
)

LAW = settings(derandomize=True, deadline=None, max_examples=60)
NUM_ROWS = 97
IDS = st.integers(-(2**63), 2**63 - 1)
Bags = list[list[Any] | None]


def bags_of(column: Any, **options: Any) -> list[list[int]]:
    features = features_from_columns({"f": column}, **options)
    assert features.values().dtype == torch.int64
    assert features.lengths().dtype == torch.int32
    return [bag.tolist() for bag in features["f"].to_dense()]


def expected(bags: Bags) -> list[list[Any]]:
    return [[i for i in bag or [] if i is not None] for bag in bags]


def row_of(key: int | str) -> int:
    """The documented formula, with Python's integers."""
    mask = 2**64 - 1

    def scramble(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) & mask
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    if isinstance(key, str):
        text = key.encode()
        key = scramble(sum(scramble(256 * p + b) for p, b in enumerate(text)) + len(text) & mask)
    return scramble(key & mask) % NUM_ROWS


@LAW
@given(st.lists(st.none() | st.lists(st.none() | IDS, max_size=4), max_size=8))
def test_lists_of_ids_give_the_same_bags_from_python_and_arrow(bags: Bags) -> None:
    hashed = [[row_of(i) for i in bag] for bag in expected(bags)]
    half = len(bags) // 2
    kind = pa.list_(pa.int64())
    chunks = [pa.array(bags[:half], kind), pa.array(bags[half:], kind)] if bags else []
    for column in (
        bags,
        pa.array(bags, kind),
        pa.array(bags, pa.large_list(pa.int64())),
        pa.array([None, [3], *bags], kind)[2:],
        pa.chunked_array(chunks, kind),
    ):
        assert bags_of(column) == expected(bags)
        assert bags_of(column, num_rows={"f": NUM_ROWS}) == hashed


@LAW
@given(st.lists(st.none() | st.lists(st.none() | st.text(max_size=6), max_size=4), max_size=8))
def test_lists_of_strings_are_hashed_alike_from_python_and_arrow(bags: Bags) -> None:
    hashed = [[row_of(text) for text in bag] for bag in expected(bags)]
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(bags, pa.list_(kind))
        assert bags_of(column, num_rows={"f": NUM_ROWS}) == hashed
    assert bags_of(bags, num_rows={"f": NUM_ROWS}) == hashed


@LAW
@given(st.lists(st.none() | st.text(max_size=6), max_size=8))
def test_strings_are_hashed_alike_whatever_holds_them(texts: list[str | None]) -> None:
    hashed = [[] if text is None else [row_of(text)] for text in texts]
    raw = [None if text is None else text.encode() for text in texts]
    column = pa.array(texts, pa.string())
    for same in (
        texts,
        raw,
        np.fromiter(texts, dtype=object, count=len(texts)),
        column,
        column.cast(pa.large_string()),
        pa.array(texts, pa.string_view()),
        pa.array(raw, pa.binary()),
        column.dictionary_encode(),
        pa.chunked_array([column.dictionary_encode(), column[:0].dictionary_encode()]),
    ):
        assert bags_of(same, num_rows={"f": NUM_ROWS}) == hashed


def test_arrays_and_tensors_of_ids() -> None:
    ids = np.array([5, -7, 2**40])
    wide = np.array([[1, 2], [3, 4]])
    for column in (ids, torch.from_numpy(ids), ids.tolist(), pa.array(ids), list(ids)):
        assert bags_of(column) == [[5], [-7], [2**40]]
        assert bags_of(column, num_rows={"f": NUM_ROWS}) == [[row_of(int(i))] for i in ids]
    for column in (wide, torch.from_numpy(wide), wide.astype(np.uint8), np.asfortranarray(wide)):
        assert bags_of(column) == [[1, 2], [3, 4]]
    assert bags_of(np.array(["a", "bc"]), num_rows={"f": NUM_ROWS}) == [
        [row_of("a")],
        [row_of("bc")],
    ]
    assert bags_of(np.array([2**64 - 1], dtype=np.uint64), num_rows={"f": NUM_ROWS}) == [
        [row_of(2**64 - 1)]
    ]
    assert bags_of([1, None, 3]) == bags_of(pa.array([1, None, 3], pa.int8())) == [[1], [], [3]]
    assert bags_of([None, None]) == bags_of(pa.nulls(2)) == [[], []]
    assert bags_of(pa.array([[1, 2], None], pa.list_(pa.int32(), 2))) == [[1, 2], []]
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([None, 7]))
    assert bags_of(hidden) == [[], [7]]


def test_features_keep_their_order_and_only_named_ones_are_hashed() -> None:
    features = features_from_columns(
        {"user": [3, 4], "items": [[1, 2], None], "word": ["a", "b"]}, num_rows={"word": NUM_ROWS}
    )
    assert features.keys() == ["user", "items", "word"]
    assert features.values().tolist() == [3, 4, 1, 2, row_of("a"), row_of("b")]
    assert features.lengths().tolist() == [1, 1, 2, 0, 1, 1]


def test_tensors_keep_their_device_where_they_are_not_hashed() -> None:
    column = torch.zeros(3, dtype=torch.int32, device="meta")
    assert features_from_columns({"f": column}).values().device.type == "meta"
    with pytest.raises(InputError, match=r"'f' is on meta, but ids are hashed on the CPU"):
        features_from_columns({"f": column}, num_rows={"f": 5})


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.zeros(2), "float64 array, but ids must be integers or strings"),
        (np.zeros((2, 2, 2), dtype=int), r"must be \[B\] or \[B, P\], got \[2, 2, 2\]"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), r"must be \[B\] or \[B, P\], got \[2, 2, 2\]"),
        (torch.zeros(2), "float32, but ids must be"),
        (torch.zeros(2, dtype=torch.bool), "bool, but ids must be"),
        (pa.array([0.5]), "double, but ids must be"),
        (pa.array([[[1]]]), "list<.*, but ids must be"),
        ([0.5, 1], "holds float, int, but ids must be"),
        ([True], "holds bool, but"),
        ([1, "a"], "holds int, str, but"),
        ([[1], 2], "holds int, list, but"),
        ([1, [2]], "holds int, list, but"),
        ("text", "is str, but"),
        ([2**63], r"an id beyond 2\^63 - 1"),
        (np.array([2**63], dtype=np.uint64), r"id 9223372036854775808, but ids end at 2\^63 - 1"),
        (["a"], r"holds strings: hash them into its table with num_rows=\{'f': rows\}"),
    ],
)
def test_other_columns_are_errors_that_name_the_column(column: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"column 'f'.*({message})"):
        features_from_columns({"f": column})


def test_errors_of_names_and_sizes() -> None:
    with pytest.raises(InputError, match="num_rows names 'usr': did you mean 'user'"):
        features_from_columns({"user": [1]}, num_rows={"usr": 5})
    with pytest.raises(InputError, match="num_rows of 'user' is 0"):
        features_from_columns({"user": [1]}, num_rows={"user": 0})
    with pytest.raises(InputError, match="different numbers of samples"):
        features_from_columns({"user": [1], "item": [1, 2]})
    with pytest.raises(InputError, match="at least one feature"):
        features_from_columns({})


@pytest.mark.parametrize("stride", [1, 2, 1000, 2**20, 2**40])
@pytest.mark.parametrize("num_rows", [1000, 1024, 65_536])
def test_sequential_ids_spread_like_random_ones(stride: int, num_rows: int) -> None:
    count = 20 * num_rows
    keys = np.arange(count, dtype=np.uint64) * np.uint64(stride)
    hits = np.bincount(hash_ids(keys, num_rows), minlength=num_rows)
    chi_square = float(((hits - 20) ** 2 / 20).sum())
    assert abs(chi_square - num_rows) < 6 * (2 * num_rows) ** 0.5
    few = hash_ids(keys[:num_rows], num_rows)
    used = num_rows * (1 - np.exp(-1))
    assert abs(len(np.unique(few)) - used) < 6 * num_rows**0.5


def test_strings_that_differ_a_little_have_different_keys() -> None:
    texts = [f"user_{i}" for i in range(20_000)] + ["", "\0", "\0\0", "ab", "ba", "a", "b"]
    offsets = np.cumsum([0, *map(len, texts)])
    data = np.frombuffer("".join(texts).encode(), dtype=np.uint8)
    keys = string_keys(data, offsets)
    assert len(np.unique(keys)) == len(texts)
    assert np.array_equal(string_keys(data, offsets[5:9]), keys[5:8])


def test_mixing_moves_half_the_bits() -> None:
    keys = np.arange(1000, dtype=np.uint64)
    for bit in range(0, 64, 7):
        moved = mix(keys.copy()) ^ mix(keys ^ np.uint64(1 << bit))
        assert abs(np.unpackbits(moved.view(np.uint8)).mean() - 0.5) < 0.02


@pytest.mark.nightly
def test_the_same_rows_in_another_process() -> None:
    call = "features_from_columns({'f': ['a', 'käse', '']}, num_rows={'f': 97}).values().tolist()"
    code = f"from rowmesh.data import features_from_columns; print({call})"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.strip() == str([row_of(t) for t in ("a", "käse", "")])


def test_without_pyarrow_lists_and_arrays_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    column = pa.array([1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert bags_of([[1, 2], None]) == [[1, 2], []]
    with pytest.raises(InputError, match="pip install 'pyarrow>=16'"):
        bags_of(column)
