"""One load: what is checked before anything changes, what each rank reads, what is set after."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, RowmeshError, shown
from rowmesh.runtime.boxes import table_tensors
from rowmesh.runtime.copies import refresh_copies
from rowmesh.runtime.embeddings import ShardedEngine, sharded_engines
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.train.checkpoint.document import DTYPES, read_document
from rowmesh.train.checkpoint.fit import check_fit
from rowmesh.train.checkpoint.state import (
    check_drained,
    check_restore,
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
        engines: Of the model.
        run: Reads everything that has a place in the model into it.
        states: The dense optimiser's state.
        random: The random generators' states.
    """

    optimizer: Optimizer | None
    mesh: Mesh
    engines: list[ShardedEngine] = field(repr=False)
    document: dict[str, Any] = field(repr=False)
    run: Callable[[], None]
    states: dict[str, Tensor] = field(repr=False)
    random: Tensor = field(repr=False)

    def read(self) -> None:
        """Read tables and dense parameters into their place; the rest is read already."""
        with torch.no_grad(), _from_disk():
            self.run()

    def restore(self) -> None:
        """Set the states, which `prepare` has checked, and copies of what `read` has set.

        Collective:
            All ranks.
        """
        for engine in self.engines:
            refresh_copies(engine)
        if self.optimizer is not None:
            restore_optimizer(self.optimizer, self.document["dense_optimizer"], self.states)
            self.optimizer.param_groups[-1].update(self.document["sparse_group"])
        derive = self.mesh.world != self.document["world"]
        restore_random_state(self.random, rank=self.mesh.rank, derive=derive)


def prepare(folder: Path, model: nn.Module, optimizer: Optimizer | None, mesh: Mesh) -> Load:
    """Check that a checkpoint fits, and what this rank will read of it; change nothing.

    Raises:
        StepError: Between backward and step.
        InputError: If it does not fit or is damaged.
    """
    check_drained(model, optimizer)
    with _from_disk():
        document = read_document(folder)
    described = document["tensors"]
    tables = table_tensors(model)
    if optimizer is None:
        tables = {key: value for key, value in tables.items() if key.endswith(".weight")}
    dense = dense_tensors(model)
    with _described(folder):
        check_fit(document, tables | dense, model=model, optimizer=optimizer)
    states = {k: _empty(v) for k, v in described.items() if k.startswith("dense_state.")}
    states = {} if optimizer is None else states
    generators = f"random.{mesh.rank if mesh.world == document['world'] else 0}"
    if generators not in described:
        raise InputError(f"{generators!r} is not in the checkpoint {folder}")
    random = _empty(described[generators])
    is_first = mesh.rank == 0
    run = _checked(folder, tables | dense, is_first=is_first)
    own: dict[str, Any] = states | {generators: random}
    with torch.no_grad(), _from_disk():
        _checked(folder, own, is_first=is_first)()
    with _described(folder):
        check_restore(optimizer, document, states, random)
    return Load(
        optimizer=optimizer,
        mesh=mesh,
        engines=sharded_engines(model),
        document=document,
        run=run,
        states=states,
        random=random,
    )


def _checked(folder: Path, wanted: Mapping[str, Any], *, is_first: bool) -> Callable[[], None]:
    """Compare all that will be read with its checksums; returns what reads it.

    This is DCP's sequence of calls for one rank, which needs no process group.
    """
    from rowmesh.train.checkpoint.planning import BoxLoadPlanner
    from rowmesh.train.checkpoint.storage import BoxReader

    reader, planner = BoxReader(folder), BoxLoadPlanner()
    with _from_disk():
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=is_first)
        planner.set_up_planner(dict(wanted), metadata, is_coordinator=is_first)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.check(plan)
    return lambda: reader.read_data(plan, planner).wait()


@contextlib.contextmanager
def _from_disk() -> Iterator[None]:
    """Trouble with the disk becomes a sentence."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot read the checkpoint: {error}") from None


@contextlib.contextmanager
def _described(folder: Path) -> Iterator[None]:
    """What a description lacks, or has of another kind, becomes a sentence."""
    try:
        yield
    except RowmeshError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder} is described wrongly: {shown(error)}") from None


def _empty(entry: dict[str, Any]) -> Tensor:
    try:
        return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
    except RuntimeError:
        raise InputError(f"no memory holds a tensor of shape {entry['shape']}") from None


def check_all(folder: Path) -> None:
    """Compare every byte of a checkpoint with its checksum.

    Raises:
        InputError: If one differs, or is missing.
    """
    from rowmesh.train.checkpoint.storage import BoxReader

    reader = BoxReader(folder)
    with _from_disk():
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
        reader.check()
