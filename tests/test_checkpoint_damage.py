"""Checkpoints and what goes wrong: kills, damaged bytes, full disks, hostile files."""

import ast
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.train import checkpoint
from tests.cases import Case, Collection, Table
from tests.ranks import run_on_ranks, warm_context
from tests.scripts.checkpointing import POINTS, alone, progress
from tests.test_checkpoint import different, make_case, one_rank, spoil, start, state_of, train

REPOSITORY = Path(__file__).parent.parent
KINDS = ["metadata.json", "rank_00000.bin"]


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A folder with the checkpoints of steps 1 and 2, and their states."""
    folder = tmp_path_factory.mktemp("intact")
    mesh, model, optimizer, case = one_rank()
    states = {}
    for step in (1, 2):
        train(mesh, model, optimizer, [case.batch(step, 0)])
        rm.Checkpoints(folder).save(step, model=model, optimizer=optimizer, mesh=mesh)
        states[step] = state_of(model, optimizer)
    return folder, states


def refuse(folder: Path) -> str:
    """The sentence of a load that must fail and change nothing."""
    mesh, model, optimizer, _ = one_rank()
    before = state_of(model, optimizer)
    with pytest.raises(rm.InputError) as error:
        rm.Checkpoints(folder).load(model=model, optimizer=optimizer, mesh=mesh)
    assert different(state_of(model, optimizer), before) == []
    return str(error.value)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << random.Random(at).randrange(8)
    path.write_bytes(data)


def damages(path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ways to damage a file: any bit, any length, the whole of it."""
    size = path.stat().st_size
    places = [0, 1, 80, 90, size - 1, *random.Random(7).sample(range(size), 12)]
    for at in places:
        yield f"bit at {at}", lambda at=at: flip(path, at)  # type: ignore[misc]
    for length in (0, 40, size // 2, size - 1):
        yield f"cut to {length}", lambda length=length: os.truncate(path, length)  # type: ignore[misc]
    yield "deleted", path.unlink


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_named_and_survived(
    kind: str, two_saves: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    intact, states = two_saves
    whole = tmp_path / "whole"
    shutil.copytree(intact, whole)
    path = whole / "step_000002" / kind
    mesh, model, optimizer, _ = one_rank()
    untouched = state_of(model, optimizer)
    for name, damage in damages(path):
        data = path.read_bytes()
        damage()
        with pytest.raises(rm.InputError) as error:
            rm.Checkpoints(whole).load(model=model, optimizer=optimizer, mesh=mesh)
        assert str(path) in str(error.value), name
        assert "the checkpoint of step 1 is intact: load step=1" in str(error.value), name
        path.write_bytes(data)
    assert different(state_of(model, optimizer), untouched) == []
    path.unlink()
    assert rm.Checkpoints(whole).latest() == (1 if kind == "metadata.json" else 2)
    rm.Checkpoints(whole).load(model=model, optimizer=optimizer, mesh=mesh, step=1)
    assert different(state_of(model, optimizer), states[1]) == []


def test_an_intact_one_is_looked_for_among_all(
    two_saves: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    shutil.copytree(two_saves[0], tmp_path / "all")
    for step in (1, 2):
        flip(tmp_path / "all" / f"step_00000{step}" / "rank_00000.bin", 100)
    assert refuse(tmp_path / "all").endswith("; no earlier checkpoint is intact")


def load_damaged(mesh: Mesh, folder: str) -> str:
    model, optimizer = start(mesh, make_case(mesh.world))
    spoil(model, optimizer)
    before = state_of(model, optimizer)
    try:
        rm.Checkpoints(folder).load(model=model, optimizer=optimizer, mesh=mesh)
    except rm.InputError as error:
        assert different(state_of(model, optimizer), before) == []
        return str(error)
    return "loaded"


def test_one_ranks_damage_is_every_ranks_error(tmp_path: Path) -> None:
    run_on_ranks(2, progress, str(tmp_path))
    name = "rank_00001.bin"
    path = tmp_path / "step_000002" / name
    os.truncate(path, path.stat().st_size - 1)  # the random generators of rank 1 come last
    found = run_on_ranks(2, load_damaged, str(tmp_path))
    assert found[0] == found[1]
    assert found[0].startswith(f"rank 1: {path} is damaged: the box of 'random.1' at byte")


def sign(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change metadata.json as someone would who knows how to sum it."""
    path = folder / "metadata.json"
    document = json.loads(path.read_text())
    document.pop("sha256")
    change(document)
    body = (json.dumps(document)[1:] + "\n").encode()
    head = f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",\n'
    path.write_bytes(head.encode() + body)


def test_another_version_is_told_from_damage(
    two_saves: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    shutil.copytree(two_saves[0], tmp_path / "new")
    sign(tmp_path / "new" / "step_000002", lambda d: d.update(version=2))
    sentence = refuse(tmp_path / "new")
    assert "is of checkpoint version 2, but this rowmesh reads version 1" in sentence
    assert "intact" not in sentence
    assert rm.Checkpoints(tmp_path / "new").latest() == 2, "it is there, if not for us"


def test_what_cannot_be_read_is_not_called_damaged(
    two_saves: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    shutil.copytree(two_saves[0], tmp_path / "odd")
    for kind in KINDS[::-1]:
        path = tmp_path / "odd" / "step_000002" / kind
        path.unlink()
        path.mkdir()
        assert refuse(tmp_path / "odd").startswith("cannot read the checkpoint: [Errno 21]")


class _Bomb:
    """Runs a command when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def test_nothing_of_a_checkpoint_is_unpickled(
    two_saves: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    folder, marker = tmp_path / "hostile", tmp_path / "executed"
    shutil.copytree(two_saves[0], folder)
    for name in ("metadata.json", ".metadata"):
        (folder / "step_000002" / name).write_bytes(pickle.dumps(_Bomb(marker)))
    assert "metadata.json is damaged" in refuse(folder)
    assert not marker.exists()
    package = Path(checkpoint.__file__).parent
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in getattr(node, "names", [])] + [getattr(node, "attr", "")]
            assert not {"pickle", "load", "Unpickler"} & set(names), path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d["files"].__setitem__(0, "../../outside.bin"), "is not in the folder"),
        (lambda d: d["files"].clear(), "described wrongly"),
        (lambda d: d.update(tables=[]), "field 'tables' is []"),
        (lambda d: d["tables"].update(c0_t0=3), "table 'c0_t0' is 3"),
        (lambda d: d["tensors"].update({"random.0": {}}), "tensor 'random.0' is {}"),
        (lambda d: d["tensors"].pop("random.0"), "'random.0' is not in the checkpoint"),
        (lambda d: d["tensors"]["random.0"].update(dtype="object"), "unknown type 'object'"),
        (lambda d: d["tensors"].pop("dense.out.bias"), "'dense.out.bias' is not in"),
        (lambda d: d["tensors"]["tables.c0_t0.weight"]["chunks"].pop(), "lacks a part of"),
        (
            lambda d: d["tensors"]["tables.c0_t0.weight"]["chunks"][0].__setitem__(0, [9, 0, 0]),
            "is outside [3, 16, 4]",
        ),
        (
            lambda d: d["tensors"]["tables.c0_t0.weight"]["chunks"][0].__setitem__(3, 1 << 40),
            "has 0 of its",
        ),
        (lambda d: d["sparse_group"].update(lr="fast"), "'lr' of the sparse parameter group is 'f"),
        (lambda d: d["sparse_group"].pop("lr"), "the sparse parameter group is {"),
        (lambda d: d["dense_optimizer"].pop("groups"), "is described wrongly: KeyError('groups')"),
        (lambda d: d["dense_optimizer"]["groups"][0].update(options=[]), "a dense parameter group"),
        (lambda d: d["dense_optimizer"].update(scalars={"x": {}}), "not of its parameters"),
        (lambda d: d["dense_optimizer"].update(scalars={}), "not of the dense optimiser's param"),
        (lambda d: d["tables"]["c0_t0"].update(rows=[[]]), "its rows is [[]] in the checkpoint"),
        (lambda d: d["tensors"]["random.0"].update(shape=[1 << 55]), "no memory holds a tensor"),
    ],
)
def test_a_forged_description_is_refused(
    change: Any, sentence: str, two_saves: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    shutil.copytree(two_saves[0], tmp_path / "forged")
    sign(tmp_path / "forged" / "step_000002", change)
    assert sentence in refuse(tmp_path / "forged")


@pytest.mark.parametrize(
    "point", [*POINTS[:3], *(pytest.param(p, marks=pytest.mark.nightly) for p in POINTS[3:])]
)
def test_a_kill_inside_a_write_leaves_the_checkpoint_before(point: str, tmp_path: Path) -> None:
    process = warm_context().Process(target=alone, args=(str(tmp_path / "killed"), point))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    left = sorted(p.name for p in (tmp_path / "killed").iterdir())
    second = {"replacing": ["step_000002.partial", "step_000002.replaced"]}
    assert left == second.get(point, ["step_000002", "step_000004.partial"])
    checkpoints = rm.Checkpoints(tmp_path / "killed")
    assert checkpoints.latest() == 2
    expected = progress(rm.init_mesh(), str(tmp_path / "whole"))
    mesh, model, optimizer, _ = one_rank()
    assert checkpoints.load(model=model, optimizer=optimizer, mesh=mesh).step == 2
    assert different(state_of(model, optimizer), expected) == []
    checkpoints.save(6, model=model, optimizer=optimizer, mesh=mesh)
    names = {p.name.partition(".")[0] for p in (tmp_path / "killed").iterdir()}
    assert names == {"step_000002", "step_000006"}
    assert not list((tmp_path / "killed").glob("*.partial"))


@pytest.mark.nightly
def test_one_rank_killed_inside_its_write(tmp_path: Path) -> None:
    """Rank 1 dies after some bytes of its file; rank 0 reports it, and step 2 stays."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    done = subprocess.run(
        [*command, "-m", "tests.scripts.checkpointing", str(tmp_path / "killed"), "bytes"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode != 0
    assert "rank 1 is gone" in done.stderr
    assert rm.Checkpoints(tmp_path / "killed").latest() == 2
    expected = run_on_ranks(2, progress, str(tmp_path / "whole"))[0]
    found = run_on_ranks(2, load_state, str(tmp_path / "killed"))[0]
    assert different(found, expected) == []


def load_state(mesh: Mesh, folder: str) -> Any:
    model, optimizer = start(mesh, make_case(mesh.world))
    rm.Checkpoints(folder).load(model=model, optimizer=optimizer, mesh=mesh)
    return state_of(model, optimizer)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of `large_case`; a plain folder if not root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2600k", "rowmesh-test", str(folder)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield folder
    if is_mounted:
        subprocess.run(["umount", str(folder)], check=True)


def large_case() -> Case:
    table = Table(rows=20_000, dim=16, ranks=(0, 1))
    ids = [[[[[1, 2], [3]]], [[[4], [5, 6]]]]]
    return Case(world=2, collections=(Collection(tables=(table,)),), ids=ids)


def fill_disk(mesh: Mesh, folder: str, asynchronous: bool) -> Any:
    """Save twice where once has room; then load what is left."""
    case = large_case()
    model, optimizer = start(mesh, case)
    checkpoints = rm.Checkpoints(folder)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "mesh": mesh}
    checkpoints.save(1, **parts)
    saved = state_of(model, optimizer)
    train(mesh, model, optimizer, case.batches_of(mesh.rank))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not os.path.ismount(folder) and mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    sentence = ""
    try:
        checkpoints.save(2, **parts, asynchronous=asynchronous)
        checkpoints.wait()
    except rm.InputError as error:
        sentence = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    mesh.total(1)
    left = sorted(p.name for p in Path(folder).iterdir())
    checkpoints.load(**parts)
    return sentence, left, different(state_of(model, optimizer), saved)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_ends_the_save_on_all_ranks(small_disk: Path, asynchronous: bool) -> None:
    found = run_on_ranks(2, fill_disk, str(small_disk), asynchronous)
    assert found[0][0] == found[1][0]
    sentence, left, changed = found[0]
    assert sentence.startswith("rank ")
    assert f"cannot write the checkpoint of step 2 into {small_disk}: [Errno " in sentence
    assert "bytes free: make room, lower keep_last or choose another folder" in sentence
    if os.path.ismount(small_disk):
        assert "No space left on device" in sentence
    assert left == ["step_000001"]
    assert changed == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    mesh, model, optimizer, _ = one_rank()
    with pytest.raises(rm.InputError, match=r"cannot write the checkpoint of step 1 into .*file"):
        rm.Checkpoints(tmp_path / "file" / "below").save(
            1, model=model, optimizer=optimizer, mesh=mesh
        )


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def get_extra_state(self) -> Any:
            return {"count": 3}

    mesh, model, optimizer, _ = one_rank()
    model.counting = Counting()
    with pytest.raises(rm.InputError, match=r"'counting._extra_state' is dict, .* into extra"):
        rm.Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, mesh=mesh)
    assert not list(tmp_path.iterdir())
    assert torch.is_tensor(next(model.parameters()))
