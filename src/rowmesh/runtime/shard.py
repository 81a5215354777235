"""`rm.shard`: the one verb that distributes a model, in place."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.comm.agreement import agree, attempt
from rowmesh.comm.codecs import Codecs, make_codecs
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import NotExecutable, PlanError, did_you_mean
from rowmesh.nn.collections import Collection
from rowmesh.nn.init import fill_initial_values, fill_table
from rowmesh.placement import Copies, Groups, Plan, TablePlan, hot_ids
from rowmesh.placement.codecs import GRADIENT_EDGES, WIRE_CODECS, wire_form
from rowmesh.placement.dense import bucket_elements
from rowmesh.runtime.adopt import adopt_collections
from rowmesh.runtime.copies import make_riders
from rowmesh.runtime.dense import DenseBuckets, broadcast_dense
from rowmesh.runtime.embeddings import ShardedEngine, sharded_engines
from rowmesh.runtime.importing import set_rows
from rowmesh.runtime.places import DENSE_SUMS, Region
from rowmesh.runtime.regions import named_tables
from rowmesh.runtime.stacks import StackLayout, lay_out
from rowmesh.runtime.state_dicts import hook_state_dicts
from rowmesh.runtime.tickets import Stack
from rowmesh.storage import allocate_rows
from rowmesh.tables import (
    BYTES_OF,
    TableConfig,
    dense_parameters,
    dtype_name,
    is_trainable,
    is_weighted,
    named_collections,
    warn_of_plain,
)

__all__ = ["check_executable", "make_stack", "shard"]


def shard(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Distribute ``model`` over ``mesh`` as ``plan`` says, in place; ``forward`` is unchanged.

    Every collection keeps its place and type but looks up rows on the mesh; its tables leave
    ``model.parameters()``. Tables on ``meta`` are made here, each rank just its rows; tables
    with values are sliced one by one and freed. Dense parameters are copied from rank 0.

    Args:
        model: Single-device model whose collections are rowmesh's or TorchRec's.
        plan: From a planner or a file, for this model and this mesh.
        mesh: From `rowmesh.init_mesh`.

    Returns:
        ``model``.

    Raises:
        PlanError: If the plan is invalid, or for another model or mesh.
        NotExecutable: If the plan is valid but asks for something not built yet.

    Collective:
        All ranks, with the same model and plan.
    """
    plan.validate()
    if hasattr(model, "_rowmesh_dense"):
        raise PlanError("this model is sharded already: build a new one to shard it differently")
    if plan.fingerprint != mesh.topology.fingerprint():
        raise PlanError(
            f"the plan is for {plan.mesh.hosts} hosts x {plan.mesh.local} ranks, but the mesh has "
            f"{mesh.topology.hosts} x {mesh.topology.local}: make a plan for this mesh"
        )
    check_executable(plan)
    warn_of_plain(model, is_first=mesh.rank == 0)
    collections = list(named_collections(model))
    _check_tables(plan, collections)
    dense = dense_parameters(model)
    trainable = [p for p in dense if p.requires_grad]
    if wide := {p.dtype for p in trainable} - set(BYTES_OF):
        raise NotExecutable(
            f"dense parameters of {sorted(map(str, wide))}: gradients are summed in fp32; convert "
            f"them to fp32, fp16 or bf16"
        )
    if bucket_elements([p.numel() for p in trainable]) != plan.dense:
        raise PlanError(
            f"the plan's dense buckets hold {sum(plan.dense)} elements, this model's "
            f"{sum(bucket_elements([p.numel() for p in trainable]))}: make a plan for this model"
        )
    adopt_collections(model)  # the last check; from here on the model changes
    codecs = make_codecs(wire_form(plan))
    to_make = _made_whole(collections)
    for path, module, configs in collections:
        plans = [plan.table(c.name) for c in configs]
        groups = [plan.groups(table) for table in plans]
        module.engine = _make_engine(path, module, plans, groups, mesh, plan.span, codecs)
    _run_init_fns(model, mesh, to_make)
    if mesh.world > 1:
        broadcast_dense([*dense, *model.buffers()], mesh)
    engines = sharded_engines(model)
    own, riders = ([r for e in engines for r in make_riders(e, sums)] for sums in DENSE_SUMS)
    buckets = DenseBuckets(trainable, mesh, plan.span, riders=riders, own=own, codecs=codecs)
    model._rowmesh_dense = buckets  # type: ignore[assignment]
    model._rowmesh_plan = plan  # type: ignore[assignment]
    hook_state_dicts(model)
    return model


def check_executable(plan: Plan) -> None:
    """Say which settings of a valid plan this version does not run."""
    wanted = [
        (bool(plan.towers), "towers"),
        *_unknown_codecs(plan),
    ]
    for table in plan.tables:
        for _, rows in table.hot:
            hot_ids(rows, where=f"table {table.name!r}")
        tier, where = table.rest, f" (table {table.name!r})"
        wanted += [
            (tier.copies is Copies.HOST, "a copy per host of a whole table" + where),
            (tier.store != "ram", f"the {tier.store} store" + where),
        ]
    for is_wanted, what in wanted:
        if is_wanted:
            raise NotExecutable(
                f"the plan is valid, but this version does not run {what}; it runs all splits of "
                f"tables, copies of tables or hot rows on every rank, and copies of hot rows on "
                f"every host, in ram, with codecs fp32, fp16, bf16 and int8"
            )


