"""`rowmesh lab run`, `check`, `list` and `clean`."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from rowmesh.cli.follow import follow, forwarded_signals, say, say_failure
from rowmesh.cli.terminal import one_sentence
from rowmesh.errors import InputError, check_range
from rowmesh.files import check_target, write_whole
from rowmesh.lab import HostBytes, Lab, Removed, check_permitted, clean, find_tags, parse_rate
from rowmesh.lab.command import rank_words
from rowmesh.lab.measure import TOLERANCE, Reading, measure
from rowmesh.lab.network import read_congestion
from rowmesh.lab.run import check_timeout

__all__ = ["lab_app"]

_WIDTH = 100


class _AfterDashes(TyperCommand):
    """A command whose last arguments are another program's, set off by ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" not in args and "--help" not in args:
            say("the command goes after --, as rowmesh lab run --hosts 2 -- script.py --steps 3")
            ctx.exit(2)
        return super().parse_args(ctx, args)


lab_app = typer.Typer(add_completion=False, no_args_is_help=True)
Hosts = Annotated[int, typer.Option(help="Number of hosts.")]
Rate = Annotated[
    str,
    typer.Option(help="Of each host's link, each way: 200mbit, 1.5gbit, or none for unshaped."),
]


@lab_app.command("run", cls=_AfterDashes)
def run_command(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help="script.py ..., -m module ..., or a program such as rowmesh train.",
            show_default=False,
        ),
    ] = None,
    hosts: Hosts = 2,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    rate: Rate = "none",
    unshaped: Annotated[
        bool,
        typer.Option("--unshaped", help="Emulate nothing: the same ranks on this machine's own."),
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Stop after so many seconds, with exit code 124.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep the output of every rank in this folder.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write bytes per link and exit code to this file.")
    ] = None,
) -> None:
    """Run a command by torchrun on emulated hosts, and print the bytes on each host's link.

    Rank 0's stdout and stderr appear as they come; of other ranks, the last lines of the one that
    failed first. All else goes to stderr, so stdout is rank 0's alone.

    The first Ctrl-C goes on to the ranks, which may stop as they like; the second kills them. The
    hosts are removed in any case. Exit code: the command's; 2: bad input; 124: time-out; 130:
    stopped by a signal.
    """
    words = command or []
    with one_sentence():
        rank_words(words, python=sys.executable)  # fail before hosts are made
        check_range("ranks-per-host", ranks_per_host, 1)
        check_timeout("--timeout", timeout)
        if json_file is not None:  # fail before a run, not after it
            check_target(json_file, what="the bytes", way_out="give --json another file")
        _mention_left_overs()
        lab = _choose(hosts, rate, unshaped)
        found = _run(lab, words, ranks_per_host=ranks_per_host, log_dir=log_dir, timeout_s=timeout)
        if json_file is not None:
            _write(json_file, found)
        raise typer.Exit(found["exit_code"])


def _run(
    lab: Lab, command: Sequence[str], *, ranks_per_host: int, **options: Any
) -> dict[str, Any]:
    """Run the command and show it; what ``--json`` writes."""
    with forwarded_signals() as signals, lab:
        before, begin = lab.counters(), time.monotonic()
        run = lab.launch(command, ranks_per_host=ranks_per_host, **options)
        code = follow(run, signals)
        seconds, links = time.monotonic() - begin, _difference(lab.counters(), before)
        if not signals:
            say_failure(run)
    _show_links(links, rate=lab.rate, seconds=seconds)
    return {
        "hosts": lab.hosts,
        "ranks_per_host": ranks_per_host,
        "rate_bits_per_s": lab.bits,
        "seconds": seconds,
        "exit_code": code,
        "links": [
            {"host": i, "sent_bytes": link.sent, "received_bytes": link.received}
            for i, link in enumerate(links)
        ],
    }


def _mention_left_overs() -> None:
    number = sum(not tag.is_alive() for tag in find_tags())
    if number:
        say(f"{number} left-over lab{'s' * (number > 1)} found: rowmesh lab clean removes them")


