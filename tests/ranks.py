"""``run_on_ranks(n, body, ...)``: run a function on n real gloo ranks and get what it returns.

One pool of WORLD workers starts on first use and serves the whole test run, so a distributed
test costs milliseconds. A body gets a fresh `Mesh` over process groups that are made once per
number of ranks, and shared memory that is made once per shape: ranks of one host use it, and with
as many hosts as ranks all is gloo. Assertions belong in the caller, on the returned values: a
failed one keeps the pool. A body that raises or hangs may leave messages behind, so the pool is
then started anew.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import multiprocessing as mp
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rowmesh.comm.mesh import Mesh, make_lanes
from rowmesh.comm.shared import Segment, open_segment
from rowmesh.errors import RowmeshError
from rowmesh.topology import Topology

WORLD = 4
_CALLS = itertools.count()
DEADLOCK = timedelta(seconds=20)  # a wait that lasts longer never ends
ARENA = 1 << 20  # bytes: small, so that some messages find it full and some are too large
SEQUENCES = 128  # that most bodies stay below
LASTING = 100  # calls that share a segment: what bodies leave in it fills it in the end
START_UP = timedelta(seconds=60)  # four processes that import torch on a busy machine


# Imported once, by the process of which all others are forks. The first optimizer of a process
# imports torch._dynamo, which takes as long as torch itself.
PRELOADED = ["torch._dynamo", "torch.distributed", "rowmesh.cli", "tests.cases"]


def warm_context() -> Any:
    """How to start processes that need not import anything; for tests of any kind."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankError(AssertionError):
    """A body raised, hung or died; the message has every rank's traceback."""


def run_on_ranks(
    num_ranks: int,
    body: Callable[..., Any],
    *args: Any,
    hosts: int = 1,
    debug: bool = True,
    shared_memory: bool = True,
) -> list[Any]:
    """``body(mesh, *args)`` on every rank; what each returned, in rank order."""
    number = next(_CALLS)
    shape = (num_ranks, hosts, shared_memory)
    call = (number, shape, debug, body.__module__, body.__name__, args)
    return _pool().run(num_ranks, pickle.dumps(call))


class _Pool:
    def __init__(self) -> None:
        ctx = warm_context()
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        atexit.register(self.kill)

    def run(self, num_ranks: int, call: bytes) -> list[Any]:
        pipes = self.pipes[:num_ranks]
        for pipe in pipes:
            pipe.send_bytes(call)
        results, errors = [], []
        for rank, pipe in enumerate(pipes):
            try:
                if pipe.poll((START_UP + 4 * DEADLOCK).total_seconds()):
                    result, error = pickle.loads(pipe.recv_bytes())
                else:
                    result, error = None, "no answer"
            except (EOFError, ConnectionResetError):
                result, error = None, "process died"
            results.append(result)
            if error:
                errors.append(f"rank {rank}: {error}")
        if errors:
            self.kill()
            raise RankError("\n".join(errors))
        return results

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(timeout=5)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []
        self.folder.cleanup()
        atexit.unregister(self.kill)
        _pool.cache_clear()


@functools.cache
def _pool() -> _Pool:
    return _Pool()


def settle(mesh: Mesh) -> None:
    """All have what will be received. What no rank receives is not waited for in the background:
    when that takes too long, gloo closes the connections, which the next body needs."""
    with contextlib.suppress(RowmeshError):  # the body has closed the mesh
        mesh.total(0, edge=None)
    mesh.wire.leaving.clear()
    mesh.wire.segment = None  # the next body's


def _serve(rank: int, store_file: str, pipe: Connection) -> None:
    gc.freeze()  # what was imported stays
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=START_UP)
    everyone = {n: make_lanes(list(range(n)), timeout=DEADLOCK) for n in (2, 3, WORLD)}
    segments: dict[tuple[int, int, bool], tuple[int, Segment | None]] = {}
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        number, shape, debug, module, name, args = pickle.loads(call)
        num_ranks, hosts, shared_memory = shape
        try:
            torch.default_generator.manual_seed(0)
            mesh = Mesh(
                topology=Topology(hosts=hosts, local=num_ranks // hosts),
                rank=rank,
                lanes=everyone.get(num_ranks, {}),
                store=dist.PrefixStore(f"call/{number}", store),
                debug=debug,
            )
            # What a body left that caught an error must not be taken for a message of this one.
            mesh.wire.numbers.first = first = number * SEQUENCES % (1 << 15)
            for channel in mesh._totals._channels:
                channel.first = first
            age, segment = segments.get(shape, (-1, None))
            if shared_memory and age != number // LASTING:
                if segment is not None:
                    segment.end.close()
                    del segments[shape], segment
                    gc.collect()  # its memory has a descriptor, too
                segment = open_segment(
                    functools.partial(mesh.gather_objects, edge=None),
                    topology=mesh.topology,
                    rank=rank,
                    timeout_s=DEADLOCK.total_seconds(),
                    arenas=(ARENA,),
                )
                segments[shape] = number // LASTING, segment
            mesh.wire.segment = segment
            result = getattr(importlib.import_module(module), name)(mesh, *args)
            mesh.end_threads()  # what they post until then goes where their peers' messages go
            if (failure := mesh.bulletin.published()) is not None:
                raise RankError(f"nobody asked a thread that failed: {failure}")
            settle(mesh)
            mesh.close()
            answer = pickle.dumps((result, None))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        pipe.send_bytes(answer)
