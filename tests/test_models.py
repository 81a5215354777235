"""The models against slow references, their limits, and their errors."""

import itertools
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh.errors import InputError
from rowmesh.features import Batch, KeyedJaggedTensor, KeyedTensor, empty_like
from rowmesh.models import DCN, DLRM, MLP, CrossNet, PairwiseDots, seed_dense
from rowmesh.models.layers import ordered_values, pooled_names, table_configs
from rowmesh.tables import EmbeddingBagConfig


class Bags(nn.Module):
    """The smallest embedding bag collection: one nn.EmbeddingBag per table."""

    def __init__(self, configs: list[EmbeddingBagConfig], *, reverse: bool = False) -> None:
        super().__init__()
        self.configs, self.reverse = configs, reverse
        self.embedding_bags = nn.ModuleDict(
            {
                c.name: nn.EmbeddingBag(c.num_embeddings, c.embedding_dim, mode="sum")
                for c in configs
            }
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = {}
        for name, config in zip(pooled_names(self.configs), self._readers(), strict=True):
            ids = features[name.split("@")[0]]
            pooled[name] = self.embedding_bags[config.name](ids.values(), ids.offsets()[:-1])
        if self.reverse:
            pooled = dict(reversed(pooled.items()))
        lengths = [v.shape[1] for v in pooled.values()]
        return KeyedTensor(list(pooled), lengths, torch.cat(list(pooled.values()), dim=1))

    def _readers(self) -> list[EmbeddingBagConfig]:
        return [c for c in self.configs for _ in c.feature_names]


def make_bags(*dims: int, reverse: bool = False) -> Bags:
    configs = [
        EmbeddingBagConfig(
            name=f"t{t}", num_embeddings=5 + t, embedding_dim=dim, feature_names=[f"f{t}"]
        )
        for t, dim in enumerate(dims)
    ]
    return Bags(configs, reverse=reverse)


def make_batch(num_samples: int, num_features: int, *, num_dense: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(num_samples)
    ids = {
        f"f{f}": torch.randint(0, 5, (num_samples, 1 + f % 2), generator=generator)
        for f in range(num_features)
    }
    return Batch(
        dense_features=torch.randn(num_samples, num_dense, generator=generator),
        sparse_features=KeyedJaggedTensor.from_dense(ids),
        labels=torch.randint(0, 2, (num_samples,), generator=generator).float(),
    )


def slow_mlp(mlp: MLP, x: Tensor, *, relu_last: bool) -> Tensor:
    layers = list(mlp.layers)
    for number, layer in enumerate(layers):
        x = torch.einsum("oi,bi->bo", layer.weight, x) + layer.bias
        if relu_last or number < len(layers) - 1:
            x = torch.where(x > 0, x, 0)
    return x


def slow_dots(dense: Tensor, vectors: Tensor) -> Tensor:
    all_vectors = [dense, *vectors.unbind(1)]
    dots = [(a * b).sum(1, keepdim=True) for a, b in itertools.combinations(all_vectors, 2)]
    return torch.cat([dense, *dots], dim=1)


def slow_losses(logits: Tensor, labels: Tensor) -> Tensor:
    chance = torch.sigmoid(logits)
    return -(labels * chance.log() + (1 - labels) * (1 - chance).log())


def gradients(losses: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(losses.sum(), parameters), strict=True))


@pytest.mark.parametrize(("num_samples", "num_features"), [(0, 3), (1, 1), (7, 2), (600, 5)])
def test_pairwise_dots_equal_the_slow_ones(num_samples: int, num_features: int) -> None:
    dense = torch.randn(num_samples, 4, dtype=torch.float64, requires_grad=True)
    pooled = torch.randn(num_samples, num_features * 4, dtype=torch.float64, requires_grad=True)
    interaction = PairwiseDots(num_features, 4)
    out = interaction(dense, pooled)
    expected = slow_dots(dense, pooled.view(num_samples, num_features, 4))
    assert out.shape == (num_samples, interaction.out_features)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (dense, pooled), weights),
        torch.autograd.grad(expected, (dense, pooled), weights),
        strict=True,
    ):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_pairwise_dots_come_in_the_order_of_the_upper_triangle() -> None:
    # <v_i, v_j> = p_i * p_j identifies its pair when every p is another prime.
    out = PairwiseDots(3, 1)(torch.tensor([[2.0]]), torch.tensor([[3.0, 5.0, 7.0]]))
    assert out.tolist() == [[2, 6, 10, 14, 15, 21, 35]]


