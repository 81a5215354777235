"""Several backwards before a step: gradients are all there, or every rank hears why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.runtime.oracle import materialise
from tests.ranks import run_on_ranks

ROWS, DIM, SAMPLES, STEPS, LR = 24, 4, 3, 3, 0.1
PLANS = {
    "cold": ({"split": "row_wise", "merge": "off"}, 2, 1),
    "copied": ({"split": "data_parallel"}, 2, 1),
    "merged": ({"split": "row_wise", "merge": "on"}, 4, 2),
    "ahead": ({"split": "row_wise", "merge": "on", "depth": 2}, 4, 2),
}


class Model(nn.Module):
    """Rows, and two layers of which a forward uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        config = rm.EmbeddingBagConfig(
            name="items", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"]
        )
        self.tables = rm.EmbeddingBagCollection([config], device="meta")
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(DIM, 2), nn.Linear(DIM, 2)])
        for parameter in self.layers.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, ids: Tensor, used: tuple[int, ...]) -> Tensor:
        rows = self.tables(rm.KeyedJaggedTensor.from_dense({"item": ids})).values()
        return sum(self.layers[i](rows).square().sum(1) for i in used)  # type: ignore[return-value]


def batch_of(rank: int, step: int, forward: int) -> tuple[Tensor, tuple[int, ...]]:
    """Ids and layers: on rank 0 the first backward has all gradients, elsewhere the second."""
    ids = (torch.arange(SAMPLES) * 5 + 3 * rank + 2 * step + forward) % ROWS
    return ids, (0, 1) if rank == 0 and forward == 0 else (forward,)


def expected(world: int) -> dict[str, Tensor]:
    """The weights after every step's two batches of all ranks, in one process."""
    model = materialise(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        for rank in range(world):
            for forward in range(2):
                loss = model(*batch_of(rank, step, forward)).sum() / (SAMPLES * world)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def start(mesh: Mesh, choices: dict[str, Any]) -> tuple[nn.Module, rm.Optimizer]:
    model = Model()
    rm.shard(model, rm.make_plan(model, mesh.topology, **choices), mesh)
    dense = lambda parameters: torch.optim.SGD(parameters, lr=LR)  # noqa: E731
    return model, rm.Optimizer(model, dense=dense, sparse=rm.SGD(lr=LR))


def train(mesh: Mesh, choices: dict[str, Any], how: str) -> dict[str, Tensor]:
    model, optimizer = start(mesh, choices)
    for step in range(STEPS):
        batches = [batch_of(mesh.rank, step, forward) for forward in range(2)]
        LOOPS[how](mesh, model, optimizer, batches)
        optimizer.step()
    return rm.full_state_dict(model)


def forwards_first(mesh: Mesh, model: Any, optimizer: rm.Optimizer, batches: Any) -> None:
    for loss in [mesh.mean(model(*batch)) for batch in batches]:
        loss.backward()


def last_outside(mesh: Mesh, model: Any, optimizer: rm.Optimizer, batches: Any) -> None:
    with optimizer.accumulate():
        mesh.mean(model(*batches[0])).backward()
        loss = mesh.mean(model(*batches[1]))
    loss.backward()


def dropped_between(mesh: Mesh, model: Any, optimizer: rm.Optimizer, batches: Any) -> None:
    """A backward that is dropped, and in which only rank 0 has all gradients."""
    mesh.mean(model(*batches[0])).backward()
    optimizer.zero_grad()
    forwards_first(mesh, model, optimizer, batches)


LOOPS: dict[str, Callable[..., None]] = {
    "forwards first": forwards_first,
    "last outside": last_outside,
    "dropped between": dropped_between,
}


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("plan", PLANS)
def test_several_backwards_add_up_whichever_parameters_ranks_use(plan: str, how: str) -> None:
    choices, world, hosts = PLANS[plan]
    found = run_on_ranks(world, train, choices, how, hosts=hosts)[0]
    for name, value in expected(world).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def refused(mesh: Mesh, choices: dict[str, Any], how: str) -> tuple[str, dict[str, Tensor]]:
    """What is said of a wrong loop, and the weights after a right step that follows."""
    model, optimizer = start(mesh, choices)
    loss = mesh.mean(model(batch_of(mesh.rank, 0, 0)[0], (0, 1)))
    message = ""
    try:
        if how == "second":
            loss.backward()
            model.layers[0].weight.square().sum().backward()
        elif how == "accumulate after":
            loss.backward()
            with optimizer.accumulate():
                pass
        else:
            optimizer.zero_grad()
            optimizer.step()
            loss.backward()
    except rm.StepError as error:
        message = str(error)
    optimizer.zero_grad()
    forwards_first(mesh, model, optimizer, [batch_of(mesh.rank, 0, i) for i in range(2)])
    optimizer.step()
    return message, rm.full_state_dict(model)


MESSAGES = {
    "second": "gradients of dense parameters changed while on their way",
    "accumulate after": "accumulate() after a backward outside it",
    "stepped": "backward through a forward of 'tables' from before the last step",
}


@pytest.mark.parametrize("how", MESSAGES)
@pytest.mark.parametrize("plan", ["copied", "merged"])
def test_a_backward_that_no_step_would_take_is_an_error_everywhere_and_can_be_dropped(
    plan: str, how: str
) -> None:
    choices, world, hosts = PLANS[plan]
    messages, weights = zip(*run_on_ranks(world, refused, choices, how, hosts=hosts), strict=True)
    assert all(message.startswith(MESSAGES[how]) for message in messages), messages
    right = run_on_ranks(world, one_step, choices, hosts=hosts)
    assert all(torch.equal(weights[0][name], right[0][name]) for name in right[0])


def one_step(mesh: Mesh, choices: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = start(mesh, choices)
    forwards_first(mesh, model, optimizer, [batch_of(mesh.rank, 0, i) for i in range(2)])
    optimizer.step()
    return rm.full_state_dict(model)


def with_penalty(mesh: Mesh, choices: dict[str, Any], count: int) -> dict[str, Tensor]:
    """Backwards through no table come first, then one in which every parameter has its gradient."""
    model, optimizer = start(mesh, choices)
    for _ in range(count):
        (0.0 * model.layers[mesh.rank % 2].weight.square().sum()).backward()
    mesh.mean(model(batch_of(mesh.rank, 0, 0)[0], (0, 1))).backward()
    optimizer.step()
    return rm.full_state_dict(model)


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_that_come_twice_are_sent_when_no_more_can_come(plan: str) -> None:
    choices, world, hosts = PLANS[plan]
    without, once, often = (
        run_on_ranks(world, with_penalty, choices, count, hosts=hosts)[0] for count in (0, 1, 3)
    )
    for name, value in without.items():
        assert torch.equal(once[name], value)
        assert torch.equal(often[name], value)
