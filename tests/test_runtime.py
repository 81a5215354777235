"""Sharding and the optimiser around the central property: order of calls, clipping, errors."""

import functools
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.placement import Exchange, HotSet, Tier
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.oracle import materialise
from tests.cases import DENSE, RULES, Case, Collection, Model, Table, oracle_case, train_case
from tests.ranks import run_on_ranks
from tests.test_central_property import differences

TABLES = (
    Table(rows=12, dim=4, ranks=()),
    Table(rows=20, dim=4, ranks=(1, 0)),
    Table(rows=9, dim=4, ranks=(1,), exchange="pooled", mean=True),
)


def make_case(world: int = 2, *, steps: int = 4, **changes: Any) -> Case:
    def ids(rows: int, rank: int, step: int) -> list[list[int]]:
        return [[(7 * i + 5 * rank + step) % rows for i in range(b)] for b in (2, 0, 3)]

    tables = TABLES if world > 1 else tuple(replace(t, ranks=(0,)) for t in TABLES)
    drawn = [
        [[ids(t.rows, rank, step) for t in tables] for rank in range(world)]
        for step in range(steps)
    ]
    return Case(world=world, collections=(Collection(tables=tables),), ids=drawn, **changes)


def start(mesh: Mesh, case: Case) -> tuple[nn.Module, rm.Optimizer, list[Any]]:
    model = rm.shard(Model(case), case.plan(), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE[case.dense], sparse=RULES[case.rule])
    return model, optimizer, case.batches_of(mesh.rank)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return rm.full_state_dict(model)


def test_two_runs_with_one_seed_are_bit_identical() -> None:
    first, second = (
        run_on_ranks(4, train_case, make_case(4, hosts=2), hosts=2)[0] for _ in range(2)
    )
    assert all(torch.equal(first.weights[n], second.weights[n]) for n in first.weights)
    assert all(torch.equal(a, b) for a, b in zip(first.losses, second.losses, strict=True))


