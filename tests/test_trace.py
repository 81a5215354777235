"""The trace: what it says is true, and taking it changes nothing."""

import _thread
import json
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

import rowmesh as rm
from rowmesh.cli import app
from rowmesh.comm.clock import ClockComparison
from rowmesh.comm.exchange import Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.runtime.export import full_sparse_state
from rowmesh.trace import Clock, Flight, Recorder, Recording, Span
from rowmesh.trace.chrome import chrome_trace
from rowmesh.trace.recording import PHASES, STEP
from rowmesh.trace.summary import summarise
from rowmesh.trace.table import format_summary
from rowmesh.trace.times import OTHER, Communication, PhaseTime, communication, phase_times
from rowmesh.train.config import RunConfig, TrainingConfig
from rowmesh.train.tracing import check_trace_file
from rowmesh.train.trainer import Trainer
from tests.cases import DENSE, RULES, Case, Collection, Model, Table
from tests.processes import settings as tiny_settings
from tests.ranks import run_on_ranks
from tests.sources import CLICKS
from tests.test_trainer import MODEL, untimed

MS = 1_000_000


def phase(name: str, start: int, end: int, track: str = STEP) -> Span:
    return Span("phase", name, track, start * MS, end * MS)


def wait(start: int, end: int, track: str = STEP) -> Span:
    return Span("wait", "x", track, start * MS, end * MS)


def flight(lane: str, start: int, end: int | None, name: str = "ids of users") -> Flight:
    return Flight(lane, name, 1, 2, 10, 20, start * MS, None if end is None else end * MS)


def synthetic(rank: int = 0, *, shift: int = 0, clock: Clock | None = None) -> Recording:
    """Two steps, [0, 20] and [30, 50] ms, of which the second has phases, waits and flights."""
    first, last = 0 + shift, 30 + shift
    return Recording(
        rank=rank,
        host=rank // 2,
        steps=[
            Span(STEP, "7", STEP, first * MS, (first + 20) * MS),
            Span(STEP, "8", STEP, last * MS, (last + 20) * MS),
        ],
        spans=[  # in the order they ended
            wait(last + 3, last + 5),
            phase("counts", last + 2, last + 6),
            wait(last + 1, last + 12, "dense 0"),
            phase("dense buckets", last + 9, last + 10),
            phase("backward", last + 8, last + 14),
            wait(last + 14, last + 16),
        ],
        flights=[
            flight("control", first + 19, last + 1),
            flight("control", last + 2, last + 4),
            flight("grads", last + 9, last + 15, "dense bucket 3, groups, sums"),
            flight("grads", last + 13, last + 17, "gradients of users"),
            flight("rows", last + 18, None, "vectors of users"),
        ],
        sent={"ids": {"cross": 4_000_000}},
        clock=clock or Clock(),
    )


def test_a_moment_counts_to_the_innermost_phase_and_the_rest_is_other() -> None:
    found = synthetic()
    assert phase_times(found, found.steps[0]) == {OTHER: PhaseTime(20 * MS, 0)}
    assert phase_times(found, found.steps[1]) == {
        "counts": PhaseTime(4 * MS, 2 * MS),
        "backward": PhaseTime(5 * MS, 0),  # 8 to 14, without the bucket inside
        "dense buckets": PhaseTime(1 * MS, 0),
        OTHER: PhaseTime(10 * MS, 2 * MS),
    }


