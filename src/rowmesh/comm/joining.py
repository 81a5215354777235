"""How ranks meet: the store they share, and who has come before anything is built on it."""

import os
import secrets
import time
from collections import Counter
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from rowmesh.errors import InputError, PeerError

__all__ = ["STORE_FILE", "is_kept_by", "meet", "open_store", "secret_of"]

STORE_FILE = "ROWMESH_STORE_FILE"  # environment: ranks of one host meet in this file, not a port
_PAUSE_S = 0.005  # between two looks who is there: doubled up to what one store can answer
_LONGEST_PAUSE_S, _PAUSE_A_RANK_S = 0.05, 1e-4
_GRACE_S = 3.0  # for others to hear of a failure before their store goes
_NAMED = 8  # ranks in a sentence, at most


def is_kept_by(rank: int) -> bool:
    """Whether the store ends with the process of ``rank``: no agent and no file keeps it."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return rank == 0 and not has_agent and STORE_FILE not in os.environ


def open_store(*, timeout_s: float) -> tuple[Store, int, int]:
    """The store of this launch's ranks, this rank, and how many there are.

    From the environment that torchrun, or `rowmesh.train.launch`, gives its ranks.

    Raises:
        PeerError: If the store cannot be reached.
    """
    names = ("RANK", "WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if STORE_FILE not in os.environ:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE is set, but {', '.join(missing)} is not: start the ranks with torchrun, "
            f"or unset WORLD_SIZE for one process"
        )
    rank, world = (int(os.environ[name]) for name in names)
    if STORE_FILE in os.environ:
        return FileStore(os.environ[STORE_FILE], world), rank, world
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(
            host,
            port,
            is_master=is_kept_by(rank),
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,  # `meet` waits, and says who is missing
            multi_tenant=True,
        )
    except RuntimeError as error:
        keeper = "rank 0" if is_kept_by(0) else "torchrun's agent"
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"rank {rank} cannot reach {keeper} at {host}:{port}, where all ranks meet: {reason}"
        ) from None
    return store, rank, world


def meet(store: Store, *, rank: int, world: int, hosts: int | None, timeout_s: float) -> Store:
    """Return when all ranks are here and mean the same hosts.

    What a store holds may come from ranks that are dead: torchrun's restarts use one store, and
    its agents count them differently. So rank 0 names each meeting anew, and completes it when all
    ranks have come under that name; one that is over before a rank has come is an old one.

    Args:
        store: Of this launch.
        rank: This one.
        world: How many are expected.
        hosts: What this rank takes for their number, or None for what torchrun says.
        timeout_s: How long to wait for the others.

    Returns:
        The part of the store that is this meeting's alone.

    Raises:
        PeerError: Naming who did not come.
        InputError: If hosts have different numbers of ranks, on all ranks.

    Collective:
        All ranks.
    """
    store = PrefixStore("rowmesh", store)
    if rank == 0:
        store.set("meeting", secrets.token_hex(8))
    local = os.environ.get("LOCAL_WORLD_SIZE", str(world))
    shape = f"ranks-per-host={local}" if hosts is None else f"hosts={hosts}"
    mine: Store | None = None
    name, begin, pause = "", time.monotonic(), _PAUSE_S
    try:
        while mine is None or not mine.check(["complete"]):  # in Python: Ctrl-C has its say
            latest = store.get("meeting").decode() if store.check(["meeting"]) else name
            if latest != name and not _is_over(other := PrefixStore(latest, store)):
                name, mine = latest, other
                _arrive(mine, rank, shape)
            if rank == 0 and mine is not None and mine.add("arrived", 0) == world:
                mine.set("complete", secrets.token_hex(32))
                break
            _check_failure(mine, rank)
            if time.monotonic() - begin > timeout_s:
                raise _failed(mine, rank, _absent(mine, rank, world, timeout_s))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S + world * _PAUSE_A_RANK_S)
        assert mine is not None
        if mine.add(f"shape/{shape}", 0) != world:
            shapes = [mine.get(f"arrived/{r}").decode() for r in range(world)]
            _hear(mine, rank)
            raise InputError(_unequal(shapes))
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(
            f"rank {rank} lost the store in which ranks meet, at {_place()}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return mine


def secret_of(meeting: Store) -> bytes:
    """What only those know who can read the store: with `STORE_FILE`, this user's processes."""
    return bytes(meeting.get("complete"))


def _check_failure(meeting: Store | None, rank: int) -> None:
    """Raise what another rank gave up with, so that nobody waits longer than the first."""
    if meeting is not None and meeting.check(["failure"]):
        _hear(meeting, rank)
        raise PeerError(meeting.get("failure").decode())


def _failed(meeting: Store | None, rank: int, sentence: str) -> PeerError:
    if meeting is not None:
        meeting.set("failure", sentence)
        _hear(meeting, rank)
    return PeerError(sentence)


def _hear(meeting: Store, rank: int) -> None:
    """Note that this rank knows why it ends; rank 0, which may keep the store, waits for others."""
    num_heard, deadline = meeting.add("heard", 1), time.monotonic() + _GRACE_S
    while is_kept_by(rank) and num_heard < meeting.add("arrived", 0):
        if time.monotonic() > deadline:
            return
        time.sleep(_LONGEST_PAUSE_S)
        num_heard = meeting.add("heard", 0)


def _is_over(meeting: Store) -> bool:
    return bool(meeting.check(["complete"]) or meeting.check(["failure"]))


def _arrive(meeting: Store, rank: int, shape: str) -> None:
    meeting.set(f"arrived/{rank}", shape)
    meeting.add(f"shape/{shape}", 1)
    meeting.add("arrived", 1)


def _absent(meeting: Store | None, rank: int, world: int, timeout_s: float) -> str:
    absent = [0]  # has not named a meeting
    if meeting is not None:
        absent = [r for r in range(world) if not meeting.check([f"arrived/{r}"])]
    here = [r for r in range(world) if r not in absent] if meeting is not None else [rank]
    are = "is" if len(here) == 1 else "are"
    return (
        f"{_name(absent)} did not join within {timeout_s:g} s ({_name(here)} {are} there): see "
        f"what {'it' if len(absent) == 1 else 'they'} printed last, and whether {_place()} can be "
        f"reached from there"
    )


def _name(ranks: list[int]) -> str:
    words = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {words}{more}"


def _place() -> str:
    address = os.environ.get("MASTER_ADDR")
    return f"{address}:{os.environ.get('MASTER_PORT')}" if address else "this host's store"


def _unequal(shapes: list[str]) -> str:
    """What to say of ``shapes``, one a rank."""
    sizes = Counter(shapes)
    if all(shape.startswith("ranks-per-host=") for shape in sizes):
        found = {int(shape.partition("=")[2]): count for shape, count in sizes.items()}
        hosts = [size for size, count in found.items() for _ in range(max(count // size, 1))]
        *most, last = map(str, sorted(hosts, reverse=True))
        return (
            f"hosts have {', '.join(most)} and {last} ranks, but every host needs as many: start "
            f"each with the same --nproc-per-node"
        )
    told = "; ".join(f"{shape} on {_name(_who(shapes, shape))}" for shape in sizes)
    return f"ranks mean different hosts: {told}: give init_mesh the same hosts on all of them"


def _who(shapes: list[str], shape: str) -> list[int]:
    return [rank for rank, theirs in enumerate(shapes) if theirs == shape]
