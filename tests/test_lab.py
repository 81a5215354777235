"""Emulated hosts: made, shaped, counted, and removed whatever happens.

Other labs may live on this machine, so tests only ever look at what carries their own tag.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rowmesh.cli import app
from rowmesh.cli.terminal import one_sentence
from rowmesh.errors import InputError, LabError
from rowmesh.lab import (
    Lab,
    check_permitted,
    clean,
    find_tags,
    format_rate,
    iproute,
    parse_rate,
    remains,
)
from rowmesh.lab import lab as lab_module
from rowmesh.lab.command import rank_words
from rowmesh.lab.failures import read_failures
from rowmesh.lab.measure import measure
from rowmesh.lab.network import read_congestion
from rowmesh.lab.remains import processes_of, remove
from rowmesh.lab.run import RUN_MARK, TIMED_OUT, Run
from rowmesh.lab.tags import Tag, new_tag, start_time

SCRIPTS = Path(__file__).parent / "scripts"
RANK = str(SCRIPTS / "lab_rank.py")
REASON = check_permitted()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["lab", *arguments])


def namespaces(tag: Tag) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.split()
    return sorted(name for name in names if name.startswith(f"{tag}-"))


def is_gone(tag: Tag) -> bool:
    return (namespaces(tag), processes_of(tag), tag.folder.exists()) == ([], set(), False)


def sleeper(lab: Lab) -> "subprocess.Popen[bytes]":
    """A process on host 0 that sleeps: what prepares its host has ended, it tells whose it is."""
    child = lab.spawn(0, ["sleep", "600"])
    command, deadline = Path(f"/proc/{child.pid}/cmdline"), time.monotonic() + 30.0
    while command.read_bytes() != b"sleep\x00600\x00" or processes_of(lab.tag) != {child.pid}:
        assert time.monotonic() < deadline
    return child


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if REASON is not None:
        pytest.skip(REASON)
    with Lab(2, rate="20mbit") as opened:
        yield opened


def say(lab: Lab, host: int, *argv: str, **options: Any) -> str:
    with lab.spawn(host, argv, stdout=subprocess.PIPE, text=True, **options) as process:
        return str(process.communicate(timeout=20)[0])


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200mbit", 200_000_000),
        ("1gbit", 10**9),
        ("1.5gbit", 1_500_000_000),
        ("2500kbit", 2_500_000),
        ("none", None),
        (None, None),
    ],
)
def test_a_rate_is_read_in_powers_of_1000(text: str | None, bits: int | None) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["200 mbits", "200", "mbit", "-1mbit", "1Gbit", "1e3mbit", ""])
def test_any_other_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=rf"rate is '{text}', but must be none or .* as 200mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["999kbit", "0mbit", "101gbit"])
def test_a_rate_has_limits(text: str) -> None:
    with pytest.raises(InputError, match=f"rate is {text}, but must be from 1mbit to 100gbit"):
        parse_rate(text)


@settings(derandomize=True, deadline=None)
@given(st.integers(10**6, 10**11))
def test_a_rate_survives_being_written(bits: int) -> None:
    assert parse_rate(format_rate(bits)) == bits
    assert format_rate(parse_rate("1.5gbit")) == "1.5gbit"


def test_a_tag_names_its_process_and_a_reused_pid_is_another() -> None:
    start = start_time(os.getpid())
    assert start is not None
    mine = Tag(pid=os.getpid(), start=start, number=0)
    assert mine.is_alive()
    assert not Tag(pid=os.getpid(), start=start - 1, number=0).is_alive()
    assert Tag.parse(mine.host(1)) == Tag.parse(str(mine)) == Tag.parse(mine.switch) == mine
    assert Tag.parse("rowmesh-lab-1-2") is None
    assert Tag.parse(f"my-{mine}") is None


def test_a_process_that_nobody_has_waited_for_is_not_alive() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        start = start_time(child.pid)
        assert start is not None
        tag = Tag(pid=child.pid, start=start, number=0)
        assert tag.is_alive()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not tag.is_alive()


def test_two_labs_of_a_process_have_two_tags() -> None:
    first, second = new_tag(), new_tag()
    try:
        assert first != second
        assert {first, second} <= set(find_tags())
    finally:
        for tag in (first, second):
            remove(tag)
    assert not {first, second} & set(find_tags())


def test_what_a_rank_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = str(tmp_path / "bin" / "python")
    script, tool, other = tmp_path / "s.py", tmp_path / "bin" / "tool", tmp_path / "other" / "prog"
    texts = {script: "", tool: f"#!{python}\n", other: "#!/bin/sh\n", Path(python): ""}
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(other.parent))
    python_u = [python, "-u"]
    for command, words in {
        "s.py --a 1": [*python_u, str(script), "--a", "1"],
        "-m pkg.mod x": [*python_u, "-m", "pkg.mod", "x"],
        "python s.py x": [*python_u, str(script), "x"],
        "python3.11 -m pkg": [*python_u, "-m", "pkg"],
        "/usr/bin/python3 -c pass": [*python_u, "-c", "pass"],
        "python -W error s.py": [*python_u, "-W", "error", "s.py"],
        "tool train --set a=b": [*python_u, str(tool), "train", "--set", "a=b"],
        "prog x": [str(other), "x"],
    }.items():
        assert rank_words(command.split(), python=python) == words, command


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ([], "there is no command"),
        (["nope.py"], "'nope.py', but there is no such file$"),
        (["nope"], "'nope', but there is no such file or program"),
        (["python"], "python alone runs nothing"),
        (["-m"], "-m stands alone"),
    ],
)
def test_a_command_that_cannot_run_is_refused(command: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        rank_words(command, python=sys.executable)


REPORT = """
[0]:
  time      : 2030-01-01_00:00:{second}
  host      : here
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 1) {signal}
  error_file: <N/A>
