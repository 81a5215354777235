"""Whole tensors out of sharded models and back in: state dicts, files, single-process copies."""

import copy
import json
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.placement import Homes
from rowmesh.runtime.export_files import _tensors, pack_files
from rowmesh.runtime.importing import share_of
from rowmesh.runtime.oracle import materialise
from rowmesh.runtime.places import Region
from rowmesh.runtime.regions import put_region
from tests.cases import DENSE, RULES, Case, Collection, Model, Table
from tests.ranks import run_on_ranks

# Two tables of a dim, each dtype, a frozen table, two features on one table, sequences, weights.
SHAPES: tuple[tuple[str, tuple[dict[str, Any], ...]], ...] = (
    (
        "bags",
        (
            {"rows": 37, "dim": 4, "features": 2},
            {"rows": 12, "dim": 4, "dtype": "fp16", "mean": True},
            {"rows": 9, "dim": 8, "trainable": False},
        ),
    ),
    ("sequence", ({"rows": 21, "dim": 4, "dtype": "bf16"},)),
    ("weighted", ({"rows": 5, "dim": 1},)),
)
Where = tuple[int, ...] | dict[str, Any]  # ranks, none for a copy on each; or more than ranks
PLACES: dict[int, list[tuple[Where, ...]]] = {  # of the five tables
    1: [((0,),) * 5, ((),) * 5],
    2: [
        ((), (1,), (1, 0), (0, 1), (0,)),
        ((1, 0), (), (0,), (1,), ()),
        (*({"ranks": (1, 0), "columns": 2},) * 4, (0, 1)),
    ],
    4: [
        ((3, 1, 2), (2,), (), (0, 1, 2, 3), (3,)),
        ((), (1, 0), (3, 2), (2,), (0, 1)),
        (
            {"ranks": (0, 1, 2, 3), "columns": 2, "by_host": True},
            {"ranks": (2, 0, 1), "columns": 3},  # of 1, 1 and 2 columns
            {"ranks": (2, 3), "by_host": True},
            {"ranks": (3, 0, 1, 2), "columns": 2},
            (),
        ),
    ],
}
HOSTS = {1: 1, 2: 1, 4: 2}
PLANS = [(world, plan) for world, plans in PLACES.items() for plan in range(len(plans))]


def make_case(world: int, plan: int) -> Case:
    places = iter(PLACES[world][plan])

    def table(shape: dict[str, Any]) -> Table:
        where = next(places)
        return Table(**shape, **(where if isinstance(where, dict) else {"ranks": where}))

    collections = tuple(
        Collection(kind=kind, tables=tuple(table(shape) for shape in shapes))
        for kind, shapes in SHAPES
    )
    sizes = [t.rows for c in collections for t in c.tables for _ in range(t.features)]
    ids = [
        [
            [
                [[(7 * i + 3 * rank + step) % rows for i in range(n)] for n in (2, 0, 3)]
                for rows in sizes
            ]
            for rank in range(world)
        ]
        for step in range(3)
    ]
    return Case(world=world, hosts=HOSTS[world], collections=collections, ids=ids)


def trained(mesh: Mesh, case: Case) -> nn.Module:
    model = rm.shard(Model(case), case.plan(), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE["adagrad"], sparse=RULES["rowwise"])
    for batch in case.batches_of(mesh.rank)[:2]:
        mesh.mean(model(batch)).backward()
        optimizer.step()
    return model


def fresh(mesh: Mesh, case: Case) -> nn.Module:
    return rm.shard(Model(case), case.plan(), mesh)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def complaint(action: Any) -> str:
    try:
        action()
    except rm.InputError as error:
        return str(error)
    return "no error"


# State dicts


def move_to_another_plan(mesh: Mesh, first: Case, second: Case) -> Any:
    state = rm.full_state_dict(trained(mesh, first))
    initial = rm.full_state_dict(fresh(mesh, second))
    model = fresh(mesh, second)
    fit = rm.load_full_state_dict(model, state if mesh.rank == 0 else None)
    with torch.no_grad():
        copied = [p.clone() for p in model.parameters()]
    return state, rm.full_state_dict(model), initial, fit, copied


