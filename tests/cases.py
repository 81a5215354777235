"""Random training runs: a model, a plan, batches of every rank and step, optimisers.

A `Case` is plain data, so that hypothesis can shrink it, ranks can rebuild it, and a failing one
can be read. `train_case` runs it on a mesh, `oracle_case` in one process.
"""

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.placement import (
    Copies,
    Exchange,
    Groups,
    MeshShape,
    Plan,
    Split,
    Sync,
    TablePlan,
    Tier,
    make_hot_set,
)
from rowmesh.placement.codecs import parse_codecs
from rowmesh.placement.columns import num_blocks
from rowmesh.placement.dense import bucket_elements
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.export import full_sparse_state
from rowmesh.runtime.retier import change_tiers
from rowmesh.tables import PoolingType, dense_parameters, parse_dtype
from rowmesh.topology import Topology

RULES = {
    "sgd": rm.SGD(lr=0.1),
    "rowwise": rm.RowwiseAdagrad(lr=0.1),
    "adagrad": rm.Adagrad(lr=0.1),
    "adam": rm.Adam(lr=0.1),
    "scaled": rm.MomentumScaledRowwiseAdagrad(lr=0.1),
    "halved": rm.MomentumScaledRowwiseAdagrad(lr=0.1, scale=2.0),
}
DENSE = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.1, foreach=False),
    "dyadic": functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5),
}
DRAWN_DENSE = ["adagrad", "adam", "sgd"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table and where it lives: ``ranks`` empty means a copy on every rank."""

    rows: int
    dim: int
    ranks: tuple[int, ...]
    columns: int = 1
    by_host: bool = False
    features: int = 1
    mean: bool = False
    dtype: str = "fp32"
    exchange: str = "rows"
    dedup: bool = True
    merged: bool = False
    shards: int = 16
    trainable: bool = True
    hot: tuple[int, ...] = ()
    sums: str = "sparse"  # of hot rows, or of the copies
    per_host: tuple[int, ...] = ()  # rows with a copy per host
    holder: int | None = None  # the local rank that has all of them; None if they are split
    has_many_tiers: bool = False  # every other hot row is in a tier of its own
    group: int | None = None  # size of its shard groups; ``ranks`` are of the first

    @property
    def split(self) -> Split:
        if len(self.ranks) <= 1:
            return Split()
        over = "host" if self.by_host else "all"
        rows = "none" if len(self.ranks) == self.columns else over
        return Split(kind="boxes", columns=self.columns, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Collection:
    tables: tuple[Table, ...]
    kind: str = "bags"  # bags | weighted | sequence


@dataclass(frozen=True, kw_only=True)
class Case:
    """``ids[step][rank][feature][sample]`` are the ids of one bag; ``ids`` fixes batch sizes."""

    world: int
    collections: tuple[Collection, ...]
    ids: Any = field(repr=False)
    hosts: int = 1
    tree: str = "flat"
    rule: str = "rowwise"
    dense: str = "adagrad"
    accumulate: int = 1
    skips_first: bool = False
    has_unused: bool = True
    later: tuple[Collection, ...] = ()  # with other hot rows, from the second step on
    layout: str = "contiguous"
    sync: tuple[str, int, str] = ("gradients", 1, "sparse")
    depth: int = 1
    codecs: str = "fp32"

    @property
    def num_features(self) -> int:
        return sum(t.features for c in self.collections for t in c.tables)

    def _per_host(self, name: str, table: Table, ids: tuple[int, ...]) -> Tier:
        rows = make_hot_set(name, np.array(ids))
        if table.holder is None:
            split = Split(kind="boxes", rows="host")
            ranks = tuple(range(self.world))
            return Tier(ranks=ranks, copies=Copies.HOST, rows=rows, split=split)
        ranks = tuple(range(table.holder, self.world, self.world // self.hosts))
        return Tier(ranks=ranks, copies=Copies.HOST, rows=rows)

    def plan_at(self, step: int) -> Plan:
        """The plan of a step: hot rows may change after the first."""
        changed = bool(self.later) and step > 0
        return replace(self, collections=self.later, later=()).plan() if changed else self.plan()

    def plan(self) -> Plan:
        tables = []
        for c, collection in enumerate(self.collections):
            for config, table in zip(configs(self, c), collection.tables, strict=True):
                everywhere, world = not table.ranks, tuple(range(self.world))
                ranks = world if everywhere else table.ranks
                rest = Tier(
                    ranks=ranks,
                    copies=Copies.WORLD if everywhere else Copies.GROUP,
                    split=table.split,
                    sums=table.sums if everywhere else "sparse",
                )
                step = 2 if table.has_many_tiers else 1
                tiers = [rest]
                for ids in (table.per_host[i::step] for i in range(step)):
                    if ids:
                        tiers.insert(0, self._per_host(config.name, table, ids))
                for ids in (table.hot[i::step] for i in range(step)):
                    if ids:
                        hot = make_hot_set(config.name, np.array(ids))
                        tiers.insert(
                            0, Tier(ranks=world, copies=Copies.WORLD, rows=hot, sums=table.sums)
                        )
                tables.append(
                    TablePlan(
                        name=config.name,
                        collection=f"collections.{c}",
                        num_embeddings=table.rows,
                        embedding_dim=table.dim,
                        data_type=table.dtype,
                        pooling=PoolingType(str(config.pooling)),
                        feature_names=tuple(config.feature_names),
                        virtual_shards=table.shards,
                        tiers=tuple(tiers),
                        exchange=Exchange(table.exchange),
                        dedup=table.dedup,
                        merged=table.merged,
                        trainable=table.trainable,
                        weighted=collection.kind == "weighted",
                        group=table.group,
                    )
                )
        sizes = [p.numel() for p in dense_parameters(Model(self)) if p.requires_grad]
        return Plan(
            mesh=MeshShape(
                hosts=self.hosts,
                local=self.world // self.hosts,
                group=self.world,
                layout=self.layout,
            ),
            tables=tuple(tables),
            dense=bucket_elements(sizes),
            tree=self.tree,
            sync=Sync(mode=self.sync[0], period=self.sync[1], form=self.sync[2]),
            depth=self.depth,
            codecs=parse_codecs(self.codecs),
        ).validate()

    def batch(self, step: int, rank: int) -> dict[str, Any]:
        bags = self.ids[step][rank]
        num_samples = len(bags[0])
        generator = torch.Generator().manual_seed(1000 * step + rank)
        lengths = torch.tensor([len(b) for f in bags for b in f], dtype=torch.int32)
        values = torch.tensor([i for f in bags for b in f for i in b], dtype=torch.int64)
        weights = torch.rand(len(values), generator=generator) + 0.5
        names = [f"f{k}" for k in range(self.num_features)]
        return {
            "dense": torch.randn(num_samples, 3, generator=generator),
            "labels": torch.rand(num_samples, generator=generator),
            "features": rm.KeyedJaggedTensor(
                names, values, weights, lengths=lengths, stride=num_samples
            ),
        }

    def batches_of(self, rank: int) -> list[dict[str, Any]]:
        return [self.batch(step, rank) for step in range(len(self.ids))]


def configs(case: Case, number: int) -> list[Any]:
    """Table configurations of one collection; features are numbered through the model."""
    first = sum(t.features for c in case.collections[:number] for t in c.tables)
    found = []
    for t, table in enumerate(case.collections[number].tables):
        names = [f"f{first + k}" for k in range(table.features)]
        first += table.features
        common: dict[str, Any] = {
            "name": f"c{number}_t{t}",
            "num_embeddings": table.rows,
            "embedding_dim": table.dim,
            "feature_names": names,
            "data_type": parse_dtype(table.dtype),
        }
        if case.collections[number].kind == "sequence":
            found.append(rm.EmbeddingConfig(**common))
        else:
            pooling = PoolingType.MEAN if table.mean else PoolingType.SUM
            found.append(rm.EmbeddingBagConfig(**common, pooling=pooling))
    return found


class Model(nn.Module):
    """Collections on meta, a dense layer over everything they give, one loss per sample."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        # Without another trained table in its collection, no backward would reach it.
        self.skips_first = [
            case.skips_first and any(t.trainable for t in c.tables[1:]) for c in case.collections
        ]
        self.collections = nn.ModuleList()
        width = 3
        for c, collection in enumerate(case.collections):
            tables = configs(case, c)
            if collection.kind == "sequence":
                self.collections.append(rm.EmbeddingCollection(tables, device="meta"))
            else:
                weighted = collection.kind == "weighted"
                self.collections.append(
                    rm.EmbeddingBagCollection(tables, device="meta", is_weighted=weighted)
                )
            for table, config in zip(collection.tables, tables, strict=True):
                module = self.collections[-1].table_modules()[config.name]
                module.weight.requires_grad_(table.trainable)
                width += table.dim * table.features
        torch.default_generator.manual_seed(7)  # other devices would cost a millisecond
        self.hidden = nn.Linear(width, 5)
        if case.has_unused:  # keeps its bucket from being sent in backward
            self.unused = nn.Linear(2, 2)
        self.sometimes = nn.Linear(3, 1)  # unused on ranks whose first label says so
        self.out = nn.Linear(5, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        parts = [batch["dense"]]
        for skips_first, collection in zip(self.skips_first, self.collections, strict=True):
            found = collection(batch["features"])
            if isinstance(found, dict):
                parts += [_over_sequence(jagged) for jagged in found.values()]
                if skips_first:  # an output that the loss does not use
                    parts[-len(found)] = parts[-len(found)].detach()
            else:
                parts.append(found.values())
        hidden = torch.tanh(self.hidden(torch.cat(parts, dim=1)))
        found = self.out(hidden).squeeze(1)
        if len(found) and batch["labels"][0] > 0.5:
            found = found + self.sometimes(batch["dense"]).squeeze(1)
        return (found - batch["labels"]).square()


def _over_sequence(jagged: rm.JaggedTensor) -> Tensor:
    padded = jagged.to_padded_dense(4)
    return torch.tanh(padded).sum(1)


@dataclass
class Run:
    """What training gave: losses per step, and on rank 0 the whole state."""

    losses: list[Tensor]
    ledgers: list[dict[str, dict[str, int]]]
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    copies: list[Tensor]
    host_copies: list[Tensor]
    homes: list[tuple[int, Tensor]]  # of replicas: the first of them, and what it must hold too


def host_copies_of(mesh: Mesh, model: nn.Module) -> list[Tensor]:
    """Rows and state that this rank holds for its host: the same on its peers."""
    stacks = [s for e in sharded_engines(model) for s in e.stacks]
    found = [s.host_copies(mesh.rank) for s in stacks]
    return found + [s.host_copies(mesh.rank, v) for s in stacks for v in s.home_state.values()]


def train_case(
    mesh: Mesh, case: Case, *, model: nn.Module | None = None, count: int | None = None
) -> Run:
    """Run on the ranks of ``mesh``; a step of ``accumulate`` batches at a time.

    Losses are divided by ``count``, by default the number of samples.
    """
    model = rm.shard(Model(case) if model is None else model, case.plan(), mesh)
    optimizer = rm.Optimizer(model, dense=DENSE[case.dense], sparse=RULES[case.rule])
    losses, ledgers = [], []
    batches = iter(rm.Pipeline(model).batches(case.batches_of(mesh.rank)))
    for start in range(0, len(case.ids), case.accumulate):
        group = list(itertools.islice(batches, case.accumulate))
        mesh.ledger.reset()
        if len(group) > 1:
            with optimizer.accumulate():
                for batch in group:
                    found = model(batch)
                    mesh.mean(found, count=count).backward()
        else:
            found = model(group[0])
            mesh.mean(found, count=count).backward()
        optimizer.step()
        optimizer.zero_grad()
        for engine in sharded_engines(model):
            engine.replicas.finish()
        losses.append(found.detach())
        ledgers.append(mesh.ledger.by_edge())
        if case.later and start == 0:
            change_tiers(model, case.plan_at(1), optimizer=optimizer)
    assert next(batches, None) is None
    stacks = [s for e in sharded_engines(model) for s in e.stacks]
    copies = [s.copies for s in stacks] + [v for s in stacks for v in s.copies_state.values()]
    return Run(
        losses,
        ledgers,
        rm.full_state_dict(model),
        full_sparse_state(model),
        copies,
        host_copies_of(mesh, model),
        [
            (s.layout.groups.replicas(mesh.rank)[0], tensor)
            for s in stacks
            for tensor in (s.home, *s.home_state.values())
        ],
    )


def oracle_case(case: Case) -> Run:
    """The same in one process, as ``world`` virtual ranks."""
    torch.set_num_threads(1)  # as ranks: a product of matrices rounds differently on two
    oracle = rm.Oracle(
        Model(case), dense=DENSE[case.dense], sparse=RULES[case.rule], plan=case.plan()
    )
    losses: list[Any] = []
    for start in range(0, len(case.ids), case.accumulate):
        steps = range(start, min(start + case.accumulate, len(case.ids)))
        parts = [[case.batch(step, rank) for step in steps] for rank in range(case.world)]
        losses.append(oracle.step_accumulated(parts))
        if case.later and start == 0:
            oracle.change_tiers(case.plan_at(1))
    oracle.sync()
    return Run(losses, [], dict(oracle.model.state_dict()), oracle.states, [], [], [])


@st.composite
def places(
    draw: st.DrawFn, world: int, hosts: int, dim: int, place: str | None = None
) -> dict[str, Any]:
    """``ranks``, ``columns`` and ``by_host`` of a table: ``place``, or any split that fits."""
    order, local = draw(st.permutations(range(world))), world // hosts
    most = num_blocks(dim)
    kinds = ["copies", "whole", "rows"] if world > 1 else ["whole"]
    kinds += ["columns", "boxes"] if world > 1 and most > 1 else []
    kinds += ["host", "grid"] if local > 1 else []
    kind = draw(st.sampled_from(kinds)) if place is None else place
    if kind in ("copies", "whole"):
        return {"ranks": tuple(order[: 1 if kind == "whole" else 0])}
    if kind == "rows":
        return {"ranks": tuple(order[: draw(st.integers(2, world))])}
    if kind == "columns":
        columns = draw(st.integers(2, min(world, most)))
        return {"ranks": tuple(order[:columns]), "columns": columns}
    if kind == "boxes":
        columns = draw(st.integers(2, min(world, most)))
        owners = draw(st.integers(1, world // columns))
        return {"ranks": tuple(order[: columns * owners]), "columns": columns}
    columns = draw(st.integers(min(2, hosts), hosts)) if kind == "grid" and most >= hosts else 1
    owners = draw(st.integers(2, local))
    chosen = draw(st.permutations(range(hosts)))[:columns]
    beside = [draw(st.permutations(range(h * local, (h + 1) * local)))[:owners] for h in chosen]
    return {"ranks": tuple(r for b in beside for r in b), "columns": columns, "by_host": True}


@st.composite
def tiers(draw: st.DrawFn, table: Table, local: int, by_host: bool = True) -> dict[str, Any]:
    """Hot rows of a table, on every rank and per host."""
    hot: list[int] = []
    per_host: list[int] = []
    if table.ranks and table.exchange == "rows":
        ids = st.lists(st.integers(0, table.rows - 1), unique=True, max_size=table.rows)
        some = st.one_of(st.just([]), ids, st.just(list(range(table.rows))))
        hot = draw(some)
        per_host = sorted(set(draw(some)) - set(hot)) if by_host else []
    return {
        "hot": tuple(hot),
        "per_host": tuple(per_host),
        "holder": draw(st.one_of(st.none(), st.integers(0, local - 1))),
        "sums": draw(st.sampled_from(["sparse", "sparse", "dense", "bucket"])),
        "has_many_tiers": draw(st.booleans()),
    }


@st.composite
def tables(
    draw: st.DrawFn,
    world: int,
    hosts: int,
    kind: str,
    exact: bool,
    place: str | None = None,
    groups: Groups | None = None,
) -> Table:
    dim = draw(st.sampled_from([1, 3, 4, 8, 16] if place is None else [3, 4, 8, 16]))
    groups = groups or Groups(world=world, size=world)
    local = world // hosts
    shape = groups.shape(Topology(hosts=hosts, local=local))
    fields = draw(places(shape.world, shape.hosts, dim, place))
    fields["ranks"] = tuple(groups.rank(0, r) for r in fields["ranks"])
    if groups.count > 1 and place is None and draw(st.integers(0, 4)) == 0:
        fields = {"ranks": ()}
    size = groups.size if groups.count > 1 else None
    placed = Table(rows=1, dim=dim, group=size, **fields)
    whole_hosts = groups.layout == "contiguous" and groups.size % local == 0
    inexact = placed.split.rows == "all" and len(placed.ranks) > placed.columns
    pooled_ok = kind != "sequence" and not (exact and inexact)
    rows, exchange = draw(st.integers(1, 40)), "rows"
    if pooled_ok:
        exchange = draw(st.sampled_from(["rows", "pooled"]))
    placed = replace(placed, rows=rows, exchange=exchange)
    can_merge = bool(placed.ranks) and exchange == "rows" and 1 < shape.local == local
    can_merge &= shape.hosts > 1 and (groups.count == 1 or whole_hosts)
    merged = can_merge and draw(st.booleans())
    return replace(
        placed,
        **draw(tiers(placed, local, groups.count == 1 or whole_hosts)),
        features=draw(st.integers(1, 2)),
        mean=kind == "bags" and draw(st.booleans()),
        dtype=draw(st.sampled_from(["fp32", "fp32", "fp32", "fp16", "bf16"])) if exact else "fp32",
        dedup=merged or draw(st.booleans()),
        merged=merged,
        shards=draw(st.sampled_from([4, 5, 16, 256])),
        trainable=draw(st.integers(0, 7)) > 0,
    )


@st.composite
def group_sizes(draw: st.DrawFn, world: int, hosts: int, layout: str, count: int) -> list[Groups]:
    """Sizes of one divisor chain, one a table; the first is smaller than the world if it can be."""
    local = world // hosts
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    sizes = [n for n in sizes if n % local == 0 or local % n == 0]
    found = [draw(st.sampled_from([n for n in sizes if n < world] or sizes))]
    while len(found) < count:
        fits = [n for n in sizes if all(n % f == 0 or f % n == 0 for f in found)]
        found.append(draw(st.sampled_from(fits)))
    return [Groups(world=world, size=n, layout=layout) for n in found]


@st.composite
def grouped(draw: st.DrawFn, *, world: int, mode: str) -> Case:
    """A case whose tables have shard groups, at least the first smaller than the world."""
    case = draw(cases(world=world))
    layout = draw(st.sampled_from(["contiguous", "strided"]))
    number = sum(len(c.tables) for c in case.collections)
    groups = iter(draw(group_sizes(world, case.hosts, layout, number)))
    collections = []
    for c in case.collections:
        members = []
        for old in c.tables:
            new = draw(tables(world, case.hosts, c.kind, True, groups=next(groups)))
            new = replace(new, rows=old.rows, features=old.features)
            hot, per_host = ([i for i in h if i < old.rows] for h in (new.hot, new.per_host))
            members.append(replace(new, hot=tuple(hot), per_host=tuple(per_host)))
        collections.append(replace(c, tables=tuple(members)))
    later: tuple[Collection, ...] = ()
    if case.later:
        later = tuple(
            replace(
                c,
                tables=tuple(
                    draw(_with_other_tiers(t, world // case.hosts, _by_host(t, case, layout)))
                    for t in c.tables
                ),
            )
            for c in collections
        )
    every = [t for c in (*collections, *later) for t in c.tables]
    needs_hosts = 1 < case.hosts < world and any(t.per_host or t.merged for t in every)
    rules = ["sgd", "rowwise", "scaled"] if mode == "moments-first" else sorted(RULES)
    period = 1 if mode == "gradients" else draw(st.integers(1, 3))
    form = "sparse" if mode == "gradients" else draw(st.sampled_from(["sparse", "dense"]))
    return replace(
        case,
        collections=tuple(collections),
        later=later,
        tree="host-first" if needs_hosts else draw(st.sampled_from(["flat", "host-first"])),
        rule=draw(st.sampled_from(rules)),
        layout=layout,
        sync=(mode, period, form),
    )


def _by_host(table: Table, case: Case, layout: str) -> bool:
    size, local = table.group or case.world, case.world // case.hosts
    return size == case.world or (layout == "contiguous" and size % local == 0)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    world: int,
    exact: bool = True,
    hosts: int = 0,
    place: str | None = None,
    merged: bool = False,
) -> Case:
    """Any case; or on so many hosts, its first table split as ``place`` says, or ``merged``."""
    kinds = draw(
        st.lists(st.sampled_from(["bags", "weighted", "sequence"]), min_size=1, max_size=2)
    )
    hosts = hosts or draw(st.sampled_from([h for h in (1, 2, 3, 4) if world % h == 0]))
    collections = tuple(
        Collection(
            kind=kind,
            tables=tuple(
                draw(
                    st.lists(tables(world, hosts, kind, exact), min_size=1, max_size=4 - len(kinds))
                )
            ),
        )
        for kind in kinds
    )
    if not exact and world > 1:
        first = collections[0].tables[0]
        split = replace(
            first,
            ranks=tuple(range(world)),
            columns=1,
            by_host=False,
            exchange="pooled",
            dtype="fp32",
            hot=(),
            per_host=(),
            merged=False,
        )
        collections = (Collection(kind="bags", tables=(split, *collections[0].tables[1:])),)
    if place is not None:
        first = draw(tables(world, hosts, kinds[0], exact, place))
        collections = (
            replace(collections[0], tables=(first, *collections[0].tables[1:])),
            *collections[1:],
        )
    if merged:
        first = collections[0].tables[0]
        ranks = first.ranks or (draw(st.integers(0, world - 1)),)
        first = replace(first, ranks=ranks, exchange="rows", dedup=True, merged=True, sums="sparse")
        first = replace(first, **draw(tiers(first, world // hosts)))
        collections = (
            replace(collections[0], tables=(first, *collections[0].tables[1:])),
            *collections[1:],
        )
    sizes = [t.rows for c in collections for t in c.tables for _ in range(t.features)]
    accumulate = draw(st.sampled_from([1, 1, 2]))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        ranks = []
        for _ in range(world):
            num_samples = draw(st.integers(0, 4))
            ranks.append([[draw(_bag(rows)) for _ in range(num_samples)] for rows in sizes])
        steps.append(ranks)
    later: tuple[Collection, ...] = ()
    if draw(st.integers(0, 3)) == 0:
        later = tuple(
            replace(c, tables=tuple(draw(_with_other_tiers(t, world // hosts)) for t in c.tables))
            for c in collections
        )
    trees = ["flat", "host-first"]
    every = [t for c in (*collections, *later) for t in c.tables]
    if 1 < hosts < world and any(t.per_host or t.merged for t in every):
        trees = ["host-first"]
    return Case(
        world=world,
        hosts=hosts,
        tree=draw(st.sampled_from(trees)),
        collections=collections,
        ids=steps,
        rule=draw(st.sampled_from(sorted(RULES))),
        dense=draw(st.sampled_from(DRAWN_DENSE)),
        accumulate=accumulate,
        skips_first=draw(st.booleans()),
        has_unused=draw(st.booleans()),
        later=later,
        depth=draw(st.integers(1, 3)),
    )


@st.composite
def _with_other_tiers(draw: st.DrawFn, table: Table, local: int, by_host: bool = True) -> Table:
    """Only hot rows may change: sums of a table that is copied whole stay."""
    changed = draw(tiers(table, local, by_host))
    return replace(table, **(changed if table.ranks else {}))


@functools.cache
def _bag(rows: int) -> st.SearchStrategy[list[int]]:
    """Few, many or no ids; the first, the last and repeated ones often."""
    one = st.one_of(st.integers(0, rows - 1), st.sampled_from([0, rows - 1]))
    return st.lists(one, max_size=4)
