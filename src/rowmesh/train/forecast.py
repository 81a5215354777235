"""What a run should take: bytes and seconds of a step, told before they are measured."""

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from rowmesh.cost import Calibration, StepTime, load_calibration, plan_time
from rowmesh.placement import Plan
from rowmesh.placement.memory import RULE_STATES
from rowmesh.stats import Stats
from rowmesh.topology import Topology
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.config import RunConfig
from rowmesh.train.planning import count_accesses, plan_run

__all__ = ["Forecast", "count_work", "forecast_run", "forecast_step", "plan_of"]


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
    rates = calibration.rates
    if rates.dense is None:
        return None
    return plan_time(
        plan,
        stats.tables,
        rates=rates,
        cost=rates.dense.scaled(flops=flops, parameters=parameters),
        state=RULE_STATES[sparse],
    )


def plan_of(config: RunConfig, model: nn.Module, topology: Topology) -> Plan:
    """`plan_run` of a run, told what its dense layers cost where a calibration says it."""
    return plan_run(
        config.plan,
        model,
        config.data,
        topology,
        sparse=config.optimiser.sparse,
        dense=None if config.plan.topology is None else count_work(config, topology),
    )


def count_work(config: RunConfig, topology: Topology) -> tuple[float, float]:
    """Flops and parameters of the dense layers, for the first batch of rank 0."""
    first = next(itertools.islice(config.data.batches(rank=0, world=topology.world), 1))
    return count_dense(config, first)


def forecast_run(config: RunConfig, plan: Plan, model: nn.Module, topology: Topology) -> Forecast:
    """What a step of the run should send, and take if ``config.plan.topology`` names a file.

    Raises:
        InputError: If the file is no calibration of ``topology``.
    """
    expected, time = plan.predicted, None
    if config.plan.topology is not None:
        calibration = load_calibration(config.plan.topology, topology=topology)
        flops, parameters = count_work(config, topology)
        time = forecast_step(
            plan,
            count_accesses(config.plan, model, config.data, topology),
            calibration,
            flops=flops,
            parameters=parameters,
            sparse=config.optimiser.sparse,
        )
    return Forecast(host_bytes=expected.host_bytes, cross_bytes=expected.cross_bytes, time=time)
