"""Shared memory between ranks of a host: what gloo gives, bit for bit, or gloo itself."""

import errno
import os
import signal
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rowmesh as rm
from rowmesh.comm import mesh as meshes
from rowmesh.comm import shared
from rowmesh.comm.exchange import DTYPES, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.comm.shared import Segment, open_segment
from rowmesh.native import segment as native_segment
from rowmesh.native.segment import Endpoint, describe_segment, segment_bytes
from rowmesh.topology import Topology
from tests.cases import cases, oracle_case, train_case
from tests.ranks import ARENA, RankError, run_on_ranks, warm_context
from tests.test_central_property import SUITE, differences

LARGEST = ARENA // 4
pytestmark = pytest.mark.skipif(
    not describe_segment()[0], reason=f"shared memory: {describe_segment()[1]}"
)


def segment_of(mesh: Mesh) -> Segment:
    assert mesh.wire.segment is not None
    return mesh.wire.segment


def numbers(seed: int, size: int) -> torch.Tensor:
    """Bytes that tell where they are from."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def exchange_all(mesh: Mesh) -> Any:
    """Every dtype and many sizes, empty ones and some larger than may be shared."""
    channel, found, sequence = mesh.wire.channel("test", Lane.ROWS), [], 0
    for dtype in DTYPES:
        for size in (0, 1, 7, 4096, LARGEST // 8, LARGEST // 8 + 1):
            received = {p: torch.zeros(size, dtype=dtype) for p in mesh.peers()}
            sent = {p: numbers(7 * mesh.rank + p, 8 * size) for p in mesh.peers()}
            if dtype == torch.bool:
                sent = {p: t & 1 for p, t in sent.items()}
            sequence += 1
            channel.post(
                sequence,
                sends=[(p, t.view(dtype)[:size]) for p, t in sent.items()],
                receives=received.items(),
                edge="rows",
            ).wait()
            found += [t.view(torch.uint8).numpy().tobytes() for t in received.values()]
    return found, mesh.ledger.by_edge(), mesh.ledger.num_messages()


@pytest.mark.parametrize(("num_ranks", "hosts"), [(2, 1), (3, 1), (4, 2)])
def test_bits_and_bytes_are_those_of_gloo(num_ranks: int, hosts: int) -> None:
    first, second = (
        run_on_ranks(num_ranks, exchange_all, hosts=hosts, shared_memory=on, debug=on)
        for on in (True, False)
    )
    assert first == second


@settings(SUITE, max_examples=3)
@given(data=st.data())
def test_training_equals_the_oracle_over_both(data: st.DataObject) -> None:
    """As in test_central_property.py, where the pool's ranks of one host share memory."""
    case = data.draw(cases(world=data.draw(st.sampled_from([2, 4])), hosts=1))
    oracle_case(case)
    for on in (True, False):
        runs = run_on_ranks(case.world, train_case, case, hosts=1, debug=False, shared_memory=on)
        assert not differences(case, runs, tolerance=0.0)


def reversed_order(mesh: Mesh, sizes: list[int]) -> Any:
    """All sends, waited for, before any receive is even posted; received last first."""
    channels = [mesh.wire.channel(f"test {i}", Lane.GRADS) for i in range(len(sizes))]
    segment, peer = segment_of(mesh), 1 - mesh.rank
    before = segment.num_by_gloo
    for i, channel in enumerate(channels):
        sent = numbers(1000 * mesh.rank + i, sizes[i])
        channel.post(3, sends=[(peer, sent)], receives=(), edge=None).wait()
        sent.zero_()  # it has been waited for
    by_gloo, wrong = segment.num_by_gloo - before, []
    mesh.total(0)
    for i in reversed(range(len(sizes))):
        found = torch.zeros(sizes[i], dtype=torch.uint8)
        channels[i].post(3, sends=(), receives=[(peer, found)], edge=None).wait()
        if not torch.equal(found, numbers(1000 * peer + i, sizes[i])):
            wrong.append(i)
    mesh.total(0)
    segment._settle()
    return wrong, by_gloo, len(segment._unsettled)


def test_messages_match_by_tag_in_any_order_and_a_full_arena_goes_on_with_gloo() -> None:
    few = run_on_ranks(2, reversed_order, [10, 1000, 30_000, 5] * 5, debug=False)
    assert few == [([], 0, 0)] * 2
    many = run_on_ranks(2, reversed_order, [LARGEST, 100, 70_000, LARGEST - 1] * 6)
    for wrong, by_gloo, unsettled in many:
        assert (wrong, unsettled) == ([], 0)
        assert 12 <= by_gloo <= 20  # about 1 MiB of 4 is shared
    again = run_on_ranks(2, reversed_order, [LARGEST] * 3, debug=False)
    assert again == [([], 0, 0)] * 2, "the arena is whole again"


