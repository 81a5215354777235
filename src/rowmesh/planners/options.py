"""Which ways a table may be split and travel: the options every planner chooses from."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from rowmesh.errors import InputError, PlanError, did_you_mean
from rowmesh.placement import Copies, Exchange, Split, TablePlan, Tier
from rowmesh.placement.columns import num_blocks
from rowmesh.planners.constraints import EXCHANGES, SPLITS, Constraints, Pin
from rowmesh.stats import Accesses
from rowmesh.tables import PoolingType
from rowmesh.topology import Topology

__all__ = ["Option", "Unit", "Wishes", "enumerate_units"]

SMALL_TABLE_BYTES = 1 << 20  # of tables that `auto` may copy to every rank
_COLUMNS = (2, 4, 8)
_ROWS_OF = {"column_wise": "none", "row_wise": "all", "table_row_wise": "host", "grid": "host"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What is asked for all tables alike: the arguments of `make_plan`.

    Raises:
        InputError: If a word is unknown.
    """

    split: str = "auto"
    exchange: str = "auto"
    dedup: bool = True
    allow_inexact: bool = False
    merged: bool = False

    def __post_init__(self) -> None:
        for word, known, what in (
            (self.split, ("auto", *SPLITS), "split"),
            (self.exchange, ("auto", *EXCHANGES), "exchange"),
        ):
            if word not in known:
                raise InputError(f"unknown {what} {word!r}{did_you_mean(word, known)}")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to split the tables of a unit, and the exchange of each."""

    split: str
    columns: int
    exchanges: tuple[Exchange, ...]

    @property
    def word(self) -> str:
        """As people say it: ``row_wise rows``, ``column_wise(4) pooled``, ``data_parallel``."""
        split = self.split if self.columns == 1 else f"{self.split}({self.columns})"
        names = dict.fromkeys(str(e) for e in self.exchanges)
        return split if self.split == "data_parallel" else f"{split} {'+'.join(names)}"

    def place(self, table: TablePlan, number: int, ranks: tuple[int, ...]) -> TablePlan:
        """``table``, the unit's ``number``-th, under this option on ``ranks``."""
        copies = Copies.WORLD if self.split == "data_parallel" else Copies.GROUP
        split = Split()
        if self.split in _ROWS_OF:
            rows = _ROWS_OF[self.split]
            split = Split(kind="boxes", columns=self.columns, rows=rows)  # type: ignore[arg-type]
        tier = Tier(ranks=ranks, copies=copies, split=split)
        exchange = self.exchanges[number]
        merged = table.merged and exchange is Exchange.ROWS and copies is Copies.GROUP
        return replace(table, tiers=(tier,), exchange=exchange, merged=merged)

    def place_all(
        self, tables: Sequence[TablePlan], ranks: tuple[int, ...]
    ) -> tuple[TablePlan, ...]:
        """All tables of a unit on ``ranks``."""
        return tuple(self.place(table, i, ranks) for i, table in enumerate(tables))


@dataclass(frozen=True, slots=True)
class Unit:
    """Tables placed as one: a single table, or some that are kept together."""

    tables: tuple[TablePlan, ...]
    accesses: tuple[Accesses, ...]
    ranks: tuple[int, ...]  # that may hold rows, ascending
    options: tuple[Option, ...]

    @property
    def name(self) -> str:
        """Of the first table."""
        return self.tables[0].name

    @property
    def shape(self) -> Hashable:
        """Units of the same shape differ in names, rows and accesses only."""
        tables = tuple(
            (
                *(t.embedding_dim, t.data_type, t.virtual_shards),
                *(t.trainable, t.weighted, t.dedup, t.merged),
            )
            for t in self.tables
        )
        return tables, self.ranks, self.options

    @property
    def label(self) -> str:
        """For messages."""
        names = ", ".join(repr(t.name) for t in self.tables)
        return f"table {names}" if len(self.tables) == 1 else f"tables {names}, kept together,"


def enumerate_units(
    tables: Sequence[TablePlan],
    topology: Topology,
    *,
    accesses: Mapping[str, Accesses],
    wishes: Wishes,
    constraints: Constraints,
) -> list[Unit]:
    """The units of ``tables`` with all their options, in the order of their names.

    Raises:
        InputError: If a constraint names an unknown table, or a table has no statistics.
        PlanError: If a table's constraints leave it no option.
    """
    constraints.check(tables, topology)
    for table in tables:
        if table.name not in accesses:
            raise InputError(f"table {table.name!r} has no statistics")
    by_name = {table.name: table for table in tables}
    groups = [tuple(sorted(group)) for group in constraints.together]
    grouped = {name for group in groups for name in group}
    groups += [(name,) for name in by_name if name not in grouped]
    units = []
    for group in sorted(groups):
        pins = [constraints.pin_of(name) for name in group]
        members = tuple(
            _as_wished(by_name[name], pin, wishes, topology)
            for name, pin in zip(group, pins, strict=True)
        )
        allowed = [set(constraints.allowed(name, topology)) for name in group]
        ranks = tuple(sorted(set.intersection(*allowed)))
        unit = Unit(members, tuple(accesses[name] for name in group), ranks, ())
        if not ranks:
            raise PlanError(f"{unit.label} are pinned to different ranks: pin them alike")
        units.append(replace(unit, options=_options(unit, pins, topology, wishes)))
    return units


