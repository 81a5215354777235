"""`rowmesh doctor`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rowmesh.cli.terminal import one_sentence
from rowmesh.train.doctor import Feature, can_train, examine, features
from rowmesh.train.hardware import Finding

__all__ = ["doctor_command"]

_WIDTH, _LINE = 100, 68
_WORDS = {True: "ok", False: "PROBLEM", None: "-"}


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine has, try two ranks on it, and say which parts of rowmesh run here.

    Ends with 0 if training can run, with 1 if something it needs is missing.
    """
    with one_sentence():
        findings = list(examine())
        works, parts = can_train(findings), features(findings)
        if as_json:
            found = {"can_train": works, "findings": findings, "features": parts}
            typer.echo(json.dumps(found, default=asdict))
        else:
            _show(findings, parts, works)
        raise typer.Exit(0 if works else 1)


def _show(findings: Sequence[Finding], parts: Sequence[Feature], works: bool) -> None:
    console = Console(highlight=False, width=_WIDTH)
    table = Table(box=None, pad_edge=False, show_header=False)
    for width in (18, 7):
        table.add_column(min_width=width, no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        words = [part for part in (finding.value, finding.advice) if part]
        text = (", " if sum(map(len, words)) < _LINE else "\n").join(words)
        table.add_row(finding.name, _WORDS[finding.ok], text)
    console.print(table, markup=False)
    console.print("\nwhat runs here")
    for part in parts:
        reason = f" ({part.reason})" if part.reason else ""
        console.print(f"  {'yes' if part.works else 'no ':3} {part.name}{reason}", markup=False)
    last = "training can run" if works else "training cannot run: see PROBLEM above"
    console.print(f"\n{last}", markup=False)
