"""The central property must notice mistakes: each deliberate one here has to be caught."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from rowmesh.comm.mesh import Mesh
from rowmesh.nn import kernels
from rowmesh.runtime import (
    copies,
    embeddings,
    export,
    gradients,
    look_ahead,
    optimizer,
    relay,
    routes,
    shard,
    squares,
    sums,
)
from tests.cases import Case, Collection, Run, Table, train_case
from tests.ranks import RankError, run_on_ranks
from tests.test_central_property import differences


def make_case(world: int) -> Case:
    """Copies, a whole table pooled by its owner, row-wise tables whose ranks are not sorted, two
    of them with hot rows; on four ranks of two hosts also columns on two hosts with hot rows and
    copies per host, and a grid whose sums are relayed."""
    everyone = tuple(reversed(range(world)))
    tables = (
        Table(rows=8, dim=4, ranks=()),
        Table(rows=8, dim=4, ranks=(1,), exchange="pooled"),
        Table(rows=16, dim=4, ranks=everyone),
        Table(rows=16, dim=4, ranks=everyone, hot=(0, 3, 8, 11)),
        Table(rows=16, dim=4, ranks=everyone, hot=(0, 5, 6, 15), sums="bucket"),
    )
    if world == 4:
        tables += (
            Table(rows=8, dim=8, ranks=(3, 0), columns=2, hot=(1, 2, 7), per_host=(0, 3, 5)),
            Table(rows=16, dim=4, ranks=everyone, per_host=(0, 1, 3, 8, 10, 15)),
            Table(rows=8, dim=8, ranks=(2, 3, 1, 0), columns=2, by_host=True, exchange="pooled"),
        )
    bags = [[0, 3, 3], [5, 1], [7, 3, 3, 2]]

    def ids(table: Table, rank: int, step: int) -> list[list[int]]:
        return [[(5 * i + 3 * rank + step) % table.rows for i in bag] for bag in bags]

    steps = [[[ids(t, rank, step) for t in tables] for rank in range(world)] for step in range(3)]
    return Case(
        world=world,
        hosts=world // 2,
        tree="host-first",
        collections=(Collection(tables=tables),),
        ids=steps,
        rule="rowwise",
        depth=2,
    )


Patch = contextlib.AbstractContextManager[Any]


def unchanged(mesh: Mesh) -> Patch:
    return contextlib.nullcontext()


def _reroute(change: Callable[[Any], Any]) -> Patch:
    original = embeddings.route_bags
    return mock.patch.object(embeddings, "route_bags", lambda *a, **k: change(original(*a, **k)))


def swapped_rows_in_a_request(mesh: Mesh) -> Patch:
    def change(route: Any) -> Any:
        away = [replace(r, rows=r.rows.flip(0)) for r in route.requests[2:]]  # on the other host
        return replace(route, requests=[*route.requests[:2], *away])

    return _reroute(change if mesh.rank == 1 else lambda route: route)


def gradient_of_a_duplicate_dropped(mesh: Mesh) -> Patch:
    def change(route: Any) -> Any:
        weights = torch.zeros(len(route.backward.positions))
        weights[route.backward.starts.long()] = 1.0
        return replace(route, backward=replace(route.backward, weights=weights))

    return _reroute(change)


def owners_in_sorted_order_on_one_rank(mesh: Mesh) -> Patch:
    original = shard.lay_out

    def lay_out(plans: Any, *args: Any, **kwargs: Any) -> Any:
        plans = [
            replace(p, tiers=(replace(p.rest, ranks=tuple(sorted(p.rest.ranks))),)) for p in plans
        ]
        return original(plans, *args, **kwargs)

    return mock.patch.object(shard, "lay_out", lay_out if mesh.rank == 0 else original)


def exchanged_tags_on_one_rank(mesh: Mesh) -> Patch:
    original = embeddings.ShardedEngine.__init__

    def init(self: Any, **kwargs: Any) -> None:
        original(self, **kwargs)
        for a, b in zip(self._backward, self._copied, strict=True):
            a.number, b.number = b.number, a.number

    return mock.patch.object(
        embeddings.ShardedEngine, "__init__", init if mesh.rank == 0 else original
    )


def dense_gradients_not_summed(mesh: Mesh) -> Patch:
    original = optimizer.DenseBuckets.reduce

    def reduce(self: Any) -> None:
        own = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        original(self)
        for parameter, grad in zip(self.parameters, own, strict=True):
            parameter.grad = grad

    return mock.patch.object(optimizer.DenseBuckets, "reduce", reduce)


def copies_updated_on_one_rank_only(mesh: Mesh) -> Patch:
    original = gradients.SparseGradients._spread

    def spread(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        return found if mesh.rank == 0 else replace(found, grad=torch.zeros_like(found.grad))

    return mock.patch.object(gradients.SparseGradients, "_spread", spread)


def one_ranks_gradients_left_out(mesh: Mesh) -> Patch:
    original = gradients.SparseGradients._home

    def home(self: Any, number: int, stack: Any, tickets: Any) -> Any:
        last = self._engine.mesh.world - 1
        for ticket in tickets:
            first = ticket.home.firsts[number][last]
            size = ticket.asked[number][last].num_vectors
            ticket.home.grads[number][first : first + size] = 0.0
        return original(self, number, stack, tickets)

    return mock.patch.object(gradients.SparseGradients, "_home", home)


def loss_divided_by_ranks(mesh: Mesh) -> Patch:
    original = Mesh.mean
    return mock.patch.object(Mesh, "mean", lambda self, x, **k: original(self, x, **k) / self.world)


def parts_added_in_reverse_rank_order(mesh: Mesh) -> Patch:
    original = kernels.coalesce

    def coalesce(
        rows: Any, values: Any, *, index: Any = None, labels: Any = (), **kwargs: Any
    ) -> Any:
        index = torch.arange(len(rows)) if index is None else index
        labels = [label.flip(0) for label in labels]
        return original(rows.flip(0), values, index=index.flip(0), labels=labels, **kwargs)

    return mock.patch.object(gradients, "coalesce", coalesce)


def sample_order_lost_within_a_part(mesh: Mesh) -> Patch:
    def change(route: Any) -> Any:
        """Reverse the entries of every vector's run."""
        starts, bags = route.backward.starts, route.backward.positions
        lengths = torch.diff(starts, append=torch.tensor([len(bags)]))
        start = torch.repeat_interleave(starts, lengths)
        length = torch.repeat_interleave(lengths, lengths)
        order = 2 * start + length - 1 - torch.arange(len(bags))
        return replace(route, backward=replace(route.backward, positions=bags[order.long()]))

    return _reroute(change)