def many_threads(mesh: Mesh, num_threads: int, rounds: int) -> list[str]:
    """Threads that exchange with all peers, each on its channel, in its own rhythm."""
    lanes, wrong = list(Lane), []
    channels = [mesh.wire.channel(f"test {i}", lanes[i % 3]) for i in range(num_threads)]

    def work(i: int) -> None:
        for k in range(rounds):
            size = 1 + (i * 7919 + k * 104_729) % 60_000
            found = {p: torch.zeros(size, dtype=torch.uint8) for p in mesh.peers()}
            sends = [(p, numbers(hash((mesh.rank, p, i, k)), size)) for p in mesh.peers()]
            channels[i].post(k, sends=sends, receives=found.items(), edge="rows").wait()
            for p, t in found.items():
                if not torch.equal(t, numbers(hash((p, mesh.rank, i, k)), size)):
                    wrong.append(f"thread {i}, round {k}, from rank {p}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_many_threads_post_and_wait_at_once() -> None:
    assert run_on_ranks(2, many_threads, 8, 40, debug=False) == [[]] * 2
    assert run_on_ranks(4, many_threads, 6, 15) == [[]] * 4


def wrong_message(mesh: Mesh, sent: torch.Tensor, expected: torch.Tensor) -> str:
    channel = mesh.wire.channel("test", Lane.ROWS)
    if mesh.rank == 1:
        channel.post(1, sends=[(0, sent)], receives=(), edge=None).wait()
        return ""
    try:
        channel.post(1, sends=(), receives=[(1, expected)], edge=None).wait()
    except rm.PeerError as error:
        return str(error)
    return "no error"


def test_a_wrong_size_is_noticed_always_and_a_wrong_dtype_in_debug_mode() -> None:
    long, short = torch.ones(4), torch.ones(2)
    for sent, expected in ((long, short), (short, long)):
        message = run_on_ranks(2, wrong_message, sent, expected, debug=False)[0]
        sizes = f"sent {4 * len(sent)} bytes, but {4 * len(expected)} were expected"
        assert message == f"exchange 'test', step 1: rank 1 {sizes}"
    message = run_on_ranks(2, wrong_message, torch.ones(4, dtype=torch.int32), long)[0]
    assert "[1, 3, 4, 4], but [1, 3, 0, 4] was expected" in message


def files(name: str) -> list[str]:
    return [path.name for path in shared._FOLDER.glob(f"rowmesh-{name}-*")]


def open_with(mesh: Mesh, name: str, trouble: str) -> Any:
    """Whether a segment is opened, and which of its files are there meanwhile and afterwards."""
    seen: list[list[str]] = []

    def gather(value: Any) -> list[Any]:
        found = mesh.gather_objects(value)
        seen.append(files(name))
        mesh.total(0)
        return found

    no_space = OSError(errno.ENOSPC, "No space left on device")
    troubles = {
        "none": mock.patch.dict(os.environ, {}),
        "no space": mock.patch.object(os, "posix_fallocate", side_effect=no_space),
        "cannot map": mock.patch.object(shared, "_map", return_value=None),
        "no compiler": mock.patch.object(native_segment, "_find", return_value=(None, "off")),
    }
    afflicted = mesh.rank == (0 if trouble == "no space" else 1)
    with (
        mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": f"../{name}"}),
        troubles[trouble if afflicted else "none"],
    ):
        found = open_segment(
            gather, topology=mesh.topology, rank=mesh.rank, timeout_s=1.0, arenas=(ARENA,)
        )
    if found is not None:
        found.close(mesh.bulletin.has_left)
    mesh.total(0)
    return found is not None, seen[0], seen[-1], files(name)


def test_the_file_is_gone_once_all_have_mapped_it() -> None:
    name = f"test{os.getpid()}"
    found = run_on_ranks(4, open_with, name, "none", hosts=2)
    for opened, first, last, after in found:
        assert opened
        assert {f.split("-")[2] for f in first} == {"0", "1"}, "a file for each host"
        assert last == after == []


@pytest.mark.parametrize("trouble", ["no space", "cannot map", "no compiler"])
def test_trouble_on_one_rank_leaves_its_host_with_gloo(trouble: str) -> None:
    found = run_on_ranks(4, open_with, f"test{os.getpid()}", trouble, hosts=2)
    assert [opened for opened, *_ in found] == [False, False, True, True]
    assert all(last == after == [] for _, _, last, after in found)


def test_nothing_is_left_if_a_peer_fails_meanwhile() -> None:
    gather = mock.Mock(side_effect=rm.PeerError("rank 1 is gone"))
    name, topology = f"test{os.getpid()}", Topology(hosts=1, local=2)
    with (
        mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": name}),
        pytest.raises(rm.PeerError),
    ):
        open_segment(gather, topology=topology, rank=0, timeout_s=1.0, arenas=(ARENA,))
    assert gather.call_args.args[0].path.name.startswith(f"rowmesh-{name}-0-")
    assert files(name) == []


def test_a_size_that_does_not_fit_is_not_tried() -> None:
    free = mock.Mock(f_bavail=2048, f_frsize=4096)
    with mock.patch.object(os, "statvfs", return_value=free):
        assert shared._create(0, 2, (64 << 20, 8 << 20)) is None
        found = shared._create(0, 2, (64 << 20, ARENA))
    assert found is not None
    assert found.arena_bytes == ARENA
    assert found.path.stat().st_blocks * 512 >= segment_bytes(2, ARENA), "space is reserved"
    found.path.unlink()


def init(mesh: Mesh, wanted: bool | None, value: str) -> Any:
    lanes = mesh.wire.lanes
    with (
        mock.patch.dict(os.environ, {"ROWMESH_SHARED_MEMORY": value}),
        mock.patch.object(meshes, "make_lanes", return_value=lanes),
        mock.patch.object(meshes, "watch_end"),
        mock.patch.object(open_segment, "__kwdefaults__", {"is_wanted": True, "arenas": (ARENA,)}),
    ):
        made = rm.init_mesh(hosts=2, shared_memory=wanted)
    segment = made.wire.segment
    found = segment is not None, float(made.total(made.rank)), made.ledger.by_edge()
    made._owned.clear()  # the lanes are the pool's
    made.close()
    return *found, made.wire.segment is None, segment is None or segment.end._file == -1


def test_init_mesh_shares_memory_unless_told_not_to() -> None:
    by_hand = [(True, "0", True), (False, "", False)]
    for wanted, value, expected in [(None, "", True), (None, "0", False), *by_hand]:
        for found in run_on_ranks(4, init, wanted, value, hosts=2):
            edges = {"counts": {"cross": 32, "host": 16}}  # of the sum alone
            assert found == (expected, 6.0, edges, True, True)


def send_and_die(file: str, pipe: Connection) -> None:
    end = Endpoint(os.open(file, os.O_RDWR), num_ranks=2, rank=1, arena_bytes=ARENA)
    pipe.send("here")
    pipe.recv()
    end.send(0, 5, torch.arange(4))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_sent_before_a_death_arrives_and_what_comes_after_is_an_error() -> None:
    with tempfile.NamedTemporaryFile() as file:
        os.truncate(file.name, segment_bytes(2, ARENA))
        descriptor = os.open(file.name, os.O_RDWR)
        end = Endpoint(descriptor, num_ranks=2, rank=0, arena_bytes=ARENA)
        context = warm_context()
        ours, theirs = context.Pipe()
        process = context.Process(target=send_and_die, args=(file.name, theirs), daemon=True)
        process.start()
        theirs.close()
        with ours:
            assert ours.recv() == "here"
            assert end.is_alive(1)
            ours.send("die")
            process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert not end.is_alive(1)
        segment = Segment(end, first=0, timeout_s=5.0)
        found = torch.zeros(4, dtype=torch.int64)
        segment.receive(1, 5, found, mock.Mock()).wait()
        assert found.tolist() == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match="the process has ended"):
            segment.receive(1, 6, found, mock.Mock()).wait()
        end.close()


