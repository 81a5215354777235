"""Training under codecs: near the oracle, the same on all ranks, at every depth, to the byte."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rowmesh as rm
from rowmesh.comm import codecs
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import NotExecutable
from rowmesh.placement import Codec
from rowmesh.runtime import ring, sums
from rowmesh.runtime.shard import check_executable
from tests.cases import (
    DENSE,
    RULES,
    Case,
    Collection,
    Model,
    Run,
    cases,
    grouped,
    oracle_case,
    train_case,
)
from tests.ranks import run_on_ranks
from tests.test_central_property import SUITE, check_ledgers, differences
from tests.test_mutations import make_case

# Of losses, weights and state after a few steps of SGD at 0.1, relative to max(1, value). fp16 has
# 11 bits, bf16 8, int8 7 of the row's largest.
TOLERANCE = {"fp16": 2e-3, "bf16": 1.5e-2, "int8": 2e-2}
NAMES = ["fp32", *TOLERANCE]
FEW = settings(SUITE, max_examples=6)


@st.composite
def mixes(draw: st.DrawFn) -> str:
    """Any codec on any edge, some of them lossy."""
    edges = ["rows", "pooled", "backward", "hot gradients", "dense"]
    drawn = [f"{edge}={draw(st.sampled_from(NAMES))}" for edge in edges]
    return draw(st.sampled_from([",".join(drawn), *TOLERANCE]))


def bits_of(run: Run) -> list[torch.Tensor]:
    states = [v for state in run.states.values() for v in state.values()]
    return [*run.losses, *run.weights.values(), *states]


def same_bits(some: list[Run], others: list[Run]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(
        torch.equal(a, b) for x, y in pairs for a, b in zip(bits_of(x), bits_of(y), strict=True)
    )


@pytest.mark.parametrize(("world", "name"), [(2, "fp16"), (4, "bf16"), (4, "int8")])
@FEW
@given(data=st.data())
def test_lossy_plans_are_near_the_oracle(world: int, name: str, data: st.DataObject) -> None:
    case = data.draw(cases(world=world))
    case = replace(case, rule="sgd", dense="sgd", codecs=name, later=(), ids=case.ids[:3])
    fp32 = [
        replace(c, tables=tuple(replace(t, dtype="fp32") for t in c.tables))
        for c in case.collections
    ]
    case = replace(case, collections=tuple(fp32))
    assert case.plan().exactness == "E3"
    runs = run_on_ranks(world, train_case, case, hosts=case.hosts)
    assert not differences(case, runs, tolerance=TOLERANCE[name])
    if case.accumulate == 1:
        check_ledgers(case, runs)


@pytest.mark.parametrize("world", [2, 4])
@FEW
@given(data=st.data())
def test_copies_are_the_same_on_all_ranks_and_bytes_as_predicted(
    world: int, data: st.DataObject
) -> None:
    case = replace(data.draw(cases(world=world)), codecs=data.draw(mixes()))
    runs = run_on_ranks(world, train_case, case, hosts=case.hosts)
    assert not differences(case, runs, tolerance=1e30)
    if case.accumulate == 1:
        check_ledgers(case, runs)


@pytest.mark.parametrize("mode", ["gradients", "weights"])
@settings(FEW, max_examples=4)
@given(data=st.data())
def test_so_they_are_with_shard_groups(mode: str, data: st.DataObject) -> None:
    case = replace(data.draw(grouped(world=4, mode=mode)), codecs=data.draw(mixes()))
    runs = run_on_ranks(4, train_case, case, hosts=case.hosts)
    assert not differences(case, runs, tolerance=1e30)
    if case.accumulate == 1:
        check_ledgers(case, runs)


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("world", [2, 4])
def test_depth_changes_no_bit_and_two_runs_are_equal(world: int, name: str) -> None:
    first, *others = [
        run_on_ranks(
            world, train_case, replace(make_case(world), codecs=name, depth=depth), hosts=world // 2
        )
        for depth in (1, 1, 2, 3)
    ]
    assert all(same_bits(first, runs) for runs in others)


def test_fp32_by_name_changes_no_bit() -> None:
    case = make_case(2)
    named = tuple(Codec(edge=edge) for edge in ("rows", "pooled", "backward", "dense"))
    assert replace(case.plan(), codecs=named).exactness == "E0"
    runs = run_on_ranks(2, train_case, replace(case, codecs="rows=fp32"))
    assert not differences(case, runs, tolerance=0.0)


def test_codecs_cut_the_bytes_as_the_formulas_say() -> None:
    def total(name: str) -> int:
        case = replace(make_case(2), codecs=name, depth=1)
        ledgers = [run.ledgers[0] for run in run_on_ranks(2, train_case, case)]
        vectors = ("rows", "pooled", "backward", "dense")
        return sum(n for led in ledgers for e in vectors for n in led.get(e, {}).values())

    assert total("bf16") * 2 == total("fp32")


Patch = contextlib.AbstractContextManager[Any]


def unchanged(mesh: Mesh) -> Patch:
    return contextlib.nullcontext()


def scale_forgotten(mesh: Mesh) -> Patch:
    def decode(self: Any, parts: Any, block: torch.Tensor) -> None:
        block.copy_(parts[1].view(block.shape))

    return mock.patch.object(codecs.RowInt8, "decode", decode)


def scale_of_another_row(mesh: Mesh) -> Patch:
    original = codecs.RowInt8.decode

    def decode(self: Any, parts: Any, block: torch.Tensor) -> None:
        original(self, [parts[0].roll(1), parts[1]], block)

    return mock.patch.object(codecs.RowInt8, "decode", decode)


def few_steps_of_a_scale(mesh: Mesh) -> Patch:
    no_kernels = mock.MagicMock(**{f"{f}_int8.return_value": False for f in ("encode", "decode")})
    return mock.patch.multiple(codecs, _MOST=8.0, native=no_kernels)


def flags_coded_as_gradients(mesh: Mesh) -> Patch:
    def coded_flat(vector: torch.Tensor, codec: Any, num_values: int) -> Any:
        return codecs.coded_flat(vector * 1e4, codec, len(vector))

    return mock.patch.object(ring, "coded_flat", coded_flat)


def sums_kept_exact_by_their_owner(mesh: Mesh) -> Patch:
    return mock.patch.object(sums, "settle")


def dense_sums_kept_exact_by_their_owner(mesh: Mesh) -> Patch:
    return mock.patch.object(ring, "settle")


def mutated(mesh: Mesh, case: Case, patch: Callable[[Mesh], Patch]) -> Run:
    with patch(mesh):
        return train_case(mesh, case)


def found_by(case: Case, patch: Callable[[Mesh], Patch]) -> list[str]:
    runs = run_on_ranks(case.world, mutated, case, patch, hosts=case.hosts)
    return differences(case, runs, tolerance=TOLERANCE["int8"])


@pytest.mark.parametrize(
    ("patch", "is_caught"),
    [
        (unchanged, False),
        (scale_forgotten, True),
        (scale_of_another_row, True),
        (few_steps_of_a_scale, True),
        (flags_coded_as_gradients, True),
        (sums_kept_exact_by_their_owner, True),
        (dense_sums_kept_exact_by_their_owner, True),
    ],
)
def test_mistakes_are_caught(patch: Callable[[Mesh], Patch], is_caught: bool) -> None:
    case = replace(make_case(4), codecs="int8", rule="sgd", dense="sgd")
    assert bool(found_by(case, patch)) == is_caught


def dense_parameters(mesh: Mesh, case: Case) -> list[torch.Tensor]:
    model = rm.shard(Model(case), case.plan(), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE["adam"], sparse=RULES["adagrad"])
    for batch in case.batches_of(mesh.rank):
        mesh.mean(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("tree", ["flat", "host-first"])
@pytest.mark.parametrize("name", TOLERANCE)
def test_dense_parameters_are_the_same_on_all_ranks(name: str, tree: str) -> None:
    tables = tuple(t for t in make_case(4).collections[0].tables if not t.per_host)
    steps = [[[[[i % t.rows]] for t in tables] for i in range(4)] for _ in range(2)]
    case = replace(
        make_case(4), codecs=name, tree=tree, collections=(Collection(tables=tables),), ids=steps
    )
    first, *others = run_on_ranks(4, dense_parameters, case, hosts=2)
    assert all(torch.equal(a, b) for rank in others for a, b in zip(first, rank, strict=True))


def test_what_does_not_run_is_refused_by_name() -> None:
    plan = make_case(2).plan()
    for stack, edge, message in (
        (("threshold(0.1)", "bf16"), "dense", r"codec threshold\(0.1\)\+bf16 on edge 'dense'"),
        (("topk(0.1)",), "pooled", r"codec topk\(0.1\) on edge 'pooled'"),
        (("bf16",), "tower gradients", "codecs on edge 'tower gradients'"),
    ):
        with pytest.raises(NotExecutable, match=message):
            check_executable(replace(plan, codecs=(Codec(edge=edge, stack=stack),)))
    twice = (Codec(edge="rows", stack=("bf16",)), Codec(edge="rows"))
    with pytest.raises(NotExecutable, match="two codecs on edge 'rows'"):
        check_executable(replace(plan, codecs=twice))


def test_the_oracle_knows_nothing_of_codecs() -> None:
    case = make_case(2)
    exact, lossy = oracle_case(case), oracle_case(replace(case, codecs="int8"))
    assert all(torch.equal(exact.weights[n], lossy.weights[n]) for n in exact.weights)
