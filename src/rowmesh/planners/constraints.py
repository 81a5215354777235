"""What a planner must obey beyond memory: pins, tables kept together, a cap on a rank's bytes."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rowmesh.errors import InputError, PlanError, did_you_mean
from rowmesh.placement import TablePlan
from rowmesh.placement.groups import Groups
from rowmesh.topology import Topology

__all__ = ["EXCHANGES", "SPLITS", "Constraints", "Pin", "parse_constraints"]

SPLITS: Final = (
    "data_parallel",
    "row_wise",
    "table_wise",
    "table_row_wise",
    "column_wise",
    "grid",
)
EXCHANGES: Final = ("rows", "pooled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """What is fixed for one table; None leaves it to the planner.

    Args:
        ranks: The only ranks that may hold its rows. A row-wise table lies on all of them, a
            table-wise one on one of them, a table-row-wise one on those of one host.
        host: The same for the ranks of one host.
        split: data_parallel, row_wise, table_wise, table_row_wise, column_wise or grid.
        columns: Column pieces, for column_wise and grid.
        exchange: rows or pooled, also where pooled is not bit-exact.
        dedup: Ask for each distinct row once (`rows` exchange).
        group: Ranks in its shard groups. With several groups ``ranks`` and ``host`` are of the
            first.

    Raises:
        InputError: If a word is unknown, or fields contradict each other.
    """

    ranks: tuple[int, ...] | None = None
    host: int | None = None
    split: str | None = None
    columns: int | None = None
    exchange: str | None = None
    dedup: bool | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        for what, word, known in (
            ("split", self.split, SPLITS),
            ("exchange", self.exchange, EXCHANGES),
        ):
            if word is not None and word not in known:
                raise InputError(f"unknown {what} {word!r}{did_you_mean(word, known)}")
        for what in ("host", "columns", "group"):
            if type(getattr(self, what)) not in (int, type(None)):
                raise InputError(f"{what} is {getattr(self, what)!r}, but must be a whole number")
        if self.group is not None and self.group < 1:
            raise InputError(f"group is {self.group}, but must be a number of ranks from 1")
        if self.ranks is not None:
            if any(type(rank) is not int for rank in self.ranks):
                raise InputError(f"ranks {list(self.ranks)} must be whole numbers")
            object.__setattr__(self, "ranks", tuple(sorted(self.ranks)))
            if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
                raise InputError(f"ranks {list(self.ranks)} must be one or more, distinct, from 0")
            if self.host is not None:
                raise InputError(f"ranks {list(self.ranks)} and host {self.host}: say one of them")
        if self.split == "data_parallel" and (self.ranks is not None or self.host is not None):
            raise InputError("a data_parallel table is on all ranks: pin its split or its ranks")
        if self.split == "data_parallel" and self.exchange == "pooled":
            raise InputError("no sums of a data_parallel table travel: leave out exchange 'pooled'")
        if self.columns is not None and (
            self.columns < 1 or self.split not in ("column_wise", "grid")
        ):
            raise InputError(
                f"columns is {self.columns} with split {self.split!r}: it takes a number from 1, "
                f"and split column_wise or grid"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """What a plan must obey.

    Args:
        pin: What is fixed, by table.
        together: Groups of tables that get the same split, and so lie on the same ranks.
        max_bytes_per_rank: Of rows and optimiser state; the topology's memory where that is less.

    Raises:
        InputError: If a table is in two groups, a group has one table, or the cap is not positive.
    """

    pin: Mapping[str, Pin] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    max_bytes_per_rank: int | None = None

    def __post_init__(self) -> None:
        members = [name for group in self.together for name in group]
        if twice := sorted({name for name in members if members.count(name) > 1}):
            raise InputError(f"tables kept together more than once: {', '.join(twice)}")
        if any(len(group) < 2 for group in self.together):
            raise InputError(f"a table cannot be kept together with itself: {self.together}")
        if self.max_bytes_per_rank is not None and self.max_bytes_per_rank < 1:
            raise InputError(f"max_bytes_per_rank is {self.max_bytes_per_rank}, but must be from 1")

    def pin_of(self, name: str) -> Pin:
        """The pin of a table; an empty one if it has none."""
        return self.pin.get(name, Pin())

    def check(self, tables: Sequence[TablePlan], topology: Topology) -> None:
        """Whether these tables and this topology can obey.

        Raises:
            InputError: If a table is not among ``tables``.
            PlanError: If a rank or host is not there, or a table cannot have what is pinned.
        """
        known = {table.name: table for table in tables}
        for name in (*self.pin, *(n for group in self.together for n in group)):
            if name not in known:
                raise InputError(f"constraints name table {name!r}{did_you_mean(name, known)}")
        for name, pin in self.pin.items():
            _check_pin(known[name], pin, topology)
        for group in self.together:
            if len(sizes := sorted({self.pin_of(n).group for n in group} - {None})) > 1:  # type: ignore[type-var]
                raise PlanError(
                    f"tables {', '.join(map(repr, sorted(group)))}, kept together, are pinned to "
                    f"shard groups of {' and '.join(map(str, sizes))} ranks: pin them alike"
                )

    def allowed(self, name: str, topology: Topology) -> tuple[int, ...]:
        """The ranks that may hold a table's rows."""
        pin = self.pin_of(name)
        if pin.host is not None:
            first = pin.host * topology.local
            return tuple(range(first, first + topology.local))
        return pin.ranks if pin.ranks is not None else tuple(range(topology.world))

    @property
    def placed(self) -> tuple[str, ...]:
        """Tables pinned to ranks or a host, or kept with one: no other rank may hold their rows."""
        pinned = {n for n, p in self.pin.items() if p.ranks is not None or p.host is not None}
        mates = {name for group in self.together if pinned & {*group} for name in group}
        return tuple(sorted(pinned | mates))

    @property
    def may_copy_all(self) -> bool:
        """Whether every table may be whole on every rank: no pin says otherwise of any."""
        said = any(p.split or p.group or p.exchange == "pooled" for p in self.pin.values())
        return not self.placed and not said

    def group_sizes(self, tables: Sequence[TablePlan], size: int) -> dict[str, int]:
        """Ranks in the shard groups of each table: as pinned, for it or one kept with it."""
        found = {table.name: self.pin_of(table.name).group or size for table in tables}
        for group in self.together:
            pinned = [p for name in group if (p := self.pin_of(name).group) is not None]
            found |= dict.fromkeys(group, pinned[0] if pinned else size)
        return found

    def inside(self, groups: Groups, topology: Topology, names: Sequence[str]) -> "Constraints":
        """The same for the places of a shard group, of these tables alone.

        Raises:
            PlanError: If a table is pinned to ranks that the first group does not have.
        """
        pins = {name: self.pin[name] for name in names if name in self.pin}
        together = tuple(group for group in self.together if group[0] in names)
        if groups.count > 1:
            pins = {n: self._inside(n, pin, groups, topology) for n, pin in pins.items()}
        return replace(self, pin=pins, together=together)

    def _inside(self, name: str, pin: Pin, groups: Groups, topology: Topology) -> Pin:
        if pin.ranks is None and pin.host is None:
            return pin
        ranks = self.allowed(name, topology)
        places = tuple(groups.place(rank) for rank in ranks if groups.group(rank) == 0)
        if not places or (pin.ranks is not None and len(places) < len(ranks)):
            raise PlanError(
                f"table {name!r} is pinned to ranks {list(ranks)}, but the first shard group has "
                f"{list(groups.members(0))}: pin it there, or its group too"
            )
        return replace(pin, ranks=places, host=None)


