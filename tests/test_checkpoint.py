"""Checkpoints: saved under one plan and world, loaded under others, bit by bit."""

import contextlib
import functools
import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import PlanError
from rowmesh.placement.document import plan_from_json
from rowmesh.runtime.boxes import shard_rows, table_tensors
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.export import full_sparse_state
from rowmesh.train.checkpoint.planning import BoxSavePlanner
from rowmesh.train.checkpoint.saving import Save
from rowmesh.train.checkpoint.storage import BoxReader
from tests.cases import (
    DENSE,
    RULES,
    Case,
    Collection,
    Model,
    Table,
    cases,
    host_copies_of,
    tables,
)
from tests.ranks import run_on_ranks
from tests.test_central_property import SUITE

OF_MODEL = ("rows", "dim", "features", "mean", "dtype", "trainable")
EXTRA = {"position": 17, "scheduler": {"last_epoch": 3, "rates": [0.1, 1e-30]}, "note": None}


def start(mesh: Mesh, case: Case) -> tuple[nn.Module, rm.Optimizer]:
    model = rm.shard(Model(case), case.plan(), mesh)
    return model, rm.Optimizer(model, dense=DENSE[case.dense], sparse=RULES[case.rule])


def train(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer, batches: Any) -> list[Any]:
    losses = []
    for batch in batches:
        found = model(batch)
        mesh.mean(found).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.detach())
    return losses


