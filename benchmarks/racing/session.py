"""One sitting: the shapes of one group, in processes that are started once.

Trials choose, rounds count. In a trial every candidate runs once at each rate; the fastest of a
role takes part in the rounds of that rate. In a round every contestant of the shape runs once
(`turns`). After the rounds a few steps of ours are traced, which are not counted.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness.contestants import Entry, Place
from harness.figures import round_ms
from harness.settings import Settings
from harness.shapes import Shape
from harness.turns import turns

from rowmesh.data.synthetic import SyntheticClicks

from .entries import THEIRS_PLAIN, ours, ours_lossy, theirs, theirs_lossy, with_own_cores
from .floor import Bytes, count_bytes, dense_parameters, floor
from .goals import roles_of

__all__ = ["run_group"]

IDLE_S = 1.0
DENSE_STEPS = 4
TRACED_STEPS = 5
EXACT = ("ours", "theirs")


def run_group(
    shapes: list[Shape], settings: Settings, say: Callable[[str], None]
) -> Iterator[tuple[Shape, dict[str, Any]]]:
    """Results of shapes that differ only by the rate, each as soon as it is there.

    Raises:
        LabError: If a contestant dies, with its name and last lines, or does not answer.
    """
    first = shapes[0]
    flags = settings.script_flags(first)
    with Place(first.hosts, first.local, flags=flags, peer=settings.peer) as place:
        trial = functools.partial(_trial, place, settings=settings, say=say)
        files = {shape: _topology(place, shape, settings, say) for shape in shapes}
        links = list(files.values())
        entries = ours(links, hosts=first.hosts) + theirs(links, hosts=first.hosts)
        tried = {shape: trial(shape, entries) for shape in shapes}
        best = {s: {role: _fastest(tried[s], role) for role in EXACT} for s in shapes}
        _keep(place, best)
        for shape in shapes:
            for role in EXACT if first.local > 1 else ():
                tried[shape] |= trial(shape, [with_own_cores(best[shape][role])])
                best[shape][role] = _fastest(tried[shape], role)
            _keep(place, best)
            others = {
                "ours_lossy": ours_lossy(best[shape]["ours"], links, files[shape]),
                "theirs_plain": (THEIRS_PLAIN,),
                "theirs_lossy": theirs_lossy(best[shape]["theirs"]),
            }
            for role, candidates in others.items():
                if settings.goals and role not in roles_of(shape):
                    continue
                tried[shape] |= trial(shape, candidates)
                best[shape][role] = _fastest(tried[shape], role)
                _keep(place, best)  # before the next start: all at once may not fit the memory
                if first.local > 1 and not best[shape][role].has_own_cores:
                    tried[shape] |= trial(shape, [with_own_cores(best[shape][role])])
                    best[shape][role] = _fastest(tried[shape], role)
                    _keep(place, best)
        least = _least(first, settings)
        for shape in shapes:
            chosen = list(best[shape].values())
            result = _rounds(place, shape, chosen, settings=settings, say=say)
            trials = [
                {"role": e.role, "name": e.name, "ms": round_ms(found["ms"]), "steps": found["ms"]}
                for e, found in tried[shape].items()
            ]
            told = result["entries"]["ours"]["predicted_ms"][shape.layout]
            floors = _floor(shape, least, result["rounds"])
            yield shape, {**result, "trials": trials, "forecast_ms": told} | floors


def _topology(place: Place, shape: Shape, settings: Settings, say: Callable[[str], None]) -> Path:
    """What `rowmesh calibrate` says of these hosts at this rate; stored, so measured once."""
    path = settings.folder / f"{shape.layout}.topology"
    if not path.exists():
        say(f"{shape.layout}: rowmesh calibrate")
        place.set_rate(shape.rate)
        place.calibrate(path, settings.model_settings())
    return path


def _trial(
    place: Place,
    shape: Shape,
    entries: tuple[Entry, ...],
    *,
    settings: Settings,
    say: Callable[[str], None],
) -> dict[Entry, dict[str, Any]]:
    """Steps of every entry, once."""
    for entry in entries:
        if entry not in place.alive:
            started = time.monotonic()
            label = place.start(entry).label
            say(f"{shape.name}: {label} ready after {time.monotonic() - started:.0f} s")
    place.set_rate(shape.rate)
    found = {entry: place.alive[entry].steps(settings.trial_steps) for entry in entries}
    for entry, answer in found.items():
        say(f"{shape.name}: trial of {place.alive[entry].label}: {round_ms(answer['ms']):.0f} ms")
    return found


def _fastest(tried: dict[Entry, dict[str, Any]], role: str) -> Entry:
    return min((e for e in tried if e.role == role), key=lambda e: round_ms(tried[e]["ms"]))


def _keep(place: Place, best: dict[Shape, dict[str, Entry]]) -> None:
    place.keep(entry for entries in best.values() for entry in entries.values())


def _rounds(
    place: Place,
    shape: Shape,
    entries: list[Entry],
    *,
    settings: Settings,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The rounds, with a dense step of ours at a gate of its own in each."""
    contestants = {entry.role: place.alive[entry] for entry in entries}
    place.set_rate(shape.rate)
    idle = _idle_bytes(place)
    rounds: list[dict[str, Any]] = []
    measured = turns(list(contestants), lambda role: contestants[role].steps(settings.steps))
    for number, found in enumerate(itertools.islice(measured, settings.rounds)):
        found["dense"] = contestants["ours"].dense(DENSE_STEPS)
        rounds.append(found)
        times = ", ".join(f"{role} {round_ms(found[role]['ms']):.0f}" for role in contestants)
        say(f"{shape.name}: round {number + 1} of {settings.rounds}: {times} ms")
    traced = [role for role in contestants if contestants[role].entry.is_ours]
    return {
        "shape": dataclasses.asdict(shape),
        "traces": {role: contestants[role].trace(TRACED_STEPS) for role in traced},
        "batch": settings.batch,
        "entries": {role: c.describe() for role, c in contestants.items()},
        "rounds": rounds,
        "idle_bytes_s": idle,
    }