@pytest.mark.parametrize("num_features", [1, 4])
def test_pairwise_dots_pass_gradcheck(num_features: int) -> None:
    dense = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    pooled = torch.randn(3, num_features * 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(PairwiseDots(num_features, 2), (dense, pooled))


def test_pairwise_dots_take_strided_inputs_and_gradients() -> None:
    dense = torch.randn(2, 5, dtype=torch.float64).t().requires_grad_()
    pooled = torch.randn(5, 8, dtype=torch.float64)[:, 1:7].requires_grad_()
    PairwiseDots(3, 2)(dense, pooled).sum().backward()
    fresh = [t.detach().contiguous().requires_grad_() for t in (dense, pooled)]
    slow_dots(fresh[0], fresh[1].view(5, 3, 2)).sum().backward()
    torch.testing.assert_close(dense.grad, fresh[0].grad)
    torch.testing.assert_close(pooled.grad, fresh[1].grad)


def test_pairwise_dots_can_be_differentiated_again() -> None:
    dense = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    pooled = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(PairwiseDots(3, 2), (dense, pooled))


def test_pairwise_dots_do_not_depend_on_the_other_samples() -> None:
    dense, pooled = torch.randn(700, 8), torch.randn(700, 4 * 8)
    interaction = PairwiseDots(4, 8)
    assert torch.equal(
        interaction(dense, pooled)[300:500], interaction(dense[300:500], pooled[300:500])
    )


@pytest.mark.parametrize("relu_last", [False, True])
def test_mlp_is_linear_layers_with_relu_between(relu_last: bool) -> None:
    mlp = MLP(3, (5, 4), relu_last=relu_last).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), slow_mlp(mlp, x, relu_last=relu_last))


def test_mlp_without_layers_is_the_identity() -> None:
    x = torch.randn(2, 3) - 1
    assert torch.equal(MLP(3, (), relu_last=True)(x), x)


def test_mlp_starts_as_torch_linear_does() -> None:
    torch.manual_seed(0)
    mlp = MLP(3, (5, 4), relu_last=False)
    torch.manual_seed(0)
    for ours, theirs in zip(mlp.layers, (nn.Linear(3, 5), nn.Linear(5, 4)), strict=True):
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(ours.bias, theirs.bias)


def dlrm(**sizes: object) -> DLRM:
    options = {"dense_arch_layer_sizes": (6, 4), "over_arch_layer_sizes": (8, 5, 1), **sizes}
    return DLRM(make_bags(4, 4, 4), 3, **options)


@pytest.mark.parametrize("num_samples", [1, 9])
def test_dlrm_losses_and_gradients_equal_the_slow_ones(num_samples: int) -> None:
    model, batch = dlrm().double(), make_batch(num_samples, 3)
    batch = Batch(
        dense_features=batch.dense_features.double(),
        sparse_features=batch.sparse_features,
        labels=batch.labels,
    )
    pooled = model.embedding_bag_collection(batch.sparse_features).values()
    dense = slow_mlp(model.dense_arch, batch.dense_features, relu_last=True)
    x = slow_dots(dense, pooled.view(num_samples, 3, 4))
    logits = slow_mlp(model.over_arch, x, relu_last=False)[:, 0]
    expected = slow_losses(logits, batch.labels.double())
    losses = model(batch)
    assert losses.shape == (num_samples,)
    torch.testing.assert_close(model.logits(batch.dense_features, batch.sparse_features), logits)
    torch.testing.assert_close(losses, expected)
    ours, theirs = gradients(losses, model), gradients(expected, model)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=name)


