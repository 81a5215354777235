"""`state_dict` and `load_state_dict` of a sharded model: whole on one rank, refused on several."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError
from rowmesh.runtime.export import gather_table
from rowmesh.runtime.importing import set_rows
from rowmesh.runtime.regions import DenseState, NamedTable, holders, mesh_of, named_tables
from rowmesh.tables import uncompiled

__all__ = ["hook_state_dicts", "unhook_state_dicts"]


def hook_state_dicts(model: nn.Module) -> None:
    """Let torch's state dicts have the tables of a model that has just been sharded.

    Neither communicates, so on several ranks ``state_dict`` says what is missing, and
    ``load_state_dict`` raises before it changes anything if it is given a table.
    """
    mesh, tables = mesh_of(model), named_tables(model)
    if mesh is None:
        return
    if mesh.world > 1:
        model = uncompiled(model)
        refuse = _refuser([key for table in tables for key in table.keys], mesh)
        _keep(model, model.register_load_state_dict_pre_hook(refuse))
    for table in tables:
        for module, key in holders(table.collection, table.config.name):
            _keep(module, module.register_state_dict_post_hook(_saver(table, key, mesh)))
            _keep(module, module.register_load_state_dict_pre_hook(_loader(table, key, mesh)))


def unhook_state_dicts(model: nn.Module) -> None:
    """Undo it, in a copy that has its tables."""
    for module in model.modules():
        for handle in vars(module).pop("_rowmesh_hooks", ()):
            handle.remove()


def _keep(module: nn.Module, handle: Any) -> None:
    vars(module).setdefault("_rowmesh_hooks", []).append(handle)


def _saver(table: NamedTable, key: str, mesh: Mesh) -> Callable[..., None]:
    def save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        if isinstance(state_dict, DenseState):
            return
        if mesh.world == 1:
            state_dict[prefix + key] = gather_table(table)
        else:
            mesh.say_once(
                f"this state_dict has no tables: their rows lie on {mesh.world} ranks; "
                f"rm.full_state_dict(model) gives all of it, rm.Checkpoints saves and resumes"
            )

    return save


def _refuser(keys: list[str], mesh: Mesh) -> Callable[..., None]:
    def refuse(module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        found = [prefix + key for key in keys if prefix + key in state_dict]
        if found:
            raise InputError(
                f"load_state_dict cannot set table {found[0]!r}, whose rows lie on {mesh.world} "
                f"ranks: call rm.load_full_state_dict(model, state_dict) on every rank"
            )

    return refuse


def _loader(table: NamedTable, key: str, mesh: Mesh) -> Callable[..., None]:
    refuse = _refuser([key], mesh)

    def load(
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if mesh.world > 1:
            refuse(module, state_dict, prefix)
        values = state_dict.pop(prefix + key, None)
        shape = [table.config.num_embeddings, table.config.embedding_dim]
        if values is None:
            missing.append(prefix + key)  # torch raises, if that was asked for
        elif not isinstance(values, Tensor) or list(values.shape) != shape:
            given = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            errors.append(f"{prefix + key} is {given}, but the table's shape is {shape}.")
        else:
            set_rows(table, values.detach(), None, count=len(values), spread=False)

    return load
