"""The plan of bench_dlrm.py: read from a file, or made of statistics, speeds and dense layers."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecasting import count_accesses, count_layers

import rowmesh as rm
from rowmesh.comm.agreement import on_rank_0
from rowmesh.cost import load_calibration
from rowmesh.data.synthetic import SyntheticClicks
from rowmesh.placement import Copies, load_plan
from rowmesh.placement.codecs import describe_codecs, parse_codecs
from rowmesh.planners import parse_allow

__all__ = ["add_plan_flags", "choose_plan", "summary"]


def add_plan_flags(p: argparse.ArgumentParser) -> None:
    """Those of the plan."""
    p.add_argument("--plan", default="auto", help="auto, table_wise, row_wise, data_parallel, FILE")
    p.add_argument("--exchange", default="auto", choices=["auto", "rows", "pooled"])
    p.add_argument(
        "--tiers", default="off", help="rows copied to every rank or host: off, auto, hot:K"
    )
    p.add_argument(
        "--depth", default="2", help="batches begun at a time, 1 looks not ahead; or auto"
    )
    p.add_argument(
        "--codecs", default="fp32", help="fp16, bf16, int8, or as in forward=fp16,backward=bf16"
    )
    p.add_argument("--allow", default="exact", choices=["exact", "lossy"], help="codecs that pay")
    p.add_argument("--counted", type=int, help="batches of statistics: 4, 16 with tiers")
    p.add_argument("--merge", default="auto", help="requests of a host's ranks: auto, on, off")
    p.add_argument("--no-dedup", action="store_true", help="ask for every id, not every distinct")
    p.add_argument(
        "--topology",
        action="append",
        metavar="FILE",
        help="speeds by rowmesh calibrate: a forecast for each, a plan for the first",
    )


def choose_plan(
    args: argparse.Namespace, model: Any, mesh: rm.Mesh, clicks: SyntheticClicks
) -> rm.Plan:
    """The plan that the flags ask for; of a file's, depth and codecs can be told otherwise.

    Collective:
        All ranks; rank 0 plans, since the ranks share the cores.
    """
    if Path(args.plan).suffix == ".json":
        plan = load_plan(args.plan)
        depth = plan.depth if args.depth == "auto" else int(args.depth)
        return replace(plan, depth=depth, codecs=parse_codecs(args.codecs) or plan.codecs)
    return on_rank_0(mesh, lambda: _make(args, model, mesh.topology, clicks))


def _make(
    args: argparse.Namespace, model: Any, topology: rm.Topology, clicks: SyntheticClicks
) -> rm.Plan:
    rates = cost = None
    if args.topology:
        rates = load_calibration(args.topology[0], topology=topology).rates
        if rates.dense is not None:
            flops, parameters = count_layers(args, clicks)
            cost = rates.dense.scaled(flops=flops, parameters=parameters)
    return rm.make_plan(
        model,
        topology,
        stats=count_accesses(args, clicks),
        split=args.plan,
        exchange=args.exchange,
        dedup=not args.no_dedup,
        merge=args.merge,
        rates=rates,
        tiers=args.tiers,
        cost=cost,
        depth=args.depth,
        codecs=args.codecs,
        allow_lossy=parse_allow(args.allow),
    )


def summary(plan: rm.Plan) -> dict[str, Any]:
    """Tables of each kind, depth, codecs, and rows with copies.

    Shares are of the bytes of all tables: ``hot_share`` of the hot rows that a rank has a copy of
    (a host's copies being spread over its ranks), ``whole_share`` of tables that are whole on
    every rank.
    """
    words = [re.sub(r"hot \d+", "hot", f"{t.word}/{t.exchange}") for t in plan.tables]
    hot = [(t, tier, rows.count) for t in plan.tables for tier, rows in t.hot]
    spread = {Copies.WORLD: 1, Copies.HOST: plan.mesh.local}
    total = sum(t.num_embeddings * t.embedding_dim for t in plan.tables)
    copied = sum(n * t.embedding_dim / spread[tier.copies] for t, tier, n in hot)
    whole = [t for t in plan.tables if t.rest.copies is Copies.WORLD]
    return {
        "tables": {word: words.count(word) for word in sorted(set(words))},
        "depth": plan.depth,
        "codecs": describe_codecs(plan.codecs),
        "hot_rows": sum(n for _, tier, n in hot if tier.copies is Copies.WORLD),
        "host_rows": sum(n for _, tier, n in hot if tier.copies is Copies.HOST),
        "hot_share": copied / total,
        "whole_share": sum(t.num_embeddings * t.embedding_dim for t in whole) / total,
    }
