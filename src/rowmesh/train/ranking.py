"""HR@10 and NDCG@10: how high the one right candidate of a group is ranked among the others."""

from typing import Final

import torch
from torch import Tensor

from rowmesh.errors import InputError

__all__ = ["RankingMetrics", "check_groups"]

_TOP: Final = 10
_GROUPS, _HITS, _GAIN, _SIZE = range(4)


class RankingMetrics:
    """Hit rate and normalised discounted cumulative gain at 10, over groups of candidates.

    A group has one positive. Its place r is 1 + the number of the group's negatives that do not
    score below it: ties, and nan, count against the positive::

        hr_at_10   = mean over groups of [r <= 10]
        ndcg_at_10 = mean over groups of [r <= 10] / log2(r + 1)

    The state is a vector of sums over groups: adding those of two streams gives that of both, so
    the metrics of many ranks are exact as long as a group is whole on one.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(_SIZE, dtype=torch.float64)

    @torch.no_grad()
    def update(self, scores: Tensor, labels: Tensor, groups: Tensor) -> None:
        """Add the whole groups of a batch; an empty one changes nothing.

        Args:
            scores: ``[B]``, any increasing function of the prediction.
            labels: ``[B]``, 0 or 1.
            groups: ``[B]`` integers; the samples of one number are a group, in any order.

        Raises:
            InputError: If a group has not exactly one label 1.
        """
        check_groups(labels, groups)
        places = _places(scores.detach(), labels == 1, groups)
        is_hit = places <= _TOP
        gains = torch.where(is_hit, 1.0 / torch.log2(places.double() + 1.0), 0.0)
        sums = [float(len(places)), float(is_hit.sum()), float(gains.sum())]
        self._sums += torch.tensor(sums, dtype=torch.float64)

    def state(self) -> Tensor:
        """A copy of the sums, ``[3]`` float64: add those of all ranks, then `from_state`."""
        return self._sums.clone()

    @staticmethod
    def from_state(state: Tensor) -> "RankingMetrics":
        """The metrics whose `state` this is."""
        metrics = RankingMetrics()
        metrics._sums.copy_(state)
        return metrics

    def result(self) -> dict[str, float]:
        """``groups``, ``hr_at_10`` and ``ndcg_at_10``; nothing without a group."""
        groups, hits, gain = self._sums.tolist()
        if not groups:
            return {}
        return {"groups": groups, "hr_at_10": hits / groups, "ndcg_at_10": gain / groups}


def check_groups(labels: Tensor, groups: Tensor) -> None:
    """Raise `InputError` unless there is a group for each label, with exactly one label 1 in it."""
    if groups.shape != labels.shape:
        raise InputError(f"groups must have shape {list(labels.shape)}, got {list(groups.shape)}")
    names, group = torch.unique(groups, return_inverse=True)
    count = torch.bincount(group[labels == 1], minlength=len(names))
    if bool((count != 1).any()):
        wrong = int((count != 1).nonzero()[0])
        raise InputError(
            f"group {int(names[wrong])} has {int(count[wrong])} samples of label 1 in this batch, "
            f"but must have exactly one: keep a group whole in one batch"
        )


def _places(scores: Tensor, is_positive: Tensor, groups: Tensor) -> Tensor:
    """The place of each group's positive, groups in ascending order."""
    names, group = torch.unique(groups, return_inverse=True)
    best = scores.new_empty(len(names))
    best[group[is_positive]] = scores[is_positive]
    # A positive that is nan is above nobody; itself it does not count.
    is_ahead = ~is_positive & ~(scores < best[group])
    return 1 + torch.bincount(group[is_ahead], minlength=len(names))
