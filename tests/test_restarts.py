"""A new attempt of torchrun's goes on where the one before was killed, with the same bits."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.processes import ROOT, environment, finish, start_ranks
from tests.sources import write_recipe

OPTIONS = ["--json", "--set", "training.tensorboard=false", "--set", "training.steps=12"]
SAVING = ["--set", "checkpoint.every=2", "--set", "training.log_every=1"]
SCRIPT = Path(__file__).parent / "scripts" / "restarting.py"


def attempt(words: Sequence[str], store: TCPStore, number: int, *, launch: str) -> list[Any]:
    """Exit code, stdout and stderr of two ranks, with an agent's store that outlives them."""
    agent = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    agent |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": launch}
    counts = [number, max(number - 1, 0)]  # as with two agents, of which one lost its rank
    each = [agent | {"TORCHELASTIC_RESTART_COUNT": str(count)} for count in counts[::-1]]
    return [finish(rank) for rank in start_ranks(words, ranks=2, each=each, cwd=ROOT)]


def saved(folder: Path) -> dict[str, Any]:
    """Shapes and checksums in the last checkpoint; but not of generators that others draw from."""
    last = sorted((folder / "checkpoints").iterdir())[-1]
    tensors = json.loads((last / "metadata.json").read_text())["tensors"]
    return {name: entry for name, entry in tensors.items() if not name.startswith("random.")}


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    """The folder of a run in which nobody dies."""
    (tmp_path / "calm").mkdir()
    recipe, folder = write_recipe(tmp_path / "calm", "well"), tmp_path / "calm" / "run"
    words = ["rowmesh", "train", str(recipe), "--folder", str(folder), *OPTIONS, *SAVING]
    assert [finish(rank)[0] for rank in start_ranks(words, ranks=2, cwd=ROOT)] == [0, 0]
    return folder


def test_a_new_attempt_goes_on_from_the_last_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    recipe, folder = write_recipe(tmp_path, "die", at=7), tmp_path / "run"
    words = ["rowmesh", "train", str(recipe), "--folder", str(folder), *OPTIONS, *SAVING]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for number in range(2):
        (code, out, err), (killed, _, _) = attempt(words, store, number, launch="a")
        assert (code, killed, out) == (1, -9, ""), err
        assert err.startswith("rowmesh: rank 1 is gone"), err
    (code, out, err), _ = attempt(words, store, 3, launch="a")
    assert (code, err) == (0, "")
    assert json.loads(out)["steps"] == 12
    assert saved(folder) == saved(undisturbed)
    assert losses(folder) == losses(undisturbed)
    other = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for code, _, err in attempt(words, other, 3, launch="a"):  # of that name, but not that launch
        assert code == 2, err


def test_a_new_attempt_begins_anew_where_nothing_was_saved(tmp_path: Path) -> None:
    recipe, folder = write_recipe(tmp_path, "die", at=3), tmp_path / "run"
    words = ["rowmesh", "train", str(recipe), "--folder", str(folder), *OPTIONS]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert attempt(words, store, 0, launch="b")[1][0] == -9
    (code, out, err), _ = attempt(words, store, 3, launch="b")
    assert (code, err) == (0, "")
    assert json.loads(out)["steps"] == 12


def torchrun(words: Sequence[str], *, agents: int) -> list[Any]:
    """Exit code, stdout and stderr of each agent, which have two ranks in all."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={2 // agents}"]
    command += [f"--nnodes={agents}", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=x"]
    command += [f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost"]
    started = [
        subprocess.Popen(
            [*command, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )
        for _ in range(agents)
    ]
    return [finish(agent, timeout=300) for agent in started]


@pytest.mark.nightly
@pytest.mark.parametrize("agents", [1, 2])
def test_restarts_by_torchrun_itself(agents: int, undisturbed: Path, tmp_path: Path) -> None:
    recipe, folder = write_recipe(tmp_path, "die", at=7), tmp_path / "run"
    words = ["-m", "rowmesh.cli", "train", str(recipe), "--folder", str(folder), *OPTIONS, *SAVING]
    ended = torchrun(words, agents=agents)
    assert [code for code, _, _ in ended] == [0] * agents, ended
    assert saved(folder) == saved(undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("agents", [1, 2])
def test_own_scripts_survive_restarts(agents: int, tmp_path: Path) -> None:
    ended = torchrun([str(SCRIPT), str(tmp_path)], agents=agents)
    assert [code for code, _, _ in ended] == [0] * agents, ended
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["1.0", "1.0"]
