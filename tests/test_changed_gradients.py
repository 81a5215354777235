"""What a loop may do to dense gradients between backward and step."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from tests.processes import finish, start_ranks
from tests.ranks import run_on_ranks

SCRIPT = Path(__file__).parent / "scripts" / "clipping.py"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = rm.EmbeddingBagConfig(
            name="items", num_embeddings=40, embedding_dim=4, feature_names=["item"]
        )
        self.items = rm.EmbeddingBagCollection([table], seed=2)
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(3, 4, generator=generator))
        self.bias = nn.Parameter(torch.zeros(3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, features: rm.KeyedJaggedTensor) -> Tensor:
        x = self.items(features).values()
        return (x @ self.weight.t() * 9.0 + self.bias - 1.0).square().sum(1)


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.25)


def decay(model: Any) -> None:
    with torch.no_grad():
        model.weight.grad.add_(model.weight, alpha=0.1)


def erase(model: Any) -> None:
    model.bias.grad.zero_()


def freeze(model: Any) -> None:
    model.weight.grad = None


def replace_one(model: Any) -> None:
    model.bias.grad = torch.ones(3)


def forget(model: nn.Module) -> None:
    model.zero_grad()


CHANGES = [clip, scale, decay, erase, freeze, replace_one, forget]


def batch(step: int, rank: int, world: int) -> rm.KeyedJaggedTensor:
    ids = torch.arange(6) * 5 + step
    return rm.KeyedJaggedTensor.from_dense({"item": ids.chunk(world)[rank]})


def start(mesh: Mesh) -> tuple[nn.Module, rm.Optimizer]:
    model = rm.shard(Model(), rm.make_plan(Model(), mesh.topology), mesh)
    optimizer = rm.Optimizer(
        model,
        dense=functools.partial(torch.optim.Adagrad, lr=0.1),
        sparse=rm.RowwiseAdagrad(lr=0.1),
    )
    return model, optimizer


def train(
    mesh: Mesh, change: Callable[[nn.Module], None], is_summed: bool, parts: int
) -> dict[str, Tensor]:
    """Three steps, the gradients of each changed before it is made; each of so many backwards."""
    model, optimizer = start(mesh)
    for step in range(3):
        features = batch(step, mesh.rank, mesh.world)
        if parts == 1:
            mesh.mean(model(features)).backward()
        else:
            with optimizer.accumulate():
                for _ in range(parts):
                    mesh.mean(model(features)).backward()
        if is_summed:
            optimizer.sum_gradients()
        change(model)
        optimizer.step()
        optimizer.zero_grad()
    return rm.full_state_dict(model)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_sums_are_what_the_step_uses(
    change: Callable[[nn.Module], None], parts: int
) -> None:
    alone = run_on_ranks(1, train, change, False, parts)[0]
    summed_alone = run_on_ranks(1, train, change, True, parts)[0]
    together = run_on_ranks(2, train, change, True, parts)[0]
    assert all(torch.equal(alone[key], summed_alone[key]) for key in alone)
    for key, expected in alone.items():
        torch.testing.assert_close(together[key], expected, rtol=1e-5, atol=1e-6)


def change_too_early(mesh: Mesh, change: Callable[[nn.Module], None], how: str) -> Any:
    """What is said; then the weights after a step that left the changed one out."""
    model, optimizer = start(mesh)
    said = []
    for step in range(3):
        features = batch(step, mesh.rank, mesh.world)
        if how == "accumulated":
            with optimizer.accumulate():
                mesh.mean(model(features)).backward()
        else:
            mesh.mean(model(features)).backward()
        if step == 1:
            change(model)
            try:
                optimizer.clip_grad_norm_(1.0) if how == "clipped" else optimizer.step()
            except rm.StepError as error:
                said.append(str(error))
        else:
            optimizer.step()
        optimizer.zero_grad()
    return said, rm.full_state_dict(model)


@pytest.mark.parametrize("how", ["sent", "accumulated", "clipped"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_s_own_part_may_not_be_changed(
    change: Callable[[nn.Module], None], how: str
) -> None:
    changed = run_on_ranks(2, change_too_early, change, how)
    for said, _ in changed:
        assert len(said) == 1
        assert "opt.clip_grad_norm_(max_norm)" in said[0]
        assert "opt.sum_gradients()" in said[0]
    weights = run_on_ranks(2, without_one, how)[0]
    assert all(torch.equal(changed[0][1][key], weights[key]) for key in weights)


def without_one(mesh: Mesh, how: str) -> dict[str, Tensor]:
    model, optimizer = start(mesh)
    for step in (0, 2):
        features = batch(step, mesh.rank, mesh.world)
        if how == "accumulated":
            with optimizer.accumulate():
                mesh.mean(model(features)).backward()
        else:
            mesh.mean(model(features)).backward()
        optimizer.step()
    return rm.full_state_dict(model)


def given_by_hand(mesh: Mesh) -> dict[str, Tensor]:
    """Gradients that no backward wrote: torch.autograd.grad of a term without a look-up."""
    model, optimizer = start(mesh)
    features = batch(0, mesh.rank, mesh.world)
    mesh.mean(model(features)).backward()
    model.unused.grad = torch.full((2,), 3.0 / mesh.world)
    optimizer.step()
    return rm.full_state_dict(model)


def test_gradients_without_a_backward_are_summed_like_others() -> None:
    alone, together = (run_on_ranks(world, given_by_hand)[0] for world in (1, 2))
    assert not torch.equal(alone["unused"], torch.ones(2))
    for key, expected in alone.items():
        torch.testing.assert_close(together[key], expected, rtol=1e-5, atol=1e-6)


def test_one_rank_that_clips_alone_ends_all_with_its_sentence() -> None:
    started = start_ranks([str(SCRIPT)], ranks=2)
    ended = [finish(rank, timeout=90.0) for rank in started]
    assert all(code not in (0, None) for code, _, _ in ended), ended
    for _, _, errors in ended:
        assert "opt.clip_grad_norm_(max_norm)" in errors, errors
    assert "rank 1 failed: StepError" in ended[0][2]


def clip_alone(mesh: Mesh) -> list[str]:
    model, optimizer = start(mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for how in ("not", "clip", "clip", "sums"):
            mesh.mean(model(batch(0, 0, 1))).backward()
            if how == "sums":
                optimizer.sum_gradients()
            if how != "not":
                clip(model)
            optimizer.step()
            if how == "not":
                assert not caught
    return [str(each.message) for each in caught]


def test_one_rank_is_told_once_that_tables_are_not_clipped() -> None:
    (said,) = run_on_ranks(1, clip_alone)[0]
    assert "those of tables are not among them" in said
    assert "use opt.clip_grad_norm_(max_norm)" in said


def step_anyhow(mesh: Mesh, how: str) -> str:
    model, optimizer = start(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = mesh.mean(model(batch(0, mesh.rank, mesh.world)))
    (scaler.scale(loss) if "scaler" in how else loss).backward()
    try:
        if how == "unscaled by scaler":
            scaler.unscale_(optimizer)
        if how == "dropped":
            optimizer.zero_grad()
        (scaler if "scaler" in how else optimizer).step(*[optimizer] * ("scaler" in how))
    except rm.StepError as error:
        optimizer.zero_grad()  # what is on its way arrives
        return str(error)
    return ""


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["scaler", "unscaled by scaler"])
def test_a_scaler_of_gradients_is_refused(world: int, how: str) -> None:
    for said in run_on_ranks(world, step_anyhow, how):
        assert "gradients of tables cannot be scaled back" in said


def test_a_step_after_gradients_were_dropped_says_so_where_others_would_wait() -> None:
    for said in run_on_ranks(2, step_anyhow, "dropped"):
        assert "opt.step() after opt.zero_grad() dropped the gradients" in said
    assert run_on_ranks(1, step_anyhow, "dropped") == [""]
