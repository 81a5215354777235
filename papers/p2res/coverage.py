"""How much the hottest rows take, on real and synthetic data, beside what P2RES saw."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rowmesh.data import SyntheticClicks
from rowmesh.errors import InputError
from rowmesh.features import JaggedTensor, KeyedJaggedTensor
from rowmesh.profile import Profile, profile_batches, profile_source
from rowmesh.tables import EmbeddingBagConfig, TableConfig
from rowmesh.train.recipes import load_recipe

__all__ = ["PUBLISHED", "measure_coverage"]

_STEPS: Final = 100  # as many batches as P2RES looked at; one more shows what is new
_DIM: Final = 16  # of no account: rows are counted
Ints = NDArray[np.int64]

PUBLISHED: Final[tuple[dict[str, str], ...]] = (  # what P2RES states
    {"data": "Criteo Kaggle (paper)", "steady": "2.2 %", "steady_take": "> 90 %"},
    {"data": "Taobao (paper)", "hot_13": "86 %"},
)


def measure_coverage(
    data: Path, alphas: Sequence[float], *, batch: int, on_missing: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Figures of 100 batches of each data set: synthetic ones, and those found below ``data``.

    Args:
        data: A folder with ``clicks``, ``movietweetings`` and ``sequences``, or some of them.
        alphas: Of synthetic clicks with Criteo's tables in their full size.
        batch: Samples of a synthetic batch; finite data is cut into 101 equal ones.
        on_missing: Called with a sentence for each that is not there.
    """
    for alpha in alphas:
        source = SyntheticClicks(cap=None, alpha=alpha, batch_size=batch)
        found = profile_source(source, source.tables(_DIM), num_steps=_STEPS)
        yield _figures(f"synthetic, Criteo's tables, alpha {alpha}", found)
    for name, read in _READERS.items():
        path = data / name
        if path.exists():
            try:
                found = read(path)
            except (ValueError, IndexError, InputError, OSError) as error:
                raise InputError(f"{path} cannot be counted: {error}") from None
            yield _figures(name, found)
        else:
            on_missing(
                f"{path} is not there, so its coverage is left out: give its folder as --data"
            )


def _figures(name: str, found: Profile) -> dict[str, Any]:
    figures = found.figures
    covered = dict(zip(figures["shares"], figures["coverage"]["seen"], strict=True))
    return {
        "data": name,
        "samples": found.batch_size,
        "seen_rows": figures["seen_rows"],
        "hot_2": covered[0.022],
        "hot_13": covered[0.13],
        "steady": figures["steady_share"],
        "steady_take": figures["steady_requests_share"],
        "unseen": figures["unseen_share"],
        "collisions": figures["collisions_with_copies"],
    }


def _profile_clicks(folder: Path) -> Profile:
    whole = load_recipe("clicks", (f"data.path={folder}", "data.batch_size=1"))
    samples = whole.data.steps_per_epoch or 1
    size = max(1, samples // (_STEPS + 1))
    config = load_recipe("clicks", (f"data.path={folder}", f"data.batch_size={size}"))
    return profile_source(config.data, config.data.tables(_DIM), num_steps=_STEPS)


def _profile_ratings(path: Path) -> Profile:
    """Users and movies, ratings in time order."""
    words = path.read_text().replace("::", " ").split()
    numbers = np.asarray(words, dtype=np.int64).reshape(-1, 4)
    numbers = numbers[np.argsort(numbers[:, 3], kind="stable")]
    ones = np.ones(len(numbers), dtype=np.int64)
    return _profile({"user": (numbers[:, 0], ones), "movie": (numbers[:, 1], ones)})


def _profile_sequences(path: Path) -> Profile:
    """Items of a user are the bag of one sample."""
    lines = [line.split()[1:] for line in path.read_text().splitlines()]
    lengths = np.asarray([len(line) for line in lines], dtype=np.int64)
    items = np.asarray([item for line in lines for item in line], dtype=np.int64)
    return _profile({"item": (items, lengths)})


_READERS: Final[dict[str, Callable[[Path], Profile]]] = {
    "clicks": _profile_clicks,
    "movietweetings/ratings.dat": _profile_ratings,
    "sequences/Beauty.txt": _profile_sequences,
    "sequences/Yelp.txt": _profile_sequences,
}


@dataclass(frozen=True, slots=True)
class _Bags:
    """Rows of one table, bag by bag."""

    rows: Ints
    bounds: Ints

    def part(self, first: int, last: int) -> JaggedTensor:
        bounds = self.bounds[first : last + 1]
        rows = torch.from_numpy(self.rows[bounds[0] : bounds[-1]])
        return JaggedTensor(rows, lengths=torch.from_numpy(np.diff(bounds)))


def _profile(features: dict[str, tuple[Ints, Ints]]) -> Profile:
    """Of ids and lengths of bags, cut into 101 batches of equally many samples."""
    tables: list[TableConfig] = []
    bags: dict[str, _Bags] = {}
    for name, (ids, lengths) in features.items():
        if not len(ids):
            raise InputError("it has no ids")
        seen, rows = np.unique(ids, return_inverse=True)
        bags[name] = _Bags(rows.astype(np.int64), np.concatenate([[0], np.cumsum(lengths)]))
        tables.append(
            EmbeddingBagConfig(
                name=name, num_embeddings=len(seen), embedding_dim=_DIM, feature_names=[name]
            )
        )
    samples = len(bags[tables[0].name].bounds) - 1
    if samples <= _STEPS:
        raise InputError(f"{samples} samples make fewer than {_STEPS + 1} batches")
    size = samples // (_STEPS + 1)

    def steps() -> Iterator[list[KeyedJaggedTensor]]:
        for s in range(_STEPS + 1):
            parts = {name: own.part(s * size, (s + 1) * size) for name, own in bags.items()}
            yield [KeyedJaggedTensor.from_dict(parts)]

    return profile_batches(steps(), tables, num_steps=_STEPS)
