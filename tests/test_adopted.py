"""`rm.adopt`: plain embeddings of a model are its tables, and it stays the model it was."""

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import RowmeshWarning
from rowmesh.tables import named_collections
from tests.plain_models import (
    KINDS,
    Plain,
    PlainCase,
    PlainModel,
    part_of,
    plain_cases,
    samples_of,
    train_adopted,
    train_reference,
)
from tests.ranks import run_on_ranks

SUITE = settings(
    derandomize=True,
    deadline=None,
    max_examples=10,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
NIGHTLY = settings(SUITE, derandomize=False, max_examples=1000)
ALL = tuple(
    Plain(kind=k, rows=7 + i, dim=4, padding=i % 3 if i % 2 else None, calls=1 + (i == 1))
    for i, k in enumerate(KINDS)
)


def near(ours: Tensor, reference: Tensor) -> bool:
    return torch.allclose(ours.double(), reference, rtol=1e-5, atol=1e-5)


def check(case: PlainCase) -> None:
    """Sharded training is the float64 model's, and the oracle's."""
    losses, state = train_reference(case)
    runs = run_on_ranks(len(case.parts[0]), train_adopted, case)
    for step, expected in enumerate(losses):
        assert near(torch.cat([run[0][0][step] for run in runs]), expected)
    found = runs[0][0][1]
    assert sorted(found) == sorted(state), "the keys of the model as it was written"
    assert [key for key in state if not near(found[key], state[key])] == []
    assert all("NOT" not in told and fits for _, told, fits in runs), runs[0][1]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_kind_of_embedding_trains_as_the_original(world: int) -> None:
    read = Plain(kind="list", rows=9, dim=4, is_read=True, padding=0)
    tied = Plain(kind="mean", rows=9, dim=4, tied=len(ALL), padding=2)
    parts = {1: (5,), 2: (3, 2), 4: (2, 0, 3, 1)}[world]
    for split in ("row_wise", "auto"):
        check(PlainCase(embeddings=(*ALL, read, tied), parts=(parts, parts), split=split))


@pytest.mark.parametrize("world", [1, 2, 4])
@SUITE
@given(data=st.data())
def test_drawn_models_train_as_the_original(world: int, data: st.DataObject) -> None:
    check(data.draw(plain_cases(world)))


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@NIGHTLY
@given(data=st.data())
def test_many_more_models(world: int, data: st.DataObject) -> None:
    check(data.draw(plain_cases(world)))


CASE = PlainCase(embeddings=ALL, parts=((4,),))


def test_adoption_changes_nothing_on_one_device() -> None:
    plain, adopted = PlainModel(CASE), PlainModel(CASE)
    assert rm.adopt(adopted) is adopted
    assert rm.adopt(adopted) is adopted, "once is enough, twice does no harm"
    batch = samples_of(CASE, 0, 0, 4)
    for model in (adopted, copy.deepcopy(adopted), pickle.loads(pickle.dumps(adopted))):
        assert list(model.state_dict()) == list(plain.state_dict())
        model.load_state_dict(plain.state_dict())
        found, expected = model(batch), plain(batch)
        assert torch.equal(found, expected)
        plain.zero_grad()
        expected.sum().backward()
        found.sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
            assert not ours.grad.is_sparse
    for ours, theirs in zip(adopted.tables, plain.tables, strict=True):
        assert isinstance(ours, type(theirs))
        names = ("num_embeddings", "embedding_dim", "padding_idx")
        assert [getattr(ours, n) for n in names] == [getattr(theirs, n) for n in names]


class Named(nn.Embedding):
    """A subclass that adds, and looks up as torch does."""

    def count(self) -> int:
        return self.num_embeddings


class Holder(nn.Module):
    """One embedding at two paths and in a list, with a hook; one of a subclass; two tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.same = nn.Embedding(6, 4)
        self.held = [self.a]
        self.b = Named(5, 4)
        self.c, self.d = nn.Embedding(4, 4), nn.EmbeddingBag(4, 4, mode="sum", padding_idx=1)
        self.d.weight = self.c.weight
        self.calls: list[int] = []
        self.a.register_forward_hook(lambda *_: self.calls.append(1))
        self.a.note = "kept"

    def forward(self, ids: Tensor) -> Tensor:
        found = self.held[0](ids) + self.same(ids) + self.b(ids) + self.c(ids)
        return (found.sum(1) + self.d(ids)).square().sum(1)


def sharded(mesh: Mesh, model: nn.Module, **wishes: Any) -> tuple[nn.Module, rm.Optimizer]:
    plan = rm.make_plan(model, mesh.topology, **wishes)
    rm.shard(model, plan, mesh)
    dense = torch.optim.SGD
    return model, rm.Optimizer(model, dense=lambda p: dense(p, lr=0.1), sparse=rm.SGD(lr=0.1))


def train_holder(mesh: Mesh) -> Any:
    torch.manual_seed(0)
    model = rm.adopt(Holder())
    names = [config.name for _, _, configs in named_collections(model) for config in configs]
    ids = torch.randint(0, 4, (4, 3), generator=torch.Generator().manual_seed(mesh.rank))
    model, optimizer = sharded(mesh, model, split="row_wise")
    mesh.mean(model(ids)).backward()
    optimizer.step()
    whole = rm.full_state_dict(model)
    return (
        names,
        ids,
        whole,
        len(model.calls),
        (model.a.note, model.b.count(), isinstance(model.b, Named)),
    )


def test_modules_stay_where_they_are_and_share_what_they_share() -> None:
    runs = run_on_ranks(2, train_holder)
    torch.manual_seed(0)
    reference = Holder().double()
    ids = torch.cat([run[1] for run in runs])
    reference(ids).mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    names, _, state, calls, kept = runs[0]
    assert names == ["a", "b", "c"]
    assert calls == 2
    assert kept == ("kept", 5, True)
    expected = reference.state_dict()
    assert sorted(state) == sorted(expected)
    assert "same.weight" in state
    assert [k for k in expected if not near(state[k], expected[k])] == []


def test_an_adopted_subclass_can_be_copied_and_pickled() -> None:
    model = rm.adopt(wrap(b=Named(5, 4)))
    ids = torch.tensor([0, 4])
    for found in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert found["b"].count() == 5
        assert [path for path, _, _ in named_collections(found)] == ["b"]
        assert torch.equal(found["b"](ids), model["b"](ids))
        assert found["b"].weight is not model["b"].weight


class Own(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def wrap(**modules: Any) -> nn.Module:
    return nn.ModuleDict(modules)


def tie(owner: nn.Module, linear: nn.Linear) -> nn.Module:
    linear.weight = owner.weight
    return wrap(emb=owner, out=linear)


def hooked() -> nn.Embedding:
    found = nn.Embedding(3, 2)
    found.weight.register_hook(lambda grad: grad)
    return found


REFUSED: dict[str, tuple[Any, str]] = {
    "max_norm": (lambda: wrap(emb=nn.Embedding(3, 2, max_norm=1.0)), r"'emb' .*max_norm=1.0"),
    "frequency": (
        lambda: wrap(emb=nn.EmbeddingBag(3, 2, scale_grad_by_freq=True)),
        r"'emb' .*scale_grad_by_freq",
    ),
    "own forward": (lambda: wrap(x=wrap(emb=Own(3, 2))), r"'x.emb' .*Own has its own forward"),
    "double": (lambda: wrap(emb=nn.Embedding(3, 2).double()), r"'emb' .*torch.float64"),
    "parametrised": (
        lambda: wrap(emb=nn.utils.parametrizations.weight_norm(nn.Embedding(3, 2))),
        r"'emb' .*forward|'emb' .*weight is computed",
    ),
    "tied to a linear": (
        lambda: tie(nn.Embedding(3, 2), nn.Linear(2, 3)),
        r"'emb' .*'weight' of 'out' \(Linear\)",
    ),
    "gradient hook": (lambda: wrap(emb=hooked()), r"'emb' .*hooks on its gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_table_is_refused_by_name_before_anything_changes(name: str) -> None:
    make, words = REFUSED[name]
    model = nn.ModuleDict({"first": nn.Embedding(4, 2), "rest": make()})
    before = [type(module) for module in model.modules()]
    words = words.replace("'", "'rest.", 1).replace("of 'out'", "of 'rest.out'")
    words = words.replace("|'emb'", "|'rest.emb'")
    with pytest.raises(rm.InputError, match=words) as raised:
        rm.adopt(model)
    assert "skip=['rest." in str(raised.value)
    assert [type(module) for module in model.modules()] == before


def test_skipped_embeddings_stay_as_they_are() -> None:
    model = wrap(a=nn.Embedding(3, 2), b=wrap(c=Own(3, 2), d=nn.Embedding(3, 2)))
    rm.adopt(model, skip=["b.*"])
    assert [path for path, _, _ in named_collections(model)] == ["a"]
    rm.make_plan(model, rm.Topology())  # without a word: skipping said it
    with pytest.raises(rm.InputError, match=r"no embedding is at 'b.x': did you mean 'b.[cd]'"):
        rm.adopt(model, skip=["b.x"])
    with pytest.raises(rm.InputError, match=r"skip is a list of paths, as skip=\['a'\]"):
        rm.adopt(model, skip="a")
    tied = wrap(a=nn.Embedding(3, 2), b=nn.Embedding(3, 2))
    tied["b"].weight = tied["a"].weight
    with pytest.raises(rm.InputError, match="'a' cannot be a table: its weight is also 'weight'"):
        rm.adopt(tied, skip=["b"])


def test_names_of_tables_are_paths_and_unique() -> None:
    bags = rm.EmbeddingBagConfig(name="a_b", num_embeddings=3, embedding_dim=2, feature_names=["f"])
    model = wrap(
        ebc=rm.EmbeddingBagCollection([bags]),
        a=wrap(b=nn.Embedding(3, 2), **{"c d/e": nn.Embedding(3, 2)}),
        a_b=nn.Embedding(3, 2),
    )
    rm.adopt(model)
    names = [c.name for _, _, configs in named_collections(model) for c in configs]
    assert names == ["a_b", "a_b_2", "a_c_d_e", "a_b_3"]
    alone = rm.adopt(nn.Embedding(3, 2))
    assert [c.name for _, _, cs in named_collections(alone) for c in cs] == ["embedding"]


def test_a_plain_embedding_that_is_no_table_is_named_once() -> None:
    model = wrap(a=nn.Embedding(30, 2), b=nn.EmbeddingBag(5, 4))
    mesh = rm.init_mesh()
    words = r"'a' \(30 x 2\), 'b' \(5 x 4\); rm.adopt\(model\)"
    with pytest.warns(RowmeshWarning, match=words):
        plan = rm.make_plan(model, mesh.topology)
    rm.shard(model, plan, mesh)  # not again
    again = wrap(a=nn.Embedding(30, 2), b=nn.EmbeddingBag(5, 4))
    with pytest.warns(RowmeshWarning, match=words):
        rm.shard(again, plan, mesh)  # with a plan from elsewhere
    sparse = wrap(a=nn.Embedding(30, 2, sparse=True))
    for act in (
        lambda: rm.make_plan(sparse, mesh.topology),
        lambda: rm.shard(sparse, plan, mesh),
    ):
        with pytest.raises(rm.InputError, match=r"'a' has sparse=True.*rm.adopt\(model\)"):
            act()
    rm.shard(rm.adopt(sparse), rm.make_plan(sparse, mesh.topology), mesh)


def test_a_sharded_weight_can_be_read_and_not_written() -> None:
    model = rm.adopt(wrap(a=nn.Embedding(6, 4), l2=nn.Linear(4, 1)))
    kept, before = model["a"].weight, model["a"].weight.detach().clone()
    model, optimizer = sharded(rm.init_mesh(), model)
    weight = model["a"].weight
    assert torch.equal(weight, before)
    assert type(weight * 2) is Tensor
    (weight.square().sum() / 2).backward()
    optimizer.step()
    assert torch.allclose(rm.full_state_dict(model)["a.weight"], before * 0.9)
    weight = model["a"].weight
    for write in (
        lambda: weight.mul_(2),
        lambda: weight.data[0].zero_(),
        lambda: weight.__setitem__(0, 1.0),
        lambda: nn.init.normal_(weight),
        lambda: nn.init.xavier_uniform_(weight),
        lambda: weight.detach().fill_(0.0),
        lambda: weight.__iadd__(1),
        lambda: setattr(weight, "data", before),
    ):
        with pytest.raises(rm.InputError, match=r"would change a copy.*rm.load_pretrained"):
            write()
    torch.save(weight.detach(), buffer := io.BytesIO())
    buffer.seek(0)
    assert type(torch.load(buffer)) is Tensor
    with pytest.raises(rm.InputError, match=r"cannot be replaced.*rm.load_pretrained"):
        model["a"].weight = nn.Parameter(before)
    for use in (lambda: kept.square().sum(), lambda: torch.optim.SGD([kept], lr=1.0).step()):
        with pytest.raises(rm.InputError, match=r"kept from before rm.shard"):
            use()
    with pytest.raises(rm.InputError, match="sharded already"):
        rm.adopt(model)


def test_weights_untied_after_adoption_are_told() -> None:
    model = rm.adopt(Holder())
    model.d.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(rm.InputError, match=r"shared the weight of table 'c'.*before rm.adopt"):
        rm.make_plan(model, rm.Topology())


class Changes(nn.Module):
    """Changes what it looked up in place, as models may."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.a = nn.Embedding(8, 4, padding_idx=padding)
        self.b = nn.EmbeddingBag(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.a(ids)
        found *= 2.0
        found[:, 0] += 1.0
        pooled = self.b(ids)
        pooled.add_(found.sum(1))
        return pooled.square().sum(1)


@pytest.mark.parametrize("padding", [None, 0])
def test_outputs_may_be_changed_in_place(padding: int | None) -> None:
    reference = Changes(padding)
    model, optimizer = sharded(rm.init_mesh(), rm.adopt(copy.deepcopy(reference)))
    ids = torch.tensor([[0, 1, 2], [3, 1, 1]])
    for each in (reference, model):
        each(ids).mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    optimizer.step()
    assert near(model(ids), reference(ids).double())


class Dims(nn.Module):
    """Look-ups of very different first dimensions; several losses a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(9, 4), nn.Embedding(20, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        user = self.user(batch["user"])
        everything = self.item(torch.arange(20))  # 20 "samples"
        constant = self.user(torch.tensor(3))  # none: a single id
        scores = (user + constant) @ everything.t()
        losses = torch.logsumexp(scores, 1, keepdim=True) - scores[:, :2]
        return losses.reshape(-1)  # two a sample


def train_dims(mesh: Mesh, users: list[list[int]]) -> Any:
    model, optimizer = sharded(mesh, rm.adopt(Dims()), split="table_wise")
    mesh.mean(model({"user": torch.tensor(users[mesh.rank], dtype=torch.int64)})).backward()
    optimizer.step()
    with torch.no_grad():
        kept = model({"user": torch.tensor(users[mesh.rank], dtype=torch.int64)})
    return rm.full_state_dict(model), kept


@pytest.mark.parametrize("users", [[[1, 2, 3], [4]], [[], [5, 5]]])
def test_the_mean_counts_losses_whatever_was_looked_up_last(users: list[list[int]]) -> None:
    runs = run_on_ranks(2, train_dims, users)
    reference = Dims().double()
    every = torch.tensor([user for part in users for user in part])
    reference({"user": every}).mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for key, value in reference.state_dict().items():
        assert near(runs[0][0][key], value)
    assert near(torch.cat([run[1] for run in runs]), reference({"user": every}).detach())


class Mixed(nn.Module):
    """A collection, whose batches can be begun ahead, beside an adopted embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            rm.EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
        ]
        self.bags, self.plain = rm.EmbeddingBagCollection(tables), nn.Embedding(9, 4)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        found = self.bags(batch["features"])["f"] * self.plain(batch["ids"])
        return (found.sum(1) - 1.0).square()


def mixed_batch(rank: int, step: int) -> dict[str, Any]:
    ids = torch.arange(3 + rank) * (step + 1) % 9
    features = rm.KeyedJaggedTensor.from_dense({"f": ids.flip(0)})
    return {"features": features, "ids": ids}


def train_mixed(mesh: Mesh, depth: int) -> Any:
    model, optimizer = sharded(mesh, rm.adopt(Mixed()), split="row_wise", depth=depth)
    batches = [mixed_batch(mesh.rank, step) for step in range(4 - mesh.rank)]
    for batch in rm.Pipeline(model).batches(batches):
        mesh.mean(model(batch)).backward()
        optimizer.step()
    return rm.full_state_dict(model)


def train_plain_ahead(mesh: Mesh, depth: int) -> Any:
    case = PlainCase(embeddings=ALL, parts=((3, 2), (1, 2), (2, 2)))
    model, optimizer = sharded(mesh, rm.adopt(PlainModel(case)), depth=depth)
    batches = [part_of(case, step, mesh.rank) for step in range(3)]
    for batch in rm.Pipeline(model).batches(batches):
        mesh.mean(model(batch)).backward()
        optimizer.step()
    return rm.full_state_dict(model)


@pytest.mark.parametrize("body", [train_mixed, train_plain_ahead])
def test_a_plan_of_depth_two_trains_to_the_bits_of_depth_one(body: Any) -> None:
    one, two = (run_on_ranks(2, body, depth)[0] for depth in (1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def bad_ids(mesh: Mesh, kind: str) -> str:
    model, _ = sharded(mesh, rm.adopt(wrap(item=nn.Embedding(5, 4))), split="row_wise")
    ids = torch.tensor([[0, 1], [2, 3]])
    if mesh.rank == 1:
        ids = ids + 3 if kind == "range" else ids.float()
    try:
        model["item"](ids)
    except rm.RowmeshError as error:
        return str(error)
    return "nothing"


def test_wrong_ids_of_one_rank_are_told_on_all() -> None:
    for kind, words in (
        ("range", "feature 'item', sample 1: id 5 is outside table 'item' (5 rows)"),
        ("dtype", "ids must be int32 or int64, got torch.float32"),
    ):
        assert all(words in told for told in run_on_ranks(2, bad_ids, kind))


def save_adopted(mesh: Mesh, folder: str) -> Any:
    case = PlainCase(embeddings=ALL, parts=((2,) * mesh.world,))
    model, optimizer = sharded(mesh, rm.adopt(PlainModel(case)), split="row_wise")
    if mesh.world > 1:
        mesh.mean(model(part_of(case, 0, mesh.rank))).backward()
        optimizer.step()
        rm.Checkpoints(folder).save(1, model=model, optimizer=optimizer, mesh=mesh)
    else:
        rm.Checkpoints(folder).load(model=model, optimizer=optimizer, mesh=mesh)
    return rm.full_state_dict(model)


def test_checkpoints_and_original_state_dicts_fit(tmp_path: Any) -> None:
    saved = run_on_ranks(2, save_adopted, str(tmp_path))[0]
    resumed = run_on_ranks(1, save_adopted, str(tmp_path))[0]
    assert saved.keys() == resumed.keys() == PlainModel(CASE).state_dict().keys()
    assert all(torch.equal(saved[key], resumed[key]) for key in saved)
    for shards in (False, True):
        model = rm.adopt(PlainModel(CASE))
        if shards:
            sharded(rm.init_mesh(), model)
        torch.save(saved, buffer := io.BytesIO())
        buffer.seek(0)
        rm.load_full_state_dict(model, torch.load(buffer))
        found = rm.full_state_dict(model)
        assert all(torch.equal(saved[key], found[key]) for key in saved)


def build_on_meta(mesh: Mesh, split: str) -> Any:
    with torch.device("meta"):
        model = wrap(a=nn.Embedding(50, 8, padding_idx=7), b=nn.EmbeddingBag(9, 4))
    model, _ = sharded(mesh, rm.adopt(model), split=split)
    return rm.full_state_dict(model)


def test_an_embedding_on_meta_is_made_where_it_lies_its_padding_zero() -> None:
    found = [run_on_ranks(n, build_on_meta, s)[0] for n, s in ((1, "auto"), (2, "row_wise"))]
    for key in ("a.weight", "b.weight"):
        assert torch.equal(found[0][key], found[1][key])
    weight = found[0]["a.weight"]
    assert not weight[7].any()
    assert (weight.any(1).sum(), weight.abs().max() <= 50**-0.5) == (49, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_may_be_converted_after_adoption(dtype: torch.dtype) -> None:
    model = wrap(a=nn.Embedding(9, 4, padding_idx=0), b=nn.EmbeddingBag(9, 4, padding_idx=2))
    reference = copy.deepcopy(model).to(dtype)
    model, _ = sharded(rm.init_mesh(), rm.adopt(model).to(dtype))
    ids = torch.randint(0, 9, (5, 3))
    for key in ("a", "b"):
        found = model[key](ids)
        assert found.dtype == dtype
        assert torch.equal(found, reference[key](ids))
    with pytest.raises(rm.InputError, match=r"'a': data_type torch.float64 is not fp32"):
        rm.make_plan(rm.adopt(wrap(a=nn.Embedding(3, 2))).double(), rm.Topology())


def test_memory_that_two_parameters_share_is_not_untied() -> None:
    model = wrap(a=nn.Embedding(3, 2), b=nn.Embedding(3, 2))
    model["b"].weight.data = model["a"].weight.data
    with pytest.raises(rm.InputError, match=r"'a' shares its values with 'b.weight'"):
        sharded(rm.init_mesh(), rm.adopt(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which hides this one
def test_a_compiled_model_looks_up_outside_its_graphs() -> None:
    reference = Dims()
    model, _ = sharded(rm.init_mesh(), rm.adopt(Dims()))
    table = model.item.weight  # of the class that a graph must not look into
    compiled = torch.compile(lambda batch: model(batch) + table.t()[0, 0], backend="eager")
    batch = {"user": torch.tensor([1, 2, 2])}
    found = compiled(batch)
    assert near(found, (reference(batch) + reference.item.weight[0, 0]).double())
    found.sum().backward()
    torch.compiler.reset()


def test_the_pages_program_runs_and_its_state_fits_the_model_as_written() -> None:
    page = (Path(__file__).parent.parent / "docs" / "adopt.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(program, "adopt.md", "exec"), found)
    found["Recommender"]().load_state_dict(found["state"])
    assert {table.name for table in found["plan"].tables} == {"user", "item", "tags"}