def train_with_dedup(mesh: Mesh, case: Case, dedup: bool) -> Any:
    plan = case.plan()
    plan = replace(plan, tables=tuple(replace(t, dedup=dedup) for t in plan.tables))
    model = rm.shard(Model(case), plan, mesh)
    optimizer = rm.Optimizer(model, dense=DENSE[case.dense], sparse=RULES[case.rule])
    for batch in case.batches_of(mesh.rank):
        mesh.mean(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def test_dedup_on_or_off_gives_the_same_bits() -> None:
    on, off = (run_on_ranks(2, train_with_dedup, make_case(), flag)[0] for flag in (True, False))
    assert all(torch.equal(on[n], off[n]) for n in on)


def out_of_order(mesh: Mesh) -> Any:
    case = make_case()
    model, optimizer, batches = start(mesh, case)
    mesh.mean(model(batches[0])).backward()
    errors = []
    try:
        model(batches[1])
    except rm.StepError as error:
        errors.append(str(error))
    with torch.no_grad():
        evaluated = len(model(batches[1]))  # eval takes no ticket
    optimizer.zero_grad()
    mesh.mean(model(batches[0])).backward()
    optimizer.step()
    optimizer.zero_grad()
    return errors, evaluated, weights_of(model), len(sharded_engines(model)[0].tickets)


def test_a_training_forward_after_backward_is_an_error_everywhere_and_zero_grad_drops_it() -> None:
    found = run_on_ranks(2, out_of_order)
    for errors, evaluated, _, tickets in found:
        assert "rank 0: a training forward after backward" in errors[0]
        assert evaluated == 3
        assert tickets == 0
    expected = oracle_case(make_case(steps=1)).weights
    assert all(torch.equal(found[0][2][n], expected[n]) for n in expected)


def train_and_evaluate(mesh: Mesh) -> str:
    model, _, batches = start(mesh, make_case())
    try:
        with torch.set_grad_enabled(mesh.rank == 0):
            model(batches[0])
    except rm.StepError as error:
        return str(error)
    return ""


def test_training_on_some_ranks_and_evaluating_on_others_is_an_error_on_all() -> None:
    for message in run_on_ranks(2, train_and_evaluate):
        assert message.startswith("ranks [0] run a training forward of 'collections.0'")


def two_forwards_one_backward(mesh: Mesh, case: Case) -> Any:
    model, optimizer, batches = start(mesh, case)
    first = mesh.mean(model(batches[0]))
    second = mesh.mean(model(batches[1]))
    with torch.no_grad():
        model(batches[2])
    (first + second).backward()
    optimizer.step()
    return weights_of(model)


def test_several_forwards_before_backward_add_up() -> None:
    case = make_case(steps=3)
    found = run_on_ranks(2, two_forwards_one_backward, case)[0]
    expected = oracle_case(make_case(steps=2, accumulate=2)).weights
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def forward_without_backward(mesh: Mesh, case: Case) -> Any:
    model, optimizer, batches = start(mesh, case)
    model(batches[3])  # its gradients never come
    mesh.mean(model(batches[0])).backward()
    optimizer.step()
    return weights_of(model)


def test_a_forward_that_got_no_backward_adds_nothing() -> None:
    found = run_on_ranks(2, forward_without_backward, make_case())[0]
    expected = oracle_case(make_case(steps=1)).weights
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def tutorial_order(mesh: Mesh, case: Case) -> Any:
    """zero_grad between forward and backward, no zero_grad after step, a step too many."""
    model, optimizer, batches = start(mesh, case)
    for batch in batches:
        loss = mesh.mean(model(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    return weights_of(model)


def test_zero_grad_drops_only_what_backward_brought_and_step_uses_it_up() -> None:
    case = make_case(dense="adagrad", rule="adam")
    found = run_on_ranks(2, tutorial_order, case)[0]
    expected = oracle_case(case).weights
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def skipped_step(mesh: Mesh, case: Case) -> Any:
    """A step is dropped after a backward in which ranks used different parameters."""
    model, optimizer, batches = start(mesh, case)
    for batch in batches:
        mesh.mean(model(batch)).backward()
        optimizer.zero_grad()
    mesh.mean(model(batches[0])).backward()
    optimizer.step()
    return weights_of(model)


def test_a_step_can_be_skipped() -> None:
    case = make_case(steps=8, has_unused=False)
    used = [[case.batch(step, rank)["labels"][0] > 0.5 for rank in range(2)] for step in range(8)]
    assert any(a != b for a, b in used), "no step uses the sometimes-used layer on one rank only"
    found = run_on_ranks(2, skipped_step, case)[0]
    expected = oracle_case(make_case(steps=1, has_unused=False)).weights
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_a_parameter_may_be_used_on_some_ranks_only() -> None:
    case = make_case(steps=8, has_unused=False)
    runs = run_on_ranks(2, train_case, case)
    assert differences(case, runs, tolerance=0.0) == []


def backward_twice(mesh: Mesh) -> str:
    model, optimizer, batches = start(mesh, make_case())
    loss = mesh.mean(model(batches[0]))
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except rm.StepError as error:
        optimizer.zero_grad()
        return str(error)
    return ""


def test_backward_twice_through_one_forward_is_an_error() -> None:
    for message in run_on_ranks(2, backward_twice):
        assert message.startswith("backward ran twice through one forward")


def different_orders(mesh: Mesh, reverse_on: int) -> Any:
    """Two collections with copies, whose backwards run in another order on each rank."""
    tables = (Table(rows=12, dim=4, ranks=()),)
    ids = [[[[[1, 2], [3]], [[4], [5, 6]]] for _ in range(2)]]
    case = Case(
        world=2, collections=(Collection(tables=tables), Collection(tables=tables)), ids=ids
    )
    model, optimizer, batches = start(mesh, case)
    losses = [
        mesh.mean(collection(batches[0]["features"]).values().square().sum(1))
        for collection in model.collections
    ]
    for loss in reversed(losses) if mesh.rank == reverse_on else losses:
        loss.backward()
    optimizer.step()
    return weights_of(model)


def test_ranks_may_run_their_backwards_in_different_orders() -> None:
    same, different = (run_on_ranks(2, different_orders, rank)[0] for rank in (-1, 1))
    before = materialise(
        nn.ModuleList(
            [
                rm.EmbeddingBagCollection(
                    [
                        rm.EmbeddingBagConfig(
                            name="c0_t0", num_embeddings=12, embedding_dim=4, feature_names=["f0"]
                        )
                    ]
                )
            ]
        )
    ).state_dict()["0.embedding_bags.c0_t0.weight"]
    assert not torch.equal(same["collections.0.embedding_bags.c0_t0.weight"], before)
    assert all(torch.equal(same[n], different[n]) for n in same)


def two_models(mesh: Mesh, ranks: tuple[int, ...], reverse_on: int) -> Any:
    """Two models with tables and layers of the same names, trained side by side."""
    ids = [[[[[1, 2], [3]]] for _ in range(2)]]
    tables = (Table(rows=12, dim=4, ranks=ranks),)
    case = Case(world=2, collections=(Collection(tables=tables),), ids=ids)
    models = [start(mesh, case) for _ in range(2)]
    losses = [mesh.mean(model(batches[0])) for model, _, batches in models]
    for loss in reversed(losses) if mesh.rank == reverse_on else losses:
        loss.backward()
    for _, optimizer, _ in models:
        optimizer.step()
    return [weights_of(model) for model, *_ in models]


@pytest.mark.parametrize("ranks", [(), (0, 1)])
def test_two_models_on_one_mesh_do_not_wait_for_each_other(ranks: tuple[int, ...]) -> None:
    # Defect: owners of the same name in both had one communication thread.
    first, second = run_on_ranks(2, two_models, ranks, 1)[0]
    alike, _ = run_on_ranks(2, two_models, ranks, -1)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], alike[name]) for name in first)


