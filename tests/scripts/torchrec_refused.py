"""What `rm.shard` and `rm.make_plan` say of TorchRec's modules that rowmesh does not run.

A program for TorchRec's environment, one process. Prints a JSON line: for every case the sentence,
and whether the module was left as it was.
"""

import json
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.quant.embedding_modules import EmbeddingBagCollection as Quantised

import rowmesh as rm


def config(name: str = "t", **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=8, embedding_dim=4, feature_names=["f"], **more
    )


def plain(**more: Any) -> torchrec.EmbeddingBagCollection:
    return torchrec.EmbeddingBagCollection(tables=[config()], **more)


class OwnForward(torchrec.EmbeddingBagCollection):
    def forward(self, features: KeyedJaggedTensor) -> Any:
        return super().forward(features)


def collisions() -> nn.Module:
    module = MCHManagedCollisionModule(
        zch_size=8,
        device=torch.device("cpu"),
        eviction_interval=2,
        eviction_policy=DistanceLFU_EvictionPolicy(),
    )
    bags = plain()
    configs = bags.embedding_bag_configs()
    both = ManagedCollisionCollection({"t": module}, embedding_configs=configs)
    return ManagedCollisionEmbeddingBagCollection(bags, both)


def pruned() -> nn.Module:
    return ITEPEmbeddingBagCollection(plain(), GenericITEPModule({"t": 8}, lookups=[]))


def processed() -> nn.Module:
    weights = {"f": PositionWeightedModule(max_feature_length=10)}
    return FeatureProcessedEmbeddingBagCollection(plain(is_weighted=True), weights)


def fused() -> nn.Module:
    return FusedEmbeddingBagCollection(
        tables=[config()],
        optimizer_type=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1},
        device=torch.device("cpu"),
    )


def quantised() -> nn.Module:
    from torchrec.modules.embedding_configs import DataType

    return Quantised(
        tables=[config(data_type=DataType.INT8)], is_weighted=False, device=torch.device("cpu")
    )


def in_backward() -> nn.Module:
    found = plain()
    apply_optimizer_in_backward(RowWiseAdagrad, found.parameters(), {"lr": 0.1})
    return found


def tied() -> nn.Module:
    found = nn.ModuleList([plain(), plain()])
    found[1]._embedding_bag_configs = [config("u")]
    found[1].embedding_bags = nn.ModuleDict({"u": found[0].embedding_bags["t"]})
    return found


def bf16() -> nn.Module:
    from torchrec.modules.embedding_configs import DataType

    return torchrec.EmbeddingBagCollection(tables=[config(data_type=DataType.BF16)])


def sharded() -> nn.Module:
    with TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        model = nn.Sequential(plain())
        found = DistributedModelParallel(
            model, device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder()]
        )
        dist.destroy_process_group()
    return found


CASES: dict[str, Callable[[], nn.Module]] = {
    "own forward": lambda: OwnForward(tables=[config()]),
    "collisions": collisions,
    "pruned": pruned,
    "processed": processed,
    "fused": fused,
    "sharded": sharded,
    "quantised": quantised,
    "in backward": in_backward,
    "tied": tied,
    "bf16": bf16,
}


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except rm.RowmeshError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # a raw one, which the test will show
        return f"raw {type(error).__name__}: {error}"
    return "nothing"


def variable() -> KeyedJaggedTensor:
    """Two samples of which the feature has one, for both."""
    return KeyedJaggedTensor(
        keys=["f"],
        values=torch.tensor([1, 2]),
        lengths=torch.tensor([2]),
        stride_per_key_per_rank=[[1]],
        inverse_indices=(["f"], torch.tensor([[0, 0]])),
    )


def main() -> None:
    mesh, found = rm.init_mesh(device="cpu"), {}
    for name, make in CASES.items():
        model = nn.ModuleDict({"sparse": make()})
        kinds = [type(m) for m in model.modules()]

        def shard(model: nn.Module = model) -> None:
            rm.shard(model, rm.make_plan(model, mesh.topology), mesh)

        found[name] = said(shard)
        assert [type(m) for m in model.modules()] == kinds, name
    model = plain()
    rm.shard(model, rm.make_plan(model, mesh.topology), mesh)
    found["variable batch"] = said(lambda: model(variable()))
    sequence = EmbeddingConfig(
        name="s", num_embeddings=8, embedding_dim=4, feature_names=["f"], init_fn=nn.init.ones_
    )
    made = torchrec.EmbeddingCollection(tables=[sequence], device=torch.device("meta"))
    rm.shard(made, rm.make_plan(made, mesh.topology), mesh)
    assert bool((rm.full_state_dict(made)["embeddings.s.weight"] == 1.0).all())
    default = torchrec.EmbeddingBagCollection(tables=[config()], device=torch.device("meta"))
    assert rm.make_plan(default, mesh.topology).tables[0].trainable
    rm.shard(default, rm.make_plan(default, mesh.topology), mesh)
    ours = rm.EmbeddingBagCollection(
        [rm.EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])]
    )
    start = rm.full_state_dict(default)["embedding_bags.t.weight"]
    assert torch.equal(start, ours.embedding_bags["t"].weight), "TorchRec's range, our values"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
