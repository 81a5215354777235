"""Expected bytes and work of a table, from statistics alone.

The formulas are those of docs/planner.md. Planners compare them; `predict` counts exactly, but
needs the batches.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rowmesh.cost.buckets import expect_dense, sum_elements
from rowmesh.cost.codecs import vector_on
from rowmesh.cost.host_copies import expect_host_copies
from rowmesh.cost.load import LINES, Load, Part, lay, lay_groups, no_load, spread
from rowmesh.cost.merged import expect_merged
from rowmesh.cost.rates import Rates, RowCost
from rowmesh.errors import PlanError
from rowmesh.placement import Copies, Exchange, TablePlan, hot_ids
from rowmesh.placement.codecs import EXACT, WireForm
from rowmesh.placement.columns import num_blocks
from rowmesh.placement.groups import Groups
from rowmesh.placement.memory import RULE_STATES, RuleState
from rowmesh.stats import Accesses
from rowmesh.topology import Topology

__all__ = [
    "expect_alike",
    "expect_hot",
    "expect_table",
]

_ID = 4.0
_ROWWISE = RULE_STATES["rowwise_adagrad"]
_RATES = Rates()
_Lines = NDArray[np.float64]
_Number = float | _Lines  # of one table, or of each of many


@dataclass(frozen=True, slots=True)
class _Use:
    """Means of one rank's batch: q requests, d distinct rows, b bags; U rows of all ranks, h of a
    host's."""

    rows: _Number  # of the table
    q: _Number
    d: _Number
    b: _Number
    union: _Number
    host: _Number
    trained: float  # 1, or 0 for a frozen table
    weight: float  # bytes of a sample weight

    def zeros(self) -> _Lines:
        """Lines of a load, one column for each table if there are many."""
        return np.zeros((LINES, *np.shape(self.q)))


def _use(table: TablePlan, accesses: Accesses, world: int, local: int = 1) -> tuple[float, ...]:
    """Rows, q, d, b, U, h."""
    rows, distinct = float(table.num_embeddings), accesses.distinct
    return (
        rows,
        accesses.requests,
        min(rows, distinct),
        accesses.bags,
        min(rows, accesses.union(world)),
        min(rows, accesses.union(local) if table.merged else distinct),
    )


