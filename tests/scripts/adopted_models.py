"""Public single-device models after `rm.adopt`, on the ranks of torchrun, against themselves.

Every recipe builds a model of torch-rechub, deepctr-torch or recbole as its library does. The
reference is that model in float64, one process, the whole global batch, one torch optimiser for
all parameters. What differs by nature is taken out: dropout is 0, BatchNorm is in evaluation mode
(ranks would take the statistics of their own samples), and all parameters begin at random, because
some libraries begin so near zero that nothing would be learnt in five steps.

Rank 0 prints a JSON line for each model: its name, how far losses and weights are from the
reference's, and what `rm.verify` said.
"""

import copy
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import requests
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rowmesh as rm


def _offline(*_: Any, **__: Any) -> Any:
    raise requests.ConnectionError("this test fetches nothing")


requests.get = _offline  # deepctr_torch asks for its newest version as it is imported

Batch = dict[str, Tensor]
Draw = Callable[[int], Batch]
Recipe = tuple[str, nn.Module, Callable[[nn.Module, Batch], Tensor], Draw]
STEPS, DIM, ITEMS, LENGTH = 5, 8, 30, 6
PARTS = {1: [11], 2: [6, 5], 4: [3, 2, 4, 2]}
SPLITS = ["row_wise", "table_wise", "auto", "column_wise"]
RULES: dict[str, tuple[Any, Any]] = {
    "sgd": (functools.partial(torch.optim.SGD, lr=0.1), rm.SGD(lr=0.1)),
    "adagrad": (
        functools.partial(torch.optim.Adagrad, lr=0.02, eps=1e-2),
        rm.Adagrad(lr=0.02, eps=1e-2),
    ),
}


class PerSample(nn.Module):
    """A model that returns one loss per sample."""

    def __init__(self, model: nn.Module, losses: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, batch: Batch) -> Tensor:
        return self.losses(self.model, batch)


def ids(count: int, *shape: int, of: int = ITEMS, first: int = 0) -> Tensor:
    return torch.randint(first, of, (count, *shape))


def histories(count: int) -> tuple[Tensor, Tensor]:
    """Ids that end in zeros, and how many there are: from 1 to LENGTH."""
    lengths = torch.randint(1, LENGTH + 1, (count,))
    found = ids(count, LENGTH, first=1)
    return found * (torch.arange(LENGTH) < lengths.unsqueeze(1)), lengths


def clicks(probabilities: Tensor, batch: Batch) -> Tensor:
    wanted = batch["label"].to(probabilities.dtype)
    return F.binary_cross_entropy(probabilities.reshape(-1), wanted, reduction="none")


