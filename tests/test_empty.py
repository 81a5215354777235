"""Batches without samples, of every type: `rowmesh.features.empty`, and what stands in at the end
of unequal loaders."""

import contextlib
import functools
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.loops import Loops
from rowmesh.comm.mesh import Mesh
from rowmesh.comm.status import sentence_of
from rowmesh.errors import InputError
from rowmesh.features import (
    Batch,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    another_like,
    empty_like,
)
from tests.ranks import run_on_ranks


def drawing(*, weighted: bool = False) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["user", "items"],
        torch.tensor([7, 3, 1, 2, 4], dtype=torch.int32),
        torch.rand(5, dtype=torch.float16) if weighted else None,
        torch.tensor([1, 1, 2, 1]),
    )


def batch(*, planted: bool = True) -> Batch:
    return Batch(
        dense_features=torch.rand(2, 3),
        sparse_features=drawing(),
        labels=torch.tensor([0.0, 1.0]),
        true_probabilities=torch.tensor([0.1, 0.9]) if planted else None,
    )


def test_tensors_are_cut_and_what_is_not_a_batch_stays() -> None:
    assert empty_like(torch.rand(3, 4)).shape == (0, 4)
    assert empty_like(torch.tensor(5.0)).item() == 5.0
    kept = ("epoch 3", None, 4, 0.5, torch.float32, torch.device("cpu"), Kind.A, np.float64(3))
    for value in kept:
        assert empty_like(value) is value
        assert another_like(value) is value


class Kind(Enum):
    A = 1


@pytest.mark.parametrize("weighted", [False, True])
def test_features_keep_keys_dtypes_and_weights(weighted: bool) -> None:
    found = empty_like(drawing(weighted=weighted))
    assert (found.keys(), found.stride()) == (["user", "items"], 0)
    assert (found.values().dtype, found.lengths().dtype) == (torch.int32, torch.int64)
    assert found["items"].to_dense() == []
    weights = found.weights_or_none()
    assert weights is None if not weighted else (weights.dtype, len(weights)) == (torch.float16, 0)
    again = empty_like(found)
    assert (again.keys(), again.stride()) == (["user", "items"], 0)


def test_jagged_and_keyed_tensors_have_no_samples() -> None:
    found = empty_like({"f": JaggedTensor(torch.ones(2), torch.ones(2), torch.tensor([1, 1]))})
    assert found["f"].lengths().numel() == found["f"].weights().numel() == 0
    assert empty_like(KeyedTensor(["f"], [1], torch.zeros(2, 1))).values().shape == (0, 1)
    rows = empty_like(KeyedTensor(["f"], [3], torch.zeros(3, 2), key_dim=0))
    assert (rows.values().shape, rows.key_dim()) == ((3, 0), 0)


class Foreign:
    """As TorchRec's: the methods and the constructor, not the class."""

    def __init__(
        self, keys: Any, values: Any, weights: Any = None, lengths: Any = None, stride: Any = None
    ) -> None:
        self.ours = KeyedJaggedTensor(keys, values, weights, lengths, stride=stride)
        self.keys, self.values, self.lengths = self.ours.keys, self.ours.values, self.ours.lengths
        self.stride, self.weights_or_none = self.ours.stride, self.ours.weights_or_none


class Odd(Foreign):
    def __init__(self) -> None:
        super().__init__(["f"], torch.tensor([1]), None, torch.tensor([1]))


def test_another_librarys_features_stay_of_its_class() -> None:
    # Before, they became ours, whose methods and isinstance are not theirs.
    found = empty_like(Foreign(["f"], torch.tensor([1, 2]), torch.ones(2), torch.tensor([2, 0])))
    assert type(found) is Foreign
    assert (found.keys(), found.stride(), found.weights_or_none().numel()) == (["f"], 0, 0)
    with pytest.raises(InputError, match=r"cannot make a Odd without samples .*empty=\.\.\."):
        empty_like(Odd())


class Pair(NamedTuple):
    ids: KeyedJaggedTensor
    labels: Tensor


class Strings(list[Any]):
    pass


