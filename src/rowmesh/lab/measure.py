"""`rowmesh lab check`: what the links of a lab give, by plain TCP between its hosts."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowmesh.errors import LabError
from rowmesh.lab.lab import Lab

__all__ = ["TOLERANCE", "Reading", "measure"]

TOLERANCE = 0.1
_PROBE = Path(__file__).with_name("probe.py")
_WINDOW_S = 1.0
_PINGS = 200
_PORT = 28_000
_TIMEOUT_S = 30.0
# An Ethernet frame of 1,514 bytes, which is what tbf counts, carries 1,448 bytes of TCP payload.
_WIRE = 1514 / 1448
_OFF_LINK = 0.01  # share of the payload inside a host that its link may have seen: ARP and such


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One measured path.

    Args:
        path: Which, in words.
        payload_bits: TCP payload a second; of several connections at once, the slowest one's.
        wire_bits: The same with headers, the rate that a shaper sees.
        round_trip_s: Median of one byte there and back, the link being idle; None if not measured.
        ok: Whether the path is as asked; None if nothing was asked of it.
        verdict: The same in words.
    """

    path: str
    payload_bits: float
    wire_bits: float
    round_trip_s: float | None
    ok: bool | None
    verdict: str


def measure(lab: Lab, *, window_s: float = _WINDOW_S) -> list[Reading]:
    """Measure inside host 0, from host 0 to host 1, and from every host to the next at once.

    The last shows full duplex: every link then sends and receives at its rate. A path between
    hosts is as asked if its rate on the wire is within 10 % of the lab's, a path inside a host if
    less than 1 % of its payload was seen on the host's link.

    Args:
        lab: An open one, in which nothing else runs.
        window_s: How long each rate is measured, after half as long to settle.
    """
    found = [_inside(lab, window_s / 2)]
    if lab.hosts > 1:
        pairs = [(i, (i + 1) % lab.hosts) for i in range(lab.hosts)]
        round_trip = _round_trip(lab, 0, 1)
        found.append(_across(lab, pairs[:1], "host 0 to host 1", window_s, round_trip))
        name = "both ways at once" if lab.hosts == 2 else "each host to the next, at once"
        found.append(_across(lab, pairs, name, window_s, None))
    return found


def _inside(lab: Lab, window_s: float) -> Reading:
    round_trip = _round_trip(lab, 0, 0)
    before = lab.counters()[0].sent
    (count,) = _stream(lab, [(0, 0)], window_s)
    share = (lab.counters()[0].sent - before) / max(count["bytes"], 1)
    ok = share < _OFF_LINK
    bits = 8 * count["bytes"] / count["seconds"]
    return Reading(
        path="inside host 0",
        payload_bits=bits,
        wire_bits=bits,
        round_trip_s=round_trip,
        ok=ok,
        verdict="not shaped" if ok else f"{share:.0%} of it passes the link",
    )


def _across(
    lab: Lab,
    pairs: Sequence[tuple[int, int]],
    path: str,
    window_s: float,
    round_trip_s: float | None,
) -> Reading:
    bits = min(8 * c["bytes"] / c["seconds"] for c in _stream(lab, pairs, window_s))
    wire = bits * _WIRE
    ok, verdict = None, "no rate was asked"
    if lab.bits is not None:
        ok = abs(wire / lab.bits - 1) <= TOLERANCE
        verdict = f"{wire / lab.bits:.1%} of {lab.rate}"
    return Reading(
        path=path,
        payload_bits=bits,
        wire_bits=wire,
        round_trip_s=round_trip_s,
        ok=ok,
        verdict=verdict,
    )


def _stream(lab: Lab, pairs: Sequence[tuple[int, int]], window_s: float) -> list[dict[str, Any]]:
    """What each receiver counted while every pair's first host sent to its second."""
    counters = [_probe(lab, to, "count", to, window_s / 2, window_s) for _, to in pairs]
    for counter in counters:
        _read(counter)
    senders = [_probe(lab, source, "send", to) for source, to in pairs]
    found = [json.loads(_read(counter)) for counter in counters]
    for process in (*counters, *senders):
        process.communicate(timeout=_TIMEOUT_S)
    return found


def _round_trip(lab: Lab, source: int, to: int) -> float:
    echo = _probe(lab, to, "echo", to)
    _read(echo)
    ping = _probe(lab, source, "ping", to, _PINGS)
    seconds = float(json.loads(_read(ping))["seconds"])
    for process in (echo, ping):
        process.communicate(timeout=_TIMEOUT_S)
    return seconds


def _probe(lab: Lab, host: int, verb: str, to: int, *numbers: float) -> "subprocess.Popen[str]":
    words = [sys.executable, "-I", "-S", str(_PROBE), verb, lab.addresses[to], str(_PORT)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return lab.spawn(host, [*words, *map(str, numbers)], **streams)


def _read(process: "subprocess.Popen[str]") -> str:
    """A line of a probe, which has time-outs of its own."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        last = process.communicate(timeout=_TIMEOUT_S)[1].strip().splitlines()
        raise LabError(f"a probe failed: {last[-1] if last else 'no message'}")
    return line
