"""`read_ahead`: the same items, errors in their place, and a thread that always ends."""

import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from rowmesh.data.ahead import read_ahead


def threads() -> int:
    return sum(thread.name == "rowmesh-read-ahead" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_items_come_in_order_and_end(depth: int) -> None:
    assert list(read_ahead(iter(range(50)), depth=depth)) == list(range(50))
    assert list(read_ahead(iter(()), depth=depth)) == []
    assert threads() == 0


@pytest.mark.parametrize("depth", [1, 100])
def test_an_error_comes_in_the_place_of_its_item(depth: int) -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise KeyError("sixth")

    found = []
    with pytest.raises(KeyError, match="sixth"):
        found += read_ahead(items(), depth=depth)
    ahead = read_ahead(items(), depth=depth)
    assert list(islice(ahead, 5)) == list(range(5))
    with pytest.raises(KeyError, match="sixth"):
        next(ahead)
    assert threads() == 0


def test_the_thread_is_depth_items_ahead_and_then_does_other_work() -> None:
    made: list[int] = []
    idle = threading.Event()

    def items() -> Iterator[int]:
        for item in count():
            made.append(item)
            yield item

    def when_full() -> bool:
        idle.set()
        return False

    ahead = read_ahead(items(), depth=3, when_full=when_full)
    assert next(ahead) == 0
    assert idle.wait(timeout=10)
    assert made[:4] == [0, 1, 2, 3]
    ahead.close()
    assert len(made) <= 6
    assert threads() == 0


def test_a_generator_in_a_cycle_ends_its_thread_when_collected() -> None:
    cycle: list[object] = []
    ahead = read_ahead(count(), depth=2)
    next(ahead)
    cycle += [cycle, ahead]
    del ahead, cycle
    gc.collect()
    assert threads() == 0


def test_an_interpreter_ends_with_an_iterator_open() -> None:
    folder = Path(inspect.getfile(read_ahead)).parent
    code = (
        "import sys\n"
        "from itertools import count\n"
        f"sys.path.append({str(folder)!r})\n"
        "from ahead import read_ahead\n"  # not from rowmesh, which would import torch
        "ahead = read_ahead(count(), depth=2)\n"
        "print(next(ahead))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert (run.stdout, run.stderr) == ("0\n", "")
