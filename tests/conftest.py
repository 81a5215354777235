"""The order of test files: those that take longest first, so that no worker ends with one."""

import gc

import pytest

LONGEST = [
    "test_central_property",
    "test_merges",
    "test_cli",
    "test_codec_runs",
    "test_mutations",
    "test_planners",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of `LONGEST`, then the others as they were found."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
