"""TorchRec's own models after `rm.shard`, beside their training in float64 without rowmesh.

A program for TorchRec's environment: ``torchrun --nproc-per-node N torchrec_models.py``. The
reference is the original model, in float64, on the whole batch in one process: its code is not
touched (but ``Tensor.float`` keeps float64), tables are stepped by plain torch. Rank 0 prints a
JSON line: for every model and plan the largest difference of weights and losses, and what
`rm.verify` said.
"""

import copy
import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.models.deepfm import SimpleDeepFMNN, SimpleDeepFMNNWrapper
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain, DLRMWrapper

import rowmesh as rm

STEPS, LR, DIM, DENSE = 5, 0.1, 8, 4
EPS = 1e-3  # AdaGrad's; a smaller one makes steps of the rounding errors of gradients near zero
FEATURES = ["user", "item", "seen"]
Loss = Callable[[nn.Module, Any], Tensor]


def bags(**more: Any) -> EmbeddingBagCollection:
    mean = PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(name="u", num_embeddings=23, embedding_dim=DIM, feature_names=["user"]),
        EmbeddingBagConfig(
            name="i", num_embeddings=31, embedding_dim=DIM, feature_names=["item", "seen"]
        ),
    ]
    if more.pop("mean", False):
        tables[1].pooling = mean
    return EmbeddingBagCollection(tables=tables, **more)


def batch_at(step: int, rank: int, *, at_least: int) -> Batch:
    """Ranks have different numbers of samples, one of them none where a model can do that."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = max(2 + (rank + step) % 3, at_least) if (rank, step) != (1, 2) else at_least
    lengths = torch.randint(0, 4, (3 * size,), generator=generator)
    return Batch(
        dense_features=torch.randn(size, DENSE, generator=generator),
        sparse_features=KeyedJaggedTensor.from_lengths_sync(
            keys=FEATURES,
            values=torch.randint(0, 23, (int(lengths.sum()),), generator=generator),
            lengths=lengths,
            weights=torch.rand(int(lengths.sum()), generator=generator),
        ),
        labels=torch.randint(0, 2, (size,), generator=generator),
    )


def joined(batches: list[Batch]) -> Batch:
    """One batch of all their samples, in float64."""
    batches = [b for b in batches if len(b.labels)]  # TorchRec cannot split features of none
    parts = [b.sparse_features.to_dict() for b in batches]
    of = [[p[f] for p in parts] for f in FEATURES]
    return Batch(
        dense_features=torch.cat([b.dense_features for b in batches]).double(),
        sparse_features=KeyedJaggedTensor(
            keys=FEATURES,
            values=torch.cat([j.values() for js in of for j in js]),
            lengths=torch.cat([j.lengths() for js in of for j in js]),
            weights=torch.cat([j.weights() for js in of for j in js]).double(),
        ),
        labels=torch.cat([b.labels for b in batches]),
    )


def as_input(batch: Batch) -> ModelInput:
    """The same as TorchRec's dataclass, which has its features under another name."""
    return ModelInput(
        float_features=batch.dense_features,
        idlist_features=batch.sparse_features,
        idscore_features=None,
        label=batch.labels.to(batch.dense_features.dtype),
    )