"""


def test_the_rank_that_failed_first_comes_first(tmp_path: Path) -> None:
    def report(rank: int, code: int, second: str) -> str:
        return REPORT.format(rank=rank, code=code, second=second, signal="")

    logs = [tmp_path / f"host{i}.log" for i in range(3)]
    logs[0].write_text(report(0, -15, "01") + report(1, 1, "09"))
    logs[1].write_text("noise\n" + report(2, 7, "08") + report(3, -9, "08"))
    (tmp_path / "rank3.err").write_text("\n".join(["first", *"abcdefghijklmn", "", "last"]))
    os.utime(tmp_path / "rank3.err", (5, 5))
    (tmp_path / "rank2.err").write_text("later\n")
    found = read_failures(logs, tmp_path)
    assert [f.rank for f in found] == [3, 2, 1, 0]
    assert [f.host for f in found] == [1, 1, 0, 0]
    assert [f.exit_code for f in found] == [137, 7, 1, 143]
    assert found[0].lines == (*"abcdefghijklmn", "last")
    assert str(found[0]) == "rank 3 (host 1) was ended by SIGKILL"
    assert str(found[1]) == "rank 2 (host 1) ended with code 7"


def test_a_failure_ends_in_a_colon_only_if_lines_follow(tmp_path: Path) -> None:
    with subprocess.Popen(["false"]) as agent:
        run = Run([agent], folder=tmp_path, mark=f"test-{os.getpid()}")
        run.wait(timeout=20)
    assert run.failure() == "torchrun ended with code 1"
    report = REPORT.format(rank=1, code=-9, second="01", signal="")
    (tmp_path / "host0.log").write_text(report)
    assert run.failure() == "rank 1 (host 0) was ended by SIGKILL"
    (tmp_path / "rank1.err").write_text("last words\n")
    assert run.failure() == "rank 1 (host 0) was ended by SIGKILL:\nlast words"


def test_after_the_time_out_torchrun_has_no_say(tmp_path: Path) -> None:
    mark = f"test-{os.getpid()}"
    (tmp_path / "host0.log").write_text("Traceback ...\nSignalException: got signal: 15\n")
    with subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_MARK: mark}) as agent:
        run = Run([agent], folder=tmp_path, mark=mark, timeout_s=0.01)
        assert run.wait(timeout=20) == TIMED_OUT
    assert run.failure() == "the run was stopped: its time was over"
    (tmp_path / "rank0.err").write_text("step 7\n")
    assert run.failure() == "the run was stopped: its time was over\nstep 7"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_130_and_a_sentence_unless_it_is_ignored(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(typer.Exit) as end, one_sentence():
            signal.raise_signal(number)
        assert end.value.exit_code == 130
        assert capsys.readouterr().err == f"rowmesh: stopped by {number.name}\n"
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with one_sentence():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rate", "200 mbits", "--", RANK], "rate is '200 mbits', but must be"),
        (["--hosts", "0", "--", RANK], "hosts is 0, but must be from 1 to 200"),
        (["--hosts", "201", "--", RANK], "hosts is 201, but must be from 1 to 200"),
        (["--ranks-per-host", "0", "--", RANK], "ranks-per-host is 0, but must be at least 1"),
        (["--hosts", "2", RANK], "the command goes after --, as"),
        (["--hosts", "2", "--"], "there is no command: give script.py"),
        (["--json", "no/such.json", "--", RANK], "cannot write the bytes to no/such.json: "),
        (["--json", str(SCRIPTS), "--", RANK], "scripts: it is a folder; give --json another"),
        (["--timeout", "nan", "--", RANK], "--timeout is nan, but must be a finite number"),
        (["--timeout", "inf", "--", RANK], "--timeout is inf, but must be a finite number"),
        (["--timeout", "-1", "--", RANK], "--timeout is -1, but must be a finite number of"),
        (["--", "nope.py"], "'nope.py', but there is no such file"),
        (["--unshaped", "--rate", "1gbit", "--", RANK], "--unshaped does not go with --rate 1gbit"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(options: list[str], sentence: str) -> None:
    before = {tag for tag in find_tags() if tag.pid == os.getpid()}
    result = run("run", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    said = [line for line in result.stderr.splitlines() if "left-over" not in line]
    assert len(said) == 1
    assert sentence in said[0]
    assert {tag for tag in find_tags() if tag.pid == os.getpid()} == before


@pytest.fixture
def no_iproute2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iproute, "_PATH", str(tmp_path))


@pytest.mark.usefixtures("no_iproute2")
def test_without_iproute2_the_sentence_says_what_to_install() -> None:
    sentence = "hosts cannot be emulated without ip and tc: install iproute2"
    assert check_permitted() == sentence
    with pytest.raises(InputError, match=sentence), Lab(2, rate="1gbit"):
        pass
    with pytest.raises(LabError, match="ip is not found: install iproute2"):
        iproute.call("ip", "link")
    refused = run("run", "--rate", "1gbit", "--", RANK)
    assert refused.exit_code == 2
    ways = f"rowmesh: {sentence}, or leave out --rate: ranks then run unshaped"
    assert refused.stderr.splitlines()[-1] == ways


def test_without_permission_the_sentence_has_the_command_and_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ip", "tc"):
        (tmp_path / name).write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(iproute, "_PATH", str(tmp_path))
    before = set(find_tags())
    sentence = check_permitted()
    assert sentence is not None
    assert sentence.startswith("hosts cannot be emulated here (`ip` failed: Operation not")
    assert sentence.endswith(("run as root", "in a container --privileged"))
    assert {tag for tag in find_tags() if tag.pid == os.getpid()} <= before


def test_loopback_takes_no_rate() -> None:
    with pytest.raises(InputError, match="rate is 1gbit, but loopback cannot be shaped"):
        Lab(2, rate="1gbit", loopback=True)
    with Lab(3, loopback=True) as lab:
        assert lab.addresses == ["127.0.0.1"] * 3
        assert lab.counters() == []
        with pytest.raises(InputError, match="loopback cannot be shaped"):
            lab.set_rate("1gbit")
        assert say(lab, 2, "sh", "-c", "echo $TB_HOST $GLOO_SOCKET_IFNAME") == "2 lo\n"
        child, tag = sleeper(lab), lab.tag
        assert processes_of(tag) == {child.pid}
    assert child.returncode == -signal.SIGTERM
    assert is_gone(tag)


def test_a_process_that_does_not_tell_yet_whose_it_is_is_ended_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Defect: closing waited for it, for ever.
    monkeypatch.setattr(remains, "processes_marked", lambda name, value: set())
    with Lab(1, loopback=True) as lab:
        child = lab.spawn(0, ["sleep", "600"])
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_out_is_finite_and_above_0(seconds: float) -> None:
    with (
        Lab(1, loopback=True) as lab,
        pytest.raises(InputError, match=r"timeout_s is .* finite number of seconds above 0"),
    ):
        lab.launch([RANK], timeout_s=seconds)


def test_a_closed_lab_says_so() -> None:
    lab = Lab(2)
    with pytest.raises(LabError, match="the lab is not open: use it in a with statement"):
        lab.counters()
    lab.close()


@needs_hosts
def test_a_failed_command_is_named_with_its_words() -> None:
    with pytest.raises(LabError, match=r"`ip netns del no-such` failed: .*no-such"):
        iproute.call("ip", "netns", "del", "no-such")
    with pytest.raises(LabError, match="`ip link set no-such up` failed: Cannot find device"):
        iproute.batch("ip", ["link show dev lo", "link set no-such up"])


def test_programs_in_a_host_find_their_names_and_settings(lab: Lab) -> None:
    assert lab.addresses == ["10.77.0.1", "10.77.0.2"]
    names = "TB_HOST TB_HOSTS TB_RATE TB_IFNAME GLOO_SOCKET_IFNAME OMP_NUM_THREADS MINE"
    words = " ".join(f"${name}" for name in names.split())
    assert say(lab, 1, "sh", "-c", f"echo {words}", env={"MINE": "x"}) == (
        "1 2 20mbit eth0 eth0 1 x\n"
    )
    table = say(lab, 1, "cat", "/etc/hosts").splitlines()
    assert {"10.77.0.1 host0", f"10.77.0.2 {os.uname().nodename}"} <= set(table)
    assert "host1" not in Path("/etc/hosts").read_text(), "the machine's own file is untouched"
    with pytest.raises(InputError, match="host is 2, but must be from 0 to 1"):
        lab.spawn(2, ["true"])


def test_links_have_the_rate_both_ways_and_the_inside_of_a_host_does_not(lab: Lab) -> None:
    least = 0.4 * 0.9 * 20e6 / 8  # of one window
    for attempt in range(5):  # a busy machine sends less, but a link never lets more through
        before = lab.counters()
        inside, one_way, both_ways = measure(lab, window_s=0.4)
        after = lab.counters()
        assert inside.verdict == "not shaped"
        assert max(one_way.wire_bits, both_ways.wire_bits) <= 1.1 * 20e6
        if one_way.ok and both_ways.ok and inside.payload_bits > 2 * 20e6:
            break
        assert attempt < 4, (inside, one_way, both_ways)
    for reading in (one_way, both_ways):
        assert reading.wire_bits >= 0.9 * 20e6
    sent = [a.sent - b.sent for a, b in zip(after, before, strict=True)]
    received = [a.received - b.received for a, b in zip(after, before, strict=True)]
    assert sent[0] > 2 * least, "host 0 sent in both measurements"
    assert sent[1] > least
    assert received[1] > 2 * least
    assert max(sent) < inside.payload_bits / 8 * 0.3, "the inside was not counted"


def test_the_rate_changes_while_the_lab_is_open(lab: Lab) -> None:
    def shapers() -> str:
        ends = ((lab.tag.host(1), "eth0"), (lab.tag.switch, "p1"))
        return "".join(iproute.call("tc", "-n", ns, "qdisc", "show", "dev", d) for ns, d in ends)

    assert shapers().count("rate 20Mbit burst 80000b") == 2
    lab.set_rate("1.5gbit")
    assert (lab.rate, lab.bits, shapers().count("rate 1500Mbit")) == ("1.5gbit", 1_500_000_000, 2)
    for _ in range(2):
        lab.set_rate(None)
        assert (lab.rate, "tbf" in shapers()) == ("none", False)
    with pytest.raises(InputError, match="rate is 'fast'"):
        lab.set_rate("fast")
    lab.set_rate("20mbit")
    assert shapers().count("rate 20Mbit burst 80000b") == 2
    assert read_congestion(lab.tag) == "reno"


LISTEN = (
    "import socket, sys\ns = socket.create_server((sys.argv[1], 5000))\nprint('up', flush=True)\n"
    "s.accept()"
)
CONNECT = (
    "import socket, sys\ntry: socket.create_connection((sys.argv[1], 5000), 5); print('met')\n"
    "except ConnectionRefusedError: print('refused')"
)


def test_two_labs_share_addresses_but_nothing_else(lab: Lab) -> None:
    python = [sys.executable, "-I", "-S", "-c"]
    where = lab.addresses[1]
    with lab.spawn(1, [*python, LISTEN, where], stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "up\n"
        with Lab(2) as other:
            assert other.addresses == lab.addresses
            assert other.tag != lab.tag
            assert say(other, 0, *python, CONNECT, where) == "refused\n"
            gone = other.tag
        assert is_gone(gone)
        assert say(lab, 0, *python, CONNECT, where) == "met\n"


@needs_hosts
def test_a_lab_is_removed_when_its_body_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "_GRACE_S", 0.2)
    stubborn = "trap '' TERM; echo up; while :; do sleep 600; done"
    with pytest.raises(KeyError, match="mine"), Lab(1) as lab:  # noqa: PT012 - all of it matters
        tag = lab.tag
        child = lab.spawn(0, ["sh", "-c", stubborn], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        raise KeyError("mine")
    assert child.returncode == -signal.SIGKILL
    child.stdout.close()
    assert is_gone(tag)
    lab.close()


@needs_hosts
def test_a_lab_half_built_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tc, path = iproute.find_program("tc"), iproute._PATH
    script = f'#!/bin/sh\ncase "$*" in *host1*) echo no more >&2; exit 1;; esac\nexec {tc} "$@"\n'
    (tmp_path / "tc").write_text(script)
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setattr(iproute, "_PATH", f"{tmp_path}{os.pathsep}{path}")
    before = {tag for tag in find_tags() if tag.pid == os.getpid()}
    with pytest.raises(LabError, match=r"`tc -n \S+-host1` failed: no more"), Lab(2, rate="1gbit"):
        pass
    assert {tag for tag in find_tags() if tag.pid == os.getpid()} == before


def test_a_lab_leaves_signals_as_they_were_and_a_fork_leaves_the_lab(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Lab(1, loopback=True) as lab:
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    with Lab(1, loopback=True) as lab:
        tag = lab.tag
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: tag.pid + 1)
            lab.close()
    assert tag.folder.is_dir()
    remove(tag)


def heed() -> None:
    """A background job ignores SIGINT, one under nohup SIGHUP, and so would what it starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_launcher() -> tuple["subprocess.Popen[str]", Tag]:
    words = [sys.executable, str(SCRIPTS / "lab_launcher.py")]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    assert launcher.stdout is not None
    tag = Tag.parse(launcher.stdout.readline())
    assert tag is not None
    return launcher, tag


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_launcher_removes_the_lab(number: signal.Signals) -> None:
    launcher, tag = start_launcher()
    with launcher:
        assert len(processes_of(tag)) == 4
        launcher.send_signal(number)
        try:
            code = launcher.wait(timeout=20)
        except subprocess.TimeoutExpired:
            launcher.kill()  # leaving the block would wait for it
            raise
    assert code == (-number if number == signal.SIGINT else 128 + number)
    assert is_gone(tag)


