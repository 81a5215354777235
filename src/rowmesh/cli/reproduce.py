"""`rowmesh reproduce`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rowmesh.cli.terminal import one_sentence
from rowmesh.errors import InputError, did_you_mean
from rowmesh.files import check_target, write_whole
from rowmesh.reproduce.coverage import measure_coverage
from rowmesh.reproduce.p2res import P2res, measure_p2res
from rowmesh.reproduce.report import curve_name, draw_curves, render_report, summarise

__all__ = ["reproduce_app"]

reproduce_app = typer.Typer(add_completion=False, no_args_is_help=True)


@reproduce_app.callback()
def reproduce() -> None:
    """Measure published results again on emulated hosts; one command a system."""


@reproduce_app.command("p2res")
def p2res_command(
    out: Annotated[Path, typer.Option(help="Reports are OUT.md, OUT.json and OUT.svg.")] = Path(
        "p2res"
    ),
    shapes: Annotated[str, typer.Option(help="Hosts x ranks on each.")] = "2x2,4x1",
    rates: Annotated[str, typer.Option(help="Of a host's link.")] = "200mbit,1gbit",
    alphas: Annotated[str, typer.Option(help="Zipf exponents of the ids.")] = "1.05,1.2",
    dedup: Annotated[str, typer.Option(help="off, on, or off,on.")] = "off,on",
    cap: Annotated[int, typer.Option(help="Most rows of a table of Criteo's sizes.")] = 100_000,
    dim: Annotated[int, typer.Option(help="Columns of the tables.")] = 64,
    batch: Annotated[int, typer.Option(help="Samples per rank and step.")] = 2048,
    points: Annotated[int, typer.Option(help="Values of k between none and all.")] = 8,
    rounds: Annotated[int, typer.Option(help="Every plan runs once in a round.")] = 7,
    data: Annotated[
        Path, typer.Option(help="Folder of clicks, movietweetings, sequences for coverage.")
    ] = Path("../shared/data"),
    parts: Annotated[
        str, typer.Option(help="coverage, curves, or both; coverage needs no root.")
    ] = "coverage,curves",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Hot rows on every rank: what they cover, and step time over their number beside the model.

    Coverage is counted on the data sets that are found and on synthetic clicks with Criteo's
    tables, beside the paper's figures. Every curve runs plans without hot rows, with k of them,
    with the model's own k and with all rows copied, in turn on the same hosts and batches. Curves
    need root and iproute2 and take about an hour; let nothing else run.
    """
    with one_sentence():
        what = P2res(
            shapes=tuple(_shape(word) for word in shapes.split(",")),
            rates=tuple(rates.split(",")),
            alphas=tuple(_number(word, "alpha") for word in alphas.split(",")),
            dedups=tuple(_switch(word) for word in dedup.split(",")),
            cap=cap,
            dim=dim,
            batch=batch,
            points=points,
            rounds=rounds,
        )
        for suffix in (".md", ".json", ".svg"):
            way_out = "give --out a name in a folder that exists"
            check_target(_file(out, suffix), what="the report", way_out=way_out)
        wanted = _parts(parts)
        coverage: list[dict[str, Any]] = []
        if "coverage" in wanted:
            _say("coverage")
            coverage += measure_coverage(data, what.alphas, batch=batch, on_missing=_say)
        cases: list[dict[str, Any]] = []
        for case in measure_p2res(what, on_stage=_say) if "curves" in wanted else ():
            cases.append(case)
            _write(out, cases, coverage)
            _say(_sentence(case))
        _write(out, cases, coverage)
        if as_json:
            summary = [summarise(case) for case in cases]
            typer.echo(json.dumps({"coverage": coverage, "curves": summary}))
        else:
            typer.echo(f"written to {_file(out, '.md')}, .json and .svg")


def _write(out: Path, cases: list[dict[str, Any]], coverage: list[dict[str, Any]]) -> None:
    """All there is so far: a run that is stopped leaves what it measured."""
    found = {"coverage": coverage, "cases": cases}
    write_whole(_file(out, ".json"), json.dumps(found, indent=2) + "\n")
    if cases:
        write_whole(_file(out, ".svg"), draw_curves(cases))
    picture = _file(out, ".svg").name
    write_whole(_file(out, ".md"), render_report(cases, coverage, picture=picture))


def _sentence(case: dict[str, Any]) -> str:
    found = summarise(case)
    return (
        f"{curve_name(case)}: {found['cold_ms']:,.0f} ms without hot rows, "
        f"{found['model_ms']:,.0f} with the model's {found['model_k']:,}, "
        f"{found['best_ms']:,.0f} with the best {found['best_k']:,}"
    )


def _parts(words: str) -> set[str]:
    known = ("coverage", "curves")
    for word in words.split(","):
        if word not in known:
            raise InputError(f"part {word!r} is unknown{did_you_mean(word, known)}")
    return set(words.split(","))


def _file(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shape(word: str) -> tuple[int, int]:
    hosts, _, local = word.partition("x")
    if not (hosts.isdecimal() and local.isdecimal() and int(hosts) > 0 and int(local) > 0):
        raise InputError(f"shape {word!r}: say hosts x ranks, as 2x2")
    return int(hosts), int(local)


def _number(word: str, what: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InputError(f"{what} {word!r} is not a number") from None


def _switch(word: str) -> bool:
    if word not in ("on", "off"):
        raise InputError(f"dedup {word!r}: say on, off, or off,on")
    return word == "on"
