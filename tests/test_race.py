"""The race's rules, without a race: intervals, pairing, refusals, gates, shapes, the report."""

import importlib
import itertools
import json
import re
import sys
import threading
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.racing import floor, peer
from benchmarks.racing.gates import Gate, Gatekeeper
from benchmarks.racing.judge import interval, refusal, round_ms, summarise
from benchmarks.racing.report import CAUTION, markdown, write_report
from benchmarks.racing.shapes import ALL, parse_shapes
from benchmarks.racing.stored import check_stored, is_stored, store, stored_files
from rowmesh.errors import InputError


def round_of(ms: float, *, sent: int, ledger: int | None = None) -> dict[str, Any]:
    """Three steps of which the first is slow, on two hosts."""
    found = {"ms": [9 * ms, ms, ms], "nic": [[sent, sent], [sent, sent]]}
    ours = {"ledger": [ledger, ledger], "bytes_are_exact": True}
    return found | ({} if ledger is None else ours)


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
        "floor": {"ms": 50.0, "megabytes": 0.9},
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
    ratio = found["theirs"]["ratio"]
    assert (ratio.low, ratio.mid, ratio.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_summary_has_samples_bytes_and_the_floor() -> None:
    found = summarise(result())
    assert found["ours"]["samples_s"] == pytest.approx(2 * 500 / 0.1)
    assert found["ours"]["megabytes"] == pytest.approx(1.02)  # 3.06 MB a round of three steps
    assert found["over_floor"] == pytest.approx(2.0)


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
    assert summarise(bad)["loss_gap"] == 0
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


def test_a_lossy_setting_may_lose() -> None:
    bad = result()
    bad["entries"]["theirs_lossy"]["losses"][3] = 5.0
    assert refusal(bad) is None


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
    assert "0.50 [0.50, 0.50] | 1.25 [1.25, 1.25] |" in page
    assert "no lossy setting" in page
    assert "* 2x1 1gbit p1 α1.05: TorchRec planner ended: last words\n" in page
    stored = json.loads((tmp_path / "race.json").read_text())
    assert stored["shapes"][0]["summary"]["theirs"]["ratio"]["mid"] == 0.5
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


def test_a_lossy_setting_of_ours_gets_its_column() -> None:
    more = result()
    more["entries"]["ours_lossy"] = more["entries"]["ours"]
    for found in more["rounds"]:
        found["ours_lossy"] = found["ours"]
    page = markdown([more], plot="p.svg")
    assert "rowmesh lossy ms" in page
    assert "no lossy setting" not in page


def test_the_race_has_28_shapes_and_rates_of_a_layout_are_neighbours() -> None:
    shapes = parse_shapes(ALL, pooling="1,20", alpha="1.05,1.2")
    assert len(shapes) == len({s.name for s in shapes}) == 28
    assert len({s.group for s in shapes}) == 16
    changes = sum(a.group != b.group for a, b in itertools.pairwise(shapes))
    assert changes == 15


def test_what_is_stored_is_not_run_again_unless_it_was_refused(tmp_path: Path) -> None:
    slow, fast = parse_shapes("2x1@200mbit,2x1@1gbit", pooling="1", alpha="1.05")
    session = {"code": "c0de", "settings": {"rounds": 6}, "machine": "it", "commit": "abc"}
    assert not is_stored(tmp_path, slow, session)
    store(tmp_path, slow, {}, session=session)
    store(tmp_path, fast, {"refused": "it ended"}, session=session)
    assert is_stored(tmp_path, slow, session)
    assert not is_stored(tmp_path, fast, session)
    assert [path.stem for path in stored_files(tmp_path)] == [fast.name, slow.name]
    check_stored(tmp_path, session, todo=[])
    for key, value in (("code", "0ther"), ("settings", {"rounds": 5}), ("machine", "that")):
        now = session | {key: value}
        with pytest.raises(InputError, match=f"of other {key}.*--again"):
            is_stored(tmp_path, slow, now)
        assert not is_stored(tmp_path, fast, now)
        with pytest.raises(InputError, match=rf"{slow.name}\.json is of other {key}"):
            check_stored(tmp_path, now, todo=[fast])  # not asked for, but it would be reported
        check_stored(tmp_path, now, todo=[slow])


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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of benchmarks/ as it is when run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize("words", ["--pool 20", "--gate here", "--lr 1", "--warmup=3", "stray"])
def test_a_word_that_is_no_flag_of_the_race_is_refused(script: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^{words}: no flag of the race"):
        script("race").parse_args(["--out", "x", *words.split()])


@pytest.mark.parametrize(
    ("words", "limit"),
    [("--rounds 4", "rounds is 4, .* 5"), ("--steps 1", "2"), ("--batches 0", "at least 1")],
)
def test_a_race_has_least_numbers(script: Any, words: str, limit: str) -> None:
    race = script("race")
    with pytest.raises(InputError, match=limit):
        race.check(race.parse_args(["--out", "x", *words.split()]), [])
    race.check(race.parse_args(["--out", "x", "--rounds", "5"]), [])


@pytest.mark.parametrize(
    "words",
    [
        "--out /a/x --peer-env /a/peer/",
        "--out=./x --peer-env=/a/peer",
        "--peer-env ../a/./peer --out ./a/../x",
    ],
)
def test_no_path_is_in_the_command_of_the_report(script: Any, words: str) -> None:
    race = script("race")
    more = ["--cap=1e4", "--again", "--pooling", "1", "--dim", "64"]
    found = race.describe_session(race.parse_args([*words.split(), *more]))
    assert found["command"] == ("python benchmarks/race.py --out x --pooling 1 --again --cap 10000")
    assert race.parse_args(found["command"].split()[2:]).cap == 1e4


def test_both_scripts_and_the_floor_get_the_number_of_batches(script: Any) -> None:
    race = script("race")
    given = race.describe_session(race.parse_args(["--out", "x", "--batches", "3"]))["settings"]
    settings = race.Settings(**given, peer="", folder=Path())
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
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    sentence: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_dlrm.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        script("bench_dlrm").parse_args()
    assert sentence in capsys.readouterr().err
