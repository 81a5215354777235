"""A trace of a few steps of a loop: all ranks record, rank 0 writes one file."""

import json
from collections.abc import Callable
from pathlib import Path

from rowmesh.comm.agreement import attempt
from rowmesh.comm.clock import ClockComparison
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import check_range
from rowmesh.files import check_target, write_whole
from rowmesh.trace import Clock, Recording
from rowmesh.trace.chrome import chrome_trace
from rowmesh.trace.summary import Summary, summarise

__all__ = ["Tracing", "check_trace_file"]


def check_trace_file(path: Path) -> None:
    """Whether a trace can be written to ``path``.

    Raises:
        InputError: If it cannot, with the reason.
    """
    way_out = "give another --trace FILE, in a folder that exists"
    check_target(path, what="the trace", way_out=way_out)


class Tracing:
    """Records steps ``skip`` to ``skip + num_steps`` of a loop, then writes and stops.

    ::

        tracing = rm.Tracing(mesh, "trace.json")
        for number, batch in enumerate(batches):
            tracing.begin_step(number)
            with mesh.trace.phase("dense forward"):
                loss = mesh.mean(model(batch))
            with mesh.trace.phase("backward"):
                loss.backward()
            optimizer.step()
            tracing.end_step()
        summary = tracing.finish()

    No bit of the training and no byte of the ledger changes. One at a time on a mesh.

    Args:
        mesh: Whose recorder is used.
        path: The file; rank 0 writes it, whole or not at all.
        num_steps: To record.
        skip: Steps before them: the first ones are not like the others.

    Raises:
        InputError: On all ranks, if rank 0 cannot write the file.

    Collective:
        All ranks: here, in the first `begin_step` and the last `end_step` that record, and in
        `finish`.
    """

    def __init__(self, mesh: Mesh, path: str | Path, *, num_steps: int = 10, skip: int = 5) -> None:
        check_range("number of traced steps", num_steps, 1)
        check_range("number of steps before a trace", skip, 0)
        self.path = Path(path)
        self.summary: Summary | None = None
        self._mesh, self._num_steps, self._skip = mesh, num_steps, skip
        self._seen, self._is_finished = 0, False
        self._clocks = ClockComparison(mesh)
        self._clock = (0, 0)
        self._before: dict[str, dict[str, int]] = {}
        self._sent: dict[str, dict[str, int]] = {}
        self._on_rank_0(lambda: check_trace_file(self.path))

    def begin_step(self, number: int) -> None:
        """Step ``number`` begins here, with the making of its batch."""
        if self._is_finished:
            return
        self._seen += 1
        if self._seen > self._skip:
            if self._seen == self._skip + 1:
                self._clock = self._clocks.measure()
            self._before = self._mesh.ledger.by_edge()
            self._mesh.trace.begin_step(number)

    def end_step(self) -> None:
        """The step ends here; after the last one to record, rank 0 writes the file."""
        if self._is_finished or self._seen <= self._skip:
            return
        if self._mesh.trace.is_on:  # else there were too many events
            self._mesh.trace.end_step()
            self._add_bytes()
        if self._seen == self._skip + self._num_steps:
            self.finish()

    def finish(self) -> Summary | None:
        """Write what was recorded, unless that is done; None if no step was.

        Raises:
            InputError: On all ranks, if rank 0 cannot write the file.
        """
        if self._is_finished:
            return self.summary
        self._is_finished = True
        mesh = self._mesh
        recording = mesh.trace.take(rank=mesh.rank, host=mesh.topology.host(mesh.rank))
        offset, error = self._clock
        drift = self._clocks.measure()[0] - offset if self._seen > self._skip else 0
        recording.clock = Clock(offset_ns=offset, error_ns=error, drift_ns=drift)
        recording.sent = self._sent
        recordings = mesh.gather_objects(recording, edge=None)
        self.summary = summarise(recordings)
        if self.summary is not None:
            self._on_rank_0(lambda: self._write(recordings))
        return self.summary

    def _add_bytes(self) -> None:
        for edge, links in self._mesh.ledger.by_edge().items():
            for link, amount in links.items():
                more = amount - self._before.get(edge, {}).get(link, 0)
                if more:
                    total = self._sent.setdefault(edge, {})
                    total[link] = total.get(link, 0) + more

    def _write(self, recordings: list[Recording]) -> None:
        write_whole(self.path, json.dumps(chrome_trace(recordings)))

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        """`agreement.on_rank_0`, without a trace in the ledger."""
        problem = attempt(work)[1] if self._mesh.rank == 0 else None
        problem = self._mesh.gather_objects(problem, edge=None)[0]
        if problem is not None:
            raise problem
