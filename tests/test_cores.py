"""The ranks of a machine divide its cores."""

import os
import threading
from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rowmesh.comm.cores import OwnCores, allowed_cores, share
from tests.processes import ROOT, finish, start_ranks

ALL = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_cores = pytest.mark.skipif(len(ALL) < 2, reason="needs two cores and a system that can bind")


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 64))
def test_shares_are_even(cores: set[int], parts: int) -> None:
    shares = [share(cores, index=i, parts=parts) for i in range(parts)]
    uses = Counter(core for mine in shares for core in mine)
    assert set(uses) <= cores
    sizes = [len(mine) for mine in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if parts <= len(cores):
        assert set(uses) == cores
        assert max(uses.values()) == 1
        assert shares == sorted(shares), "neighbours have neighbouring cores"
    else:
        assert set(uses) == cores
        assert max(uses.values()) - min(uses.values()) <= 1


def run_in_thread(index: int, cores: list[frozenset[int]]) -> tuple[set[int], set[int]]:
    """What a thread may run on while it has its own cores, and afterwards."""
    found = []

    def work() -> None:
        own = OwnCores(index, cores)
        found.append(os.sched_getaffinity(0))
        own.release()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0], found[1]


@needs_cores
def test_a_thread_is_bound_and_released() -> None:
    cores = [allowed_cores()] * 2
    bound = [run_in_thread(i, cores) for i in range(2)]
    assert [after for _, after in bound] == [set(ALL)] * 2
    assert bound[0][0] | bound[1][0] == set(ALL)
    assert not bound[0][0] & bound[1][0]


@needs_cores
@pytest.mark.parametrize("other", [frozenset(), frozenset(ALL[:1])])
def test_nothing_is_bound_if_a_rank_does_not_want_it_or_a_launcher_has_bound_it(
    other: frozenset[int],
) -> None:
    assert run_in_thread(0, [allowed_cores(), other]) == (set(ALL), set(ALL))


@needs_cores
def test_nothing_is_bound_if_torch_has_more_threads_than_the_rank_has_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: len(ALL))
    assert run_in_thread(0, [allowed_cores()] * 2) == (set(ALL), set(ALL))


@needs_cores
@pytest.mark.parametrize("switch", ["", "0"])
def test_only_the_computing_thread_of_a_rank_is_bound(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWMESH_OWN_CORES", switch)
    ranks = start_ranks([str(ROOT / "tests/scripts/own_cores.py")], ranks=2)
    for i, rank in enumerate(ranks):
        code, out, err = finish(rank)
        assert code == 0, err
        own = ALL if switch == "0" else share(ALL, index=i, parts=2)
        assert out == f"{own} True {int(switch != '0')} True\n"