def expect_table(
    table: TablePlan,
    accesses: Accesses,
    *,
    topology: Topology,
    state: RuleState = _ROWWISE,
    rates: Rates = _RATES,
    tree: str = "flat",
    groups: Groups | None = None,
    steps_apart: bool = False,
    form: WireForm = EXACT,
) -> Load:
    """What one table adds to every rank's bytes and work in a training step.

    Every rank is a source, and every column piece is asked for by itself. With n owners of a
    piece, s and g = 4 x columns the bytes of its rows and gradients, per (source, owner):
    `rows`: d/n id + d/n g there, d/n s back (q for d without dedup); merged: so between a rank
    and a peer of the owner on its host, and between that and the owner for h instead of d;
    `pooled`: q/n id + p g there, p g back, p = b (1 - (1 - 1/n)^(q/b)), and 4 q/n of weights;
    `pooled` with rows=host and n > 1, through the relay (h, l) of source (h', l): q id + b g
    there, b g back; the relay and each owner as in `rows`, for one source of every host;
    copies: d/W id + d/W g there, U/W (g + id) back, a set of ids at most a bit for every row.
    Owners of a row in different pieces send 4 bytes a column block to each other for each of
    their U/n touched rows, if the update rule adds squares. Frozen tables send nothing back.

    Work, by the row costs of ``rates`` at the piece's columns: `rows`: id q at every rank,
    (lookup + update) W d/n at an owner, merged H h/n there, and at every rank d of both again for
    its host; `pooled`: bag_id W q/n + bag_update U/n at an owner;
    relayed: id H q at a relay, the owners as in `rows`; copies: id q + lookup d + update U.

    Hot rows are copies whose gradients the owners of the rest add up, or copies per host
    (`expect_host_copies`); q, d and U are parted by the accesses of single rows.

    With shard ``groups`` each is a mesh of its own, but for hot rows on every rank, whose sums are
    made at the owners' places of all groups. U is of all ranks, or of a group if groups step apart,
    each by its own gradients. Their sync is not counted (`rowmesh.cost.sync`).

    With codecs the bytes of vectors are those of ``form``, and work is added for each vector that a
    rank encodes or decodes.

    Raises:
        PlanError: If all of the table has copies per host.
        InputError: If it has hot rows, and the accesses of single rows are not known.
    """
    world = topology.world
    groups = groups or Groups(world=world, size=world)
    shape, total = groups.shape(topology), no_load(world)
    for tier, rows in table.hot:
        hot, accesses = accesses.part(hot_ids(rows, where=f"table {table.name!r}"))
        if tier.copies is Copies.HOST:
            load = expect_host_copies(
                table, tier, hot, rows.count, topology=shape, rates=rates, form=form
            )
            total += spread(load, groups)
            continue
        total += expect_hot(
            table,
            hot,
            rows.count,
            tier.sums,
            topology=topology,
            rates=rates,
            tree=tree,
            groups=groups,
            form=form,
        )
    rest = replace(table, tiers=table.tiers[-1:])
    stepped = groups.size if steps_apart else world
    numbers = _use(table, accesses, stepped, shape.local)
    parts = _parts(rest, numbers, shape, state, rates, form)
    total += lay_groups(parts, table.rest.ranks, groups=groups, topology=topology)
    if table.rest.sums == "dense":
        total += _dense_sums(table, table.num_embeddings, topology, tree, form)
    return total


def expect_hot(
    table: TablePlan,
    accesses: Accesses,
    count: int,
    sums: str,
    *,
    topology: Topology,
    rates: Rates = _RATES,
    tree: str = "flat",
    groups: Groups | None = None,
    form: WireForm = EXACT,
) -> Load:
    """What ``count`` hot rows of a table add, whose accesses these are.

    ``dense`` sums are as of a dense bucket of (columns + 1) x rows elements. Those of ``bucket``
    travel with the dense layers and are counted with them (`bucket_sizes`).
    """
    _, q, d, b, union, host = _use(table, accesses, topology.world)
    use = _Use(float(count), q, d, b, union, host, float(table.trainable), 0.0)
    widths = [last - first for first, last in table.columns()]
    groups = groups or Groups(world=topology.world, size=topology.world)
    ranks = np.array([groups.move(table.rest.ranks, m) for m in range(groups.count)])
    adders = ranks.reshape(groups.count, len(widths), -1).swapaxes(0, 1)  # [piece, group, owner]
    owners = adders.size // len(widths)
    parts = [
        _copies(table, use, topology, owners, rates.row_cost(width), sums, form) for width in widths
    ]
    total = lay(parts, adders.ravel().tolist(), topology=topology)
    return total + _dense_sums(table, count, topology, tree, form) if sums == "dense" else total


def _dense_sums(
    table: TablePlan, count: int, topology: Topology, tree: str, form: WireForm
) -> Load:
    elements = sum_elements(table, count)
    load = expect_dense(elements, topology=topology, tree=tree, form=form, edge="hot gradients")
    return replace(load, kinds=frozenset({"hot dense"} if elements else ()))


def expect_alike(
    tables: Sequence[TablePlan],
    accesses: Sequence[Accesses],
    *,
    topology: Topology,
    state: RuleState = _ROWWISE,
    rates: Rates = _RATES,
) -> list[Part]:
    """Column pieces of many tables, which differ in names, rows and accesses only, not yet laid.

    Every number of a part is an array over ``tables``, every line ``[9, tables]``.
    """
    use = functools.partial(_use, world=topology.world, local=topology.local)
    uses = [use(t, a) for t, a in zip(tables, accesses, strict=True)]
    return _parts(tables[0], np.array(uses).T, topology, state, rates, EXACT)


