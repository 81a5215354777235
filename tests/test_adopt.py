"""Collections of TorchRec's kind after `rm.shard`: in place, at every path, or refused by name."""

import copy
import functools
import io
import pickle
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.nn.bags import as_features
from rowmesh.nn.init import fill_table
from rowmesh.runtime.adopt import adopt_collections
from rowmesh.runtime.oracle import materialise
from rowmesh.tables import configs_of
from tests.foreign import ForeignBags, ForeignPooling, ForeignSequences, ForeignType, foreign
from tests.ranks import run_on_ranks

KEYS = ["a", "b", "c"]
DENSE = functools.partial(torch.optim.SGD, lr=0.5)
ROWS = 11


def features(step: int = 0, rank: int = 0, size: int = 3) -> rm.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (3 * size,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return rm.KeyedJaggedTensor(KEYS, values, lengths=lengths, stride=size)


def bags(*names: str, **more: Any) -> ForeignBags:
    torch.default_generator.manual_seed(3)
    chosen = names or ("a", "b")
    configs = [foreign(n, num_embeddings=ROWS, embedding_dim=4) for n in chosen]
    return ForeignBags(*configs, **more)


class Model(nn.Module):
    """A collection of `bags` by three paths and in a list; hooks around it; a layer."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.first = bags(**more)
        self.again = nn.ModuleDict({"same": self.first, "other": bags("c", **more)})
        self.hidden = [self.first]
        self.first.register_forward_hook(lambda module, args, found: found.values() * 2.0)
        self.calls: list[str] = []
        self.handle = self.first.register_forward_pre_hook(lambda *_: self.calls.append("pre"))
        torch.default_generator.manual_seed(5)
        self.layer = nn.Linear(12, 1)

    def forward(self, batch: Any) -> Tensor:
        ids = batch if hasattr(batch, "keys") else batch.idlist_features
        held = torch.tanh(self.again["same"](ids)) + self.hidden[0](ids)
        both = torch.cat([held, self.again["other"](ids).values()], dim=1)
        return self.layer(torch.tanh(both)).squeeze(1).square()


def plan_of(model: nn.Module, mesh: Mesh, split: str = "row_wise") -> rm.Plan:
    return rm.make_plan(model, mesh.topology, split=split, batch_size=4)


def train(mesh: Mesh, split: str) -> dict[str, Tensor]:
    model = Model()
    first = model.first
    assert rm.shard(model, plan_of(model, mesh, split), mesh) is model
    assert model.again["same"] is first is model.first
    optimizer = rm.Optimizer(model, dense=DENSE, sparse=rm.SGD(lr=0.5))
    for step in range(3):
        mesh.mean(model(features(step, mesh.rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(model.calls) == 6
    found, alone = rm.full_state_dict(model), rm.unshard(model)
    if alone is not None:
        assert alone.first is alone.again["same"] is alone.hidden[0] is not first
        assert [k for k, v in alone.state_dict().items() if not torch.equal(v, found[k])] == []
        alone(features())
    return found


def joined(parts: list[rm.KeyedJaggedTensor]) -> rm.KeyedJaggedTensor:
    """One batch of the samples of all."""
    of = [[p[key] for p in parts] for key in KEYS]
    values = torch.cat([j.values() for js in of for j in js])
    return rm.KeyedJaggedTensor(
        KEYS, values, lengths=torch.cat([j.lengths() for js in of for j in js])
    )


@pytest.mark.parametrize(("world", "split"), [(1, "table_wise"), (2, "row_wise"), (4, "row_wise")])
def test_a_collection_at_several_paths_is_trained_as_the_original(world: int, split: str) -> None:
    found = train(rm.init_mesh(), split) if world == 1 else run_on_ranks(world, train, split)[0]
    model = Model()
    optimizer = DENSE(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        model(joined([features(step, rank) for rank in range(world)])).mean().backward()
        optimizer.step()
    expected = model.state_dict()
    assert set(found) == set(expected)
    assert any(".same." in key for key in found)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, atol=1e-5), key


def test_adoption_is_in_place_and_keeps_class_words_and_hooks() -> None:
    model = Model()
    before, ids = model(features()), features()
    states, first = model.state_dict(), model.first
    weight = first.embedding_bags["a"].weight
    assert adopt_collections(model) is model
    assert model.first is model.again["same"] is model.hidden[0] is first
    assert isinstance(first, ForeignBags)
    assert isinstance(first, rm.EmbeddingBagCollection)
    assert first.embedding_bags["a"].weight is weight
    assert first.embedding_bag_configs()[0].pooling is ForeignPooling.SUM
    assert [c.name for c in first.configs()] == ["a", "b"]
    assert torch.allclose(model(ids), before, atol=1e-6)
    assert [k for k, v in model.state_dict().items() if not torch.equal(v, states[k])] == []
    model.handle.remove()
    model(ids)
    assert model.calls == ["pre"] * 4
    assert adopt_collections(model) is model, "once is enough"
    assert type(model.again["other"]) is type(first)


def test_an_adopted_model_can_be_copied_and_pickled() -> None:
    model = adopt_collections(bags())
    expected = model(features()).values()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(model), loaded, pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(features()).values(), expected)
        with torch.no_grad():
            other.embedding_bags["a"].weight.zero_()
        assert torch.equal(model(features()).values(), expected)


def shard_root(mesh: Mesh) -> tuple[Tensor, Tensor]:
    model = bags()
    assert rm.shard(model, plan_of(model, mesh), mesh) is model
    with torch.no_grad():
        found = model(features(0, mesh.rank)).values()
    return found, bags()(features(0, mesh.rank)).values()


def test_a_collection_that_is_the_model_is_sharded_in_place() -> None:
    for found, expected in run_on_ranks(2, shard_root):
        assert torch.allclose(found, expected, atol=1e-6)


def sequences(*configs: SimpleNamespace, **more: Any) -> ForeignSequences:
    return ForeignSequences(*(configs or (foreign("a", num_embeddings=ROWS),)), **more)


@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences_come_with_their_ids_if_these_were_needed(need_indices: bool) -> None:
    config = foreign("t", num_embeddings=ROWS, feature_names=["c", "a"])
    model = sequences(config, need_indices=need_indices)
    weight = model.embeddings["t"].weight.detach().clone()
    adopt_collections(model)
    assert model.need_indices() is need_indices
    ids = features()
    for key, jagged in model(ids).items():
        assert torch.equal(jagged.values(), weight[ids[key].values()])
        kept = jagged.weights_or_none()
        assert torch.equal(kept, ids[key].values()) if need_indices else kept is None


def shard_partly_on_meta(mesh: Mesh) -> dict[str, Tensor]:
    model = nn.Sequential(bags())
    model[0].embedding_bags["b"].to("meta")
    model[0].embedding_bags["b"].weight.requires_grad_(False)
    rm.shard(model, plan_of(model, mesh), mesh)
    return rm.full_state_dict(model)


def test_each_table_keeps_its_own_values_or_is_made() -> None:
    found = run_on_ranks(2, shard_partly_on_meta)[0]
    made = torch.empty(ROWS, 4)
    config = configs_of(bags())[1]
    fill_table(made, config, seed=0)
    assert torch.equal(found["0.embedding_bags.a.weight"], bags().embedding_bags["a"].weight)
    assert torch.equal(found["0.embedding_bags.b.weight"], made)


def draw(weight: Tensor) -> None:
    """Of the whole table; all but row 1."""
    kept = weight[1].clone()
    nn.init.orthogonal_(weight)
    weight[1] = kept


def fail(weight: Tensor) -> None:
    raise ValueError("no file")


def with_init_fn(init_fn: Any) -> ForeignBags:
    given = foreign("b", num_embeddings=ROWS, embedding_dim=4, init_fn=init_fn)
    return ForeignBags(foreign("a", num_embeddings=ROWS, embedding_dim=4), given, device="meta")


def shard_with_init_fn(mesh: Mesh, split: str) -> tuple[dict[str, Tensor], Tensor]:
    torch.default_generator.manual_seed(mesh.rank)  # ranks have drawn different numbers
    model = with_init_fn(draw)
    rm.shard(model, plan_of(model, mesh, split), mesh)
    with torch.no_grad():
        out = model(features()).values()
    return rm.full_state_dict(model), out


def test_init_fn_makes_tables_on_meta_the_same_under_every_plan() -> None:
    config = rm.EmbeddingBagConfig(
        name="b", num_embeddings=ROWS, embedding_dim=4, feature_names=["b"], init_fn=draw
    )
    state = torch.default_generator.get_state()
    ours = rm.EmbeddingBagCollection([config])
    assert torch.equal(torch.default_generator.get_state(), state)
    expected = ours.embedding_bags["b"].weight.detach()
    plain = torch.empty(ROWS, 4)
    fill_table(plain, configs_of(bags())[1], seed=0)
    assert torch.equal(expected[1], plain[1]), "what it leaves is what it would be without it"
    assert not torch.equal(expected[2], plain[2])
    model = materialise(adopt_collections(with_init_fn(draw)))
    assert torch.equal(model.embedding_bags["b"].weight, expected)
    out = model(features()).values()
    for world, split in ((2, "row_wise"), (4, "column_wise"), (2, "data_parallel")):
        results = run_on_ranks(world, shard_with_init_fn, split)
        assert torch.equal(results[0][0]["embedding_bags.b.weight"], expected)
        for _, found in results:
            assert torch.allclose(found, out, atol=1e-6)


def test_init_fn_makes_the_rows_that_loading_leaves() -> None:
    model, expected = with_init_fn(draw), torch.empty(ROWS, 4)
    fill_table(expected, configs_of(model)[1], seed=0)
    rm.load_pretrained(model, "b", torch.ones(1, 4), rows=[3])
    expected[3] = 1.0
    assert torch.equal(model.embedding_bags["b"].weight, expected)


def shard_failing(mesh: Mesh) -> str:
    model = with_init_fn(fail)
    with pytest.raises(rm.InputError) as caught:
        rm.shard(model, plan_of(model, mesh), mesh)
    return str(caught.value)


def test_an_init_fn_that_fails_is_named_on_all_ranks() -> None:
    said = "rank 0: init_fn of table 'b' failed: ValueError: no file"
    assert run_on_ranks(2, shard_failing) == [said, said]


def change(make: Any, what: Any) -> nn.Module:
    model = nn.ModuleDict({"deep": make()})
    what(model["deep"])
    return model


def tables(model: Any) -> Any:
    return model.embedding_bags if hasattr(model, "embedding_bags") else model.embeddings


def put(name: str, value: Any) -> Any:
    return lambda module: setattr(tables(module)["a"], name, value)


def swap(table: nn.Module) -> Any:
    def work(module: Any) -> None:
        tables(module)["a"] = table

    return work


def optimise(module: Any) -> None:
    tables(module)["a"].weight._in_backward_optimizers = [object()]


def drop(module: Any) -> None:
    del module.embedding_bags["b"]


@pytest.mark.parametrize(
    ("make", "what", "message"),
    [
        (bags, put("padding_idx", 0), r"table 'a' of collection 'deep' has padding_idx=0, .* out"),
        (bags, put("max_norm", 1.0), r"has max_norm=1\.0"),
        (bags, put("scale_grad_by_freq", True), "has scale_grad_by_freq=True"),
        (bags, put("mode", "max"), "pools by max, its configuration says sum: make"),
        (sequences, put("padding_idx", 3), "has padding_idx=3"),
        (bags, swap(nn.Linear(4, 4)), "'a' of .* is a Linear, not TorchRec's EmbeddingBag: put"),
        (bags, swap(nn.EmbeddingBag(5, 4, mode="sum")), r"has a weight of \[5, 4\], .* \[11, 4\]"),
        (bags, lambda m: m.double(), r"holds torch\.float64, its configuration says fp32: convert"),
        (bags, lambda m: m.half(), r"holds torch\.float16"),
        (
            bags,
            lambda m: m.embedding_bags["a"].register_forward_hook(lambda *_: None),
            "has hooks, which its lookup would skip: hook the collection instead",
        ),
        (
            bags,
            lambda m: m.embedding_bags["b"].weight.register_hook(lambda g: g),
            "'b' .* has hooks on its gradient, .* leave them out",
        ),
        (
            sequences,
            lambda m: m.embeddings["a"].weight.register_post_accumulate_grad_hook(lambda p: None),
            "has hooks on its gradient",
        ),
        (bags, optimise, r"has an optimiser applied in backward: .* rm\.Optimizer\(model, sparse="),
        (bags, lambda m: setattr(m, "seed", 1), r"'deep' has attributes .* rename its \['seed'\]"),
        (bags, drop, r"collection 'deep' has the tables \['a'\], .* name \['a', 'b'\]"),
    ],
)
def test_what_would_be_dropped_is_refused_and_nothing_has_changed(
    make: Any, what: Any, message: str
) -> None:
    model = change(make, what)
    kind, state = type(model["deep"]), dict(vars(model["deep"]))
    with pytest.raises(rm.InputError, match=message):
        adopt_collections(model)
    assert type(model["deep"]) is kind
    assert vars(model["deep"]) == state


def test_our_own_tables_are_held_to_the_same() -> None:
    ours = rm.EmbeddingBagCollection(configs_of(bags()))  # type: ignore[arg-type]
    handle = ours.embedding_bags["a"].weight.register_hook(lambda g: g)
    with pytest.raises(rm.InputError, match="table 'a' has hooks on its gradient"):
        adopt_collections(ours)
    handle.remove()
    assert adopt_collections(ours) is ours
    with pytest.raises(rm.InputError, match=r"holds torch\.float64"):
        adopt_collections(ours.double())


def tie(one: Any, other: Any) -> None:
    other.weight = one.weight


def share(one: Any, other: Any) -> None:
    other.weight = nn.Parameter(one.weight.data)


def ours(name: str, device: str = "cpu") -> rm.EmbeddingBagCollection:
    config = rm.EmbeddingBagConfig(
        name=name, num_embeddings=ROWS, embedding_dim=4, feature_names=[name]
    )
    return rm.EmbeddingBagCollection([config], device=device)


@pytest.mark.parametrize("how", [tie, share])
@pytest.mark.parametrize("make", [bags, ours, functools.partial(ours, device="meta")])
def test_tied_tables_are_refused(make: Any, how: Any) -> None:
    model = nn.ModuleDict({"x": make("a"), "y": make("b"), "z": nn.Linear(4, ROWS)})
    adopt_collections(copy.deepcopy(model))
    for other in (model["y"].embedding_bags["b"], model["z"]):
        before = other.weight
        how(model["x"].embedding_bags["a"], other)
        if how is tie or not model["x"].embedding_bags["a"].weight.is_meta:
            with pytest.raises(
                rm.InputError, match=r"table '[ab]' shares its values with '[xyz]\."
            ):
                adopt_collections(model)
        other.weight = before
    if make is bags:
        two = nn.ModuleDict({"x": bags("a", "b")})
        two["x"].embedding_bags["b"] = two["x"].embedding_bags["a"]
        with pytest.raises(
            rm.InputError, match=r"'a' shares its values with 'x\.embedding_bags\.b"
        ):
            adopt_collections(two)


def test_a_table_that_the_model_reads_beside_its_collection_is_refused() -> None:
    model = nn.ModuleDict({"x": bags()})
    model["read"] = model["x"].embedding_bags["a"]
    with pytest.raises(rm.InputError, match=r"table 'a' shares its values with 'read\.weight'"):
        adopt_collections(model)


class Variable:
    """TorchRec's features of which each has a batch size of its own."""

    def __init__(self, **more: Any) -> None:
        plain = features()
        self.keys, self.values, self.lengths = plain.keys, plain.values, plain.lengths
        self.stride, self.more = plain.stride, more

    def variable_stride_per_key(self) -> bool:
        return bool(self.more.get("variable", False))

    def inverse_indices_or_none(self) -> Any:
        return self.more.get("inverse")


def test_features_with_batch_sizes_of_their_own_are_refused() -> None:
    assert as_features(Variable()).stride() == 3
    model = bags()
    adopt_collections(model)
    for more in ({"variable": True}, {"inverse": (KEYS, torch.zeros(3, 3))}):
        with pytest.raises(rm.InputError, match=r"batch sizes of their own .* as many samples"):
            model(Variable(**more))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).mean()


