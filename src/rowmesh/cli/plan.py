"""`rowmesh plan` and `rowmesh plan diff`."""

import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup

from rowmesh.cli.terminal import AllTables, Settings, check_twice, one_sentence, say
from rowmesh.cli.workload import Knowledge, Workload, is_recipe, read_workload, workload_of_run
from rowmesh.cost import DenseCost, Rates, load_calibration
from rowmesh.data import CRITEO_KAGGLE, SyntheticClicks
from rowmesh.errors import InputError, check_range
from rowmesh.files import check_target
from rowmesh.placement import Plan, load_plan, save_plan
from rowmesh.placement.diff import diff_plans
from rowmesh.placement.document import plan_to_json
from rowmesh.placement.text import MAX_TABLES, render, render_why
from rowmesh.planners import parse_allow, parse_sync, plan_tables
from rowmesh.topology import Topology
from rowmesh.train.config import RunConfig
from rowmesh.train.machine import measure_memory
from rowmesh.train.model import ModelConfig

__all__ = ["plan_app"]

_DATA = SyntheticClicks()
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_QUIET_S = 2.0  # a bar appears after so long


class _PlanGroup(TyperGroup):
    """`rowmesh plan ...` is a command of its own, unless the first word is `diff`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] != "diff":
            args = ["make", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == "make" else name, command, rest  # help says `rowmesh plan [OPTIONS]`


plan_app = typer.Typer(cls=_PlanGroup, add_completion=False)
Memory = Annotated[
    str | None,
    typer.Option(
        help="Memory of a rank for rows and optimiser state: 80GiB, 512MiB, or none for no limit. "
        "Default: measured here if there is one host, else no limit."
    ),
]


@plan_app.command("make")
def plan_command(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECIPE|TABLES.json]",
            help='{"tables": [{"name", "num_embeddings", "embedding_dim", "feature_names", '
            '"pooling_factor"?, "data_type"?, "pooling"?}], "constraints"?}; '
            "default: tables of Criteo's sizes.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 1,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks (devices) on each host.")] = 2,
    tables: Annotated[
        int | None,
        typer.Option(help="Without a file: number of tables; beyond 26 Criteo's sizes repeat."),
    ] = None,
    dim: Annotated[
        int | None, typer.Option(help="Without a file: columns of every table; default 64.")
    ] = None,
    cap: Annotated[
        int | None, typer.Option(help="Without a file: most rows of a table; default no limit.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples per rank and step; default the recipe's, else 2048."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Zipf exponent of the ids, 0 is uniform; default the recipe's."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Of all tables: auto, data_parallel, table_wise, row_wise, column_wise, "
            "table_row_wise or grid; default the recipe's."
        ),
    ] = None,
    exchange: Annotated[
        str | None,
        typer.Option(help="What travels: auto, rows or pooled; default the recipe's."),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            help="Hot rows, copied to every rank: off, auto, or hot:K for K of them; default the "
            "recipe's."
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            help="Ranks in a shard group, which holds one copy of the tables: off for all ranks, "
            "auto for the number with the shortest step, or the number; default the recipe's."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Of groups: auto, contiguous or strided; default the recipe's."),
    ] = None,
    sync: Annotated[
        str | None,
        typer.Option(
            help="How replicas of groups are kept together: gradients, weights:4 (every 4 steps), "
            "weights:4:dense, or moments-first:4; default the recipe's."
        ),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            help="Batches begun at a time: 1 to 8, or auto for the shortest step; default the "
            "recipe's."
        ),
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(
            help="Whether a host asks for a row once for all its ranks: auto, on or off; default "
            "the recipe's."
        ),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="How vectors and gradients travel: fp32, or lossy fp16, bf16, int8, or as in "
            "forward=fp16,backward=bf16,dense=bf16; default the recipe's."
        ),
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(help="exact, or lossy: codecs where they pay; default the recipe's."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Accesses that rowmesh profile counted; else ids are assumed Zipf."),
    ] = None,
    memory_per_rank: Memory = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--topology", help="Speeds that rowmesh calibrate measured on these hosts and ranks."
        ),
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Print the runner-up of every table, and its cost.")
    ] = False,
    every_table: AllTables = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file as JSON.")] = None,
    settings: Settings = None,
) -> None:
    """Print the plan for a cluster, without any cluster.

    Accesses are those of --profile; without one ids are assumed Zipf, or, where --tiers asks for
    hot rows, batches of the recipe's data are counted.

    rowmesh plan diff A B compares two plan files.
    """
    with one_sentence():
        if out is not None:
            way_out = "give --out a file in a folder that exists"
            check_target(out, what="the plan", way_out=way_out)
        limit, said = _memory(memory_per_rank, hosts, ranks_per_host)
        topology = Topology(hosts=hosts, local=ranks_per_host, memory_bytes=limit)
        known = Knowledge(
            tiers=tiers,
            profile=None if profile is None else str(profile),
            groups=groups,
            layout=layout,
            sync=sync,
            depth=depth,
            merge=merge,
            codecs=codecs,
            allow=allow,
            calibration=None if calibration is None else str(calibration),
            topology=topology,
        )
        sizes = {"--tables": tables, "--dim": dim, "--cap": cap}
        check_twice(settings, known.given | {"split": split, "exchange": exchange})
        workload = _workload(
            source, sizes, batch=batch, alpha=alpha, knowledge=known, settings=settings or ()
        )
        chosen = workload.settings
        rates, cost = _speeds(chosen.topology, topology, workload)
        with _bar() as on_progress:
            plan = plan_tables(
                workload.tables,
                topology,
                stats=workload.stats,
                dense=workload.dense,
                split=split or chosen.split,
                exchange=exchange or chosen.exchange,
                constraints=workload.constraints,
                rates=rates,
                sparse=workload.sparse,
                allow_inexact=chosen.allow_inexact,
                tiers=chosen.tiers,
                cost=cost,
                groups=chosen.groups,
                layout=chosen.layout,
                sync=parse_sync(chosen.sync),
                depth=chosen.depth,
                merge=chosen.merge,
                codecs=chosen.codecs,
                allow_lossy=parse_allow(chosen.allow),
                on_progress=on_progress,
            )
        if out is not None:
            _write(plan, out)
        if as_json:
            typer.echo(plan_to_json(plan), nl=False)
        else:
            most = None if every_table else MAX_TABLES
            table = render(plan, max_tables=most, rule=workload.sparse)
            say("\n".join([table, said, *([render_why(plan, max_tables=most)] if why else [])]))


@plan_app.command("diff")
def diff_command(
    before: Annotated[Path, typer.Argument(metavar="A", help="A plan.json.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another plan.json.")],
    is_whole: Annotated[
        bool, typer.Option("--all", help="Print names and values whole, however long.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the changes as JSON.")] = False,
) -> None:
    """Print what changes from plan A to plan B: tables, memory per rank, expected bytes."""
    with one_sentence():
        found = diff_plans(load_plan(before), load_plan(after))
        say(found.to_json().rstrip() if as_json else found.render(is_whole=is_whole))


def _workload(
    source: Path | None,
    sizes: dict[str, int | None],
    *,
    batch: int | None,
    alpha: float | None,
    knowledge: Knowledge,
    settings: Sequence[str],
) -> Workload:
    if source is not None:
        own = {"--batch": batch, "--alpha": alpha} if is_recipe(source) else {}
        for name, value in (sizes | own).items():
            if value is not None:
                raise InputError(f"{name} {value} goes without a file, but {source} was given")
    batch = _DATA.batch_size if batch is None else batch
    alpha = _DATA.alpha if alpha is None else alpha
    if source is not None:
        return read_workload(
            source, batch_size=batch, alpha=alpha, knowledge=knowledge, settings=settings
        )
    if settings:
        raise InputError(f"--set {settings[0]} changes a recipe: give one, as in rowmesh plan demo")
    tables, dim, cap = sizes.values()
    number = len(CRITEO_KAGGLE) if tables is None else tables
    check_range("--tables", number, 1)
    rows = tuple(itertools.islice(itertools.cycle(CRITEO_KAGGLE), number))
    data = SyntheticClicks(cardinalities=rows, cap=cap, alpha=alpha, batch_size=batch)
    model = ModelConfig(dim=64 if dim is None else dim)
    return workload_of_run(RunConfig(data=data, model=model), knowledge=knowledge)


def _speeds(
    calibration: str | None, topology: Topology, workload: Workload
) -> tuple[Rates | None, DenseCost | None]:
    """Of the cluster, and of the model's dense layers on it; None where nothing is known."""
    if calibration is None:
        return None, None
    rates = load_calibration(calibration, topology=topology).rates
    if rates.dense is None or workload.work is None:
        return rates, None
    flops, parameters = workload.work
    return rates, rates.dense.scaled(flops=flops, parameters=parameters)


