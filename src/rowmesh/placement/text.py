"""A plan as a table that fits 100 columns."""

from rowmesh.errors import printable
from rowmesh.placement.codecs import describe_codecs
from rowmesh.placement.memory import bytes_per_rank, rule_state, state_bytes
from rowmesh.placement.plan import Copies, Plan, TablePlan

__all__ = ["MAX_TABLES", "bytes_per_rank", "render", "render_why", "shorten"]

MAX_TABLES = 40  # printed, unless asked for all
_GIB = 1 << 30
_ROWWISE = "rowwise_adagrad"


def shorten(text: str, width: int | None) -> str:
    """``text`` in at most ``width`` columns, None for all of it, printable."""
    text = printable(text)
    return text if width is None or len(text) <= width else text[: width - 3] + "..."


def _ranks(table: TablePlan, world: int, size: int) -> str:
    ranks = table.rest.ranks
    if len(ranks) == world:
        return "all"
    if len(ranks) == size and size > 1:
        return "group"
    text = ",".join(map(str, ranks))
    return text if len(text) <= 10 else f"{len(ranks)} ranks"


def _name_width(plan: Plan, max_tables: int | None) -> int:
    """Columns for names: 24, or as many as the longest has where nothing is cut."""
    names = plan.tables if max_tables is None else ()
    return max([24, *(len(shorten(table.name, None)) for table in names)])


def _row(plan: Plan, table: TablePlan, world: int, width: int) -> str:
    name, word = shorten(table.name, width), shorten(table.word, 24)
    local = all(t.copies is Copies.WORLD for t in table.tiers)
    travels = "none" if local else table.exchange.value
    if not local and table.exchange.value == "rows" and not table.dedup:
        travels += " no dedup"
    if table.merged:
        travels += " merged"
    return (
        f"{name:<{width}} {table.num_embeddings:>13,} {table.embedding_dim:>5} "
        f"{table.data_type:>4}  {word:<24} {travels:<12} "
        f"{_ranks(table, world, plan.groups(table).size)}"
    )


def _groups(plan: Plan, max_tables: int | None) -> list[str]:
    """What is said of shard groups, if there are several; ranks are those of the first."""
    if not plan.has_replicas:
        return []
    mesh, sync = plan.mesh, plan.sync
    lines = [
        f"{mesh.hosts * mesh.local // mesh.group} {mesh.layout} groups, replicas sync {sync.mode} "
        f"every {sync.period} step{'s' if sync.period > 1 else ''}, {sync.form}"
    ]
    if other := {t.name: t.group for t in plan.tables if t.group not in (None, mesh.group)}:
        text = ", ".join(f"{name} of {size}" for name, size in other.items())
        most = None if max_tables is None else 100
        lines.append(shorten(f"tables in groups of their own: {text}", most))
    return lines


def render(plan: Plan, *, max_tables: int | None = MAX_TABLES, rule: str = _ROWWISE) -> str:
    """The plan for people: a row a table, GiB per rank with the state of ``rule``, exactness.

    ``max_tables=None`` prints every table, by its whole name.
    """
    width = _name_width(plan, max_tables)
    mesh, world = plan.mesh, plan.mesh.hosts * plan.mesh.local
    label = plan.exactness
    lines = [
        f"plan for {mesh.hosts} hosts x {mesh.local} ranks, shard groups of {mesh.group}, "
        f"sums {plan.tree}" + (f", depth {plan.depth}" if plan.depth > 1 else ""),
        *_groups(plan, max_tables),
        f"exactness {label}: {label.meaning}",
        *([f"codecs {describe_codecs(plan.codecs)}"] if plan.codecs else []),
        f"{'table':<{width}} {'rows':>13} {'dim':>5} {'type':>4}  {'split':<24} "
        f"{'exchange':<12} ranks",
    ]
    lines += [_row(plan, table, world, width) for table in plan.tables[:max_tables]]
    lines += _more(plan, max_tables)
    gib = [b / _GIB for b in bytes_per_rank(plan, **state_bytes(rule_state(rule)))]
    digits = 2 if max(gib) >= 0.1 else 6
    shown = " ".join(f"{g:.{digits}f}" for g in gib[: 8 if digits == 2 else 4])
    state = "row-wise AdaGrad's state" if rule == _ROWWISE else f"the state of {rule}"
    state += " and look-ahead's" if plan.depth > 1 else ""
    lines.append(f"GiB per rank with {state}, largest {max(gib):.{digits}f}:")
    lines.append(f"  {shown}{' ...' if len(shown.split()) < world else ''}")
    if plan.hot is not None:
        lines.append(str(plan.hot))
    if plan.groups_choice is not None:
        lines.append(str(plan.groups_choice))
    predicted = plan.predicted
    if predicted.host_bytes or predicted.cross_bytes:
        lines.append(
            f"expected MB sent by a rank and step: {predicted.host_bytes / 1e6:.2f} inside hosts, "
            f"{predicted.cross_bytes / 1e6:.2f} across"
        )
    if predicted.step_s is not None:
        lines.append(f"expected ms of a step for tables and sums: {predicted.step_s * 1e3:.3f}")
    return "\n".join(lines)


def render_why(plan: Plan, *, max_tables: int | None = MAX_TABLES) -> str:
    """Why each table is placed as it is: the best other option, and what the choice saves."""
    width = _name_width(plan, max_tables)
    lines = [
        "saved against the runner-up, all other tables as planned: KB sent by a rank, ms of a step",
        f"{'table':<{width}} {'chosen':<22} {'runner-up':<22} {'KB':>11} {'ms':>9}",
    ]
    for table in plan.tables[:max_tables]:
        why = table.why
        chosen = table.word if why is None else why.chosen
        line = f"{shorten(table.name, width):<{width}} {shorten(chosen, 22):<22}"
        if why is None or why.runner_up is None:
            lines.append(f"{line} none")
            continue
        line += f" {shorten(why.runner_up, 22):<22} {_signed(why.bytes_saved / 1e3, 1):>11}"
        lines.append(f"{line} {_signed(why.seconds_saved * 1e3, 4):>9}")
    return "\n".join([*lines, *_more(plan, max_tables)])


def _signed(value: float, digits: int) -> str:
    """Rounded, without a minus before zero."""
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def _more(plan: Plan, max_tables: int | None) -> list[str]:
    more = 0 if max_tables is None else len(plan.tables) - max_tables
    return [f"... and {more} more tables; --all prints them"] if more > 0 else []
