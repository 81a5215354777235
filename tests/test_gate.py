"""What bench_gate.py makes of its rounds, without hosts."""

from pathlib import Path
from typing import Any

import bench_gate as gate
import pytest


def rounds_of(factors: list[float], control: float = 1.0) -> list[dict[str, Any]]:
    """A round for each factor: the first step of every contestant counts nowhere."""

    def steps(ms: float) -> dict[str, Any]:
        trace = {"communication": [{"exposed_ms": 1.0}]}
        return {"ms": [999.0, ms, ms], "ledger": [1.0], "trace": trace}

    times = {"before": 100.0, "before, again": 100.0 * control}
    return [
        {f"exact: {n}": steps(ms) for n, ms in (times | {"now": 100.0 * f}).items()}
        for f in factors
    ]


def test_rounds_go_on_until_both_ratios_are_known_to_two_per_cent() -> None:
    steady = [1.0, 1.01, 1.0, 0.99, 1.0, 1.0]
    assert gate.is_enough(rounds_of(steady))
    assert not gate.is_enough(rounds_of(steady[:5])), "too few"
    assert not gate.is_enough(rounds_of([1.0, 1.05, 0.95, 1.1, 0.9, 1.0]))


@pytest.mark.parametrize(("factor", "slower"), [(1.02, []), (1.04, ["2x1 exact"])])
def test_a_step_three_per_cent_longer_is_named(factor: float, slower: list[str]) -> None:
    rounds = rounds_of([factor] * 6)
    result = {"shape": "2x1", "plans": dict.fromkeys(rounds[0]), "rounds": rounds}
    found: list[str] = []
    page = "\n".join(gate.describe(result, found))
    assert found == slower
    assert f"| exact | 100 | {factor:.3f} [{factor:.3f}, {factor:.3f}] | 1.000 [" in page


def test_the_older_code_runs_its_own_script(tmp_path: Path) -> None:
    before, control, now = gate.entries_of("exact", tmp_path, merges=True, env=())
    assert before.flags == control.flags == now.flags
    assert before.script == control.script == tmp_path / "benchmarks" / "bench_dlrm.py"
    assert now.script == Path(gate.__file__).parent / "bench_dlrm.py"