def _choose(hosts: int, rate: str, unshaped: bool) -> Lab:
    """Emulated hosts; loopback if that was asked, or if it is all that can be had and will do."""
    bits = parse_rate(rate)
    if unshaped and bits is not None:
        raise InputError(f"--unshaped does not go with --rate {rate}: leave one out")
    reason = None if unshaped else check_permitted()
    if reason is not None and bits is not None:
        raise InputError(f"{reason}, or leave out --rate: ranks then run unshaped")
    if reason is not None:
        say(f"ranks run unshaped on this machine's loopback: {reason}")
    elif unshaped:
        say("ranks run unshaped on this machine's loopback, as asked; no link is counted")
    return Lab(hosts, rate=rate, loopback=unshaped or reason is not None)


def _difference(after: Sequence[HostBytes], before: Sequence[HostBytes]) -> list[HostBytes]:
    return [
        HostBytes(sent=a.sent - b.sent, received=a.received - b.received)
        for a, b in zip(after, before, strict=True)
    ]


def _show_links(links: Sequence[HostBytes], *, rate: str, seconds: float) -> None:
    if not links:
        return
    console = Console(stderr=True, highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("host")
    for name in ("MB sent", "MB received"):
        table.add_column(name, justify="right", min_width=12)
    for i, link in enumerate(links):
        table.add_row(str(i), f"{link.sent / 1e6:,.3f}", f"{link.received / 1e6:,.3f}")
    console.print(f"\non each host's link (rate {rate}) in {seconds:.1f} s, start-up included:")
    console.print(table)


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


@lab_app.command("check")
def check_command(
    hosts: Hosts = 2,
    rate: Rate = "200mbit",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the links of emulated hosts by plain TCP, in about five seconds.

    Between hosts: one way, and from every host to the next at once, which fills every link both
    ways. Inside a host: that its link sees nothing of it. Rates are of payload, and on the wire:
    with the headers of 1,514-byte frames, as the shaper counts them.

    Exit code 1 if a link is more than 10 % off its rate, or sees traffic from inside a host.
    """
    with one_sentence():
        with Lab(hosts, rate=rate) as lab:
            found, asked, congestion = measure(lab), lab.bits, read_congestion(lab.tag)
        fails = [reading for reading in found if reading.ok is False]
        if as_json:
            report = {"hosts": hosts, "rate_bits_per_s": asked, "congestion_control": congestion}
            readings = [asdict(reading) for reading in found]
            typer.echo(json.dumps(report | {"ok": not fails, "readings": readings}))
        else:
            _show_readings(found)
            typer.echo(f"TCP in the hosts uses {congestion} congestion control")
            if fails:
                say(f"off by more than {TOLERANCE:.0%}: does something else use the cores?")
        raise typer.Exit(1 if fails else 0)


def _show_readings(found: Sequence[Reading]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("TCP")
    for name in ("payload Mbit/s", "on the wire", "round trip"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for r in found:
        wait = "" if r.round_trip_s is None else f"{r.round_trip_s * 1e6:.0f} us"
        word = {True: "ok", False: "OFF", None: "-"}[r.ok]
        rates = (f"{bits / 1e6:,.1f}" for bits in (r.payload_bits, r.wire_bits))
        table.add_row(r.path, *rates, wait, f"{word}, {r.verdict}")
    Console(highlight=False, width=_WIDTH).print(table)


@lab_app.command("list")
def list_command() -> None:
    """Name every lab on this machine, and whether the process that made it still runs."""
    for tag in find_tags():
        typer.echo(f"{tag}  {'in use' if tag.is_alive() else 'left over'} (pid {tag.pid})")


@lab_app.command("clean")
def clean_command(
    include_all: Annotated[
        bool, typer.Option("--all", help="Remove labs that are still in use, too.")
    ] = False,
) -> None:
    """Remove what labs left behind whose process was killed: processes, namespaces, folders.

    Only what carries the name of a lab is touched, and without --all no lab that is in use.
    """
    with one_sentence():
        removed = clean(include_alive=include_all)
        for lab in removed:
            typer.echo(_describe(lab))
        if not removed:
            typer.echo("nothing to remove")


def _describe(lab: Removed) -> str:
    parts = {"process": lab.processes, "namespace": lab.namespaces, "folder": lab.folders}
    plural = {"process": "processes", "namespace": "namespaces", "folder": "folders"}
    words = (f"{n} {name if n == 1 else plural[name]}" for name, n in parts.items())
    return f"{lab.tag}: removed {', '.join(words)}"
