"""Gates: how contestants that are alive at once run one at a time.

A gate is a folder that the race and all ranks of one contestant see. The race writes
``order_N.json``; every rank finds it by looking every 50 ms, which costs no CPU worth naming and,
unlike a wait in a collective, no time-out; rank 0 writes ``answer_N.json``. Files appear whole
(written aside, then renamed). Standard library only: it is imported in TorchRec's environment too.
"""

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Gate", "Gatekeeper"]

POLL_S = 0.05
LOOKS_A_SECOND = round(1 / POLL_S)
OWNER = "owner.pid"


class Gate:
    """A rank's side.

    Args:
        folder: The gate.
        rank: Only rank 0 answers.
        timeout_s: Longest wait for an order.
    """

    def __init__(self, folder: str | Path, *, rank: int, timeout_s: float = 3600.0) -> None:
        self.folder, self.rank, self.timeout_s = Path(folder), rank, timeout_s

    def serve(self, ready: dict[str, Any], work: dict[str, Callable[[int], Any]]) -> None:
        """Answer number 0 is ``ready``; then carry out orders until one says ``stop``.

        An order names one of ``work`` and a number of steps. All ranks carry it out; what rank 0
        returns is the answer.
        """
        self.answer(0, ready)
        number = 1
        while (order := self.wait(number))["do"] != "stop":
            self.answer(number, work[order["do"]](order["steps"]))
            number += 1

    def wait(self, number: int) -> dict[str, Any]:
        """Order ``number``.

        Raises:
            TimeoutError: If it does not come in time, or the race's process has gone.
        """
        path, deadline = self.folder / f"order_{number}.json", time.monotonic() + self.timeout_s
        for look in itertools.count():
            if path.exists():
                break
            is_lonely = look % LOOKS_A_SECOND == 0 and not self._has_owner()
            if is_lonely or time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: order {number} did not come to the gate")
            time.sleep(POLL_S)
        order: dict[str, Any] = json.loads(path.read_text())
        return order

    def answer(self, number: int, value: Any) -> None:
        """Write ``answer_N.json``, on rank 0."""
        if self.rank == 0:
            _write(self.folder / f"answer_{number}.json", value)

    def _has_owner(self) -> bool:
        try:
            return Path("/proc", (self.folder / OWNER).read_text()).exists()
        except OSError:
            return False  # the race removed the folder


class Gatekeeper:
    """The race's side.

    Args:
        folder: Made, with this process as its owner: ranks leave when the owner has gone.
        failure: The sentence that explains the contestant's end, or None while it lives.
    """

    def __init__(self, folder: str | Path, *, failure: Callable[[], str | None]) -> None:
        self.folder, self.failure = Path(folder), failure
        self.number = 0
        self.folder.mkdir(parents=True)
        _write(self.folder / OWNER, os.getpid())

    def open(self, do: str, *, steps: int, timeout_s: float) -> Any:
        """Give an order and wait for its answer.

        Raises:
            RuntimeError: If the contestant ended, with its last lines.
            TimeoutError: If it did not answer in time.
        """
        self.send(do, steps=steps)
        return self.answer(timeout_s)

    def send(self, do: str, *, steps: int = 0) -> None:
        """Give an order."""
        self.number += 1
        _write(self.folder / f"order_{self.number}.json", {"do": do, "steps": steps})

    def answer(self, timeout_s: float) -> Any:
        """The answer to the last order, or to none yet: the contestant's ``ready``."""
        path, deadline = self.folder / f"answer_{self.number}.json", time.monotonic() + timeout_s
        while not path.exists():
            reason = self.failure()
            if reason is not None:
                raise RuntimeError(reason)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer to order {self.number} within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        return json.loads(path.read_text())


def _write(path: Path, value: Any) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(value))
    aside.rename(path)