def _unknown_codecs(plan: Plan) -> list[tuple[bool, str]]:
    edges = [codec.edge for codec in plan.codecs]
    found = []
    for codec in plan.codecs:
        where = f" on edge {codec.edge!r}"
        single = len(codec.stack) == 1 and codec.stack[0] in WIRE_CODECS
        is_known = codec.edge in ("rows", "pooled", *GRADIENT_EDGES)
        found += [
            (not single, f"codec {'+'.join(codec.stack)}{where}"),
            (not is_known and codec.stack != ("fp32",), f"codecs{where}"),
            (edges.count(codec.edge) > 1, f"two codecs{where}"),
        ]
    return found


def _check_tables(plan: Plan, collections: Sequence[tuple[str, Any, list[TableConfig]]]) -> None:
    known = {c.name: (path, m, c) for path, m, configs in collections for c in configs}
    planned = {t.name: t for t in plan.tables}
    if len(known) != sum(len(configs) for _, _, configs in collections):
        raise PlanError("two tables of the model have one name: names must be unique in a model")
    for name in planned:
        if name not in known:
            raise PlanError(f"the plan names table {name!r}{did_you_mean(name, known)}")
    for name, (path, module, config) in known.items():
        if name not in planned:
            raise PlanError(f"table {name!r} is not in the plan: make a plan for this model")
        table = planned[name]
        for what, ours, theirs in (
            ("collection", path, table.collection),
            ("rows", config.num_embeddings, table.num_embeddings),
            ("columns", config.embedding_dim, table.embedding_dim),
            ("data type", dtype_name(config.data_type), table.data_type),
            ("features", tuple(config.feature_names), table.feature_names),
            ("pooling", str(getattr(config, "pooling", "none")), str(table.pooling)),
            ("trainable flag", is_trainable(module, name), table.trainable),
            ("weighted flag", is_weighted(module), table.weighted),
        ):
            if ours != theirs:
                raise PlanError(
                    f"table {name!r}: its {what} is {ours!r} in the model, {theirs!r} in the plan"
                )


def _make_engine(
    path: str,
    module: Collection,
    plans: Sequence[TablePlan],
    groups: Sequence[Groups],
    mesh: Mesh,
    span: int,
    codecs: Codecs,
) -> ShardedEngine:
    layouts = lay_out(
        plans, groups, module.readers, topology=mesh.topology, rank=mesh.rank, device=mesh.device
    )
    stacks = [make_stack(layout, mesh) for layout in layouts]
    for table, config in enumerate(module.configs()):
        for stack in stacks:
            for region in stack.layout.home:
                if region.table == table and region.rank == mesh.rank:
                    _fill(stack.home, region, module)
            for region in (*stack.layout.copied, *stack.layout.hot):
                if region.table == table:
                    _fill(stack.copies, region, module)
            for region in stack.layout.host_copies:
                if region.table == table and region.holder == mesh.rank % mesh.topology.local:
                    _fill(stack.host_copies(mesh.rank), region, module)
        del module.table_modules()[config.name]  # frees a materialised table
    return ShardedEngine(
        path=path or "model",
        readers=module.readers,
        tables=module.configs(),
        pooled=module.pooled,
        weighted=is_weighted(module),
        takes_batch=module.takes_batch,
        stacks=stacks,
        mesh=mesh,
        span=span,
        codecs=codecs,
    )


def _made_whole(collections: Sequence[tuple[str, Collection, list[TableConfig]]]) -> list[str]:
    """Tables on ``meta`` whose ``init_fn`` makes them."""
    return [
        config.name
        for _, module, configs in collections
        for config in configs
        if config.init_fn is not None and module.table_modules()[config.name].weight.is_meta
    ]


def _run_init_fns(model: nn.Module, mesh: Mesh, names: Sequence[str]) -> None:
    """Make these tables on rank 0, one at a time, and give every rank its rows.

    On one rank only: an ``init_fn`` may draw from what is not alike on all ranks.

    Collective:
        All ranks.
    """
    for table in named_tables(model):
        if table.config.name not in names:
            continue
        whole, problem = None, None
        if mesh.rank == 0:
            config = table.config
            shape = (config.num_embeddings, config.embedding_dim)
            whole = torch.empty(shape, dtype=config.data_type)
            work = functools.partial(fill_table, whole, config, seed=table.collection.seed)
            _, problem = attempt(work)
        agree(mesh, None, problem)
        set_rows(table, whole, None, count=table.config.num_embeddings, spread=True)


def make_stack(layout: StackLayout, mesh: Mesh) -> Stack:
    """This rank's memory for a stack."""

    def empty(num_rows: int) -> Tensor:
        return allocate_rows(num_rows, layout.dim, dtype=layout.dtype, device=mesh.device)

    home = empty(layout.home_slots[mesh.rank] + layout.num_host_copies)
    copies = empty(layout.num_copies)
    return Stack(layout=layout, home=home, copies=copies)


@torch.no_grad()
def _fill(out: Tensor, region: Region, module: Collection) -> None:
    """The region's rows: from the module's table if it has memory, else their initial values."""
    config = module.configs()[region.table]
    part = out[region.start : region.start + region.num_rows]
    rows = torch.from_numpy(region.rows()).to(out.device)
    weight = module.table_modules()[config.name].weight
    if weight.is_meta:
        fill_initial_values(part, config, rows, seed=module.seed, columns=region.columns)
    else:
        columns = weight.detach()[:, slice(*region.columns)]
        part.copy_(columns.index_select(0, rows.to(weight.device)))
