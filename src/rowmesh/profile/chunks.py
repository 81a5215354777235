"""Chunks of consecutive steps: what is read of a batch, and the summary of a chunk."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from torch import Tensor

from rowmesh.errors import InputError, check_range
from rowmesh.features import KeyedJaggedTensor
from rowmesh.profile.counts import PHASES, Asked, Ints, TableCounts
from rowmesh.profile.sketch import Hashes, estimate_distinct, merge_hashes, smallest_hashes
from rowmesh.profile.tallies import TableTally
from rowmesh.tables import TableConfig

__all__ = [
    "CHUNK_STEPS",
    "ROWS_KEPT",
    "Chunk",
    "ProfileConfig",
    "Step",
    "TableSummary",
    "ask_step",
    "count_chunks",
]

CHUNK_STEPS: Final = 16
ROWS_KEPT: Final = 1 << 21
Step = Sequence[KeyedJaggedTensor]  # a batch for every rank


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """What is counted, and in which pieces.

    Args:
        tables: Whose rows are counted.
        world: Ranks that a step has batches for.
        num_steps: Steps from 0 on.
        rows_kept: Rows of a table that are counted one by one, at most.
        chunk_steps: Steps of a chunk, a multiple of 4.

    Raises:
        InputError: If a number is out of range.
    """

    tables: tuple[TableConfig, ...]
    world: int
    num_steps: int
    rows_kept: int = ROWS_KEPT
    chunk_steps: int = CHUNK_STEPS

    def __post_init__(self) -> None:
        check_range("number of tables", len(self.tables), 1)
        check_range("ranks", self.world, 1)
        check_range("batches", self.num_steps, 1)
        check_range("rows-kept", self.rows_kept, 4)
        check_range("chunk_steps", self.chunk_steps, PHASES)
        if self.chunk_steps % PHASES:
            raise InputError(f"chunk_steps is {self.chunk_steps}, but must be a multiple of 4")

    @property
    def num_chunks(self) -> int:
        """The last one may be shorter."""
        return -(-self.num_steps // self.chunk_steps)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First step of a chunk, and the step after its last."""
        first = chunk * self.chunk_steps
        return first, min(first + self.chunk_steps, self.num_steps)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableSummary:
    """Everything known of one table after some batches: single rows, sums, smallest hashes."""

    counts: TableCounts
    tally: TableTally
    hashes: Hashes

    @property
    def seen(self) -> float:
        """Distinct rows: exact, or estimated where rows were dropped."""
        if not self.counts.error:
            return float(len(self.counts.rows))
        return max(float(len(self.counts.rows)), estimate_distinct(self.hashes))

    def merged(self, other: "TableSummary", *, bound: int) -> "TableSummary":
        """Of the batches of both, with at most ``bound`` rows."""
        return TableSummary(
            counts=self.counts.merged(other.counts).pruned(bound),
            tally=self.tally.merged(other.tally),
            hashes=merge_hashes(self.hashes, other.hashes),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """The summary of a chunk, a function of its batches and of those of the step before it.

    Args:
        tables: In the order of the configuration.
        num_batches: Ranks times steps.
        num_samples: Of all batches.
        first_batch: Samples of rank 0's batch at its first step.
    """

    tables: tuple[TableSummary, ...]
    num_batches: int
    num_samples: int
    first_batch: int


def count_chunks(
    steps: Iterable[Step], config: ProfileConfig, *, first: int = 0, last: int | None = None
) -> Iterator[Chunk]:
    """The summaries of chunks ``first`` to ``last`` (not included; default to the end).

    Args:
        steps: Begins one step before the first chunk, or with step 0.
        config: What is counted.
        first, last: Numbers of chunks.

    Raises:
        InputError: If a step has too few batches, a feature is missing or an id is outside its
            table.
    """
    start, begin = iter(steps), config.bounds(first)[0]
    before = None
    if begin:
        step = next(start, None)
        if step is None:
            raise _ended(config, f"before step {begin}")
        before = ask_step(step, config, number=begin - 1)
    for chunk in range(first, config.num_chunks if last is None else last):
        bounds = range(*config.bounds(chunk))
        found = list(zip(bounds, islice(start, len(bounds)), strict=False))
        if len(found) < len(bounds):
            raise _ended(config, f"after {bounds.start + len(found)}")
        asked = [ask_step(step, config, number=number) for number, step in found]
        yield _summarise([step for _, step in found], asked, before, config)
        before = asked[-1]


def _ended(config: ProfileConfig, where: str) -> InputError:
    return InputError(
        f"{config.num_steps} steps were to be counted, but the data ends {where}: ask for fewer"
    )


def _summarise(
    steps: Sequence[Step],
    asked: Sequence[Sequence[Sequence[Asked]]],
    before: Sequence[Sequence[Asked]] | None,
    config: ProfileConfig,
) -> Chunk:
    """``asked`` has, for each step and table, what every rank's batch asks for."""
    tables = []
    for t in range(len(config.tables)):
        mine = [step[t] for step in asked]
        counts = TableCounts.of_steps(mine)
        tables.append(
            TableSummary(
                counts=counts.pruned(config.rows_kept),
                tally=TableTally.of_steps(mine, None if before is None else before[t]),
                hashes=smallest_hashes(counts.rows),
            )
        )
    return Chunk(
        tables=tuple(tables),
        num_batches=sum(len(step) for step in steps),
        num_samples=sum(batch.stride() for step in steps for batch in step),
        first_batch=steps[0][0].stride(),
    )


def ask_step(step: Step, config: ProfileConfig, *, number: int) -> list[list[Asked]]:
    """What the ranks' batches of a step ask for, table by table.

    Raises:
        InputError: If there is not one batch a rank, a feature is missing or an id is outside its
            table.
    """
    if len(step) != config.world:
        raise InputError(
            f"step {number} has {len(step)} batches, but {config.world} ranks are profiled: give "
            f"every step one batch a rank"
        )
    return [
        [_ask(batch, table, where=f"step {number}, rank {r}") for r, batch in enumerate(step)]
        for table in config.tables
    ]


def _ask(batch: KeyedJaggedTensor, table: TableConfig, *, where: str) -> Asked:
    jagged: list[Any] = [batch[name] for name in table.feature_names]
    ids = np.concatenate([_whole(j.values(), where) for j in jagged])
    rows, counts = np.unique(ids, return_counts=True)
    for end in (0, -1) if len(rows) else ():
        if not 0 <= rows[end] < table.num_embeddings:
            raise InputError(
                f"{where}: id {rows[end]} is outside table {table.name!r} "
                f"({table.num_embeddings} rows)"
            )
    lengths = np.concatenate([_whole(j.lengths(), where) for j in jagged])
    return Asked(rows=rows, counts=counts.astype(np.int64), lengths=lengths)


def _whole(numbers: Tensor, where: str) -> Ints:
    if numbers.is_floating_point():
        raise InputError(f"{where}: ids must be whole numbers, but are {numbers.dtype}")
    return numbers.cpu().numpy().astype(np.int64, copy=False)
