"""Ten thousand steps at depth 3 on four ranks: nothing hangs, and bits are those of depth 1."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, cases, grouped, train_case
from tests.ranks import run_on_ranks
from tests.test_central_property import MODES, NIGHTLY

STEPS = 40


def lengthen(case: Case, steps: int) -> Case:
    """The batches over and over, each time dealt to other ranks."""
    ids = []
    for step in range(steps):
        ranks = case.ids[step % len(case.ids)]
        turn = step // len(case.ids) % case.world
        ids.append([*ranks[turn:], *ranks[:turn]])
    return replace(case, ids=ids, accumulate=1)


def soak(case: Case) -> None:
    deep = replace(lengthen(case, STEPS), depth=3)
    runs = run_on_ranks(4, train_case, deep, hosts=case.hosts)
    flat = run_on_ranks(4, train_case, replace(deep, depth=1), hosts=case.hosts)
    for ours, theirs in zip(runs, flat, strict=True):
        assert all(map(torch.equal, ours.losses, theirs.losses))
    assert all(torch.equal(w, flat[0].weights[name]) for name, w in runs[0].weights.items())


@pytest.mark.nightly
@settings(NIGHTLY, max_examples=125, derandomize=True)
@given(data=st.data())
def test_plans_with_tiers(data: st.DataObject) -> None:
    soak(data.draw(cases(world=4)))


@pytest.mark.nightly
@settings(NIGHTLY, max_examples=125, derandomize=True)
@given(data=st.data())
def test_shard_groups(data: st.DataObject) -> None:
    soak(data.draw(grouped(world=4, mode=data.draw(st.sampled_from(MODES)))))