def test_clean_removes_all_of_a_killed_launcher_and_nothing_of_a_live_lab(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, tag = start_launcher()
    mine = (tag, lab.tag)  # what others left over is theirs, and may go at any moment
    monkeypatch.setattr(remains, "find_tags", lambda: [t for t in find_tags() if t in mine])
    with launcher:
        assert run("list").stdout.count(f"{tag}  in use (pid {tag.pid})\n") == 1
        launcher.kill()
        launcher.wait(timeout=20)
    assert len(namespaces(tag)) == 3
    pids = [iproute.call("ip", "netns", "pids", tag.host(i)).split() for i in range(2)]
    assert [len(found) for found in pids] == [2, 2], "a child and its detached child, each"
    assert tag.folder.is_dir()
    assert f"{tag}  left over" in run("list").stdout
    child = lab.spawn(0, ["sleep", "600"])
    result = run("clean")
    assert result.exit_code == 0, result.output
    assert f"{tag}: removed 4 processes, 3 namespaces, 1 folder\n" in result.stdout
    assert str(lab.tag) not in result.stdout
    assert is_gone(tag)
    assert [start_time(int(pid)) for found in pids for pid in found] == [None] * 4
    assert child.poll() is None
    assert len(namespaces(lab.tag)) == 3
    assert clean() == []
    assert run("clean").stdout == "nothing to remove\n"


@needs_hosts
def test_clean_all_removes_a_lab_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab(1) as lab:
        tag, child = lab.tag, sleeper(lab)
        monkeypatch.setattr(remains, "find_tags", lambda: [tag])  # spare the labs of others
        shown = run("clean", "--all").stdout
        assert shown == f"{tag}: removed 1 process, 2 namespaces, 1 folder\n"
        assert is_gone(tag)
        assert child.wait(timeout=20) == -signal.SIGKILL


@needs_hosts
def test_run_shows_rank_0_names_the_rank_that_failed_and_counts(tmp_path: Path) -> None:
    file, logs = tmp_path / "run.json", tmp_path / "logs"
    options = ["--hosts", "2", "--ranks-per-host", "2", "--rate", "200mbit", "--timeout", "90"]
    keep = ["--json", str(file), "--log-dir", str(logs)]
    result = run("run", *options, *keep, "--", RANK, "1", "3", str(tmp_path))
    assert result.exit_code == 3, result.output
    line = "RANK={0} GROUP_RANK={1} LOCAL_RANK={2} LOCAL_WORLD_SIZE=2 WORLD_SIZE=4 TB_HOST={1}\n"
    assert result.stdout == line.format(0, 0, 0)
    for rank in range(4):
        assert (logs / f"rank{rank}.out").read_text() == line.format(rank, *divmod(rank, 2))
    assert result.stderr.count("rank 0 says hello") == 1
    assert "rank 2 says hello" not in result.stderr
    failed = "rowmesh: rank 1 (host 0) ended with code 3:\nrank 1 says hello\nrank 1 has had enough"
    assert failed in result.stderr
    assert result.stderr.count("enough") == 1
    found = json.loads(file.read_text())
    assert (found["exit_code"], found["rate_bits_per_s"]) == (3, 200_000_000)
    assert [link["host"] for link in found["links"]] == [0, 1]
    assert all(link["sent_bytes"] > 1000 for link in found["links"]), "the rendezvous at least"
    assert "on each host's link (rate 200mbit)" in result.stderr


def wait_for(file: Path, text: str) -> None:
    deadline = time.monotonic() + 90
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, f"{file} never said {text!r}"
        time.sleep(0.05)


@pytest.mark.nightly
@needs_hosts
def test_two_runs_at_once_in_one_lab(tmp_path: Path) -> None:
    with Lab(2, rate="200mbit") as lab:
        good = lab.launch([RANK], ranks_per_host=2)
        bad = lab.launch([RANK, "3", "5", str(tmp_path)], ranks_per_host=2, log_dir=tmp_path)
        slow = lab.launch(["-c", "import time; time.sleep(600)"], ranks_per_host=1)
        assert [line.split()[0] for line in good.lines] == ["RANK=0"]
        assert (good.wait(timeout=90), good.failure()) == (0, "")
        heard: list[str] = []
        assert bad.wait(timeout=90, on_line=heard.append) == 5
        assert len(heard) == 1
        assert bad.failure().splitlines()[0] == "rank 3 (host 1) ended with code 5:"
        assert bad.failure().endswith("rank 3 has had enough")
        assert slow.poll() is None, "the end of one run is not the end of another"
        assert slow.wait(timeout=0.1) == 124
        assert slow.failure().startswith("the run was stopped: its time was over")
        assert processes_of(lab.tag) == set()


@pytest.mark.nightly
def test_unshaped_ranks_run_on_loopback() -> None:
    result = run("run", "--unshaped", "--timeout", "90", "--", "python", RANK)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("RANK=0 ")
    assert "ranks run unshaped on this machine's loopback, as asked" in result.stderr
    assert "on each host's link" not in result.stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("no_iproute2")
def test_without_iproute2_and_rate_ranks_run_unshaped_and_it_is_said() -> None:
    result = run("run", "--timeout", "90", "--", "python", RANK)
    assert result.exit_code == 0, result.output
    assert "ranks run unshaped on this machine's loopback: hosts cannot be" in result.stderr


PATIENT = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: print("asked to stop", flush=True) or {act})
print("up", flush=True)
while True:
    time.sleep(600)
