"""Measured speeds, the file they are kept in, and the step they foretell."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rowmesh.cli import app
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import (
    Calibration,
    DenseCost,
    Load,
    Rates,
    RowCost,
    load_calibration,
    save_calibration,
    step_seconds,
    step_time,
)
from rowmesh.cost.load import no_load
from rowmesh.errors import InputError
from rowmesh.topology import Topology
from rowmesh.train.calibrate import calibrate
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.calibrate.links import fit_line, measure_link, num_parcels
from rowmesh.train.calibrate.rows import fit_costs, row_cost_of
from rowmesh.train.config import RunConfig
from rowmesh.train.model import ModelConfig
from rowmesh.train.planning import PlanConfig
from rowmesh.train.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.sources import CLICKS

LAW = settings(derandomize=True, deadline=None, max_examples=60)
SECONDS = st.floats(0.0, 1.0)
DENSE = DenseCost(
    flops=1e9, parameters=1e6, forward_s=0.1, backward_s=0.2, step_s=0.01, tail_s=0.05
)
PAIR = Topology(hosts=2)
CONFIG = RunConfig(data=CLICKS, model=ModelConfig(dim=4, dense_layers=(8,), over_layers=(8,)))


def row_cost(dim: int, factor: float = 1.0) -> RowCost:
    numbers = ("id_s", "lookup_s", "update_s", "bag_id_s", "bag_update_s")
    return RowCost(dim=dim, **{n: factor * (i + 1) for i, n in enumerate(numbers)})


def test_costs_between_dims_lie_on_a_line() -> None:
    rates = Rates(rows=(row_cost(16, 1.0), row_cost(64, 2.0), row_cost(128, 8.0)))
    for dim, factor in ((16, 1.0), (40, 1.5), (64, 2.0), (96, 5.0), (128, 8.0), (192, 14.0)):
        assert asdict(rates.row_cost(dim)) == pytest.approx(asdict(row_cost(dim, factor)))
    half = 1.0 - 8 / 48
    for dim in (8, 1):  # no cheaper than half the smallest known dim
        assert asdict(rates.row_cost(dim)) == pytest.approx(asdict(row_cost(dim, half)))
    assert Rates(rows=(row_cost(16),)).row_cost(99) == row_cost(99)
    falling = Rates(rows=(row_cost(16, 3.0), row_cost(32, 1.0)))
    assert falling.row_cost(64) == row_cost(64, 0.0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rates(host_bytes_per_s=0.0), "host_bytes_per_s is 0.0, but must be positive"),
        (lambda: Rates(cross_bytes_per_s=float("inf")), "cross_bytes_per_s is inf, but must be"),
        (lambda: Rates(host_latency_s=-1e-9), "host_latency_s is -1e-09, but must be from 0"),
        (lambda: Rates(fixed_s=float("nan")), "fixed_s is nan, but must be from 0 and finite"),
        (lambda: Rates(rows=()), r"rows has dims \[\], but needs at least one"),
        (lambda: Rates(rows=(row_cost(8), row_cost(8))), r"rows has dims \[8, 8\], but needs"),
        (lambda: row_cost(0), "dim is 0, but must be at least 1"),
        (lambda: row_cost(8, -1.0), "id_s is -1.0, but must be from 0"),
        (lambda: replace(DENSE, tail_s=-1.0), "tail_s is -1.0, but must be from 0"),
    ],
)
def test_rates_are_checked(make: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()


def test_dense_layers_scale_by_flops_and_parameters() -> None:
    found = DENSE.scaled(flops=2e9, parameters=3e6)
    wanted = DenseCost(
        flops=2e9, parameters=3e6, forward_s=0.2, backward_s=0.4, step_s=0.03, tail_s=0.1
    )
    assert asdict(found) == pytest.approx(asdict(wanted))
    assert found.total_s == pytest.approx(0.63)


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    rates = Rates(cross_bytes_per_s=1e8, rows=(row_cost(4), row_cost(8)))
    for dense in (DENSE, None):
        written = Calibration(
            topology=Topology(hosts=2, local=3, memory_bytes=7),
            rates=replace(rates, dense=dense),
            machine={"a": "b"},
        )
        save_calibration(written, file)
        assert load_calibration(file) == written
        assert load_calibration(file, topology=Topology(hosts=2, local=3)) == written
    assert [p.name for p in tmp_path.iterdir()] == ["topology.json"]


def test_a_file_that_is_no_calibration_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    document = asdict(Calibration(topology=PAIR, rates=Rates()))
    for text, sentence in (
        ("{", "t.json is not JSON"),
        ("[]", "version None is not 1: make it anew with rowmesh calibrate"),
        (json.dumps(document | {"version": 2}), "version 2 is not 1"),
        (json.dumps(document | {"rate": 3}), "unknown field 'rate'"),
        (json.dumps(document | {"rates": {"fixed_s": -1}}), "fixed_s is -1.0, but must be"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=sentence):
            load_calibration(file)
    with pytest.raises(InputError, match=r"cannot read .*absent.json: No such file"):
        load_calibration(tmp_path / "absent.json")
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"of 2 hosts x 1 ranks, not of 1 x 2: run rowmesh cal"):
        load_calibration(file, topology=Topology(local=2))


@LAW
@given(
    fixed=SECONDS,
    per_id=SECONDS,
    per_row=SECONDS,
    noise=st.lists(st.floats(0.99, 1.01), min_size=4, max_size=4),
)
def test_costs_are_recovered_from_times(
    fixed: float, per_id: float, per_row: float, noise: list[float]
) -> None:
    """Within what noise of a hundredth allows, and never below zero."""
    points = [(512.0, 470.0), (512.0, 120.0), (8192.0, 7000.0), (8192.0, 2000.0)]
    times = [(fixed + per_id * q + per_row * d) * 1e-6 + 1e-9 for q, d in points]
    exact = fit_costs([(q, d, t) for (q, d), t in zip(points, times, strict=True)])
    refit = [exact[0] + exact[1] * q + exact[2] * d for q, d in points]
    assert refit == pytest.approx(times, rel=1e-6)
    noisy = [(q, d, t * n) for (q, d), t, n in zip(points, times, noise, strict=True)]
    found = fit_costs(noisy)
    assert min(found) >= 0.0
    again = [found[0] + found[1] * q + found[2] * d for q, d in points]
    assert again == pytest.approx(times, rel=0.05)


def test_a_line_through_two_sizes_has_no_latency_in_it() -> None:
    assert fit_line((100, 400), (5.0 + 1.0, 5.0 + 4.0)) == pytest.approx(0.01)
    assert fit_line((100, 400), (9.0, 8.0)) == pytest.approx(0.02)  # noise


def test_costs_are_sums_of_fits() -> None:
    """An id costs forward and backward; a row is looked up in one and updated in the other."""
    cost, fixed = row_cost_of(
        8,
        forward=(1.0, 10.0, 100.0),
        rest=(2.0, 20.0, 200.0),
        pooled=(4.0, 40.0, 400.0),
        bags=(8.0, 80.0, 800.0),
    )
    assert cost == RowCost(
        dim=8, id_s=30.0, lookup_s=100.0, update_s=200.0, bag_id_s=120.0, bag_update_s=1200.0
    )
    assert fixed == 3.0


@pytest.mark.parametrize(
    ("hosts", "local", "near", "far"), [(2, 2, 1, 4), (4, 1, 0, 3), (1, 4, 3, 0), (2, 1, 0, 1)]
)
def test_a_card_carries_the_parcels_of_all_its_ranks(
    hosts: int, local: int, near: int, far: int
) -> None:
    """On 2 x 2 two ranks send two parcels each across hosts, and one each inside."""
    topology = Topology(hosts=hosts, local=local)
    assert (num_parcels(topology, "host"), num_parcels(topology, "cross")) == (near, far)


def load(forward: float, gradients: float, work: float, *, inside: bool = False) -> Load:
    """What both ranks send and receive, across hosts or inside one."""
    values = no_load(2).values
    first = 0 if inside else 2
    values[first : first + 2] = forward + gradients
    values[first + 4 : first + 6] = gradients
    values[8] = work
    return Load(values, frozenset({"rows"}))


def test_a_step_is_the_sum_of_what_nothing_hides() -> None:
    """Backward lasts 0.2 s; a dense sum of 0.1 s is ready at half of it, and is hidden."""
    rates = Rates(cross_bytes_per_s=100.0, cross_latency_s=0.5, fixed_s=0.25)
    found = step_time(
        load(30.0, 7.0, 2.0),
        replace_kinds(load(0.0, 20.0, 0.0)),
        topology=PAIR,
        rates=rates,
        cost=DENSE,
        buckets=(5, 5),
    )
    assert found.rows_s == pytest.approx(2.0)
    assert found.dense_s == pytest.approx(0.31)
    assert found.forward_s == pytest.approx(0.3)
    # Buckets: from 0.1 to 0.2; gradients ready at 0.15, from 0.2 to 0.27; the last bucket to 0.37.
    assert found.gradients_s == pytest.approx(0.17)
    assert found.latency_s == pytest.approx(0.25 + 0.5 * 4)
    assert found.total_s == pytest.approx(2.0 + 0.31 + 0.3 + 0.17 + 2.25)


def test_hot_rows_in_the_last_bucket_make_no_layer_ready_earlier() -> None:
    """Ten of its fifteen elements are hot rows': the first bucket leaves at 0.1 s all the same.

    It takes 0.1 s, gradients 0.07, the last bucket 0.3: all from 0.1 to 0.57.
    """
    found = step_time(
        load(0.0, 7.0, 0.0),
        replace_kinds(load(0.0, 40.0, 0.0)),
        topology=PAIR,
        rates=Rates(cross_bytes_per_s=100.0),
        cost=DENSE,
        buckets=(5, 15),
        riding=10,
    )
    assert found.gradients_s == pytest.approx(0.37)


def test_a_host_whose_rows_all_travel_early_hides_none_of_another() -> None:
    """Host 0 sends 10 bytes, 1 of them early, and host 1 nine, all early: 9 are waited for."""
    tables, early = load(0.0, 0.0, 0.0), load(0.0, 0.0, 0.0)
    tables.values[2], early.values[2] = (10.0, 9.0), (1.0, 9.0)
    tables.values[6] += (4.0, 3.0)  # gradients, all of host 1's follow
    tables.values[2] += (4.0, 3.0)
    early.values[6] = (0.0, 3.0)
    given: dict[str, Any] = {
        "topology": PAIR,
        "rates": Rates(cross_bytes_per_s=100.0),
        "cost": replace(DENSE, tail_s=0.0),
        "buckets": (),
    }
    found = step_time(tables, no_load(2), early=early, **given)
    assert found.forward_s == pytest.approx(0.09)
    assert found.gradients_s == pytest.approx(0.04)


def test_hot_rows_alone_in_a_bucket_leave_at_the_end_of_backward() -> None:
    """At 0.2 s, for 0.4: no dense layer is known."""
    found = step_time(
        no_load(2),
        replace_kinds(load(0.0, 40.0, 0.0)),
        topology=PAIR,
        rates=Rates(cross_bytes_per_s=100.0),
        cost=DENSE,
        buckets=(10,),
        riding=10,
    )
    assert found.gradients_s == pytest.approx(0.4)


@pytest.mark.parametrize(("gradients", "outlast"), [(4.0, 0.0), (7.0, 0.02)])
def test_gradients_of_embeddings_leave_before_the_end_of_backward(
    gradients: float, outlast: float
) -> None:
    """They are ready at 0.15 s of the 0.2, and take 0.04 or 0.07 s."""
    rates = Rates(cross_bytes_per_s=100.0)
    found = step_time(
        load(0.0, gradients, 0.0),
        no_load(2),
        topology=PAIR,
        rates=rates,
        cost=DENSE,
        buckets=(),
    )
    assert found.gradients_s == pytest.approx(outlast)


@pytest.mark.parametrize("buckets", [(), (0,), (3,)])
def test_dense_bytes_of_no_known_bucket_leave_at_the_end_of_backward(
    buckets: tuple[int, ...],
) -> None:
    """As those of one bucket do, after the gradients from 0.15 s to 0.17: none is dropped."""
    found = step_time(
        load(0.0, 2.0, 0.0),
        replace_kinds(load(0.0, 20.0, 0.0)),
        topology=PAIR,
        rates=Rates(cross_bytes_per_s=100.0),
        cost=DENSE,
        buckets=buckets,
    )
    assert found.gradients_s == pytest.approx(0.2)


def test_the_buckets_of_a_step_must_be_said() -> None:
    """A caller that forgets them is told, not given a later end of the sums."""
    given: Any = {"topology": PAIR, "rates": Rates(), "cost": DENSE}
    with pytest.raises(TypeError, match="'buckets'"):
        step_time(no_load(2), no_load(2), **given)


def replace_kinds(dense: Load) -> Load:
    return Load(dense.values, frozenset({"dense"}))


def test_what_travels_inside_a_host_is_never_hidden() -> None:
    rates = Rates(host_bytes_per_s=100.0, host_latency_s=0.0, fixed_s=0.0)
    found = step_time(
        load(30.0, 7.0, 0.0, inside=True),
        replace_kinds(load(0.0, 1.0, 0.0, inside=True)),
        topology=Topology(local=2),
        rates=rates,
        cost=DENSE,
        buckets=(5,),
    )
    assert (found.forward_s, found.gradients_s) == pytest.approx((0.3, 0.08))


@LAW
@given(
    st.floats(0.0, 100.0),
    st.floats(0.0, 100.0),
    st.floats(0.0, 100.0),
    st.lists(st.integers(1, 9), max_size=4),
    st.floats(1.0, 100.0),
)
def test_hiding_never_takes_longer_than_not_hiding(
    forward: float, gradients: float, sums: float, buckets: list[int], rate: float
) -> None:
    tables, dense = load(forward, gradients, 1.0), replace_kinds(load(0.0, sums, 0.0))
    rates = Rates(cross_bytes_per_s=rate)
    found = step_time(tables, dense, topology=PAIR, rates=rates, cost=DENSE, buckets=buckets or [1])
    exposed = step_seconds(tables + dense, topology=PAIR, rates=rates)
    assert found.total_s <= exposed + DENSE.total_s + rates.fixed_s + 1e-9
    busy = (gradients + sums) / rate  # the card cannot begin before backward does
    assert found.gradients_s >= busy - DENSE.backward_s - 1e-9
    faster = step_time(
        tables,
        dense,
        topology=PAIR,
        rates=replace(rates, cross_bytes_per_s=2 * rate),
        cost=DENSE,
        buckets=buckets or [1],
    )
    assert faster.total_s <= found.total_s + 1e-9


def test_the_flops_of_dense_layers_are_those_of_their_products() -> None:
    """Six a weight and sample: two forward, two for each gradient in backward."""
    counted = []
    batch = next(CLICKS.batches(rank=0, world=1))
    for width in (8, 24):
        model = replace(CONFIG.model, over_layers=(width,))
        counted.append(count_dense(replace(CONFIG, model=model), batch))
    tables = len(CLICKS.tables(4))
    inputs = 4 + (tables + 1) * tables // 2
    more = 16 * (inputs + 1)  # weights to and from the wider layer
    assert counted[1][0] - counted[0][0] == 6 * CLICKS.batch_size * more
    assert counted[1][1] - counted[0][1] == more + 16


def links_body(mesh: Mesh) -> Any:
    return [measure_link(mesh, link, long_s=0.005) for link in ("host", "cross")]  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "hosts"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_links_are_measured_where_there_are_any(ranks: int, hosts: int) -> None:
    found = run_on_ranks(ranks, links_body, hosts=hosts, debug=False)
    assert all(f == found[0] for f in found)
    near, far = found[0]
    assert (near is None, far is None) == (ranks // hosts == 1, hosts == 1)
    for rate in (r for r in found[0] if r is not None):
        assert rate.latency_s > 0.0
        assert rate.bytes_per_s > 0.0


def calibrate_body(mesh: Mesh) -> Any:
    stages: list[str] = []
    found = calibrate(CONFIG, mesh, dims=(4, 8), batches=(4, 16), on_stage=stages.append)
    return found, stages, mesh.ledger.by_link()


def test_a_calibration_is_the_same_on_all_ranks_and_foretells_a_run(tmp_path: Path) -> None:
    results = run_on_ranks(2, calibrate_body, debug=False)
    (found, stages, _), (other, _, _) = results
    assert found == other
    assert found.topology.local == 2
    assert [cost.dim for cost in found.rates.rows] == [4, 8]
    assert all(v > 0 for v in asdict(found.rates.dense).values())
    assert found.rates.cross_bytes_per_s == Rates().cross_bytes_per_s  # there is no such link
    assert found.rates.host_bytes_per_s != Rates().host_bytes_per_s
    assert (stages[0], stages[-1]) == ("dense layers", "dense layers again")
    file = tmp_path / "topology.json"
    save_calibration(found, file)
    told = run_on_ranks(2, forecast_body, str(file))
    assert told[0] == told[1]
    assert 0.0 < told[0]["step_s"] < 10.0
    assert sum(told[0]["parts"].values()) == pytest.approx(told[0]["step_s"])
    plain = run_on_ranks(2, forecast_body, None)[0]
    assert plain["step_s"] is None
    assert plain["host_bytes"] > 0.0


def forecast_body(mesh: Mesh, file: str | None) -> Any:
    trainer = Trainer(replace(CONFIG, plan=PlanConfig(topology=file)), mesh)
    return trainer.forecast.as_dict()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["calibrate", "--out", "absent/t.json"],
            "absent is no folder; give --out a file",
        ),
        (
            ["calibrate", "--out", "."],
            "cannot write the calibration to .: it is a folder",
        ),
        (["calibrate", "nothing"], "nothing"),
        (["train", "--topology", "absent.json"], "cannot read absent.json: No such file"),
        (["plan", "--topology", "absent.json"], "cannot read absent.json: No such file"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_planner_uses_measured_speeds(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    slow = Rates(cross_bytes_per_s=1e6)
    save_calibration(Calibration(topology=Topology(hosts=2, local=2), rates=slow), file)
    shape = ["plan", "--hosts", "2", "--ranks-per-host", "2", "--tables", "4"]
    found = CliRunner().invoke(app, [*shape, "--topology", str(file)])
    assert found.exit_code == 0, found.output
    assert "expected ms of a step for tables and sums" in found.stdout
    assert "expected ms of a step" not in CliRunner().invoke(app, shape).stdout
    other = CliRunner().invoke(app, ["plan", "--hosts", "3", "--topology", str(file)])
    assert other.exit_code == 2
    assert "of 2 hosts x 2 ranks, not of 3 x" in other.stderr
