"""Ranks meet: who is missing is named, what dead ranks left is not taken for theirs."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store

import rowmesh as rm
from rowmesh.comm.joining import meet, open_store, secret_of
from tests.processes import finish, start_ranks

LIMIT_S = 20.0


def try_to(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except rm.RowmeshError as error:
        return f"{type(error).__name__}: {error}"


def met(store: Store, ranks: list[int], *, world: int, timeout_s: float = LIMIT_S) -> list[Any]:
    """What `meet` gives these ranks, each in a thread."""

    def one(rank: int) -> Any:
        return try_to(lambda: meet(store, rank=rank, world=world, hosts=None, timeout_s=timeout_s))

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(one, ranks))


def test_only_who_reads_the_store_knows_the_secret(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    (one, other), later = met(store, [0, 1], world=2), met(store, [0, 1], world=2)
    assert secret_of(one) == secret_of(other) != secret_of(later[0])
    assert len(secret_of(one)) == 64


def is_shared(stores: list[Store]) -> bool:
    """Whether all have one part of the store."""
    stores[0].set("said", "by the first")
    return all(store.check(["said"]) for store in stores)


def test_all_ranks_get_one_part_of_the_store_and_the_next_meeting_gets_another() -> None:
    store = HashStore()
    first = met(store, [2, 1, 0], world=3)
    assert is_shared(first)
    second = met(store, [0, 1, 2], world=3)
    assert not second[0].check(["said"])
    assert is_shared(second)


def test_ranks_of_a_dead_attempt_are_not_met() -> None:
    """torchrun's agents do not even count attempts alike, so no number can tell them apart."""
    store = HashStore()
    sentences = met(store, [0, 1], world=3, timeout_s=0.3)
    assert len(set(sentences)) == 1
    late = threading.Event()

    def rank_2() -> Any:
        late.set()
        return meet(store, rank=2, world=3, hosts=None, timeout_s=LIMIT_S)

    with ThreadPoolExecutor(1) as threads:  # it comes to the dead meeting before rank 0 names one
        early = threads.submit(rank_2)
        late.wait()
        threading.Event().wait(0.2)
        assert not early.done()
        others = met(store, [0, 1], world=3)
        assert is_shared([early.result(), *others])


@pytest.mark.parametrize(
    ("here", "sentence"),
    [
        ([0], "ranks 1, 2, 3 did not join within 0.3 s (rank 0 is there): see what they printed"),
        ([0, 1, 3], "rank 2 did not join within 0.3 s (ranks 0, 1, 3 are there): see what it"),
        ([2], "rank 0 did not join within 0.3 s (rank 2 is there): see what it printed last"),
    ],
)
def test_who_did_not_come_is_named(here: list[int], sentence: str, tmp_path: Path) -> None:
    for store in (HashStore(), FileStore(str(tmp_path / "store"), 4)):
        for said in met(PrefixStore("x", store), here, world=4, timeout_s=0.3):
            assert said.startswith(f"PeerError: {sentence}"), said


def test_many_missing_ranks_are_not_all_named() -> None:
    (said,) = met(HashStore(), [0], world=64, timeout_s=0.1)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 more did not join within 0.1 s" in said


def test_hosts_with_different_numbers_of_ranks_are_named_on_every_rank() -> None:
    shape = [(2, 0, 0), (2, 1, 0), (1, 0, 1)]  # ranks per host, local rank, host: as torchrun says
    script = Path(__file__).parent / "scripts" / "joining.py"
    started = start_ranks(
        [str(script)],
        ranks=3,
        each=[
            {"LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(local), "GROUP_RANK": str(host)}
            for size, local, host in shape
        ],
    )
    for code, out, err in map(finish, started):
        assert (code, err) == (0, "")
        assert out == (
            "InputError: hosts have 2 and 1 ranks, but every host needs as many: start each with "
            "the same --nproc-per-node\n"
        )


def test_hosts_that_ranks_were_told_differently_are_named() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(
                try_to,
                lambda r=rank: meet(store, rank=r, world=2, hosts=r + 1, timeout_s=LIMIT_S),
            )
            for rank in range(2)
        ]
        for one in both:
            assert one.result().startswith(
                "InputError: ranks mean different hosts: hosts=1 on rank 0; hosts=2 on rank 1: "
            )


def test_a_store_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(rm.InputError, match="WORLD_SIZE is set, but RANK, MASTER_ADDR, MASTER_PO"):
        open_store(timeout_s=1)
    for name, value in {"RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    sentence = "rank 1 cannot reach rank 0 at localhost:1, where all ranks meet: "
    with pytest.raises(rm.PeerError, match=re.escape(sentence)):
        open_store(timeout_s=0.5)
