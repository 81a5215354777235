"""Mesh, lanes, exchanges and ledger on real ranks: every sentence of their docstrings."""

import os
import threading
from typing import Any

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.exchange import Lane
from rowmesh.comm.ledger import Ledger
from rowmesh.comm.mesh import Mesh
from rowmesh.topology import Topology
from tests.ranks import run_on_ranks


def sums(mesh: Mesh) -> Any:
    share = mesh.mean(torch.full((mesh.rank,), 2.0, requires_grad=True))
    noise = torch.tensor([1e8, 1.0, -1e8])[mesh.rank % 3]
    return (
        float(share),
        share.grad_fn is not None,
        mesh.total(noise).item(),
        mesh.total(torch.tensor([[mesh.rank, 1]])).tolist(),
        mesh.gather_objects({"rank": mesh.rank, "text": "x" * mesh.rank}),
    )


def test_mean_is_a_share_of_the_global_mean_and_total_adds_in_rank_order() -> None:
    found = run_on_ranks(4, sums)
    # ranks 0..3 bring 0, 1, 2, 3 samples of loss 2.0
    assert [round(f[0], 6) for f in found] == [0.0, 0.333333, 0.666667, 1.0]
    assert all(f[1] for f in found), "a rank without samples still has a gradient function"
    in_rank_order = ((torch.tensor(1e8) + 1.0) - 1e8 + 1e8).item()
    assert {f[2] for f in found} == {in_rank_order}
    assert {str(f[3]) for f in found} == {"[[6, 4]]"}
    objects = [{"rank": r, "text": "x" * r} for r in range(4)]
    assert all(f[4] == objects for f in found)


def test_mean_of_one_process_needs_no_group() -> None:
    mesh = rm.init_mesh()
    assert (mesh.world, mesh.rank) == (1, 0)
    assert float(mesh.mean(torch.tensor([1.0, 3.0]))) == 2.0
    assert float(mesh.mean(torch.tensor([1.0, 3.0]), count=8)) == 0.5
    with pytest.raises(rm.InputError, match="one loss per sample, got shape"):
        mesh.mean(torch.zeros(2, 2))
    mesh.close()


def crossing(mesh: Mesh) -> Any:
    """Two exchanges under way at once, posted in opposite order on the two ranks."""
    peer = 1 - mesh.rank
    channels = [mesh.wire.channel(name, Lane.ROWS) for name in "ab"]
    received = [torch.zeros(2), torch.zeros(2)]
    handles = []
    for i in (0, 1) if mesh.rank == 0 else (1, 0):
        sent = torch.full((2,), 10.0 * mesh.rank + i)
        handles.append(
            channels[i].post(7, sends=[(peer, sent)], receives=[(peer, received[i])], edge="rows")
        )
    for handle in handles:
        handle.wait()
    return [r.tolist() for r in received], mesh.ledger.by_edge(), mesh.ledger.num_messages()


@pytest.mark.parametrize("debug", [False, True])
def test_exchanges_match_by_tag_and_headers_are_not_counted(debug: bool) -> None:
    found = run_on_ranks(2, crossing, hosts=2, debug=debug)
    assert [f[0] for f in found] == [[[10, 10], [11, 11]], [[0, 0], [1, 1]]]
    assert all(f[1] == {"rows": {"cross": 16}} and f[2] == 2 for f in found)


def short_message(mesh: Mesh) -> str:
    """Rank 1 sends two numbers where rank 0 expects four."""
    channel = mesh.wire.channel("test", Lane.ROWS)
    if mesh.rank == 1:
        channel.post(1, sends=[(0, torch.ones(2))], receives=(), edge="rows").wait()
        return ""
    try:
        channel.post(1, sends=(), receives=[(1, torch.zeros(4))], edge="rows").wait()
    except rm.PeerError as error:
        return str(error)
    return "no error"


