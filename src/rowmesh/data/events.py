"""Events: which item of a sequence is to be predicted from the ones before it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rowmesh.data.sequence_files import Sequences
from rowmesh.features import Batch, KeyedJaggedTensor

__all__ = ["Events", "make_batch", "split_by_time", "split_last"]

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Events:
    """Items to be predicted: ``sequences.items[places[e]]``, taken by ``users[e]``.

    The first item of a user is never one, since nothing is known before it.
    """

    places: _Ids
    users: _Ids

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, chosen: _Ids | slice) -> "Events":
        return Events(places=self.places[chosen], users=self.users[chosen])


def split_last(sequences: Sequences, *, leave_out: int) -> tuple[Events, Events]:
    """Events to train on, and held-out ones: the last of each user, after ``leave_out`` of them.

    Of a user's L items the last ``leave_out`` are in neither; the one before them is held out.
    """
    users = sequences.users
    index = np.arange(len(users)) - sequences.offsets[users]
    last = np.diff(sequences.offsets)[users] - leave_out - 1
    known = index >= 1
    held, train = known & (index == last), known & (index < last)
    return _chosen(users, train), _chosen(users, held)


def split_by_time(sequences: Sequences, *, fraction: float) -> tuple[Events, Events]:
    """Events to train on, and held-out ones: the last ``fraction`` of all items by time.

    Both are in time order; items of one time are in the order of their users.
    """
    assert sequences.times is not None
    users = sequences.users
    order = np.argsort(sequences.times, kind="stable")
    cut = len(order) - int(fraction * len(order))
    is_first = order == sequences.offsets[users[order]]
    parts = (order[:cut][~is_first[:cut]], order[cut:][~is_first[cut:]])
    train, held = (Events(places=part, users=users[part]) for part in parts)
    return train, held


def _chosen(users: _Ids, mask: npt.NDArray[np.bool_]) -> Events:
    places = np.flatnonzero(mask)
    return Events(places=places, users=users[places])


def make_batch(
    sequences: Sequences, events: Events, negatives: _Ids, *, longest: int, with_users: bool
) -> Batch:
    """A sample for each event and one for each of its negatives, with the same history.

    Features are ``history``, ``candidate`` and, if asked for, ``user``. The samples of an event
    are neighbours, its own item first, with label 1; `Batch.groups` numbers the events.

    Args:
        sequences: That the events are of.
        events: E of them.
        negatives: ``[E, n]``.
        longest: Items of a history, at most: the latest.
        with_users: Whether the user is a feature.
    """
    each = 1 + negatives.shape[1]
    begins = np.maximum(sequences.offsets[events.users], events.places - longest)
    lengths = np.repeat(events.places - begins, each)
    shifts = np.repeat(begins, each) - (np.cumsum(lengths) - lengths)
    history = sequences.items[np.arange(int(lengths.sum())) + np.repeat(shifts, lengths)]
    candidates = np.column_stack((sequences.items[events.places], negatives)).reshape(-1)
    num_samples, ones = len(candidates), np.ones(len(candidates), dtype=np.int64)
    columns = {"history": (history, lengths), "candidate": (candidates, ones)}
    if with_users:
        columns["user"] = (np.repeat(events.users, each), ones)
    labels = np.zeros((len(events), each), dtype=np.float32)
    labels[:, 0] = 1.0
    return Batch(
        dense_features=torch.zeros((num_samples, 0)),
        sparse_features=KeyedJaggedTensor(
            list(columns),
            torch.from_numpy(np.concatenate([ids for ids, _ in columns.values()])),
            lengths=torch.from_numpy(np.concatenate([n for _, n in columns.values()])),
            stride=num_samples,
        ),
        labels=torch.from_numpy(labels.reshape(-1)),
        groups=torch.from_numpy(np.repeat(events.places, each)),
    )
