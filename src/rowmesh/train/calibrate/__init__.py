"""`calibrate`: how fast the cluster of a mesh is, measured with the runtime's own parts."""

import dataclasses
import os
import platform
from collections.abc import Callable
from typing import Final

import torch

from rowmesh.comm.mesh import Mesh
from rowmesh.cost import Calibration, DenseCost, Rates
from rowmesh.train.calibrate.dense import measure_dense
from rowmesh.train.calibrate.links import measure_link
from rowmesh.train.calibrate.rows import BATCHES, measure_rows
from rowmesh.train.config import RunConfig
from rowmesh.train.planning import measured

__all__ = ["DIMS", "calibrate"]

DIMS: Final = (16, 64, 128)


def calibrate(
    config: RunConfig,
    mesh: Mesh,
    *,
    dims: tuple[int, ...] = DIMS,
    batches: tuple[int, int] = BATCHES,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Calibration:
    """Links inside and across hosts, work on rows by dim, and the dense layers of ``config``.

    All ranks measure at once, as they train at once: cores and cards they share are shared here
    too. The dense layers, most of a step, are timed first and last, because machines drift. A link
    that the mesh does not have keeps its default.

    Args:
        config: Whose dense layers and batches are timed.
        mesh: Idle otherwise.
        dims: Rising.
        batches: Samples of the small and of the large batch that rows are timed with.
        on_stage: Called on this rank before each stage with a few words on it.

    Collective:
        All ranks.
    """
    topology, default = measured(mesh), Rates()
    on_stage("dense layers")
    early = measure_dense(config, mesh)
    on_stage("links inside hosts")
    near = measure_link(mesh, "host")
    on_stage("links across hosts")
    far = measure_link(mesh, "cross")
    costs, fixed = [], []
    for dim in dims:
        on_stage(f"lookup and update of rows, dim {dim}")
        cost, seconds = measure_rows(dim, mesh, batches=batches)
        costs.append(cost)
        fixed.append(seconds)
    on_stage("dense layers again")
    late = measure_dense(config, mesh)
    rates = Rates(
        host_bytes_per_s=near.bytes_per_s if near else default.host_bytes_per_s,
        cross_bytes_per_s=far.bytes_per_s if far else default.cross_bytes_per_s,
        host_latency_s=near.latency_s if near else default.host_latency_s,
        cross_latency_s=far.latency_s if far else default.cross_latency_s,
        fixed_s=min(fixed),
        rows=tuple(costs),
        dense=_mean(early, late),
    )
    machine = {
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "device": str(mesh.device),
    }
    return Calibration(topology=topology, rates=rates, machine=machine)


def _mean(first: DenseCost, second: DenseCost) -> DenseCost:
    names = [field.name for field in dataclasses.fields(DenseCost)]
    return DenseCost(**{n: (getattr(first, n) + getattr(second, n)) / 2 for n in names})
