"""Next-item prediction on files of sequences, as batches for any number of ranks."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from rowmesh.data.events import Events, make_batch, split_by_time, split_last
from rowmesh.data.negatives import Negatives
from rowmesh.data.sequence_files import Sequences, read_lines, read_ratings
from rowmesh.errors import InputError, check_range, did_you_mean
from rowmesh.features import Batch
from rowmesh.tables import EmbeddingConfig

__all__ = ["ItemSequences"]

_Format = Literal["lines", "ratings"]
_HoldOut = Literal["last", "time"]
_Order = Literal["shuffled", "time"]
_READERS: Final = {"lines": read_lines, "ratings": read_ratings}
_SHUFFLE: Final = 13  # a word of the generator's entropy that is this file's own
_HELD_OUT_STREAM: Final = 2**64 - 1  # of no (seed, epoch): an epoch is below 2^32 - 1


class _Content(NamedTuple):
    sequences: Sequences
    negatives: Negatives
    train: Events
    held: Events


class _Cache:
    """The file, read on first use; not pickled: every rank reads it."""

    def __init__(self) -> None:
        self.content: _Content | None = None

    def __reduce__(self) -> tuple[type["_Cache"], tuple[()]]:
        return _Cache, ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemSequences:
    """A `Source` of items that users took, each to be told from sampled negatives.

    A sample is a history, the ``longest`` latest items before an event, and a candidate: the item
    of the event (label 1), or one of ``negatives`` items that the user never takes, neither before
    nor after (label 0), drawn anew every epoch: a function of (seed, epoch, event). An epoch has
    every event to train on once, in an order of (seed, epoch) or of time; step s takes events
    ``[s P, (s + 1) P)`` of it, and rank r of W those of ``[r E // W, (r + 1) E // W)`` of these E.
    So a step has the same samples, in the same order over the ranks, for every world.

    Held-out events have ``held_out_negatives`` negatives, the same for every seed, and are groups
    to be ranked.

    Args:
        path: A file.
        format: ``lines``, a user a line: ``user item item ...``; or ``ratings``, in any order:
            ``user::item::rating::time``.
        longest: Items of a history, at most.
        positives: P, events a step, of all ranks together: P (1 + negatives) samples.
        negatives: For each event to train on.
        hold_out: ``last``: the last item of each user; ``time``: the last items of all.
        held_out_fraction: Of the items, with ``time``.
        leave_out: So many items at the end of each user are in neither part, with ``last``: 1
            holds out the item before the last, to choose settings by.
        held_out_negatives: For each held-out event.
        order: Of events to train on: ``shuffled`` or, as they happened, ``time``.
        with_users: Whether the user is a feature too, with a table of its own.
        seed: Below 2^32; changes order and negatives of training and nothing else.

    Raises:
        InputError: If an argument is out of range, a word is unknown, or time is asked of lines.
    """

    path: str
    format: _Format = "lines"
    longest: int = 50
    positives: int = 256
    negatives: int = 4
    hold_out: _HoldOut = "last"
    held_out_fraction: float = 0.1
    leave_out: int = 0
    held_out_negatives: int = 99
    order: _Order = "shuffled"
    with_users: bool = False
    seed: int = 1
    _cache: _Cache = field(default_factory=_Cache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, words in (("format", _Format), ("hold_out", _HoldOut), ("order", _Order)):
            word, known = getattr(self, name), get_args(words)
            if word not in known:
                raise InputError(f"unknown {name} {word!r}{did_you_mean(str(word), known)}")
            if word == "time" and self.format == "lines":
                raise InputError(
                    f"{name} is 'time', but files of format 'lines' do not say when: give a file "
                    f"of ratings with format 'ratings', or {name} {known[0]!r}"
                )
        for name, low in (("longest", 1), ("positives", 1), ("negatives", 1), ("leave_out", 0)):
            check_range(name, getattr(self, name), low, 2**31 - 1)
        check_range("held_out_negatives", self.held_out_negatives, 1, 2**31 - 1)
        check_range("held_out_fraction", self.held_out_fraction, 0, 1)
        check_range("seed", self.seed, 0, 2**32 - 1)
        if self.leave_out and self.hold_out == "time":
            raise InputError(
                f"leave_out is {self.leave_out}, which goes with hold_out 'last': leave it at 0"
            )

    @property
    def num_dense(self) -> int:
        """None."""
        return 0

    @property
    def steps_per_epoch(self) -> int:
        """``ceil(events to train on / positives)``; reads the file on first use."""
        return -(-len(self._content().train) // self.positives)

    @property
    def num_items(self) -> int:
        """Distinct items of the file."""
        return self._content().sequences.num_items

    @property
    def mean_requests(self) -> float:
        """Mean number of items of a sample to train on: of its history, and one candidate."""
        content = self._content()
        before = content.train.places - content.sequences.offsets[content.train.users]
        return 1.0 + float(np.minimum(before, self.longest).mean())

    def tables(self, embedding_dim: int) -> list[EmbeddingConfig]:
        """``item``, read by history and candidate; ``user`` if it is a feature."""
        sequences = self._content().sequences
        rows = {"item": (sequences.num_items, ["history", "candidate"])}
        if self.with_users:
            rows["user"] = (sequences.num_users, ["user"])
        return [
            EmbeddingConfig(
                name=name, num_embeddings=n, embedding_dim=embedding_dim, feature_names=features
            )
            for name, (n, features) in rows.items()
        ]

    def batches(self, *, rank: int, world: int, start: int = 0) -> Iterator[Batch]:
        """This rank's batches from global step ``start`` on; endless.

        The last step of an epoch has the events that are left, on some ranks maybe none.

        Raises:
            InputError: If start is negative, there is no such rank, or the file is wrong.
        """
        check_range("start", start, 0)
        _check_rank(rank, world)
        return self._train(rank, world, start)

    def held_out(self, *, rank: int, world: int) -> Iterator[Batch]:
        """This rank's batches of held-out events, with about as many samples as in training.

        Events are in a random order, the same for every seed, so that the first batches are a
        fair part of all. All ranks get the same number of batches, the last ones maybe empty.
        """
        _check_rank(rank, world)
        events = self._content().held
        size = max(1, self.positives * (1 + self.negatives) // (1 + self.held_out_negatives))
        for first in range(0, len(events), size):
            mine = _share(events[first : first + size], rank, world)
            yield self._batch(mine, self.held_out_negatives, stream=_HELD_OUT_STREAM)

    def _train(self, rank: int, world: int, start: int) -> Iterator[Batch]:
        begun, first = divmod(start, self.steps_per_epoch)
        for epoch in itertools.count(begun):
            events, stream = self._epoch(epoch), self.seed << 32 | epoch
            for begin in range(first * self.positives, len(events), self.positives):
                mine = _share(events[begin : begin + self.positives], rank, world)
                yield self._batch(mine, self.negatives, stream=stream)
            first = 0

    def _epoch(self, epoch: int) -> Events:
        events = self._content().train
        if self.order == "time":
            return events
        rng = np.random.default_rng([_SHUFFLE, self.seed, epoch])
        return events[rng.permutation(len(events))]

    def _batch(self, events: Events, negatives: int, *, stream: int) -> Batch:
        content = self._content()
        return make_batch(
            content.sequences,
            events,
            content.negatives.draw(events.users, events.places, negatives, stream=stream),
            longest=self.longest,
            with_users=self.with_users,
        )

    def _content(self) -> _Content:
        if self._cache.content is None:
            sequences = _READERS[self.format](self.path)
            if self.hold_out == "time":
                train, held = split_by_time(sequences, fraction=self.held_out_fraction)
            else:
                train, held = split_last(sequences, leave_out=self.leave_out)
            if not len(train):
                raise InputError(
                    f"{self.path} has no item to train on: all are the first of their user, or "
                    f"held out"
                )
            # At random: the first users of a file need not be like the others, and the first
            # batches are what `training.eval_batches` takes.
            held = held[np.random.default_rng([_SHUFFLE]).permutation(len(held))]
            self._cache.content = _Content(sequences, Negatives(sequences), train, held)
        return self._cache.content


def _share(events: Events, rank: int, world: int) -> Events:
    return events[rank * len(events) // world : (rank + 1) * len(events) // world]


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise InputError(f"rank {rank} is not one of a world of {world}: ranks go from 0")
