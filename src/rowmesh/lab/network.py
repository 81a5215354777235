"""Hosts as network namespaces, joined by a bridge in a namespace of its own, links shaped by tbf.

::

    host 0 [eth0]--tbf----[p0 tbf]--+
    host 1 [eth0]--tbf----[p1 tbf]--+-- br0 (namespace "switch")

A host's eth0 shapes what it sends, the port facing it what it receives: a full-duplex link.
Ranks of one host meet on its loopback, which is neither shaped nor counted.
"""

import contextlib
import json
from dataclasses import dataclass

from rowmesh.errors import LabError
from rowmesh.lab.iproute import batch, call
from rowmesh.lab.tags import Tag

__all__ = ["INTERFACE", "HostBytes", "build_network", "read_congestion", "read_counters", "shape"]

INTERFACE = "eth0"
_BURST_BYTES = 80_000  # above a 64 KiB segment, which tbf would otherwise cut up by hand
_BURST_S = 5e-4  # timers wake late: a faster link needs more tokens in hand
_QUEUE = "4mb"
# The one every kernel has. With bbr, some machines' default, a lone stream gives 55 to 100 % of
# a shaped link from one second to the next (docs/lab.md).
_CONGESTION = "reno"
_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBytes:
    """Bytes that passed the link of one host since it was made, headers included.

    Args:
        sent: By the host.
        received: By the host.
    """

    sent: int
    received: int


def address(host: int) -> str:
    """The address of a host; labs may share it, being networks apart."""
    return f"10.77.0.{host + 1}"


def build_network(tag: Tag, *, hosts: int, bits: int | None) -> None:
    """Make the namespaces of ``tag``, their links and, unless ``bits`` is None, their shapers."""
    names = [tag.host(i) for i in range(hosts)]
    batch("ip", (f"netns add {name}" for name in (tag.switch, *names)))
    ports = ["link add br0 type bridge", "link set br0 up"]
    for i, name in enumerate(names):
        ports.append(f"link add p{i} type veth peer name {INTERFACE} netns {name}")
        ports.append(f"link set p{i} master br0 up")
    batch("ip", ports, namespace=tag.switch)
    for i, name in enumerate(names):
        lines = [
            "link set lo up",
            f"addr add {address(i)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ]
        batch("ip", lines, namespace=name)
        with contextlib.suppress(LabError):  # where /proc/sys is read-only, the machine's own stays
            call("ip", "netns", "exec", name, "sh", "-c", f"echo {_CONGESTION} > {_CONTROL}")
    if bits is not None:
        shape(tag, hosts=hosts, bits=bits)


def shape(tag: Tag, *, hosts: int, bits: int | None, was_shaped: bool = False) -> None:
    """Give both ends of every link the rate ``bits``; with None take the shapers away."""
    if bits is None and not was_shaped:
        return
    ports = [_qdisc(f"p{i}", bits) for i in range(hosts)]
    batch("tc", ports, namespace=tag.switch)
    for i in range(hosts):
        batch("tc", [_qdisc(INTERFACE, bits)], namespace=tag.host(i))


def _qdisc(interface: str, bits: int | None) -> str:
    if bits is None:
        return f"qdisc del dev {interface} root"
    burst = max(_BURST_BYTES, round(bits / 8 * _BURST_S))
    return f"qdisc replace dev {interface} root tbf rate {bits}bit burst {burst} limit {_QUEUE}"


def read_congestion(tag: Tag) -> str:
    """The congestion control that TCP uses in the hosts."""
    return call("ip", "netns", "exec", tag.host(0), "cat", _CONTROL).strip()


def read_counters(tag: Tag, *, hosts: int) -> list[HostBytes]:
    """What the interfaces of all hosts have counted."""
    found = []
    for i in range(hosts):
        text = call("ip", "-n", tag.host(i), "-s", "-j", "link", "show", "dev", INTERFACE)
        stats = json.loads(text)[0]["stats64"]
        found.append(HostBytes(sent=stats["tx"]["bytes"], received=stats["rx"]["bytes"]))
    return found


def host_file(hosts: int, host: int, *, name: str) -> str:
    """/etc/hosts of a host: itself under the machine's ``name``, and all as host0, host1, ..."""
    lines = ["127.0.0.1 localhost", f"{address(host)} {name}"]
    for i in range(hosts):
        # torch asks for the names of IPv4 addresses written as IPv6, and no name server answers
        lines += [f"{address(i)} host{i}", f"::ffff:{address(i)} host{i}"]
    return "\n".join(lines) + "\n"
