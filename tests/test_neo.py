"""papers/neo: what the ablation makes of its rounds, and a quick run."""

from pathlib import Path

import pytest

from benchmarks.harness.options import Parser
from benchmarks.harness.shapes import Shape, parse_shapes
from benchmarks.harness.turns import add_turn_flags
from papers.__main__ import main
from papers.neo import run as ablation
from rowmesh.errors import InputError


def shape_of(layout: str) -> Shape:
    return parse_shapes(layout, pooling="1", alpha="1")[0]


@pytest.mark.parametrize(
    ("layout", "merged", "shared"),
    [("2x2@1gbit", 1, 1), ("2x1@1gbit", 0, 0), ("1x2", 0, 1)],
)
def test_what_a_shape_has_no_use_for_is_left_out(layout: str, merged: int, shared: int) -> None:
    lists = ablation.entries_of(shape_of(layout))
    names = [entry.name for entries in lists for entry in entries]
    assert names.count("+ merged in hosts") == merged
    assert names.count("without shared memory") == shared
    assert len(names) == 9 + merged + shared
    assert max(map(len, lists)) <= 7  # what 24 GiB hold of four ranks each


def test_every_setting_differs_from_the_one_before_by_what_its_name_says() -> None:
    lists = ablation.entries_of(shape_of("2x2@1gbit"))
    entries = {entry.name: entry for entries in lists for entry in entries}
    exact = entries["+ a batch begun ahead"]
    rows, dedup, merged = (
        entries[name].flags for name in ("rows by row-wise owners", "+ dedup", "+ merged in hosts")
    )
    assert rows == (*dedup, "--no-dedup")
    assert [a != b for a, b in zip(dedup, merged, strict=True)].count(True) == 1
    assert (merged[-1], exact.flags[-1], merged[:-1]) == ("1", "2", exact.flags[:-1])
    assert entries["+ bf16 on the wire"].flags == (*exact.flags, "--codecs", "bf16")
    without = [entry for entry in entries.values() if entry.env]
    assert lists[1] == [entries["the exact step again"], *without]
    assert [entry.flags for entry in lists[1]] == [exact.flags] * 4
    assert len({entry.env for entry in without}) == 3


def test_a_line_is_compared_with_the_one_it_changes() -> None:
    ms = {
        "whole tables, pooled": 200.0,
        "+ a batch begun ahead": 100.0,
        "+ bf16 on the wire": 80.0,
        "int8 but for dense bf16": 50.0,
        "the exact step again": 120.0,
        "without compiled code": 150.0,
    }
    rounds = [
        {
            name: {
                "ms": [9 * value, value, value],
                "ledger": [3e6, 3e6],
                "bytes_are_exact": True,
                "trace": {"communication": [{"exposed_ms": 7.0}]},
            }
            for name, value in ms.items()
        }
        for _ in range(6)
    ]
    result = {"shape": "2x1", "plans": dict.fromkeys(ms), "rounds": rounds}
    page = "\n".join(ablation.describe(result))
    assert (
        "| int8 but for dense bf16 | 50 [50, 50] | 0.25 [0.25, 0.25] | 0.50 [0.50, 0.50] |" in page
    )
    assert "| + bf16 on the wire | 80 [80, 80] | 0.40 [0.40, 0.40] | 0.80 [0.80, 0.80] |" in page
    assert "| the exact step again | 120 [120, 120] |  |  | 7" in page
    assert "| without compiled code | 150 [150, 150] |  | 1.25 [1.25, 1.25] | 7" in page
    assert "7 [7, 7] | 1.00 |" in page
    assert page.endswith("Bytes as predicted in every round: yes.")


@pytest.mark.parametrize("words", [["--rounds", "4"], ["--steps", "1"], ["--traced", "none"]])
def test_too_few_rounds_or_steps_are_refused(words: list[str]) -> None:
    parser = Parser()
    add_turn_flags(parser, shapes="1x2")
    with pytest.raises(InputError, match="must be a number of at least"):
        parser.parse_args(["--out", "x", *words])


@pytest.mark.nightly
def test_a_quick_ablation_is_stored_and_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["neo", "--quick", "--out", str(tmp_path / "r")]
    main(words)
    page = (tmp_path / "r.md").read_text()
    assert "| + a batch begun ahead |" in page
    assert "Bytes as predicted in every round: yes." in page
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["1x2_p1_a1.05.json"]
    assert "round 5 of 5" in capsys.readouterr().err
    main(words)
    assert (tmp_path / "r.md").read_text() == page
    assert capsys.readouterr().err == ""