def evaluated(mesh: Mesh, case: Case) -> Any:
    model, optimizer, batches = start(mesh, case)
    for batch in batches:
        with torch.inference_mode():
            model(batch)
        mesh.mean(model(batch)).backward()
        optimizer.step()
    for _ in range(50):
        weights_of(model)
    return weights_of(model), mesh.wire.numbers.num_made


def test_inference_mode_and_many_exports_do_not_disturb_training() -> None:
    case = make_case()
    found, channels = run_on_ranks(2, evaluated, case)[0]
    expected = oracle_case(case).weights
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert channels < 40, "exports take no new channels"


def one_optimizer(mesh: Mesh) -> list[str]:
    case = make_case()
    model, optimizer, _ = start(mesh, case)
    errors = []
    for action in (
        lambda: rm.Optimizer(model, dense=DENSE["sgd"], sparse=RULES["sgd"]),
        lambda: optimizer.add_param_group({"params": [], "lr": 1.0}),
        lambda: optimizer.load_state_dict(
            optimizer.state_dict() | {"sparse": [{"home": {}, "copies": {}}]}
        ),
        lambda: rm.shard(Model(case).double(), case.plan(), mesh),
    ):
        try:
            action()
        except rm.RowmeshError as error:
            errors.append(str(error))
    return errors


def test_optimizers_and_dtypes_that_cannot_be_are_refused() -> None:
    errors = run_on_ranks(2, one_optimizer)[0]
    assert [e.split(":")[0] for e in errors] == [
        "this model has an rm.Optimizer already",
        "rm.Optimizer takes all parameters of the sharded model at once",
        "the state is of another update rule, plan or rank",
        "dense parameters of ['torch.float64']",
    ]


def clipped(mesh: Mesh, case: Case, limit: float) -> Any:
    model, optimizer, batches = start(mesh, case)
    norms = []
    for batch in batches:
        mesh.mean(model(batch)).backward()
        norms.append(float(optimizer.clip_grad_norm_(limit)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, weights_of(model)


@pytest.mark.parametrize(
    ("limit", "sums"), [(1e6, ""), *((1e-2, sums) for sums in ("", "sparse", "dense", "bucket"))]
)
def test_clipping_covers_sparse_and_dense_and_counts_copies_once(limit: float, sums: str) -> None:
    case = make_case(rule="sgd", dense="sgd")
    if sums:  # hot rows: a norm that counts them on no rank, or on every one, scales by another
        first, *others = case.collections
        tables = [
            replace(t, hot=tuple(range(0, t.rows, 2)), sums=sums)
            if t.ranks and t.exchange == "rows"
            else t
            for t in first.tables
        ]
        assert any(t.hot for t in tables)
        case = replace(case, collections=(replace(first, tables=tuple(tables)), *others))
    found = run_on_ranks(2, clipped, case, limit)
    assert found[0][0] == found[1][0]
    oracle = rm.Oracle(Model(case), dense=DENSE["sgd"], sparse=RULES["sgd"])
    for step in range(4):
        oracle.step([case.batch(step, rank) for rank in range(2)], clip=limit)
    for name, value in oracle.model.state_dict().items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-6, atol=1e-6)


def scheduled(mesh: Mesh, case: Case) -> Any:
    model, optimizer, batches = start(mesh, case)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    rates = []
    for batch in batches:
        mesh.mean(model(batch)).backward()
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return rates, weights_of(model)


def test_learning_rate_schedules_drive_sparse_and_dense() -> None:
    case = make_case(rule="sgd", dense="sgd")
    rates, weights = run_on_ranks(2, scheduled, case)[0]
    assert rates == [[0.1 / (1 + s)] * 2 for s in range(4)]
    oracle = rm.Oracle(Model(case), dense=DENSE["sgd"], sparse=RULES["sgd"])
    for step in range(4):
        oracle.dense.param_groups[0]["lr"] = 0.1 / (1 + step)
        oracle.step([case.batch(step, rank) for rank in range(2)], lr=0.1 / (1 + step))
    expected = oracle.model.state_dict()
    assert all(torch.equal(weights[n], expected[n]) for n in expected)


def resumed(mesh: Mesh, case: Case) -> Any:
    model, optimizer, batches = start(mesh, case)
    for batch in batches[:2]:
        mesh.mean(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(optimizer.state_dict(), buffer := io.BytesIO())
    for engine in sharded_engines(model):
        for stack in engine.stacks:
            for state in (*stack.home_state.values(), *stack.copies_state.values()):
                state.fill_(77.0)
    optimizer.dense.state.clear()
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    for batch in batches[2:]:
        mesh.mean(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_state_dict_restores_sparse_and_dense_state(rule: str) -> None:
    case = make_case(rule=rule, dense="adam")
    found = run_on_ranks(2, resumed, case)[0]
    expected = oracle_case(case).weights
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def from_values(mesh: Mesh, case: Case) -> Any:
    model = materialise(Model(case))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        if mesh.rank == 1:
            model.hidden.weight.zero_()  # rank 0's dense parameters win
    rm.shard(model, case.plan(), mesh)
    names = [name for name, _ in model.named_parameters()]
    return weights_of(model), names


def test_a_materialised_model_is_sliced_and_dense_parameters_come_from_rank_0() -> None:
    case = make_case()
    found, names = run_on_ranks(2, from_values, case)[0]
    expected = materialise(Model(case)).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], 1.5 * expected[n]) for n in expected)
    assert not any("embedding" in name for name in names), "tables leave parameters()"