def _parts(
    table: TablePlan,
    numbers: Sequence[_Number] | _Lines,
    topology: Topology,
    state: RuleState,
    rates: Rates,
    form: WireForm,
) -> list[Part]:
    tier = table.rest
    if len(table.tiers) > 1 or tier.copies is Copies.HOST:
        raise PlanError(f"table {table.name!r}: the bytes of {table.word} cannot be expected yet")
    trained, weight = float(table.trainable), 4.0 if table.weighted else 0.0
    rows, q, d, b, union, host = numbers
    use = _Use(rows, q, d, b, union, host, trained, weight)
    if tier.copies is Copies.WORLD:
        cost = rates.row_cost(table.embedding_dim)
        return [_copies(table, use, topology, topology.world, cost, tier.sums, form)]
    owners = len(tier.ranks) // tier.split.columns
    widths = [last - first for first, last in table.columns()]
    squares = 0.0 * use.union
    if len(widths) > 1 and table.trainable and state.adds_squares:
        squares = 4.0 * use.union / owners
    costs = {w: rates.row_cost(w) for w in set(widths)}
    by_width = {w: _piece(table, use, topology, owners, c, squares, form) for w, c in costs.items()}
    return [by_width[width] for width in widths]


def _piece(
    table: TablePlan,
    use: _Use,
    topology: Topology,
    n: int,
    cost: RowCost,
    squares: _Number,
    form: WireForm,
) -> Part:
    columns, edge = cost.dim, table.exchange.value
    vector, back = (vector_on(e, columns, form, table=table) for e in (edge, "backward"))
    trained = use.trained * back.num_bytes  # bytes of a gradient, if there is one
    asker_s = vector.decode_s + use.trained * back.encode_s
    owner_s = vector.encode_s + use.trained * back.decode_s
    d = use.d if table.dedup or table.exchange is Exchange.POOLED else use.q
    owned = topology.world * d / n * (cost.lookup_s + use.trained * cost.update_s)
    near = host = use.zeros()
    if table.merged:
        numbers = use.q, use.d, use.host
        base, near, owner = expect_merged(table, numbers, use.zeros, topology, n, cost, form)
        kind = "merged"
    elif table.exchange is Exchange.ROWS:
        base, near, owner = _direct(
            use,
            topology,
            n,
            out=d / n * _ID,
            back=d / n * vector.num_bytes,
            gradient=d / n * trained,
        )
        _add_codec(base, owner, topology, n, d / n * asker_s, d / n * owner_s)
        base[8] += use.q * cost.id_s
        owner[8], kind = owner[8] + owned, "rows"
    elif table.rest.split.rows == "host" and n > 1:
        row = vector_on("rows", columns, form, table=table)
        base, host, owner = _relayed(topology, n, use, row.num_bytes, vector.num_bytes, trained)
        base[8] = use.b * asker_s
        host[8], kind = topology.hosts * (use.q * cost.id_s + use.b * owner_s), "relayed"
        host[8] += topology.hosts * d * (row.decode_s + use.trained * back.encode_s)
        served = row.encode_s + use.trained * back.decode_s
        owner[8] = owned + topology.world * d / n * served
    else:
        length = use.q / np.maximum(use.b, 1e-300)  # without bags there are no sums either
        sums = use.b * (1.0 - (1.0 - 1.0 / n) ** length)
        ids = use.q / n * (_ID + use.weight)
        base, near, owner = _direct(
            use, topology, n, out=ids, back=sums * vector.num_bytes, gradient=sums * trained
        )
        _add_codec(base, owner, topology, n, sums * asker_s, sums * owner_s)
        owner[8], kind = owner[8] + topology.world * use.q / n * cost.bag_id_s, "pooled"
        owner[8] += use.trained * use.union / n * cost.bag_update_s
    blocks = num_blocks(table.embedding_dim)
    amount = squares * columns * blocks / table.embedding_dim
    owner[2] += amount * (table.rest.split.columns - 1)
    owner[3] += squares * blocks - amount  # of all other pieces
    return Part(kind, base, near, host, owner, amount)


