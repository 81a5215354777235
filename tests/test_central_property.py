"""The central property: training on 1, 2, 4 ranks equals the oracle; the ledger the formula."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import rowmesh as rm
from rowmesh.placement.rules import EDGES
from rowmesh.runtime.verify import E1_TOLERANCE
from tests.cases import Case, Run, cases, grouped, oracle_case, train_case
from tests.ranks import run_on_ranks

SCALED = "momentum_scaled_rowwise_adagrad"
SPARSE = {"rowwise": "rowwise_adagrad", "scaled": SCALED, "halved": SCALED}
FAILING = Path("failing-plans")
SUITE = settings(
    derandomize=True,
    deadline=None,
    max_examples=24,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
NIGHTLY = settings(SUITE, derandomize=False, max_examples=3000)


def differences(case: Case, runs: list[Run], *, tolerance: float) -> list[str]:
    """Names of everything that is not as the oracle says."""
    expected = oracle_case(case)

    def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
        if tolerance == 0.0:
            return not torch.equal(a, b)
        return not torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)

    found = [
        f"losses of rank {rank}, step {step}"
        for rank, run in enumerate(runs)
        for step, losses in enumerate(run.losses)
        if differ(losses, expected.losses[step][rank])
    ]
    assert runs[0].weights.keys() == expected.weights.keys()
    found += [n for n, w in expected.weights.items() if differ(runs[0].weights[n], w)]
    for table, state in runs[0].states.items():
        found += [
            f"{table}.{name}"
            for name, value in state.items()
            if differ(value, expected.states[table][name])
        ]
    for rank, run in enumerate(runs):
        for i, (ours, first) in enumerate(zip(run.copies, runs[0].copies, strict=True)):
            if not torch.equal(ours, first):
                found.append(f"copies {i} of rank {rank} and rank 0")
        peer = rank % (case.world // case.hosts)
        for i, (ours, theirs) in enumerate(
            zip(run.host_copies, runs[peer].host_copies, strict=True)
        ):
            if not torch.equal(ours, theirs):
                found.append(f"host copies {i} of rank {rank} and rank {peer}")
        for i, (first, ours) in enumerate(run.homes):
            if not torch.equal(ours, runs[first].homes[i][1]):
                found.append(f"home {i} of rank {rank} and its replica {first}")
    return found


def check(case: Case, *, tolerance: float) -> None:
    runs = run_on_ranks(case.world, train_case, case, hosts=case.hosts)
    wrong = differences(case, runs, tolerance=tolerance)
    if wrong:
        FAILING.mkdir(exist_ok=True)
        (FAILING / "last.json").write_text(json.dumps(asdict(case), default=str))
    assert not wrong
    if case.accumulate == 1:
        check_ledgers(case, runs)


def check_ledgers(case: Case, runs: list[Run]) -> None:
    """Bytes of every step are those predicted; tiers that change bring replicas together."""
    paths = {t.collection for t in case.plan().tables}
    earlier: list[Any] = []
    for step, ids in enumerate(case.ids):
        features = [case.batch(step, rank)["features"] for rank in range(len(ids))]
        batches = [dict.fromkeys(paths, f) for f in features]
        plan = case.plan_at(step)
        if case.later and step and len(case.ids) <= case.depth:
            # all was begun before tiers changed, and so in vain
            plan = replace(plan, depth=1)
        predicted = rm.predict(
            plan,
            batches,
            sparse=SPARSE.get(case.rule, case.rule),
            earlier=earlier,
            is_last=step == len(case.ids) - 1,
        )
        assert predicted == [run.ledgers[step] for run in runs]
        assert all(edge in EDGES for ledger in predicted for edge in ledger)
        earlier = [*earlier, batches]
        if len(earlier) == case.sync[1] or (step == 0 and case.later):
            earlier = []


@pytest.mark.parametrize("world", [1, 2, 4])
@SUITE
@given(data=st.data())
def test_exact_plans_equal_the_oracle_bitwise(world: int, data: st.DataObject) -> None:
    case = data.draw(cases(world=world))
    assert case.plan().exactness == "E0"
    check(case, tolerance=0.0)


@pytest.mark.parametrize("place", ["columns", "boxes", "host", "grid"])
@settings(SUITE, max_examples=8)
@given(data=st.data())
def test_every_split_on_two_hosts_equals_the_oracle_bitwise(
    place: str, data: st.DataObject
) -> None:
    check(data.draw(cases(world=4, hosts=2, place=place)), tolerance=0.0)


@pytest.mark.parametrize("world", [2, 4])
@settings(SUITE, max_examples=15)
@given(data=st.data())
def test_row_split_pooled_plans_equal_the_oracle_within_tolerance(
    world: int, data: st.DataObject
) -> None:
    case = data.draw(cases(world=world, exact=False))
    assert case.plan().exactness == "E1"
    check(case, tolerance=E1_TOLERANCE)


MODES = ["gradients", "weights", "moments-first"]


@pytest.mark.parametrize(
    ("world", "mode"), [*((w, mode) for w in (2, 4) for mode in MODES), (3, "weights")]
)
@settings(SUITE, max_examples=10)
@given(data=st.data())
def test_shard_groups_equal_their_oracle_bitwise(
    world: int, mode: str, data: st.DataObject
) -> None:
    check(data.draw(grouped(world=world, mode=mode)), tolerance=0.0)


@SUITE
@given(data=st.data())
def test_merged_requests_equal_the_oracle_bitwise(data: st.DataObject) -> None:
    check(data.draw(cases(world=4, hosts=2, merged=True)), tolerance=0.0)


@pytest.mark.nightly
@NIGHTLY
@given(data=st.data())
def test_many_more_merged_requests(data: st.DataObject) -> None:
    check(data.draw(cases(world=4, hosts=2, merged=True)), tolerance=0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [2, 3, 4])
@settings(NIGHTLY, max_examples=500)
@given(data=st.data())
def test_many_more_shard_groups(world: int, mode: str, data: st.DataObject) -> None:
    check(data.draw(grouped(world=world, mode=mode)), tolerance=0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 4])
@NIGHTLY
@given(data=st.data())
def test_many_more_exact_plans(world: int, data: st.DataObject) -> None:
    check(data.draw(cases(world=world)), tolerance=0.0)
