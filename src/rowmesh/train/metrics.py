"""Metrics of click predictions, streamed batch by batch and merged by adding their states."""

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.errors import InputError

__all__ = ["ClickMetrics", "exact_auc"]

_MAX_LOGIT: Final = 16.0
_COUNT, _CLICKS, _LOSS, _TRUE_COUNT, _TRUE_LOSS, _KL, _NAN, _HEADER = range(8)


class ClickMetrics:
    """AUC, logloss, normalised entropy and, where the truth is known, the distance from it.

    The state is a vector of sums: adding the states of two streams gives the state of both.
    Logits go into ``num_bins`` equal bins on [-16, 16], those beyond into the outermost; with
    P_b clicks and N_b non-clicks in bin b (P and N in all), pairs within a bin count half::

        auc = sum_b P_b (sum_{c<b} N_c + N_b / 2) / (P N)
        |auc - exact auc| <= sum_b P_b N_b / (2 P N)

    The bound is reported: below 1e-4 for normal logits of standard deviation 1 or more and the
    default bins.

    Args:
        num_bins: Bins of the histogram, from 1; the state has 2 * num_bins + 7 entries.
        device: Where the sums are kept; it must support float64.
    """

    def __init__(self, *, num_bins: int = 2**16, device: torch.device | str = "cpu") -> None:
        if num_bins < 1:
            raise InputError(f"num_bins is {num_bins}, but a histogram needs at least 1 bin")
        self._num_bins = num_bins
        self._sums = torch.zeros(_HEADER + 2 * num_bins, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(
        self, logits: Tensor, labels: Tensor, true_probabilities: Tensor | None = None
    ) -> None:
        """Add the predictions for a batch; an empty one changes nothing.

        For probabilities pass ``torch.logit(p)``: 0 and 1 become infinite logits, which are
        right at no loss and wrong at infinite loss. A nan among the logits makes logloss, ne, auc
        and mean_kl nan from then on.

        Args:
            logits: Any shape, before the sigmoid.
            labels: 0 or 1, as many as logits.
            true_probabilities: p* of planted data, as many as logits.

        Raises:
            InputError: If sizes differ, a label is not 0 or 1, or a p* is not in [0, 1].
        """
        z, y = self._as_sums(logits), self._as_sums(labels)
        true = None if true_probabilities is None else self._as_sums(true_probabilities)
        for name, given in (("labels", y), ("true_probabilities", true)):
            if given is not None and given.numel() != z.numel():
                raise InputError(f"{given.numel()} {name} were given for {z.numel()} logits")
        if not bool(((y == 0) | (y == 1)).all()):
            raise InputError("labels must be 0 or 1: soft labels have no AUC")
        if true is not None and not bool(((true >= 0) & (true <= 1)).all()):
            raise InputError("true_probabilities must be from 0 to 1: pass p*, not its logit")
        sums = self._sums
        sums[_COUNT] += z.numel()
        sums[_CLICKS] += y.sum()
        sums[_LOSS] += _cross_entropy(y, z).sum()
        sums[_NAN] += z.isnan().sum()
        if true is not None:
            best = torch.logit(true)
            sums[_TRUE_COUNT] += z.numel()
            sums[_TRUE_LOSS] += _cross_entropy(y, best).sum()
            sums[_KL] += (_cross_entropy(true, z) - _cross_entropy(true, best)).sum()
        place = (z.nan_to_num().clamp(-_MAX_LOGIT, _MAX_LOGIT) + _MAX_LOGIT) / (2 * _MAX_LOGIT)
        bins = (place * self._num_bins).long().clamp_(max=self._num_bins - 1)
        sums[_HEADER:].index_add_(0, bins + self._num_bins * y.long(), torch.ones_like(z))

    def state(self) -> Tensor:
        """A copy of the sums, 1-D and float64: add those of all ranks, then `from_state`."""
        return self._sums.clone()

    @staticmethod
    def from_state(state: Tensor) -> "ClickMetrics":
        """The metrics whose `state` this is; adding states adds the streams.

        Raises:
            InputError: If it is not a 1-D float64 tensor of a length that `state` gives.
        """
        num_bins, odd = divmod(state.numel() - _HEADER, 2)
        if state.dim() != 1 or state.dtype != torch.float64 or odd or num_bins < 1:
            raise InputError(
                f"a state is a 1-D float64 tensor of {_HEADER} + 2 * num_bins entries, got "
                f"{state.dtype} of shape {list(state.shape)}"
            )
        metrics = ClickMetrics(num_bins=num_bins, device=state.device)
        metrics._sums.copy_(state)
        return metrics

    def result(self) -> dict[str, float]:
        """The metrics of everything added so far.

        * ``count``, ``click_rate``: samples, and the mean label c.
        * ``nan_predictions``: samples whose logit is nan.
        * ``logloss``: mean of -y log p - (1 - y) log(1 - p), in nats.
        * ``ne``: logloss / H(c), with H(c) = -c log c - (1 - c) log(1 - c).
        * ``auc``, ``auc_error_bound``: as in the class docstring.
        * ``bayes_ne``: ne of p* on the same labels, the best to hope for.
        * ``mean_kl``: mean of KL(p* || p), in nats; its expectation is that of
          (ne - bayes_ne) H(c).

        nan: all but the counts without samples; ne, bayes_ne and auc with its bound if all labels
        are equal; bayes_ne and mean_kl unless p* was given with every sample.
        """
        head = self._sums[:_HEADER].tolist()
        count, clicks = head[_COUNT], head[_CLICKS]
        rate, loss = _ratio(clicks, count), _ratio(head[_LOSS], count)
        spread = 0.0 if clicks in (0.0, count) else _entropy(rate)
        known = count if head[_TRUE_COUNT] == count else 0.0
        misses, hits = self._sums[_HEADER:].view(2, -1)
        auc, bound = _auc_of_counts(misses, hits)
        if math.isnan(loss):  # its logit has no place in the histogram
            auc = bound = math.nan
        return {
            "count": count,
            "click_rate": rate,
            "nan_predictions": head[_NAN],
            "logloss": loss,
            "ne": _ratio(loss, spread),
            "auc": auc,
            "auc_error_bound": bound,
            "bayes_ne": _ratio(_ratio(head[_TRUE_LOSS], known), spread),
            "mean_kl": _ratio(head[_KL], known),
        }

    def _as_sums(self, values: Tensor) -> Tensor:
        return values.detach().reshape(-1).to(self._sums)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value:.6g}" for name, value in self.result().items())
        return f"ClickMetrics({shown})"


