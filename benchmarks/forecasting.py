"""What bench_dlrm.py should send and take: bytes by `rm.predict`, milliseconds by a calibration."""

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rowmesh as rm
from rowmesh.cost import load_calibration
from rowmesh.data.synthetic import SyntheticClicks
from rowmesh.train.calibrate.dense import count_dense
from rowmesh.train.config import RunConfig
from rowmesh.train.forecast import forecast_step
from rowmesh.train.model import ModelConfig

__all__ = ["Foretold", "count_accesses", "count_layers", "forecast_ms", "pairs"]

Bytes = Counter[tuple[str, str]]
"""By edge and link."""


class Foretold:
    """The bytes of this rank in a step on each batch.

    Collective:
        All ranks: each predicts some of the batches.
    """

    def __init__(self, clicks: SyntheticClicks, plan: rm.Plan, mesh: rm.Mesh, count: int) -> None:
        mine = {}
        for number in range(mesh.rank, count, mesh.world):
            batches = [clicks.batch_at(r, number).sparse_features for r in range(mesh.world)]
            mine[number] = rm.predict(plan, batches)
        found: dict[int, Any] = {}
        for part in mesh.gather_objects(mine):
            found |= part
        self._of_batch = [pairs(found[number][mesh.rank]) for number in range(count)]

    def over(self, first: int, count: int) -> Bytes:
        """In ``count`` steps, the first of which is number ``first``; batches go round."""
        total: Bytes = Counter()
        for number in range(first, first + count):
            total += self._of_batch[number % len(self._of_batch)]
        return total


def pairs(ledger: dict[str, dict[str, int]]) -> Bytes:
    """One number for each edge and link."""
    return Counter({(edge, at): n for edge, links in ledger.items() for at, n in links.items()})


def count_accesses(args: argparse.Namespace, clicks: SyntheticClicks) -> rm.Stats:
    """Of batches of rank 0 that are not trained on: 4, or 16 to tell hot rows from lucky ones,
    or as many as the flags say."""
    count = args.counted or (4 if args.tiers == "off" else 16)
    numbers = range(args.batches, args.batches + count)
    sample = [clicks.batch_at(0, i).sparse_features for i in numbers]
    return rm.Stats.from_batches(clicks.tables(args.dim), sample)


def count_layers(args: argparse.Namespace, clicks: SyntheticClicks) -> tuple[float, float]:
    """Flops and parameters of the dense layers."""
    *bottom, _ = (int(word) for word in args.bottom.split(","))
    *top, _ = (int(word) for word in args.top.split(","))
    layers = ModelConfig(dim=args.dim, dense_layers=tuple(bottom), over_layers=tuple(top))
    return count_dense(RunConfig(data=clicks, model=layers), clicks.batch_at(0, 0))


def forecast_ms(
    args: argparse.Namespace, clicks: SyntheticClicks, plan: rm.Plan
) -> dict[str, dict[str, float]]:
    """What a step should take, by parts, for each --topology, by the name of its file."""
    if not args.topology:
        return {}
    flops, parameters = count_layers(args, clicks)
    stats, found = count_accesses(args, clicks), {}
    for path in args.topology:
        calibration = load_calibration(path)
        time = forecast_step(plan, stats, calibration, flops=flops, parameters=parameters)
        if time is not None:
            parts = {key.removesuffix("_s"): round(1e3 * s, 2) for key, s in asdict(time).items()}
            found[Path(path).stem] = {"total": round(1e3 * time.total_s, 2), **parts}
    return found
