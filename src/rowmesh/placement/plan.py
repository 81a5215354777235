"""The words of a plan. What they must obey is in `rowmesh.placement.rules`."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import PlanError, did_you_mean
from rowmesh.placement.columns import column_bounds
from rowmesh.placement.groups import Groups
from rowmesh.placement.homes import Homes
from rowmesh.placement.why import GroupsChoice, HotChoice, Why
from rowmesh.tables import BYTES_OF, PoolingType, parse_dtype
from rowmesh.topology import Topology

__all__ = [
    "PLAN_VERSION",
    "Codec",
    "Copies",
    "Exactness",
    "Exchange",
    "HotSet",
    "MeshShape",
    "Plan",
    "Predicted",
    "Split",
    "Sync",
    "TablePlan",
    "Tier",
]

PLAN_VERSION = 1


class Copies(StrEnum):
    """How many copies of a row exist: one a rank, one a host, or one a shard group."""

    WORLD = "world"
    HOST = "host"
    GROUP = "group"


class Exchange(StrEnum):
    """What travels: distinct rows (pooled where the sample is), or vectors pooled by owners."""

    ROWS = "rows"
    POOLED = "pooled"


class Exactness(StrEnum):
    """How a plan's training relates to the oracle's (docs/exactness.md)."""

    E0 = "E0"
    E1 = "E1"
    E2 = "E2"
    E3 = "E3"
    E4 = "E4"

    @property
    def meaning(self) -> str:
        """One line for people."""
        return {
            "E0": "bit-equal to the oracle",
            "E1": "equal to the oracle within a stated tolerance",
            "E2": "same model, another optimiser trajectory",
            "E3": "lossy numbers on the wire",
            "E4": "another model",
        }[self.value]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """``hosts`` x ``local`` ranks in shard groups of ``group`` ranks (`Groups`).

    Contiguous groups are [m*N, (m+1)*N), strided ones {r : r mod M == m}. A table may have groups
    of another size.
    """

    hosts: int
    local: int
    group: int
    layout: Literal["contiguous", "strided"] = "contiguous"

    @property
    def topology(self) -> Topology:
        """Hosts and local ranks alone."""
        return Topology(hosts=self.hosts, local=self.local)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotSet:
    """A set of rows kept in a sidecar file of sorted ids beside the plan (`make_hot_set`).

    ``ids`` are in memory only, ascending; None in a plan that was read without its sidecars.
    """

    count: int
    sha256: str
    file: str
    ids: NDArray[np.int64] | None = field(default=None, init=False, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How one copy is cut. ``whole``: not at all. ``boxes``: k column pieces, the rows of each
    split over its ranks (``all``), over its ranks, all of one host (``host``), or not (``none``).

    With n = ranks / k, piece c lies on the tier's ranks [c * n, (c + 1) * n).
    """

    kind: Literal["whole", "boxes"] = "whole"
    columns: int = 1
    rows: Literal["all", "host", "none"] = "none"

    @property
    def word(self) -> str:
        """The usual name of the split."""
        if self.kind == "whole":
            return "whole"
        names = {(False, "all"): "row-wise", (True, "none"): "column-wise"}
        names |= {(False, "host"): "table-row-wise", (True, "host"): "grid"}
        return names.get((self.columns > 1, self.rows), f"boxes({self.columns}, {self.rows})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """Some rows of a table, their copies, and the ranks one copy is spread over.

    ``copies=GROUP`` lists ranks of the first shard group; those at the same places of the others
    hold the same. ``rows`` is a hot set or the ``"rest"``. ``copies=WORLD`` lists every rank: each
    holds the rows. Their gradients are added up as ``sums`` says: ``sparse``, of rows that some
    rank touched, by the owner of the row, which tells all ranks; ``dense``, of all rows, as a
    bucket of its own; ``bucket``, of all rows, as part of the last bucket of the dense layers.
    """

    ranks: tuple[int, ...]
    copies: Copies = Copies.GROUP
    split: Split = field(default_factory=Split)
    rows: HotSet | Literal["rest"] = "rest"
    store: Literal["ram", "ssd"] = "ram"
    sums: Literal["sparse", "dense", "bucket"] = "sparse"


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """One table: what it is, and its tiers.

    ``virtual_shards`` (S) is fixed when the table is created and never changes with the plan.
    ``group`` is the size of its shard groups, None for that of the mesh. ``merged``: what the ranks
    of a host ask of other hosts is merged before it crosses, and the gradients are added up before
    they go back (`rowmesh.runtime.merges`).
    ``why`` is the planner's reason; plans that differ in it alone are equal.
    """

    name: str
    collection: str
    num_embeddings: int
    embedding_dim: int
    data_type: Literal["fp32", "fp16", "bf16"]
    pooling: PoolingType
    feature_names: tuple[str, ...]
    virtual_shards: int
    tiers: tuple[Tier, ...]
    exchange: Exchange = Exchange.ROWS
    dedup: bool = True
    merged: bool = False
    trainable: bool = True
    weighted: bool = False
    tower: str | None = None
    group: int | None = None
    why: Why | None = field(default=None, compare=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of weights."""
        return self.embedding_dim * BYTES_OF[parse_dtype(self.data_type)]

    @property
    def rest(self) -> Tier:
        """The tier of all rows that no hot set names."""
        return self.tiers[-1]

    @property
    def hot(self) -> tuple[tuple[Tier, HotSet], ...]:
        """The other tiers, and the rows of each."""
        return tuple((tier, tier.rows) for tier in self.tiers if tier.rows != "rest")

    def homes(self) -> Homes:
        """Owners and slots of the rest's rows, as indices into the ranks of a column piece."""
        owners = len(self.rest.ranks) // self.rest.split.columns
        return Homes(self.num_embeddings, self.virtual_shards, owners)

    def columns(self) -> list[tuple[int, int]]:
        """First and last + 1 column of each column piece of the rest."""
        return column_bounds(self.embedding_dim, self.rest.split.columns)

    @property
    def is_relayed(self) -> bool:
        """Whether sums are made on the owners' host by the asker's peer, and sent from there."""
        split = self.rest.split
        is_split = split.rows == "host" and self.homes().num_owners > 1
        return is_split and self.exchange is Exchange.POOLED

    @property
    def word(self) -> str:
        """The split as people say it: data-parallel, table-wise, row-wise, ..."""
        words = []
        for tier in self.tiers:
            whole = "data-parallel" if tier.copies is Copies.WORLD else "table-wise"
            word = whole if tier.split.kind == "whole" else tier.split.word
            if tier.rows != "rest":
                word = f"hot {tier.rows.count:,}"
            words.append(word + (" per host" if tier.copies is Copies.HOST else ""))
        return " + ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """A stack of encodings on one edge, e.g. ``("threshold(0.01, 1000)", "bf16")``."""

    edge: str
    stack: tuple[str, ...] = ("fp32",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """How replicas are kept together where a shard group is smaller than the world.

    ``gradients``: summed over groups before one step, as without groups. ``weights``: each group
    steps by itself with M times its gradient; every ``period`` steps weights and optimiser state
    become their mean, of all rows (``dense``) or of those touched (``sparse``).
    ``moments-first``: as ``weights``, but squares are summed over groups before every step.
    """

    mode: Literal["gradients", "weights", "moments-first"] = "gradients"
    period: int = 1
    form: Literal["sparse", "dense"] = "sparse"


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Expected bytes that leave a rank in a step, by link class, and seconds if calibrated."""

    host_bytes: float = 0.0
    cross_bytes: float = 0.0
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where everything lives and how it travels. Planners make it, the runtime executes it.

    ``dense`` holds the elements of each dense gradient bucket; ``tree`` is the order in which
    gradients of different ranks are added: ``flat`` (rank order) or ``host-first``. ``depth``
    is how many batches are begun at a time (`rowmesh.Pipeline`). ``hot`` says
    why a planner chose its hot rows, ``groups_choice`` its shard groups; plans that differ in these
    alone are equal.
    """

    mesh: MeshShape
    tables: tuple[TablePlan, ...]
    dense: tuple[int, ...] = ()
    tree: Literal["flat", "host-first"] = "flat"
    towers: tuple[str, ...] = ()
    codecs: tuple[Codec, ...] = ()
    sync: Sync = field(default_factory=Sync)
    depth: int = 1
    predicted: Predicted = field(default_factory=Predicted)
    hot: HotChoice | None = field(default=None, compare=False)
    groups_choice: GroupsChoice | None = field(default=None, compare=False)
    version: int = PLAN_VERSION

    @property
    def fingerprint(self) -> str:
        """Of the topology this plan is for."""
        return self.mesh.topology.fingerprint()

    @property
    def span(self) -> int:
        """Ranks, in rank order, whose gradients are added up first: a host's, or all."""
        return self.mesh.local if self.tree == "host-first" else self.mesh.hosts * self.mesh.local

    def groups(self, table: TablePlan) -> Groups:
        """The shard groups of a table; one of all ranks if every rank holds a copy."""
        world = self.mesh.hosts * self.mesh.local
        size = world if table.rest.copies is Copies.WORLD else table.group or self.mesh.group
        return Groups(world=world, size=size, layout=self.mesh.layout)

    @property
    def has_replicas(self) -> bool:
        """Whether any table has more than one shard group."""
        return any(self.groups(table).count > 1 for table in self.tables)

    @property
    def exactness(self) -> Exactness:
        """The weakest promise of any part of the plan."""
        from rowmesh.placement.rules import exactness

        return exactness(self)

    def without_hot_rows(self) -> "Plan":
        """This plan with the last tier of every table alone."""
        tables = tuple(replace(table, tiers=table.tiers[-1:]) for table in self.tables)
        return replace(self, tables=tables, hot=None)

    def validate(self) -> "Plan":
        """This plan, if it obeys the rules of the format.

        Raises:
            PlanError: Names the table, the value, the limit and the way out.
        """
        from rowmesh.placement.rules import check

        check(self)
        return self

    def table(self, name: str) -> TablePlan:
        """The plan of one table."""
        for table in self.tables:
            if table.name == name:
                return table
        raise PlanError(
            f"the plan has no table {name!r}{did_you_mean(name, [t.name for t in self.tables])}"
        )

    def __str__(self) -> str:
        from rowmesh.placement.text import render

        return render(self)
