"""`rowmesh reproduce`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rowmesh.cli.reproduce_2d import two_d_command
from rowmesh.cli.terminal import one_sentence
from rowmesh.errors import InputError, did_you_mean
from rowmesh.files import check_target, write_whole
from rowmesh.reproduce.coverage import measure_coverage
from rowmesh.reproduce.drift import Drifting, measure_drift
from rowmesh.reproduce.flexshard import FlexShard, measure_flexshard
from rowmesh.reproduce.flexshard_report import case_name, render_flexshard, summarise_case
from rowmesh.reproduce.hosts import parse_shape
from rowmesh.reproduce.p2res import P2res, measure_p2res
from rowmesh.reproduce.report import curve_name, draw_curves, render_report, summarise

__all__ = ["reproduce_app"]

reproduce_app = typer.Typer(add_completion=False, no_args_is_help=True)
reproduce_app.command("2d")(two_d_command)


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
    depth: Annotated[int, typer.Option(help="Batches begun at a time.")] = 2,
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
            shapes=tuple(parse_shape(word) for word in shapes.split(",")),
            rates=tuple(rates.split(",")),
            alphas=tuple(_number(word, "alpha") for word in alphas.split(",")),
            dedups=tuple(_switch(word) for word in dedup.split(",")),
            cap=cap,
            dim=dim,
            batch=batch,
            points=points,
            rounds=rounds,
            depth=depth,
        )
        for suffix in (".md", ".json", ".svg"):
            way_out = "give --out a name in a folder that exists"
            check_target(_file(out, suffix), what="the report", way_out=way_out)
        wanted = _parts(parts, ("coverage", "curves"))
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


@reproduce_app.command("flexshard")
def flexshard_command(
    out: Annotated[Path, typer.Option(help="Reports are OUT.md and OUT.json.")] = Path("flexshard"),
    shapes: Annotated[str, typer.Option(help="Hosts x ranks on each.")] = "2x2,4x1",
    rates: Annotated[str, typer.Option(help="Of a host's link.")] = "200mbit",
    dedup: Annotated[str, typer.Option(help="off, on, or off,on.")] = "off,on",
    budgets: Annotated[
        str, typer.Option(help="Memory of a rank, relative to row-wise.")
    ] = "1.0,1.1,1.25,1.5",
    alpha: Annotated[float, typer.Option(help="Zipf exponent of the items.")] = 1.2,
    items: Annotated[int, typer.Option(help="Rows of the table.")] = 200_000,
    dim: Annotated[int, typer.Option(help="Columns of the table.")] = 64,
    batch: Annotated[int, typer.Option(help="Samples per rank and step.")] = 512,
    length: Annotated[float, typer.Option(help="Mean items of a history.")] = 20.0,
    rounds: Annotated[int, typer.Option(help="Every plan runs once in a round.")] = 5,
    depth: Annotated[int, typer.Option(help="Batches begun at a time.")] = 2,
    parts: Annotated[str, typer.Option(help="tiers, drift, or both; drift needs no root.")] = (
        "tiers,drift"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Tiers of a sequence table: traffic and time at budgets of memory, and tiers under drift.

    A target-attention model on synthetic histories runs row-wise, with hot rows alone and with
    three tiers, in turn on the same hosts and batches. Tiers need root and iproute2 and take about
    a quarter of an hour; let nothing else run.
    """
    with one_sentence():
        what = FlexShard(
            shapes=tuple(parse_shape(word) for word in shapes.split(",")),
            rates=tuple(rates.split(",")),
            dedups=tuple(_switch(word) for word in dedup.split(",")),
            budgets=tuple(_number(word, "budget") for word in budgets.split(",")),
            alpha=alpha,
            items=items,
            dim=dim,
            batch=batch,
            length=length,
            rounds=rounds,
            depth=depth,
        )
        wanted = _parts(parts, ("tiers", "drift"))
        for suffix in (".md", ".json"):
            way_out = "give --out a name in a folder that exists"
            check_target(_file(out, suffix), what="the report", way_out=way_out)
        drifts: list[dict[str, Any]] = []
        for switch in what.dedups if "drift" in wanted else ():
            _say(f"drift, {'dedup' if switch else 'no dedup'}")
            for hidden in (0.0, 1.0):
                drifts.append(measure_drift(what, Drifting(hidden=hidden), dedup=switch))
        cases: list[dict[str, Any]] = []
        for case in measure_flexshard(what, on_stage=_say) if "tiers" in wanted else ():
            cases.append(case)
            _say(f"{case_name(case)}: done")
            _write_flexshard(out, cases, drifts)
        _write_flexshard(out, cases, drifts)
        if as_json:
            tables = {case_name(case): summarise_case(case) for case in cases}
            typer.echo(json.dumps({"tables": tables, "drift": drifts}))
        else:
            typer.echo(f"written to {_file(out, '.md')} and .json")


def _write_flexshard(out: Path, cases: list[dict[str, Any]], drifts: list[dict[str, Any]]) -> None:
    found = {"cases": cases, "drift": drifts}
    write_whole(_file(out, ".json"), json.dumps(found, indent=2) + "\n")
    write_whole(_file(out, ".md"), render_flexshard(cases, drifts))


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


def _parts(words: str, known: tuple[str, ...]) -> set[str]:
    for word in words.split(","):
        if word not in known:
            raise InputError(f"part {word!r} is unknown{did_you_mean(word, known)}")
    return set(words.split(","))


def _file(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _number(word: str, what: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InputError(f"{what} {word!r} is not a number") from None


def _switch(word: str) -> bool:
    if word not in ("on", "off"):
        raise InputError(f"dedup {word!r}: say on, off, or off,on")
    return word == "on"