def torch_rechub() -> Iterator[Recipe]:
    """Rankers over a dense, four sparse and two sequence features; matchers over items."""
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
    from torch_rechub.models import matching, ranking

    def sparse() -> list[Any]:
        return [SparseFeature(f"c{i}", 10 + 7 * i, DIM) for i in range(4)]

    def target() -> list[Any]:
        return [SparseFeature("item", ITEMS, DIM, padding_idx=0)]

    def history(pooling: str) -> list[Any]:
        options = {"shared_with": "item", "padding_idx": 0, "pooling": pooling}
        return [SequenceFeature("hist", ITEMS, DIM, **options)]

    def draw(count: int) -> Batch:
        found = {f"c{i}": ids(count, of=10 + 7 * i) for i in range(4)}
        found |= {"item": ids(count, first=1), "hist": histories(count)[0]}
        found |= {"seq": histories(count)[0], "pos": ids(count, LENGTH, first=1)}
        found |= {"neg": ids(count, LENGTH, first=1), "negs": ids(count, 3, first=1)}
        return found | {"I": torch.rand(count), "label": torch.randint(0, 2, (count,)).float()}

    def rank(model: nn.Module, batch: Batch) -> Tensor:
        return clicks(model(batch), batch)

    mlp: dict[str, Any] = {"dims": [16, 8], "dropout": 0.0, "activation": "relu"}
    dense = [DenseFeature("I")]
    rankers: dict[str, Callable[[], nn.Module]] = {
        "WideDeep": lambda: ranking.WideDeep(dense + sparse(), sparse(), mlp),
        "DeepFM": lambda: ranking.DeepFM(dense + sparse(), sparse(), mlp),
        "DCN": lambda: ranking.DCN(dense + sparse(), 2, mlp),
        "DCNv2": lambda: ranking.DCNv2(dense + sparse(), 2, mlp),
        "AFM": lambda: ranking.AFM(sparse(), DIM, 8),
        "AutoInt": lambda: ranking.AutoInt(sparse(), [], mlp_params=mlp),
        "FiBiNet": lambda: ranking.FiBiNet(sparse(), mlp),
        "EDCN": lambda: ranking.EDCN(sparse(), 2, mlp),
        "DIN": lambda: ranking.DIN(
            sparse(), history("concat"), target(), {"dims": [16]}, {"dims": [8]}
        ),
        "BST": lambda: ranking.BST(
            sparse(), history("concat"), target(), mlp, nhead=2, dropout=0.0, max_seq_len=LENGTH + 1
        ),
    }
    for name, make in rankers.items():
        yield name, make(), rank, draw

    def match(model: nn.Module, batch: Batch) -> Tensor:
        wanted = torch.zeros(len(batch["item"]), dtype=torch.long)
        return F.cross_entropy(model(batch), wanted, reduction="none")

    negatives = [SequenceFeature("negs", ITEMS, DIM, pooling="concat", shared_with="item")]
    user = {"dims": [16, DIM]}
    model = matching.YoutubeDNN(sparse() + history("mean"), target(), negatives, user, 0.5)
    yield "YoutubeDNN", model, match, draw

    def next_items(model: nn.Module, batch: Batch) -> Tensor:
        positive, negative = model(batch)
        kept = (batch["pos"] > 0).to(positive.dtype)
        return ((F.softplus(-positive) + F.softplus(negative)) * kept).mean(1)

    three = [SequenceFeature("seq", ITEMS, DIM, pooling="concat", padding_idx=0)]
    three += [
        SequenceFeature(k, ITEMS, DIM, pooling="concat", shared_with="seq") for k in ("pos", "neg")
    ]
    yield "SASRec", matching.SASRec(three, LENGTH, 0.0), next_items, draw


def deepctr_torch() -> Iterator[Recipe]:
    """Models over one tensor whose columns are a dense, four sparse and a sequence feature."""
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat, get_feature_names

    sparse = [SparseFeat(f"c{i}", 10 + 7 * i, DIM) for i in range(4)]
    item = SparseFeat("item", ITEMS, DIM, embedding_name="item")
    history = SparseFeat("hist_item", ITEMS, DIM, embedding_name="item")
    hist = VarLenSparseFeat(history, LENGTH, length_name="length")
    kinds = {"x": [DenseFeat("I", 1), *sparse, hist], "sparse": [*sparse, hist]}
    kinds["din"] = [DenseFeat("I", 1), *sparse, item, hist]

    def draw(count: int) -> Batch:
        drawn = {f"c{i}": ids(count, 1, of=10 + 7 * i) for i in range(4)}
        items, lengths = histories(count)
        drawn |= {"I": torch.rand(count, 1), "hist_item": items, "length": lengths.unsqueeze(1)}
        drawn |= {"item": ids(count, 1, first=1)}
        found = {
            kind: torch.cat([drawn[name].float() for name in get_feature_names(columns)], dim=1)
            for kind, columns in kinds.items()
        }
        return found | {"label": torch.randint(0, 2, (count,)).float()}

    def losses(model: nn.Module, batch: Batch, *, key: str = "x") -> Tensor:
        given = batch[key].to(next(model.parameters()).dtype)
        return clicks(model(given), batch)

    columns = kinds["x"]
    for name in ["DeepFM", "DCN", "NFM", "AutoInt", "FiBiNET", "WDL", "IFM"]:
        yield name, getattr(models, name)(columns, columns), losses, draw
    yield "xDeepFM", models.xDeepFM(columns, columns, cin_layer_size=(8, 4)), losses, draw
    yield "PNN", models.PNN(columns), losses, draw
    afm = models.AFM(kinds["sparse"], kinds["sparse"])
    yield "AFM", afm, functools.partial(losses, key="sparse"), draw
    din = models.DIN(kinds["din"], ["item"], att_hidden_size=(16, 8), dnn_hidden_units=(16,))
    yield "DIN", din, functools.partial(losses, key="din"), draw


class Settings(dict[str, Any]):
    """A recbole configuration: what is not set is None."""

    def __missing__(self, key: str) -> None:
        return None


class Fields:
    """What recbole's models ask a dataset."""

    def __init__(self, sizes: dict[str, int], types: dict[str, Any]) -> None:
        self.sizes, self.field2type = sizes, types

    def num(self, field: str) -> int:
        return self.sizes[field]

    def fields(self, source: Any = None, ftype: Any = None) -> list[str]:
        return list(self.sizes)


def recbole() -> Iterator[Recipe]:
    """Context-aware models over four tokens and a token sequence; sequential ones over items."""
    from recbole.model import context_aware_recommender as context
    from recbole.model import sequential_recommender as sequential
    from recbole.utils import FeatureType

    settings = Settings(
        USER_ID_FIELD="user", ITEM_ID_FIELD="item", LIST_SUFFIX="_list", LABEL_FIELD="label",
        ITEM_LIST_LENGTH_FIELD="length", NEG_PREFIX="neg_", MAX_ITEM_LIST_LENGTH=LENGTH,
        device=torch.device("cpu"), embedding_size=DIM, numerical_features=[], loss_type="CE",
        n_layers=1, n_heads=2, hidden_size=DIM, inner_size=16, num_layers=1,
        hidden_dropout_prob=0.0, attn_dropout_prob=0.0, hidden_act="gelu",
        layer_norm_eps=1e-12, initializer_range=0.02,
        dropout_prob=0.0, dropout_probs=[0.0] * 3, mlp_hidden_size=[16, 8], mask_ratio=0.4,
        MASK_ITEM_SEQ="masked", POS_ITEMS="positives", NEG_ITEMS="negatives", MASK_INDEX="places",
        cross_layer_num=2, reg_weight=0.0, use_inner=True, use_outer=False, direct=False,
        cin_layer_size=[6, 4], attention_size=8, attention_layers=1, num_heads=2, has_residual=True,
        mixed=False, structure="parallel", step=1, weight_decay=0.0,
    )  # fmt: skip
    tokens = {"user": 12, "item": ITEMS, "c0": 10, "c1": 17}
    types = dict.fromkeys(tokens, FeatureType.TOKEN) | {"tags": FeatureType.TOKEN_SEQ}
    fields = Fields(tokens | {"tags": ITEMS}, types)

    def draw(count: int) -> Batch:
        items, lengths = histories(count)
        found = {name: ids(count, of=size, first=1) for name, size in tokens.items()}
        found |= {"tags": histories(count)[0], "item_list": items, "length": lengths}
        places = torch.stack([torch.zeros(count).long(), lengths - 1], dim=1)
        masked = items.scatter(1, places, ITEMS)  # BERT4Rec's mask token is one past the items
        found |= {"masked": masked, "places": places, "positives": items.gather(1, places)}
        found |= {"negatives": ids(count, 2, first=1)}
        return found | {"label": torch.randint(0, 2, (count,)).float()}

    def rank(model: Any, batch: Batch) -> Tensor:
        return clicks(torch.sigmoid(model(batch)), batch)

    for name in [
        "FM",
        "DeepFM",
        "NFM",
        "AFM",
        "DCN",
        "DCNV2",
        "xDeepFM",
        "PNN",
        "AutoInt",
        "WideDeep",
        "FwFM",
    ]:
        yield name, getattr(context, name)(settings, fields), rank, draw

    def next_item(model: Any, batch: Batch) -> Tensor:
        found: Tensor = model.calculate_loss(batch)  # its logits are `x @ item_embedding.weight.T`
        return found

    for name in ["SASRec", "GRU4Rec", "NARM", "STAMP"]:
        model = getattr(sequential, name)(settings, fields)
        model.loss_fct = nn.CrossEntropyLoss(reduction="none")
        yield name, model, next_item, draw

    def masked_items(model: Any, batch: Batch) -> Tensor:
        vectors = model(batch["masked"])
        chosen = vectors[torch.arange(len(vectors)).unsqueeze(1), batch["places"]]
        table = model.item_embedding.weight[: model.n_items]
        logits = chosen @ table.t() + model.output_bias
        wanted = batch["positives"].reshape(-1)
        return F.cross_entropy(logits.flatten(0, 1), wanted, reduction="none")  # two a sample

    yield "BERT4Rec", sequential.BERT4Rec(settings, fields), masked_items, draw


def prepare(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    return model


@torch.no_grad()
def distance(ours: Tensor, reference: Tensor) -> float:
    if not reference.numel():
        return 0.0
    scale = reference.double().abs().clamp(min=1.0)
    return float(((ours.double() - reference.double()).abs() / scale).max())


def rows_of(batch: Batch, first: int, last: int) -> Batch:
    return {key: value[first:last] for key, value in batch.items()}


def check(mesh: rm.Mesh, recipe: Recipe, rule: str, split: str) -> dict[str, Any]:
    """Five steps sharded and by the reference; then `rm.verify` of the same."""
    name, bare, losses_of, draw = recipe
    dense, sparse = RULES[rule]
    model = prepare(PerSample(bare, losses_of))
    reference = copy.deepcopy(model).double()
    original, keys = copy.deepcopy(model), list(model.state_dict())
    batches = [draw(sum(PARTS[mesh.world])) for _ in range(STEPS)]
    first = sum(PARTS[mesh.world][: mesh.rank])
    last = first + PARTS[mesh.world][mesh.rank]
    mine = [rows_of(batch, first, last) for batch in batches]

    def adopted() -> nn.Module:
        return rm.adopt(copy.deepcopy(original))

    found = adopted()
    plan = rm.make_plan(found, mesh.topology, sparse=rule, split=split)
    rm.shard(found, plan, mesh)
    optimizer = rm.Optimizer(found, dense=dense, sparse=sparse)
    torch_optimizer = dense(list(reference.parameters()))
    furthest = 0.0
    for batch, part in zip(batches, mine, strict=True):
        ours = found(part)
        mesh.mean(ours).backward()
        optimizer.step()
        optimizer.zero_grad()
        with mock.patch.object(Tensor, "float", Tensor.double):  # libraries cast to fp32 by name
            theirs = reference(batch)
        theirs.mean().backward()
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        each = len(theirs) // sum(PARTS[mesh.world])  # losses of a sample
        furthest = max(furthest, distance(ours, theirs[first * each : last * each]))
    state = rm.full_state_dict(found)
    if mesh.rank == 0:
        wanted = reference.state_dict()
        assert sorted(state) == sorted(keys), "the state dict is the original's"
        copy.deepcopy(original).load_state_dict(state)  # and goes back into it
        furthest = max([furthest, *(distance(state[key], wanted[key]) for key in wanted)])
    furthest = max(mesh.gather_objects(furthest))
    moved = max(
        distance(p, q) for p, q in zip(reference.parameters(), model.parameters(), strict=True)
    )
    verification = rm.verify(adopted, plan, mesh, mine, dense=dense, sparse=sparse)
    return {
        "model": name,
        "tables": len(plan.tables),
        "split": split,
        "rule": rule,
        "moved": moved,
        "difference": furthest,
        "is_verified": verification.is_equal,
        "verify": str(verification),
    }


def main() -> None:
    wanted = sys.argv[1:]
    torch.set_num_threads(1)
    with rm.init_mesh() as mesh:
        number = 0
        for library in (torch_rechub, deepctr_torch, recbole):
            torch.manual_seed(0)
            for recipe in library():
                number += 1
                name = f"{library.__name__}.{recipe[0]}"
                if wanted and name not in wanted:
                    continue
                torch.manual_seed(number)  # the same batches on all ranks
                rule = list(RULES)[number % 3 == 0]
                found = check(mesh, recipe, rule, SPLITS[number % len(SPLITS)])
                if mesh.rank == 0:
                    print(json.dumps(found | {"model": name, "ranks": mesh.world}), flush=True)


if __name__ == "__main__":
    main()