def test_exposed_is_what_the_steps_wait_through_and_hidden_the_rest() -> None:
    found = synthetic()
    assert communication(found, found.steps[0]) == {
        ("", ""): Communication(MS, 0),  # cut at the end of the step
        ("control", ""): Communication(MS, 0),
        ("control", "ids"): Communication(MS, 0),
    }
    assert communication(found, found.steps[1]) == {
        # flights [0, 1], [2, 4], [9, 17], [18, 20]; waits [3, 5] and [14, 16]
        ("", ""): Communication(13 * MS, 3 * MS),
        ("control", ""): Communication(3 * MS, 1 * MS),
        ("control", "ids"): Communication(3 * MS, 1 * MS),
        ("grads", ""): Communication(8 * MS, 2 * MS),
        ("grads", "dense bucket"): Communication(6 * MS, 1 * MS),
        ("grads", "gradients"): Communication(4 * MS, 2 * MS),
        ("rows", ""): Communication(2 * MS, 0),
        ("rows", "vectors"): Communication(2 * MS, 0),
    }


@st.composite
def nested(draw: st.DrawFn, start: int, end: int, depth: int = 0) -> list[Span]:
    """Marks inside [start, end] as blocks of a program leave them: inner ones first."""
    found: list[Span] = []
    at = start
    while at < end and depth < 4 and draw(st.booleans()):
        first = draw(st.integers(at, end))
        last = draw(st.integers(first, end))
        found += draw(nested(first, last, depth + 1))
        kind, name = draw(st.sampled_from(["phase", "wait"])), draw(st.sampled_from("abc"))
        found.append(Span(kind, name, STEP, first, last))
        at = last
    return found


@given(
    spans=nested(5, 40),
    flights=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 45), st.integers(0, 20))),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_times_are_those_of_counting_every_nanosecond(
    spans: list[Span], flights: list[tuple[str, int, int]]
) -> None:
    step = Span(STEP, "1", STEP, 5, 40)
    recording = Recording(
        rank=0,
        host=0,
        steps=[step],
        spans=spans,
        flights=[Flight(a, "x", 1, 1, 0, 0, b, b + n) for a, b, n in flights],
    )
    spent, waiting = Counter[str](), Counter[str]()
    in_flight, exposed = 0, 0
    for t in range(5, 40):
        around = [s for s in spans if s.start <= t < s.end]  # the innermost ended first
        name = next((s.name for s in around if s.kind == "phase"), OTHER)
        is_waiting = any(s.kind == "wait" for s in around)
        spent[name] += 1
        waiting[name] += is_waiting
        is_flying = any(b <= t < b + n for _, b, n in flights)
        in_flight += is_flying
        exposed += is_flying and is_waiting
    found = phase_times(recording, step)
    assert sum(time.spent for time in found.values()) == 35
    assert {n: t.spent for n, t in found.items() if t.spent} == {n: t for n, t in spent.items()}
    assert {n: t.waiting for n, t in found.items() if t.spent} == {n: waiting[n] for n in spent}
    whole = communication(recording, step)["", ""]
    assert (whole.in_flight, whole.exposed) == (in_flight, exposed)
    assert whole.in_flight == whole.exposed + whole.hidden


def test_the_table_takes_the_median_of_steps_and_the_mean_of_ranks() -> None:
    slow = synthetic(3)
    slow.steps.append(Span(STEP, "9", STEP, 60 * MS, 160 * MS))  # rank 0 has no step 9
    slow.spans.append(phase("mine", 31, 32))
    slow.steps[0] = Span(STEP, "7", STEP, -20 * MS, 20 * MS)
    found = summarise([synthetic(0), slow])
    assert found is not None
    assert (found.ranks, found.hosts, found.steps) == (2, 2, (7, 8))
    rows = {row.name: row for row in found.phases}
    assert list(rows) == ["counts", "backward", "dense buckets", "mine", "other", "step"]
    assert (rows["step"].ms, rows["step"].slowest_ms) == (25, 30)  # rank 0: 20, rank 3: 40 and 20
    assert (rows["counts"].ms, rows["counts"].waiting_ms) == (2, 1)  # 0 and 4 ms, of which 2
    assert rows["mine"].slowest_rank == 3
    lanes = [(row.lane, row.exchange) for row in found.communication]
    assert lanes[:3] == [("", ""), ("control", ""), ("control", "ids")]
    assert found.sent_mb["ids"]["cross"] == pytest.approx((4 / 2 + 4 / 3) / 2)
    text = format_summary(found)
    assert max(map(len, text.splitlines())) <= 100
    assert [row.name for row in found.phases if row.name not in text] == []
    assert json.loads(json.dumps(found.to_dict()))["phases"][0]["name"] == "counts"


