"""Ranks of a host divide its cores, in benchmarks."""

import argparse
import os
import threading
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.cores import add_own_cores_flag, bind_to_own_cores, share

ALL = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 64))
def test_shares_are_even(cores: set[int], parts: int) -> None:
    shares = [share(cores, index=i, parts=parts) for i in range(parts)]
    uses = Counter(core for mine in shares for core in mine)
    assert set(uses) == cores
    sizes = [len(mine) for mine in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if parts <= len(cores):
        assert max(uses.values()) == 1
        assert shares == sorted(shares), "neighbours have neighbouring cores"
    else:
        assert max(uses.values()) - min(uses.values()) <= 1


@pytest.mark.parametrize("local_rank", [None, "0"])
def test_without_ranks_of_a_host_there_is_nothing_to_divide(
    local_rank: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monkeypatch.setattr(os, "sched_setaffinity", print, raising=False)
    parser = argparse.ArgumentParser()
    add_own_cores_flag(parser)
    assert not parser.parse_args([]).own_cores
    if local_rank is not None:
        assert parser.parse_args(["--own-cores"]).own_cores
        return
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--own-cores"])
    assert "use torchrun" in capsys.readouterr().err


@pytest.mark.skipif(len(ALL) < 2, reason="needs two cores and a system that can bind")
def test_only_the_thread_that_asks_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = []

    def work() -> None:
        bind_to_own_cores()
        found.append(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert found == [share(ALL, index=1, parts=2)]
    assert sorted(os.sched_getaffinity(0)) == ALL