def test_world_of_one_runs_without_process_groups() -> None:
    case = make_case(world=1)
    mesh = rm.init_mesh()
    run = train_case(mesh, case)
    assert differences(case, [run], tolerance=0.0) == []
    assert mesh.ledger.by_edge() == {}
    mesh.close()


def bad_input(mesh: Mesh, what: str) -> Any:
    case = make_case()
    model, optimizer, batches = start(mesh, case)
    batch = dict(batches[0])
    features = batch["features"]
    if mesh.rank == 1:
        values, lengths = features.values().clone(), features.lengths()
        if what == "id":
            values[3] = -5
        if what == "dtype":
            values = values.float()
        keys = ["f0", "f1", "ff2"] if what == "feature" else features.keys()
        lengths = lengths + 1 if what == "lengths" else lengths
        batch["features"] = rm.KeyedJaggedTensor(keys, values, lengths=lengths, stride=3)
    message = ""
    try:
        model(batch)
    except rm.InputError as error:
        message = str(error)
    # the mesh is still in step: training goes on
    mesh.mean(model(batches[0])).backward()
    optimizer.step()
    optimizer.zero_grad()
    return message, weights_of(model)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("id", "rank 1: feature 'f0', sample 2: id -5 is outside table 'c0_t0' (12 rows)"),
        ("dtype", "rank 1: ids must be int32 or int64, got torch.float32"),
        ("feature", "rank 1: feature 'f2' is missing from the batch: did you mean 'ff2'?"),
        ("lengths", "rank 1: lengths add up to 24, but 15 ids were given"),
    ],
)
def test_bad_input_of_one_rank_is_the_same_error_on_all_and_training_can_go_on(
    what: str, sentence: str
) -> None:
    found = run_on_ranks(2, bad_input, what)
    assert [f[0] for f in found] == [sentence, sentence]
    expected = oracle_case(make_case(steps=1)).weights
    assert all(torch.equal(found[0][1][n], expected[n]) for n in expected)


