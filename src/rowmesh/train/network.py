"""What the network gives: interfaces, this host's name, and a trial of two ranks."""

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from rowmesh.comm.exchange import Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.comm.status import sentence_of
from rowmesh.errors import RowmeshError
from rowmesh.train.hardware import ROOT, Finding, read
from rowmesh.train.launch import launch

__all__ = ["check_hostname", "check_interfaces", "check_trial"]

_LOOPBACK = "772"  # of /sys/class/net/*/type
_TRIAL_BYTES = 4 << 20  # from each rank to the other
_TRIAL = "from rowmesh.train.network import run_trial; run_trial()"
_LAUNCHED = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "ROWMESH_STORE_",
)


def check_interfaces(root: Path = ROOT) -> Iterator[Finding]:
    """Every interface with its addresses, MTU and speed, and the one gloo was told to use."""
    folder = root / "sys/class/net"
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        files = folder / name
        is_loopback = read(files / "type") == _LOOPBACK
        words = ["loopback"] if is_loopback else []
        words += _addresses(root, name) or ["no address"]
        words.append(f"MTU {read(files / 'mtu') or 'unknown'}")
        speed = read(files / "speed") or ""
        if not is_loopback:
            is_known = speed.isdigit() and int(speed) > 0
            words.append(f"{int(speed) / 1000:g} Gbit/s" if is_known else "speed unknown")
        is_up = read(files / "operstate") in ("up", "unknown", None)
        words += [] if is_up else ["down"]
        yield Finding(name=f"network {name}", value=", ".join(words), ok=True if is_up else None)
    if not names:
        yield Finding(name="network", value="unknown", ok=None)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None:
        missing = [n for n in chosen.split(",") if names and n not in names]
        advice = f"no interface {', '.join(missing)}: known are {', '.join(names)}"
        yield Finding(
            name="GLOO_SOCKET_IFNAME",
            value=chosen,
            ok=not missing,
            advice=advice if missing else "",
        )


def _addresses(root: Path, name: str) -> list[str]:
    found = []
    ipv4 = _ipv4(name) if root == ROOT else None
    found += [] if ipv4 is None else [f"ipv4 {ipv4}"]
    lines = (read(root / "proc/net/if_inet6") or "").splitlines()
    found += ["ipv6"] if any(line.split()[-1] == name for line in lines if line) else []
    return found


def _ipv4(name: str) -> str | None:
    """The interface's address by Linux's own call; other systems have another."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            answer = fcntl.ioctl(one.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def check_hostname(name: str | None = None, *, timeout_s: float = 5.0) -> Finding:
    """Whether this host's name has an address that other hosts can reach; gloo binds to it."""
    name = socket.gethostname() if name is None else name
    addresses: list[str] = []
    reasons = [f"no answer in {timeout_s:g} s"]

    def resolve() -> None:
        try:
            answers = socket.getaddrinfo(name, None)
        except OSError as error:
            reasons.insert(0, error.strerror or sentence_of(error))
        else:
            addresses.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    thread = threading.Thread(target=resolve, daemon=True)  # a resolver may take minutes
    thread.start()
    thread.join(timeout_s)
    if not addresses:
        advice = "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network to use"
        return Finding(name="host name", value=f"{name}: {reasons[0]}", ok=False, advice=advice)
    reachable = [a for a in addresses if not ipaddress.ip_address(a.split("%")[0]).is_loopback]
    value = f"{name}: {', '.join(addresses[:2])}"
    if reachable or os.environ.get("GLOO_SOCKET_IFNAME"):
        return Finding(name="host name", value=value, ok=True)
    advice = "other hosts cannot reach the loopback: with several set GLOO_SOCKET_IFNAME"
    return Finding(name="host name", value=value, ok=None, advice=advice)


def check_trial(*, timeout_s: float = 60.0) -> Finding:
    """Two ranks on this machine that meet by gloo and send each other 4 MiB, as training would."""
    name = "two ranks"
    ours = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHED)}
    with subprocess.Popen(
        [sys.executable, "-c", _TRIAL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ours | {"CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the session that was started above
            process.communicate()
            return _failed(name, f"no answer in {timeout_s:g} s")
    lines = out.splitlines()
    if process.returncode == 0 and lines:
        return Finding(name=name, value=json.loads(lines[-1]), ok=True)
    return _failed(name, (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])


def _failed(name: str, reason: str) -> Finding:
    advice = "no loopback, or a firewall on it: try ip link set lo up"
    return Finding(name=name, value=f"failed: {reason}", ok=False, advice=advice)


def run_trial() -> None:
    """The program that `check_trial` starts: prints what happened as JSON."""
    print(json.dumps(launch(_exchange, ranks=2)))


def _exchange(mesh: Mesh) -> str:
    peer = 1 - mesh.rank
    channel = mesh.wire.channel("trial", Lane.ROWS)
    sent = torch.full((_TRIAL_BYTES,), mesh.rank + 1, dtype=torch.uint8, device=mesh.device)
    found = torch.zeros_like(sent)
    channel.post(1, sends=[(peer, sent)], receives=[(peer, found)], edge="counts").wait()
    if not bool((found == peer + 1).all()):
        raise RowmeshError(f"rank {mesh.rank} received other bytes than rank {peer} sent")
    mesh.total(1)
    segment = mesh.wire.segment
    is_shared = segment is not None and segment.takes(peer, sent)
    way = "shared memory" if is_shared else "gloo"
    return f"sent each other {_TRIAL_BYTES >> 20} MiB through {way}"