def test_dlrm_is_deterministic() -> None:
    model, batch = dlrm(), make_batch(700, 3)
    first, second = (gradients(model(batch), model) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_dlrm_state_dict_keys_are_readable() -> None:
    assert list(dlrm().state_dict()) == [
        *(f"embedding_bag_collection.embedding_bags.t{t}.weight" for t in range(3)),
        *(f"dense_arch.layers.{n}.{kind}" for n in range(2) for kind in ("weight", "bias")),
        *(f"over_arch.layers.{n}.{kind}" for n in range(3) for kind in ("weight", "bias")),
    ]


def test_dlrm_default_sizes() -> None:
    model = DLRM(make_bags(64, 64), 13)
    assert [layer.out_features for layer in model.dense_arch.layers] == [512, 256, 64]
    assert [layer.out_features for layer in model.over_arch.layers] == [512, 512, 256, 1]


@pytest.mark.parametrize("kind", [DLRM, DCN])
def test_zero_samples_give_zero_gradients(kind: type[DLRM] | type[DCN]) -> None:
    model = kind(make_bags(4, 4, 4), 3, (6, 4), (8, 1))
    losses = model(empty_like(make_batch(4, 3)))
    assert losses.shape == (0,)
    assert all(not gradient.any() for gradient in gradients(losses, model).values())


@pytest.mark.parametrize("kind", [DLRM, DCN])
def test_vectors_in_another_order_are_put_in_table_order(kind: type[DLRM] | type[DCN]) -> None:
    model, batch = kind(make_bags(4, 4, 4), 3, (6, 4), (8, 1)), make_batch(5, 3)
    other = kind(make_bags(4, 4, 4, reverse=True), 3, (6, 4), (8, 1))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(batch), other(batch))


@pytest.mark.parametrize("kind", [DLRM, DCN])
def test_integer_labels_are_taken(kind: type[DLRM] | type[DCN]) -> None:
    model, batch = kind(make_bags(4, 4, 4), 3, (6, 4), (8, 1)), make_batch(5, 3)
    whole = Batch(
        dense_features=batch.dense_features,
        sparse_features=batch.sparse_features,
        labels=batch.labels.long(),
    )
    assert torch.equal(model(batch), model(whole))


@pytest.mark.parametrize("kind", [DLRM, DCN])
def test_dense_parameters_are_made_on_the_dense_device(kind: type[DLRM] | type[DCN]) -> None:
    model = kind(make_bags(4), 3, (4,), (1,), dense_device="meta")
    dense = {n: p for n, p in model.named_parameters() if "embedding_bags" not in n}
    assert dense
    assert all(p.is_meta for p in dense.values())


def test_values_in_order_are_not_copied() -> None:
    values = torch.randn(2, 3)
    pooled = KeyedTensor(["a", "b"], [1, 2], values)
    assert ordered_values(pooled, ["a", "b"]) is values
    assert torch.equal(ordered_values(pooled, ["b", "a"]), values[:, [1, 2, 0]])


def test_a_feature_of_two_tables_is_named_with_its_table() -> None:
    configs = [
        EmbeddingBagConfig(name="x", num_embeddings=5, embedding_dim=2, feature_names=["f0"]),
        EmbeddingBagConfig(name="y", num_embeddings=5, embedding_dim=2, feature_names=["f1", "f0"]),
    ]
    assert pooled_names(configs) == ["f0@x", "f1", "f0@y"]
    assert DLRM(Bags(configs), 3, (2,), (1,))(make_batch(4, 2)).shape == (4,)


@pytest.mark.parametrize("low_rank_dim", [None, 2])
def test_cross_layers_follow_the_formula(low_rank_dim: int | None) -> None:
    net = CrossNet(5, 3, low_rank_dim=low_rank_dim).double()
    x0 = torch.randn(4, 5, dtype=torch.float64)
    for sample, out in zip(x0, net(x0), strict=True):
        x = sample
        for number, layer in enumerate(net.w):
            weight = layer.weight if low_rank_dim is None else layer.weight @ net.v[number].weight
            x = sample * (weight @ x + layer.bias) + x
        torch.testing.assert_close(out, x)


def test_low_rank_cross_layers_hold_two_n_r_weights() -> None:
    weights = [p for p in CrossNet(10, 2, low_rank_dim=3).parameters() if p.dim() == 2]
    assert sum(p.numel() for p in weights) == 2 * (2 * 10 * 3)


def test_no_cross_layers_are_the_identity() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(CrossNet(3, 0)(x), x)


