"""An exchange among the ranks of a host through shared memory and by gloo; one JSON line.

::

    torchrun --nproc-per-node 2 benchmarks/bench_shared_memory.py

All ranks send ``--sizes`` bytes to each other at once. The transports take turns, after a small
exchange that brings the ranks together; rank 0 prints ``RESULT`` and medians of its ``--repeats``
in microseconds, and gloo over shared memory (``ratio``; above 1 shared memory is faster). With
``--spins`` also shared memory that waits so many microseconds on the core before it sleeps.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from statistics import median

import torch

import rowmesh as rm
from rowmesh.comm.exchange import Channel, Lane
from rowmesh.comm.mesh import Mesh
from rowmesh.native.segment import describe_segment


def main() -> None:
    """Measure, print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sizes = [64, 4096, 65_536, 1 << 20, 4 << 20, 10 << 20]
    p.add_argument("--sizes", type=int, nargs="+", default=sizes, help="of a message, in bytes")
    p.add_argument("--repeats", type=int, default=31)
    p.add_argument("--spins", type=float, nargs="*", default=[], help="microseconds")
    args = p.parse_args()
    torch.set_num_threads(1)
    with rm.init_mesh(shared_memory=True) as mesh:
        if mesh.wire.segment is None:
            raise SystemExit(f"no shared memory here; the native code: {describe_segment()[1]}")
        channel = mesh.wire.channel("benchmark", Lane.ROWS)
        found = Exchanges(mesh, channel, args.spins).compare(args.sizes, args.repeats)
        if mesh.rank == 0:
            commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
            about = {
                "ranks": mesh.world,
                "cores": os.cpu_count(),
                "load": round(os.getloadavg()[0], 1),
                "commit": commit.stdout.strip(),
                "torch": torch.__version__,
                "machine": platform.machine(),
                "args": vars(args),
            }
            print("RESULT " + json.dumps({"us": found, **about}), flush=True)


class Exchanges:
    """The same exchange by every way there is."""

    def __init__(self, mesh: Mesh, channel: Channel, spins: list[float]) -> None:
        self._mesh, self._channel, self._sequence = mesh, channel, 0
        self._segment = mesh.wire.segment
        assert self._segment is not None
        default = self._segment.spin_s
        self._ways: dict[str, float | None] = {"gloo": None, "shared": default}
        self._ways |= {f"spin {spin:g}": spin * 1e-6 for spin in spins}

    def compare(self, sizes: list[int], repeats: int) -> dict[int, dict[str, float]]:
        """Medians by size and way, and the ratio."""
        found = {}
        for size in sizes:
            times: dict[str, list[float]] = {way: [] for way in self._ways}
            for _ in range(repeats + 2):
                for way, spent in times.items():
                    self._choose(way)
                    self._seconds(64)
                    spent.append(1e6 * self._seconds(size))
            found[size] = {way: round(median(spent[2:]), 1) for way, spent in times.items()}
            found[size]["ratio"] = round(found[size]["gloo"] / found[size]["shared"], 2)
        self._choose("shared")
        return found

    def _choose(self, way: str) -> None:
        spin_s, segment = self._ways[way], self._segment
        assert segment is not None
        self._mesh.wire.segment = None if spin_s is None else segment
        segment.spin_s = spin_s or 0.0

    def _seconds(self, size: int) -> float:
        sent = torch.ones(size, dtype=torch.uint8)
        received = [(peer, torch.zeros_like(sent)) for peer in self._mesh.peers()]
        sends = [(peer, sent) for peer in self._mesh.peers()]
        self._sequence += 1
        start = time.perf_counter()
        self._channel.post(self._sequence, sends=sends, receives=received, edge=None).wait()
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
