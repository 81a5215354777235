"""The pipeline: batches begun before their forwards, so that their messages travel meanwhile."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, check_range
from rowmesh.features import another_like, empty_like
from rowmesh.placement import Plan
from rowmesh.placement.rules import MAX_DEPTH
from rowmesh.runtime.embeddings import ShardedEngine, sharded_engines
from rowmesh.runtime.fetch import LAST_BATCH, Fetch

__all__ = ["Pipeline"]

T = TypeVar("T")


class Pipeline:
    """Begins batches ahead of their forwards; the training loop stays what it is.

    ::

        pipeline = rm.Pipeline(model)
        for batch in pipeline.batches(loader):
            loss = mesh.mean(model(batch))
            loss.backward(); opt.step(); opt.zero_grad()

    Stages of a batch: routed and counted; its ids sent; rows that no unfinished step changes
    looked up and sent; all other rows, after the step before it. Depth d has d batches begun: the
    one in the loop and d - 1 to come. The bits of a run do not depend on d. Nothing is begun ahead
    for adopted embeddings, whose ids only the model knows.

    Args:
        model: After `rowmesh.shard`.
        depth: From 1 (nothing is begun ahead) to 8; None for the plan's.
        features: Gives the features of a batch that its collections will be called with, the very
            same object, or one for each by its path in the model; None finds the only one in it.

    Raises:
        InputError: If the model is not sharded, or the depth is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        depth: int | None = None,
        features: Callable[[Any], Any] | None = None,
    ) -> None:
        plan = getattr(model, "_rowmesh_plan", None)
        if not isinstance(plan, Plan):
            raise InputError("rm.Pipeline takes a sharded model: call rm.shard(model, plan, mesh)")
        self.depth = plan.depth if depth is None else depth
        if type(self.depth) is not int:
            raise InputError(f"depth must be a whole number from 1 to {MAX_DEPTH}, got {depth!r}")
        check_range("depth", self.depth, 1, MAX_DEPTH)
        if features is not None and not callable(features):
            raise InputError(f"features must be a function of a batch, got {features!r}")
        self._features = features or _features_of
        engines = sharded_engines(model)
        self._mesh: Mesh | None = engines[0].mesh if engines else None
        # What an adopted embedding looks up is known when the model calls it, not before.
        self._engines: list[ShardedEngine] = [e for e in engines if e.takes_batch]

    def batches(self, loader: Iterable[T], *, empty: T | None = None) -> Iterator[T]:
        """The batches of ``loader``, as `Mesh.batches` gives them, each begun ahead.

        Args:
            loader: This rank's batches.
            empty: As for `Mesh.batches`.

        Collective:
            All ranks iterate, and run a training forward of every collection with each batch or
            with none.
        """
        if self._mesh is None:
            return iter(loader)
        if self.depth == 1 or self._mesh.world == 1 or not self._engines:
            return self._mesh.batches(loader, empty=empty)
        return self._run(self._mesh, loader, empty)

    def _run(self, mesh: Mesh, loader: Iterable[T], empty: T | None) -> Iterator[T]:
        iterator = iter(loader)
        with mesh.trace.phase("data"):
            batch = next(iterator, None)
        if batch is None and empty is None:
            raise InputError(mesh.no_batch())
        last = batch
        begun: deque[tuple[T, bool, list[Fetch]]] = deque()
        owner = object()
        try:
            while True:
                while len(begun) < self.depth and not (begun and _ends(begun[-1][2])):
                    with mesh.trace.phase("data"):
                        following = next(iterator, None) if batch is not None else None
                    is_stand_in = batch is None
                    if batch is None:  # an object of its own each time: fetches go by it
                        batch = _nothing(last, empty)
                    fetches = self._begin(batch, following is None, owner)
                    begun.append((batch, is_stand_in, fetches))
                    last, batch = batch, following
                given, is_stand_in, fetches = begun.popleft()
                for engine, fetch in zip(self._engines, fetches, strict=True):
                    engine.look_ahead.give(fetch)
                is_last = bool(fetches[0].status & LAST_BATCH)
                with mesh.loops.at(is_last=is_last, is_stand_in=is_stand_in):
                    yield given
                if fetches[0].is_last:
                    return
        finally:
            for engine in self._engines:
                engine.drop_ahead(owner=owner)
                engine.rest.go()  # no forward may come that says so

    def _begin(self, batch: Any, is_last: bool, owner: object) -> list[Fetch]:
        found = self._features(batch)
        if isinstance(found, Mapping):
            missing = [engine.path for engine in self._engines if engine.path not in found]
            if missing:
                raise InputError(
                    f"features= gave those of {sorted(map(str, found))}, but the model also has "
                    f"collections {missing}: give each by its path"
                )
        return [
            engine.begin_ahead(
                found[engine.path] if isinstance(found, Mapping) else found,
                is_last=is_last,
                owner=owner,
            )
            for engine in self._engines
        ]


def _nothing(last: Any, empty: Any) -> Any:
    """What stands in for a batch, in an object of its own: ``empty``, or no samples."""
    if empty is None:
        return empty_like(last)
    try:
        return another_like(empty)
    except InputError:  # of a type that is not known
        return empty


def _ends(fetches: list[Fetch]) -> bool:
    """Whether no batch is begun behind this one: every rank's last, or its forward will raise."""
    for fetch in fetches:
        fetch.wait()
    return fetches[0].is_last or any(fetch.bad_ranks for fetch in fetches)


def _features_of(batch: Any) -> Any:
    """The one member of a batch that is keyed features, or the batch itself."""
    if _is_keyed(batch):
        return batch
    members: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        members = batch.values()
    elif isinstance(batch, list | tuple):
        members = batch
    elif dataclasses.is_dataclass(batch):
        members = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    elif hasattr(batch, "__dict__"):
        members = vars(batch).values()
    found = [member for member in members if _is_keyed(member)]
    if len(found) != 1:
        raise InputError(
            f"a batch of type {type(batch).__name__} holds {len(found)} keyed features: give "
            f"rm.Pipeline features=lambda batch: ..., which names those of its collections, or "
            f"depth=1 if the model makes them itself"
        )
    return found[0]


def _is_keyed(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("keys", "lengths", "stride"))
