"""`rowmesh reproduce 2d`."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rowmesh.cli.terminal import one_sentence
from rowmesh.errors import InputError, did_you_mean
from rowmesh.reproduce.hosts import parse_shape
from rowmesh.reproduce.two_d import (
    PARTS,
    open_folder,
    run_bytes,
    run_quality,
    run_speed,
    write_report,
)
from rowmesh.reproduce.two_d_quality import runs_of
from rowmesh.reproduce.two_d_sets import SETS, Quality
from rowmesh.reproduce.two_d_speed import Speed

__all__ = ["two_d_command"]

_FIRST_SEED = 11


def two_d_command(
    out: Annotated[Path, typer.Option(help="Folder of report.md, report.json and runs.")] = Path(
        "2d"
    ),
    seeds: Annotated[int, typer.Option(help="Paired seeds, from 2 to 30.")] = 5,
    sets: Annotated[str, typer.Option(help="Data sets: " + ", ".join(SETS) + ".")] = ",".join(SETS),
    groups: Annotated[str, typer.Option(help="Values of M on planted data, 4 among them.")] = (
        "2,4,8,16"
    ),
    data: Annotated[Path, typer.Option(help="Folder of clicks; left out if absent.")] = Path(
        "../shared/data"
    ),
    parts: Annotated[str, typer.Option(help="Parts: " + ", ".join(PARTS) + ".")] = ",".join(PARTS),
    shapes: Annotated[str, typer.Option(help="Hosts x ranks on each.")] = "2x2,4x1",
    rates: Annotated[str, typer.Option(help="Of a host's link.")] = "200mbit",
    syncs: Annotated[
        str, typer.Option(help="Syncs that are timed, as for rowmesh plan --sync.")
    ] = "gradients,weights:4",
    alpha: Annotated[float, typer.Option(help="Zipf exponent of the ids that are timed.")] = 1.05,
    cap: Annotated[int, typer.Option(help="Most rows of a table that is timed.")] = 100_000,
    batch: Annotated[int, typer.Option(help="Samples per rank and step that are timed.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Every plan runs once in a round.")] = 5,
    depth: Annotated[int, typer.Option(help="Batches begun at a time, timed.")] = 2,
    workers: Annotated[int, typer.Option(min=1, help="Processes that train.")] = 2,
    quick: Annotated[bool, typer.Option(help="2 seeds, one round: shows that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Shard groups: what they send, what a step takes, and what stepping apart does to quality.

    bytes: by link class, imbalance and memory of every size and layout, and of syncs; a minute.
    speed: step time of each on emulated hosts, beside the cost model; needs root and iproute2, and
    that nothing else runs; about 10 minutes. quality: virtual ranks in one process train on planted
    data, where rare rows matter, and on clicks; not timed, 5 seeds take about 20 minutes on 2
    cores, and when it is started again with the same --out it goes on where it was.
    """
    with one_sentence():
        wanted = _words(parts, PARTS, "part")
        what = Quality(
            seeds=tuple(range(_FIRST_SEED, _FIRST_SEED + seeds)),
            groups=tuple(_count(word) for word in groups.split(",")),
            sets=_words(sets, SETS, "set"),
            clicks=data / "clicks",
        )
        if quick:
            what = replace(what, seeds=what.seeds[:2], groups=(2, 4), periods=(4,), steps=30)
        timed = Speed(
            shapes=tuple(parse_shape(word) for word in shapes.split(",")),
            rates=tuple(rates.split(",")),
            syncs=tuple(syncs.split(",")),
            alpha=alpha,
            cap=cap,
            batch=batch,
            rounds=1 if quick else rounds,
            depth=depth,
        )
        if "quality" in wanted:
            runs_of(what)  # complains before hours have passed
        open_folder(out)
        found: dict[str, Any] = {}
        if "bytes" in wanted:
            _say("bytes")
            found["bytes"] = run_bytes(timed)
            write_report(out, found)
        if "speed" in wanted:
            found["speed"] = run_speed(timed, on_stage=_say)
            write_report(out, found)
        if "quality" in wanted:
            if "clicks" in what.sets and not (data / "clicks").is_dir():
                _say(f"{data / 'clicks'} is not there: no run on clicks; name its folder by --data")
            with _progress() as on_run:
                found["quality"] = run_quality(what, out, workers=workers, on_run=on_run)
            write_report(out, found)
        verdicts = found.get("quality", {}).get("verdicts", {})
        if as_json:
            typer.echo(json.dumps(verdicts))
            return
        for name, members in verdicts.items():
            for verdict in members:
                typer.echo(f"{name}: {verdict['verdict']}")
        typer.echo(f"written to {out / 'report.md'} and report.json")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, else a line for about every twentieth run."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _say_some
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("runs", total=None)
        yield lambda done, total, name: progress.update(
            task, completed=done, total=total, description=name
        )


def _say_some(done: int, total: int, name: str) -> None:
    if name == "stored" or done % max(total // 20, 1) == 0:
        _say(f"{done} of {total} runs: {name}")


def _words(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    words = text.split(",")
    for word in words:
        if word not in known:
            raise InputError(f"{what} {word!r} is unknown{did_you_mean(word, known)}")
    return tuple(words)


def _count(word: str) -> int:
    if not word.isdecimal():
        raise InputError(f"groups {word!r}: say numbers of groups, as 2,4")
    return int(word)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
