"""The trace of a run: named phases, waits and exchanges in flight of every rank, on one clock."""

from rowmesh.trace.recorder import Recorder
from rowmesh.trace.recording import Clock, Flight, Recording, Span

__all__ = ["Clock", "Flight", "Recorder", "Recording", "Span"]
