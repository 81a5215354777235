"""Row-wise requests merged per host, by formula: what hosts would send at least."""

from collections.abc import Sequence

import numpy as np

from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Plan

__all__ = ["merged_bytes"]

_ID = 4


def merged_bytes(plan: Plan, batches: Sequence[KeyedJaggedTensor]) -> float:
    """Mean bytes that a host sends in a step if a row crosses once for a host, not for a rank.

    Sum over hosts h and rows r that any rank of h asks for and whose home is elsewhere of
    ``id + gradient`` sent by h and ``row`` sent by the home's host, over H.

    Args:
        plan: Without hot rows, its exchange ``rows``.
        batches: Of every rank.
    """
    topology = plan.mesh.topology
    total = 0
    for table in plan.tables:
        ranks = np.asarray(table.rest.ranks)
        for host in range(topology.hosts):
            mine = batches[host * topology.local : (host + 1) * topology.local]
            values = [b[f].values().cpu().numpy() for b in mine for f in table.feature_names]
            rows = np.unique(np.concatenate(values))
            away = ranks[table.homes().owners(rows)] // topology.local != host
            size = _ID + 4 * table.embedding_dim * table.trainable + table.row_bytes
            total += int(away.sum()) * size
    return total / topology.hosts
