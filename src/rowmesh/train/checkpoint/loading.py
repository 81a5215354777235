"""One load: what is checked before anything changes, what each rank reads, what is set after."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError
from rowmesh.runtime.boxes import TableTensor, table_tensors
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.train.checkpoint.document import DTYPES, read_document
from rowmesh.train.checkpoint.fit import check_fit
from rowmesh.train.checkpoint.state import (
    check_drained,
    dense_tensors,
    restore_optimizer,
    restore_random_state,
)

__all__ = ["Load", "check_all", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A checkpoint that fits and is sound, about to be read by this rank.

    Args:
        document: From metadata.json.
        tables: This rank's parts of the tables, to be filled.
        dense: The model's dense parameters and buffers, to be filled.
        states: Memory for the dense optimiser's state.
        random: Memory for the random generators' states.
    """

    folder: Path
    optimizer: Optimizer | None
    mesh: Mesh
    document: dict[str, Any] = field(repr=False)
    tables: dict[str, TableTensor] = field(repr=False)
    dense: dict[str, Tensor] = field(repr=False)
    states: dict[str, Tensor] = field(repr=False)
    random: dict[str, Tensor] = field(repr=False)

    def check(self) -> None:
        """Compare everything this rank will read with its checksums."""
        self._run(check_only=True)

    def read(self) -> None:
        """Read it into its place."""
        self._run(check_only=False)

    @torch.no_grad()
    def _run(self, *, check_only: bool) -> None:
        """DCP's sequence of calls for one rank, which needs no process group."""
        from rowmesh.train.checkpoint.planning import BoxLoadPlanner
        from rowmesh.train.checkpoint.storage import BoxReader

        reader, planner = BoxReader(self.folder), BoxLoadPlanner()
        wanted: dict[str, Any] = self.tables | self.dense | self.states | self.random
        is_first = self.mesh.rank == 0
        try:
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, is_coordinator=is_first)
            planner.set_up_planner(wanted, metadata, is_coordinator=is_first)
            plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
            if check_only:
                reader.check(plan)
            else:
                reader.read_data(plan, planner).wait()
        except OSError as error:
            raise InputError(f"cannot read the checkpoint {self.folder}: {error}") from None

    def restore(self) -> None:
        """Set what `read` has not read straight into its place."""
        if self.optimizer is not None:
            restore_optimizer(self.optimizer, self.document["dense_optimizer"], self.states)
            self.optimizer.param_groups[-1].update(self.document["sparse_group"])
        (saved,) = self.random.values()
        derive = self.mesh.world != self.document["world"]
        restore_random_state(saved, rank=self.mesh.rank, derive=derive)


def prepare(folder: Path, model: nn.Module, optimizer: Optimizer | None, mesh: Mesh) -> Load:
    """Check that a checkpoint fits, and what this rank will read of it; change nothing.

    Raises:
        StepError: Between backward and step.
        InputError: If it does not fit or is damaged.
    """
    check_drained(model, optimizer)
    document = read_document(folder)
    described = document["tensors"]
    tables = table_tensors(model)
    if optimizer is None:
        tables = {key: value for key, value in tables.items() if key.endswith(".weight")}
    dense = dense_tensors(model)
    check_fit(document, tables | dense, model=model, optimizer=optimizer)
    is_state = [key for key in described if key.startswith("dense_state.")]
    random = f"random.{mesh.rank if mesh.world == document['world'] else 0}"
    load = Load(
        folder=folder,
        optimizer=optimizer,
        mesh=mesh,
        document=document,
        tables=tables,
        dense=dense,
        states={} if optimizer is None else {key: _empty(described[key]) for key in is_state},
        random={random: _empty(described[random])},
    )
    load.check()
    return load


def _empty(entry: dict[str, Any]) -> Tensor:
    return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])


def check_all(folder: Path) -> None:
    """Compare every byte of a checkpoint with its checksum.

    Raises:
        InputError: If one differs, or is missing.
    """
    from rowmesh.train.checkpoint.storage import BoxReader

    reader = BoxReader(folder)
    try:
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
        reader.check()
    except OSError as error:
        raise InputError(f"cannot read the checkpoint {folder}: {error}") from None
