"""DIN (https://arxiv.org/abs/1706.06978): a history, read with an eye to one candidate."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# torch.compiler.disable, not imported before it is needed: of what has sizes that follow from ids.
from torch._compile import _disable_dynamo as left_out_of_graphs
from torch.nn import functional as F

from rowmesh.errors import InputError, check_range
from rowmesh.features import Batch, JaggedTensor, KeyedJaggedTensor
from rowmesh.models.layers import (
    MLP,
    check_layer_sizes,
    ordered_values,
    pooled_names,
    table_configs,
)
from rowmesh.tables import TableConfig, configs_of

__all__ = ["DIN"]


class DIN(nn.Module):
    """Target attention over the items of a history, and an MLP to one logit.

    ::

        s_h      = attention_arch([v_h, v_c, v_h * v_c])              for every item h of a history
        interest = sum_h softmax_h(s) v_h                             [B, D], zero without history
        logits   = over_arch([interest, v_c, interest * v_c, others, dense_features])          [B]

    v_h and v_c, of the history's items and the candidate, are rows of one table. The paper's unit
    also takes v_h - v_c, which a linear layer makes itself, and leaves out the softmax. ``others``
    are the mean vectors of further features of the collection, zero where a sample has no id, and
    the vectors of the bag collection.

    Scores are computed for the items there are, not for padding; only the weighted sum is over
    ``[B, longest of the batch, D]``, where padding has weight zero. So a sample's logit depends on
    no other sample, but for the order of its sums.

    Args:
        embedding_collection: Sequence tables: any module with ``embedding_configs()`` that maps a
            KeyedJaggedTensor to a JaggedTensor for every feature.
        dense_in_features: Columns of the dense input, from 0.
        attention_layer_sizes: Of the MLP that scores an item; the last is 1.
        over_arch_layer_sizes: Of the MLP after the attention; the last is 1.
        history: The feature with the items of a history.
        candidate: The feature with the one item that a sample asks about.
        embedding_bag_collection: Tables of pooled features, if any.
        dense_device: Where the dense parameters are made.

    Raises:
        InputError: If a size does not fit, or the two features are not of one table.
    """

    def __init__(
        self,
        embedding_collection: nn.Module,
        dense_in_features: int = 0,
        attention_layer_sizes: Sequence[int] = (32, 1),
        over_arch_layer_sizes: Sequence[int] = (64, 32, 1),
        *,
        history: str = "history",
        candidate: str = "candidate",
        embedding_bag_collection: nn.Module | None = None,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        configs = _sequence_configs(embedding_collection)
        dim = _shared_table(configs, history, candidate).embedding_dim
        check_range("dense_in_features", dense_in_features, 0)
        for argument, sizes, why in (
            ("attention_layer_sizes", attention_layer_sizes, "the score of an item"),
            ("over_arch_layer_sizes", over_arch_layer_sizes, "the logit of a sample"),
        ):
            check_layer_sizes(argument, sizes, last=1, why=why)
        bags = [] if embedding_bag_collection is None else table_configs(embedding_bag_collection)
        self.embedding_collection = embedding_collection
        self.embedding_bag_collection = embedding_bag_collection
        self.history, self.candidate = history, candidate
        self.others = [n for n in pooled_names(configs) if n not in (history, candidate)]
        self.bag_names = pooled_names(bags)
        width = sum(c.embedding_dim * len(c.feature_names) for c in (*configs, *bags))
        width += dim + dense_in_features  # history and candidate are in the sum; their product
        self.attention_arch = MLP(
            3 * dim, attention_layer_sizes, relu_last=False, device=dense_device
        )
        self.over_arch = MLP(width, over_arch_layer_sizes, relu_last=False, device=dense_device)

    def forward(self, batch: Batch) -> Tensor:
        """``[B]``: the binary cross-entropy of each sample, neither summed nor averaged."""
        logits = self.logits(batch.dense_features, batch.sparse_features)
        labels = batch.labels.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def logits(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``[B]``: log-odds that the label is 1.

        Raises:
            InputError: If a sample has no candidate, or several.
        """
        # The lookup comes first: it is there that all ranks hear of bad features.
        found = self.embedding_collection(sparse_features)
        pooled = []
        if self.embedding_bag_collection is not None:
            bags = self.embedding_bag_collection(sparse_features)
            pooled.append(ordered_values(bags, self.bag_names))
        target = _only(found[self.candidate], self.candidate)
        interest = self.interest(found[self.history], target)
        others = [_mean(found[name]) for name in self.others]
        x = torch.cat((interest, target, interest * target, *others, *pooled, dense_features), 1)
        logits: Tensor = self.over_arch(x).squeeze(1)
        return logits

    def interest(self, history: JaggedTensor, target: Tensor) -> Tensor:
        """``[B, D]``: the history's vectors, weighted by how they go with ``target`` ``[B, D]``."""
        items, lengths = history.values(), history.lengths()
        beside = _for_each(target, lengths)
        scores = self.attention_arch(torch.cat((items, beside, items * beside), 1)).squeeze(1)
        padded, vectors = _padded(scores, items, lengths)
        return torch.bmm(padded.softmax(1).unsqueeze(1), vectors).squeeze(1)


