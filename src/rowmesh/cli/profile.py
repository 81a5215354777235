"""`rowmesh profile`."""

import functools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rowmesh.cli.terminal import Recipe, Settings, one_sentence, say
from rowmesh.data import Source
from rowmesh.errors import InputError, printable
from rowmesh.files import check_target, write_whole
from rowmesh.profile import (
    Profile,
    profile_source,
    remove_partial,
    render_page,
    save_profile,
)
from rowmesh.profile.chunks import ROWS_KEPT
from rowmesh.profile.collect import default_steps
from rowmesh.profile.page import percent
from rowmesh.train.config import RunConfig
from rowmesh.train.recipes import config_to_json, load_recipe

__all__ = ["profile_command"]

_WIDTH, _NAME = 100, 20
_LINE_EVERY_S = 3.0


def profile_command(
    recipe: Recipe = None,
    batches: Annotated[
        int | None,
        typer.Option(
            help="Steps to count; default an epoch, or 100 where the data has no end.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(help="Ranks that will train; none is started."),
    ] = 1,
    processes: Annotated[int, typer.Option(help="Processes that count.")] = 1,
    rows_kept: Annotated[
        int, typer.Option(help="Rows of a table that are counted one by one, at most.")
    ] = ROWS_KEPT,
    out: Annotated[Path, typer.Option(help="Where to write the profile.")] = Path("profile.npz"),
    page: Annotated[
        Path | None, typer.Option("--html", help="Write coverage curves to this file, too.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Begin anew, and drop what a stopped pass has left.")
    ] = False,
    settings: Settings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object, nothing else.")
    ] = False,
) -> None:
    """Count which rows of every table the recipe's data asks for, and write it for the planner.

    Requests and batches of every row, pooling lengths, distinct rows, coverage of the hottest
    rows, reuse from batch to batch, and how many of the next batch's rows the running step
    updates, without and with copies of the hottest rows.

    A pass that is stopped leaves OUT.partial; the same command goes on from there, and comes to
    the same bits. So it does with any number of processes.

    Then say, on as many ranks, rowmesh train --set plan.profile=profile.npz --set plan.tiers=auto,
    or rowmesh plan --profile profile.npz --tiers auto.
    """
    with one_sentence():
        name, chosen = "demo" if recipe is None else recipe, tuple(settings or ())
        config = load_recipe(name, chosen)
        for file, option in ((out, "--out"), (page, "--html")):
            if file is not None:  # fail before the pass, not after it
                way_out = f"give {option} a file in a folder that exists"
                check_target(file, what="the profile", way_out=way_out)
        partial = out.with_name(f"{out.name}.partial")
        if page is not None and page.absolute() in (out.absolute(), partial.absolute()):
            raise InputError(f"--html {page} is where the profile goes: name another file")
        count = functools.partial(
            profile_source,
            config.data,
            config.data.tables(config.model.dim),
            world=ranks,
            num_steps=batches,
            rows_kept=rows_kept,
            processes=processes,
            partial=partial,
            again=again,
            name=json.dumps(json.loads(config_to_json(config))["data"]),
            reopen=functools.partial(_reopen, name, chosen),
        )
        found = _count(count, config, batches)
        save_profile(found, out)
        remove_partial(partial)
        if page is not None:
            _write_page(found, page)
        if as_json:
            typer.echo(json.dumps(found.figures))
        else:
            _show(found, [file for file in (out, page) if file is not None])
            words = " ".join(f"--set {shlex.quote(item)}" for item in chosen)
            say(
                f"then: rowmesh train {shlex.quote(name)} {words}{' ' if words else ''}--ranks "
                f"{ranks} --set plan.profile={shlex.quote(str(out))} --set plan.tiers=auto; for "
                f"other ranks profile with --ranks",
                err=True,
            )


def _reopen(recipe: str, settings: tuple[str, ...]) -> Source:
    return load_recipe(recipe, settings).data