def test_a_short_message_is_noticed_in_debug_mode() -> None:
    by_gloo = run_on_ranks(2, short_message, debug=False, shared_memory=False)
    assert by_gloo[0] == "no error"  # why headers exist
    message = run_on_ranks(2, short_message, debug=True)[0]
    assert "exchange 'test', step 1: rank 1 sent" in message
    assert "[1, 3, 0, 2], but [1, 3, 0, 4] was expected" in message


def later_in_order(mesh: Mesh) -> Any:
    seen: list[int] = []
    futures = [mesh.later("test", lambda i=i: seen.append(i), of=mesh) for i in range(20)]
    for future in futures:
        future.result()
    return seen, threading.active_count()


def test_a_communication_thread_keeps_order() -> None:
    assert run_on_ranks(2, later_in_order)[0][0] == list(range(20))


def lengths_of_batches(mesh: Mesh, sizes: list[int]) -> list[int]:
    loader = [torch.ones(3) for _ in range(sizes[mesh.rank])]
    return [len(batch) for batch in mesh.batches(loader, empty=torch.ones(0))]


@pytest.mark.parametrize("sizes", [[3, 3], [1, 4], [0, 2], [2, 0]])
def test_batches_end_after_the_same_step_everywhere(sizes: list[int]) -> None:
    found = run_on_ranks(2, lengths_of_batches, sizes)
    steps = max(sizes)
    assert found == [[3] * n + [0] * (steps - n) for n in sizes]


def nested_loops(mesh: Mesh) -> Any:
    outer = []
    for batch in mesh.batches([torch.ones(2)] * (2 + mesh.rank)):
        inner = [len(b) for b in mesh.batches([torch.ones(1)] * (3 - mesh.rank))]
        outer.append((len(batch), inner))
    return outer


def test_loops_over_batches_may_be_nested() -> None:
    found = run_on_ranks(2, nested_loops)
    assert found[0] == [(2, [1, 1, 1]), (2, [1, 1, 1]), (0, [1, 1, 1])]
    assert found[1] == [(2, [1, 1, 0])] * 3


def test_a_loader_without_any_batch_needs_to_be_told_what_empty_is() -> None:
    mesh = rm.init_mesh()
    with pytest.raises(rm.InputError, match="the loader gave no batch at all"):
        next(mesh.batches([]))
    mesh.close()


def test_ledger_adds_by_edge_and_link_and_leaves_out_empty_messages() -> None:
    ledger = Ledger(Topology(hosts=2, local=2), rank=1)
    for peer, size in ((0, 10), (2, 5), (3, 5), (3, 0)):
        ledger.record("ids", peer, size)
    assert ledger.by_edge() == {"ids": {"host": 10, "cross": 10}}
    assert ledger.by_link() == {"host": 10, "cross": 10}
    assert ledger.num_messages() == 3
    ledger.reset()
    assert ledger.by_edge() == {}


def resources(mesh: Mesh) -> tuple[int, int]:
    for thread in threading.enumerate():
        if thread.name.startswith("rowmesh-"):  # told to end by the last call's close()
            thread.join(timeout=5)
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_pool_tests_leave_no_threads_or_descriptors() -> None:
    run_on_ranks(2, sums)
    before = run_on_ranks(2, resources)
    for _ in range(20):
        run_on_ranks(2, later_in_order)
    after = run_on_ranks(2, resources)
    assert after == before


def many_under_way(mesh: Mesh, count: int) -> Any:
    """Exchanges that are waited for late, as those of forgotten models never are."""
    channel, peer = mesh.wire.channel("test", Lane.ROWS), 1 - mesh.rank
    handles = []
    for number in range(count):
        sends, receives = [(peer, torch.ones(4))], [(peer, torch.zeros(4))]
        handles.append(channel.post(number, sends=sends, receives=receives, edge=None))
    before = len(mesh.wire.leaving)
    for handle in handles:
        handle.wait()
    return before, len(mesh.wire.leaving)


def test_a_wire_keeps_few_handles_that_nobody_has_waited_for() -> None:
    assert run_on_ranks(2, many_under_way, 100, shared_memory=False) == [(32, 0), (32, 0)]