def _memory(text: str | None, hosts: int, local: int) -> tuple[int | None, str]:
    """The limit of a rank, and a line that says where it is from."""
    limit = None if text is None else _parse_bytes(text)
    if text is None and hosts == 1 and local >= 1:
        limit = measure_memory(local)
        if limit is not None:
            return limit, f"memory of a rank: {limit / 2**30:.2f} GiB, measured here and shared out"
    if limit is None:
        return None, "memory of a rank: not checked; say --memory-per-rank, e.g. 80GiB"
    return limit, f"memory of a rank: {limit / 2**30:.2f} GiB, as given"


def _parse_bytes(text: str) -> int | None:
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0.0:
        raise InputError(
            f"memory-per-rank is {text!r}, but must be none or a number of "
            f"{', '.join(unit for unit in _UNITS if unit)}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _write(plan: Plan, out: Path) -> None:
    try:
        save_plan(plan, out)
    except OSError as error:
        raise InputError(f"cannot write the plan to {out}: {error.strerror}") from None


@contextmanager
def _bar() -> Iterator[Callable[[float], None]]:
    """A bar on the terminal's stderr, once planning has taken two seconds."""
    bar = Progress(console=Console(file=sys.stderr), transient=True)
    task, start = bar.add_task("planning", total=1.0), time.monotonic()

    def show(share: float) -> None:
        if bar.console.is_terminal and time.monotonic() - start > _QUIET_S:
            bar.start()
            bar.update(task, completed=share)

    try:
        yield show
    finally:
        if bar.live.is_started:  # to stop it writes a line, even if nothing was shown
            bar.stop()