@dataclass
class Input:
    """As TorchRec's ModelInput: its features have another name."""

    idlist_features: rm.KeyedJaggedTensor


class Columns(nn.Module):
    """Plain columns of a dict; the model makes features of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = bags("a", "b")
        self.layer = nn.Linear(8, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found = self.tables(rm.KeyedJaggedTensor.from_dense(batch)).values()
        return self.layer(found).squeeze(1).square()


def verify_inputs(mesh: Mesh) -> list[str]:
    def column(step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step + 10 * mesh.rank)
        size = 2 + mesh.rank
        return {k: torch.randint(0, ROWS, (size,), generator=generator) for k in ("a", "b")}

    def make(kind: Any) -> nn.Module:
        torch.default_generator.manual_seed(1)
        return kind()

    inputs = [Input(features(s, mesh.rank, size=2 + mesh.rank)) for s in range(2)]
    tuples = [(torch.zeros(3), [i.idlist_features]) for i in inputs]
    found = []
    for kind, batches, more in (
        (Model, inputs, {}),
        (Columns, [column(0), column(1)], {}),
        (Model, tuples, {"loss": lambda model, batch: model(batch[1][0])}),
        (Model, inputs, {"loss": mean_loss, "is_mean": True}),
        (
            Columns,
            [column(0), {k: v[: mesh.rank] for k, v in column(1).items()}],
            {"loss": mean_loss, "is_mean": True},
        ),
    ):
        make_kind = functools.partial(make, kind)
        plan = plan_of(make_kind(), mesh)
        said = rm.verify(make_kind, plan, mesh, batches, dense=DENSE, sparse=rm.SGD(lr=0.5), **more)
        found.append(str(said))
    return found


def test_verify_counts_samples_in_batches_of_every_kind_and_takes_means() -> None:
    for found in run_on_ranks(2, verify_inputs):
        for said in found:
            assert re.fullmatch(r"verified: 2 steps, \d+ tensors bit-equal \(E0\)", said)


def test_the_oracle_takes_a_mean_of_samples_only() -> None:
    settings: dict[str, Any] = {"dense": DENSE, "sparse": rm.SGD(lr=0.5), "is_mean": True}
    oracle = rm.Oracle(nn.Linear(2, 1), loss=lambda m, batch: m(batch).mean(), **settings)
    with pytest.raises(rm.InputError, match="a model that reads a collection"):
        oracle.step([torch.ones(3, 2)])
    oracle = rm.Oracle(Columns(), **settings)
    with pytest.raises(rm.InputError, match=r"takes one number, got shape \[2\]"):
        oracle.step([columns_of(0)[0]])


def mean_of_means(mesh: Mesh) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps of `Columns` on its mean loss; in the second, rank 0 has no samples."""
    torch.default_generator.manual_seed(1)
    model = Columns()
    rm.shard(model, plan_of(model, mesh), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE, sparse=rm.SGD(lr=0.5))
    shares = []
    for batch in columns_of(mesh.rank):
        share = mesh.mean(model(batch).mean(), is_mean=True)
        share.backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append(float(share.detach()))
    return shares, rm.full_state_dict(model)