def _count(count: Callable[..., Profile], config: RunConfig, batches: int | None) -> Profile:
    total = default_steps(config.data) if batches is None else batches
    try:
        with _progress(total) as on_progress:
            return count(on_progress=on_progress)
    except KeyboardInterrupt as error:
        reason = str(error) or "SIGINT"
        raise KeyboardInterrupt(f"{reason}; the same command goes on from here") from None


def _write_page(found: Profile, path: Path) -> None:
    try:
        write_whole(path, render_page(found))
    except OSError as error:
        raise InputError(f"cannot write the page to {path}: {error.strerror}") from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal's stderr; lines now and then where stderr is no terminal."""
    console = Console(file=sys.stderr, highlight=False)
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("steps"))
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    task, shown = bar.add_task("profile", total=total), time.monotonic()

    def show(steps: int) -> None:
        nonlocal shown
        bar.update(task, completed=steps)
        if bar.disable and time.monotonic() - shown > _LINE_EVERY_S:
            shown = time.monotonic()
            typer.echo(f"step {steps}/{total}", err=True)

    with bar:
        yield show


def _show(found: Profile, files: list[Path]) -> None:
    console, figures = Console(highlight=False, width=_WIDTH), found.figures
    console.print(found.title, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    heads = ("table", "rows", "seen", "asked", "distinct", "bag", "top 1%", "top 10%")
    for name in (*heads, "steady", "reused", "collide"):
        table.add_column(name, justify="left" if name == "table" else "right", no_wrap=True)
    for name, own in figures["tables"].items():
        table.add_row(*_cells(name, own, figures["shares"]))
    console.print(table, markup=False)
    for line in _sentences(figures):
        console.print(line, markup=False)
    for file in files:
        console.print(f"written to {file}", markup=False, soft_wrap=True)


def _cells(name: str, own: dict[str, Any], shares: list[float]) -> list[str]:
    covered = dict(zip(shares, own["coverage"]["all"], strict=True))
    about = "~" if own["count_error"] else ""
    return [
        printable(name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"),
        _short(own["rows"]),
        about + _short(own["seen_rows"]),
        _short(own["requests"]),
        _short(own["distinct"]),
        "-" if own["pooling_mean"] is None else f"{own['pooling_mean']:.1f}",
        *(percent(covered[x]) for x in (0.01, 0.10)),
        percent(own["steady_share"]),
        percent(own["reuse_share"]),
        percent(own["collision_share"]),
    ]


def _sentences(figures: dict[str, Any]) -> list[str]:
    """What the columns mean, and the figures of all tables together."""
    covered = zip(figures["shares"], figures["coverage"]["all"], strict=True)
    copies = [
        f"{percent(pair['share'])} of the rest with copies of the {pair['copies']:,} hottest rows"
        for pair in figures["collisions_with_copies"]
        if pair["copies"]
    ]
    error = max(own["count_error"] for own in figures["tables"].values())
    unseen = figures["unseen_share"]
    lines = [
        "asked, distinct: ids and rows of a rank's batch; bag: ids in one; top: share of requests "
        "for the hottest of all rows; steady: of the rows seen, those in over 95 % of batches; "
        "reused: of a rank's next rows, those in its running batch; collide: those that the "
        "running step updates on any rank",
        "all tables, requests for the hottest "
        + ", ".join(f"{100 * x:.3g} %: {percent(y)}" for x, y in covered),
        f"steady rows: {percent(figures['steady_share'])} of those seen, with "
        f"{percent(figures['steady_requests_share'])} of the requests"
        + ("" if unseen is None else f"; unseen rows of one more batch: {percent(unseen)}"),
        "; ".join([f"collisions: {percent(figures['collision_share'])}", *copies]),
    ]
    if error:
        lines.append(
            f"~: the hottest {figures['rows_kept']:,} rows were counted; others are in at most "
            f"{error:,} batches"
        )
    return lines


def _short(number: float) -> str:
    for unit, word in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 10 * unit or (number >= unit and word != "k"):
            return f"{number / unit:.1f}{word}"
    return f"{number:,.0f}"