def _direct(
    use: _Use, topology: Topology, n: int, *, out: _Number, back: _Number, gradient: _Number
) -> tuple[_Lines, _Lines, _Lines]:
    """Base, near and owner lines of n owners.

    Each rank sends each owner ``out`` bytes and, in backward, ``gradient``; ``back`` come back.
    """
    base, near, owner = use.zeros(), use.zeros(), use.zeros()
    near_ranks, far_ranks = topology.local - 1, topology.world - topology.local
    for first, there, again in ((0, out + gradient, back), (4, gradient, 0.0 * back)):
        base[first + 2 : first + 4] = n * there, n * again
        near[first : first + 4] = there, again, -there, -again
        inside = again * near_ranks - there, there * near_ranks - again
        owner[first : first + 4] = *inside, again * far_ranks, there * far_ranks
    return base, near, owner


def _add_codec(
    base: _Lines, owner: _Lines, topology: Topology, n: int, asker_s: _Number, owner_s: _Number
) -> None:
    """Seconds of codecs for what each rank and each of n owners send each other, but to itself."""
    base[8] = n * asker_s
    owner[8] = (topology.world - 1) * owner_s - asker_s


def _relayed(
    topology: Topology, n: int, use: _Use, row: float, pooled: float, trained: float
) -> tuple[_Lines, _Lines, _Lines]:
    """Base, host and owner lines of an exchange through the relays of the owners' host."""
    hosts, local = topology.hosts, topology.local
    vector, share = use.b * pooled, hosts * use.d / n
    base, host, owner = use.zeros(), use.zeros(), use.zeros()
    for first, there, back, ask, answer in (
        (
            0,
            use.q * (_ID + use.weight) + use.b * trained,
            vector,
            share * (_ID + trained),
            share * row,
        ),
        (4, use.b * trained, 0.0 * vector, share * trained, 0.0 * share),
    ):
        base[first + 2 : first + 4] = there, back
        across = back * (hosts - 1) - there, there * (hosts - 1) - back
        host[first : first + 4] = n * ask, n * answer, *across
        owner[first : first + 2] = answer * (local - 1) - ask, ask * (local - 1) - answer
    return base, host, owner


def _copies(
    table: TablePlan,
    use: _Use,
    topology: Topology,
    owners: int,
    cost: RowCost,
    sums: str,
    form: WireForm,
) -> Part:
    """Copies on all ranks, whose sums so many owners make if they are sparse."""
    part = vector_on("hot gradients", cost.dim, form)
    gradient = part.num_bytes
    base, near, owner = use.zeros(), use.zeros(), use.zeros()
    kind = ""
    if table.trainable and sums == "sparse":
        bits = use.rows / 32.0  # a set travels as a list or a bitmap
        out = np.minimum(use.d, bits) * _ID + use.d * gradient
        back = np.minimum(use.union, bits) * _ID + use.union * gradient
        base, near, owner = _direct(
            use, topology, owners, out=out / owners, back=back / owners, gradient=0.0 * out
        )
        for lines in (base, near, owner):  # all of it is backward
            lines[4:8] = lines[:4]
        kind = "copies"
        if topology.world > 1:
            base[8] = use.d * part.encode_s + use.union * part.decode_s
            arriving = topology.world * use.d * part.decode_s
            owner[8] = (arriving + use.union * part.encode_s) / owners  # one code for all
    base[8] += use.q * cost.id_s + use.d * cost.lookup_s
    base[8] += use.trained * use.union * cost.update_s
    if sums != "sparse":  # lines of all rows are blanked and added, of touched ones put and taken
        base[8] += use.trained * 2.0 * (use.rows + use.union) * cost.lookup_s
    return Part(kind, base, near, use.zeros(), owner, 0.0 * use.q)
