"""The race's rules, without a race: intervals, pairing, refusals, gates, shapes, the report."""

import dataclasses
import itertools
import json
import re
import sys
import threading
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import bench_dlrm
import pytest
import race
from harness.cells import Cells
from harness.figures import interval, round_ms
from harness.gates import Gate, Gatekeeper
from harness.settings import Settings
from harness.shapes import ALL, Shape, parse_shapes
from racing import floor, peer
from racing.between import describe_gap, describe_step
from racing.entries import (
    THEIRS_PLAIN,
    ours,
    ours_lossy,
    theirs,
    theirs_lossy,
    with_own_cores,
)
from racing.goals import GOALS, goal_shapes, judge_goals, roles_of
from racing.judge import refusal, summarise
from racing.report import CAUTION, markdown, write_report

from rowmesh.errors import InputError


def round_of(ms: float, *, sent: int, ledger: int | None = None) -> dict[str, Any]:
    """Three steps of which the first is slow, on two hosts."""
    found = {"ms": [9 * ms, ms, ms], "nic": [[sent, sent], [sent, sent]]}
    ours = {"ledger": [ledger, ledger], "bytes_are_exact": True}
    return found | ({} if ledger is None else ours)


def row_of(name: str, ms: float, waiting: float = 0.0) -> dict[str, Any]:
    """A phase of a trace."""
    return {"name": name, "ms": ms, "waiting_ms": waiting}


TRACE = {
    "phases": [
        row_of("lookup", 12),
        row_of("vectors", 22, 21),
        row_of("dense forward", 20),
        row_of("backward", 30),
        row_of("pool", 0.2),
        row_of("other", 15),
        row_of("step", 99.2, 21),
    ],
    "communication": [
        {"lane": "", "exchange": "", "exposed_ms": 21, "in_flight_ms": 80},
        {"lane": "rows", "exchange": "", "exposed_ms": 21, "in_flight_ms": 50},
        {"lane": "rows", "exchange": "ids", "exposed_ms": 0.1, "in_flight_ms": 2},
        {"lane": "rows", "exchange": "vectors", "exposed_ms": 18, "in_flight_ms": 50},
    ],
}


def with_codec(*, ms: float = 40) -> dict[str, Any]:
    """A result in which rowmesh's lossy setting and TorchRec's plain one take part."""
    more = result()
    entry = more["entries"]["ours"]
    more["entries"] |= {
        "ours_lossy": entry | {"name": "auto int8", "exactness": "E3", "losses": entry["losses"]},
        "theirs_plain": entry | {"name": "table-wise, no pipeline"},
    }
    for found in more["rounds"]:
        found["ours_lossy"] = round_of(ms, sent=1_020_000, ledger=1_000_000)
        found["theirs_plain"] = round_of(300, sent=6_000_000)
    return more


def result(*, rate: str = "200mbit", rounds: int = 6, drift: float = 0.0) -> dict[str, Any]:
    """As the race stores it: ours takes 100 ms, theirs 200, its lossy setting 80."""
    versions = {"torch": "2", "torchrec": "1.8.0"}
    entry = {"name": "auto", "losses": [0.7 - i / 100 for i in range(10)], "versions": versions}
    turns = [1 + drift * i for i in range(rounds)]
    return {
        "shape": {"hosts": 2, "local": 1, "rate": rate, "pooling": 1, "alpha": 1.05},
        "batch": 500,
        "entries": {role: json.loads(json.dumps(entry)) for role in ROLES},
        "rounds": [
            {
                "ours": round_of(100 * t, sent=3_060_000, ledger=3_000_000),
                "theirs": round_of(200 * t, sent=6_000_000),
                "theirs_lossy": round_of(80 * t, sent=2_000_000),
            }
            for t in turns
        ],
        "floor": {"ms": 50, "megabytes": 0.9, "link_ms": 40, "dense_ms": 30, "path_ms": 50},
        "traces": {"ours": TRACE},
        "forecast_ms": {"total": 104.0},
        "session": {
            "commit": "abc",
            "date": "2026-01-01",
            "machine": "a machine",
            "command": "python benchmarks/race.py",
            "settings": {"cap": 2e5, "dim": 64, "batch": 500},
        },
    }


ROLES = ("ours", "theirs", "theirs_lossy")


