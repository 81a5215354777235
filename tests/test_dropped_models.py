"""Models that are dropped: their memory, threads and channels come back, whenever they are gone."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import rowmesh as rm
from rowmesh.comm.exchange import ChannelPool, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.runtime.embeddings import sharded_engines
from tests.ranks import run_on_ranks
from tests.test_alike import SGD, Model, features, plan_for, with_hot


def train(mesh: Mesh, how: str) -> tuple[rm.Optimizer, torch.nn.Module]:
    """A model with hot rows and a pipeline, so that all kinds of threads have worked."""
    model = Model()
    plan = with_hot(plan_for(mesh, model), [1, 2, 3], mesh.world)
    rm.shard(model, plan, mesh)
    optimizer = rm.Optimizer(model, dense=SGD, sparse=rm.RowwiseAdagrad(lr=0.1))
    batches = [features(mesh.rank, step) for step in range(3)]
    for batch in rm.Pipeline(model, depth=2).batches(batches):
        loss = mesh.mean(model(batch))
        loss.backward()
        if how == "between" and batch is batches[-1]:
            break  # gradients are on their way, and nobody takes them
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, model


def dropped(mesh: Mesh, how: str, times: int) -> Any:
    seen, numbers, num_threads = [], [], threading.active_count()
    kept: list[Any] = []
    for number in range(times):
        optimizer, model = train(mesh, how)
        stacks = sharded_engines(model)[0].stacks
        seen += [weakref.ref(model), weakref.ref(optimizer), weakref.ref(stacks[0].home)]
        if how == "late" and mesh.rank == number % mesh.world:
            kept.append(model)  # ranks let go of it at different times
            kept = kept[-2:]
        del model, optimizer, stacks
        numbers.append(mesh.wire.numbers.num_made)
    kept.clear()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:  # a thread may still be at work for the last of them
        gc.collect()
        if threading.active_count() <= num_threads:
            break
        time.sleep(0.01)
    return [ref() is None for ref in seen], numbers, threading.active_count() - num_threads


@pytest.mark.parametrize("how", ["stepped", "between"])
def test_a_dropped_model_with_an_optimizer_gives_all_back(how: str) -> None:
    # Defect: hooks on parameters held the buckets, these the optimiser, and that the tables.
    for are_gone, numbers, threads in run_on_ranks(2, dropped, how, 8):
        assert all(are_gone)
        # each takes the channels of the one before, or if a thread still held that, of another
        assert numbers[-1] < 3 * numbers[0]
        assert threads == 0, "its threads end with it"


def test_channels_are_used_again_only_when_all_ranks_have_let_go() -> None:
    found = run_on_ranks(2, dropped, "late", 12)
    assert found[0][1] == found[1][1], "all ranks take the same numbers"
    for are_gone, numbers, _ in found:
        assert all(are_gone)
        assert numbers[-1] == numbers[5] > numbers[0]


def left_over(mesh: Mesh) -> Any:
    """Rank 0 sends more than rank 1 receives; then the number is another channel's."""
    peer, gather = 1 - mesh.rank, mesh.gather_objects
    before = ChannelPool(mesh.wire)
    channel, found = before.channel("before", Lane.ROWS), torch.zeros(2)
    for sequence in (1, 2) if mesh.rank == 0 else (1,):
        sends = [(peer, torch.full((2,), -1.0))]
        receives = [(peer, found)] if sequence == 1 else ()
        channel.post(sequence, sends=sends, receives=receives, edge=None)
    number = channel.number
    mesh.total(0)
    kept = channel if mesh.rank else before  # a channel alone is not its pool
    del before, channel
    mesh.wire.numbers.take_back(gather)
    other = ChannelPool(mesh.wire).channel("other", Lane.ROWS)
    del kept
    mesh.wire.numbers.take_back(gather)
    after = ChannelPool(mesh.wire).channel("after", Lane.ROWS)
    handles = [
        after.post(s, sends=[(peer, torch.full((2,), float(s)))], receives=[(peer, got)], edge=None)
        for s, got in ((1, torch.zeros(2)), (2, found))
    ]
    for handle in handles:
        handle.wait()
    return number, other.number, after.number, found.tolist()


@pytest.mark.parametrize("shared_memory", [False, True])
def test_what_was_never_received_is_not_taken_for_a_message_of_the_next_use(
    shared_memory: bool,
) -> None:
    found = run_on_ranks(2, left_over, shared_memory=shared_memory)
    for before, other, after, values in found:
        assert before != other, "rank 0 still held it"
        assert after == min(before, other)
        assert values == [2.0, 2.0]
