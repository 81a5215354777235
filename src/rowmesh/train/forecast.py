"""What a run should take: bytes and seconds of a step, told before they are measured."""

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rowmesh.cost import (
    Calibration,
    StepTime,
    expect_dense,
    expect_tables,
    load_calibration,
    step_time,
)
from rowmesh.placement import Plan
from rowmesh.placement.memory import RULE_STATES
from rowmesh.stats import Stats
from rowmesh.topology import Topology
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.config import RunConfig
from rowmesh.train.planning import count_accesses

__all__ = ["Forecast", "forecast_run", "forecast_step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Of one training step.

    Args:
        host_bytes, cross_bytes: Sent by a rank inside its host and across, mean over ranks.
        time: Where the seconds go; None where the cluster was not calibrated.
    """

    host_bytes: float
    cross_bytes: float
    time: StepTime | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a result: bytes, ``step_s`` or None, and ``parts``, the seconds by where they go."""
        return {
            "host_bytes": self.host_bytes,
            "cross_bytes": self.cross_bytes,
            "step_s": None if self.time is None else self.time.total_s,
            "parts": None if self.time is None else asdict(self.time),
        }


def forecast_step(
    plan: Plan,
    stats: Stats,
    calibration: Calibration,
    *,
    flops: float,
    parameters: float,
    sparse: str = "rowwise_adagrad",
) -> StepTime | None:
    """The time of a step of ``plan``, whose dense layers have so many flops and parameters.

    None if the calibration timed no dense layers.
    """
    rates, topology = calibration.rates, plan.mesh.topology
    if rates.dense is None:
        return None
    tables = expect_tables(plan, stats.tables, state=RULE_STATES[sparse], rates=rates)
    return step_time(
        tables,
        expect_dense(sum(plan.dense), topology=topology, tree=plan.tree),
        topology=topology,
        rates=rates,
        cost=rates.dense.scaled(flops=flops, parameters=parameters),
        buckets=plan.dense,
    )


def forecast_run(config: RunConfig, plan: Plan, model: nn.Module, topology: Topology) -> Forecast:
    """What a step of the run should send, and take if ``config.plan.topology`` names a file.

    Raises:
        InputError: If the file is no calibration of ``topology``.
    """
    expected, time = plan.predicted, None
    if config.plan.topology is not None:
        calibration = load_calibration(config.plan.topology, topology=topology)
        batches = config.data.batches(rank=0, world=topology.world)
        first = next(itertools.islice(batches, 1))
        flops, parameters = count_dense(config, first)
        time = forecast_step(
            plan,
            count_accesses(config.plan, model, config.data, topology),
            calibration,
            flops=flops,
            parameters=parameters,
            sparse=config.optimiser.sparse,
        )
    return Forecast(host_bytes=expected.host_bytes, cross_bytes=expected.cross_bytes, time=time)