@pytest.mark.parametrize("dense_sizes", [(), (6, 2)])
@pytest.mark.parametrize("low_rank_dim", [None, 2])
def test_dcn_is_cross_layers_and_then_an_mlp(
    dense_sizes: tuple[int, ...], low_rank_dim: int | None
) -> None:
    model = DCN(make_bags(4, 1, 2), 3, dense_sizes, (8, 1), 2, low_rank_dim)
    batch = make_batch(6, 3)
    dense = slow_mlp(model.dense_arch, batch.dense_features, relu_last=True)
    pooled = model.embedding_bag_collection(batch.sparse_features).values()
    crossed = model.crossnet(torch.cat((dense, pooled), dim=1))
    logits = slow_mlp(model.over_arch, crossed, relu_last=False)[:, 0]
    torch.testing.assert_close(model.logits(batch.dense_features, batch.sparse_features), logits)
    torch.testing.assert_close(model(batch), slow_losses(logits, batch.labels))
    assert len(gradients(model(batch), model)) == len(list(model.parameters()))


def test_seed_dense_depends_on_order_and_shape_not_on_names() -> None:
    ours = MLP(3, (5, 1), relu_last=False)
    theirs = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    seed_dense(ours.named_parameters(), 4)
    seed_dense(theirs.named_parameters(), 4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    before = [p.clone() for p in ours.parameters()]
    seed_dense(ours.named_parameters(), 5)
    assert all(not torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))


def test_seed_dense_is_uniform_in_the_range_of_torch_linear() -> None:
    layer = nn.Linear(64, 500)
    seed_dense(layer.named_parameters(), 0)
    assert layer.weight.abs().max() <= 1 / 8
    assert layer.bias.abs().max() <= 1 / 8
    assert abs(layer.weight.mean()) < 1e-3
    assert abs(layer.weight.std() - 1 / 8 / 3**0.5) < 1e-3


def test_seed_dense_refuses_what_is_not_linear() -> None:
    norm = nn.LayerNorm(3)
    with pytest.raises(InputError, match=r"'weight' of shape \[3\].*Linear layers"):
        seed_dense(norm.named_parameters(), 0)
    with pytest.raises(InputError, match=r"\[2, 3, 1\]"):
        seed_dense(nn.Conv1d(3, 2, 1).named_parameters(), 0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"dense_arch_layer_sizes": (6, 5)},
            "dense_arch_layer_sizes=[6, 5] must be positive sizes that end in 4, the embedding_dim",
        ),
        ({"dense_arch_layer_sizes": ()}, "dense_arch_layer_sizes=[]"),
        ({"dense_arch_layer_sizes": (0, 4)}, "dense_arch_layer_sizes=[0, 4]"),
        ({"over_arch_layer_sizes": (6, 2)}, "set its last entry to 1"),
    ],
)
def test_dlrm_names_the_size_that_does_not_fit(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        dlrm(**sizes)


def test_dlrm_needs_one_dim_and_dense_inputs() -> None:
    with pytest.raises(InputError, match=r"\{'t0': 4, 't1': 2\}.*or use DCN"):
        DLRM(make_bags(4, 2), 3, (4,), (1,))
    with pytest.raises(InputError, match="dense_in_features=0 must be at least 1"):
        DLRM(make_bags(4), 0, (4,), (1,))


def test_dcn_names_the_size_that_does_not_fit() -> None:
    for options, message in (
        ({"dense_in_features": 0}, "dense_in_features is 0"),
        ({"dcn_num_layers": 0}, "dcn_num_layers is 0"),
        ({"dcn_low_rank_dim": 0}, "dcn_low_rank_dim is 0"),
        ({"dense_arch_layer_sizes": (3, 0)}, "smallest of dense_arch_layer_sizes is 0"),
        ({"over_arch_layer_sizes": (3, 2)}, "end in 1"),
    ):
        with pytest.raises(InputError, match=message):
            DCN(make_bags(4), **{"dense_in_features": 3, **options})


def test_the_collection_must_be_one() -> None:
    with pytest.raises(InputError, match="Linear has no embedding_bag_configs"):
        table_configs(nn.Linear(1, 1))
    with pytest.raises(InputError, match="reads no feature"):
        table_configs(make_bags())


def test_losses_equal_torch_binary_cross_entropy() -> None:
    model, batch = dlrm(), make_batch(5, 3)
    logits = model.logits(batch.dense_features, batch.sparse_features)
    expected = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
    assert torch.equal(model(batch), expected)
