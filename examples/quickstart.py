import torch

import rowmesh as rm
from rowmesh.data import SyntheticClicks

data = SyntheticClicks(cap=100_000)  # Criteo's 26 tables, at most 100,000 rows each
tables = rm.EmbeddingBagCollection(tables=data.tables(16), device="meta")
model = rm.models.DLRM(tables, data.num_dense, (64, 16), (64, 1))
mesh = rm.init_mesh()  # one process, or whatever torchrun started
plan = rm.make_plan(model, mesh.topology)  # a frozen value: print it, save it, diff it
rm.shard(model, plan, mesh)  # in place; forward() is unchanged
opt = rm.Optimizer(model, dense=torch.optim.Adagrad, sparse=rm.RowwiseAdagrad(lr=0.05))
for step, batch in enumerate(mesh.batches(data.batch_at(mesh.rank, i) for i in range(200))):
    loss = mesh.mean(model(batch))  # a loss per sample -> this rank's share of the mean
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step % 20 == 0:
        print(f"rank {mesh.rank}, step {step}: loss {mesh.total(loss):.4f}")
