"""The sharded engine behind a collection's forward, and the tickets of its training forwards.

counts + status -> ids -> lookup at owners -> vectors back -> pool; backward mirrors it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.comm.exchange import ChannelPool, Handle, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, RowmeshError, StepError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.nn.bags import Reader, as_features, check_ids, flatten
from rowmesh.nn.collections import Piece
from rowmesh.runtime.copies import CopyRider
from rowmesh.runtime.lookup import Lookup
from rowmesh.runtime.outputs import join_columns
from rowmesh.runtime.relay import Relay
from rowmesh.runtime.requests import NUM_COUNTS, Request, look_up, num_words, pack, unpack
from rowmesh.runtime.returns import send_back
from rowmesh.runtime.routes import Route, route_bags
from rowmesh.runtime.scratch import Scratch
from rowmesh.runtime.tickets import Relayed, Stack, Ticket, Together
from rowmesh.tables import TableConfig

__all__ = ["ShardedEngine", "sharded_engines"]

_HEAD = 2  # of a counts message: status word, samples; then four counts a stack
_BAD_INPUT, _LAST_BATCH, _TRAINING = 1, 2, 4  # bits of the status word


class ShardedEngine:
    """Looks up the readers of one collection in stacks spread over the mesh."""

    def __init__(
        self,
        *,
        path: str,
        readers: Sequence[Reader],
        tables: Sequence[TableConfig],
        pooled: bool,
        weighted: bool,
        stacks: Sequence[Stack],
        mesh: Mesh,
        span: int,
    ) -> None:
        self.path, self.readers, self.tables = path, list(readers), list(tables)
        self.pooled, self.weighted = pooled, weighted
        self.mesh, self.span = mesh, span
        self.tickets: list[Ticket] = []
        self.is_accumulating = False
        self.on_all_sent: Callable[[], None] | None = None
        self.anchor = torch.zeros((), device=mesh.device, requires_grad=True)
        self._number, self._num_trained = 0, 0
        self.pool = ChannelPool(mesh.wire)
        self.exports = mesh.wire.channel(f"export of {path}", Lane.ROWS)
        self.num_exports = 0
        self._leaving: list[Handle] = []
        self.replicas: Together | None = None
        self.set_stacks(stacks)

    def set_stacks(self, stacks: Sequence[Stack]) -> None:
        """Look up rows in these stacks from now on; whoever keeps something of them begins anew.

        Collective:
            All ranks, between steps.
        """
        self._end_sends()
        self.stacks = list(stacks)
        self.pool.begin_anew()
        path, channel = self.path, self.pool.channel
        wide = any(max(s.layout.asked_slots) >= 1 << 31 for s in stacks)
        self.id_dtype = torch.int64 if wide else torch.int32
        self._scratch = Scratch(self.mesh.device)
        self._counts = channel(f"counts of {path}", Lane.CONTROL)
        self._ids = channel(f"ids of {path}", Lane.CONTROL)
        self._weights = channel(f"sample weights of {path}", Lane.CONTROL)
        self._vectors = [channel(f"vectors of {path}", Lane.ROWS) for _ in stacks]
        self._backward = [channel(f"gradients of {path}", Lane.GRADS) for _ in stacks]
        self._copied = [channel(f"hot gradients of {path}", Lane.GRADS) for _ in stacks]
        self._shared = [channel(f"host gradients of {path}", Lane.GRADS) for _ in stacks]
        self.relays = {
            i: Relay(path, stack.layout, self.mesh, self.id_dtype, self.pool)
            for i, stack in enumerate(stacks)
            if stack.layout.is_relayed
        }
        self.riders: list[CopyRider] = []

    def bring_together(self) -> None:
        """Make the rows of shard groups that step apart their mean.

        Collective:
            All ranks, between steps.
        """
        if self.replicas is not None:
            self.replicas.bring_together()

    def _end_sends(self) -> None:
        for handle in self._leaving:
            handle.wait()
        self._leaving.clear()

    def __deepcopy__(self, memo: Any) -> "ShardedEngine":
        raise StepError(
            "a sharded model cannot be copied: its rows lie on many ranks; rm.unshard(model) "
            "gives a single-process copy on rank 0"
        )

    def __call__(self, features: Any) -> tuple[KeyedJaggedTensor, list[Piece]]:
        """The checked features and every reader's vectors.

        Raises:
            InputError: On all ranks, if the input of any rank is wrong.
            StepError: On all ranks, if a rank's last gradients have not been used or dropped.

        Collective:
            All ranks; in a training forward (gradients enabled, a trainable table) all again in
            backward.
        """
        training = torch.is_grad_enabled() and any(s.layout.trainable for s in self.stacks)
        self._number += 1
        self._num_trained += torch.is_grad_enabled()
        phase = self.mesh.trace.phase
        with phase("route"):
            features, routes, error = self._prepare(features, training)
        with phase("counts"):
            counts = self._exchange_counts(features, routes, error)
        with phase("ids"):
            buffers, arriving = self._await_vectors(routes)
            asked = self._exchange_ids(routes, counts, buffers)
        relayed = self._fetch(asked)
        with phase("lookup"):
            self._answer(routes, asked, relayed, buffers)
        with phase("vectors"):
            for handle in arriving:
                handle.wait()
        with phase("pool"):
            return features, self._pool(features, routes, asked, relayed, buffers, training)

    def _pool(
        self,
        features: KeyedJaggedTensor,
        routes: Sequence[Route],
        asked: list[Sequence[Request]],
        relayed: dict[int, Relayed],
        buffers: Sequence[Tensor],
        training: bool,
    ) -> list[Piece]:
        """Every reader's vectors from those that arrived, under a new ticket if in training."""
        vectors = [r.forward.of(buffer) for r, buffer in zip(routes, buffers, strict=True)]
        if training:
            taken = {t.place for t in self.tickets}
            place = next(p for p in itertools.count() if p not in taken)
            ticket = Ticket(
                number=self._number, place=place, routes=routes, asked=asked, relayed=relayed
            )
            self.tickets.append(ticket)
            vectors = Lookup.apply(self, ticket, self.anchor, *vectors)  # type: ignore[no-untyped-call]
        layouts = [stack.layout for stack in self.stacks]
        return join_columns(layouts, vectors, features, self.readers, pooled=self.pooled)

    def _prepare(
        self, features: Any, training: bool
    ) -> tuple[KeyedJaggedTensor, list[Route], RowmeshError | None]:
        """Check and route the batch; an error goes into the status word, not up."""
        self._end_sends()
        try:
            if training and not self.is_accumulating and any(t.is_sent for t in self.tickets):
                raise StepError(
                    "a training forward after backward: call opt.step() or opt.zero_grad() first, "
                    "or run the backwards that belong together inside opt.accumulate()"
                )
            features = as_features(features)
            routes = []
            for stack in self.stacks:
                readers = [self.readers[r] for r in stack.layout.readers]
                bags = flatten(features, readers, pooled=self.pooled, weighted=self.weighted)
                check_ids(bags, readers, self.tables)
                routes.append(route_bags(stack.layout, bags, training=training))
            return features, routes, None
        except RowmeshError as error:
            return (
                KeyedJaggedTensor([], torch.empty(0), lengths=torch.empty(0), stride=0),
                [],
                error,
            )

    def _exchange_counts(
        self,
        features: KeyedJaggedTensor,
        routes: Sequence[Route],
        error: RowmeshError | None,
    ) -> list[list[int]]:
        """Tell every rank what it will be asked; returns what every rank asks of this one."""
        mesh, world = self.mesh, self.mesh.world
        status = (_BAD_INPUT if error else 0) | (_LAST_BATCH if mesh.is_last_batch else 0)
        status |= _TRAINING if torch.is_grad_enabled() else 0
        table = [[status, features.stride()] for _ in range(world)]
        for peer, row in enumerate(table):
            row += [n for route in routes for n in route.requests[peer].counts()]
            row += [0] * (_HEAD + NUM_COUNTS * len(self.stacks) - len(row))
        sent = torch.tensor(table, device=mesh.device)
        found = torch.empty_like(sent)
        found[mesh.rank] = sent[mesh.rank]
        key = f"{self.path}/{self._number}"
        if error is not None:
            mesh.bulletin.post_input_error(key, f"{type(error).__name__}|{error}")
        for peer in mesh.peers():
            mesh.ledger.record("status", peer, 8)
            mesh.ledger.record("counts", peer, 8 * (sent.shape[1] - 1))
        self._counts.post(
            self._number,
            sends=[(p, sent[p]) for p in mesh.peers()],
            receives=[(p, found[p]) for p in mesh.peers()],
            edge=None,
        ).wait()
        counts: list[list[int]] = found.tolist()
        bad = [rank for rank in range(world) if counts[rank][0] & _BAD_INPUT]
        if bad:
            self._raise(key, bad[0], error)
        training = [rank for rank in range(world) if counts[rank][0] & _TRAINING]
        if 0 < len(training) < world:
            raise StepError(
                f"ranks {training} run a training forward of {self.path!r}, the others evaluate: "
                f"torch.no_grad() must be on for all ranks or for none"
            )
        mesh.saw_counts(
            local=features.stride(),
            total=sum(c[1] for c in counts),
            all_last=all(c[0] & _LAST_BATCH for c in counts),
            num_forwards=self._num_trained,
        )
        return [c[_HEAD:] for c in counts]

    def _raise(self, key: str, rank: int, error: RowmeshError | None) -> None:
        """Raise the complaint of ``rank``, the same on all ranks."""
        if self.mesh.world == 1:
            assert error is not None
            raise error
        name, _, sentence = self.mesh.bulletin.read_input_error(key, rank).partition("|")
        kind = StepError if name == StepError.__name__ else InputError
        raise kind(f"rank {rank}: {sentence}")

    def _await_vectors(self, routes: Sequence[Route]) -> tuple[list[Tensor], list[Handle]]:
        """Buffers for every stack's vectors, receives posted before anything is asked."""
        buffers, handles = [], []
        for stack, route, channel in zip(self.stacks, routes, self._vectors, strict=True):
            layout, bounds = stack.layout, route.vector_bounds
            dtype = torch.float32 if layout.has_pooled else layout.dtype
            buffer = self._scratch.take(("vectors", channel), route.num_vectors, layout.dim, dtype)
            receives = [(p, buffer[bounds[p] : bounds[p + 1]]) for p in self.mesh.peers()]
            handles.append(channel.post(self._number, sends=(), receives=receives, edge=None))
            buffers.append(buffer)
        return buffers, handles

    def _exchange_ids(
        self,
        routes: Sequence[Route],
        counts: Sequence[Sequence[int]],
        buffers: Sequence[Tensor],
    ) -> list[Sequence[Request]]:
        """Send every owner its requests; returns ``[stack][source]`` what this rank was asked.

        While they travel, what this rank holds itself is read into ``buffers``.
        """
        mesh, layouts = self.mesh, [s.layout for s in self.stacks]
        sends, weight_sends = [], []
        for peer in mesh.peers():
            summed = [layout.num_summed(peer) for layout in layouts]
            requests = [route.requests[peer] for route in routes]
            words, weights = pack(requests, summed, dtype=self.id_dtype)
            sends.append((peer, words))
            weight_sends += [] if weights is None else [(peer, weights)]
        summed = [layout.num_summed(mesh.rank) for layout in layouts]
        by_stack = [[c[NUM_COUNTS * i :][:NUM_COUNTS] for i in range(len(layouts))] for c in counts]
        sizes = [[num_words(c, n) for c, n in zip(cs, summed, strict=True)] for cs in by_stack]
        received = {
            p: torch.empty(sum(map(sum, sizes[p])), dtype=self.id_dtype, device=mesh.device)
            for p in mesh.peers()
        }
        received_weights = {
            p: torch.empty(sum(size[1] for size in sizes[p]), device=mesh.device)
            for p in (mesh.peers() if self.weighted else ())
        }
        handles = [
            self._ids.post(self._number, sends=sends, receives=received.items(), edge="ids"),
            self._weights.post(
                self._number,
                sends=weight_sends,
                receives=received_weights.items(),
                edge="sample weights",
            ),
        ]
        with mesh.trace.phase("lookup"):
            self._look_up_here(routes, buffers)
        for handle in handles:
            handle.wait()
        by_source = [
            [route.requests[mesh.rank] for route in routes]
            if source == mesh.rank
            else unpack(received[source], received_weights.get(source), by_stack[source], summed)
            for source in range(mesh.world)
        ]
        return [list(asked) for asked in zip(*by_source, strict=True)]

    def _look_up_here(self, routes: Sequence[Route], buffers: Sequence[Tensor]) -> None:
        """Copies, and this rank's own rows where no relay fetches them."""
        if self.replicas is not None:
            self.replicas.finish()
        rank = self.mesh.rank
        for i, (stack, route, buffer) in enumerate(zip(self.stacks, routes, buffers, strict=True)):
            bounds = route.vector_bounds
            if len(route.copied_slots):
                out = buffer[bounds[-1] :]
                torch.index_select(stack.copies, 0, route.copied_slots, out=out)
            if i not in self.relays:
                out = buffer[bounds[rank] : bounds[rank + 1]]
                look_up(stack.home, route.requests[rank], out)

    def _fetch(self, asked: Sequence[Sequence[Request]]) -> dict[int, Relayed]:
        """Rows that relayed stacks need from the ranks beside this one, by stack."""
        return {
            i: relay.fetch(self._number, asked[i], self.stacks[i].home)
            for i, relay in self.relays.items()
            if relay.is_used
        }

    def _answer(
        self,
        routes: Sequence[Route],
        asked: Sequence[Sequence[Request]],
        relayed: Mapping[int, Relayed],
        buffers: Sequence[Tensor],
    ) -> None:
        """Look up what peers asked, and send it; a relay also its own rank's."""
        mesh, rank = self.mesh, self.mesh.rank
        for i, (stack, route, buffer) in enumerate(zip(self.stacks, routes, buffers, strict=True)):
            sends = []
            source, requests = stack.home, asked[i]
            if i in relayed:
                source, requests = relayed[i].rows, relayed[i].requests
            for peer in mesh.peers():
                request = requests[peer]
                size = (request.num_vectors, stack.layout.dim)
                out = self._scratch.take(("answer", i, peer), *size, buffer.dtype)
                look_up(source, request, out)
                sends.append((peer, out))
                row_bytes = out.element_size() * out.shape[1]
                mesh.ledger.record("rows", peer, len(request.rows) * row_bytes)
                mesh.ledger.record("pooled", peer, request.num_pooled * row_bytes)
            self._leaving.append(
                self._vectors[i].post(self._number, sends=sends, receives=(), edge=None)
            )
            if i in relayed:
                bounds = route.vector_bounds
                look_up(source, requests[rank], buffer[bounds[rank] : bounds[rank + 1]])

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> None:
        """Send the gradient of every vector to its owner, of every copied row to its sum owner.

        Collective:
            All ranks, once for every ticket.
        """
        if ticket.is_sent:
            raise StepError(
                "backward ran twice through one forward: add the losses and call backward once"
            )
        for i, (stack, grad) in enumerate(zip(self.stacks, grads, strict=True)):
            if stack.layout.trainable:  # frozen tables send nothing back
                channels = (self._backward[i], self._copied[i], self._shared[i])
                send_back(ticket, i, grad.contiguous(), channels, stack.layout, self._scratch)
            else:
                for arrivals in (ticket.home, ticket.copied, ticket.shared):
                    arrivals.append(grad[:0], [], None)
                ticket.dense.append(grad[:0])
        ticket.is_sent = True
        is_last = not self.is_accumulating and all(t.is_sent for t in self.tickets)
        if is_last and self.on_all_sent is not None:
            self.on_all_sent()


def sharded_engines(model: nn.Module) -> list[ShardedEngine]:
    """The engines of a sharded model's collections, in the order of its modules."""
    found = [getattr(m, "engine", None) for m in model.modules()]
    return [e for e in found if isinstance(e, ShardedEngine)]
