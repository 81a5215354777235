"""Expected bytes of dense buckets, and of hot rows whose gradients travel as such."""

import numpy as np

from rowmesh.cost.codecs import chunk_on
from rowmesh.cost.load import Load, no_load
from rowmesh.placement import Plan, TablePlan
from rowmesh.placement.codecs import EXACT, WireForm
from rowmesh.topology import Topology

__all__ = ["bucket_sizes", "expect_dense", "riding_elements", "sum_elements"]


def sum_elements(table: TablePlan, count: int) -> int:
    """Numbers that travel for dense sums: of every piece a row's gradient, and a flag."""
    return count * (table.embedding_dim + len(table.columns())) if table.trainable else 0


def bucket_sizes(plan: Plan) -> tuple[int, ...]:
    """Elements of each dense bucket, those of hot rows that ride in the last among them."""
    lines = riding_elements(plan)
    return (*plan.dense[:-1], plan.dense[-1] + lines) if plan.dense else (lines,) * bool(lines)


def riding_elements(plan: Plan) -> int:
    """Of hot rows whose gradients travel in the last dense bucket."""
    lines = 0
    for table in plan.tables:
        for tier in table.tiers:
            if tier.sums == "bucket":
                count = table.num_embeddings if tier.rows == "rest" else tier.rows.count
                lines += sum_elements(table, count)
    return lines


def expect_dense(
    elements: int,
    *,
    topology: Topology,
    tree: str = "flat",
    form: WireForm = EXACT,
    edge: str = "dense",
) -> Load:
    """What dense buckets of so many elements in all add to every rank's bytes.

    flat: a chunk to every rank and its sum back, 2 (W - 1) / W of 4 x elements. host-first: in
    the host 4 x elements (L - 1) / L, across 2 (H - 1) / H of 4 x elements / L, in the host again.
    With a codec its bytes for 4; work is then to encode parts and the own sum, and to decode
    others' parts and all sums: about once and twice all elements of a ring.
    """
    number = chunk_on(edge, form)
    hosts, local, size = topology.hosts, topology.local, number.num_bytes * elements
    load = no_load(topology.world)
    if tree == "host-first":
        links = [2.0 * size * (local - 1) / local] * 2
        links += [2.0 * size / local * (hosts - 1) / hosts] * 2
    else:
        share = 2.0 * size / topology.world
        links = [share * (local - 1)] * 2 + [share * (topology.world - local)] * 2
    load.values[:4] += np.array(links)[:, None]
    load.values[4:8] = load.values[:4]
    rings = [local > 1, (hosts > 1) / local] if tree == "host-first" else [topology.world > 1]
    load.values[8] = sum(rings) * elements * (number.encode_s + 2.0 * number.decode_s)
    return Load(load.values, frozenset({"dense"} if elements else ()))
