"""TorchRec's own models and modules, in an environment of their own that is made by package names.

Set ROWMESH_TORCHREC to the interpreter of one that is there.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.racing import peer

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def python() -> str:
    return os.environ.get("ROWMESH_TORCHREC") or peer.ensure(peer.default_folder())


def run(*command: str) -> Any:
    """What the program says in its last line."""
    named = ("WORLD_SIZE", "RANK", "PYTHONWARNINGS")
    env = {k: v for k, v in os.environ.items() if k not in named}
    env |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("world", [2, 4])
def test_torchrecs_models_are_trained_as_the_originals_in_float64(python: str, world: int) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    script = str(SCRIPTS / "torchrec_models.py")
    found = run(python, *launch, f"--nproc-per-node={world}", script)
    names = {name.split()[0] for name in found}
    assert {"DLRM", "DLRM_DCN", "SimpleDeepFMNN", "DLRMTrain", "OwnArch"} <= names
    for name, case in found.items():
        assert case["weights"] < 1e-5, (name, case)
        assert case["losses"] < 1e-5, (name, case)
        assert case["moved"] > 0.1, f"{name} has learned nothing"
        assert case["verified"], (name, case["said"])


def test_what_is_not_carried_over_is_refused_by_name(python: str) -> None:
    found = run(python, str(SCRIPTS / "torchrec_refused.py"))
    expected = {
        "own forward": ("'sparse'", "OwnForward", "into a module around one"),
        "collisions": ("'sparse.", "ManagedCollisionEmbeddingBagCollection", "use one of these"),
        "pruned": ("'sparse'", "ITEPEmbeddingBagCollection", "use one of these"),
        "processed": ("'sparse'", "FeatureProcessedEmbeddingBagCollection", "freeze them"),
        "fused": ("'sparse'", "FusedEmbeddingBagCollection", "use one of these"),
        "quantised": ("'sparse'", "torchrec.quant", "use one of these"),
        "sharded": ("'sparse.", "ShardedEmbeddingBagCollection", "before DistributedModelParallel"),
        "in backward": ("'t'", "optimiser applied in backward", "rm.Optimizer"),
        "tied": ("'t'", "sparse.1.embedding_bags.u", "let all its features read one table"),
        "bf16": ("'t'", "torch.float16", "set its data_type"),
        "variable batch": ("batch sizes of their own", "as many samples"),
    }
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        assert found[name].startswith("InputError: "), (name, found[name])
        assert [word for word in words if word not in found[name]] == [], found[name]