@pytest.mark.parametrize(
    ("rounds", "rank", "coverage"), [(5, 0, 0.9375), (6, 0, 0.96875), (9, 1, 0.9609375)]
)
def test_an_interval_is_a_pair_of_order_statistics(rounds: int, rank: int, coverage: float) -> None:
    values = [float(i * i) for i in reversed(range(rounds))]
    found = interval(values)
    assert (found.low, found.high) == (sorted(values)[rank], sorted(values)[-1 - rank])
    assert found.mid == median(values)
    assert found.coverage == pytest.approx(coverage)


def test_the_first_step_of_a_round_is_left_out_and_the_rest_averaged() -> None:
    assert round_ms([900.0, 10.0, 30.0]) == 20.0


def test_ratios_are_paired_by_round_so_that_drift_cancels() -> None:
    found = summarise(result(drift=0.2))
    assert found["ours"]["ms"].high == pytest.approx(2 * found["ours"]["ms"].low)
    ratio = found["speedups"]["ours/theirs"]
    assert (ratio.low, ratio.mid, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_summary_has_samples_bytes_and_the_floor() -> None:
    found = summarise(result())
    assert found["ours"]["samples_s"] == pytest.approx(2 * 500 / 0.1)
    assert found["ours"]["megabytes"] == pytest.approx(1.02)  # 3.06 MB a round of three steps
    assert found["ours"]["over_floor"] == pytest.approx(2.0)


def test_a_true_result_is_not_refused() -> None:
    assert refusal(result()) is None


@pytest.mark.parametrize("wrong", [0.002, float("nan")])
def test_losses_that_differ_are_refused(wrong: float) -> None:
    bad = result()
    bad["entries"]["theirs"]["losses"][7] += wrong
    assert "first 10 losses" in str(refusal(bad))
    bad["entries"]["theirs"]["losses"][7] = bad["entries"]["ours"]["losses"][7] + 9e-4
    assert refusal(bad) is None


def test_fewer_than_ten_losses_are_refused() -> None:
    bad = result()
    for role in ROLES:
        del bad["entries"][role]["losses"][9]
    assert "not 10 numbers" in str(refusal(bad))


@pytest.mark.parametrize("role", ["ours", "theirs"])
def test_losses_of_unequal_number_are_refused_below_ten_and_compared_above(role: str) -> None:
    bad = result()
    bad["entries"][role]["losses"].append(0.1)
    assert refusal(bad) is None
    assert summarise(bad)["theirs"]["loss_gap"] == 0
    del bad["entries"][role]["losses"][3:]
    assert "not 10 numbers" in str(refusal(bad))


def test_the_report_says_what_its_floor_leaves_out() -> None:
    for text in (str(floor.__doc__), CAUTION):
        assert "chosen without knowing the ids" in re.sub(r"\s+", " ", text)


def test_bytes_that_were_not_predicted_are_refused() -> None:
    bad = result()
    bad["rounds"][3]["ours"]["bytes_are_exact"] = False
    assert refusal(bad) == "rowmesh sent other bytes than rm.predict says"


@pytest.mark.parametrize("ledger", [3_061_000, 2_880_000])
def test_a_ledger_that_the_nic_contradicts_is_refused(ledger: int) -> None:
    bad = result()
    for found in bad["rounds"]:
        found["ours"]["ledger"][1] = ledger
    assert "host 1 sent" in str(refusal(bad))


def test_what_their_lossy_setting_loses_is_told() -> None:
    bad = result()
    bad["entries"]["theirs_lossy"]["losses"][3] += 5.0
    assert refusal(bad) is None
    assert summarise(bad)["theirs_lossy"]["loss_gap"] == pytest.approx(5.0)


@pytest.mark.parametrize(("role", "limit"), [("ours_lossy", 0.2), ("theirs_plain", 1e-3)])
def test_every_other_setting_has_a_limit(role: str, limit: float) -> None:
    bad = with_codec()
    losses = bad["entries"]["ours"]["losses"]
    bad["entries"][role]["losses"] = [loss + 0.99 * limit for loss in losses]
    assert refusal(bad) is None
    bad["entries"][role]["losses"] = [*losses[:9], losses[9] - 1.01 * limit]
    assert f"between ours and {role} (limit {limit:.0e})" in str(refusal(bad))


def test_our_lossy_setting_must_send_what_is_predicted_too() -> None:
    bad = with_codec()
    bad["rounds"][0]["ours_lossy"]["bytes_are_exact"] = False
    assert refusal(bad) == "rowmesh sent other bytes than rm.predict says (ours_lossy)"
    bad = with_codec()
    for found in bad["rounds"]:
        found["ours_lossy"]["ledger"][0] = 2_000_000
    assert "ledger of ours_lossy says" in str(refusal(bad))


def test_a_host_without_a_link_has_no_bytes_to_compare() -> None:
    alone = result()
    for found in alone["rounds"]:
        for role in ROLES:
            found[role]["nic"] = [None, None]
    assert refusal(alone) is None
    assert summarise(alone)["ours"]["megabytes"] is None


def test_the_report_is_made_of_stored_results(tmp_path: Path) -> None:
    reason = "TorchRec planner ended:\nlines\nlast words"
    refused = {"shape": result(rate="1gbit")["shape"], "refused": reason}
    write_report([result(), refused], tmp_path / "race")
    page = (tmp_path / "race.md").read_text()
    assert "| 2x1 200mbit p1 α1.05 | 100 [100, 100] | 104 | 200 [200, 200] | 80 [80, 80] |" in page
    assert "2.00 [2.00, 2.00] | 0.80 [0.80, 0.80] |" in page
    assert "label is E3" not in page
    assert "* 2x1 1gbit p1 α1.05: TorchRec planner ended: last words\n" in page
    stored = json.loads((tmp_path / "race.json").read_text())
    assert stored["shapes"][0]["summary"]["speedups"]["ours/theirs"]["mid"] == 2.0
    assert stored["shapes"][0]["rounds"] == result()["rounds"]
    plot = ElementTree.fromstring((tmp_path / "race.svg").read_text())
    words = [text.text for text in plot.iter("{http://www.w3.org/2000/svg}text")]
    assert "2x1 200mbit p1 α1.05" in words
    assert "2x1 1gbit p1 α1.05" not in words


def test_a_stored_result_that_breaks_a_rule_is_not_reported(tmp_path: Path) -> None:
    bad = result()
    bad["entries"]["ours"]["losses"][0] = 3.0
    with pytest.raises(ValueError, match="losses differ"):
        write_report([bad], tmp_path / "race")
    assert not list(tmp_path.iterdir())


def test_lossy_and_plain_settings_get_columns_and_the_label() -> None:
    page = markdown([with_codec()], plot="p.svg")
    for head in ("rowmesh lossy ms", "TorchRec plain ms", "lossy / plain", "MB rowmesh lossy"):
        assert f"| {head} |" in page
    assert "label is E3" in page
    assert "| auto int8, E3 |" in page
    assert "| 7.50 [7.50, 7.50] |" in page  # 300 ms / 40


@pytest.mark.parametrize(
    ("codecs", "told"),
    [
        ("none", ""),
        (
            "rows: int8, pooled: int8, backward: int8, hot gradients: int8, dense: int8",
            ", all int8",
        ),
        ("rows: fp16, dense: bf16", ", rows: fp16; dense: bf16"),
    ],
)
def test_what_the_planner_chose_is_told(codecs: str, told: str) -> None:
    more = with_codec()
    plan = {"depth": 2, "hot_rows": 300, "host_rows": 0, "codecs": codecs}
    more["entries"]["ours_lossy"]["plan"] = plan
    page = markdown([more], plot="p.svg")
    assert f"| auto int8, E3, depth 2, 300 hot rows{told} |" in page


def test_the_goals_are_those_of_the_issue_and_have_shapes() -> None:
    wanted = [(g.shape.layout, g.shape.pooling, g.ours, g.theirs, g.least) for g in GOALS]
    assert wanted == [
        ("1x2", 1, "ours", "theirs", 1.25),
        ("2x1_1gbit", 1, "ours", "theirs", 2.0),
        ("2x1_200mbit", 1, "ours", "theirs", 3.0),
        ("2x1_200mbit", 1, "ours_lossy", "theirs_plain", 6.0),
        ("2x1_200mbit", 1, "ours_lossy", "theirs_lossy", 2.8),
        ("2x2_200mbit", 1, "ours", "theirs", 2.7),
        ("2x2_200mbit", 1, "ours_lossy", "theirs_plain", 4.5),
        ("2x2_200mbit", 1, "ours_lossy", "theirs_lossy", 2.0),
        ("2x2_200mbit", 20, "ours", "theirs", 1.6),
    ]
    assert len(goal_shapes()) == 5
    assert set(goal_shapes()) <= set(parse_shapes(ALL, pooling="1,20", alpha="1.05,1.2"))
    assert roles_of(goal_shapes()[0]) == {"ours", "theirs"}
    assert roles_of(goal_shapes()[2]) == {"ours", "theirs", *LOSSY_ROLES}


LOSSY_ROLES = ("ours_lossy", "theirs_plain", "theirs_lossy")


def test_goals_are_judged_by_the_median_and_the_interval() -> None:
    more = with_codec()
    for number, found in enumerate(more["rounds"]):
        found["theirs"] = round_of(320 - 10 * number, sent=6_000_000)  # 3.2 to 2.7 times 100 ms
    exact, plain, lossy = judge_goals([(more, summarise(more))])
    assert (exact.holds, exact.holds_throughout, exact.is_near_floor) == (False, False, False)
    assert exact.found.mid == pytest.approx(2.95)
    assert (plain.holds, plain.holds_throughout, plain.is_near_floor) == (True, True, True)
    assert lossy.found.mid == pytest.approx(2.0)
    page = markdown([more], plot="p.svg")
    assert "| rowmesh / TorchRec | 3x | 2.95 [2.70, 3.20] | NO | NO | 2.00 | NO |" in page
    assert "| rowmesh lossy / TorchRec plain | 6x | 7.50 [7.50, 7.50] | yes | yes |" in page


def test_a_goal_whose_contestant_did_not_run_is_not_judged() -> None:
    verdicts = judge_goals([(result(), summarise(result()))])
    assert [(v.goal.ours, v.goal.theirs) for v in verdicts] == [("ours", "theirs")]
    assert judge_goals([(r := result(rate="500mbit"), summarise(r))]) == []


def test_a_step_over_the_floor_is_explained_by_its_trace() -> None:
    found = result()
    assert describe_step(TRACE) == (
        "step 99 ms: lookup 12, vectors 22 (21 waiting), dense forward 20, backward 30, other 15; "
        "exposed 21 of 80 ms in flight (vectors 18)"
    )
    assert describe_gap(found, summarise(found)) == (
        "2.00 floors of 50 ms (the path of a row): a traced step of 99 ms waits 21, spends 50 on "
        "dense layers (alone 30) and 28 on other work"
    )
    page = markdown([found], plot="p.svg")
    assert "* 2x1 200mbit p1 α1.05: step 99 ms: lookup 12," in page
    assert "  Over the floor: 2.00 floors" in page
    found["floor"]["ms"] = 84
    assert describe_gap(found, summarise(found)) is None
    assert "Over the floor" not in markdown([found], plot="p.svg")


def test_lossy_settings_are_made_of_the_best_exact_ones() -> None:
    files = [Path("a/2x1_1gbit.topology"), Path("a/2x1_200mbit.topology")]
    entries = ours(files, hosts=2)
    assert [e.name for e in entries] == [
        *("auto for 2x1_1gbit", "auto for 2x1_200mbit", "table-wise", "row-wise"),
    ]
    auto = list(entries[1].flags)
    assert [auto[auto.index(w) + 1] for w in ("--tiers", "--depth")] == ["auto", "auto"]
    assert auto[auto.index("--topology") + 1] == str(files[1])  # plans for the first it is given
    assert len(ours(files[:1], hosts=1)) == 4  # a split without depth inside a host
    bf16, int8, free = ours_lossy(entries[2], files, files[1])
    assert bf16.flags == (*entries[2].flags, "--codecs", "bf16")
    assert int8.name == "table-wise int8,dense=bf16"
    assert free.flags[free.flags.index("--allow") + 1] == "lossy"
    assert {e.role for e in (bf16, int8, free)} == {"ours_lossy"}
    table_wise, planner, *told = theirs(files, hosts=2)
    assert table_wise.flags == ("--sharding", "table_wise", "--pipeline", "sparse_dist")
    assert [e.name for e in told] == [f"planner told of 2x1_{r}" for r in ("1gbit", "200mbit")]
    assert [e.flags[2:4] for e in told] == [("--topology", str(file)) for file in files]
    assert theirs(files[:1], hosts=1) == (table_wise, planner)
    bound = with_own_cores(planner)
    assert (bound.role, bound.name) == ("theirs", "planner, own cores")
    assert bound.flags == (*planner.flags, "--own-cores")
    assert [e.name for e in theirs_lossy(planner)] == ["planner fp16", "planner int8"]
    assert THEIRS_PLAIN.flags[-2:] == ("--pipeline", "none")
    assert not THEIRS_PLAIN.is_ours


def test_the_race_has_28_shapes_and_rates_of_a_layout_are_neighbours() -> None:
    shapes = parse_shapes(ALL, pooling="1,20", alpha="1.05,1.2")
    assert len(shapes) == len({s.name for s in shapes}) == 28
    assert len({s.group for s in shapes}) == 16
    changes = sum(a.group != b.group for a, b in itertools.pairwise(shapes))
    assert changes == 15


def test_what_is_stored_is_not_run_again_unless_it_was_refused(tmp_path: Path) -> None:
    slow, fast = parse_shapes("2x1@200mbit,2x1@1gbit", pooling="1", alpha="1.05")
    asked = {"code": "c0de", "settings": {"rounds": 6}, "machine": "it"}
    cells = Cells(tmp_path / "new", asked, {"commit": "abc"})
    assert cells.find(slow.name) is None
    for shape, found in ((slow, {}), (fast, {"refused": "it ended"})):
        cells.store(shape.name, found | {"shape": dataclasses.asdict(shape)})
    assert cells.find(slow.name) == {"shape": dataclasses.asdict(slow)}
    assert cells.find(fast.name) is None
    results = race.stored_results(cells)
    assert [Shape(**result["shape"]) for result in results] == [fast, slow]
    assert results[0]["session"] == asked | {"commit": "abc"}
    cells.check()
    for key, value in (("code", "0ther"), ("settings", {"rounds": 5}), ("machine", "that")):
        now = Cells(cells.folder, asked | {key: value}, {})
        with pytest.raises(InputError, match=f"of other {key}.*--again"):
            now.find(slow.name)
        assert now.find(fast.name) is None
        with pytest.raises(InputError, match=rf"{slow.name}\.json is of other {key}"):
            now.check(but=[fast.name])  # not asked for, but it would be reported
        now.check(but=[slow.name])


@pytest.mark.parametrize("word", ["2x1", "1x2@1gbit", "2by1", "2x0@1gbit", "2x1@fast"])
def test_a_shape_that_cannot_be_read_is_named(word: str) -> None:
    with pytest.raises(InputError, match=word.split("@")[-1]):
        parse_shapes(word, pooling="1", alpha="1.05")


def test_ranks_carry_out_orders_in_turn_and_rank_0_answers(tmp_path: Path) -> None:
    keeper = Gatekeeper(tmp_path / "gate", failure=lambda: None)
    done: list[tuple[int, int]] = []

    def rank(number: int) -> None:
        gate = Gate(tmp_path / "gate", rank=number, timeout_s=20)
        gate.serve({"rank": number}, {"steps": lambda n: done.append((number, n)) or [number, n]})

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    assert keeper.answer(20) == {"rank": 0}
    assert keeper.open("steps", steps=3, timeout_s=20) == [0, 3]
    assert keeper.open("steps", steps=5, timeout_s=20) == [0, 5]
    keeper.send("stop")
    for thread in threads:
        thread.join(20)
    assert sorted(done) == [(0, 3), (0, 5), (1, 3), (1, 5)]


def test_a_contestant_that_died_is_reported_at_once(tmp_path: Path) -> None:
    keeper = Gatekeeper(tmp_path / "gate", failure=lambda: "it fell over")
    with pytest.raises(RuntimeError, match="it fell over"):
        keeper.open("steps", steps=1, timeout_s=600)


def test_no_wait_at_a_gate_is_without_end(tmp_path: Path) -> None:
    keeper = Gatekeeper(tmp_path / "gate", failure=lambda: None)
    with pytest.raises(TimeoutError, match="order 0"):
        keeper.answer(0.01)
    with pytest.raises(TimeoutError, match="rank 1"):
        Gate(tmp_path / "gate", rank=1, timeout_s=0.01).wait(1)


def test_ranks_leave_when_the_race_has_gone(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="rank 0"):
        Gate(tmp_path / "no gate", rank=0, timeout_s=600).wait(1)
    Gatekeeper(tmp_path / "gate", failure=lambda: None)
    (tmp_path / "gate" / "owner.pid").write_text(str(2**22 + 1))  # above any process id
    with pytest.raises(TimeoutError, match="rank 0"):
        Gate(tmp_path / "gate", rank=0, timeout_s=600).wait(1)


def test_an_environment_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(SystemExit, match=r"does not give torchrec 1\.8\.0"):
        peer.ensure(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_an_environment_is_known_by_importing_torchrec(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 1.8.0\n")
    python.chmod(0o755)
    assert peer.ensure(tmp_path) == str(python)
    python.write_text("#!/bin/sh\necho 'No module named torchrec' >&2\nexit 1\n")
    with pytest.raises(SystemExit, match="No module named torchrec"):
        peer.ensure(tmp_path)


@pytest.mark.parametrize("words", ["--pool 20", "--gate here", "--lr 1", "--warmup=3", "stray"])
def test_a_word_that_is_no_flag_of_the_race_is_refused(words: str) -> None:
    with pytest.raises(InputError, match=f"^{words}: no flag of the race"):
        race.parse_args(["--out", "x", *words.split()])


@pytest.mark.parametrize(
    ("words", "limit"),
    [("--rounds 4", "rounds is 4, .* 5"), ("--steps 1", "2"), ("--batches 0", "at least 1")],
)
def test_a_race_has_least_numbers(words: str, limit: str) -> None:
    with pytest.raises(InputError, match=limit):
        race.check(race.parse_args(["--out", "x", *words.split()]), [])
    race.check(race.parse_args(["--out", "x", "--rounds", "5"]), [])


def test_goals_choose_among_the_shapes() -> None:
    words = ["--out", "x", "--goals"]
    assert set(race.choose_shapes(race.parse_args(words))) == set(goal_shapes())
    some = race.choose_shapes(race.parse_args([*words, "--shapes", "2x2@200mbit,4x1@1gbit"]))
    assert [shape.name for shape in some] == ["2x2_200mbit_p1_a1.05", "2x2_200mbit_p20_a1.05"]
    with pytest.raises(InputError, match=r"none of the shapes has a goal.*1x2_p1"):
        race.choose_shapes(race.parse_args([*words, "--shapes", "4x1@1gbit"]))
    assert race.stored_cells(race.parse_args(words)).asked["settings"]["goals"] is True


@pytest.mark.parametrize(
    "words",
    [
        "--out /a/x --peer-env /a/peer/",
        "--out=./x --peer-env=/a/peer",
        "--peer-env ../a/./peer --out ./a/../x",
    ],
)
def test_no_path_is_in_the_command_of_the_report(words: str) -> None:
    more = ["--cap=1e4", "--again", "--pooling", "1", "--dim", "64"]
    command = race.stored_cells(race.parse_args([*words.split(), *more])).about["command"]
    assert command == "python benchmarks/race.py --out x --pooling 1 --again --cap 10000"
    assert race.parse_args(command.split()[2:]).cap == 1e4


def test_both_scripts_and_the_floor_get_the_number_of_batches() -> None:
    cells = race.stored_cells(race.parse_args(["--out", "x", "--batches", "3"]))
    settings = Settings(**cells.asked["settings"], peer="", folder=Path())
    (shape,) = parse_shapes("1x2", pooling="1", alpha="1.05")
    words = settings.script_flags(shape)
    assert (settings.batches, words[words.index("--batches") + 1]) == (3, "3")
    assert "--default-malloc" not in words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--trace-steps 1000000000", "--trace-steps is 1000000000, but must be from 1 to 1000"),
        ("--trace-steps 0", "must be from 1 to 1000"),
        ("--pool 20", "unrecognized arguments: --pool 20"),
    ],
)
def test_the_benchmark_refuses(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    sentence: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_dlrm.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        bench_dlrm.parse_args()
    assert sentence in capsys.readouterr().err