"""


@pytest.mark.nightly
@needs_hosts
@pytest.mark.parametrize(("act", "signals"), [("sys.exit(0)", 1), ("None", 2)])
def test_the_first_ctrl_c_goes_to_the_ranks_and_the_second_kills(
    tmp_path: Path, act: str, signals: int
) -> None:
    script, logs = tmp_path / "patient.py", tmp_path / "logs"
    script.write_text(PATIENT.format(act=act))
    words = [sys.executable, "-m", "rowmesh.cli", "lab", "run", "--timeout", "120"]
    words += ["--log-dir", str(logs), "--"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*words, str(script)], **streams) as launcher:
        for state in ("up", "asked")[:signals]:
            for rank in range(2):
                wait_for(logs / f"rank{rank}.out", state)
            launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, err
    assert out == "up\nasked to stop\n"
    assert "SIGINT goes on to the ranks; a second one kills them" in err
    assert ("stopped at once" in err) == (signals == 2)
    assert [tag for tag in find_tags() if tag.pid == launcher.pid] == []


@pytest.mark.nightly
@needs_hosts
def test_clean_after_sigkill_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, logs = tmp_path / "patient.py", tmp_path / "logs"
    script.write_text(PATIENT.format(act="None"))
    words = [sys.executable, "-m", "rowmesh.cli", "lab", "run", "--rate", "1gbit"]
    more = ["--timeout", "120", "--ranks-per-host", "2", "--log-dir", str(logs), "--", str(script)]
    with subprocess.Popen([*words, *more], stdout=subprocess.PIPE) as launcher:
        for rank in range(4):
            wait_for(logs / f"rank{rank}.out", "up")
        launcher.kill()
    (tag,) = (tag for tag in find_tags() if tag.pid == launcher.pid)
    monkeypatch.setattr(remains, "find_tags", lambda: [t for t in find_tags() if t == tag])
    assert len(processes_of(tag)) == 6, "two torchruns and four ranks outlive the launcher"
    assert f"{tag}: removed 6 processes, 3 namespaces, 1 folder\n" in run("clean").stdout
    assert is_gone(tag)
    assert tag not in find_tags()


@pytest.mark.nightly
@needs_hosts
@pytest.mark.parametrize("hosts", [1, 3])
def test_check_measures_and_says_so(hosts: int) -> None:
    shown = run("check", "--hosts", str(hosts), "--rate", "20mbit")
    assert shown.exit_code == 0, shown.output
    assert "inside host 0" in shown.stdout
    assert ("each host to the next, at once" in shown.stdout) == (hosts == 3)
    found = json.loads(run("check", "--hosts", str(hosts), "--rate", "none", "--json").stdout)
    assert (found["ok"], found["rate_bits_per_s"]) == (True, None)
    assert [r["ok"] for r in found["readings"]] == [True, None, None][: len(found["readings"])]
