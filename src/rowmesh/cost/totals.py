"""Expected bytes and work of a whole plan: its tables, their replicas' sync, its dense buckets."""

from collections.abc import Mapping

from rowmesh.cost.buckets import bucket_sizes, expect_dense
from rowmesh.cost.expected import expect_table
from rowmesh.cost.load import Load, no_load
from rowmesh.cost.rates import Rates
from rowmesh.cost.sync import expect_table_sync
from rowmesh.placement import Plan
from rowmesh.placement.codecs import wire_form
from rowmesh.placement.memory import RULE_STATES, RuleState
from rowmesh.stats import Accesses
from rowmesh.topology import Topology

__all__ = ["expect_each", "expect_plan", "expect_sync", "expect_tables", "total"]

_ROWWISE = RULE_STATES["rowwise_adagrad"]
_RATES = Rates()


def expect_tables(
    plan: Plan,
    accesses: Mapping[str, Accesses],
    *,
    state: RuleState = _ROWWISE,
    rates: Rates = _RATES,
) -> Load:
    """The sum over the plan's tables, without the sync of their replicas."""
    return total(expect_each(plan, accesses, state=state, rates=rates), plan.mesh.topology)


def total(loads: Mapping[str, Load], topology: Topology) -> Load:
    """The sum of tables' loads: the same bits in any order of tables."""
    return sum((loads[name] for name in sorted(loads)), no_load(topology.world))


def expect_each(
    plan: Plan,
    accesses: Mapping[str, Accesses],
    *,
    state: RuleState = _ROWWISE,
    rates: Rates = _RATES,
) -> dict[str, Load]:
    """Every table by its name, without the sync of its replicas."""
    form = wire_form(plan)
    return {
        table.name: expect_table(
            table,
            accesses[table.name],
            topology=plan.mesh.topology,
            state=state,
            rates=rates,
            tree=plan.tree,
            groups=plan.groups(table),
            steps_apart=plan.sync.mode != "gradients",
            form=form,
        )
        for table in plan.tables
    }


def expect_sync(
    plan: Plan,
    accesses: Mapping[str, Accesses],
    *,
    state: RuleState = _ROWWISE,
    rates: Rates = _RATES,
) -> Load:
    """What replicas of the plan's tables send each other, mean over steps."""
    total = no_load(plan.mesh.topology.world)
    for table in sorted(plan.tables, key=lambda table: table.name):
        total += expect_table_sync(
            table,
            accesses[table.name],
            topology=plan.mesh.topology,
            groups=plan.groups(table),
            sync=plan.sync,
            state=state,
            rates=rates,
        )
    return total


def expect_plan(
    plan: Plan,
    accesses: Mapping[str, Accesses],
    *,
    state: RuleState = _ROWWISE,
    rates: Rates = _RATES,
) -> Load:
    """The sum over the plan's tables, their replicas' sync and its dense buckets."""
    elements = sum(bucket_sizes(plan))
    dense = expect_dense(
        elements, topology=plan.mesh.topology, tree=plan.tree, form=wire_form(plan)
    )
    tables = expect_tables(plan, accesses, state=state, rates=rates)
    return dense + tables + expect_sync(plan, accesses, state=state, rates=rates)
