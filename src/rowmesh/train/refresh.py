"""Tiers that follow the data: hot rows chosen again from what the last batches asked for."""

from collections import deque

from torch import nn

from rowmesh.comm.agreement import on_rank_0
from rowmesh.comm.mesh import Mesh
from rowmesh.cost import load_calibration
from rowmesh.features import Batch, KeyedJaggedTensor
from rowmesh.placement import Plan
from rowmesh.planners import choose_tiers
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.retier import change_tiers
from rowmesh.stats import Stats
from rowmesh.tables import TableConfig, named_collections
from rowmesh.topology import Topology
from rowmesh.train.config import RunConfig
from rowmesh.train.forecast import count_work

__all__ = ["TierRefresh"]

_COUNTED = 32  # batches of rank 0, the last before a refresh
_LEAST = 16  # to tell hot rows from lucky ones, after a run has begun or resumed


class TierRefresh:
    """Chooses hot rows anew every ``plan.refresh`` steps, and moves rows between steps.

    Rank 0 keeps the ids of its last 32 batches, and chooses by the same model as the planner.

    Args:
        config: Of the run.
        model: Before it is sharded.
        mesh: Of the run.
        topology: With the memory of a rank.
    """

    def __init__(self, config: RunConfig, model: nn.Module, mesh: Mesh, topology: Topology) -> None:
        self._config, self._mesh, self._topology = config, mesh, topology
        self._tables: list[TableConfig] = [
            table for _, _, members in named_collections(model) for table in members
        ]
        self._seen: deque[KeyedJaggedTensor] = deque(maxlen=_COUNTED)
        self._num_seen = 0

    def saw(self, batch: Batch) -> None:
        """Count a batch that was trained on."""
        self._num_seen += 1
        if self._config.plan.refresh is not None and self._mesh.rank == 0:
            self._seen.append(batch.sparse_features)

    def is_due(self, step: int) -> bool:
        """Whether tiers are to be chosen after this step."""
        every = self._config.plan.refresh
        return every is not None and step % every == 0 and self._num_seen >= min(_LEAST, every)

    def refresh(self, model: nn.Module, plan: Plan, optimizer: Optimizer) -> Plan:
        """The plan with the hot rows of now, under which the model is from now on.

        Collective:
            All ranks, between steps.
        """
        found = on_rank_0(self._mesh, lambda: self._choose(plan))
        if found != plan:
            change_tiers(model, found, optimizer=optimizer)
        return found

    def _choose(self, plan: Plan) -> Plan:
        config, rates, cost = self._config.plan, None, None
        if config.topology is not None:
            rates = load_calibration(config.topology, topology=self._topology).rates
            if rates.dense is not None:
                flops, parameters = count_work(self._config, self._topology)
                cost = rates.dense.scaled(flops=flops, parameters=parameters)
        return choose_tiers(
            plan,
            Stats.from_batches(self._tables, self._seen).without_rows_of(config.constraints.placed),
            tiers=config.tiers,
            rates=rates,
            cost=cost,
            sparse=self._config.optimiser.sparse,
            limit=self._topology.memory_bytes,
        )
