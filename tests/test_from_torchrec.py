"""docs/from_torchrec.md: its rowmesh blocks are one program that runs, and its claims hold."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rowmesh as rm
from rowmesh.planners import Constraints, Pin

PAGE = (Path(__file__).parent.parent / "docs" / "from_torchrec.md").read_text()
# What the page's TorchRec program wrote to torchrec.pt with TorchRec 1.8.0.
TORCHREC = {
    "model.sparse_arch.embedding_bag_collection.embedding_bags.t_user.weight": (1000, 16),
    "model.sparse_arch.embedding_bag_collection.embedding_bags.t_item.weight": (5000, 16),
    "model.dense_arch.model._mlp.0._linear.weight": (32, 4),
    "model.dense_arch.model._mlp.0._linear.bias": (32,),
    "model.dense_arch.model._mlp.1._linear.weight": (16, 32),
    "model.dense_arch.model._mlp.1._linear.bias": (16,),
    "model.over_arch.model.0._mlp.0._linear.weight": (32, 22),
    "model.over_arch.model.0._mlp.0._linear.bias": (32,),
    "model.over_arch.model.1.weight": (1, 32),
    "model.over_arch.model.1.bias": (1,),
}


def program(kind: str) -> str:
    """The page's blocks of one library, in order."""
    blocks = re.findall(rf"```python\n(# {kind}\n.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 4
    return "\n".join(blocks)


def test_every_python_block_says_whose_it_is() -> None:
    assert len(re.findall(r"```python\n", PAGE)) == len(
        re.findall(r"```python\n# (?:TorchRec|rowmesh)\n", PAGE)
    )
    ast.parse(program("TorchRec"))


def test_the_rowmesh_blocks_run_and_carry_a_model_over_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    given = {k: torch.randn(shape, generator=generator) for k, shape in TORCHREC.items()}
    torch.save(given, "torchrec.pt")
    found: dict[str, Any] = {}
    exec(compile(program("rowmesh"), "from_torchrec.md", "exec"), found)
    assert capsys.readouterr().out.startswith("plan for 1 hosts x 1 ranks")
    back = torch.load("rowmesh.pt", weights_only=True)
    tables = "model.sparse_arch.embedding_bag_collection.embedding_bags"
    expected = given | {f"{tables}.t_user.weight": found["bag"].weight.detach()}
    expected[f"{tables}.t_item.weight"][[17, 4999]] = found["vectors"]
    assert set(back) == set(expected)
    assert [key for key in back if not torch.equal(back[key], expected[key])] == []
    exported = load_file(tmp_path / "exported" / "model-00001-of-00001.safetensors")
    plain = found["plain"].state_dict()
    assert set(exported) == set(plain)
    assert all(torch.equal(exported[key], plain[key]) for key in plain)
    batch = found["batch_at"](0, 0)
    assert torch.equal(found["plain"](batch), found["model"](batch))


def test_what_the_page_says_of_differences() -> None:
    names: dict[str, Any] = {}
    blocks = program("rowmesh").split("mesh = rm.init_mesh()")[0]
    exec(compile(blocks, "from_torchrec.md", "exec"), names)
    model, mesh = names["model"], rm.init_mesh()
    with pytest.raises(rm.InputError, match="did you mean 'row_wise'"):
        Pin(split="rowwise")
    constraints = Constraints(pin={"t_users": Pin(split="row_wise")})
    with pytest.raises(rm.RowmeshError, match="did you mean 't_user'"):
        rm.make_plan(model, mesh.topology, constraints=constraints)
    weight = torch.randn(1000, 16)
    rm.load_pretrained(model, "t_user", weight)
    rm.shard(model, rm.make_plan(model, mesh.topology), mesh)
    key = "embedding_bag_collection.embedding_bags.t_user.weight"
    assert torch.equal(rm.full_state_dict(model)[key], weight), "sharding keeps its values"
    assert not [n for n, _ in model.named_parameters() if "embedding" in n]
    batch = names["batch_at"](0, 0)
    batch.sparse_features.values()[0] = 1000
    sentence = r"feature 'user', sample 0: id 1000 is outside table 't_user' \(1000 rows\)"
    with pytest.raises(rm.InputError, match=sentence):
        model(batch)
