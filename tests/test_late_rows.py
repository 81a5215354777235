"""What bench_late_rows.py makes of its rounds, without hosts."""

from pathlib import Path
from typing import Any

import bench_late_rows as late_rows
import pytest


def turn_of(number: int, *, ms: float, late: int, exposed: float, mb: float) -> dict[str, Any]:
    """Four steps, the first slow, of two hosts; ten more are traced before the next turn."""
    return {
        "ms": [9 * ms, ms, ms, ms],
        "ahead_rows": {"step": 14 * number, "late": 14 * number * late, "early": 14000 * number},
        "ledger": [4e6 * mb, 4e6 * mb],
        "bytes_are_exact": True,
        "trace": {"communication": [{"exposed_ms": exposed}]},
    }


def result(*, hot_rows: int = 500, late: int = 100, k_ms: float = 100.0) -> dict[str, Any]:
    """k = 0 takes 100 ms; auto has 300 / ``late`` times fewer late rows."""
    plan = {"hot_rows": 0, "host_rows": 0, "hot_share": 0.0, "whole_share": 0.0}
    rounds = [
        {
            "k = 0": turn_of(n, ms=100, late=300, exposed=50, mb=2.0),
            "auto": turn_of(n, ms=90, late=late, exposed=30, mb=2.1),
            "k = 256": turn_of(n, ms=k_ms, late=200, exposed=40, mb=2.0),
        }
        for n in range(6)
    ]
    auto = plan | {"hot_rows": hot_rows, "hot_share": 0.021}
    plans = {"k = 0": plan, "auto": auto, "k = 256": plan | {"hot_rows": 256}}
    return {"shape": "2x1_200mbit_p1_a1.05", "plans": plans, "rounds": rounds}


def test_the_four_figures_have_verdicts() -> None:
    late, exposed, sent, memory = late_rows.judge(result())
    assert (late.holds, late.figure) == (True, "3.00 (300 and 100)")
    assert (exposed.holds, exposed.figure) == (True, "0.60 [0.60, 0.60]")
    assert (sent.holds, sent.figure) == (True, "1.050")
    assert not memory.holds
    assert str(memory).startswith("hot memory at most 2% of the tables: NO, 2.10% on a rank")
    assert not late_rows.judge(result(late=101))[0].holds


def test_no_late_row_is_the_best_case() -> None:
    assert late_rows.judge(result(late=0))[0].holds


@pytest.mark.parametrize(("k_ms", "holds"), [(100.0, True), (98.0, True), (97.0, False)])
def test_a_planner_that_takes_no_hot_rows_must_be_right(k_ms: float, holds: bool) -> None:
    (verdict,) = late_rows.judge(result(hot_rows=0, k_ms=k_ms))
    assert verdict.holds is holds
    assert f"k = 256 {k_ms / 100:.3f}" in verdict.figure


def test_the_page_has_a_line_for_every_plan() -> None:
    page = "\n".join(late_rows.describe(result()))
    assert (
        "| auto | 500 | 0 | 2.10% | 0.00% | 90 [90, 90] | 100 | 1,000 | 30 [30, 30] | 2.10 |"
        in page
    )
    assert "Bytes as predicted in every round: yes." in page


def test_plans_differ_by_their_hot_rows_alone_but_for_the_free_one() -> None:
    entries = late_rows.entries_of([256], Path("2x1.topology"))
    assert [e.name for e in entries] == ["k = 0", "auto", "k = 256"]
    assert [e.flags[-1] for e in entries] == ["off", "auto", "hot:256"]
    assert entries[0].flags[:-1] == entries[2].flags[:-1]
    assert entries[1].flags[:2] == ("--plan", "auto")
    assert all("--depth 2 --counted 16" in " ".join(e.flags) for e in entries)