class OwnArch(nn.Module):
    """Sequences with their ids, weighted bags reached by two paths, means, and hooks."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name="s", num_embeddings=29, embedding_dim=DIM, feature_names=["seen", "item"]
            ),
            EmbeddingConfig(name="t", num_embeddings=37, embedding_dim=DIM, feature_names=["user"]),
        ]
        self.sequences = EmbeddingCollection(tables=tables, need_indices=True)
        self.weighted = bags(is_weighted=True)
        self.first = nn.ModuleDict({"same": self.weighted})
        for config, name in zip(self.weighted.embedding_bag_configs(), ("wu", "wi"), strict=True):
            self.weighted.embedding_bags[name] = self.weighted.embedding_bags[config.name]
            del self.weighted.embedding_bags[config.name]
            config.name = name
        self.means = bags(mean=True)
        self.means.register_forward_pre_hook(lambda module, args: args)
        self.means.register_forward_hook(lambda module, args, found: found.values() * 2.0)
        self.over = nn.Linear(9 * DIM, 1)

    def forward(self, batch: Batch) -> Tensor:
        parts = [self.weighted(batch.sparse_features).values(), self.means(batch.sparse_features)]
        for found in self.sequences(batch.sparse_features).values():
            size = len(batch.labels)
            ends = found.lengths().cumsum(0)
            sample = torch.searchsorted(ends, torch.arange(len(found.values())), right=True)
            scaled = found.values() / (1.0 + found.weights_or_none().unsqueeze(1))
            parts.append(scaled.new_zeros(size, DIM).index_add(0, sample, scaled))
        logits = self.over(torch.tanh(torch.cat(parts, dim=1))).squeeze(1)
        labels = batch.labels.to(logits.dtype)
        return binary_cross_entropy_with_logits(logits, labels, reduction="none")


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Loss
    is_mean: bool = False
    at_least: int = 0  # samples of a rank


def of_logits(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.dense_features, batch.sparse_features).squeeze(1)
    labels = batch.labels.to(logits.dtype)
    return binary_cross_entropy_with_logits(logits, labels, reduction="none")


def of_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(batch.dense_features, batch.sparse_features).squeeze(1)
    return (found - batch.labels).square()  # a logarithm of saturated ones is lost in float32


def of_input(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = model(as_input(batch))[0]
    return found


def dlrm(kind: type[DLRM] = DLRM, **more: Any) -> DLRM:
    sizes: dict[str, Any] = {"dense_arch_layer_sizes": [6, DIM], "over_arch_layer_sizes": [5, 1]}
    return kind(embedding_bag_collection=bags(), dense_in_features=DENSE, **sizes, **more)


def deepfm(kind: type[SimpleDeepFMNN]) -> SimpleDeepFMNN:
    return kind(
        num_dense_features=DENSE,
        embedding_bag_collection=bags(),
        hidden_layer_size=6,
        deep_fm_dimension=5,
    )


PROJECTED = {
    "interaction_branch1_layer_sizes": [2 * DIM],
    "interaction_branch2_layer_sizes": [2 * DIM],
}
CASES = {
    "DLRM": Case(dlrm, of_logits),
    "DLRM_DCN": Case(
        functools.partial(dlrm, DLRM_DCN, dcn_num_layers=2, dcn_low_rank_dim=3),
        of_logits,
        at_least=1,
    ),
    "DLRM_Projection": Case(
        functools.partial(dlrm, DLRM_Projection, **PROJECTED), of_logits, at_least=1
    ),
    "SimpleDeepFMNN": Case(functools.partial(deepfm, SimpleDeepFMNN), of_probabilities, at_least=1),
    "DLRMTrain": Case(
        lambda: DLRMTrain(dlrm()), lambda model, batch: model(batch)[0], is_mean=True
    ),
    "DLRMWrapper": Case(functools.partial(dlrm, DLRMWrapper), of_input, is_mean=True, at_least=2),
    "SimpleDeepFMNNWrapper": Case(
        functools.partial(deepfm, SimpleDeepFMNNWrapper), of_input, is_mean=True, at_least=2
    ),
    "OwnArch": Case(OwnArch, lambda model, batch: model(batch)),
}
PLANS: dict[str, dict[str, Any]] = {
    "rows": {"split": "row_wise"},
    "columns": {"split": "column_wise"},
    "auto": {},
}


@contextmanager
def float64_kept() -> Iterator[None]:
    """``.float()``, which TorchRec's lookups and losses say, keeps float64."""
    single = Tensor.float
    Tensor.float = lambda self: self.double()  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.float = single  # type: ignore[method-assign]