@pytest.mark.parametrize(("world", "plan"), PLANS)
def test_a_state_dict_moves_to_any_plan_bit_for_bit(world: int, plan: int) -> None:
    cases = make_case(world, plan), make_case(world, (plan + 1) % len(PLACES[world]))
    ranks = run_on_ranks(world, move_to_another_plan, *cases, hosts=HOSTS[world])
    state, loaded, initial, fit, dense = ranks[0]
    assert_equal(loaded, state)
    assert any(not torch.equal(initial[k], state[k]) for k in state), "training changed something"
    assert set(fit.loaded) == set(state)
    assert fit.missing == fit.unexpected == ()
    for theirs in ranks[1:]:
        assert theirs[0] == theirs[1] == {}, "whole tensors are on rank 0 only"
        assert theirs[3] == fit
        assert all(torch.equal(a, b) for a, b in zip(theirs[4], dense, strict=True))


def test_keys_and_values_are_those_of_the_unsharded_model() -> None:
    case = make_case(2, 0)
    state = run_on_ranks(2, full_state_of_new, case)[0]
    assert_equal(state, dict(materialise(Model(case)).state_dict()))


def full_state_of_new(mesh: Mesh, case: Case) -> dict[str, Tensor]:
    return rm.full_state_dict(fresh(mesh, case))


def test_an_unsharded_model_gives_and_takes_the_same_state() -> None:
    case = make_case(2, 0)
    state = run_on_ranks(2, trained_state, case)[0]
    on_meta, with_memory = Model(case), materialise(Model(case))
    for model in (on_meta, with_memory):
        rm.load_full_state_dict(model, state)
        assert_equal(rm.full_state_dict(model), state)
        assert_equal(dict(model.state_dict()), state)
        flags = {n: p.requires_grad for n, p in model.named_parameters()}
        assert flags == {n: p.requires_grad for n, p in Model(case).named_parameters()}
    batch = case.batch(0, 0)
    assert torch.equal(on_meta(batch), with_memory(batch))


def trained_state(mesh: Mesh, case: Case) -> dict[str, Tensor]:
    return rm.full_state_dict(trained(mesh, case))


def tables_only(mesh: Mesh) -> Any:
    tables = [
        rm.EmbeddingBagConfig(name=n, num_embeddings=6, embedding_dim=4, feature_names=[n])
        for n in ("t_a", "t_b")
    ]
    model: nn.Module = rm.EmbeddingBagCollection(tables, device="meta")
    plan = rm.make_plan(model, mesh.topology, split="row_wise")
    rm.shard(model, plan, mesh)
    torch.manual_seed(3)
    bag, single = nn.EmbeddingBag(6, 4, mode="sum"), nn.Embedding(6, 4)
    rm.load_full_state_dict(model, {"t_a": bag, "t_b": single.state_dict()})
    return rm.full_state_dict(model), bag.weight.detach(), single.weight.detach()


def test_plain_torch_modules_are_loaded_by_table_name() -> None:
    state, bag, single = run_on_ranks(2, tables_only)[0]
    assert_equal(state, {"embedding_bags.t_a.weight": bag, "embedding_bags.t_b.weight": single})


