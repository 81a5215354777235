"""Public models after `rm.adopt`, in an environment of their own that is made by package names.

Set ROWMESH_PUBLIC_MODELS to the interpreter of one that is there.
"""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.racing import peer

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def python() -> str:
    packages = peer.PUBLIC_MODELS
    given = os.environ.get("ROWMESH_PUBLIC_MODELS")
    return given or peer.ensure(peer.default_folder(packages), packages)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_public_models_are_trained_as_the_originals_in_float64(python: str, world: int) -> None:
    named = ("WORLD_SIZE", "RANK", "PYTHONWARNINGS")
    env = {k: v for k, v in os.environ.items() if k not in named}
    env |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    script = str(ROOT / "tests" / "scripts" / "adopted_models.py")
    done = subprocess.run(
        [python, *launch, f"--nproc-per-node={world}", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    cases = {case["model"]: case for case in map(json.loads, lines)}
    libraries = Counter(name.split(".")[0] for name in cases)
    assert libraries == {"torch_rechub": 12, "deepctr_torch": 11, "recbole": 16}
    for name, case in cases.items():
        assert case["difference"] < 1e-5, (name, case)
        assert case["moved"] > 1e-3, f"{name} has learned nothing"
        assert case["is_verified"], (name, case["verify"])