@left_out_of_graphs
def _for_each(target: Tensor, lengths: Tensor) -> Tensor:
    """A sample's vector beside each of its items."""
    samples = torch.arange(len(target), device=target.device)
    return target.index_select(0, torch.repeat_interleave(samples, lengths))


@left_out_of_graphs
def _padded(scores: Tensor, items: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and vectors of all samples, as many for each as the longest history has."""
    longest = _longest(lengths)
    # Not minus infinity: the softmax of an empty history would be nan, times zero.
    lowest = torch.finfo(scores.dtype).min
    padded = JaggedTensor(scores, lengths=lengths).to_padded_dense(longest, lowest)
    return padded, JaggedTensor(items, lengths=lengths).to_padded_dense(longest)


def _longest(lengths: Tensor) -> int:
    """At least 1, so that there is a column to sum over."""
    return max(1, int(lengths.max())) if len(lengths) else 1


@left_out_of_graphs
def _mean(jagged: JaggedTensor) -> Tensor:
    lengths = jagged.lengths()
    sums = jagged.to_padded_dense(_longest(lengths)).sum(1)
    return sums / lengths.clamp(min=1).unsqueeze(1).to(sums.dtype)


@left_out_of_graphs
def _only(jagged: JaggedTensor, feature: str) -> Tensor:
    """The one vector of each sample."""
    wrong = jagged.lengths() != 1
    if bool(wrong.any()):
        sample = int(wrong.nonzero()[0])
        raise InputError(
            f"feature {feature!r}, sample {sample} has {int(jagged.lengths()[sample])} ids, but a "
            f"candidate is exactly one: give one sample for each candidate"
        )
    return jagged.values()


def _sequence_configs(collection: nn.Module) -> list[TableConfig]:
    if not callable(getattr(collection, "embedding_configs", None)):
        raise InputError(
            f"{type(collection).__name__} has no embedding_configs(): pass an EmbeddingCollection"
        )
    return configs_of(collection)


def _shared_table(configs: Sequence[TableConfig], history: str, candidate: str) -> TableConfig:
    readers = {
        feature: [c.name for c in configs if feature in c.feature_names]
        for feature in (history, candidate)
    }
    tables = [c for c in configs if {history, candidate} <= set(c.feature_names)]
    if history == candidate or len(tables) != 1 or any(len(r) != 1 for r in readers.values()):
        raise InputError(
            f"DIN needs two features, {history!r} and {candidate!r}, of one table, but the tables "
            f"that read them are {readers}: name both in the feature_names of one EmbeddingConfig"
        )
    return tables[0]