class Tied(nn.Module):
    """One collection and one parameter under two names, a buffer, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        config = rm.EmbeddingBagConfig(
            name="items", num_embeddings=6, embedding_dim=4, feature_names=["f"]
        )
        self.first = rm.EmbeddingBagCollection([config], device="meta")
        self.second = self.first
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("count", torch.tensor([1, 0, 1]))

    def get_extra_state(self) -> str:
        return "kept elsewhere"

    def set_extra_state(self, state: str) -> None:
        raise AssertionError("nothing of it was saved, so nothing may be set")


def tied(mesh: Mesh, folder: str) -> Any:
    model = Tied()
    rm.shard(model, rm.make_plan(model, mesh.topology, split="row_wise"), mesh)
    rm.export_safetensors(model, Path(folder) / "tied.safetensors")
    other = Tied()
    other.count += 1
    rm.shard(other, rm.make_plan(other, mesh.topology, split="table_wise"), mesh)
    rm.load_full_state_dict(other, Path(folder) / "tied.safetensors")
    back = rm.unshard(other)
    if back is not None:
        assert back.one.weight is back.two.weight
        assert back.first is back.second
    return rm.full_state_dict(model), rm.full_state_dict(other)


def test_tables_and_parameters_of_two_names_have_two_keys(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, tied, str(tmp_path))[0]
    assert {k for k in first if "items" in k} == {
        "first.embedding_bags.items.weight",
        "second.embedding_bags.items.weight",
    }
    assert_equal(first, second)
    assert_equal(load_file(tmp_path / "tied.safetensors"), first)


def wrong_states(mesh: Mesh, folder: str) -> Any:
    case = make_case(2, 0)
    model = fresh(mesh, case)
    before = rm.full_state_dict(model)
    weight, dense = "collections.0.embedding_bags.c0_t0.weight", "out.bias"
    half = "collections.0.embedding_bags.c0_t1.weight"
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({weight: None}, {}),
        ({"other": torch.zeros(1)}, {}),
        ({weight: torch.zeros(37, 5), dense: torch.zeros(2)}, {}),
        ({half: torch.zeros(12, 4)}, {}),
        ({half: torch.zeros(12, 4, dtype=torch.int64)}, {"convert": True}),
        ({weight: "text"}, {}),
        ({weight: torch.zeros(37, 4, device="meta")}, {}),
        ({"c0_t0": torch.zeros(37, 4)}, {}),
        ({}, {"rename": {"colections.": "collections."}}),
        ({}, {"rename": lambda key: "x." + key, "strict": False}),
    ]
    errors = []
    for change, options in changes:
        state = {k: v for k, v in (before | change).items() if v is not None}
        given = state if mesh.rank == 0 else None
        errors.append(complaint(lambda g=given, o=options: rm.load_full_state_dict(model, g, **o)))
    here = Path(folder) / f"{mesh.rank}.pt"
    if mesh.rank == 0:
        torch.save(before, here)
    errors.append(complaint(lambda: rm.load_full_state_dict(model, here)))
    errors.append(complaint(lambda: rm.load_full_state_dict(model, here if mesh.rank else before)))
    errors.append(complaint(lambda: rm.load_full_state_dict(model, 7)))
    return errors, before, rm.full_state_dict(model)


def test_what_does_not_fit_is_one_sentence_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    ranks = run_on_ranks(2, wrong_states, str(tmp_path))
    assert ranks[0][0] == ranks[1][0]
    found = [re.sub(r"\S*/(\d.pt)", r"\1", e.removeprefix("rank 0: ")) for e in ranks[0][0]]
    start = "the state dict does not fit the model: "
    way_out = ": use rename=, or strict=False to load what fits"
    weight = "'collections.0.embedding_bags.c0_t0.weight'"
    half = "'collections.0.embedding_bags.c0_t1.weight'"
    assert found[:8] == [
        f"{start}missing {weight}{way_out}",
        f"{start}unexpected 'other'{way_out}",
        f"{start}'out.bias' has shape [2], not [1]; {weight} has shape [37, 5], not [37, 4]",
        f"{start}{half} is float32, not float16 (convert=True rounds)",
        f"{start}{half} is int64, not float16 (convert=True rounds)",
        f"{weight} is a str, not a plain tensor",
        f"{weight} has no values (device 'meta')",
        f"two given keys become {weight}, one of them 'c0_t0'",
    ]
    assert found[8].startswith("rename: no key begins with 'colections.'")
    assert re.search(r"missing ('[\w.]+', ){3}'[\w.]+' and \d+ more; unexpected", found[9])
    assert found[9].endswith(": no key fits, use rename=")
    assert found[10].startswith("rank 1: cannot read 1.pt: FileNotFoundError")
    assert "cannot read" in found[11]
    assert found[12] == "the state dict is a int: give tensors by key, or a file's path"
    assert_equal(ranks[0][1], ranks[0][2])


def partial_load(mesh: Mesh) -> Any:
    case = make_case(2, 1)
    model = fresh(mesh, case)
    before = rm.full_state_dict(model)
    vectors = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)) * 3
    given = {"old.c0_t1": vectors, "old.more": vectors, "kept": vectors}
    rename = {"old.": "", "old.more": "surplus"}
    fit = rm.load_full_state_dict(model, given, strict=False, convert=True, rename=rename)
    return before, vectors, rm.full_state_dict(model), fit


def test_what_fits_is_loaded_rounded_and_renamed_by_the_longest_prefix() -> None:
    before, vectors, after, fit = run_on_ranks(2, partial_load)[0]
    key = "collections.0.embedding_bags.c0_t1.weight"
    assert_equal(after, before | {key: vectors.half()})
    assert fit.loaded == (key,)
    assert set(fit.missing) == set(before) - {key}
    assert fit.unexpected == ("surplus", "kept")


def test_a_dense_parameter_without_memory_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    with pytest.raises(rm.InputError, match=r"'0.weight' of the model has no memory"):
        rm.load_full_state_dict(model, nn.Sequential(nn.Linear(2, 2)).state_dict())


# TorchRec

TORCHREC_DLRM = {  # of DLRMTrain(DLRM(...)) in TorchRec 1.8.0, layers (8, 4) and (8, 1)
    "model.sparse_arch.embedding_bag_collection.embedding_bags.t_a.weight": (10, 4),
    "model.sparse_arch.embedding_bag_collection.embedding_bags.t_b.weight": (7, 4),
    "model.dense_arch.model._mlp.0._linear.weight": (8, 3),
    "model.dense_arch.model._mlp.0._linear.bias": (8,),
    "model.dense_arch.model._mlp.1._linear.weight": (4, 8),
    "model.dense_arch.model._mlp.1._linear.bias": (4,),
    "model.over_arch.model.0._mlp.0._linear.weight": (8, 7),
    "model.over_arch.model.0._mlp.0._linear.bias": (8,),
    "model.over_arch.model.1.weight": (1, 8),
    "model.over_arch.model.1.bias": (1,),
}
FROM_TORCHREC = {
    "model.sparse_arch.": "",
    "model.dense_arch.model._mlp.0._linear.": "dense_arch.layers.0.",
    "model.dense_arch.model._mlp.1._linear.": "dense_arch.layers.1.",
    "model.over_arch.model.0._mlp.0._linear.": "over_arch.layers.0.",
    "model.over_arch.model.1.": "over_arch.layers.1.",
}
TABLES = [("t_a", "a", 10), ("t_b", "b", 7)]


def make_dlrm() -> rm.models.DLRM:
    tables = [
        rm.EmbeddingBagConfig(name=t, num_embeddings=n, embedding_dim=4, feature_names=[f])
        for t, f, n in TABLES
    ]
    return rm.models.DLRM(rm.EmbeddingBagCollection(tables, device="meta"), 3, (8, 4), (8, 1))


def load_dlrm(mesh: Mesh, state: dict[str, Tensor]) -> Any:
    model = make_dlrm()
    rm.shard(model, rm.make_plan(model, mesh.topology, split="row_wise"), mesh)
    fit = rm.load_full_state_dict(model, state, rename=FROM_TORCHREC)
    return fit, rm.full_state_dict(model)


def test_a_torchrec_dlrm_is_loaded_by_its_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {k: torch.randn(s, generator=generator) for k, s in TORCHREC_DLRM.items()}
    fit, found = run_on_ranks(2, load_dlrm, state)[0]
    assert len(fit.loaded) == len(TORCHREC_DLRM)
    ours = sorted(FROM_TORCHREC, key=len)
    for key, value in state.items():
        prefix = next(p for p in ours if key.startswith(p))
        assert torch.equal(found[FROM_TORCHREC[prefix] + key.removeprefix(prefix)], value)


def test_collections_have_the_keys_of_torchrecs() -> None:
    bags = rm.EmbeddingBagConfig(name="t_a", num_embeddings=3, embedding_dim=2, feature_names=["a"])
    rows = rm.EmbeddingConfig(name="t_s", num_embeddings=3, embedding_dim=2, feature_names=["s"])
    found = nn.ModuleDict(
        {"ebc": rm.EmbeddingBagCollection([bags]), "ec": rm.EmbeddingCollection([rows])}
    )
    expected = ["ebc.embedding_bags.t_a.weight", "ec.embeddings.t_s.weight"]
    assert list(rm.full_state_dict(found)) == expected


def test_a_real_torchrec_dlrm_gives_the_same_logits() -> None:
    torchrec = pytest.importorskip("torchrec")
    dlrm = pytest.importorskip("torchrec.models.dlrm")
    configs = [
        torchrec.EmbeddingBagConfig(name=t, num_embeddings=n, embedding_dim=4, feature_names=[f])
        for t, f, n in TABLES
    ]
    theirs = dlrm.DLRM(torchrec.EmbeddingBagCollection(tables=configs), 3, [8, 4], [8, 1])
    ours = make_dlrm()
    given = {f"model.{k}": v for k, v in theirs.state_dict().items()}
    assert {k: tuple(v.shape) for k, v in given.items()} == TORCHREC_DLRM
    rm.load_full_state_dict(ours, given, rename=FROM_TORCHREC)
    arguments = (["a", "b"], torch.tensor([1, 2, 9, 6]))
    lengths = torch.tensor([1, 2, 0, 1])
    dense = torch.randn(2, 3)
    expected = theirs(dense, torchrec.KeyedJaggedTensor(*arguments, lengths=lengths)).squeeze(1)
    found = ours.logits(dense, rm.KeyedJaggedTensor(*arguments, lengths=lengths))
    torch.testing.assert_close(found, expected)


class Shards(Tensor):
    """As TorchRec's sharded state dicts hold them: a Tensor to isinstance, but not a plain one."""


