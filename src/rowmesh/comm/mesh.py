"""The mesh: the only file that makes process groups, and what a training loop needs of it."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from rowmesh.comm.device import choose_device
from rowmesh.comm.ending import watch_end
from rowmesh.comm.exchange import Lane, Wire
from rowmesh.comm.joining import is_kept_by, meet, open_store, secret_of
from rowmesh.comm.ledger import Ledger
from rowmesh.comm.listening import Listener, open_sockets
from rowmesh.comm.loops import Loops
from rowmesh.comm.shared import open_segment, why_not_shared
from rowmesh.comm.status import Bulletin, sentence_of
from rowmesh.comm.tasks import Task, Threads
from rowmesh.comm.totals import Totals
from rowmesh.errors import InputError, PeerError, RowmeshWarning
from rowmesh.features import empty_like
from rowmesh.topology import Topology
from rowmesh.trace import Recorder

__all__ = ["Mesh", "init_mesh", "make_lanes", "share_of_mean"]

T = TypeVar("T")


class Mesh:
    """Ranks, lanes between them, and the sums a loop needs. Make it with `init_mesh`.

    Attributes:
        topology: Hosts and ranks per host.
        rank: This rank, host * local + local rank.
        device: Where this rank's tensors live.
        ledger: Bytes this rank has sent.
        trace: Records phases and messages while a trace is taken.
        loops: Its loops over batches.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        rank: int,
        lanes: Mapping[Lane, dist.ProcessGroup],
        store: Store | None = None,
        device: torch.device | str = "cpu",
        debug: bool = False,
        keeps_store: bool = False,
    ) -> None:
        self.topology, self.rank = topology, rank
        self.device = torch.device(device)
        self.ledger = Ledger(topology, rank)
        self.trace = Recorder()
        self.bulletin = Bulletin(store, rank, is_keeper=keeps_store)
        self.wire = Wire(
            rank=rank,
            world=topology.world,
            lanes=lanes,
            ledger=self.ledger,
            bulletin=self.bulletin,
            trace=self.trace,
            debug=debug,
        )
        self._totals = Totals(self.wire, self.device)
        self.listener: Listener | None = None
        self._threads = Threads()
        self._owned: list[dist.ProcessGroup] = []
        self._forget_end: Callable[[], None] = lambda: None
        self._process, self._is_closed = os.getpid(), False
        self._samples: tuple[int, int] | None = None
        self._said: set[str] = set()
        self.loops = Loops()
        self.num_forwards = self.num_means = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.topology.world

    def peers(self) -> list[int]:
        """All other ranks, starting with the next one."""
        return self.wire.peers()

    def later(self, owner: str, work: Callable[[], T], *, of: object) -> Task[T]:
        """Run ``work`` on the communication thread of ``owner``, in order.

        Only what has to wait for messages goes there. Owners have a thread each, because a wait
        of one must not hold up a message of another (docs/notes/lanes.md).

        Args:
            owner: Whose work it is.
            work: To be run.
            of: The model's channels, or what else tells owners of one name apart.
        """
        self.wire.check_open()
        return Task(self._threads.submit(owner, work, of=of), owner, self.trace)

    @property
    def is_last_batch(self) -> bool:
        """Whether the innermost `batches` loop of this rank is at its last batch."""
        loop = self.loops.innermost
        return loop is not None and loop.is_last

    @property
    def is_stand_in(self) -> bool:
        """Whether the innermost `batches` loop is past the end of this rank's loader.

        Its batch only keeps the rank beside the others: samples in it, if ``empty`` gave some, are
        nobody's.
        """
        loop = self.loops.innermost
        return loop is not None and loop.is_stand_in

    def say_once(self, text: str) -> None:
        """Warn, the first time this is said on this rank."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, RowmeshWarning, stacklevel=3)

    def saw_counts(
        self, *, samples: tuple[int, int] | None, all_last: bool, num_forwards: int
    ) -> None:
        """Take note of a forward's counts exchange: samples here and everywhere, if it told them,
        and how many training forwards its collection has run."""
        self._samples = samples
        self.num_forwards = max(self.num_forwards, num_forwards)
        self.loops.saw_forward(all_last=all_last)

    def mean(self, losses: Tensor, *, count: int | None = None, is_mean: bool = False) -> Tensor:
        """This rank's share of the mean loss: sum(losses) / B, B the global number of samples.

        The sum of the shares over ranks is the mean over the global batch, and so the plain sum
        of gradients over ranks is its gradient; nothing divides by the number of ranks. A rank
        without samples gets a zero that still has a gradient function.

        Args:
            losses: ``[b]``, one per sample of this rank.
            count: B, where it is not the number of samples of the last forward.
            is_mean: ``losses`` is one number, the mean over this rank's samples of the last
                forward, and so counts for as many. Of no samples it may be NaN.

        Collective:
            None after a forward of a sharded collection, whose counts exchange told B.
            Otherwise, and after a forward of an adopted embedding, whose ids need not be one
            batch of samples: all ranks, one `total` of the numbers of losses.
        """
        _check_losses(losses, is_mean=is_mean)
        if is_mean:
            if count is not None or self._samples is None:
                raise InputError(
                    "mean(is_mean=True) takes the numbers of samples from the forward of a sharded "
                    "collection before it (an adopted embedding's does not tell them), and no "
                    "count=: return one loss per sample"
                )
            return self._seen(share_of_mean(losses, *self._samples, is_mean=True))
        if count is None and self._samples is not None:
            local, count = self._samples
            if len(losses) != local:
                raise InputError(
                    f"mean got {len(losses)} losses for a batch of {local} samples: return one "
                    f"loss per sample, or say mean(losses, count=int(mesh.total(len(losses))))"
                )
        if count is None:
            count = int(self.total(len(losses)))
        return self._seen(share_of_mean(losses, len(losses), count))

    def _seen(self, share: Tensor) -> Tensor:
        """Note when a backward goes through ``share``: what is only shown has none."""
        if share.requires_grad:
            share.register_hook(self._count_mean)
        return share

    def _count_mean(self, grad: Tensor) -> None:
        self.num_means += 1

    def check_scaled(self, num_means: int) -> None:
        """Warn, once, in a backward that came through no `mean` since its forward.

        Args:
            num_means: That attribute, as it was then.
        """
        if self.world > 1 and self.num_means == num_means:
            self.say_once(
                f"backward without mesh.mean: gradients are summed over {self.world} ranks, so "
                f"those of loss.mean() are {self.world} times too large, and samples count "
                f"unequally where ranks have other numbers of them: call "
                f"mesh.mean(losses).backward() with one loss per sample; if you scale losses "
                f"yourself, warnings.filterwarnings('ignore', 'backward without mesh.mean')"
            )

    def total(self, value: float | Tensor, *, edge: str | None = "counts") -> Tensor:
        """The sum of ``value`` over ranks, added in rank order: the same bits everywhere.

        Args:
            value: Of this rank.
            edge: The ledger's, or None for what is no part of training.

        Raises:
            InputError: On all ranks, if they bring other dtypes or numbers of elements.

        Collective:
            All ranks, with tensors of one shape and dtype. A rank sends every other one 16 bytes,
            and what the value has beyond 8.
        """
        return self._totals.total(value, edge=edge)

    def gather_objects(self, value: Any, *, edge: str | None = "counts") -> list[Any]:
        """``value`` of every rank, in rank order; pickled, so only among one program's ranks.

        Args:
            value: Of this rank.
            edge: As for `total`.

        Collective:
            All ranks.
        """
        return self._totals.gather(value, edge=edge)

    def batches(self, loader: Iterable[T], *, empty: T | None = None) -> Iterator[T]:
        """The batches of ``loader``; empty ones once it has ended, until every rank's has.

        Reads one batch ahead. Whether this is a rank's last batch travels in the status word of
        the step's counts, so that ranks with loaders of different length end after the same step.

        Args:
            loader: This rank's batches.
            empty: What to go on with; by default the last batch cut to no samples. For a model that
                cannot run those: a batch that it can, whose losses you leave out (`is_stand_in`).

        Collective:
            All ranks iterate; a step that runs no forward costs one `total`.
        """
        iterator = iter(loader)
        batch = last = next(iterator, None)
        if batch is None and empty is None:
            raise InputError(self.no_batch())
        while True:
            with self.trace.phase("data"):
                following = next(iterator, None) if batch is not None else None
            last = batch if batch is not None else last
            with self.loops.at(is_last=following is None, is_stand_in=batch is None) as loop:
                if batch is None and empty is None:
                    empty = empty_like(last)
                yield batch if batch is not None else empty  # type: ignore[misc]
            if loop.all_last is None:  # no forward told the others
                loop.all_last = int(self.total(int(following is not None))) == 0
            if loop.all_last:
                return
            batch = following

    def no_batch(self) -> str:
        """What to say of a loader without a batch."""
        way_out = "pass batches(loader, empty=...) so that this rank can take part with no samples"
        return f"rank {self.rank}: the loader gave no batch at all; {way_out}"

    def fail(self, error: BaseException) -> None:
        """Publish ``error`` as the reason of this rank's end; the other ranks will report it."""
        if self._is_closed or os.getpid() != self._process:
            return
        if not isinstance(error, PeerError):
            self.loops.explain(error)
            self.bulletin.publish(f"rank {self.rank} failed: {sentence_of(error)}")
        self.bulletin.hear(self.world)
        self.wire.cut()  # else its threads would wait for peers that do not know yet

    def end_threads(self) -> None:
        """Wait until the communication threads have done what is under way, and end them.

        They post as they go on, and peers wait for that: lanes and segment stay until then.
        """
        self._threads.end()

    def close(self) -> None:
        """Note that this rank ended normally, and wait until peers have what was sent to them.

        What `init_mesh` opened for this mesh is closed: threads, process groups of the lanes,
        shared memory. The default process group, if it made that, stays until the process ends,
        for the next mesh. Closing twice is harmless, as is closing in a forked process: nothing
        happens.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self.end_threads()
        if self.listener is not None:
            self.listener.end()
        self.bulletin.leave(self.num_forwards)
        self.wire.close()
        self._is_closed = True
        self._forget_end()
        while self._owned:
            with contextlib.suppress(ValueError):  # the program has destroyed all groups itself
                dist.destroy_process_group(self._owned.pop())

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.fail(error)
        else:
            self.close()


def share_of_mean(losses: Tensor, local: int, total: int, *, is_mean: bool = False) -> Tensor:
    """What ``local`` of ``total`` samples add to the mean loss: see `Mesh.mean`."""
    _check_losses(losses, is_mean=is_mean)
    if not is_mean:
        return losses.sum() / max(total, 1)
    if local == 0:
        return losses.nan_to_num() * 0.0
    return losses * (local / total)


def _check_losses(losses: Tensor, *, is_mean: bool) -> None:
    shape = list(losses.shape)
    if is_mean and shape:
        raise InputError(f"mean(is_mean=True) takes one number, got shape {shape}")
    if not is_mean and len(shape) != 1:
        hint = "" if shape else ": if it is this rank's mean, say mean(loss, is_mean=True)"
        raise InputError(f"mean takes one loss per sample, got shape {shape}{hint}")


def make_lanes(ranks: list[int], *, timeout: timedelta) -> dict[Lane, dist.ProcessGroup]:
    """One process group per lane over ``ranks``; empty for ranks outside.

    Collective:
        All ranks of the program, also those outside.
    """
    groups = {lane: dist.new_group(ranks, timeout=timeout) for lane in Lane}
    return {lane: g for lane, g in groups.items() if isinstance(g, dist.ProcessGroup)}


def init_mesh(
    *,
    hosts: int | None = None,
    timeout_s: float = 60.0,
    device: torch.device | str | None = None,
    debug: bool | None = None,
    shared_memory: bool | None = None,
) -> Mesh:
    """The mesh of this program: one process, or the ranks that ``torchrun`` started.

    Hosts are torchrun's: rank = GROUP_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK; never the hostname,
    which emulated hosts share. An uncaught exception in a rank's main thread reaches all ranks.

    Args:
        hosts: Pretend the ranks are on so many hosts, in rank order (for tests and trials).
        timeout_s: How long any wait may last.
        device: ``cpu`` or ``cuda`` (of this rank: ``cuda:LOCAL_RANK``); default the environment's
            ROWMESH_DEVICE, else ``cpu``: on CUDA nothing of rowmesh has been run yet.
        debug: Check a header with every message; default the environment's ROWMESH_DEBUG.
        shared_memory: Whether CPU ranks of a host use shared memory instead of gloo, where it can
            be had; default unless the environment has ROWMESH_SHARED_MEMORY=0.

    Collective:
        All ranks.
    """
    device = choose_device(device)
    debug = os.environ.get("ROWMESH_DEBUG", "") not in ("", "0") if debug is None else debug
    if shared_memory is None:
        shared_memory = why_not_shared() is None
    if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
        return Mesh(topology=Topology(), rank=0, lanes={}, device=device, debug=debug)
    timeout, owns_default = timedelta(seconds=timeout_s), not dist.is_initialized()
    if owns_default:
        launched, rank, world = open_store(timeout_s=timeout_s)
    else:
        launched, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
    store = meet(launched, rank=rank, world=world, hosts=hosts, timeout_s=timeout_s)
    if owns_default:
        backend, theirs = "nccl" if device.type == "cuda" else "gloo", PrefixStore("group", store)
        dist.init_process_group(backend, store=theirs, rank=rank, world_size=world, timeout=timeout)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    hosts = world // local if hosts is None else hosts
    if hosts < 1 or world % hosts:
        raise InputError(f"{world} ranks do not divide into {hosts} hosts")
    before = open_sockets()
    lanes = make_lanes(list(range(world)), timeout=timeout) if world > 1 else {}
    mesh = Mesh(
        topology=Topology(hosts=hosts, local=world // hosts),
        rank=rank,
        lanes=lanes,
        store=store,
        device=device,
        debug=debug,
        keeps_store=is_kept_by(rank),
    )
    mesh._owned = list(lanes.values())
    mesh.wire.secret = secret_of(store)
    mesh.wire.sockets = {fd: which for fd, which in open_sockets().items() if fd not in before}
    mesh.listener = Listener(mesh.bulletin, mesh.wire.cut) if world > 1 else None
    mesh._forget_end = watch_end(
        mesh.bulletin, rank=rank, fail=mesh.fail, close=mesh.close, owns_default=owns_default
    )
    if mesh.topology.local > 1:
        mesh.wire.segment = open_segment(
            functools.partial(mesh.gather_objects, edge=None),
            topology=mesh.topology,
            rank=rank,
            timeout_s=timeout_s,
            is_wanted=shared_memory and device.type == "cpu",
        )
    return mesh
