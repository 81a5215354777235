"""A small training run in which rank 1 clips its part of the gradients with torch's function."""

import functools

import torch

import rowmesh as rm


def main() -> None:
    torch.set_num_threads(1)
    mesh = rm.init_mesh()
    table = rm.EmbeddingBagConfig(
        name="items", num_embeddings=100, embedding_dim=4, feature_names=["item"]
    )
    model = rm.models.DLRM(rm.EmbeddingBagCollection([table], device="meta"), 3, (4,), (4, 1))
    rm.shard(model, rm.make_plan(model, mesh.topology, split="row_wise"), mesh)
    optimizer = rm.Optimizer(
        model, dense=functools.partial(torch.optim.SGD, lr=0.1), sparse=rm.SGD(lr=0.1)
    )
    batch = rm.Batch(
        dense_features=torch.ones(4, 3),
        sparse_features=rm.KeyedJaggedTensor.from_dense({"item": torch.tensor([1, 2, 3, 4])}),
        labels=torch.tensor([0.0, 1.0, 1.0, 0.0]),
    )
    for step in range(8):
        mesh.mean(model(batch)).backward()
        if mesh.rank == 1 and step == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


main()