def plan_errors(mesh: Mesh) -> list[str]:
    case = make_case()
    plan = case.plan()
    table, rest = plan.tables[1], plan.tables[1].rest
    hot = Tier(ranks=(0, 1), copies="world", rows=HotSet(count=3, sha256="0" * 64, file="hot.npy"))
    changed = [
        replace(plan, mesh=replace(plan.mesh, hosts=2, local=1)),
        replace(plan, tables=plan.tables[:2]),
        replace(plan, tables=(*plan.tables, replace(table, name="c0_t9"))),
        replace(plan, tables=(replace(plan.tables[0], num_embeddings=13), *plan.tables[1:])),
        replace(plan, dense=(5,)),
        replace(plan, tables=(replace(table, tiers=(hot, rest)), plan.tables[0], plan.tables[2])),
        replace(plan, towers=("left",)),
    ]
    found = []
    for broken in changed:
        try:
            rm.shard(Model(case), broken, mesh)
        except rm.PlanError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_plans_for_another_model_or_mesh_and_those_not_run_yet_say_so() -> None:
    found = run_on_ranks(2, plan_errors)[0]
    sentences = [
        "PlanError: the plan is for 2 hosts x 1 ranks, but the mesh has 1 x 2",
        "PlanError: table 'c0_t2' is not in the plan",
        "PlanError: the plan names table 'c0_t9': did you mean",
        "PlanError: table 'c0_t0': its rows is 12 in the model, 13 in the plan",
        "PlanError: the plan's dense buckets hold 5 elements",
        "PlanError: table 'c0_t1': the plan came without its hot rows: read it with rm.load_plan",
        "NotExecutable: the plan is valid, but this version does not run towers",
    ]
    assert len(found) == len(sentences)
    for message, start_of in zip(found, sentences, strict=True):
        assert message.startswith(start_of)


def verified(mesh: Mesh, exchange: str) -> Any:
    case = make_case(world=mesh.world)
    plan = case.plan()
    tables = tuple(replace(t, exchange=Exchange(exchange)) for t in plan.tables)
    plan = replace(plan, tables=tables)
    arguments: dict[str, Any] = {"dense": DENSE["adam"], "sparse": rm.Adam(lr=0.1)}
    batches = case.batches_of(mesh.rank)
    return str(rm.verify(functools.partial(Model, case), plan, mesh, batches, **arguments))


def test_verify_says_what_was_proved() -> None:
    assert run_on_ranks(2, verified, "rows") == ["verified: 4 steps, 28 tensors bit-equal (E0)"] * 2
    assert run_on_ranks(2, verified, "pooled")[0].endswith("within 0.0001 (E1)")


def verified_wrongly(mesh: Mesh) -> str:
    case = make_case()
    number = iter(range(100))

    def make_model() -> nn.Module:
        model = materialise(Model(case))
        if next(number) > 0:  # the oracle's
            with torch.no_grad():
                model.collections[0].table_modules()["c0_t1"].weight[7, 2] += 1e-3
        return model

    rule = rm.SGD(lr=0.0)
    dense = functools.partial(torch.optim.SGD, lr=0.0)
    batches = case.batches_of(mesh.rank)[:0]
    return str(rm.verify(make_model, case.plan(), mesh, batches, dense=dense, sparse=rule))


def test_verify_names_table_row_and_column_that_differ_first() -> None:
    message = run_on_ranks(2, verified_wrongly)[0]
    assert message.startswith("NOT equal after 0 steps (E0): ")
    assert "table 'c0_t1', row 7, column 2: " in message


def traffic(mesh: Mesh, split: str, exchange: str) -> Any:
    data = rm.data.SyntheticClicks(cardinalities=[5000, 300, 40], batch_size=256, labels="coin")
    model = rm.models.DLRM(
        rm.EmbeddingBagCollection(data.tables(8), device="meta"), 13, (8,), (4, 1)
    )
    stats = rm.Stats.from_batches(
        data.tables(8), [data.batch_at(9, i).sparse_features for i in range(5)]
    )
    plan = rm.make_plan(model, mesh.topology, stats=stats, split=split, exchange=exchange)
    rm.shard(model, plan, mesh)
    optimizer = rm.Optimizer(
        model, dense=functools.partial(torch.optim.SGD, lr=0.1), sparse=rm.SGD(lr=0.1)
    )
    mesh.ledger.reset()
    for i in range(20):
        mesh.mean(model(data.batch_at(mesh.rank, i))).backward()
        optimizer.step()
        optimizer.zero_grad()
    predicted = plan.predicted.host_bytes + plan.predicted.cross_bytes
    return sum(mesh.ledger.by_link().values()) / 20, predicted


@pytest.mark.parametrize(
    ("split", "exchange"),
    [("row_wise", "rows"), ("table_wise", "pooled"), ("data_parallel", "rows"), ("auto", "auto")],
)
def test_expected_bytes_are_within_ten_percent_of_the_mean_of_20_batches(
    split: str, exchange: str
) -> None:
    found = run_on_ranks(2, traffic, split, exchange)
    measured = sum(f[0] for f in found) / 2
    assert measured == pytest.approx(found[0][1], rel=0.10)
