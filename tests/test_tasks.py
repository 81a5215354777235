"""`Mesh.later`: what threads give, and who waits for it in a trace."""

import threading

import pytest

import rowmesh as rm
from rowmesh.comm.mesh import Mesh


@pytest.fixture
def mesh() -> Mesh:
    return rm.init_mesh()


def waits_of(mesh: Mesh) -> list[str]:
    mesh.trace.end_step()
    return [s.name for s in mesh.trace.take(rank=0, host=0).spans if s.kind == "wait"]


def test_a_wait_for_a_thread_is_in_the_trace_and_a_result_that_is_there_is_not(mesh: Mesh) -> None:
    go = threading.Event()
    task = mesh.later("sums", lambda: go.wait(10) and "found", of=mesh)
    mesh.trace.begin_step(0)
    timer = threading.Timer(0.05, go.set)
    timer.start()
    assert task.result() == "found"
    timer.join()
    assert task.done()
    assert task.result() == "found"
    assert waits_of(mesh) == ["sums"]


def test_what_a_thread_raises_is_raised_by_its_result(mesh: Mesh) -> None:
    def fail() -> None:
        raise ValueError("no sums")

    task = mesh.later("sums", fail, of=mesh)
    with pytest.raises(ValueError, match="no sums"):
        task.result()
