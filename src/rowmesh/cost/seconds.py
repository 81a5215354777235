"""Seconds of a step: what planners make small, and what a run should take."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.buckets import bucket_sizes, expect_dense, riding_elements
from rowmesh.cost.early import early_part
from rowmesh.cost.load import Load, no_load
from rowmesh.cost.rates import DenseCost, Rates
from rowmesh.cost.totals import expect_each, expect_sync, total
from rowmesh.placement import Plan
from rowmesh.placement.codecs import wire_form
from rowmesh.placement.memory import RULE_STATES, RuleState
from rowmesh.stats import Accesses
from rowmesh.topology import Topology

__all__ = [
    "StepTime",
    "latency_seconds",
    "plan_time",
    "rank_seconds",
    "step_seconds",
    "step_time",
]

# Messages one after the other: ids and vectors (with relays each goes twice; merged, they have
# counts of their own and go through the host as well), and gradients. All kinds share the counts
# that go before.
_ROUNDS: Final = {
    "rows": 3,
    "merged": 6,
    "pooled": 3,
    "relayed": 6,
    "copies": 2,
    "hot dense": 1,
    "host copies": 2,
    "squares": 1,
    "dense": 0,
}
_AHEAD: Final = {"rows": 1, "pooled": 1, "merged": 3}  # of these, with counts and ids


def rank_seconds(
    values: NDArray[np.float64], *, topology: Topology, rates: Rates
) -> NDArray[np.float64]:
    """Seconds of each rank, without latencies, for the ``values`` of a `Load`.

    Its host's cross bytes (the larger of sent and received, over all ranks of the host) over
    the card's rate, plus its bytes inside the host (likewise) over theirs, plus its work.
    """
    links = _link_seconds(values[:4], topology=topology, rates=rates)
    return np.asarray(links.sum(0) + values[8])


def _link_seconds(
    links: NDArray[np.float64], *, topology: Topology, rates: Rates
) -> NDArray[np.float64]:
    """``[2, W]``: seconds inside the host and on its card of every rank."""
    cards = links[2:].reshape(2, topology.hosts, topology.local).sum(2).max(0)
    near = links[:2].max(0) / rates.host_bytes_per_s
    return np.stack([near, (cards / rates.cross_bytes_per_s).repeat(topology.local)])


def latency_seconds(
    kinds: Iterable[str],
    *,
    topology: Topology,
    rates: Rates,
    rounds: float = 0.0,
    ahead: bool = False,
) -> float:
    """The latencies of a step: all tables of a kind share its messages, so each kind counts once.

    Counts and ids that travel ``ahead`` of their forward count none.

    One rank alone has none. Sums of dense buckets overlap with each other and count none. A replica
    sync adds its ``rounds``.
    """
    if topology.world == 1:
        return 0.0
    latency = rates.cross_latency_s if topology.hosts > 1 else rates.host_latency_s
    hidden = sum(_AHEAD.get(kind, 0) for kind in set(kinds)) if ahead else -1
    return latency * (rounds + sum(_ROUNDS[kind] for kind in set(kinds)) - hidden)


def step_seconds(load: Load, *, topology: Topology, rates: Rates) -> float:
    """Seconds of tables and sums, none hidden: the busiest rank's, and the latencies."""
    busiest = float(rank_seconds(load.values, topology=topology, rates=rates).max())
    return busiest + latency_seconds(load.kinds, topology=topology, rates=rates, rounds=load.rounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Where the seconds of a step go, on its critical path.

    Args:
        rows_s: Work on ids and rows, and of codecs, of the busiest rank.
        dense_s: The dense layers, forward, backward and step.
        forward_s: Ids and vectors on their way; nothing hides them.
        gradients_s: Gradients on their way, as far as they outlast the backward.
        latency_s: Latencies, and the fixed part of a step.
        sync_s: Messages between replicas of tables, mean over steps; nothing hides them.
    """

    rows_s: float
    dense_s: float
    forward_s: float
    gradients_s: float
    latency_s: float
    sync_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Of the step."""
        exchange = self.forward_s + self.gradients_s + self.sync_s
        return self.rows_s + self.dense_s + exchange + self.latency_s


def step_time(
    tables: Load,
    dense: Load,
    *,
    topology: Topology,
    rates: Rates,
    cost: DenseCost,
    buckets: Sequence[int],
    riding: int = 0,
    sync: Load | None = None,
    early: Load | None = None,
) -> StepTime:
    """The time of a step as the runtime runs it.

    Forward waits for counts, ids and vectors; of a batch that was begun ahead only for what did not
    travel ``early``, under the step before. Backward makes the dense buckets ready one after
    the other, in proportion to their elements, and the embeddings' gradients ``cost.tail_s``
    before its end, but for those that follow the step, under the next forward; each takes the card
    when it is ready and those before it are through. What
    travels inside a host is copied by the cores that compute, so nothing hides it.

    Args:
        tables: Of all tables, from `expect_plan` or `expect_table`.
        dense: Of the dense buckets, from `expect_dense`.
        topology: Of the mesh.
        rates: Its speed.
        cost: Of this model's dense layers.
        buckets: Elements of each dense bucket, in the order backward completes them; without
            any, ``dense`` is one bucket, ready at the end of backward.
        riding: Of the last bucket's, those of hot rows: no dense layer takes time to compute them.
        sync: Between replicas, from `expect_sync`: the update waits for gradients and squares, and
            little is left of the step to hide weights under, so that it counts fully.
        early: Of ``tables``, what travels ahead and what follows, from `early_part`; None if
            nothing is begun ahead.
    """
    sync = no_load(topology.world) if sync is None else sync
    forward = tables.values[:4] - tables.values[4:8]
    gradients = tables.values[4:8]
    away = np.zeros_like(tables.values) if early is None else early.values
    # Of the busiest card each: the one with most ahead need not be the one with most left.
    ahead, follow, late, back = (
        float(_link_seconds(lines, topology=topology, rates=rates)[1].max())
        for lines in (away[:4], away[4:8], forward - away[:4], gradients - away[4:8])
    )
    near, back_near, sums_near = (
        float(_link_seconds(lines, topology=topology, rates=rates)[0].max())
        for lines in (forward, gradients, dense.values[4:8])
    )
    sums = float(_link_seconds(dense.values[4:8], topology=topology, rates=rates)[1].max())
    sizes = np.array(buckets if any(buckets) else (1,), dtype=np.float64)
    shares = sizes / sizes.sum()
    layers = np.append(sizes[:-1], sizes[-1] - riding)
    computed = cost.forward_s + cost.backward_s
    ready = cost.forward_s + cost.backward_s * np.cumsum(layers) / max(layers.sum(), 1.0)
    ready[-1] = computed
    flows = [(0.0, ahead + follow), *zip(ready, shares * sums, strict=True)]
    flows.append((computed - cost.tail_s, back))
    end = 0.0
    for start, seconds in sorted(flows):
        end = max(end, start) + seconds
    kinds = tables.kinds | dense.kinds
    return StepTime(
        rows_s=float((tables.values[8] + dense.values[8] + sync.values[8]).max()),
        dense_s=cost.total_s,
        forward_s=near + late,
        gradients_s=back_near + sums_near + max(0.0, float(end) - computed),
        latency_s=rates.fixed_s
        + latency_seconds(
            kinds, topology=topology, rates=rates, rounds=sync.rounds, ahead=early is not None
        ),
        sync_s=float(_link_seconds(sync.values[:4], topology=topology, rates=rates).max(1).sum()),
    )


def plan_time(
    plan: Plan,
    accesses: Mapping[str, Accesses],
    *,
    rates: Rates,
    cost: DenseCost,
    state: RuleState = RULE_STATES["rowwise_adagrad"],
) -> StepTime:
    """The `step_time` of a plan, whose dense layers cost so much."""
    sizes = bucket_sizes(plan)
    loads = expect_each(plan, accesses, state=state, rates=rates)
    return step_time(
        total(loads, plan.mesh.topology),
        expect_dense(sum(sizes), topology=plan.mesh.topology, tree=plan.tree, form=wire_form(plan)),
        topology=plan.mesh.topology,
        rates=rates,
        cost=cost,
        buckets=sizes,
        riding=riding_elements(plan),
        sync=expect_sync(plan, accesses, state=state, rates=rates),
        early=early_part(plan, loads, accesses) if plan.depth > 1 else None,
    )
