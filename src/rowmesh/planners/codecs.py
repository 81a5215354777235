"""Which codecs: those that were asked for or, where lossy numbers are allowed, those that pay."""

from dataclasses import replace
from typing import Final

from rowmesh.cost import DenseCost, Rates, plan_time
from rowmesh.errors import InputError, did_you_mean
from rowmesh.placement import Plan
from rowmesh.placement.codecs import parse_codecs
from rowmesh.placement.memory import RuleState
from rowmesh.planners.placing import LEAST_GAIN
from rowmesh.planners.tiers import NO_DENSE
from rowmesh.stats import Stats

__all__ = ["choose_codecs", "parse_allow"]

# From the least lossy on. Dense gradients stay at bf16: rules that divide by the size of a gradient
# make much of small ones, which int8 rounds to zero beside a large one (docs/codecs.md).
_TRIED: Final = ("bf16", "int8,dense=bf16")


def parse_allow(text: str) -> bool:
    """Whether ``lossy`` numbers are allowed; ``exact`` says they are not.

    Raises:
        InputError: If it is neither.
    """
    if text not in ("exact", "lossy"):
        raise InputError(f"unknown word {text!r}{did_you_mean(text, ('exact', 'lossy'))}")
    return text == "lossy"


def choose_codecs(
    plan: Plan,
    stats: Stats,
    *,
    codecs: str = "fp32",
    allow_lossy: bool = False,
    rates: Rates,
    cost: DenseCost | None = None,
    state: RuleState,
) -> Plan:
    """``plan`` with codecs; rows stay where they are.

    Codecs that are asked for are taken. Otherwise, if lossy numbers are allowed, bf16 and then int8
    for all but the dense layers are each taken if the expected step is at least 2.5 % shorter than
    without.

    Args:
        plan: Its codecs do not count.
        stats: What batches ask for.
        codecs: As for `parse_codecs`.
        allow_lossy: Whether to look for lossy ones, where ``codecs`` names none.
        rates: Of the cluster.
        cost: Of the dense layers.
        state: Of the update rule.

    Raises:
        InputError: If a word is unknown.
    """
    chosen = replace(plan, codecs=parse_codecs(codecs))
    if chosen.codecs or not allow_lossy:
        return chosen

    def seconds(candidate: Plan) -> float:
        time = plan_time(candidate, stats.tables, rates=rates, cost=cost or NO_DENSE, state=state)
        return time.total_s

    best = seconds(chosen)
    for name in _TRIED:
        candidate = replace(plan, codecs=parse_codecs(name))
        if (found := seconds(candidate)) <= best * (1.0 - LEAST_GAIN):
            chosen, best = candidate, found
    return chosen