def test_ranks_without_a_step_in_common_have_no_table() -> None:
    empty = Recording(rank=1, host=0, steps=[], spans=[], flights=[])
    assert summarise([synthetic(), empty]) is None


def check_events(trace: dict[str, Any], ranks: int) -> None:
    """Complete events of every rank on named threads, on which marks lie apart or inside."""
    events = trace["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in events} == set(range(ranks))
    threads: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            place = threads.setdefault((event["pid"], event["tid"]), [])
            place.append((event["ts"], event["ts"] + event["dur"]))
    for intervals in threads.values():
        around: list[float] = []
        for start, end in sorted(intervals, key=lambda i: (i[0], -i[1])):
            while around and around[-1] <= start + 1e-6:
                around.pop()
            assert not around or end <= around[-1] + 1e-6
            around.append(end)


def test_all_ranks_are_on_rank_0s_clock() -> None:
    ahead = Clock(offset_ns=-100 * MS, error_ns=MS // 2, drift_ns=MS // 4)
    trace = chrome_trace([synthetic(0), synthetic(1, shift=101, clock=ahead)])
    check_events(trace, 2)
    events = trace["traceEvents"]
    steps = [(e["pid"], e["ts"], e["dur"]) for e in events if e.get("cat") == STEP]
    assert steps == [(0, 0, 20e3), (0, 30e3, 20e3), (1, 1e3, 20e3), (1, 31e3, 20e3)]
    clock = {"offset_us": -100e3, "error_us": 500, "drift_us": 250}
    assert trace["otherData"]["clocks"]["rank 1"] == clock
    names = {e["args"]["name"] for e in events if e["name"].endswith("_name")}
    lanes = {"lane control", "lane grads", "lane grads (2)", "lane rows"}  # two grads overlap
    assert names == {"rank 0, host 0", "rank 1, host 0", "step", "dense 0", *lanes}
    sent = next(e for e in events if e["name"] == "gradients of users")["args"]
    assert sent == {"sequence": 1, "messages": 2, "sent_bytes": 10, "received_bytes": 20}
    both = summarise([synthetic(0), synthetic(1, shift=101, clock=ahead)])
    assert both is not None
    assert both.clock_error_ms == 0.75


def test_a_recorder_that_is_off_notes_nothing() -> None:
    recorder = Recorder()
    assert recorder.phase("a") is recorder.wait("b")
    with recorder.phase("a"):
        recorder.end_step()
    recorder.begin_step(1)
    with recorder.phase("b"):
        pass
    recorder.end_step()
    with recorder.phase("c"):
        pass
    found = recorder.take(rank=0, host=0)
    assert ([s.name for s in found.steps], [s.name for s in found.spans]) == (["1"], ["b"])
    assert recorder.take(rank=0, host=0).steps == []


def test_a_step_with_too_many_events_is_dropped() -> None:
    recorder = Recorder(max_events=3)
    for number in range(3):
        recorder.begin_step(number)
        for name in ("a", "b"):
            with recorder.phase(name):
                pass
        recorder.end_step()
    found = recorder.take(rank=0, host=0)
    assert ([s.name for s in found.steps], len(found.spans), found.is_full) == (["0"], 2, True)
    summary = summarise([found])
    assert summary is not None
    assert "too many events" in format_summary(summary)


def test_threads_that_python_did_not_start_are_autograds() -> None:
    recorder, done = Recorder(), Event()
    recorder.begin_step(1)

    def work(name: str) -> None:
        with recorder.phase(name):
            pass
        done.set()

    _thread.start_new_thread(work, ("foreign",))
    assert done.wait(10)
    with ThreadPoolExecutor(1, thread_name_prefix="rowmesh-dense 0") as threads:
        threads.submit(work, "bucket").result()
    recorder.end_step()
    spans = recorder.take(rank=0, host=0).spans
    assert {s.name: s.track for s in spans} == {"foreign": STEP, "bucket": "dense 0"}


TABLES = (
    Table(rows=20, dim=4, ranks=(0, 1, 2, 3)),
    Table(rows=20, dim=4, ranks=(3,), exchange="pooled"),
    Table(rows=20, dim=4, ranks=()),
    Table(rows=20, dim=4, ranks=(3, 2), by_host=True, exchange="pooled"),
    Table(rows=20, dim=8, ranks=(0, 3), columns=2),
)
IDS = [
    [
        [[[(s + r + f + b) % 20, (3 * b + f) % 20] for b in range(4)] for f in range(len(TABLES))]
        for r in range(4)
    ]
    for s in range(5)
]
CASE = Case(world=4, hosts=2, tree="host-first", collections=(Collection(tables=TABLES),), ids=IDS)


@dataclass
class Outcome:
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    losses: list[Tensor]
    ledger: dict[str, dict[str, int]]
    num_messages: int
    summary: Any


def train(mesh: Mesh, case: Case, path: str | None) -> Outcome:
    """All steps of ``case``; steps 2, 3 and 4 traced, if a path is given."""
    model = rm.shard(Model(case), case.plan(), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE[case.dense], sparse=RULES[case.rule])
    tracing = rm.Tracing(mesh, path, num_steps=3, skip=1) if path else None
    losses, batches = [], mesh.batches(case.batches_of(mesh.rank))
    for number in range(1, len(case.ids) + 1):
        if tracing:
            tracing.begin_step(number)
        batch = next(batches)
        with mesh.trace.phase("dense forward"):
            found = model(batch)
        with mesh.trace.phase("backward"):
            mesh.mean(found).backward()
        optimizer.step()
        if tracing:
            tracing.end_step()
        losses.append(found.detach())
    assert not mesh.trace.is_on
    return Outcome(
        weights=rm.full_state_dict(model),
        states=full_sparse_state(model),
        losses=losses,
        ledger=mesh.ledger.by_edge(),
        num_messages=mesh.ledger.num_messages(),
        summary=tracing and tracing.finish(),
    )


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Outcome], dict[str, Any]]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    outcomes = run_on_ranks(4, train, CASE, str(path), hosts=2, debug=False)
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]  # nothing partial is left
    return outcomes, json.loads(path.read_text())