def _idle_bytes(place: Place) -> list[float]:
    """Bytes a second that each host sends while all contestants wait."""
    before = place.lab.counters()
    time.sleep(IDLE_S)
    after = place.lab.counters()
    return [(b.sent - a.sent) / IDLE_S for a, b in zip(before, after, strict=True)]


def _least(shape: Shape, settings: Settings) -> Bytes:
    """Least bytes of the group, from the ids of the batches that both scripts go round in."""
    clicks = SyntheticClicks(
        cap=int(settings.cap),
        alpha=shape.alpha,
        pooling=shape.pooling,
        batch_size=settings.batch,
        labels="coin",
    )
    tables = len(clicks.num_rows)
    size = (tables, settings.batch, shape.pooling)
    steps = [
        [
            list(np.reshape(clicks.batch_at(rank, step).sparse_features.values().numpy(), size))
            for rank in range(shape.hosts * shape.local)
        ]
        for step in range(settings.batches)
    ]
    steps.append(steps[0])
    bottom, top = ([int(n) for n in text.split(",")] for text in (settings.bottom, settings.top))
    parameters = dense_parameters(bottom, top, features=tables, inputs=clicks.num_dense)
    return count_bytes(
        steps, rows=clicks.num_rows, hosts=shape.hosts, dim=settings.dim, parameters=parameters
    )


def _floor(shape: Shape, least: Bytes, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    dense, fwd, bwd = (median(r["dense"][k] for r in rounds) for k in ("ms", "fwd", "bwd"))
    found = floor(
        least,
        hosts=shape.hosts,
        bytes_per_s=shape.bytes_per_s,
        dense_ms=dense,
        fwd=fwd,
        bwd=bwd,
    )
    return {"least": dataclasses.asdict(least), "floor": dataclasses.asdict(found)}
