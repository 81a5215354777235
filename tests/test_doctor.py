"""`rowmesh doctor`: the checks on made-up machines, and one run on this one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from rowmesh import native
from rowmesh.cli import app
from rowmesh.cli import doctor as cli_doctor
from rowmesh.comm import shared
from rowmesh.extras import Extra
from rowmesh.native import library
from rowmesh.train import doctor, network
from rowmesh.train.doctor import can_train, check_extra, examine, features
from rowmesh.train.hardware import (
    Finding,
    check_compiler,
    check_cores,
    check_descriptors,
    check_huge_pages,
    check_memory,
    check_shared_memory,
)
from rowmesh.train.network import check_hostname, check_interfaces, check_trial

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A root with these files below it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/cpu.max": "25000 100000",
                "sys/fs/cgroup/cpu.max": "50000 100000",
            },
            0.25,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "75000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            0.75,
        ),
    ],
)
def test_cores_and_the_smallest_quota_of_the_control_groups(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    found = check_cores(tree(tmp_path, files))
    assert found.ok is True
    assert re.match(r"\d+ of \d+ \(\w+\)", found.value)
    if quota is None:
        assert (found.advice, "allows" in found.value) == ("", False)
    else:
        assert found.value.endswith(f"control group allows {quota:.1f}")
        assert found.advice == f"more than 1 ranks share the {quota:.1f} cores allowed"


@pytest.mark.parametrize(
    ("files", "free", "value"),
    [
        ({}, None, "unknown"),
        ({"proc/meminfo": MEMINFO}, 8 * GIB, "8.0 GiB available of 16.0; 8.0 free to use"),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
            },
            2 * GIB,
            "8.0 GiB available of 16.0, control group allows 4.0; 2.0 free to use",
        ),
        (
            {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max\n"},
            8 * GIB,
            "8.0 GiB available of 16.0; 8.0 free to use",
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:memory:/not/visible/here\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB * 3 // 4}\n",
            },
            GIB // 4,
            "8.0 GiB available of 16.0, control group allows 1.0; 0.2 free to use",
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            8 * GIB,
            "8.0 GiB available of 16.0; 8.0 free to use",
        ),
    ],
)
def test_memory_is_what_the_system_has_or_the_control_group_leaves(
    tmp_path: Path, files: dict[str, str], free: int | None, value: str
) -> None:
    root = tree(tmp_path, files)
    found = check_memory(root)
    assert found.value == value
    assert found.ok == (None if free is None else free >= GIB // 2)
    assert bool(found.advice) == (found.ok is False)


def test_shared_memory_is_tried_not_trusted(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path).value == "/dev/shm: No such file or directory"
    assert check_shared_memory(tmp_path).ok is None
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    found = check_shared_memory(tmp_path)
    assert found.ok is True
    assert re.fullmatch(r"/dev/shm of [\d,]+ MiB, [\d,]+ free", found.value)
    assert list((tmp_path / "dev" / "shm").iterdir()) == [], "the segment is gone again"


@pytest.mark.parametrize(
    ("limits", "ok", "value", "advice"),
    [
        ("", None, "unknown", ""),
        ("20000 20000", True, "soft limit 20000, hard 20000, enough for 3,322 ranks", ""),
        (
            "1024 4096",
            True,
            "soft limit 1024, hard 4096, enough for 160 ranks",
            "for more ranks: ulimit -n 4096",
        ),
        (
            "70 100",
            False,
            "soft limit 70, hard 100, too few for two ranks",
            "for more ranks: ulimit -n 100",
        ),
        ("unlimited unlimited", True, "soft limit unlimited, hard unlimited", ""),
    ],
)
def test_descriptors_are_counted_in_ranks(
    tmp_path: Path, limits: str, ok: bool | None, value: str, advice: str
) -> None:
    text = f"Limit   Soft Limit   Hard Limit   Units\nMax open files   {limits}   files\n"
    found = check_descriptors(tree(tmp_path, {"proc/self/limits": text if limits else ""}))
    assert (found.ok, found.value, found.advice) == (ok, value, advice)


@pytest.mark.parametrize(
    ("text", "value", "ok"),
    [
        ("always [madvise] never", "madvise", True),
        ("[always] madvise never", "always", True),
        ("always madvise [never]", "never", None),
        ("", "unknown", None),
    ],
)
def test_huge_pages(tmp_path: Path, text: str, value: str, ok: bool | None) -> None:
    root = tree(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    found = check_huge_pages(root)
    assert (found.value, found.ok, bool(found.advice)) == (value, ok, value == "never")


def test_interfaces_and_the_one_gloo_is_told_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = "sys/class/net"
    root = tree(
        tmp_path,
        {
            f"{net}/eth0/type": "1",
            f"{net}/eth0/mtu": "9000",
            f"{net}/eth0/speed": "25000",
            f"{net}/eth0/operstate": "up",
            f"{net}/eth1/operstate": "down",
            f"{net}/eth1/speed": "-1",
            f"{net}/lo/type": "772",
            f"{net}/lo/mtu": "65536",
            "proc/net/if_inet6": "fe80 02 40 20 80 eth0\n",
        },
    )
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert [(f.name, f.value, f.ok) for f in check_interfaces(root)] == [
        ("network eth0", "ipv6, MTU 9000, 25 Gbit/s", True),
        ("network eth1", "no address, MTU unknown, speed unknown, down", None),
        ("network lo", "loopback, no address, MTU 65536", True),
    ]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert list(check_interfaces(root))[-1].ok is True
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    last = list(check_interfaces(root))[-1]
    assert last.ok is False
    assert last.advice == "no interface eth7: known are eth0, eth1, lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert [f.value for f in check_interfaces(tmp_path / "empty")] == ["unknown"]


def test_a_host_name_must_have_an_address_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert check_hostname("192.0.2.7") == Finding(
        name="host name", value="192.0.2.7: 192.0.2.7", ok=True
    )
    near = check_hostname("127.0.0.1")
    assert near.ok is None
    assert near.advice.startswith("other hosts cannot reach the loopback")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert check_hostname("127.0.0.1").ok is True
    lost = check_hostname("a name that cannot be")
    assert lost.ok is False
    assert lost.value.startswith("a name that cannot be: ")
    assert "add the name to /etc/hosts" in lost.advice


def test_a_silent_resolver_does_not_hold_up_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    asked = threading.Event()
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_: asked.wait(30) and [])
    found = check_hostname("slow", timeout_s=0.05)
    asked.set()
    assert (found.value, found.ok) == ("slow: no answer in 0.05 s", False)


def test_it_says_whether_compiled_kernels_are_used() -> None:
    assert doctor.check_kernels().ok is (True if native.is_available() else None)
    with mock.patch.object(library, "_find", return_value=(None, "not built")):
        found = doctor.check_kernels()
    assert (found.value, found.ok) == ("not built: torch is used", None)
    assert "pip install" in found.advice


def test_a_compiler_is_found_or_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert (check_compiler().value, check_compiler().ok) == ("none", None)
    tool = tmp_path / "mycc"
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("CC", "mycc")
    assert (check_compiler().value, check_compiler().ok) == (str(tool), True)


def test_messages_inside_a_host_go_through_shared_memory_or_it_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "describe_segment", lambda: (True, "somewhere"))
    monkeypatch.delenv("ROWMESH_SHARED_MEMORY", raising=False)
    found = doctor.check_messages()
    assert (found.value, found.ok) == ("through shared memory", True)
    monkeypatch.setattr(shared, "describe_segment", lambda: (False, "no compiler"))
    found = doctor.check_messages()
    assert (found.value, found.ok) == ("by gloo: no compiler", None)
    monkeypatch.setenv("ROWMESH_SHARED_MEMORY", "0")
    assert doctor.check_messages().value == "by gloo: ROWMESH_SHARED_MEMORY=0"


def test_extras_say_what_they_are_for_and_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_extra("safetensors")
    assert found.ok is True
    assert found.value[0].isdigit()
    extra = Extra("no-such-package>=1", "some", "something")
    monkeypatch.setattr(doctor, "EXTRAS", {"no-such-package": extra})
    found = check_extra("no-such-package")
    assert (found.value, found.ok) == ("not installed", None)
    assert found.advice == "pip install 'no-such-package>=1' for something"


def test_a_trial_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_TRIAL", "raise SystemExit('no loopback here')")
    found = check_trial()
    assert (found.ok, found.value) == (False, "failed: no loopback here")


@pytest.mark.nightly
def test_the_trial_needs_the_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-nic")
    assert check_trial().ok


def test_a_trial_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_TRIAL", "import threading; threading.Event().wait()")
    found = check_trial(timeout_s=0.2)
    assert (found.ok, found.value) == (False, "failed: no answer in 0.2 s")


def all_ok(**changes: Any) -> list[Finding]:
    names = [
        *doctor._NEEDED,
        "host name",
        "nccl",
        "CUDA devices",
        *doctor.EXTRAS,
        "emulated hosts",
    ]
    oks = dict.fromkeys(names, True) | {k.replace("_", " "): v for k, v in changes.items()}
    return [Finding(name=n, value="found", ok=ok) for n, ok in oks.items()]


def works(findings: list[Finding]) -> list[bool]:
    return [f.works for f in features(findings)]


def test_features_follow_from_findings() -> None:
    assert works(all_ok()) == [True] * 8
    assert works(all_ok(two_ranks=False)) == [True, False, False, True, True, True, True, True]
    assert works(all_ok(host_name=None)) == [True, True, False, True, True, True, True, True]
    assert works(all_ok(nccl=None)) == [True, True, True, False, True, True, True, True]
    assert works(all_ok(pyarrow=None)) == [True, True, True, True, True, False, True, True]
    assert works(all_ok(memory=None)) == [True] * 8, "unknown is not missing"
    assert works(all_ok(emulated_hosts=None)) == [True] * 7 + [False]
    assert features(all_ok(pyarrow=None))[5].reason == "pyarrow: found"
    assert features([])[0].reason == "torch: unknown; memory: unknown"


@pytest.mark.parametrize("name", doctor._NEEDED)
def test_training_needs(name: str) -> None:
    key = name.replace(" ", "_")
    assert can_train(all_ok())
    assert can_train(all_ok(**{key: None}))
    assert not can_train(all_ok(**{key: False}))


def test_training_does_not_need_the_rest() -> None:
    assert can_train(all_ok(host_name=False, nccl=False, CUDA_devices=False, pyarrow=False))


def test_a_machine_without_proc_and_sys_is_unknown_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_trial", lambda timeout_s: all_ok()[4])
    found = {f.name: f for f in examine(tmp_path)}
    for name in ("memory", "file descriptors", "huge pages", "network"):
        assert (found[name].value, found[name].ok) == ("unknown", None)
    assert can_train(list(found.values()))


@pytest.mark.parametrize("ok", [True, False])
def test_the_table_fits_100_columns_and_the_code_says_it(
    monkeypatch: pytest.MonkeyPatch, ok: bool
) -> None:
    long = Finding(name="network enp0s31f6", value="word " * 60, ok=None, advice="do " * 40)
    monkeypatch.setattr(cli_doctor, "examine", lambda: [long, *all_ok(two_ranks=ok)])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == (0 if ok else 1)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert ("PROBLEM" in result.stdout) == (not ok)
    assert lines[-1] == ("training can run" if ok else "training cannot run: see PROBLEM above")
    assert "what runs here" in lines


@pytest.mark.nightly
def test_a_real_run_finds_that_training_works_here() -> None:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-m", "rowmesh.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["can_train"] is True
    by_name = {f["name"]: f for f in found["findings"]}
    trial = by_name["two ranks"]
    assert re.fullmatch(r"sent each other 4 MiB through (shared memory|gloo)", trial["value"])
    assert (trial["ok"], trial["advice"]) == (True, "")
    assert by_name["torch"]["value"].startswith("2.")
    assert {"cores", "memory", "gloo", "nccl", "host name", "C compiler"} <= set(by_name)
    assert by_name["emulated hosts"]["value"] in ("yes", "no")
    assert {"name", "works", "reason"} == set(found["features"][0])