def test_tracing_changes_no_bit_and_no_byte(traced: Any) -> None:
    plain = run_on_ranks(4, train, CASE, None, hosts=2, debug=False)
    for ours, theirs in zip(traced[0], plain, strict=True):
        assert ours.ledger == theirs.ledger
        assert ours.num_messages == theirs.num_messages
        assert all(map(torch.equal, ours.losses, theirs.losses))
        assert ours.weights.keys() == theirs.weights.keys()
        for name, weight in ours.weights.items():
            assert torch.equal(weight, theirs.weights[name])
        for name, state in ours.states.items():
            assert all(torch.equal(state[k], theirs.states[name][k]) for k in state)


def test_a_trace_has_every_rank_phase_thread_and_lane(traced: Any) -> None:
    trace = traced[1]
    check_events(trace, 4)
    events = trace["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["rank 0, host 0", "rank 1, host 0", "rank 2, host 1", "rank 3, host 1"]
    for rank in range(4):
        mine = [e for e in events if e["pid"] == rank]
        threads = {e["args"]["name"]: e["tid"] for e in mine if e["name"] == "thread_name"}
        wanted = {"step", "dense 0", "sums of collections.0"}
        assert wanted | {f"lane {lane}" for lane in Lane} <= set(threads)
        steps = [e for e in mine if e.get("cat") == STEP]
        assert [e["name"] for e in steps] == ["step 2", "step 3", "step 4"]
        on_step = {e["name"] for e in mine if e.get("cat") == "phase" and e["tid"] == 0}
        missing = {"tally"}  # the trainer's
        missing |= {"relay"} if rank < 2 else set()  # the relayed table lies on host 1
        missing |= {"column squares"} if rank in (1, 2) else set()
        assert on_step == set(PHASES) - missing
        sums = {e["name"] for e in mine if e["tid"] == threads["sums of collections.0"]}
        assert "hot sums" in sums


def test_the_summary_is_the_same_everywhere_and_counts_the_ledgers_bytes(traced: Any) -> None:
    outcomes = traced[0]
    summary = outcomes[0].summary
    assert [o.summary for o in outcomes] == [summary] * 4
    assert summary.steps == (2, 3, 4)
    assert not summary.is_full
    steps = run_on_ranks(4, ledgers_of_steps, CASE, hosts=2, debug=False)
    for edge, links in summary.sent_mb.items():
        for link, amount in links.items():
            mean = sum(s[edge].get(link, 0) for rank in steps for s in rank[1:4] if edge in s) / 12
            assert amount == pytest.approx(mean / 1e6)
    assert set(summary.sent_mb) == {edge for rank in steps for step in rank for edge in step}
    assert [row.name for row in summary.phases][-2:] == ["other", "step"]
    whole = summary.communication[0]
    assert 0 < whole.exposed_ms <= whole.in_flight_ms


def ledgers_of_steps(mesh: Mesh, case: Case) -> list[dict[str, dict[str, int]]]:
    model = rm.shard(Model(case), case.plan(), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE[case.dense], sparse=RULES[case.rule])
    found = []
    for batch in case.batches_of(mesh.rank):
        mesh.ledger.reset()
        mesh.mean(model(batch)).backward()
        optimizer.step()
        found.append(mesh.ledger.by_edge())
    return found


def exchange_twice(mesh: Mesh) -> tuple[int, int, int, list[Flight], float]:
    """An exchange waited for late; then one that finds no thread to watch it."""
    channel, peer = mesh.wire.channel("test", Lane.ROWS), 1 - mesh.rank
    mine, theirs = torch.full((1000,), float(mesh.rank)), torch.empty(1000)
    parcels = {"sends": [(peer, mine)], "receives": [(peer, theirs)], "edge": None}
    mesh.trace.begin_step(1)
    before = time.perf_counter_ns()
    handle = channel.post(1, **parcels)  # type: ignore[arg-type]
    assert handle.watcher is not None
    handle.watcher.result(timeout=10)
    waited = time.perf_counter_ns()
    handle.wait()
    handle.wait()  # again: nothing happens
    with ThreadPoolExecutor(1) as threads:
        free = Event()
        threads.submit(free.wait, 10)
        assert mesh.wire._watchers is not None
        mesh.wire._watchers.shutdown()
        mesh.wire._watchers = threads
        channel.post(2, **parcels).wait()  # type: ignore[arg-type]
        after = time.perf_counter_ns()
        free.set()
    mesh.trace.end_step()
    flights = mesh.trace.take(rank=mesh.rank, host=0).flights
    return before, waited, after, flights, float(theirs.sum())


def test_a_flight_ends_when_the_messages_do_not_when_they_are_waited_for() -> None:
    found = run_on_ranks(2, exchange_twice, debug=False)
    assert [total for *_, total in found] == [1000, 0]
    for before, waited, after, flights, _ in found:
        first, second = flights
        sizes = (first.num_messages, first.sent_bytes, first.received_bytes)
        assert (first.lane, first.exchange, first.sequence, *sizes) == (
            *("rows", "test", 1),
            *(2, 4000, 4000),
        )
        assert first.end is not None
        assert second.end is not None
        assert before <= first.start <= first.end <= waited <= second.start <= second.end <= after


def compare_clocks(mesh: Mesh) -> tuple[list[tuple[int, int]], dict[str, dict[str, int]]]:
    comparison = ClockComparison(mesh)
    return [comparison.measure() for _ in range(2)], mesh.ledger.by_edge()


def test_clocks_are_compared_within_the_stated_error() -> None:
    """Ranks of one machine share a clock: the true offset is nought."""
    found = run_on_ranks(4, compare_clocks)
    for rank, (measured, ledger) in enumerate(found):
        for offset, error in measured:
            assert abs(offset) <= error
            assert (error > 0) == (rank > 0)
        assert ledger == {}


def lose_the_folder(mesh: Mesh, folder: str) -> tuple[str, str]:
    errors = []
    for path in (f"{folder}/no/trace.json", f"{folder}/trace.json"):
        try:
            tracing = rm.Tracing(mesh, path, num_steps=1, skip=0)
            tracing.begin_step(1)
            if mesh.rank == 0:
                shutil.rmtree(folder)
            tracing.end_step()
        except rm.InputError as error:
            errors.append(str(error))
    return errors[0], errors[1]


def test_a_trace_that_cannot_be_written_is_told_to_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    found = run_on_ranks(2, lose_the_folder, str(folder))
    assert found[0] == found[1]
    assert "no is no folder" in found[0][0]
    assert "No such file or directory" in found[0][1]


def test_where_a_trace_may_go(tmp_path: Path) -> None:
    check_trace_file(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "file" / "trace.json", "file is no folder"),
        (tmp_path, "it is a folder"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(rm.InputError, match=f"cannot write the trace to .*{reason}; give"):
            check_trace_file(path)


def train_run(mesh: Mesh, path: str, *, steps: int = 6) -> tuple[Any, Any, Any]:
    training = TrainingConfig(steps=steps, eval_every=2)
    trainers = [
        Trainer(RunConfig(data=CLICKS, model=MODEL, training=training), mesh) for _ in range(2)
    ]
    plain = trainers[0].run()
    tracing = rm.Tracing(mesh, path, num_steps=3, skip=2)
    return untimed(plain), untimed(trainers[1].run(tracing=tracing)), tracing.summary


def test_a_traced_run_gives_what_an_untraced_one_does(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    plain, found, summary = run_on_ranks(2, train_run, str(path))[0]
    assert plain == found
    assert summary.steps == (3, 4, 5)
    names = [row.name for row in summary.phases]
    assert "tally" in names
    assert names[0] == "data"
    check_events(json.loads(path.read_text()), 2)


def run(*arguments: str) -> Any:
    changes = tiny_settings("training.steps=4", "data.held_out_batches=1")
    return CliRunner().invoke(app, ["train", *changes, *arguments])


def test_train_writes_a_trace_and_prints_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run("--trace", "a.json", "--trace-steps", "2", "--folder", "one")
    assert shown.exit_code == 0, shown.output
    assert "trace of steps 3 to 4 on 1 rank" in shown.output
    assert "the trace is in a.json" in shown.output
    check_events(json.loads(Path("a.json").read_text()), 1)
    shown = run("--trace", "a.json", "--json", "--folder", "two")  # replaces it; run is too short
    assert json.loads(shown.stdout)["trace"]["steps"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trace", "no/t.json"], "cannot write the trace to no/t.json: "),
        (["--trace", "t.json", "--trace-steps", "0"], "--trace-steps is 0, but must be at least 1"),
        (["--trace-steps", "5"], "--trace-steps says how long a trace is: give --trace FILE too"),
    ],
)
def test_a_trace_that_cannot_be_taken_is_one_sentence_before_training(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"rowmesh: {sentence}")
    assert list(tmp_path.iterdir()) == []