def state_of(model: nn.Module, optimizer: rm.Optimizer) -> dict[str, Any]:
    """Everything that must come back, whole, under names; tables on rank 0 only."""
    found: dict[str, Any] = dict(rm.full_state_dict(model))
    for table, state in full_sparse_state(model).items():
        found |= {f"{table}.{name}": value for name, value in state.items()}
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in optimizer.dense.state.items():
        found |= {f"{names[id(parameter)]}/{k}": v for k, v in state.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {k: v.clone() if torch.is_tensor(v) else v for k, v in found.items()} | {"lr": groups}


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names whose bits differ."""
    assert ours.keys() == theirs.keys()

    def are_equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if torch.is_tensor(a) else a == b

    return [name for name, value in ours.items() if not are_equal(value, theirs[name])]


def mark_rows(mesh: Mesh, model: nn.Module) -> None:
    """State that tells every row and column apart, the same under every plan."""
    for stack in (s for e in sharded_engines(model) for s in e.stacks):
        regions = [r for r in stack.layout.home if r.rank == mesh.rank]
        first = stack.layout.home_slots[mesh.rank]
        regions += [
            replace(r, start=first + r.start)
            for r in stack.layout.host_copies
            if r.holder == mesh.rank % mesh.topology.local
        ]
        for states, held in (
            (stack.home_state, regions),
            (stack.copies_state, (*stack.layout.copied, *stack.layout.hot)),
        ):
            for state in states.values():
                for r in held:
                    rows = torch.from_numpy(r.rows()).float() + 1
                    columns = torch.arange(*r.columns) / 16
                    marks = rows if state.dim() == 1 else rows[:, None] + columns
                    state[r.start : r.start + r.num_rows] = marks


def spoil(model: nn.Module, optimizer: rm.Optimizer) -> None:
    """Overwrite everything, so that what a load leaves out is seen."""
    for stack in (s for e in sharded_engines(model) for s in e.stacks):
        for tensor in (stack.home, stack.copies):
            tensor.fill_(-77.0)
        for tensor in (*stack.home_state.values(), *stack.copies_state.values()):
            tensor.fill_(-77.0)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(-77.0)
    optimizer.param_groups[-1]["lr"] = optimizer.param_groups[0]["lr"] = -77.0


def save_run(mesh: Mesh, case: Case, folder: str) -> Any:
    """Train, save; then one more step. The state at both moments."""
    model, optimizer = start(mesh, case)
    mark_rows(mesh, model)
    batches = case.batches_of(mesh.rank)
    train(mesh, model, optimizer, batches)
    optimizer.param_groups[-1]["lr"] = 0.0625
    saved = state_of(model, optimizer)
    rm.Checkpoints(folder).save(3, model=model, optimizer=optimizer, mesh=mesh, extra=EXTRA)
    losses = train(mesh, model, optimizer, batches[:1])
    return saved, state_of(model, optimizer), losses


def load_runs(mesh: Mesh, variants: list[Case], folder: str) -> Any:
    """Load under every plan in turn; then one more step."""
    found = []
    for case in variants:
        model, optimizer = start(mesh, case)
        spoil(model, optimizer)
        loaded = rm.Checkpoints(folder).load(model=model, optimizer=optimizer, mesh=mesh)
        assert (loaded.step, loaded.extra) == (3, EXTRA)
        state = state_of(model, optimizer)
        copies = [s.copies.clone() for e in sharded_engines(model) for s in e.stacks]
        copies += [
            v for e in sharded_engines(model) for s in e.stacks for v in s.copies_state.values()
        ]
        shared = [tensor.clone() for tensor in host_copies_of(mesh, model)]
        losses = train(mesh, model, optimizer, case.batches_of(mesh.rank)[:1])
        found.append((state, state_of(model, optimizer), losses, copies, shared))
    return found


@st.composite
def variants(draw: st.DrawFn, base: Case, world: int) -> Case:
    """The same model under another plan and world; a rank's batches are those of a base rank."""
    hosts = draw(st.sampled_from([h for h in (1, 2, 4) if world % h == 0]))
    ids = [[step[rank % len(step)] for rank in range(world)] for step in base.ids]
    base = replace(base, world=world, hosts=hosts, ids=ids)

    def place(table: Table, kind: str) -> Table:
        for _ in range(20):  # a split drawn for other columns may not suit this table
            other = draw(tables(world, hosts, kind, True))
            other = replace(other, **{f: getattr(table, f) for f in OF_MODEL})
            with contextlib.suppress(PlanError):
                replace(base, collections=(Collection(kind=kind, tables=(other,)),)).plan()
                return other
        raise AssertionError(f"no plan for {table}")

    return replace(
        base,
        collections=tuple(
            replace(c, tables=tuple(place(t, c.kind) for t in c.tables)) for c in base.collections
        ),
    )


@settings(SUITE, max_examples=5, phases=[Phase.generate])  # shrinking takes minutes
@given(data=st.data())
def test_loads_under_every_plan_and_world(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    worlds = st.sampled_from([1, 2, 4])
    base = data.draw(cases(world=data.draw(worlds)))
    base = replace(base, accumulate=1)
    folder = str(tmp_path_factory.mktemp("saved"))
    runs = run_on_ranks(base.world, save_run, base, folder, hosts=base.hosts)
    saved, after, _ = runs[0]
    others = [base] + [data.draw(variants(base, data.draw(worlds))) for _ in range(9)]
    by_mesh: dict[tuple[int, int], list[Case]] = {}
    for case in others:
        by_mesh.setdefault((case.world, case.hosts), []).append(case)
    for (world, hosts), group in by_mesh.items():
        found = run_on_ranks(world, load_runs, group, folder, hosts=hosts)
        for i, case in enumerate(group):
            state, later, *_ = found[0][i]
            assert different(state, saved) == []
            for rank in range(world):
                for ours, first in zip(found[rank][i][3], found[0][i][3], strict=True):
                    assert torch.equal(ours, first), f"copies of rank {rank}"
                peer = rank % (world // hosts)
                for ours, theirs in zip(found[rank][i][4], found[peer][i][4], strict=True):
                    assert torch.equal(ours, theirs), f"host copies of rank {rank}"
            if case is base:
                assert different(later, after) == []
                for rank in range(world):
                    for ours, theirs in zip(found[rank][i][2], runs[rank][2], strict=True):
                        assert torch.equal(ours, theirs)


TABLES = (
    Table(rows=40, dim=4, ranks=()),
    Table(rows=37, dim=8, ranks=(1, 0)),
    Table(rows=9, dim=4, ranks=(1,), exchange="pooled", mean=True),
)


def make_case(world: int = 2, **changes: Any) -> Case:
    def ids(rows: int, rank: int, step: int) -> list[list[int]]:
        return [[(7 * i + 5 * rank + step) % rows for i in range(b)] for b in (2, 0, 3)]

    placed = TABLES if world > 1 else tuple(replace(t, ranks=(0,)) for t in TABLES)
    drawn = [[[ids(t.rows, r, s) for t in placed] for r in range(world)] for s in range(4)]
    return Case(world=world, collections=(Collection(tables=placed),), ids=drawn, **changes)


def saved_case(folder: Path, world: int = 2, **changes: Any) -> tuple[Case, dict[str, Any]]:
    case = make_case(world, **changes)
    return case, run_on_ranks(world, save_run, case, str(folder))[0][0]


def one_rank(**changes: Any) -> tuple[Mesh, nn.Module, rm.Optimizer, Case]:
    mesh, case = rm.init_mesh(), make_case(1, **changes)
    return mesh, *start(mesh, case), case


@pytest.mark.parametrize("shards", [2, 3, 5, 64])
@pytest.mark.parametrize("rule", ["rowwise", "adam"])
def test_loads_with_another_number_of_virtual_shards(
    shards: int, rule: str, tmp_path: Path
) -> None:
    case, saved = saved_case(tmp_path, rule=rule)
    other = replace(
        case,
        collections=(Collection(tables=tuple(replace(t, shards=shards) for t in TABLES)),),
    )
    found = run_on_ranks(2, load_runs, [other], str(tmp_path))[0][0]
    assert different(found[0], saved) == []


def test_boxes_are_those_of_the_padded_view(tmp_path: Path) -> None:
    """A plain `dcp.load` of the reader's gives [Q, S, D] with row r at (r // S, r mod S)."""
    _, saved = saved_case(tmp_path)
    for number, table in enumerate(TABLES):
        for name, whole in (
            ("weight", saved[f"collections.0.embedding_bags.c0_t{number}.weight"]),
            ("state.v", saved[f"c0_t{number}.v"]),
        ):
            key = f"tables.c0_t{number}.{name}"
            padded = torch.zeros(-(-table.rows // 16), 16, *whole.shape[1:])
            with pytest.warns(UserWarning, match="single process"):
                dcp.load({key: padded}, storage_reader=BoxReader(tmp_path / "step_000003"))
            assert torch.equal(padded.flatten(0, 1)[: table.rows], whole)
    assert shard_rows(37, 16, 4) == 3
    assert shard_rows(37, 16, 5) == 2
    assert shard_rows(3, 16, 5) == 0


def write_plans(mesh: Mesh, case: Case, max_box_bytes: int) -> Any:
    model, _ = start(mesh, case)
    planner = BoxSavePlanner(max_box_bytes=max_box_bytes)
    planner.set_up_planner(table_tensors(model))
    return [
        (i.index.fqn, tuple(i.index.offset), tuple(i.tensor_data.chunk.sizes))
        for i in planner.create_local_plan().items
    ]


@pytest.mark.parametrize("max_box_bytes", [1, 64, 1 << 26])
def test_every_element_is_written_once_by_one_rank(max_box_bytes: int) -> None:
    found = run_on_ranks(2, write_plans, make_case(rule="adam"), max_box_bytes)
    assert all(found), "both ranks write"
    for number, table in enumerate(TABLES):
        for name, dim in (("weight", table.dim), ("state.m", table.dim), ("state.t", None)):
            seen = np.zeros((-(-table.rows // 16), 16, dim or 1), dtype=int)
            for key, offsets, sizes in found[0] + found[1]:
                if key == f"tables.c0_t{number}.{name}":
                    assert dim is None or np.prod(sizes) * 4 <= max(max_box_bytes, 4 * dim)
                    seen[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
            rows = seen.reshape(-1, dim or 1)
            assert (rows[: table.rows] == 1).all()
            assert (rows[table.rows :] == 0).all()


def test_columns_on_different_ranks_make_boxes_of_their_own(tmp_path: Path) -> None:
    """Element-wise boxes are [:, j, c0:c1]; one number a row is written by column 0's piece."""
    mesh, model, _, _ = one_rank()
    stack = sharded_engines(model)[0].stacks[0]
    region = stack.layout.home[0]
    for columns, writes_rows in (((0, 2), True), ((2, 4), False)):
        stack.layout = replace(stack.layout, home=(replace(region, columns=columns),))
        stack.home, stack.home_state = torch.zeros(40, 2), {"v": torch.zeros(40)}
        held = {k: v for k, v in table_tensors(model).items() if "c0_t0" in k}
        planner = BoxSavePlanner()
        planner.set_up_planner(held)
        items = planner.create_local_plan().items
        offsets = [tuple(i.index.offset) for i in items if i.index.fqn.endswith("weight")]
        assert offsets == [(0, j, columns[0]) for j in range(16)]
        assert any(i.index.fqn.endswith("state.v") for i in items) == writes_rows
        assert held["tables.c0_t0.weight"].shape == (3, 16, 4)
    with pytest.raises(rm.RowmeshError, match=r"'tables.c0_t0.weight' has 160 .* ranks wrote 80"):
        rm.Checkpoints(tmp_path).save(1, model=model, optimizer=None, mesh=mesh)
    assert not list(tmp_path.iterdir())


def resume_generators(mesh: Mesh, folder: str) -> Any:
    random.seed(mesh.rank)
    np.random.seed(mesh.rank)
    torch.manual_seed(mesh.rank)
    np.random.randn()  # leaves half of a pair of normal numbers behind
    case = make_case(mesh.world)
    model, optimizer = start(mesh, case)
    checkpoints = rm.Checkpoints(folder)
    torch.manual_seed(mesh.rank)
    if checkpoints.latest() is None:
        checkpoints.save(1, model=model, optimizer=optimizer, mesh=mesh)
    else:
        checkpoints.load(model=model, optimizer=optimizer, mesh=mesh)
    return random.random(), np.random.randn(), torch.rand(1).item()


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    first = run_on_ranks(2, resume_generators, str(tmp_path))
    assert first[0] != first[1]
    assert run_on_ranks(2, resume_generators, str(tmp_path)) == first
    other = run_on_ranks(4, resume_generators, str(tmp_path))
    assert len({str(numbers) for numbers in (*other, *first)}) == 6, "seeded anew, all different"
    assert run_on_ranks(4, resume_generators, str(tmp_path)) == other


def save_between(mesh: Mesh, folder: str) -> list[str]:
    """Backward without step; then a clipped gradient; then extras that are not for JSON."""
    case = make_case()
    model, optimizer = start(mesh, case)
    batch = case.batch(0, mesh.rank)
    checkpoints = rm.Checkpoints(folder)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "mesh": mesh}
    found = []

    def refuse(action: Any) -> None:
        try:
            action()
        except rm.RowmeshError as error:
            found.append(f"{type(error).__name__}: {error}")

    mesh.mean(model(batch)).backward()
    refuse(lambda: checkpoints.save(1, **parts))
    optimizer.clip_grad_norm_(1.0)
    refuse(lambda: checkpoints.save(1, **parts))
    refuse(lambda: checkpoints.load(**parts))
    optimizer.step()
    refuse(lambda: checkpoints.load(**parts))
    refuse(lambda: checkpoints.save(1, **parts, extra={"a": [{3: 1}] if mesh.rank else []}))
    refuse(lambda: checkpoints.save(1, **parts, extra={"a": torch.ones(1)}))
    refuse(lambda: checkpoints.save(-1, **parts))
    refuse(lambda: checkpoints.save(mesh.rank, **parts))
    mesh.total(1)
    found += [p.name for p in Path(folder).iterdir()]
    mesh.total(1)
    checkpoints.save(1, **parts)
    refuse(lambda: checkpoints.load(**parts, step=2))
    mesh.mean(model(batch)).backward()
    refuse(lambda: checkpoints.load(**parts))
    return found


def test_refusals_reach_all_ranks(tmp_path: Path) -> None:
    found = run_on_ranks(2, save_between, str(tmp_path))
    assert found[0] == found[1]
    between = "StepError: rank 0: a checkpoint between backward and step: call opt.step() or"
    assert [s.startswith(between) for s in found[0]] == [True] * 2 + [False] * 7 + [True]
    assert "there is no checkpoint in" in found[0][2]
    assert "there is no checkpoint in" in found[0][3]
    assert "rank 1: extra['a'][0]: key 3 is no string" in found[0][4]
    assert "rank 0: extra['a'] is of type Tensor" in found[0][5]
    assert "step is -1, but must be at least 0" in found[0][6]
    assert "ranks save different steps: [0, 1], in rank order" in found[0][7]
    assert "no checkpoint of step 2" in found[0][8]
    assert "there are [1]" in found[0][8]


def test_nothing_is_changed_by_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    mesh, model, optimizer, case = one_rank()
    checkpoints = rm.Checkpoints(tmp_path)
    train(mesh, model, optimizer, case.batches_of(0))
    checkpoints.save(1, model=model, optimizer=optimizer, mesh=mesh)
    first, *rest = case.collections[0].tables

    def with_table(**changes: Any) -> Case:
        return replace(case, collections=(Collection(tables=(replace(first, **changes), *rest)),))

    for other, sentence in (
        (with_table(rows=41), "table 'c0_t0': its rows is 40 in the checkpoint, 41 in the model"),
        (with_table(dim=8), "table 'c0_t0': its columns is 4 in the checkpoint, 8 in the model"),
        (with_table(dtype="fp16"), "its data type is fp32 in the checkpoint, fp16 in the model"),
        (replace(case, rule="adam"), "update rule is RowwiseAdagrad, the optimiser's is Adam"),
        (replace(case, dense="sgd"), "dense optimiser is Adagrad, the model's is SGD"),
        (replace(case, has_unused=False), "parameter groups of the dense optimiser are"),
        (
            replace(case, collections=(Collection(tables=(first, *rest, first)),)),
            "the model's table 'c0_t3' is not in the checkpoint: did you mean",
        ),
        (
            replace(case, collections=(Collection(tables=(first, rest[0])),)),
            "the checkpoint's table 'c0_t2' is not in the model: did you mean",
        ),
    ):
        model, optimizer = start(mesh, other)
        before = state_of(model, optimizer)
        with pytest.raises(rm.InputError) as error:
            checkpoints.load(model=model, optimizer=optimizer, mesh=mesh)
        assert sentence in str(error.value)
        assert different(state_of(model, optimizer), before) == []


def test_without_an_optimiser(tmp_path: Path) -> None:
    """Weights load alone from a whole checkpoint; state does not load from weights alone."""
    mesh, model, optimizer, case = one_rank()
    train(mesh, model, optimizer, case.batches_of(0))
    weights = rm.full_state_dict(model)
    rm.Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, mesh=mesh)
    rm.Checkpoints(tmp_path).save(2, model=model, optimizer=None, mesh=mesh)
    for step in (1, 2):
        model, optimizer = start(mesh, case)
        rm.Checkpoints(tmp_path).load(model=model, optimizer=None, mesh=mesh, step=step)
        assert all(torch.equal(v, weights[k]) for k, v in rm.full_state_dict(model).items())
    with pytest.raises(rm.InputError, match="saved without an optimiser: load optimizer=None"):
        rm.Checkpoints(tmp_path).load(model=model, optimizer=optimizer, mesh=mesh)


def test_frozen_tables_have_no_state_to_load(tmp_path: Path) -> None:
    mesh, case = rm.init_mesh(), make_case(1)
    frozen_tables = tuple(replace(t, trainable=False) for t in case.collections[0].tables[:1])
    frozen = replace(
        case, collections=(Collection(tables=frozen_tables + case.collections[0].tables[1:]),)
    )
    for saved, loaded in ((case, frozen), (frozen, case)):
        model, optimizer = start(mesh, saved)
        rm.Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, mesh=mesh)
        model, optimizer = start(mesh, loaded)
        if loaded is frozen:
            rm.Checkpoints(tmp_path).load(model=model, optimizer=optimizer, mesh=mesh)
        else:
            with pytest.raises(rm.InputError, match=r"'tables.c0_t0.state.v' is not in .* frozen"):
                rm.Checkpoints(tmp_path).load(model=model, optimizer=optimizer, mesh=mesh)


@pytest.mark.parametrize("dense", ["sgd", "adagrad", "adam"])
def test_groups_and_rates_of_the_dense_optimiser_come_back(dense: str, tmp_path: Path) -> None:
    mesh, case = rm.init_mesh(), make_case(1)
    kind = DENSE[dense]

    def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.25}]
        return kind(groups)

    def begin() -> tuple[nn.Module, rm.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = rm.shard(Model(case), case.plan(), mesh)
        optimizer = rm.Optimizer(model, dense=two_groups, sparse=rm.RowwiseAdagrad(lr=0.5))
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = begin()
    train(mesh, model, optimizer, case.batches_of(0))
    scheduler.step()
    extra = {"scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "_get_lr"}}
    rm.Checkpoints(tmp_path).save(4, model=model, optimizer=optimizer, mesh=mesh, extra=extra)
    again, other, second = begin()
    loaded = rm.Checkpoints(tmp_path).load(model=again, optimizer=other, mesh=mesh)
    second.load_state_dict(loaded.extra["scheduler"])
    assert other.param_groups[0] is other.dense.param_groups[0]
    assert [g["lr"] for g in other.param_groups] == [0.05, 0.125, 0.25]
    for part, opt, rates in ((model, optimizer, scheduler), (again, other, second)):
        train(mesh, part, opt, case.batches_of(0))
        rates.step()
    assert different(state_of(again, other), state_of(model, optimizer)) == []


def save_twice(mesh: Mesh, first: str, second: str) -> Any:
    """The same moment saved in both ways; training goes on before the second is written."""
    case = make_case()
    model, optimizer = start(mesh, case)
    batches = case.batches_of(mesh.rank)
    train(mesh, model, optimizer, batches[:2])
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "mesh": mesh, "extra": EXTRA}
    rm.Checkpoints(first).save(2, **parts)
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    checkpoints = rm.Checkpoints(second)
    may_write, write = threading.Event(), Save.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "write", lambda save: write(save) if may_write.wait(20) else None)
        checkpoints.save(2, **parts, asynchronous=True)
        train(mesh, model, optimizer, batches[2:])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)
    may_write.set()
    before = checkpoints.latest()
    mesh.total(1)  # no rank completes it before all have looked
    checkpoints.wait()
    checkpoints.wait()
    return before, checkpoints.latest()


def test_asynchronous_saves_the_bytes_of_its_moment(tmp_path: Path) -> None:
    folders = [tmp_path / "now", tmp_path / "later"]
    assert run_on_ranks(2, save_twice, *map(str, folders)) == [(None, 2)] * 2
    now, later = (
        {p.name: p.read_bytes() for p in (folder / "step_000002").iterdir()} for folder in folders
    )
    assert sorted(now) == ["metadata.json", "rank_00000.bin", "rank_00001.bin"]
    assert now == later
    assert [p.name for p in folders[1].iterdir()] == ["step_000002"]


def test_the_next_save_completes_the_one_under_way(tmp_path: Path) -> None:
    mesh, model, optimizer, _ = one_rank()
    checkpoints = rm.Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, model=model, optimizer=optimizer, mesh=mesh, asynchronous=True)
    assert checkpoints.latest() == 1
    assert checkpoints.load(model=model, optimizer=optimizer, mesh=mesh).step == 2


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    mesh, model, optimizer, _ = one_rank()
    checkpoints = rm.Checkpoints(tmp_path / "new" / "folder", keep_last=2)
    assert checkpoints.latest() is None
    for step in (5, 10, 1_000_000, 2_000_000):
        checkpoints.save(step, model=model, optimizer=optimizer, mesh=mesh)
    names = [p.name for p in sorted((tmp_path / "new" / "folder").iterdir())]
    assert names == ["step_1000000", "step_2000000"]
    assert checkpoints.latest() == 2_000_000
    with pytest.raises(rm.InputError, match="keep_last is 0, but must be at least 1"):
        rm.Checkpoints(tmp_path, keep_last=0)


def test_the_one_just_saved_is_kept_whatever_its_number(tmp_path: Path) -> None:
    mesh, model, optimizer, _ = one_rank()
    for step in (5, 6, 2):
        rm.Checkpoints(tmp_path, keep_last=1).save(
            step, model=model, optimizer=optimizer, mesh=mesh
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000006"]


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    mesh, model, optimizer, case = one_rank()
    checkpoints = rm.Checkpoints(tmp_path)
    save = functools.partial(checkpoints.save, model=model, optimizer=optimizer, mesh=mesh)
    save(1, extra={"turn": 1})
    train(mesh, model, optimizer, case.batches_of(0))
    state = state_of(model, optimizer)
    save(1, extra={"turn": 2})
    spoil(model, optimizer)
    loaded = checkpoints.load(model=model, optimizer=optimizer, mesh=mesh)
    assert loaded.extra == {"turn": 2}
    assert different(state_of(model, optimizer), state) == []
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_metadata_says_what_is_saved(tmp_path: Path) -> None:
    mesh, model, optimizer, case = one_rank()
    checkpoints = rm.Checkpoints(tmp_path)
    checkpoints.save(7, model=model, optimizer=optimizer, mesh=mesh, extra={"epoch": 2})
    document = json.loads((tmp_path / "step_000007" / "metadata.json").read_text())
    assert (document["version"], document["step"], document["world"]) == (1, 7, 1)
    assert document["extra"] == {"epoch": 2}
    assert document["rule"] == "RowwiseAdagrad"
    table = {"rows": 37, "dim": 8, "dtype": "fp32", "shards": 16}
    assert document["tables"]["c0_t1"] == table
    loaded = checkpoints.load(model=model, optimizer=optimizer, mesh=mesh)
    assert loaded.plan is not None
    assert plan_from_json(loaded.plan) == case.plan()