def _as_wished(table: TablePlan, pin: Pin, wishes: Wishes, topology: Topology) -> TablePlan:
    dedup = wishes.dedup if pin.dedup is None else pin.dedup
    shards = max(table.virtual_shards, 16 * topology.world)
    merged = wishes.merged and dedup  # where its exchange is rows
    return replace(table, dedup=dedup, merged=merged, virtual_shards=shards)


def _options(
    unit: Unit, pins: Sequence[Pin], topology: Topology, wishes: Wishes
) -> tuple[Option, ...]:
    pinned = sorted({(pin.split, pin.columns) for pin in pins if pin.split is not None}, key=str)
    if len(pinned) > 1:
        words = " and ".join(str(split) for split, _ in pinned)
        raise PlanError(f"{unit.label} are pinned to {words}: pin one split, or part them")
    if pinned:
        shapes = _pinned_shapes(unit, topology, *pinned[0])
    elif wishes.split != "auto":
        shapes = _wished_shapes(unit, topology, str(wishes.split))
    else:
        shapes = _auto_shapes(unit, topology)
    found: dict[Option, None] = {}
    even = ("row_wise", "data_parallel")
    for split, columns in shapes:
        known = [
            _exchanges(table, pin, split, unit, wishes)
            for table, pin in zip(unit.tables, pins, strict=True)
        ]
        for preferred in Exchange:
            chosen = tuple(preferred if preferred in words else words[0] for words in known)
            # The same rows from all ranks instead of a few are as many, but evenly spread.
            if ("row_wise", 1) in shapes and split not in even and set(chosen) == {Exchange.ROWS}:
                continue
            found[Option(split, columns, chosen)] = None
    return tuple(found)


def _exchanges(
    table: TablePlan, pin: Pin, split: str, unit: Unit, wishes: Wishes
) -> tuple[Exchange, ...]:
    """Exchanges a table may use; of `auto` only those that keep the plan bit-exact."""
    if table.pooling is PoolingType.NONE:
        return (Exchange.ROWS,)
    asked = pin.exchange or (None if wishes.exchange == "auto" else wishes.exchange)
    if asked is not None:
        return (Exchange(asked),)
    inexact = split == "row_wise" and len(unit.ranks) > 1
    if split == "data_parallel" or (inexact and not wishes.allow_inexact):
        return (Exchange.ROWS,)
    return tuple(Exchange)


def _hosts(unit: Unit, topology: Topology) -> list[int]:
    """Allowed ranks on each host that has some."""
    if len(unit.ranks) == topology.world:
        return [topology.local] * topology.hosts
    counts: dict[int, int] = {}
    for rank in unit.ranks:
        counts[topology.host(rank)] = counts.get(topology.host(rank), 0) + 1
    return list(counts.values())


def _fits(unit: Unit, topology: Topology, split: str, columns: int) -> bool:
    """Whether there are ranks and columns for so many column pieces."""
    if columns > min(num_blocks(t.embedding_dim) for t in unit.tables):
        return False
    if split == "column_wise":
        return columns <= len(unit.ranks)
    hosts = _hosts(unit, topology)
    return min(hosts) // -(-columns // len(hosts)) >= 1


def _auto_shapes(unit: Unit, topology: Topology) -> list[tuple[str, int]]:
    everywhere = len(unit.ranks) == topology.world
    sizes = [t.num_embeddings * t.row_bytes for t in unit.tables]
    small = everywhere and max(sizes) <= SMALL_TABLE_BYTES
    shapes = [("data_parallel", 1)] if small else []
    if topology.world == 1:
        return shapes or [("row_wise", 1)]
    if len(unit.ranks) == 1:
        return [("table_wise", 1)]
    hosts = _hosts(unit, topology)
    shapes += [("row_wise", 1), ("table_wise", 1)]
    if len(hosts) > 1 and max(hosts) > 1:  # on one host it is row-wise
        shapes.append(("table_row_wise", 1))
    shapes += [("column_wise", k) for k in _COLUMNS if _fits(unit, topology, "column_wise", k)]
    if min(hosts) > 1:
        fits = [k for k in _COLUMNS if k <= len(hosts) and _fits(unit, topology, "grid", k)]
        shapes += [("grid", k) for k in fits]
    return shapes


def _wished_shapes(unit: Unit, topology: Topology, split: str) -> list[tuple[str, int]]:
    """Of a split wished for all tables: one that cannot be cut by columns stays whole."""
    if split == "data_parallel" and len(unit.ranks) < topology.world:
        raise PlanError(
            f"{unit.label} is pinned to ranks {list(unit.ranks)}, but data_parallel needs all "
            f"{topology.world}: drop the pin, or pin another split"
        )
    if split not in ("column_wise", "grid"):
        return [(split, 1)]
    fits = [(split, k) for k in _COLUMNS if _fits(unit, topology, split, k)]
    return fits or [("table_wise", 1)]


def _pinned_shapes(
    unit: Unit, topology: Topology, split: str | None, columns: int | None
) -> list[tuple[str, int]]:
    assert split is not None
    if split not in ("column_wise", "grid"):
        return _wished_shapes(unit, topology, split)
    asked = _COLUMNS if columns is None else (columns,)
    fits = [(split, k) for k in asked if _fits(unit, topology, split, k)]
    if not fits:
        blocks = min(num_blocks(t.embedding_dim) for t in unit.tables)
        raise PlanError(
            f"{unit.label} cannot be {split} in {asked[0]} pieces: its columns allow {blocks}, and "
            f"its ranks {len(unit.ranks)} on {len(_hosts(unit, topology))} hosts; pin fewer "
            f"columns, more ranks or another split"
        )
    return fits
