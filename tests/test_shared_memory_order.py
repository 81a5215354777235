"""Shared memory: which message a receive gets, when some are never waited for, or come late."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rowmesh.comm.exchange import Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.native.segment import describe_segment
from tests.ranks import run_on_ranks
from tests.test_shared_memory import LARGEST, numbers, segment_of

pytestmark = pytest.mark.skipif(
    not describe_segment()[0], reason=f"shared memory: {describe_segment()[1]}"
)


def in_vain(mesh: Mesh, count: int) -> Any:
    """Receives that nobody waits for, more than there are slots; then others of the same tags."""
    segment, peer, found = segment_of(mesh), 1 - mesh.rank, torch.zeros(1, dtype=torch.int64)
    channel = mesh.wire.channel("test", Lane.ROWS)
    for i in range(count):
        sent, ignored = torch.tensor([i]), torch.zeros(1, dtype=torch.int64)
        channel.post(i, sends=[(peer, sent)], receives=[(peer, ignored)], edge=None)
        if i == 100:
            mesh.total(0)  # some are there when so many have been posted that it is looked
    mesh.total(0)
    num_left = segment._num_posted
    for i in range(count):
        channel.post(i, sends=[(peer, torch.tensor([-i]))], receives=[(peer, found)], edge=None)
        channel.post(i, sends=[(peer, torch.tensor([i]))], receives=[(peer, found)], edge=None)
    mesh.total(0)
    got = []
    for i in range(count):
        sends = [(peer, torch.tensor([7 * i]))]
        channel.post(i, sends=sends, receives=[(peer, found)], edge=None).wait()
        got.append(int(found))
    return num_left, got, segment._num_posted


def test_receives_that_nobody_waits_for_take_their_messages_as_with_gloo() -> None:
    for num_left, got, after in run_on_ranks(2, in_vain, 300):
        assert num_left <= 400, "with their headers; many were swept up"
        assert got == [7 * i for i in range(300)]
        assert after == 0


def unfinished(mesh: Mesh, slow: int) -> None:
    """A body that on one rank ends before a communication thread of it has posted.

    As a backward without a step may: the sums of its hot rows are still under way.
    """
    channel, peer = mesh.wire.channel("test", Lane.GRADS), 1 - mesh.rank
    posted, is_slow = threading.Event(), mesh.rank == slow

    def post() -> None:
        time.sleep(0.3 * is_slow)
        sends, found = [(peer, torch.tensor([7]))], torch.zeros(1, dtype=torch.int64)
        handle = channel.post(2, sends=sends, receives=[(peer, found)], edge=None)
        posted.set()
        handle.wait()

    mesh.later("test", post, of=mesh)
    assert is_slow or posted.wait(5)


def swap(mesh: Mesh) -> int:
    """The exchange of the body before, by its channel and number; another message."""
    channel, peer = mesh.wire.channel("test", Lane.GRADS), 1 - mesh.rank
    sends, found = [(peer, torch.tensor([mesh.rank]))], torch.zeros(1, dtype=torch.int64)
    channel.post(2, sends=sends, receives=[(peer, found)], edge=None).wait()
    return int(found)


@pytest.mark.parametrize("slow", [0, 1])
def test_threads_that_outlive_a_body_use_its_shared_memory_to_the_end(slow: int) -> None:
    run_on_ranks(2, unfinished, slow)
    assert run_on_ranks(2, swap) == [1, 0]


def late_receiver(mesh: Mesh, count: int, wait_s: float, folder: str) -> Any:
    """Messages to a rank that receives none until all are posted, or until ``wait_s`` is over.

    Returns:
        On that rank, whether all were posted by then, and what it received.
    """
    channel, found = mesh.wire.channel("test", Lane.ROWS), torch.zeros(1, dtype=torch.int64)
    mark = Path(folder, f"posted-{count}")
    if mesh.rank == 0:
        for i in range(count):
            channel.post(i, sends=[(1, torch.tensor([i]))], receives=(), edge=None)
        mark.touch()
        return None
    deadline = time.monotonic() + wait_s
    while not (posted := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    got = []
    for i in range(count):
        channel.post(i, sends=(), receives=[(0, found)], edge=None).wait()
        got.append(int(found))
    return posted, got


def test_a_sender_waits_only_when_the_peer_left_a_thousand_messages_waiting(tmp_path: Path) -> None:
    for count, wait_s, waits in ((1024, 15.0, False), (1500, 0.5, True)):
        _, (posted, got) = run_on_ranks(2, late_receiver, count, wait_s, str(tmp_path), debug=False)
        assert posted == (not waits)
        assert got == list(range(count))


def small_and_large(mesh: Mesh) -> Any:
    """A message that finds the arena full; before it is waited for, a large one of its tag."""
    channels = [mesh.wire.channel(f"test {i}", Lane.ROWS) for i in range(5)]
    sizes = [LARGEST] * 4 + [1000, LARGEST + 1]
    sent, found = ([numbers(i, n) for i, n in enumerate(sizes)] for _ in range(2))
    before, handles = segment_of(mesh).num_by_gloo, []
    for i, tensor in enumerate(sent if mesh.rank else found):
        if i == 5:
            mesh.total(0)  # the small one is on its way
        parcel, tensor = [(1 - mesh.rank, tensor)], tensor if mesh.rank else tensor.zero_()
        sends, receives = (parcel, []) if mesh.rank else ([], parcel)
        handles.append(channels[min(i, 4)].post(1, sends=sends, receives=receives, edge=None))
    for handle in reversed(handles):
        handle.wait()
    mesh.total(0)
    wrong = [i for i, (a, b) in enumerate(zip(sent, found, strict=True)) if not torch.equal(a, b)]
    return wrong, segment_of(mesh).num_by_gloo - before


def test_a_message_that_found_the_arena_full_is_not_taken_for_one_too_large_for_it() -> None:
    (wrong, _), (_, by_gloo) = run_on_ranks(2, small_and_large, debug=False)
    assert wrong == []
    assert by_gloo >= 1
