"""Ranks that `rowmesh` starts: how signals or the launcher's death end them; who can reach them.

Cold: a real process that imports everything, without a limit to the threads of its libraries,
which take signals too.
"""

import ipaddress
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rowmesh.train.folder import RunFolder
from tests.processes import Fork, environment, finish, settings, start
from tests.test_cli import LONG, all_gone, run, wait_for_step

LIMIT_S = 90.0
EVALUATING = settings("training.steps=2", "data.held_out_batches=1000000", "checkpoint.every=1")
Process = Any


def start_cold(folder: Path, *more: str) -> "subprocess.Popen[str]":
    env = environment()
    del env["OMP_NUM_THREADS"]
    env.pop("OPENBLAS_NUM_THREADS", None)
    arguments = ["train", "--ranks", "2", "--folder", str(folder / "run"), *more]
    return start(*arguments, cwd=folder, env=env)


def members(process: Process) -> list[int]:
    """Processes of its session."""
    found = subprocess.run(["ps", "-s", str(process.pid), "-o", "pid="], capture_output=True)
    return [int(word) for word in found.stdout.split()]


def wait_until(process: Process, what: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.005)


def reach(process: Process, moment: str) -> None:
    """Wait until a cold start is there."""
    if moment == "imports":
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(process, lambda: "libtorch_cpu" in maps.read_text())
    elif moment == "server":
        wait_until(process, lambda: len(members(process)) > 1)
    elif moment == "ranks":
        wait_until(process, lambda: len(members(process)) > 4)
    else:
        wait_for_step(process)
        time.sleep(0.3 if moment == "evaluation" else 0.0)


def outcome(folder: Path, moment: str, number: signal.Signals, to: str) -> tuple[Any, ...]:
    """Exit code, stdout, stderr, and whether nothing is left of a run ended at that moment."""
    folder.mkdir()
    process = start_cold(folder, *(EVALUATING if moment == "evaluation" else LONG))
    reach(process, moment)
    (os.killpg if to == "group" else os.kill)(process.pid, number)
    if to == "twice":
        time.sleep(1.5)
        if process.poll() is None:
            os.kill(process.pid, number)
    return (*finish(process, timeout=LIMIT_S), all_gone(process))


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
MOMENTS = ["imports", "server", "ranks", "training", "evaluation"]
FEW = [("imports", TERM, "process"), ("server", INT, "group"), ("training", INT, "process")]
ALL = [
    (m, n, to) for m in MOMENTS for n in (INT, TERM, HUP) for to in ("process", "group", "twice")
]


@pytest.fixture(scope="module")
def cold(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Any, Any]]:
    """All runs, three at a time."""
    mine = [item for item in request.session.items if item.path == request.path]
    calls = [getattr(item, "callspec", None) for item in mine]
    chosen = [call.params["case"] for call in calls if call is not None and "case" in call.params]
    with ThreadPoolExecutor(max_workers=3) as workers:
        folder = tmp_path_factory.mktemp("cold")
        yield {
            case: workers.submit(outcome, folder / "-".join(map(str, case)), *case)
            for case in chosen
        }


@pytest.mark.parametrize(
    "case",
    [*FEW, *(pytest.param(c, marks=pytest.mark.nightly) for c in ALL if c not in FEW)],
    ids=lambda case: f"{case[0]}-{case[1].name}-{case[2]}",
)
def test_a_cold_run_ends_with_one_sentence_and_130(case: Any, cold: dict[Any, Any]) -> None:
    moment, number, to = case
    code, out, err, is_gone = cold[case].result(timeout=5 * LIMIT_S)
    assert (code, err) == (130, f"rowmesh: stopped by {number.name}\n")
    assert is_gone
    if moment in ("training", "evaluation") and to != "twice":
        last = out.splitlines()[-1]
        assert "saved after step" in last, "wherever it was stopped"


def listening(pids: list[int]) -> list[str]:
    """Addresses at which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            name = os.readlink(link)
            inodes |= {name[8:-1]} if name.startswith("socket:[") else set()
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                digits = bytes.fromhex(words[1].split(":")[0])
                swapped = [digits[i : i + 4][::-1] for i in range(0, len(digits), 4)]
                found.append(str(ipaddress.ip_address(b"".join(swapped))))
    return found


@pytest.fixture(scope="module")
def unattended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose launcher is killed: what was seen before and after."""
    folder = tmp_path_factory.mktemp("unattended")
    words = ["rowmesh", "train", "--ranks", "2", "--folder", str(folder / "run"), *LONG]
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    wanted = {"GLOO_SOCKET_IFNAME": others[-1]} if others else {}  # as for runs on several hosts
    process = Fork(words, env=environment(TMPDIR=str(folder), **wanted))
    wait_for_step(process)
    found: dict[str, Any] = {"folder": folder, "listening": listening(members(process))}
    os.kill(process.pid, signal.SIGKILL)
    begin = time.monotonic()
    found["is_gone"], found["seconds"] = all_gone(process), time.monotonic() - begin
    for pid in members(process):
        os.kill(pid, signal.SIGKILL)
    _, _, found["err"] = finish(process)
    return found


def test_no_port_is_open_to_other_machines(unattended: dict[str, Any]) -> None:
    addresses = unattended["listening"]
    assert addresses, "gloo's own, at least"
    assert {a for a in addresses if not ipaddress.ip_address(a).is_loopback} == set()


def test_ranks_do_not_outlive_their_launcher(unattended: dict[str, Any]) -> None:
    assert unattended["is_gone"]
    assert unattended["seconds"] < 40, "two or three; 30 if they cannot stop cleanly"
    sentence = "rowmesh: the launcher is gone, so the ranks that it started stop\n"
    assert unattended["err"] == sentence
    assert [p.name for p in unattended["folder"].glob("rowmesh-*")] == []
    folder = unattended["folder"] / "run"
    with RunFolder(folder).lock():
        pass
    (saved,) = (folder / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    more = ["--set", f"training.steps={step + 2}", "--json"]
    result = run("train", "--folder", str(folder), "--resume", *more)  # on one rank
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == step + 2
