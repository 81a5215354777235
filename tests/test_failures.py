"""One rank's bad input, exception or death ends all ranks with its sentence, within seconds."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "failing.py"
LIMIT_S = 10.0
SILENT_S = 15.0  # its time-out of 4 s comes first


def run(how: str, folder: Path, *, ranks: int = 2) -> tuple[int, list[str], float]:
    """Exit code, stderr of every rank, and seconds from the event to the end of all ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += ["--redirects=3", f"--log-dir={folder / 'logs'}"]
    done = subprocess.run(
        [*command, str(SCRIPT), how, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=90,
        check=False,
    )
    ended = time.time()
    event = folder / "event"
    passed = ended - float(event.read_text()) if event.exists() else 0.0
    logs = sorted((folder / "logs").glob("*/attempt_0/*/stderr.log"))
    assert len(logs) == ranks
    return done.returncode, [log.read_text() for log in logs], passed


SENTENCES = {
    "bad-id": "feature 'item', sample 2: id 100 is outside table 'items' (100 rows)",
    "loader": "rank 1 failed: OSError: the disk with part-7 is gone",
    "killed": "rank 1 is gone",
    "traced": "rank 1 is gone",
    "silent": "rank 1 did not answer rank",
    "short-plain": "rank 1 finished after 3 training steps",
}


# starts are slow, and these end as others do
NIGHTLY = ("bad-id", "loader", "short-plain", "short", "silent", "traced")
THREE_RANKS = ("killed", "loader", "traced")


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Any]]:
    """All runs, two at a time: most of each is start-up and waiting."""
    chosen = " ".join(item.nodeid for item in request.session.items)
    wanted = [how for how in SENTENCES if f"[{how}]" in chosen]
    wanted += ["short"] if "different_length" in chosen else []
    folders = {how: tmp_path_factory.mktemp(how) for how in wanted}
    with ThreadPoolExecutor(max_workers=2) as workers:
        runs = {
            how: workers.submit(run, how, folder, ranks=3 if how in THREE_RANKS else 2)
            for how, folder in folders.items()
        }
        yield {how: (folders[how], done.result()) for how, done in runs.items()}


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=pytest.mark.nightly if how in NIGHTLY else ()) for how in SENTENCES],
)
def test_every_rank_ends_with_the_one_true_sentence(how: str, outcomes: dict[str, Any]) -> None:
    _, (code, errors, passed) = outcomes[how]
    assert code != 0
    assert passed < (SILENT_S if how == "silent" else LIMIT_S)
    for rank, text in enumerate(errors):
        if rank != 1 or how == "bad-id":
            assert SENTENCES[how] in text, f"rank {rank}:\n{text}"
    if how == "loader":
        assert "the disk with part-7 is gone" in errors[1]


@pytest.mark.nightly
def test_loaders_of_different_length_end_together(outcomes: dict[str, Any]) -> None:
    folder, (code, errors, _) = outcomes["short"]
    assert code == 0, errors
    assert [(folder / f"steps-{rank}").read_text() for rank in range(2)] == ["8", "8"]
