"""An experiment whose arms are plans side by side: its cells, on hosts, and its ranks."""

import dataclasses
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rowmesh.comm.mesh import Mesh, init_mesh
from rowmesh.cost import Calibration
from rowmesh.errors import InputError, check_range
from rowmesh.lab import check_permitted, parse_rate
from rowmesh.placement.rules import MAX_DEPTH
from rowmesh.train.calibrate import calibrate
from rowmesh.train.config import RunConfig
from rowmesh.train.launch import settle_rank

from .cells import Cells
from .contestants import Place
from .machine import say

__all__ = ["Experiment", "check_experiment", "measure_on_hosts"]


class Experiment(Protocol):
    """A dataclass whose fields are numbers, words and tuples of them; every case is a cell."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Hosts and ranks on each."""

    @property
    def rates(self) -> tuple[str, ...]:
        """Of a host's link."""

    def config(self) -> RunConfig:
        """The model and data that hosts are calibrated with."""

    def cases(self) -> Sequence[Any]:
        """What is measured on every shape at every rate."""

    def measure(self, case: Any, mesh: Mesh, calibration: Calibration) -> dict[str, Any]:
        """A case; collective, the same on all ranks."""


def check_experiment(asked: Any, *, about: str, least_1: Sequence[str]) -> None:
    """What is wrong with the fields that experiments share.

    Args:
        asked: With ``shapes``, ``rates`` and ``depth``.
        about: What needs a slow link, for the sentence.
        least_1: Names of other fields, which must be at least 1.

    Raises:
        InputError: Naming it.
    """
    for rate in asked.rates:
        if parse_rate(rate) is None:
            raise InputError(f"rate {rate!r} is none: {about} are about slow links")
    empty = [field.name for field in dataclasses.fields(asked) if getattr(asked, field.name) == ()]
    if empty:
        raise InputError(f"nothing to measure: {', '.join(empty)} must not be empty")
    for name in ("rounds", *least_1):
        check_range(name, getattr(asked, name), 1)
    check_range("depth", asked.depth, 1, MAX_DEPTH)


def measure_on_hosts(
    asked: Experiment,
    cells: Cells,
    *,
    again: bool,
    describe: Callable[[dict[str, Any]], str],
) -> Iterator[dict[str, Any]]:
    """Every case on every shape at every rate, with ``hosts``, ``local``, ``rate`` and ``depth``.

    Each is stored as soon as it is done, and not run again. Hosts of a shape are calibrated once.
    A shape of one host is this machine without emulated links.

    Args:
        asked: The experiment.
        cells: Where it is stored.
        again: Run also what is stored.
        describe: A line of progress on what a case found.

    Raises:
        InputError: Where emulated hosts are not permitted.
        LabError: If the ranks of a shape fail.
    """
    for (hosts, local), rate in itertools.product(asked.shapes, asked.rates):
        names = [f"{hosts}x{local}_{rate}_{number}" for number in range(len(asked.cases()))]
        stored = [None if again else cells.find(name) for name in names]
        todo = [number for number, found in enumerate(stored) if found is None]
        measured = _run(asked, todo, hosts=hosts, local=local, rate=rate) if todo else iter(())
        for name, found in zip(names, stored, strict=True):
            if found is None:
                cells.store(name, found := next(measured))
            say(describe(found))
            yield found


def _run(
    asked: Experiment, todo: Sequence[int], *, hosts: int, local: int, rate: str
) -> Iterator[dict[str, Any]]:
    reason = check_permitted() if hosts > 1 else None
    if reason is not None:
        raise InputError(reason)
    say(f"{hosts}x{local} at {rate}")
    kind = type(asked)
    fields = json.dumps(dataclasses.asdict(asked), default=str)  # type: ignore[call-overload]
    words = ["-m", "benchmarks.harness.hosts", kind.__module__, kind.__name__, fields]
    with Place(hosts, local) as place:
        place.set_rate(rate)
        for found in place.found_by([*words, json.dumps(todo)]):
            yield {"hosts": hosts, "local": local, "rate": rate, **found}


def main() -> None:
    """A rank: calibrate, then case after case; rank 0 prints a line of JSON for each."""
    settle_rank()
    module, name, fields, todo = sys.argv[1:]
    given = {name: _tuples(value) for name, value in json.loads(fields).items()}
    asked: Experiment = getattr(importlib.import_module(module), name)(**given)
    with init_mesh() as mesh:
        calibration = calibrate(asked.config(), mesh)
        for number in json.loads(todo):
            found = asked.measure(asked.cases()[number], mesh, calibration)
            if mesh.rank == 0:
                print(json.dumps(found), flush=True)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
