"""One save: what is taken at its moment, what each rank writes, what makes it complete."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor, nn

from rowmesh.comm.agreement import agree, attempt
from rowmesh.comm.mesh import Mesh
from rowmesh.errors import InputError, RowmeshError
from rowmesh.placement import Plan
from rowmesh.placement.document import plan_to_json
from rowmesh.runtime.boxes import TableTensor, table_tensors
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.train.checkpoint.document import StoredChunk, check_jsonable, encode
from rowmesh.train.checkpoint.fit import describe_tables
from rowmesh.train.checkpoint.folders import Folders
from rowmesh.train.checkpoint.state import (
    check_drained,
    dense_tensors,
    describe_optimizer,
    random_state,
)

__all__ = ["Save", "take"]

_Written = list[tuple[str, StoredChunk]]
FILE: Final = "rank_{:05d}.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """A checkpoint under way on this rank.

    Args:
        step: Of the checkpoint.
        mesh: Of all ranks.
        folders: Where it goes.
        tensors: What this rank writes, by key.
        document: metadata.json but for files and tensors; the same on all ranks.
    """

    step: int
    mesh: Mesh
    folders: Folders
    tensors: Mapping[str, Tensor | TableTensor] = field(repr=False)
    document: dict[str, Any] = field(repr=False)

    def staged(self) -> "Save":
        """The same, of copies in host memory: training may go on."""
        copies = {
            key: value.staged() if isinstance(value, TableTensor) else value.to("cpu", copy=True)
            for key, value in self.tensors.items()
        }
        return replace(self, tensors=copies)

    def write(self) -> tuple[_Written | None, RowmeshError | None]:
        """Write this rank's file; what is where, or what went wrong. Talks to no other rank."""
        from rowmesh.train.checkpoint.planning import BoxSavePlanner
        from rowmesh.train.checkpoint.storage import write_boxes

        planner = BoxSavePlanner()
        planner.set_up_planner(dict(self.tensors), is_coordinator=self.mesh.rank == 0)
        path = self.folders.partial(self.step) / FILE.format(self.mesh.rank)
        plan = planner.finish_plan(planner.create_local_plan())
        return attempt(lambda: self._on_disk(lambda: write_boxes(path, plan, planner)))

    def begin(self) -> None:
        """Make the folder, on rank 0, before any rank writes."""
        if self.mesh.rank == 0:
            self._on_disk(lambda: self.folders.start(self.step))

    def drop(self) -> None:
        """Remove what was written."""
        if self.mesh.rank == 0:
            self.folders.drop(self.step)

    def finish(
        self,
        written: _Written | None,
        problem: RowmeshError | None,
        *,
        keep: Callable[[], None],
    ) -> None:
        """Make the checkpoint complete, once all ranks have written.

        Args:
            written: What `write` gave.
            problem: Likewise.
            keep: Deletes older checkpoints; called on rank 0.

        Raises:
            InputError: On all ranks, if one could not write; nothing of the checkpoint is left.

        Collective:
            All ranks.
        """

        def on_failure(kind: str) -> str:
            self.drop()
            return ""

        shapes = {k: (list(v.shape), str(v.dtype)) for k, v in self.tensors.items()}
        everyone = agree(self.mesh, (written or [], shapes), problem, on_failure=on_failure)
        last: RowmeshError | None = None
        if self.mesh.rank == 0:
            _, last = attempt(lambda: self._on_disk(lambda: self._complete(everyone, keep)))
        agree(self.mesh, None, last, on_failure=on_failure)

    def _complete(
        self, everyone: list[tuple[_Written, dict[str, Any]]], keep: Callable[[], None]
    ) -> None:
        tensors: dict[str, dict[str, Any]] = {}
        for rank, (written, shapes) in enumerate(everyone):
            for key, (shape, dtype) in shapes.items():
                entry = {"shape": shape, "dtype": dtype.removeprefix("torch."), "chunks": []}
                tensors.setdefault(key, entry)
            for key, chunk in written:
                place = [chunk.offsets, chunk.sizes, rank, chunk.at, chunk.crc32]
                tensors[key]["chunks"].append(place)
        self._check_whole(tensors)
        files = [FILE.format(rank) for rank in range(len(everyone))]
        self.folders.finish(self.step, encode(self.document | {"files": files, "tensors": tensors}))
        keep()

    def _check_whole(self, tensors: dict[str, dict[str, Any]]) -> None:
        """Every row and column of every table has been written once."""
        for key, table in self.tensors.items():
            if isinstance(table, TableTensor):
                found = sum(math.prod(chunk[1]) for chunk in tensors[key]["chunks"])
                if found != table.num_elements:
                    raise RowmeshError(
                        f"{key!r} has {table.num_elements} elements, but the ranks wrote {found}: "
                        f"this is a mistake in rowmesh; please report it with your plan"
                    )

    def _on_disk(self, work: Callable[[], Any]) -> Any:
        """``work``, whose trouble with the disk becomes a sentence."""
        try:
            return work()
        except OSError as error:
            free = self.folders.free_bytes()
            raise InputError(
                f"cannot write the checkpoint of step {self.step} into {self.folders.root}: "
                f"{error}, with {free:,} bytes free: make room, lower keep_last or choose another "
                f"folder that all ranks share; earlier checkpoints are untouched"
            ) from None


def take(
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizer | None,
    mesh: Mesh,
    extra: dict[str, Any],
    folders: Folders,
) -> Save:
    """What a checkpoint holds at this moment; tensors are the model's own memory.

    Raises:
        StepError: Between backward and step.
        InputError: If ``step`` is negative, or something is not a tensor and not for JSON.
    """
    if step < 0:
        raise InputError(f"step is {step}, but must be at least 0")
    check_drained(model, optimizer)
    check_jsonable(extra, "extra")
    dense, dense_document = dense_tensors(model), None
    if optimizer is not None:
        states, dense_document = describe_optimizer(model, optimizer)
        dense |= states
    group = {} if optimizer is None else optimizer.param_groups[-1]
    sparse_group = {k: v for k, v in group.items() if k != "params"}
    check_jsonable(sparse_group, "the sparse parameter group")
    plan = getattr(model, "_rowmesh_plan", None)
    document = {
        "step": step,
        "world": mesh.world,
        "tables": describe_tables(model),
        "rule": None if optimizer is None else type(optimizer._rule).__name__,
        "sparse_group": None if optimizer is None else sparse_group,
        "dense_optimizer": dense_document,
        "plan": plan_to_json(plan) if isinstance(plan, Plan) else None,
        "extra": extra,
    }
    tensors: dict[str, Tensor | TableTensor] = dict(table_tensors(model))
    tensors |= _share(dense, mesh)
    tensors[f"random.{mesh.rank}"] = random_state()
    return Save(step=step, mesh=mesh, folders=folders, tensors=tensors, document=document)


def _share(tensors: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The tensors this rank writes: each goes to the rank with the fewest bytes so far."""
    sizes = [0] * mesh.world
    mine = {}
    for key, tensor in tensors.items():
        rank = sizes.index(min(sizes))
        sizes[rank] += tensor.numel() * tensor.element_size()
        if rank == mesh.rank:
            mine[key] = tensor
    return mine