def reference(case: Case, world: int, rule: str) -> tuple[dict[str, Tensor], list[float]]:
    """State and losses of the original, on the batches of all ranks as one, without rowmesh."""
    torch.manual_seed(7)
    model = case.make().double()
    tables = [p for name, p in model.named_parameters() if ".embedding" in f".{name}"]
    ids = {id(p) for p in tables}
    others = [p for p in model.parameters() if id(p) not in ids]
    dense = torch.optim.Adagrad(others, lr=LR, eps=EPS)
    moments = [torch.zeros(len(p), dtype=torch.float64) for p in tables]
    losses = []
    for step in range(STEPS):
        batch = joined([batch_at(step, r, at_least=case.at_least) for r in range(world)])
        with float64_kept():
            loss = case.loss(model, batch).mean()
        model.zero_grad()
        loss.backward()
        dense.step()
        with torch.no_grad():
            for weight, moment in zip(tables, moments, strict=True):
                assert weight.grad is not None
                if rule == "sgd":
                    weight -= LR * weight.grad
                else:
                    moment += weight.grad.square().mean(1)
                    weight -= LR * weight.grad / (moment.sqrt() + EPS).unsqueeze(1)
        losses.append(float(loss))
    return model.state_dict(), losses


def sharded(case: Case, mesh: rm.Mesh, words: dict[str, Any], rule: Any) -> dict[str, Any]:
    """The same by rowmesh on the ranks; differences on rank 0."""
    torch.manual_seed(7)
    model = case.make()
    before = copy.deepcopy(model.state_dict())
    plan = rm.make_plan(model, mesh.topology, batch_size=4, **words)
    assert rm.shard(model, plan, mesh) is model
    start = rm.full_state_dict(model)
    assert mesh.rank or all(torch.equal(start[k], v) for k, v in before.items()), "values are kept"
    dense = functools.partial(torch.optim.Adagrad, lr=LR, eps=EPS)
    optimizer = rm.Optimizer(model, dense=dense, sparse=rule)
    mine = [batch_at(step, mesh.rank, at_least=case.at_least) for step in range(STEPS)]
    losses = []
    pipeline = rm.Pipeline(model, depth=1 if words else 2)
    for batch in pipeline.batches(mine):
        share = mesh.mean(case.loss(model, batch), is_mean=case.is_mean)
        share.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mesh.total(share.detach().double())))
    found = rm.full_state_dict(model)

    def make() -> nn.Module:
        torch.manual_seed(7)
        return case.make()

    said = rm.verify(
        make, plan, mesh, mine, dense=dense, sparse=rule, loss=case.loss, is_mean=case.is_mean
    )
    if mesh.rank:
        return {}
    name = "sgd" if isinstance(rule, rm.SGD) else "adagrad"
    expected, means = reference(case, mesh.world, name)
    assert set(found) == set(expected)
    weights = max(float((found[k].double() - v.double()).abs().max()) for k, v in expected.items())
    lost = max(abs(a - b) for a, b in zip(losses, means, strict=True))
    moved = max(float((before[k].double() - v.double()).abs().max()) for k, v in expected.items())
    return {
        "weights": weights,
        "losses": lost,
        "moved": moved,
        "verified": said.is_equal,
        "said": str(said),
    }


def main() -> None:
    torch.set_num_threads(1)
    mesh = rm.init_mesh(timeout_s=60.0, device="cpu")
    found = {}
    chosen = sys.argv[1:] or list(CASES)
    for name in chosen:
        for words in PLANS:
            rule = rm.SGD(lr=LR) if words == "columns" else rm.RowwiseAdagrad(lr=LR, eps=EPS)
            found[f"{name} {words}"] = sharded(CASES[name], mesh, PLANS[words], rule)
    if mesh.rank == 0:
        print(json.dumps(found))
    mesh.close()


if __name__ == "__main__":
    main()
