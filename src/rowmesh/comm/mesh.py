"""The mesh: the only file that makes process groups, and what a training loop needs of it."""

import functools
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from rowmesh.comm.ending import watch_end
from rowmesh.comm.exchange import Channel, Lane, Wire
from rowmesh.comm.ledger import Ledger
from rowmesh.comm.loops import Loops
from rowmesh.comm.shared import open_segment, why_not_shared
from rowmesh.comm.status import Bulletin, sentence_of
from rowmesh.comm.tasks import Task, Threads
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
        self._totals: Channel = self.wire.channel("totals", Lane.CONTROL)
        self._gathers: Channel = self.wire.channel("gather", Lane.CONTROL)
        self._uses = {"totals": 0, "gather": 0}
        self._threads = Threads()
        self._samples: tuple[int, int] | None = None
        self._said: set[str] = set()
        self.loops = Loops()
        self.num_forwards = 0

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
            batch of samples: all ranks, one 8-byte sum of the numbers of losses.
        """
        _check_losses(losses, is_mean=is_mean)
        if is_mean:
            if count is not None or self._samples is None:
                raise InputError(
                    "mean(is_mean=True) takes the numbers of samples from the forward of a sharded "
                    "collection before it, and no count="
                )
            return share_of_mean(losses, *self._samples, is_mean=True)
        if count is None and self._samples is not None:
            local, count = self._samples
            if len(losses) != local:
                raise InputError(
                    f"mean got {len(losses)} losses for a batch of {local} samples: return one "
                    f"loss per sample, or say mean(losses, count=int(mesh.total(len(losses))))"
                )
        if count is None:
            count = int(self.total(len(losses)))
        return share_of_mean(losses, len(losses), count)

    def total(self, value: float | Tensor, *, edge: str | None = "counts") -> Tensor:
        """The sum of ``value`` over ranks, added in rank order: the same bits everywhere.

        Args:
            value: Of this rank.
            edge: The ledger's, or None for what is no part of training.

        Collective:
            All ranks, with tensors of one shape and dtype.
        """
        mine = torch.as_tensor(value, device=self.device).detach()
        if mine.dtype in (torch.int32, torch.bool):
            mine = mine.long()
        flat = mine.reshape(-1).contiguous()
        found = torch.empty((self.world, flat.numel()), dtype=flat.dtype, device=flat.device)
        found[self.rank] = flat
        self._post("totals", [(p, flat) for p in self.peers()], found, edge)
        result = found[0].clone()
        for part in found[1:]:
            result += part
        return result.view(mine.shape)

    def _post(
        self,
        use: str,
        sends: list[tuple[int, Tensor]],
        found: Tensor | list[Tensor],
        edge: str | None,
    ) -> None:
        channel = self._totals if use == "totals" else self._gathers
        self._uses[use] += 1
        channel.post(
            self._uses[use],
            sends=sends,
            receives=[(p, found[p]) for p in self.peers()],
            edge=edge,
        ).wait()

    def gather_objects(self, value: Any, *, edge: str | None = "counts") -> list[Any]:
        """``value`` of every rank, in rank order; pickled, so only among one program's ranks.

        Args:
            value: Of this rank.
            edge: As for `total`.

        Collective:
            All ranks.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        data = data.to(self.device)
        sizes = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(data)
        sizes = self.total(sizes, edge=edge)
        found = [data.new_empty(int(n)) for n in sizes.tolist()]
        found[self.rank] = data
        self._post("gather", [(p, data) for p in self.peers()], found, edge)
        return [pickle.loads(part.cpu().numpy().tobytes()) for part in found]

    def batches(self, loader: Iterable[T], *, empty: T | None = None) -> Iterator[T]:
        """The batches of ``loader``; empty ones once it has ended, until every rank's has.

        Reads one batch ahead. Whether this is a rank's last batch travels in the status word of
        the step's counts, so that ranks with loaders of different length end after the same step.

        Args:
            loader: This rank's batches.
            empty: What to go on with; by default the last batch cut to no samples. For a model that
                cannot run those: a batch that it can, whose losses you leave out (`is_stand_in`).

        Collective:
            All ranks iterate; a step that runs no forward costs one 8-byte sum.
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
        if not isinstance(error, PeerError):
            self.loops.explain(error)
            self.bulletin.publish(f"rank {self.rank} failed: {sentence_of(error)}")
        self.bulletin.hear(self.world)

    def end_threads(self) -> None:
        """Wait until the communication threads have done what is under way, and end them.

        They post as they go on, and peers wait for that: lanes and segment stay until then.
        """
        self._threads.end()

    def close(self) -> None:
        """Note that this rank ended normally, and wait until peers have what was sent to them."""
        self.end_threads()
        self.bulletin.leave(self.num_forwards)
        self.wire.close()

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
        device: Default ``cuda:LOCAL_RANK`` where CUDA is, else ``cpu``.
        debug: Check a header with every message; default the environment's ROWMESH_DEBUG.
        shared_memory: Whether CPU ranks of a host use shared memory instead of gloo, where it can
            be had; default unless the environment has ROWMESH_SHARED_MEMORY=0.

    Collective:
        All ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    debug = os.environ.get("ROWMESH_DEBUG", "") not in ("", "0") if debug is None else debug
    if shared_memory is None:
        shared_memory = why_not_shared() is None
    if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
        return Mesh(topology=Topology(), rank=0, lanes={}, device=device, debug=debug)
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    hosts = world // local if hosts is None else hosts
    if hosts < 1 or world % hosts:
        raise InputError(f"{world} ranks do not divide into {hosts} hosts")
    lanes = make_lanes(list(range(world)), timeout=timeout) if world > 1 else {}
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"rowmesh/{attempt}", _get_default_store())
    number = store.add(f"meshes/{rank}", 1)  # of this program, the same on all ranks
    mesh = Mesh(
        topology=Topology(hosts=hosts, local=world // hosts),
        rank=rank,
        lanes=lanes,
        store=PrefixStore(f"mesh/{number}", store),
        device=device,
        debug=debug,
        keeps_store=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )
    watch_end(mesh.bulletin, rank=rank, fail=mesh.fail, close=mesh.close)
    if mesh.topology.local > 1:
        mesh.wire.segment = open_segment(
            functools.partial(mesh.gather_objects, edge=None),
            topology=mesh.topology,
            rank=rank,
            timeout_s=timeout_s,
            is_wanted=shared_memory and device.type == "cpu",
        )
    return mesh
