"""Chunks to a profile: summaries are added up in the order of the chunks."""

from collections.abc import Callable, Iterable, Sequence

from rowmesh.profile.chunks import Chunk, ProfileConfig, Step, TableSummary, ask_step
from rowmesh.profile.counts import Asked, are_in
from rowmesh.profile.file import batches_by_phase
from rowmesh.profile.result import Profile, TableProfile
from rowmesh.tables import TableConfig

__all__ = ["merge_chunks"]


def merge_chunks(
    chunks: Iterable[Chunk], config: ProfileConfig, further: Callable[[], Step | None]
) -> Profile:
    """The profile of all chunks, and of one more step if there is one.

    Args:
        chunks: In their order.
        config: What was counted.
        further: Gives the step after the last, or None; called when all chunks are merged.
    """
    merged: tuple[TableSummary, ...] = ()
    marks: list[list[tuple[int, float]]] = [[] for _ in config.tables]
    num_batches, num_samples, batch_size = 0, 0, 0
    for number, chunk in enumerate(chunks):
        pairs = zip(merged, chunk.tables, strict=True) if merged else ()
        sums = tuple(old.merged(new, bound=config.rows_kept) for old, new in pairs)
        merged = sums or chunk.tables
        batch_size = batch_size if number else chunk.first_batch
        num_batches, num_samples = num_batches + chunk.num_batches, num_samples + chunk.num_samples
        if number + 1 == config.num_chunks or not number & (number + 1):  # 1, 2, 4, ... chunks
            for own, table in zip(marks, merged, strict=True):
                own.append((num_batches, table.seen))
    asked = _ask_further(further(), config)
    tables = [
        _finish(table, summary, tuple(own), more, config)
        for table, summary, own, more in zip(config.tables, merged, marks, asked, strict=True)
    ]
    return Profile(
        tables=tuple(tables),
        world=config.world,
        num_steps=config.num_steps,
        num_samples=num_samples,
        batch_size=batch_size,
        rows_kept=config.rows_kept,
        chunk_steps=config.chunk_steps,
    )


def _ask_further(step: Step | None, config: ProfileConfig) -> list[list[Asked]]:
    if step is None:
        return [[] for _ in config.tables]
    return ask_step(step, config, number=config.num_steps)


def _finish(
    table: TableConfig,
    summary: TableSummary,
    marks: tuple[tuple[int, float], ...],
    further: Sequence[Asked],
    config: ProfileConfig,
) -> TableProfile:
    known = [are_in(asked.rows, summary.counts.rows) for asked in further]
    return TableProfile(
        name=table.name,
        num_embeddings=table.num_embeddings,
        feature_names=tuple(table.feature_names),
        summary=summary,
        num_batches=batches_by_phase(config.world, config.num_steps),
        marks=marks,
        further=sum(map(len, known)),
        unseen=sum(int((~found).sum()) for found in known),
    )
