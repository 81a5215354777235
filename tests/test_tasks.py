"""`Mesh.later`: what threads give, and who waits for it in a trace."""

import functools
import gc
import threading

import pytest

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.comm.tasks import Threads


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


class Channels:
    """Stands for a model's."""


def test_end_waits_for_work_of_a_model_that_nobody_else_holds() -> None:
    threads, of, go, seen = Threads(), Channels(), threading.Event(), []

    def work(of: Channels) -> None:
        go.wait(10)
        seen.append(type(of))

    threads.submit("sums", functools.partial(work, of), of=of)
    del of
    gc.collect()
    threading.Timer(0.2, go.set).start()
    threads.end()
    assert seen == [Channels]


def test_threads_end_with_their_model() -> None:
    threads, of = Threads(), Channels()
    thread = threads.submit("sums", threading.current_thread, of=of).result()
    del of
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