def timed_out(mesh: Mesh) -> Any:
    if mesh.rank == 1:
        return None
    segment, start = segment_of(mesh), time.monotonic()
    with mock.patch.object(segment, "timeout_s", 0.5):
        arrival = segment.receive(1, 77, torch.zeros(1), mock.Mock())
        try:
            arrival.wait()
        except RuntimeError as error:
            segment.forget(arrival)
            return str(error), time.monotonic() - start
    return None


def test_a_silent_peer_is_given_up_after_the_time_out() -> None:
    message, passed = run_on_ranks(2, timed_out)[0]
    assert message == "timed out"
    assert 0.5 <= passed < 8.0  # on a busy machine; the time-out of others is 20 s


def killed(mesh: Mesh, folder: str) -> None:
    channel, found = mesh.wire.channel("test", Lane.ROWS), torch.zeros(4)
    segment_of(mesh)
    mesh.total(0)
    if mesh.rank == 1:
        Path(folder, "event").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        channel.post(1, sends=(), receives=[(1, found)], edge=None).wait()
    finally:
        Path(folder, f"end-{mesh.rank}").write_text(str(time.time()))


def test_a_killed_peer_is_named_within_seconds(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="PeerError: rank 1 is gone") as caught:
        run_on_ranks(3, killed, str(tmp_path))
    assert str(caught.value).count("PeerError: rank 1 is gone") == 2
    event, *ends = (float((tmp_path / n).read_text()) for n in ("event", "end-0", "end-2"))
    assert max(ends) - event < 15.0  # 3 of them for the peer's own words; a time-out is 20