def test_sharded_tensors_must_be_gathered_first() -> None:
    value = torch.zeros(3, 2).as_subclass(Shards)
    with pytest.raises(rm.InputError, match="is a Shards, not a plain tensor: gather its shards"):
        rm.load_full_state_dict(nn.Linear(2, 3), {"weight": value})


# Files


def export_and_load(mesh: Mesh, first: Case, second: Case, folder: str) -> Any:
    model = trained(mesh, first)
    rm.export_safetensors(model, Path(folder) / "files", max_file_bytes=300)
    rm.export_safetensors(model, Path(folder) / "model.safetensors")
    rm.export_safetensors(model, Path(folder) / "model.safetensors")  # a file is replaced
    loaded = []
    index = Path("files") / "model.safetensors.index.json"
    for name in ("files", index, "model.safetensors"):
        other = fresh(mesh, second)
        rm.load_full_state_dict(other, Path(folder) / name)
        loaded.append(rm.full_state_dict(other))
    return rm.full_state_dict(model), loaded


@pytest.mark.parametrize("world", [1, 2, 4])
def test_exported_files_are_read_back_bit_for_bit(world: int, tmp_path: Path) -> None:
    arguments = (make_case(world, 0), make_case(world, -1), str(tmp_path))
    state, loaded = run_on_ranks(world, export_and_load, *arguments, hosts=HOSTS[world])[0]
    assert len(loaded) == 3
    for found in loaded:
        assert_equal(found, state)
    assert_equal(load_file(tmp_path / "model.safetensors"), state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["files", "model.safetensors"]
    index = json.loads((tmp_path / "files" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in state.values())
    files = sorted((tmp_path / "files").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    in_files = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            keys = list(opened.keys())
        assert sum(state[k].nbytes for k in keys) <= 300 or len(keys) == 1
        in_files |= dict.fromkeys(keys, file.name)
    assert index["weight_map"] == in_files


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
@settings(derandomize=True, deadline=None)
def test_files_are_filled_in_order_up_to_their_size(sizes: list[int], limit: int) -> None:
    named = {str(i): size for i, size in enumerate(sizes)}
    files = pack_files(named, limit)
    assert [key for file in files for key in file] == list(named)
    used = [sum(named[key] for key in file) for file in files]
    assert all(u <= limit or len(file) == 1 for u, file in zip(used, files, strict=True))
    assert all(
        u + named[following[0]] > limit for u, following in zip(used, files[1:], strict=False)
    )


def tables_alive(mesh: Mesh) -> int:
    model = fresh(mesh, make_case(2, 0))
    seen: list[Any] = []
    most = 0
    for key, tensor in _tensors(model):
        if tensor is not None and "embedding" in key:
            seen.append(weakref.ref(tensor))
        del tensor
        most = max(most, sum(r() is not None for r in seen))
    return most


def test_rank_0_gathers_one_table_at_a_time() -> None:
    assert run_on_ranks(2, tables_alive)[0] == 1


def wrong_exports(mesh: Mesh, folder: str) -> list[str]:
    model, here = fresh(mesh, make_case(2, 0)), Path(folder)
    (here / "old").mkdir(exist_ok=True)
    (here / "dir.safetensors").mkdir(exist_ok=True)
    errors = [
        complaint(lambda: rm.export_safetensors(model, here / "old")),
        complaint(lambda: rm.export_safetensors(model, here / "dir.safetensors")),
        complaint(lambda: rm.export_safetensors(model, here / "no" / "such")),
        complaint(lambda: rm.export_safetensors(model, here / "new", max_file_bytes=0)),
    ]
    modules = dict.fromkeys(("safetensors", "safetensors.torch"))
    kept = {name: sys.modules.pop(name, None) for name in modules}
    try:
        sys.modules.update(modules if mesh.rank == 0 else {})  # type: ignore[arg-type]
        errors.append(complaint(lambda: rm.export_safetensors(model, here / "new")))
    finally:
        sys.modules.update({k: v for k, v in kept.items() if v is not None})
    return errors


def test_an_export_that_cannot_be_is_told_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, wrong_exports, str(tmp_path))
    assert first == second
    for found, wanted in zip(
        first,
        [
            r"old exists: remove it, or export to a new folder",
            r"cannot write .*dir.safetensors: it is a folder",
            r"cannot write .*such: there is no folder .*no",
            r"max_file_bytes is 0, but must be at least 1",
            r"safetensors is needed for rm\.export.*: pip install 'safetensors>=0\.4'",
        ],
        strict=True,
    ):
        assert re.search(wanted, found), found
    with pytest.raises(rm.InputError, match=r"has no values \(device 'meta'\)"):
        rm.export_safetensors(make_dlrm(), tmp_path / "meta")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dir.safetensors", "old"]


def full_disk(mesh: Mesh, folder: str) -> str:
    here = Path(folder) / "full"
    if mesh.rank == 0:
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
    try:
        model = fresh(mesh, make_case(2, 0))
        return complaint(lambda: rm.export_safetensors(model, here, max_file_bytes=100))
    finally:
        if mesh.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_half_way_leaves_nothing_and_all_ranks_say_so(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, full_disk, str(tmp_path))
    assert first == second
    assert re.match(r"rank 0: cannot write .*full: ", first)
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    broken, lone, words = (tmp_path / n for n in ("b.safetensors", "lone.pt", "x.txt"))
    broken.write_bytes(b"nothing")
    torch.save(torch.zeros(2), lone)
    model = nn.Linear(2, 2)
    for path, wanted in (
        (broken, "cannot read .*b.safetensors: SafetensorError"),
        (lone, "lone.pt holds a Tensor, not a state dict"),
        (words, r"x.txt is no .safetensors, .index.json, .pt, .pth, .bin file"),
        (tmp_path / "none.safetensors", "cannot read .*none.safetensors: FileNotFoundError"),
    ):
        with pytest.raises(rm.InputError, match=wanted):
            rm.load_full_state_dict(model, path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(rm.InputError, match=r"must hold one model\.safetensors\.index"):
        rm.load_full_state_dict(model, empty)


# Single-process copies


def unshard_and_compare(mesh: Mesh, case: Case) -> Any:
    model = trained(mesh, case).eval()
    batch = case.batch(2, mesh.rank)
    with torch.no_grad():
        outputs = mesh.gather_objects(model(batch))
    state, found = rm.full_state_dict(model), rm.unshard(model)
    assert (found is None) == (mesh.rank != 0)
    if found is None:
        return None
    with torch.no_grad():
        again = [found(case.batch(2, rank)) for rank in range(mesh.world)]
    found.train()
    found(batch).sum().backward()
    trained_again = {n: p.grad is not None for n, p in found.named_parameters()}
    return outputs, again, state, found, trained_again


@pytest.mark.parametrize(("world", "plan"), PLANS)
def test_an_unsharded_copy_computes_the_same_bits(world: int, plan: int) -> None:
    case = make_case(world, plan)
    outputs, again, state, found, has_grad = run_on_ranks(
        world, unshard_and_compare, case, hosts=HOSTS[world]
    )[0]
    assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))
    assert_equal(dict(found.state_dict()), state)
    assert list(found.state_dict()) == list(Model(case).state_dict())
    wanted = {n: p.requires_grad for n, p in Model(case).named_parameters()}
    assert {n: p.requires_grad for n, p in found.named_parameters()} == wanted
    assert [n for n in wanted if "embedding" in n and has_grad[n] != wanted[n]] == []
    assert_equal(dict(copy.deepcopy(found).state_dict()), state)


def copy_then_change(mesh: Mesh, case: Case) -> Any:
    model = trained(mesh, case)
    state = {k: v.clone() for k, v in rm.full_state_dict(model).items()}
    found = rm.unshard(model)
    rm.load_full_state_dict(model, {k: v + 1 for k, v in state.items()})
    return state, None if found is None else dict(found.state_dict())


@pytest.mark.parametrize("world", [1, 2])
def test_the_copy_has_values_of_its_own(world: int) -> None:
    state, copied = run_on_ranks(world, copy_then_change, make_case(world, 0))[0]
    assert_equal(copied, state)


def test_unsharding_an_unsharded_model_copies_it() -> None:
    model = materialise(make_dlrm())
    found = rm.unshard(model)
    assert found is not None
    assert found is not model
    assert_equal(dict(found.state_dict()), dict(model.state_dict()))


# Pretrained vectors


def pretrained(mesh: Mesh, case: Case, folder: str) -> Any:
    here, found = Path(folder), []
    for source in ("tensor", "array", "module", "npy", "safetensors"):
        model = fresh(mesh, case)
        before = rm.full_state_dict(model)
        for name, rows, vectors in given_vectors():
            given: Any = vectors
            if source == "array":
                given = vectors.numpy()
            elif source == "module":
                given = nn.Embedding.from_pretrained(vectors)
            elif source in ("npy", "safetensors"):
                given = here / f"{name}.{source}"
            elif mesh.rank:
                given = None
            rm.load_pretrained(model, name, given, rows=rows if mesh.rank == 0 else None)
        found.append((before, rm.full_state_dict(model)))
    return found


def given_vectors() -> list[tuple[str, Any, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        ("c0_t0", [36, 0, 17, 16], torch.randn(4, 4, generator=generator)),
        ("c0_t1", None, torch.randn(7, 4, generator=generator)),
        ("c0_t2", None, torch.randn(9, 8, generator=generator)),
        ("c1_t0", torch.tensor([20, 3]), torch.randn(2, 4, generator=generator)),
        ("c2_t0", [], torch.randn(0, 1, generator=generator)),
    ]


@pytest.mark.parametrize(("world", "plan"), PLANS)
def test_pretrained_vectors_reach_their_rows_and_no_others(
    world: int, plan: int, tmp_path: Path
) -> None:
    for name, _, vectors in given_vectors():
        np.save(tmp_path / f"{name}.npy", vectors.numpy())
        save_file({"weight": vectors, "other": vectors + 1}, tmp_path / f"{name}.safetensors")
    case = make_case(world, plan)
    sources = run_on_ranks(world, pretrained, case, str(tmp_path), hosts=HOSTS[world])[0]
    assert len(sources) == 5
    for before, after in sources:
        assert_equal(after, expect_vectors(before))


def expect_vectors(before: dict[str, Tensor]) -> dict[str, Tensor]:
    expected = {k: v.clone() for k, v in before.items()}
    for name, rows, vectors in given_vectors():
        key = next(k for k in expected if f".{name}." in k)
        for i, row in enumerate(range(len(vectors)) if rows is None else rows):
            expected[key][int(row)] = vectors[i].to(expected[key].dtype)
    return expected


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_pretrained_vectors_of_an_unsharded_model(device: str) -> None:
    case = make_case(2, 0)
    reference = materialise(Model(case))
    model = Model(case) if device == "meta" else materialise(Model(case))
    for name, rows, vectors in given_vectors():
        rm.load_pretrained(model, name, vectors, rows=rows)
    assert_equal(dict(model.state_dict()), expect_vectors(dict(reference.state_dict())))


def test_pretrained_tables_can_be_frozen_before_sharding() -> None:
    model = make_dlrm()
    weight = model.embedding_bag_collection.table_modules()["t_a"]
    rm.load_pretrained(model, "t_a", torch.ones(10, 4), trainable=False)
    assert not weight.weight.requires_grad
    rm.load_pretrained(model, "t_a", torch.ones(10, 4))
    assert not weight.weight.requires_grad
    mesh = rm.init_mesh()
    rm.shard(model, rm.make_plan(model, mesh.topology), mesh)
    rm.load_pretrained(model, "t_a", torch.ones(10, 4), trainable=False)
    with pytest.raises(rm.InputError, match=r"'t_a' was sharded frozen: .* trainable=True before"):
        rm.load_pretrained(model, "t_a", torch.ones(10, 4), trainable=True)


def wrong_vectors(mesh: Mesh, folder: str) -> Any:
    model, here = fresh(mesh, make_case(2, 0)), Path(folder)
    if mesh.rank == 0:
        save_file({"a": torch.ones(1), "b": torch.ones(1)}, here / "two.safetensors")
    mesh.total(1)
    good = torch.zeros(3, 4)
    before = rm.full_state_dict(model)
    calls: list[tuple[Any, ...]] = [
        ("c0_t9", good, None),
        ("c0_t0", torch.zeros(3, 5), None),
        ("c0_t0", torch.zeros(3, 4, dtype=torch.int32), None),
        ("c0_t0", torch.zeros(38, 4), None),
        ("c0_t0", good, [0, 1]),
        ("c0_t0", good, [0.5, 1, 2]),
        ("c0_t0", good, [0, 1, 37]),
        ("c0_t0", good, [0, -1, 2]),
        ("c0_t0", good, [5, 1, 5]),
        ("c0_t0", np.array(["a"]), None),
        ("c0_t0", here / "none.npy", None),
        ("c0_t0", here / "words.txt", None),
        ("c0_t0", here / "two.safetensors", None),
        ("c0_t0", good if mesh.rank == 0 else here / "two.safetensors", None),
    ]
    errors = [
        complaint(lambda c=c: rm.load_pretrained(model, c[0], c[1], rows=c[2])) for c in calls
    ]
    return errors, before, rm.full_state_dict(model)


def test_vectors_that_do_not_fit_are_told_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, wrong_vectors, str(tmp_path))
    assert first[0] == second[0]
    assert_equal(first[1], first[2])
    for found, wanted in zip(
        first[0],
        [
            r"the model has no table 'c0_t9': did you mean 'c0_t2'\?|'c0_t1'\?|'c0_t0'\?",
            r"vectors of table 'c0_t0' are \[3, 5\] of torch.float32, but must be \[n, 4\]",
            r"\[3, 4\] of torch.int32, but must be \[n, 4\] of a floating dtype",
            r"38 vectors for table 'c0_t0' of 37 rows",
            r"rows of table 'c0_t0' are \[2\] of int64, but must be \[3\] integers",
            r"rows of table 'c0_t0' are \[3\] of float64, but must be \[3\] integers",
            r"row 37 is outside table 'c0_t0' \(37 rows\)",
            r"row -1 is outside table 'c0_t0' \(37 rows\)",
            r"row 5 of table 'c0_t0' is given twice",
            r"the vectors of table 'c0_t0' is a ndarray, not a plain tensor",
            r"cannot read .*none.npy: FileNotFoundError",
            r"words.txt is no .npy or .safetensors file",
            r"holds 2 tensors, none called 'c0_t0' or 'weight'",
            r"rank 1: .*holds 2 tensors",
        ],
        strict=True,
    ):
        assert re.search(wanted, found), found


# Regions


@given(
    num_rows=st.integers(1, 60),
    shards=st.integers(1, 16),
    owners=st.integers(1, 5),
    data=st.data(),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_rows_and_columns_of_every_region_make_the_whole(
    num_rows: int, shards: int, owners: int, data: st.DataObject
) -> None:
    """Column pieces over owners, put together; and a choice of rows found in their regions."""
    homes = Homes(num_rows, shards, owners)
    table = torch.arange(num_rows * 6).view(num_rows, 6)
    whole, state = torch.full_like(table, -1), torch.full((num_rows,), -1)
    ids = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), unique=True)), dtype=np.int64)
    rows = data.draw(st.sampled_from([None, ids]))
    count = data.draw(st.integers(0, num_rows)) if rows is None else len(ids)
    given_rows = np.arange(count) if rows is None else rows
    taken: list[int] = []
    for first, last in ((0, 2), (2, 5), (5, 6)):
        for owner in range(owners):
            region = Region(
                table=0,
                rank=0,
                replicas=(0,),
                owner=owner,
                homes=homes,
                columns=(first, last),
                start=0,
            )
            mine = homes.rows(owner)
            put_region(whole, region, table[mine, first:last])
            put_region(state, region, table[mine, 0])
            positions, slots = share_of(region, rows, count)
            assert (given_rows[positions] == mine[slots]).all()
            taken += positions.tolist() if first == 0 else []
    assert torch.equal(whole, table)
    assert torch.equal(state, table[:, 0])
    assert sorted(taken) == list(range(count))


def snapshot(mesh: Mesh) -> Any:
    case = make_case(mesh.world, 0)
    model = fresh(mesh, case)
    found = rm.full_state_dict(model)
    before = {name: value.clone() for name, value in found.items()}
    optimizer = rm.Optimizer(model, dense=DENSE["sgd"], sparse=RULES["sgd"])
    mesh.mean(model(case.batch(0, mesh.rank))).backward()
    optimizer.step()
    after = rm.full_state_dict(model)
    return [name for name in before if not torch.equal(found[name], before[name])], after, before


def test_a_state_dict_does_not_change_when_training_goes_on() -> None:
    changed, after, before = run_on_ranks(2, snapshot)[0]
    assert changed == []
    assert any(not torch.equal(after[name], before[name]) for name in before)