@dataclass
class Derived:
    x: Tensor
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.x)


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x, self.name = x, "train"

    def to(self, device: str) -> "Plain":
        return Plain(self.x.to(device))


class Slotted:
    __slots__ = ("unset", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Table:
    """Columns that are cut together, as those of a data frame."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns, self.size = columns, len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: Any) -> Any:
        return (
            self.columns[part]
            if isinstance(part, str)
            else Table({name: column[part] for name, column in self.columns.items()})
        )


X = torch.ones(2, 3)
CONTAINERS = {
    "dict": ({"x": X}, lambda b: b["x"]),
    "OrderedDict": (OrderedDict(x=X), lambda b: b["x"]),
    "defaultdict": (defaultdict(list, x=X), lambda b: b["x"]),
    "UserDict": (UserDict(x=X), lambda b: b["x"]),
    "mappingproxy": (types.MappingProxyType({"x": X}), lambda b: b["x"]),
    "list": ([X, "a"], lambda b: b[0]),
    "tuple": ((X, 1), lambda b: b[0]),
    "subclass of list": (Strings([X]), lambda b: b[0]),
    "named tuple": (Pair(drawing(), X), lambda b: b.labels),
    "dataclass with a derived field": (Derived(X), lambda b: b.x),
    "plain object": (Plain(X), lambda b: b.x),
    "object with slots": (Slotted(X), lambda b: b.x),
    "what can be sliced": (Table({"x": X}), lambda b: b["x"]),
    "array": (np.ones((2, 3)), lambda b: b),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_type_and_the_given_one_its_samples(name: str) -> None:
    given, part = CONTAINERS[name]
    found = empty_like(given)
    assert type(found) is type(given)
    assert part(found).shape == (0, 3)
    assert part(given).shape == (2, 3)
    again = another_like(given)
    assert type(again) is type(given)
    assert again is not given
    assert part(again).shape == (2, 3)


def test_what_a_container_knows_besides_stays() -> None:
    assert empty_like(Derived(X)).size == 0
    assert (empty_like(Plain(X)).name, len(empty_like(Table({"x": X})))) == ("train", 0)
    assert empty_like(defaultdict(list, x=X))["new"] == []
    found = empty_like({"batch": batch(), "more": [(X, 7), {"ids": drawing()}]})
    assert found["batch"].dense_features.shape == (0, 3)
    assert found["batch"].sparse_features.stride() == 0
    assert found["batch"].labels.shape == found["batch"].true_probabilities.shape == (0,)
    assert (found["more"][0][1], found["more"][1]["ids"].stride()) == (7, 0)
    assert empty_like(batch(planted=False)).true_probabilities is None


def test_another_object_has_other_features_in_it() -> None:
    given = batch()
    found = another_like(given)
    assert found.sparse_features is not given.sparse_features
    assert found.sparse_features.values() is given.sparse_features.values()
    assert found.sparse_features.stride() == 2


class Knot:
    def __init__(self) -> None:
        self.x, self.me = X, self


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: X, Knot(), Plain("no samples")])
def test_what_cannot_be_cut_is_refused_with_the_way_out(value: Any) -> None:
    sentence = rf"cannot make a {type(value).__name__} without samples .*batches\(loader, empty="
    with pytest.raises(InputError, match=sentence):
        empty_like(value)
    with pytest.raises(InputError, match="cannot make a list without samples"):
        empty_like([X, value])


class Picky(nn.Module):
    """Pooled vectors as ``reshape(B, -1)`` gives them, which torch refuses for B = 0."""

    def __init__(self, *, is_picky: bool = True) -> None:
        super().__init__()
        table = rm.EmbeddingBagConfig(
            name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"]
        )
        self.tables = rm.EmbeddingBagCollection([table], device="meta", seed=1)
        self.is_picky, self.layer = is_picky, nn.Linear(4, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        vectors = self.tables(batch["ids"]).values()
        if self.is_picky:
            vectors = vectors.reshape(len(batch["y"]), -1)
        return (self.layer(vectors).squeeze(1) - batch["y"]) ** 2


def loader(rank: int, steps: list[int]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        {
            "ids": KeyedJaggedTensor.from_dense(
                {"f": torch.randint(0, 10, (3,), generator=generator)}
            ),
            "y": torch.rand(3, generator=generator),
        }
        for _ in range(steps[rank])
    ]


def prepared(mesh: Mesh, *, is_picky: bool) -> tuple[nn.Module, rm.Optimizer]:
    torch.manual_seed(0)
    model = Picky(is_picky=is_picky)
    rm.shard(model, rm.make_plan(model, mesh.topology, split="row_wise"), mesh)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return model, rm.Optimizer(model, dense=sgd, sparse=rm.Adagrad(lr=0.1))


def train(mesh: Mesh, steps: list[int], depth: int, is_picky: bool) -> Any:
    """Trained values, of a model that needs a sample or of one that does not."""
    model, opt = prepared(mesh, is_picky=is_picky)
    empty = None
    if is_picky:  # one sample without ids, whose loss is left out
        ids = KeyedJaggedTensor.from_dense({"f": torch.zeros((1, 0), dtype=torch.int64)})
        empty = {"ids": ids, "y": torch.zeros(1)}
    for batch in rm.Pipeline(model, depth=depth).batches(loader(mesh.rank, steps), empty=empty):
        losses = model(batch)
        if is_picky:
            losses = losses * (not mesh.is_stand_in)
            count = int(mesh.total(0 if mesh.is_stand_in else len(losses)))
            mesh.mean(losses, count=count).backward()
        else:
            mesh.mean(losses).backward()
        opt.step()
        opt.zero_grad()
    state = rm.full_state_dict(model)
    return {key: value.tolist() for key, value in state.items()}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_needs_a_sample_trains_on_with_one_that_does_not_count(depth: int) -> None:
    found, _ = run_on_ranks(2, train, [1, 4], depth, True)
    expected, _ = run_on_ranks(2, train, [1, 4], depth, False)
    assert found == expected


def stand_ins(mesh: Mesh, depth: int) -> list[tuple[int, bool]]:
    model, _ = prepared(mesh, is_picky=False)
    found = []
    with torch.no_grad():
        for batch in rm.Pipeline(model, depth=depth).batches(loader(mesh.rank, [1, 3])):
            model(batch)
            found.append((len(batch["y"]), mesh.is_stand_in))
    return [*found, (0, mesh.is_stand_in)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_loop_knows_whether_its_batch_stands_in(depth: int) -> None:
    short, long = run_on_ranks(2, stand_ins, depth)
    assert short == [(3, False), (0, True), (0, True), (0, False)]
    assert long == [(3, False)] * 3 + [(0, False)]


def batches_of(loops: Loops) -> Iterator[int]:
    for number in range(3):
        with loops.at(is_last=False, is_stand_in=number > 0):
            yield number


@pytest.mark.parametrize(
    "how", ["at a stand-in", "held elsewhere", "before", "after the next loop"]
)
def test_an_error_at_a_batch_that_stands_in_says_so(how: str) -> None:
    loops, error = Loops(), RuntimeError("cannot reshape tensor of 0 elements")
    held = batches_of(loops)  # not closed as the error passes
    with contextlib.suppress(RuntimeError):
        for number in held if how == "held elsewhere" else batches_of(loops):
            if number == (0 if how == "before" else 1):
                raise error
    if how == "after the next loop":
        assert list(batches_of(loops)) == [0, 1, 2]
    loops.explain(error)
    loops.explain(error)  # as at the end of a with statement, and again of the program
    found = sentence_of(error)
    assert found.startswith("RuntimeError: cannot reshape tensor of 0 elements")
    is_told = how in ("at a stand-in", "held elsewhere")
    assert found.count("this rank's loader had ended before others'") == is_told
    assert ("batches(loader, empty=...)" in found) is is_told


def test_an_error_after_a_forward_is_not_of_the_loop_that_was_left() -> None:
    loops, error = Loops(), RuntimeError("the disk is full")
    for number in batches_of(loops):
        if number == 1:
            break
    loops.saw_forward(all_last=True)
    loops.explain(error)
    assert sentence_of(error) == "RuntimeError: the disk is full"
