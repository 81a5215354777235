"""One pass over data: chunks are counted, in this process or others, and merged in their order."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rowmesh.data import Source
from rowmesh.errors import InputError, check_range
from rowmesh.features import KeyedJaggedTensor
from rowmesh.profile.chunks import (
    CHUNK_STEPS,
    ROWS_KEPT,
    Chunk,
    ProfileConfig,
    Step,
    count_chunks,
)
from rowmesh.profile.merge import merge_chunks
from rowmesh.profile.partial import Partial, fingerprint, remove_partial
from rowmesh.profile.result import Profile
from rowmesh.profile.workers import run_workers
from rowmesh.tables import TableConfig

__all__ = ["default_steps", "profile_batches", "profile_source"]

_ENDLESS_STEPS = 100  # as many batches as P2RES looked at


def default_steps(source: Source) -> int:
    """An epoch, or 100 where the data has no end."""
    return source.steps_per_epoch or _ENDLESS_STEPS


def profile_source(
    source: Source,
    tables: Iterable[TableConfig],
    *,
    world: int = 1,
    num_steps: int | None = None,
    rows_kept: int = ROWS_KEPT,
    chunk_steps: int = CHUNK_STEPS,
    processes: int = 1,
    partial: str | Path | None = None,
    again: bool = False,
    name: str | None = None,
    reopen: Callable[[], Source] | None = None,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> Profile:
    """Count what the first steps of ``source`` ask of ``tables``, as ``world`` ranks.

    The profile is the same, bit for bit, for every number of processes, and whether the pass was
    stopped and gone on with or not: chunks of consecutive steps are counted by themselves, and
    merged in their order.

    Args:
        source: Any data with the members of `Source`.
        tables: Whose rows are counted.
        world: Ranks that the data is dealt to; they are read one after the other.
        num_steps: Default: an epoch, or 100 where the data has no end. One more is read, where
            the epoch has one, to see how many of its rows are new.
        rows_kept: Rows of a table that are counted one by one, at most.
        chunk_steps: Steps of a chunk, a multiple of 4.
        processes: That count; each takes a stretch of the steps. Above 1 the source must pickle.
        partial: A folder for finished chunks; if it holds some, they are not counted again. It is
            left there, for `remove_partial` to take away once the profile is saved.
        again: Whether to begin anew instead.
        name: Of the data, so that chunks of other data are refused; default its ``repr``.
        reopen: Makes the source in another process, where it does not pickle.
        on_progress: Called with the number of steps counted so far.

    Raises:
        InputError: If a number is out of range, the data is wrong, or the folder holds chunks of
            other settings.
        PeerError: If a process fails.
    """
    check_range("processes", processes, 1)
    epoch = source.steps_per_epoch
    config = ProfileConfig(
        tables=tuple(tables),
        world=world,
        num_steps=default_steps(source) if num_steps is None else num_steps,
        rows_kept=rows_kept,
        chunk_steps=chunk_steps,
    )
    chunks: Iterable[Chunk]
    if partial is not None:
        name = repr(source) if name is None else name
        kept = Partial(Path(partial), fingerprint(config, source=name))
        if again:
            remove_partial(kept.folder)
        kept.open()
        opened = functools.partial(_same, source) if reopen is None else reopen
        _complete(kept, config, source, opened, processes, on_progress)
        chunks = map(kept.load, range(config.num_chunks))
    elif processes > 1:
        raise InputError(f"processes is {processes}, which needs a folder for chunks: partial")
    else:
        chunks = _count_here(source, config, on_progress)

    def further() -> Step | None:
        if epoch is not None and config.num_steps >= epoch:
            return None  # it would repeat what was counted
        with contextlib.closing(_read(source, config, start=config.num_steps)) as steps:
            return next(steps, None)

    return merge_chunks(chunks, config, further)


def profile_batches(
    steps: Iterable[Sequence[KeyedJaggedTensor]],
    tables: Iterable[TableConfig],
    *,
    num_steps: int,
    rows_kept: int = ROWS_KEPT,
    chunk_steps: int = CHUNK_STEPS,
) -> Profile:
    """Count what batches ask of ``tables``: `profile_source` for data of any kind.

    Args:
        steps: For each step a batch for every rank.
        tables: Whose rows are counted.
        num_steps: Steps to count; if there is one more, it shows how many of its rows are new.
        rows_kept, chunk_steps: As for `profile_source`.

    Raises:
        InputError: If a number is out of range, there are fewer steps, or an id is outside its
            table.
    """
    given = iter(steps)
    first = next(given, None)
    if first is None:
        raise InputError("a profile needs at least one step")
    config = ProfileConfig(
        tables=tuple(tables),
        world=len(first),
        num_steps=num_steps,
        rows_kept=rows_kept,
        chunk_steps=chunk_steps,
    )
    chunks = count_chunks(itertools.chain([first], given), config)
    return merge_chunks(chunks, config, lambda: next(given, None))


def _count_here(
    source: Source, config: ProfileConfig, on_progress: Callable[[int], None]
) -> Iterator[Chunk]:
    for number, chunk in _count(source, config, range(config.num_chunks)):
        on_progress(config.bounds(number)[1])
        yield chunk


def _complete(
    partial: Partial,
    config: ProfileConfig,
    source: Source,
    reopen: Callable[[], Source],
    processes: int,
    on_progress: Callable[[int], None],
) -> None:
    """Count the chunks that are not in the folder yet; of many processes each gets a stretch."""
    numbers = range(config.num_chunks)
    missing = sorted(set(numbers) - set(partial.done(numbers)))
    counted = len(numbers) - len(missing)

    def note(number: int) -> None:
        nonlocal counted
        counted += 1
        on_progress(min(counted * config.chunk_steps, config.num_steps))

    if processes == 1:
        for number in _count_missing(source, config, partial, missing):
            note(number)
    else:
        work = functools.partial(_work, reopen, config, partial)
        stretches = [part.tolist() for part in np.array_split(missing, processes) if len(part)]
        run_workers(work, stretches, on_piece=note)


def _same(source: Source) -> Source:
    return source


def _work(
    reopen: Callable[[], Source], config: ProfileConfig, partial: Partial, numbers: list[int]
) -> Iterator[int]:
    return _count_missing(reopen(), config, partial, numbers)


def _count_missing(
    source: Source, config: ProfileConfig, partial: Partial, numbers: Sequence[int]
) -> Iterator[int]:
    """Count and keep these chunks; yields each number when it is done."""
    for number, chunk in _count(source, config, numbers):
        partial.save(number, chunk)
        yield number


def _count(
    source: Source, config: ProfileConfig, numbers: Sequence[int]
) -> Iterator[tuple[int, Chunk]]:
    """Chunks with their numbers; neighbours are read in one go, as data is cheapest to read."""
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    for _, pairs in runs:
        run = [number for _, number in pairs]
        first, last = run[0], run[-1] + 1
        start = max(0, config.bounds(first)[0] - 1)
        with contextlib.closing(_read(source, config, start=start)) as steps:
            yield from zip(run, count_chunks(steps, config, first=first, last=last), strict=True)


def _read(source: Source, config: ProfileConfig, *, start: int) -> Generator[Step, None, None]:
    """Steps from ``start`` on, with a batch of every rank."""
    ranks = [source.batches(rank=r, world=config.world, start=start) for r in range(config.world)]
    try:
        while True:
            step = [next(batches, None) for batches in ranks]
            if any(batch is None for batch in step):
                return
            yield [batch.sparse_features for batch in step if batch is not None]
    finally:
        for batches in ranks:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
