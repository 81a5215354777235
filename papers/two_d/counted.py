"""Bytes, imbalance and memory of shard groups, by `predict` and by formula: nothing is run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness.beside import build
from rowmesh.cost import Rates, expect_tables, imbalance, predict
from rowmesh.data import SyntheticClicks
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Plan, Sync
from rowmesh.placement.memory import bytes_per_rank
from rowmesh.planners import list_meshes, make_plan
from rowmesh.stats import Stats
from rowmesh.topology import Topology
from rowmesh.train.config import RunConfig
from rowmesh.train.model import ModelConfig

__all__ = ["count_groups", "count_sync", "dense_sync_bytes"]

_COUNTED = 8  # batches of rank 0 that statistics are of
_MOMENT = 4  # bytes of row-wise AdaGrad's state of a row


def _drawn(config: RunConfig, topology: Topology) -> tuple[Any, Stats, list[KeyedJaggedTensor]]:
    """The model, statistics of batches of rank 0, and a later batch of every rank."""
    source = config.data
    assert isinstance(source, SyntheticClicks)
    model, tables = build(config)
    first = [source.batch_at(0, step).sparse_features for step in range(_COUNTED)]
    asked = [source.batch_at(r, 1000).sparse_features for r in range(topology.world)]
    return model, Stats.from_batches(tables, first), asked


def count_groups(
    shapes: Sequence[tuple[int, int]], *, cap: int, dim: int, alpha: float, batch: int
) -> list[dict[str, Any]]:
    """MB by link class, imbalance and memory of every size and layout, whole tables on ranks.

    Whole tables make the ranks of a large group uneven, which is what smaller groups mend. Sync is
    of gradients. MB are those of a rank, `predict` on a batch of every rank, mean over ranks.
    """
    config = RunConfig(
        data=SyntheticClicks(cap=cap, alpha=alpha, batch_size=batch), model=ModelConfig(dim=dim)
    )
    found = []
    for hosts, local in shapes:
        topology = Topology(hosts=hosts, local=local)
        model, stats, asked = _drawn(config, topology)
        for mesh in list_meshes(topology, groups="auto", layout="auto"):
            plan = make_plan(
                model,
                topology,
                stats=stats,
                split="table_wise",
                rates=Rates(),
                groups=mesh.group,
                layout=mesh.layout,
            )
            found.append({"hosts": hosts, "local": local} | _count(plan, stats, asked))
    return found


def _count(plan: Plan, stats: Stats, asked: list[KeyedJaggedTensor]) -> dict[str, Any]:
    ledgers, world = predict(plan, asked), len(asked)
    exchange = ("ids", "rows", "pooled", "backward", "column squares", "sample weights")

    def mb(edges: Sequence[str], link: str) -> list[float]:
        return [sum(led.get(e, {}).get(link, 0) for e in edges) / 1e6 for led in ledgers]

    links = {
        f"{name}_{link}_mb": sum(mb(edges, link)) / world
        for name, edges in (("exchange", exchange), ("sync", ("replica sync",)))
        for link in ("host", "cross")
    }
    sent = [a + b for a, b in zip(mb(exchange, "host"), mb(exchange, "cross"), strict=True)]
    return links | {
        "size": plan.mesh.group,
        "layout": plan.mesh.layout,
        "bytes_imbalance": imbalance(sent),
        "work_imbalance": imbalance(expect_tables(plan, stats.tables).work),
        "memory_mb": max(bytes_per_rank(plan)) / 1e6,
    }


def count_sync(
    shapes: Sequence[tuple[int, int]], *, cap: int, dim: int, alpha: float, batch: int
) -> list[dict[str, Any]]:
    """MB that a rank sends for one sync of weights, touched rows beside all, row-wise tables."""
    config = RunConfig(
        data=SyntheticClicks(cap=cap, alpha=alpha, batch_size=batch), model=ModelConfig(dim=dim)
    )
    found = []
    for hosts, local in shapes:
        topology = Topology(hosts=hosts, local=local)
        model, stats, asked = _drawn(config, topology)
        for mesh in list_meshes(topology, groups="auto", layout="contiguous"):
            if mesh.group == topology.world:
                continue
            plan = make_plan(
                model, topology, stats=stats, split="row_wise", exchange="rows", groups=mesh.group
            )
            ledgers = predict(replace(plan, sync=Sync(mode="weights")), asked)
            sent = sum(sum(led.get("replica sync", {}).values()) for led in ledgers)
            sparse, dense = sent / 1e6 / topology.world, dense_sync_bytes(plan) / 1e6
            shape = {"hosts": hosts, "local": local, "size": mesh.group}
            found.append(shape | {"sparse_mb": sparse, "dense_mb": dense, "ratio": dense / sparse})
    return found


def dense_sync_bytes(plan: Plan) -> float:
    """Mean bytes that a rank would send to average all rows and their moments over M groups.

    ``2 (M - 1) / W * sum over tables of rows * (4 D + 4)``: each replica takes a part of the rows,
    gets them from the M - 1 others and sends them the means. No plan does this: `predict` has the
    sync of touched rows alone.
    """
    world = plan.mesh.topology.world
    rows = sum(t.num_embeddings * (t.row_bytes + _MOMENT) for t in plan.tables)
    return 2 * (world // plan.mesh.group - 1) / world * rows
