"""Tiers under drift: left as they were, chosen again now and then, or knowing the future."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.harness.beside import build, count_collisions
from papers.flexshard.tiers import Tiers, within
from rowmesh.cost import Rates, predict
from rowmesh.data import SyntheticSequences
from rowmesh.features import KeyedJaggedTensor
from rowmesh.placement import Plan
from rowmesh.planners import make_plan
from rowmesh.stats import Stats
from rowmesh.tables import TableConfig
from rowmesh.topology import Topology

__all__ = ["Drifting", "measure_drift"]

_COUNTED = 32  # batches of rank 0 before a refresh
_LOOKED_AT = 4  # pairs of steps of a window


@dataclass(frozen=True, kw_only=True, slots=True)
class Drifting:
    """What is simulated.

    Args:
        shape: Hosts and ranks on each.
        drift_every: Steps between changes of popularity.
        refresh: Steps between choices of tiers.
        windows: Stretches of ``refresh`` steps that are looked at, after the first.
        budget: Memory of a rank, relative to row-wise.
        hidden: As for `RowTiers`: 0 counts all time, 1 what the forward waits for.
    """

    shape: tuple[int, int] = (2, 2)
    drift_every: int = 100
    refresh: int = 50
    windows: int = 20
    budget: float = 1.25
    hidden: float = 0.0


def measure_drift(asked: Tiers, how: Drifting, *, dedup: bool) -> dict[str, Any]:
    """Bytes across hosts and late rows of a step under three policies, means over windows.

    Tiers are of the first batches (``fixed``), of the 32 batches of rank 0 before each window
    (``refresh``), or of batches of rank 0 in the window itself (``oracle``). Bytes are those of
    `rm.predict`, and late rows those that the step before updates.
    """
    source = asked.config(drift_every=how.drift_every).data
    assert isinstance(source, SyntheticSequences)
    model, tables = build(asked.config())
    topology = Topology(hosts=how.shape[0], local=how.shape[1])
    stats = _stats(source, tables, range(_COUNTED))
    base = make_plan(model, topology, stats=stats, split="row_wise", exchange="rows", dedup=dedup)

    def choose(steps: Sequence[int]) -> Plan:
        return within(base, _stats(source, tables, steps), Rates(), how.budget, hidden=how.hidden)

    fixed = choose(range(_COUNTED))
    found: dict[str, list[tuple[float, float]]] = {"fixed": [], "refresh": [], "oracle": []}
    for window in range(1, how.windows + 1):
        first = window * how.refresh
        inside = range(first, first + how.refresh, max(1, how.refresh // _COUNTED))
        plans = {
            "fixed": fixed,
            "refresh": choose(range(max(0, first - _COUNTED), first)),
            "oracle": choose(inside[:_COUNTED]),
        }
        gap = how.refresh // _LOOKED_AT
        pairs = [first + gap * i + gap // 2 for i in range(_LOOKED_AT)]
        steps = [[_everyone(source, topology, s) for s in (p, p + 1)] for p in pairs]
        for name, plan in plans.items():
            found[name].append(_cost(plan, steps, topology))
    return {
        "dedup": dedup,
        "shape": list(how.shape),
        "drift_every": how.drift_every,
        "refresh": how.refresh,
        "budget": how.budget,
        "hidden": how.hidden,
        "policies": {
            name: {
                "cross_mb": fmean(pair[0] for pair in pairs),
                "late_rows": fmean(pair[1] for pair in pairs),
            }
            for name, pairs in found.items()
        },
    }


def _stats(
    source: SyntheticSequences, tables: Sequence[TableConfig], steps: Sequence[int]
) -> Stats:
    return Stats.from_batches(tables, (source.batch_at(0, step).sparse_features for step in steps))


def _everyone(source: SyntheticSequences, topology: Topology, step: int) -> list[KeyedJaggedTensor]:
    return [source.batch_at(rank, step).sparse_features for rank in range(topology.world)]


def _cost(
    plan: Plan, pairs: Sequence[Sequence[list[KeyedJaggedTensor]]], topology: Topology
) -> tuple[float, float]:
    """MB that a host sends across in a step, and late rows of a rank; means."""
    across, late = [], []
    for steps in pairs:
        sent = sum(
            links.get("cross", 0) for ledger in predict(plan, steps[1]) for links in ledger.values()
        )
        across.append(sent / topology.hosts / 1e6)
        late.append(count_collisions(plan, steps)[0] / topology.world)
    return fmean(across), fmean(late)
