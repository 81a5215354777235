"""Who takes part: a setting of either library, a torchrun of its own that waits at a gate."""

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowmesh.errors import LabError
from rowmesh.lab import Lab, Run

from .gates import Gatekeeper
from .machine import REPOSITORY

__all__ = ["OWN_CORES", "Contestant", "Entry", "Place"]

OWN_CORES = "--own-cores"
START_S, STEP_S = 400.0, 60.0  # longest start with its warm-up, longest step
CALIBRATE_S = 400.0
LONGEST_S = 3600.0  # of an experiment's ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A setting that may run.

    ``role`` is ours, theirs, ours_lossy, theirs_lossy, or theirs_plain: what TorchRec does in fp32
    if its pipeline is not asked for. ``env`` is added to the environment of its ranks. ``tree`` is
    the checkout whose code runs.
    """

    role: str
    name: str
    flags: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    tree: Path = REPOSITORY

    @property
    def is_ours(self) -> bool:
        """rowmesh, not TorchRec."""
        return self.role.startswith("ours")

    @property
    def has_own_cores(self) -> bool:
        """Each of its ranks has its own."""
        return OWN_CORES in self.flags

    @property
    def script(self) -> Path:
        """What its ranks run."""
        name = "bench_dlrm.py" if self.is_ours else "peer_torchrec.py"
        return self.tree / "benchmarks" / name


class Contestant:
    """An entry that has been started and warmed up. `Place.start` makes it."""

    def __init__(
        self, entry: Entry, *, launch: Callable[[list[str]], Run], flags: list[str], folder: Path
    ) -> None:
        self.entry, self._flags = entry, [*entry.flags, *flags]
        self._gate = Gatekeeper(folder, failure=self._failure)
        self._run = launch([str(entry.script), *self._flags, "--gate", str(folder)])
        self.ready: dict[str, Any] = {}

    def _failure(self) -> str | None:
        code = self._run.poll()
        if code is None:
            return None
        return f"{self.label} ended with code {code}: {self._run.failure()}"

    @property
    def label(self) -> str:
        """As progress lines name it."""
        return f"{'rowmesh' if self.entry.is_ours else 'TorchRec'} {self.entry.name}"

    def wait_ready(self) -> None:
        """Wait for the end of the warm-up."""
        self.ready = self._ask(None, steps=0, timeout_s=START_S)

    def steps(self, count: int) -> dict[str, Any]:
        """Open the gate for ``count`` steps."""
        found: dict[str, Any] = self._ask("steps", steps=count, timeout_s=60 + STEP_S * count)
        return found

    def dense(self, count: int) -> dict[str, float]:
        """Open the gate for dense steps (ours only)."""
        found: dict[str, float] = self._ask("dense", steps=count, timeout_s=60 + STEP_S * count)
        return found

    def trace(self, count: int) -> dict[str, Any] | None:
        """Open the gate for traced steps (ours only): their `Summary`, as a dict."""
        return self._ask("trace", steps=count, timeout_s=60 + STEP_S * (count + 1))  # type: ignore[no-any-return]

    def _ask(self, do: str | None, *, steps: int, timeout_s: float) -> Any:
        try:
            if do is None:
                return self._gate.answer(timeout_s)
            return self._gate.open(do, steps=steps, timeout_s=timeout_s)
        except TimeoutError as error:
            raise LabError(f"{self.label}: {error}") from None
        except RuntimeError as error:
            raise LabError(str(error)) from None

    def stop(self) -> None:
        """Let it leave by itself, else end it."""
        self._gate.send("stop")
        self._run.wait(timeout=15)

    def describe(self) -> dict[str, Any]:
        """For the JSON report; paths of this machine are left out."""
        flags = [Path(w).name if w.endswith(".topology") else w for w in self._flags]
        words = ["torchrun", f"benchmarks/{self.entry.script.name}", *flags]
        return {"name": self.entry.name, "command": shlex.join(words), **self.ready}


class Place:
    """The hosts of one layout, with what has been started on them; a context manager.

    Args:
        hosts: Number of hosts; 1 is this machine's loopback, unshaped and without permission.
        local: Ranks a host.
        flags: Of both scripts.
        peer: TorchRec's interpreter.
    """

    def __init__(
        self, hosts: int, local: int, *, flags: Iterable[str] = (), peer: str = ""
    ) -> None:
        self.hosts, self.local, self.flags, self.peer = hosts, local, list(flags), peer
        self.lab = Lab(hosts, loopback=hosts == 1)
        self.alive: dict[Entry, Contestant] = {}

    def __enter__(self) -> "Place":
        self.lab.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.lab.close()

    def set_rate(self, rate: str | None) -> None:
        """Of all links from now on."""
        if self.hosts > 1:
            self.lab.set_rate(rate)

    def launch(
        self,
        words: list[str],
        *,
        tree: Path = REPOSITORY,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Run:
        """``words`` as every rank, of the code of a checkout."""
        path = os.pathsep.join((str(tree / "src"), str(tree)))
        return self.lab.launch(
            words,
            ranks_per_host=self.local,
            python=python,
            env={"PYTHONPATH": path, **(env or {})},
            timeout_s=timeout_s,
        )

    def found_by(self, words: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What ranks of ``words`` print as lines of JSON, as it comes.

        Raises:
            LabError: If a rank fails.
        """
        run = self.launch(list(words), timeout_s=LONGEST_S)
        for line in run.lines:
            if line.startswith("{"):
                yield json.loads(line)
        if run.poll() != 0:
            raise LabError(f"{self.hosts}x{self.local}: {run.failure()}")

    def calibrate(self, out: Path, settings: Iterable[str]) -> None:
        """`rowmesh calibrate` on these hosts at the present rate, of a model with these settings.

        Raises:
            LabError: With its last lines, if it fails.
        """
        words = [word for setting in settings for word in ("--set", setting)]
        run = self.launch(["-m", "rowmesh.cli", "calibrate", "--out", str(out), *words])
        if run.wait(timeout=CALIBRATE_S) != 0:
            raise LabError(f"rowmesh calibrate failed: {run.failure()}")

    def start(self, entry: Entry) -> Contestant:
        """The entry, started and warmed up if it is not alive yet, with unshaped links meanwhile.

        One at a time: the start is bound by the cores, and links do not change losses.
        """
        if entry not in self.alive:
            self.set_rate(None)
            name = f"{entry.role}-{entry.name}".replace(", ", "-").replace(" ", "-")
            folder = self.lab.tag.folder / "gates" / name  # goes with the lab, whatever happens
            launch = functools.partial(
                self.launch,
                tree=entry.tree,
                python=sys.executable if entry.is_ours else self.peer,
                env=dict(entry.env),
            )
            contestant = Contestant(entry, launch=launch, flags=self.flags, folder=folder)
            contestant.wait_ready()
            self.alive[entry] = contestant
        return self.alive[entry]

    def keep(self, entries: Iterable[Entry]) -> None:
        """Stop all others."""
        kept = set(entries)
        for entry in [e for e in self.alive if e not in kept]:
            self.alive.pop(entry).stop()
