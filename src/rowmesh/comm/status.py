"""The failure protocol: one rank's sentence reaches every rank.

Bad input is announced in the status word of the step's first message, so all ranks raise the
same error at the same step and may go on. Anything else is published in the store before the
process ends; ranks that then lose the connection look there first.
"""

import contextlib
import time
from collections.abc import Iterator

from torch.distributed.distributed_c10d import Store

from rowmesh.errors import InputError, PeerError, RowmeshError, StepError

__all__ = ["Bulletin", "sentence_of"]

_GRACE_S = 3.0  # how long a rank that lost a peer waits for that peer's own words
_LATE_S = 0.3  # and one whose time is up: it knows as much as anyone, and its lanes are closed


def sentence_of(error: BaseException) -> str:
    """``Type: message`` on one line, with what was noted on the error."""
    text = " ".join(" ".join([str(error), *getattr(error, "__notes__", ())]).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_late(error: BaseException) -> bool:
    """Whether a wait took too long; else a connection was lost."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


class Bulletin:
    """Sentences that ranks leave for each other in the store, under this attempt's keys.

    Args:
        store: Of all ranks.
        rank: This one.
        is_keeper: Whether the store ends with this process.
    """

    def __init__(self, store: Store | None, rank: int, *, is_keeper: bool = False) -> None:
        self._store, self._rank, self._is_keeper = store, rank, is_keeper
        self.is_explaining = False

    def post_input_error(self, key: str, error: RowmeshError) -> None:
        """Leave this rank's complaint about its input at step ``key``."""
        if self._store is not None:
            self._store.set(f"input/{key}/{self._rank}", f"{type(error).__name__}|{error}")

    def input_error(self, key: str, rank: int) -> RowmeshError:
        """What ``rank`` left with `post_input_error`, as the error that all ranks raise."""
        assert self._store is not None
        left = self._store.get(f"input/{key}/{rank}").decode()
        name, _, sentence = left.partition("|")
        kind = StepError if name == StepError.__name__ else InputError
        return kind(f"rank {rank}: {sentence}")

    def publish(self, sentence: str) -> str:
        """Make ``sentence`` the cause all ranks report, unless one was published before.

        Returns:
            The sentence that counts: the first one published.
        """
        with self._reachable():
            assert self._store is not None
            if self._store.add("failure/claims", 1) == 1:
                self._store.set("failure/sentence", sentence)
            return self.published(wait_s=1.0) or sentence
        return sentence

    def published(self, *, wait_s: float = 0.0) -> str | None:
        """The published cause, waiting up to ``wait_s`` for it."""
        with self._reachable():
            assert self._store is not None
            deadline = time.monotonic() + wait_s
            while not self._store.check(["failure/sentence"]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(0.02)
            return str(self._store.get("failure/sentence").decode())
        return None

    def leave(self, num_steps: int) -> None:
        """Note that this rank ended its work normally after ``num_steps`` training forwards."""
        with self._reachable():
            assert self._store is not None
            self._store.set(f"left/{self._rank}", str(num_steps))

    def has_left(self, rank: int) -> bool:
        """Whether ``rank`` waits for nothing more; true if the store is gone."""
        with self._reachable():
            assert self._store is not None
            return bool(self._store.check([f"left/{rank}"]))
        return True

    def hear(self, world: int) -> None:
        """Note that this rank ends because of a failure; who keeps the store stays for the others.

        Not for long: some may have been killed.
        """
        with self._reachable():
            assert self._store is not None
            self._store.set(f"heard/{self._rank}", "")
            waiting = [*range(world)] if self._is_keeper else []
            deadline = time.monotonic() + _GRACE_S
            while waiting and time.monotonic() < deadline:
                waiting = [rank for rank in waiting if not self._has_ended(rank)]
                time.sleep(0.02)

    def _has_ended(self, rank: int) -> bool:
        assert self._store is not None
        return any(self._store.check([f"{key}/{rank}"]) for key in ("heard", "left"))

    def explain(self, error: BaseException, *, peer: int, where: str) -> PeerError:
        """The error to raise after a transport error or time-out while waiting for ``peer``."""
        self.is_explaining = True
        sentence = self.published(wait_s=_LATE_S if _is_late(error) else _GRACE_S)
        if sentence is None:
            sentence = self.publish(self._guess(error, peer, where))
        return PeerError(sentence)

    def _guess(self, error: BaseException, peer: int, where: str) -> str:
        with self._reachable():
            assert self._store is not None
            if self._store.check([f"left/{peer}"]):
                steps = self._store.get(f"left/{peer}").decode()
                return (
                    f"rank {peer} finished after {steps} training steps (its program ended, or "
                    f"called sys.exit) while rank {self._rank} still had batches: if loaders "
                    f"differ in length, iterate over mesh.batches(loader)"
                )
            if _is_late(error):
                return f"rank {peer} did not answer rank {self._rank} in time during {where}"
            return (
                f"rank {peer} is gone: its connection to rank {self._rank} closed during {where}, "
                f"and it left no message (killed, or crashed outside Python)"
            )
        return (
            f"rank {self._rank} lost rank {peer} during {where}; why is not known here, for the "
            f"process that kept the messages of all ranks has ended: see what rank 0 says"
        )

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        """Swallow the errors of a store that is gone or was never there."""
        with contextlib.suppress(RuntimeError, AssertionError):
            yield