def exact_auc(scores: Tensor, labels: Tensor) -> float:
    """Probability that a click scores above a non-click, ties counting half; by sorting.

    Args:
        scores: Any increasing function of the prediction.
        labels: 0 or 1, as many as scores.

    Returns:
        The AUC; nan if all labels are equal or a score is nan.
    """
    if scores.numel() != labels.numel():
        raise InputError(f"{labels.numel()} labels were given for {scores.numel()} scores")
    if bool(scores.isnan().any()):
        return math.nan
    levels, level = torch.unique(scores.detach().reshape(-1), return_inverse=True)
    clicked = labels.detach().reshape(-1) == 1
    hits, misses = (
        torch.bincount(level[chosen], minlength=levels.numel()).double()
        for chosen in (clicked, ~clicked)
    )
    return _auc_of_counts(misses, hits)[0]


def _auc_of_counts(misses: Tensor, hits: Tensor) -> tuple[float, float]:
    """AUC of non-clicks and clicks by ascending score, and the share of pairs that tie, halved."""
    pairs = float(misses.sum() * hits.sum())
    ties = float((hits * misses).sum()) / 2
    below = float((hits * (misses.cumsum(0) - misses)).sum())
    return _ratio(below + ties, pairs), _ratio(ties, pairs)


def _cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """-t log p - (1 - t) log(1 - p), where 0 log 0 is 0 so that infinite logits are fine."""
    click = torch.where(target > 0, -target * F.logsigmoid(logits), 0.0)
    other = torch.where(target < 1, -(1 - target) * F.logsigmoid(-logits), 0.0)
    return click + other


def _entropy(rate: float) -> float:
    return -rate * math.log(rate) - (1 - rate) * math.log1p(-rate)


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan
