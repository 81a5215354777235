"""DIN: against a slow reference, sample by sample; its limits; sharded, against the oracle."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.data import SyntheticClicks, SyntheticSequences
from rowmesh.errors import InputError
from rowmesh.features import Batch, JaggedTensor, KeyedJaggedTensor, empty_like
from rowmesh.models import DIN
from rowmesh.runtime.verify import Verification
from rowmesh.train.model import ModelConfig, build_model
from tests.cases import DENSE, RULES
from tests.ranks import run_on_ranks

HISTORIES = [[3, 1, 4, 1], [], [5], [9, 2, 6]]
DATA = SyntheticSequences(num_items=60, mean_length=3.0, longest=9, batch_size=9)


def item_table(**changes: Any) -> rm.EmbeddingConfig:
    fields: dict[str, Any] = {"name": "item", "num_embeddings": 12, "embedding_dim": 4}
    fields["feature_names"] = ["history", "candidate"]
    return rm.EmbeddingConfig(**(fields | changes))


def make_din(**options: Any) -> DIN:
    torch.manual_seed(3)
    table = item_table(weight_init_min=-1.0, weight_init_max=1.0)
    return DIN(rm.EmbeddingCollection([table]), 2, (5, 1), (6, 1), **options)


def make_batch(
    histories: list[list[int]], candidates: list[int] | None = None, **more: list[list[int]]
) -> Batch:
    count = len(histories)
    generator = torch.Generator().manual_seed(count)
    chosen = [7 + s % 4 for s in range(count)] if candidates is None else candidates
    bags = {"history": histories, "candidate": [[c] for c in chosen], **more}
    tensors = {
        name: JaggedTensor.from_dense([torch.tensor(b, dtype=torch.int64) for b in rows])
        for name, rows in bags.items()
    }
    return Batch(
        dense_features=torch.randn((count, 2), generator=generator),
        sparse_features=KeyedJaggedTensor.from_dict(tensors),
        labels=torch.arange(count).remainder(2).float(),
    )


def logits_of(model: DIN, batch: Batch) -> Tensor:
    return model.logits(batch.dense_features, batch.sparse_features)


def slow_interest(model: DIN, weight: Tensor, history: list[int], target: Tensor) -> Tensor:
    if not history:
        return torch.zeros_like(target)
    scores = [
        model.attention_arch(torch.cat((v, target, v * target)).unsqueeze(0))[0, 0]
        for v in weight[history]
    ]
    shares = torch.softmax(torch.stack(scores), dim=0)
    return sum((a * v for a, v in zip(shares, weight[history], strict=True)), torch.zeros(4))


def slow_logits(model: DIN, batch: Batch) -> Tensor:
    weight = model.embedding_collection.table_modules()["item"].weight
    features = batch.sparse_features
    samples = zip(features["history"].to_dense(), features["candidate"].values(), strict=True)
    rows = []
    for (history, candidate), dense in zip(samples, batch.dense_features, strict=True):
        target = weight[candidate]
        interest = slow_interest(model, weight, history.tolist(), target)
        rows.append(torch.cat((interest, target, interest * target, dense)))
    return model.over_arch(torch.stack(rows)).squeeze(1)


def test_logits_losses_and_gradients_equal_the_slow_ones() -> None:
    model, batch = make_din(), make_batch(HISTORIES)
    expected = slow_logits(model, batch)
    torch.testing.assert_close(logits_of(model, batch), expected, rtol=1e-5, atol=1e-6)
    slow = F.binary_cross_entropy_with_logits(expected, batch.labels, reduction="none")
    losses = model(batch)
    torch.testing.assert_close(losses, slow, rtol=1e-5, atol=1e-6)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(losses.sum(), parameters)
    for mine, theirs in zip(ours, torch.autograd.grad(slow.sum(), parameters), strict=True):
        found = mine.to_dense() if mine.is_sparse else mine
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-6)


def test_the_candidate_decides_what_is_attended_to() -> None:
    model = make_din()
    logits = logits_of(model, make_batch([[3, 1, 4]] * 2, candidates=[7, 8]))
    assert logits[0] != logits[1]
    vectors = torch.randn(3, 4)
    one = model.interest(JaggedTensor(vectors, lengths=torch.tensor([3])), torch.randn(1, 4))
    assert not torch.allclose(one[0], vectors.mean(0))


def test_an_empty_history_has_no_interest_and_finite_gradients() -> None:
    model = make_din()
    history = JaggedTensor(torch.randn(2, 4), lengths=torch.tensor([0, 2, 0]))
    interest = model.interest(history, torch.randn(3, 4))
    assert interest[[0, 2]].eq(0).all()
    assert interest[1].ne(0).all()
    for histories in ([[], []], HISTORIES):
        model.zero_grad()
        losses = model(make_batch(histories))
        losses.sum().backward()
        assert losses.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.over_arch.parameters())
        assert all(p.grad.isfinite().all() for p in model.attention_arch.parameters())


def test_a_batch_without_samples_gives_no_losses_that_still_take_a_gradient() -> None:
    model = make_din()
    losses = model(empty_like(make_batch(HISTORIES)))
    assert losses.shape == (0,)
    losses.sum().backward()


def test_logits_do_not_depend_on_the_padding_of_other_samples() -> None:
    model = make_din()
    candidates = [7, 8, 9, 10]
    alone = logits_of(model, make_batch(HISTORIES, candidates))
    long = [k % 12 for k in range(200)]
    batch = make_batch([*HISTORIES, long], [*candidates, 0])
    dense = make_batch(HISTORIES, candidates).dense_features
    beside = dataclasses.replace(batch, dense_features=torch.cat((dense, torch.ones(1, 2))))
    torch.testing.assert_close(logits_of(model, beside)[:4], alone, rtol=1e-5, atol=1e-6)


def test_further_features_are_means_of_sequences_and_pooled_bags() -> None:
    tables = [
        item_table(),
        item_table(name="user", feature_names=["user"], embedding_dim=3),
    ]
    bags = rm.EmbeddingBagCollection(
        [
            rm.EmbeddingBagConfig(
                name="tag", num_embeddings=12, embedding_dim=5, feature_names=["tags"]
            )
        ]
    )
    model = DIN(rm.EmbeddingCollection(tables), 2, embedding_bag_collection=bags)
    users, tags = [[1, 2], [], [3], [4]], [[1], [2, 3], [], [4]]
    batch = make_batch(HISTORIES, user=users, tags=tags)
    seen: list[Tensor] = []
    model.over_arch.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits_of(model, batch)
    weight = model.embedding_collection.table_modules()["user"].weight
    expected = torch.stack(
        [weight[torch.tensor(u)].mean(0) if u else torch.zeros(3) for u in users]
    )
    torch.testing.assert_close(seen[0][:, 12:15], expected)
    torch.testing.assert_close(seen[0][:, 15:20], bags(batch.sparse_features).values())
    assert torch.equal(seen[0][:, 20:], batch.dense_features)


def test_dense_features_may_be_none() -> None:
    model = DIN(rm.EmbeddingCollection([item_table()]))
    batch = dataclasses.replace(make_batch(HISTORIES), dense_features=torch.zeros(4, 0))
    assert model(batch).isfinite().all()


@pytest.mark.parametrize("candidates", [[[1], []], [[1], [2, 3]]])
def test_a_sample_without_one_candidate_is_an_error(candidates: list[list[int]]) -> None:
    batch = make_batch([[1], [2]])
    parts = batch.sparse_features.to_dict()
    parts["candidate"] = JaggedTensor.from_dense(
        [torch.tensor(c, dtype=torch.int64) for c in candidates]
    )
    features = KeyedJaggedTensor.from_dict(parts)
    message = rf"'candidate', sample 1 has {len(candidates[1])} ids, but a candidate is exactly one"
    with pytest.raises(InputError, match=message):
        make_din().logits(batch.dense_features, features)


def test_wrong_tables_and_sizes_are_named() -> None:
    table = item_table()
    other = item_table(name="other", feature_names=["candidate"])
    apart = [item_table(feature_names=["history"]), other]
    for tables in (apart, [item_table(feature_names=["candidate"])], [table, other]):
        with pytest.raises(InputError, match="'history' and 'candidate', of one table"):
            DIN(rm.EmbeddingCollection(tables))
    with pytest.raises(InputError, match="has no embedding_configs"):
        DIN(torch.nn.Linear(1, 1))
    collection = rm.EmbeddingCollection([table])
    with pytest.raises(InputError, match=r"attention_layer_sizes=\[4, 2\].*end in 1"):
        DIN(collection, 0, (4, 2))
    with pytest.raises(InputError, match=r"over_arch_layer_sizes=\[\].*end in 1"):
        DIN(collection, 0, (4, 1), ())
    with pytest.raises(InputError, match="dense_in_features is -1"):
        DIN(collection, -1)


def test_model_and_data_must_be_of_one_kind() -> None:
    with pytest.raises(InputError, match=r"'din', which attends.*SyntheticClicks has no sequence"):
        build_model(ModelConfig(kind="din"), SyntheticClicks(cardinalities=(5,)), seed=1)
    for kind in ("dlrm", "dcn"):
        config = dataclasses.replace(ModelConfig(), kind=kind)
        with pytest.raises(InputError, match=f"'{kind}', which reads pooled.*model.kind=din"):
            build_model(config, DATA, seed=1)


def verify_din(mesh: Mesh, split: str, tiers: str) -> Verification:
    """Three steps of a small DIN on this mesh against the oracle on rank 0."""
    config = ModelConfig(kind="din", dim=8, attention_layers=(6,), over_layers=(5,))

    def make_model() -> DIN:
        model = build_model(config, DATA, seed=4)
        assert isinstance(model, DIN)
        return model

    batches = [DATA.batch_at(mesh.rank, step) for step in range(3)]
    if mesh.rank == mesh.world - 1 and mesh.world > 1:
        batches[1] = empty_like(batches[1])
    tables = DATA.tables(8)
    stats = rm.Stats.from_batches(tables, (DATA.batch_at(0, s).sparse_features for s in range(4)))
    plan = rm.make_plan(make_model(), mesh.topology, stats=stats, split=split, tiers=tiers)
    assert plan.exactness == "E0"
    return rm.verify(
        make_model, plan, mesh, batches, dense=DENSE["adagrad"], sparse=RULES["rowwise"]
    )


@pytest.mark.parametrize(
    ("world", "hosts", "split", "tiers"),
    [
        (1, 1, "auto", "off"),
        (2, 1, "row_wise", "off"),
        (2, 1, "table_wise", "off"),
        (2, 1, "row_wise", "hot:10"),
        (4, 2, "row_wise", "hot:10"),
        (4, 2, "table_row_wise", "off"),
        (4, 1, "column_wise", "off"),
        (4, 1, "data_parallel", "off"),
    ],
)
def test_sharded_it_equals_the_oracle_bitwise(
    world: int, hosts: int, split: str, tiers: str
) -> None:
    for found in run_on_ranks(world, verify_din, split, tiers, hosts=hosts):
        assert found.is_equal, str(found)
        assert found.num_tensors > 3 * world
