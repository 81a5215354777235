"""The sharded engine behind a collection's forward, and the tickets of its training forwards.

counts + status -> ids -> lookup at owners -> vectors back -> pool; backward mirrors it.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.comm.codecs import PLAIN, Codecs
from rowmesh.comm.exchange import ChannelPool, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import RowmeshError, StepError
from rowmesh.features import KeyedJaggedTensor
from rowmesh.nn.bags import Reader, as_features, check_ids, flatten
from rowmesh.nn.collections import Piece
from rowmesh.runtime.copies import CopyRider
from rowmesh.runtime.fetch import BAD_INPUT, LAST_BATCH, TRAINING, Fetch
from rowmesh.runtime.fetches import Fetches
from rowmesh.runtime.following import Rest
from rowmesh.runtime.history import History
from rowmesh.runtime.look_ahead import LookAhead, version_of
from rowmesh.runtime.lookup import Lookup
from rowmesh.runtime.outputs import join_columns
from rowmesh.runtime.relay import Relay
from rowmesh.runtime.returns import send_back
from rowmesh.runtime.routes import Route, route_bags
from rowmesh.runtime.scratch import Scratch
from rowmesh.runtime.tickets import Stack, Ticket, Together
from rowmesh.tables import TableConfig

__all__ = ["ShardedEngine", "sharded_engines"]


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
        takes_batch: bool = True,
        codecs: Codecs = PLAIN,
    ) -> None:
        self.takes_batch = takes_batch  # as the collection says
        self.path, self.readers, self.tables = path, list(readers), list(tables)
        self.pooled, self.weighted = pooled, weighted
        self.mesh, self.span, self.codecs = mesh, span, codecs
        self.tickets: list[Ticket] = []
        self.is_accumulating = False
        self.history = History()  # the optimiser's
        self.on_all_sent: Callable[[], None] | None = None
        self.anchor = torch.zeros((), device=mesh.device, requires_grad=True)
        self._number, self._num_trained = 0, 0
        self.pool = ChannelPool(mesh.wire)
        self.num_exports = 0
        self.replicas: Together | None = None
        self.rest = Rest(mesh)
        self._set_stacks(stacks)

    def set_stacks(self, stacks: Sequence[Stack]) -> None:
        """Look up rows in these stacks from now on; whoever keeps something of them begins anew.

        Collective:
            All ranks, between steps.
        """
        self.drop_ahead()
        self.rest.finish()
        self.look_ahead.settle()
        self.fetches.end_sends()
        before = self.look_ahead
        self._set_stacks(stacks)
        self.look_ahead.again, self.look_ahead.current = before.again, before.current

    def _set_stacks(self, stacks: Sequence[Stack]) -> None:
        self.stacks = list(stacks)
        self.pool.begin_anew()
        path, mesh, channel = self.path, self.mesh, self.pool.channel
        self.exports = channel(f"export of {path}", Lane.ROWS)
        wide = any(max(s.layout.asked_slots) >= 1 << 31 for s in stacks)
        self.id_dtype = torch.int64 if wide else torch.int32
        self._scratch = Scratch(mesh.device)
        self.fetches = Fetches(
            path,
            mesh,
            self.stacks,
            weighted=self.weighted,
            id_dtype=self.id_dtype,
            pool=self.pool,
            scratch=self._scratch,
            codecs=self.codecs,
        )
        self.look_ahead = LookAhead(path, mesh, self.stacks, self.fetches, self.pool)
        self._backward = [channel(f"gradients of {path}", Lane.GRADS) for _ in stacks]
        self._copied = [channel(f"hot gradients of {path}", Lane.GRADS) for _ in stacks]
        self._shared = [channel(f"host gradients of {path}", Lane.GRADS) for _ in stacks]
        self.riders: list[CopyRider] = []

    @property
    def device(self) -> torch.device:
        """Where this rank's rows are."""
        return self.mesh.device

    @property
    def relays(self) -> dict[int, Relay]:
        """By stack, where sums are made on the owners' host."""
        return self.fetches.relays

    def bring_together(self) -> None:
        """Make the rows of shard groups that step apart their mean.

        Collective:
            All ranks, between steps.
        """
        self.rest.finish()
        if self.replicas is not None and self.replicas.bring_together():
            self.drop_ahead()

    def __deepcopy__(self, memo: Any) -> "ShardedEngine":
        raise StepError(
            "a sharded model cannot be copied: its rows lie on many ranks; rm.unshard(model) "
            "gives a single-process copy on rank 0"
        )

    def __call__(self, features: Any) -> tuple[KeyedJaggedTensor, list[Piece]]:
        """The checked features and every reader's vectors.

        Raises:
            InputError: On all ranks, if the input of any rank is wrong.
            StepError: On all ranks, if a rank's last gradients have not been used or dropped, or
                not as on the other ranks.

        Collective:
            All ranks; in a training forward (gradients enabled, a trainable table) all again in
            backward.
        """
        phase, fetches, training = self.mesh.trace.phase, self.fetches, torch.is_grad_enabled()
        self._num_trained += training
        if training and self.look_ahead.begun:
            self._check_used()
        fetch = self.look_ahead.take(features, training=training)
        if fetch is None:
            if training:
                self.drop_ahead()  # its step may change rows that have been sent for others
            fetch = self._begin(features, is_last=self.mesh.is_last_batch)
            with phase("counts"):
                fetches.hear(fetch)
        try:
            self._check(fetch)
        except StepError:
            if fetch.under_way is not None:  # early rows may still be on the way to its buffers
                self.look_ahead.dropped.append(fetch)
            raise
        self.rest.finish(but_for=fetch.number)
        if not fetch.asked:
            with phase("ids"):
                fetches.make_buffers(fetch)
                fetches.await_vectors(fetch)
                messages = fetches.ask(fetch)
                with phase("lookup"):
                    self._read_here(fetch)
                fetches.hear_asked(fetch, messages)
        else:
            with phase("lookup"):
                self._read_here(fetch)
        if not fetch.is_answered:
            self._answer(fetch)
        with phase("vectors"):
            fetches.arrive(fetch)
        self.rest.go()  # not before: the link was for what the forward waits for
        with phase("pool"):
            return fetch.features, self._pool(fetch)

    def begin_ahead(self, features: Any, *, is_last: bool, owner: object) -> Fetch:
        """Begin the fetch of a batch before its forward; that will be given the same ``features``.

        Rows that unfinished steps change follow after these, so the forward reads what it would
        have read without it.

        Args:
            features: Of this rank.
            is_last: Whether it is this rank's last batch.
            owner: Tells loops apart.

        Collective:
            All ranks, for the same batches in one order.
        """
        ahead = self.look_ahead
        ahead.settle()
        while ahead.again:
            old = ahead.again.pop(0)
            with torch.set_grad_enabled(old.is_training):
                last = bool(old.status & LAST_BATCH)
                new = self._begin_ahead(old.source, is_last=last, owner=old.owner)
            if ahead.current is old:
                ahead.current = new
        return self._begin_ahead(features, is_last=is_last, owner=owner)

    def _begin_ahead(self, features: Any, *, is_last: bool, owner: object) -> Fetch:
        fetch = self._begin(features, is_last=is_last, is_ahead=True)
        fetch.owner, fetch.needs = owner, self.rest.following
        fetch.version = 0 if fetch.error is not None else version_of(features)
        unmarked = [ticket for ticket in self.tickets if not ticket.is_marked]
        self.look_ahead.begin(fetch, unmarked, self.replicas)
        return fetch

    def drop_ahead(self, *, owner: object = None) -> None:
        """Forget what was begun: rows have changed that no step changes.

        It is begun again, before other batches or by its forwards; but not what a loop began, the
        ``owner``, that has ended.

        Collective:
            All ranks, between steps.
        """
        ahead = self.look_ahead
        ended = [f for f in (*ahead.begun, *ahead.again) if f.owner is owner]
        ahead.drop(ahead.begun if owner is None else ended, for_good=owner is not None)

    def end_step(self) -> None:
        """Rows have their new values: send those that the next forward, begun ahead, waits for.

        Collective:
            All ranks, after the same tickets.
        """
        begun = self.look_ahead.begun
        opened = [t.number for t in self.tickets] + [f.number for f in begun]
        if self.rest.following is None:  # else what follows does so when it is done
            self.look_ahead.finish(min(opened, default=self._number + 1) - 1)
        if self.replicas is not None and self.replicas.is_under_way:
            before = [f for f in begun if f.num_syncs < self.replicas.num_syncs]
            if any(f.is_answered or not f.late_stacks for f in before):
                self.drop_ahead()  # a sync that was not foreseen, as of a step without a forward
            return
        if begun and not (self.tickets or self.relays or begun[0].is_answered):
            with self.mesh.trace.phase("await ahead"):
                begun[0].wait()
            if not begun[0].bad_ranks:
                self.rest.finish(but_for=begun[0].number)
                self._answer(begun[0])

    def _answer(self, fetch: Fetch) -> None:
        """Send and await all vectors that have not been sent ahead."""
        if fetch.under_way is not None:  # else they are awaited since its ids were sent
            self.fetches.await_vectors(fetch)
        self.fetches.fetch_relayed(fetch)
        with self.mesh.trace.phase("lookup"):
            self.fetches.answer(fetch)

    def _read_here(self, fetch: Fetch) -> None:
        if self.replicas is not None:
            self.replicas.finish()
        self.fetches.read_here(fetch)

    def _pool(self, fetch: Fetch) -> list[Piece]:
        """Every reader's vectors from those that arrived, under a new ticket if in training."""
        routes, buffers = fetch.routes, fetch.buffers
        vectors = [r.forward.of(buffer) for r, buffer in zip(routes, buffers, strict=True)]
        if fetch.status & TRAINING and any(s.layout.trainable for s in self.stacks):
            taken = {t.place for t in self.tickets}
            place = next(p for p in itertools.count() if p not in taken)
            ticket = Ticket(
                number=fetch.number,
                place=place,
                routes=routes,
                asked=fetch.asked,
                relayed=fetch.relayed,
                merged=fetch.merged,
                num_means=self.mesh.num_means,
                is_marked=fetch.under_way is not None,
            )
            self.tickets.append(ticket)
            vectors = Lookup.apply(self, ticket, self.anchor, *vectors)  # type: ignore[no-untyped-call]
        layouts = [stack.layout for stack in self.stacks]
        return join_columns(layouts, vectors, fetch.features, self.readers, pooled=self.pooled)

    def _begin(self, features: Any, *, is_last: bool, is_ahead: bool = False) -> Fetch:
        """Check and route a batch, and tell all ranks what they will be asked."""
        self._number += 1
        begun = self.look_ahead.begun
        taken = {f.place for f in (*begun, *self.look_ahead.dropped)}
        place = next(p for p in itertools.count() if p not in taken)
        self.fetches.end_sends(place)
        status = (LAST_BATCH if is_last else 0) | (TRAINING if torch.is_grad_enabled() else 0)
        status |= self.history.status
        with self.mesh.trace.phase("route"):
            checked, routes, error = self._prepare(features, is_ahead=is_ahead)
        late: frozenset[int] = frozenset()
        num_syncs = 0
        if is_ahead and self.replicas is not None:
            late = self.replicas.late_stacks(len(begun) + bool(self.tickets))
            num_syncs = self.replicas.num_syncs
        fetch = Fetch(
            number=self._number,
            place=place,
            source=features,
            features=checked,
            routes=routes,
            error=error,
            status=status | (BAD_INPUT if error else 0),
            is_ahead=is_ahead,
            late_stacks=late,
            num_syncs=num_syncs,
        )
        if error is not None:
            self.mesh.bulletin.post_input_error(self._key(fetch), error)
        self.fetches.tell(fetch)
        return fetch

    def _key(self, fetch: Fetch) -> str:
        return f"{self.path}/{fetch.number}"

    def _check_used(self) -> None:
        """Raise if gradients of an earlier backward wait for a step."""
        if not self.is_accumulating and any(t.is_sent for t in self.tickets):
            if self.on_all_sent is None:
                raise StepError(
                    "this model has no rm.Optimizer, so that no step changes its tables: make "
                    "opt = rm.Optimizer(model, dense=..., sparse=...), which steps its layers too"
                )
            raise StepError(
                "a training forward after backward: call opt.step() or opt.zero_grad() first, "
                "or run the backwards that belong together inside opt.accumulate()"
            )

    def _prepare(
        self, features: Any, *, is_ahead: bool
    ) -> tuple[KeyedJaggedTensor, list[Route], RowmeshError | None]:
        """Check and route the batch; an error goes into the status word, not up."""
        training = torch.is_grad_enabled() and any(s.layout.trainable for s in self.stacks)
        try:
            if training and not is_ahead:
                self._check_used()
            features = as_features(features)
            routes = []
            for stack in self.stacks:
                readers = [self.readers[r] for r in stack.layout.readers]
                bags = flatten(features, readers, pooled=self.pooled, weighted=self.weighted)
                check_ids(bags, readers, self.tables)
                routes.append(route_bags(stack.layout, bags, training=training))
            return features, routes, None
        except RowmeshError as error:
            nothing = KeyedJaggedTensor([], torch.empty(0), lengths=torch.empty(0), stride=0)
            return nothing, [], error

    def _check(self, fetch: Fetch) -> None:
        """Raise what all ranks raise, if a batch of any is wrong; take note of its counts."""
        counts = fetch.counts
        if bad := fetch.bad_ranks:
            if self.mesh.world == 1 and fetch.error is not None:
                raise fetch.error
            raise self.mesh.bulletin.input_error(self._key(fetch), bad[0])
        training = [rank for rank, row in enumerate(counts) if row[0] & TRAINING]
        if 0 < len(training) < len(counts):
            raise StepError(
                f"ranks {training} run a training forward of {self.path!r}, the others evaluate: "
                f"torch.no_grad() must be on for all ranks or for none"
            )
        self.history.check([row[0] for row in counts], self.mesh)
        samples = fetch.features.stride(), sum(row[1] for row in counts)
        self.mesh.saw_counts(
            samples=samples if self.takes_batch else None,
            all_last=fetch.is_last,
            num_forwards=self._num_trained,
        )

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> None:
        """Send the gradient of every vector to its owner, of every copied row to its sum owner.

        Collective:
            All ranks, once for every ticket.
        """
        ticket.check_backward(self.tickets, self.path)
        self.mesh.check_scaled(ticket.num_means)
        channels = zip(self._backward, self._copied, self._shared, strict=True)
        for i, (stack, grad, used) in enumerate(zip(self.stacks, grads, channels, strict=True)):
            if stack.layout.trainable:  # frozen tables send nothing back
                given = grad.contiguous(), used, stack.layout, self._scratch, self.codecs
                send_back(ticket, i, *given)
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
    found = [vars(m).get("engine") for m in model.modules()]
    return [e for e in found if isinstance(e, ShardedEngine)]