def columns_of(rank: int) -> list[dict[str, Tensor]]:
    first = torch.arange(2 + rank)
    return [{"a": first, "b": first + 4}, {"a": first[: 3 * rank], "b": first[: 3 * rank]}]


def test_a_mean_loss_counts_for_its_samples_and_for_none_where_there_are_none() -> None:
    results = run_on_ranks(2, mean_of_means)
    torch.default_generator.manual_seed(1)
    model = Columns()
    optimizer = DENSE(model.parameters())
    for step, parts in enumerate(zip(columns_of(0), columns_of(1), strict=True)):
        batch = {key: torch.cat([part[key] for part in parts]) for key in ("a", "b")}
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        assert sum(shares[step] for shares, _ in results) == pytest.approx(loss.item(), abs=1e-6)
    assert results[0][0][1] == 0.0
    for key, value in model.state_dict().items():
        assert torch.allclose(results[0][1][key], value, atol=1e-5), key


def test_a_single_number_is_taken_as_a_mean_only_if_that_is_said() -> None:
    mesh = rm.init_mesh()
    with pytest.raises(rm.InputError, match=r"per sample, got shape \[\]: .*mean\(loss, is_mean=T"):
        mesh.mean(torch.tensor(1.0))
    with pytest.raises(rm.InputError, match=r"takes the numbers of samples from the forward"):
        mesh.mean(torch.tensor(1.0), is_mean=True)
    model = rm.shard(bags(), plan_of(bags(), mesh), mesh)
    model(features())
    assert float(mesh.mean(torch.tensor(1.5), is_mean=True)) == 1.5
    with pytest.raises(rm.InputError, match=r"takes one number, got shape \[3\]"):
        mesh.mean(torch.ones(3), is_mean=True)
    with pytest.raises(rm.InputError, match="and no count="):
        mesh.mean(torch.tensor(1.5), is_mean=True, count=3)


def test_half_precision_tables_are_adopted() -> None:
    model = ForeignBags(foreign("a", num_embeddings=ROWS, data_type=ForeignType.FP16))
    adopt_collections(model)
    assert model(features()).values().dtype == torch.float32
