"""One rank's bad input, exception or death ends all ranks with its sentence, within seconds."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rowmesh.comm.status import Bulletin
from tests.processes import finish, start_ranks

SCRIPT = Path(__file__).parent / "scripts" / "failing.py"
LEAVING = Path(__file__).parent / "scripts" / "leaving.py"
LIMIT_S = 30.0  # on a busy machine; the time-out of 60 s would be too late
TIMEOUT_S = 90.0


def run(how: str, folder: Path, *, ranks: int, launcher: str) -> tuple[Any, list[str], float]:
    """Exit codes, stderr of every rank, and seconds from the event to the end of all ranks."""
    codes, errors = (by_torchrun if launcher == "torchrun" else alone)(how, folder, ranks)
    ended = time.time()
    event = folder / "event"
    passed = ended - float(event.read_text()) if event.exists() else 0.0
    assert len(errors) == ranks
    return codes, errors, passed


def alone(how: str, folder: Path, ranks: int) -> tuple[list[int | None], list[str]]:
    """No launcher ends a rank: each learns from the others what happened, save who sleeps."""
    started = start_ranks([str(SCRIPT), how, str(folder)], ranks=ranks)
    ended = [finish(rank, timeout=TIMEOUT_S) for rank in started]
    return [code for code, _, _ in ended], [err for _, _, err in ended]


def by_torchrun(how: str, folder: Path, ranks: int) -> tuple[list[int | None], list[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["--redirects=3", f"--log-dir={folder / 'logs'}"]
    done = subprocess.run(
        [*command, str(SCRIPT), how, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    logs = sorted((folder / "logs").glob("*/attempt_0/*/stderr.log"))
    return [done.returncode] * ranks, [log.read_text() for log in logs]


SENTENCES = {
    "bad-id": "feature 'item', sample 2: id 100 is outside table 'items' (100 rows)",
    "loader": "rank 1 failed: OSError: the disk with part-7 is gone",
    "loader-late": "rank 1 failed: OSError: the disk with part-7 is gone",
    "killed": "rank 1 is gone",
    "traced": "rank 1 is gone",
    "silent": "rank 1 did not answer rank",
    "short-plain": "rank 1 finished after 3 training steps",
    "short-picky": (
        "rank 1 failed: RuntimeError: cannot reshape tensor of 0 elements into shape [0, -1] "
        "because the unspecified dimension size -1 can be any value and is ambiguous (this rank's "
        "loader had ended before others', and it was at the batch that stands in for more, of 0 "
        "samples unless empty= gave another: if the model cannot run that, say "
        "batches(loader, empty=...)"
    ),
}


THREE_RANKS = ("killed", "loader", "loader-late", "silent", "traced")
# torchrun, which imports torch once more than it has ranks, ends those that others outlive
RUNS = [
    *((how, "alone") for how in SENTENCES),
    *(pytest.param(how, "torchrun", marks=pytest.mark.nightly) for how in SENTENCES),
]
LAUNCHERS = ["alone", pytest.param("torchrun", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Any, Any]]:
    """All runs, two at a time: most of each is start-up and waiting."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [call.params for call in calls if call is not None and "launcher" in call.params]
    wanted = {(params.get("how", "short"), params["launcher"]) for params in chosen}
    folders = {which: tmp_path_factory.mktemp("-".join(which)) for which in sorted(wanted)}
    with ThreadPoolExecutor(max_workers=2) as workers:
        runs = {
            (how, launcher): workers.submit(
                run, how, folder, ranks=3 if how in THREE_RANKS else 2, launcher=launcher
            )
            for (how, launcher), folder in folders.items()
        }
        yield {which: (folders[which], done.result()) for which, done in runs.items()}


@pytest.mark.parametrize(("how", "launcher"), RUNS)
def test_every_rank_ends_with_the_one_true_sentence(
    how: str, launcher: str, outcomes: dict[Any, Any]
) -> None:
    _, (codes, errors, passed) = outcomes[how, launcher]
    assert passed < LIMIT_S
    for rank, (code, text) in enumerate(zip(codes, errors, strict=True)):
        if rank != 1 or how == "bad-id":
            assert code != 0
            assert SENTENCES[how] in text, f"rank {rank}:\n{text}"
    if how == "short-picky":
        assert "(this rank's loader had ended before others'" in errors[1]
    if how.startswith("loader"):
        assert "the disk with part-7 is gone" in errors[1]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_loaders_of_different_length_end_together(launcher: str, outcomes: dict[Any, Any]) -> None:
    folder, (codes, errors, _) = outcomes["short", launcher]
    assert codes == [0, 0], errors
    assert [(folder / f"steps-{rank}").read_text() for rank in range(2)] == ["8", "8"]


@pytest.mark.parametrize("how", ["late", "nobody", "full"])
def test_a_rank_leaves_when_others_have_what_it_sent_or_have_left_too(
    how: str, tmp_path: Path
) -> None:
    started = start_ranks([str(LEAVING), how, str(tmp_path)], ranks=2)
    ended = [finish(rank, timeout=TIMEOUT_S) for rank in started]
    now = time.time()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert (tmp_path / "received").exists() == (how == "late")
    ending = max(float((tmp_path / f"ending-{rank}").read_text()) for rank in range(2))
    assert now - ending < 15.0, "the time-out is 30 s"


def test_without_a_store_nobody_is_said_to_be_dead() -> None:
    store = mock.Mock(**{"check.side_effect": RuntimeError("connection reset")})
    error = Bulletin(store, 2).explain(RuntimeError("closed"), peer=3, where="exchange 'x', step 1")
    assert str(error).startswith("rank 2 lost rank 3 during exchange 'x', step 1; why is not known")