def _check_pin(table: TablePlan, pin: Pin, topology: Topology) -> None:
    where = f"table {table.name!r} is pinned to"
    if pin.ranks is not None and max(pin.ranks) >= topology.world:
        raise PlanError(
            f"{where} rank {max(pin.ranks)}, but there are {topology.world}: use 0 to "
            f"{topology.world - 1}"
        )
    if pin.host is not None and not 0 <= pin.host < topology.hosts:
        raise PlanError(
            f"{where} host {pin.host}, but there are {topology.hosts}: use 0 to "
            f"{topology.hosts - 1}"
        )
    if pin.exchange == "pooled" and str(table.pooling) == "none":
        raise PlanError(f"{where} pooled, but is a sequence table: its exchange must be rows")


def parse_constraints(document: Mapping[str, Any]) -> Constraints:
    """Constraints from the tables of a TOML file or the objects of a JSON one.

    ``{"pin": {"user": {"split": "row_wise"}}, "together": [["a", "b"]]}``

    Raises:
        InputError: If a field is unknown or has the wrong type; it is named.
    """
    values = _fields(document, Constraints, "constraints")
    pins = _mapping(values.pop("pin", {}), "constraints.pin")
    together = values.pop("together", [])
    names = "constraints.together must be a list of lists of table names"
    if not isinstance(together, list | tuple) or not all(_are(group, str) for group in together):
        raise InputError(f"{names}, got {together!r}")
    _check_kind(values, "max_bytes_per_rank", int, "constraints")
    return Constraints(
        pin={name: _parse_pin(pin, f"constraints.pin.{name}") for name, pin in pins.items()},
        together=tuple(tuple(group) for group in together),
        **values,
    )


def _parse_pin(document: Any, where: str) -> Pin:
    values = _fields(document, Pin, where)
    for name in ("host", "columns", "group"):
        _check_kind(values, name, int, where)
    for name in ("split", "exchange"):
        _check_kind(values, name, str, where)
    _check_kind(values, "dedup", bool, where)
    ranks = values.get("ranks")
    if ranks is not None:
        if not _are(ranks, int):
            raise InputError(f"{where}.ranks must be a list of ranks, got {ranks!r}")
        values["ranks"] = tuple(ranks)
    try:
        return Pin(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _fields(document: Any, kind: type, where: str) -> dict[str, Any]:
    known = [f.name for f in dataclasses.fields(kind)]
    for name in _mapping(document, where):
        if name not in known:
            raise InputError(f"{where}: unknown field {name!r}{did_you_mean(str(name), known)}")
    return dict(document)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a table of names, got {value!r}")
    return value


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(v, kind) and not isinstance(v, bool) for v in values
    )


def _check_kind(values: Mapping[str, Any], name: str, kind: type, where: str) -> None:
    value = values.get(name)
    if value is not None and (
        not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
    ):
        raise InputError(f"{where}.{name} must be {kind.__name__}, got {value!r}")
