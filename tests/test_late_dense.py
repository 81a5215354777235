"""Dense sums under the next forward: the same bits, and nobody reads a weight too early."""

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.placement.dense import bucket_elements
from rowmesh.train.checkpoint import Checkpoints
from tests.cases import RULES, Case, Collection, Table, configs
from tests.ranks import RankError, run_on_ranks

WIDTH = 270  # a layer of so many squared is a bucket of its own
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def make_case(ranks: tuple[int, ...] = (0, 1), **changes: Any) -> Case:
    tables = (Table(rows=20, dim=4, ranks=ranks),)
    given = [[[[[step, rank], [3]]] for rank in range(4)] for step in range(5)]
    ids = [step[: changes.get("world", 2)] for step in given]
    return Case(**{"world": 2, "collections": (Collection(tables=tables),), "ids": ids} | changes)


class Deep(nn.Module):
    """Several buckets; ``unread`` owns a weight that another module's forward may read."""

    def __init__(self, case: Case, *, is_tied: bool = False) -> None:
        super().__init__()
        tables = rm.EmbeddingBagCollection(configs(case, 0), device="meta")
        self.collections = nn.ModuleList([tables])
        torch.default_generator.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(n, WIDTH) for n in (4, WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, 1)
        self.unread = nn.Linear(WIDTH, WIDTH)
        self.is_tied = is_tied

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = self.collections[0](batch["features"]).values()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.is_tied:
            x = x @ self.unread.weight
        return (self.out(x).squeeze(1) - batch["labels"]).square()


def shard(model: Deep, case: Case, mesh: Mesh) -> nn.Module:
    sizes = bucket_elements([p.numel() for p in model.parameters() if p.device.type != "meta"])
    assert len(sizes) >= 4
    return rm.shard(model, replace(case.plan(), dense=sizes), mesh)


def train(
    mesh: Mesh,
    case: Case,
    late: bool,
    clip: bool = False,
    accumulate: bool = False,
    is_tied: bool = False,
    between: str | None = None,
) -> Any:
    """Losses, what ``between`` gave after every step, bytes of every step, and all weights."""
    model = shard(Deep(case, is_tied=is_tied), case, mesh)
    optimizer = rm.Optimizer(model, dense=ADAM, sparse=RULES["rowwise"], late_dense=late)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses, found, bytes_of = [], [], []
    for batch in rm.Pipeline(model, depth=case.depth).batches(case.batches_of(mesh.rank)):
        mesh.ledger.reset()
        with optimizer.accumulate() if accumulate else contextlib.nullcontext():
            for factor in (2, 1)[not accumulate :]:
                losses.append(model(batch))
                mesh.mean(factor * losses[-1]).backward()
        if clip:
            optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bytes_of.append(mesh.ledger.by_edge())
        if between is not None:
            found.append(LOOKS[between](mesh, model, optimizer))
    raw = {name: p.detach().clone() for name, p in model.named_parameters()}  # the loop is over
    state = optimizer.state_dict()["dense"]
    return [x.detach() for x in losses], found, bytes_of, raw, state, rm.full_state_dict(model)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def both(case: Case, *settings: Any) -> list[Any]:
    """Late, and not: what every rank gave."""
    hosts = case.hosts
    return [
        run_on_ranks(case.world, train, case, late, *settings, hosts=hosts)
        for late in (True, False)
    ]


def check(case: Case, *settings: Any) -> None:
    late, now = both(case, *settings)
    assert same(late, now)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"depth": 2},
        {"ranks": ()},  # a copied table rides in a bucket
        {"world": 4, "hosts": 2, "depth": 3},
        {"world": 4, "hosts": 2, "tree": "host-first"},
        {"world": 1, "ranks": (0,)},
    ],
)
def test_bits_and_bytes_are_those_of_a_step_that_waits(changes: dict[str, Any]) -> None:
    check(make_case(**changes))


@pytest.mark.parametrize(("clip", "accumulate"), [(True, False), (False, True)])
def test_other_ways_to_step_are_the_same(clip: bool, accumulate: bool) -> None:
    check(make_case(), clip, accumulate)


def state_dict(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer) -> Any:
    return {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}


def part_of_it(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer) -> Any:
    return {k: v.clone() for k, v in model.get_submodule("layers.1").state_dict().items()}


def settled(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer) -> Any:
    optimizer.settle()
    return [p.detach().clone() for p in model.parameters()]


def evaluated(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer) -> Any:
    with torch.inference_mode():
        return model(make_case().batches_of(mesh.rank)[0])


def unsharded(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer) -> Any:
    plain = rm.unshard(model)
    if plain is None:
        return None
    batch = make_case().batches_of(0)[0]
    return plain.state_dict(), plain(batch).detach()  # its forward waits for nobody


def synced(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict()["dense"])


def stale(mesh: Mesh, model: nn.Module, optimizer: rm.Optimizer) -> Any:
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.settle()
    return sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


LOOKS: dict[str, Callable[[Mesh, nn.Module, rm.Optimizer], Any]] = {
    f.__name__: f for f in (state_dict, part_of_it, settled, evaluated, unsharded, synced, stale)
}


@pytest.mark.parametrize("between", [name for name in LOOKS if name != "stale"])
def test_whoever_looks_between_steps_sees_the_step(between: str) -> None:
    check(make_case(), False, False, False, between)


def test_parameters_wait_for_their_modules() -> None:
    late, now = (runs[0][1] for runs in both(make_case(), False, False, False, "stale"))
    assert now == [0] * 5
    assert min(late) >= 8  # else nothing was left for later, and the tests above test nothing


def test_a_weight_read_by_another_module_is_an_error() -> None:
    with pytest.raises(RankError, match="read outside the forward of the module that owns it"):
        run_on_ranks(2, train, make_case(), True, False, False, True)


def save(mesh: Mesh, case: Case, folder: str, late: bool) -> Any:
    model = shard(Deep(case), case, mesh)
    optimizer = rm.Optimizer(model, dense=ADAM, sparse=RULES["rowwise"], late_dense=late)
    checkpoints, run = Checkpoints(folder), {"model": model, "optimizer": optimizer, "mesh": mesh}
    for step, batch in enumerate(case.batches_of(mesh.rank)[:3]):
        if step == 2:  # the third step is taken back
            checkpoints.load(**run)
        mesh.mean(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            checkpoints.save(step, **run)
    optimizer.settle()
    return rm.full_state_dict(model), optimizer.state_dict()["dense"]


def test_checkpoints_hold_the_step_and_undo_the_one_after(tmp_path: Path) -> None:
    late, now = (
        run_on_ranks(2, save, make_case(), str(tmp_path / str(flag)), flag)
        for flag in (True, False)
    )
    assert same(late, now)