def squares_of_own_columns_only(mesh: Mesh) -> Patch:
    def add(self: Any, parts: Any) -> Any:
        return [None] * len(parts)

    return mock.patch.object(squares.ColumnSquares, "add", add)


def column_blocks_added_in_another_order(mesh: Mesh) -> Patch:
    original = squares.mean_of_blocks

    def mean_of_blocks(blocks: Any, *, dim: int) -> Any:
        return original(blocks.flip(1), dim=dim)

    return mock.patch.object(squares, "mean_of_blocks", mean_of_blocks)


def columns_joined_in_another_order(mesh: Mesh) -> Patch:
    original = embeddings.join_columns

    def join_columns(layouts: Any, vectors: Any, *args: Any, **kwargs: Any) -> Any:
        vectors = [
            v.view(-1, 2, v.shape[1]).flip(1).reshape(v.shape) if s.dim < s.table_dim else v
            for s, v in zip(layouts, vectors, strict=True)
        ]
        return original(layouts, vectors, *args, **kwargs)

    return mock.patch.object(embeddings, "join_columns", join_columns)


def relay_mixes_up_its_askers(mesh: Mesh) -> Patch:
    original = relay.Relay.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.askers = self.askers[::-1]

    return mock.patch.object(relay.Relay, "__init__", init if mesh.rank == 0 else original)


def relay_forgets_sample_order(mesh: Mesh) -> Patch:
    original = kernels.coalesce

    def coalesce(rows: Any, values: Any, *, index: Any, weights: Any) -> Any:
        return original(rows.flip(0), values, index=index.flip(0), weights=weights)

    return mock.patch.object(relay, "coalesce", coalesce)


def ranks_added_flat_not_host_first(mesh: Mesh) -> Patch:
    original = embeddings.ShardedEngine.__init__

    def init(self: Any, **kwargs: Any) -> None:
        original(self, **kwargs | {"span": mesh.world})

    return mock.patch.object(embeddings.ShardedEngine, "__init__", init)


def dense_gradients_added_flat_not_host_first(mesh: Mesh) -> Patch:
    original = shard.DenseBuckets

    def flat(parameters: Any, mesh: Mesh, span: int, **riders: Any) -> Any:
        return original(parameters, mesh, mesh.world, **riders)

    return mock.patch.object(shard, "DenseBuckets", flat)


def hot_rows_mixed_up(mesh: Mesh) -> Patch:
    def change(route: Any) -> Any:
        return replace(route, copied_slots=route.copied_slots.roll(1))

    return _reroute(change if mesh.rank == 1 else lambda route: route)


def hot_rows_taken_for_cold_ones(mesh: Mesh) -> Patch:
    original = routes._find_hot

    def find(*args: Any) -> Any:
        run, slot = original(*args)
        return run[:0], slot[:0]

    return mock.patch.object(routes, "_find_hot", find)


def one_ranks_hot_gradients_left_out(mesh: Mesh) -> Patch:
    original = copies.CopyRider.pack

    def pack(self: Any, out: torch.Tensor, flags: torch.Tensor) -> None:
        original(self, out, flags)
        out.zero_()
        flags.zero_()

    return mock.patch.object(copies.CopyRider, "pack", pack if mesh.rank == 1 else original)


def homes_of_hot_rows_left_stale(mesh: Mesh) -> Patch:
    return mock.patch.object(export, "refresh_homes")


def squares_of_hot_rows_by_piece(mesh: Mesh) -> Patch:
    return mock.patch.object(squares.ColumnSquares, "_add_hot", return_value={})


def host_copies_of_the_next_row(mesh: Mesh) -> Patch:
    original = routes._find_hot

    def find(layout: Any, *args: Any) -> Any:
        run, keys = original(layout, *args)
        return (run, keys.roll(1)) if layout.host_copies else (run, keys)

    return mock.patch.object(routes, "_find_hot", find)


def hosts_not_added_up(mesh: Mesh) -> Patch:
    """Each host steps its copies by its own gradients."""
    original = sums.HostSums._add_peers

    def add(self: Any, k: int, part: Any, sizes: Any, counts: Any, sequence: int) -> Any:
        rows, total = original(self, k, part, sizes, counts, sequence)
        return rows, torch.zeros_like(total) if mesh.rank == 2 else total

    return mock.patch.object(sums.HostSums, "_add_peers", add)


def host_gradients_of_one_rank_left_out(mesh: Mesh) -> Patch:
    original = sums.HostSums._add_beside

    def add(self: Any, number: int, tickets: Any) -> Any:
        if mesh.rank == 3:
            for ticket in tickets:
                ticket.shared.grads[number][ticket.shared.firsts[number][2] :].zero_()
        return original(self, number, tickets)

    return mock.patch.object(sums.HostSums, "_add_beside", add)


def homes_of_host_copies_left_stale(mesh: Mesh) -> Patch:
    original = copies._copied

    def copied(*args: Any) -> Any:
        return (found for found in original(*args) if found.region.holder is None)

    return mock.patch.object(copies, "_copied", copied)


def rows_sent_ahead_that_a_step_changes(mesh: Mesh) -> Patch:
    original = look_ahead.LookAhead._late

    def late(self: Any, *args: Any) -> Any:
        return {peer: torch.zeros_like(mask) for peer, mask in original(self, *args).items()}

    return mock.patch.object(look_ahead.LookAhead, "_late", late)


def copies_per_host_sent_ahead(mesh: Mesh) -> Patch:
    return mock.patch.object(look_ahead, "_ALWAYS", 0)


def early_rows_in_the_order_of_late_ones(mesh: Mesh) -> Patch:
    original = look_ahead.LookAhead._await_clean

    def await_clean(self: Any, fetch: Any, number: int, *args: Any) -> None:
        forward = fetch.routes[number].forward
        original(self, fetch, number, *args)
        fetch.routes[number] = replace(fetch.routes[number], forward=forward)

    return mock.patch.object(look_ahead.LookAhead, "_await_clean", await_clean)


MUTATIONS = [
    rows_sent_ahead_that_a_step_changes,
    copies_per_host_sent_ahead,
    early_rows_in_the_order_of_late_ones,
    host_copies_of_the_next_row,
    hosts_not_added_up,
    host_gradients_of_one_rank_left_out,
    homes_of_host_copies_left_stale,
    hot_rows_mixed_up,
    hot_rows_taken_for_cold_ones,
    one_ranks_hot_gradients_left_out,
    homes_of_hot_rows_left_stale,
    squares_of_hot_rows_by_piece,
    swapped_rows_in_a_request,
    gradient_of_a_duplicate_dropped,
    owners_in_sorted_order_on_one_rank,
    exchanged_tags_on_one_rank,
    dense_gradients_not_summed,
    copies_updated_on_one_rank_only,
    one_ranks_gradients_left_out,
    loss_divided_by_ranks,
    parts_added_in_reverse_rank_order,
    sample_order_lost_within_a_part,
    squares_of_own_columns_only,
    column_blocks_added_in_another_order,
    columns_joined_in_another_order,
    relay_mixes_up_its_askers,
    relay_forgets_sample_order,
    ranks_added_flat_not_host_first,
    dense_gradients_added_flat_not_host_first,
]


def train_mutated(mesh: Mesh, name: str, world: int) -> Run:
    with globals()[name](mesh):
        return train_case(mesh, make_case(world))


@pytest.mark.parametrize("world", [2, 4])
def test_without_a_mutation_nothing_differs(world: int) -> None:
    runs = run_on_ranks(world, train_mutated, "unchanged", world, hosts=world // 2)
    assert differences(make_case(world), runs, tolerance=0.0) == []


SHOWN_BY_AN_ERROR = {owners_in_sorted_order_on_one_rank, exchanged_tags_on_one_rank}


@pytest.mark.parametrize(
    "mutation",
    [
        # shown by a time-out after which the ranks start anew
        pytest.param(owners_in_sorted_order_on_one_rank, marks=pytest.mark.nightly),
        *(m for m in MUTATIONS if m is not owners_in_sorted_order_on_one_rank),
    ],
    ids=lambda m: m.__name__,
)
def test_every_mutation_is_caught(mutation: Callable[[Mesh], Patch]) -> None:
    if mutation in SHOWN_BY_AN_ERROR:  # messages no longer fit: a header or a time-out says so
        with pytest.raises(RankError, match=r"PeerError|process died"):  # gloo may end the process
            run_on_ranks(4, train_mutated, mutation.__name__, 4, hosts=2)
        return
    runs = run_on_ranks(4, train_mutated, mutation.__name__, 4, hosts=2)
    assert differences(make_case(4), runs, tolerance=0.0)
