"""What `rowmesh plan` plans for: the tables of a file, with their accesses."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rowmesh.errors import InputError, did_you_mean, shown
from rowmesh.files import read_json
from rowmesh.placement import TablePlan
from rowmesh.planners import (
    Constraints,
    blank_table,
    blank_tables,
    parse_constraints,
    parse_tiers,
)
from rowmesh.stats import Stats
from rowmesh.tables import EmbeddingBagConfig, EmbeddingConfig, TableConfig, parse_dtype
from rowmesh.topology import Topology
from rowmesh.train.config import RunConfig
from rowmesh.train.forecast import count_work
from rowmesh.train.model import build_model
from rowmesh.train.planning import PlanConfig, assume_stats, count_accesses, read_profile
from rowmesh.train.recipes import load_recipe

__all__ = ["Knowledge", "Workload", "is_recipe", "read_workload", "workload_of_run"]

_REQUIRED: Final = {"name": str, "num_embeddings": int, "embedding_dim": int, "feature_names": list}
_OPTIONAL: Final = {"pooling_factor": float, "data_type": str, "pooling": str}
_POOLINGS: Final = ("sum", "mean", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """What is given instead of a recipe's settings.

    Accesses are told from a profile, else counted batches if hot rows are wanted; otherwise ids are
    assumed Zipf.

    Args:
        tiers: Hot rows: off, auto, or hot:K; None for the recipe's.
        profile: A file of `rowmesh profile`; None for the recipe's.
        groups, layout, sync, depth, merge, codecs, allow: As of a `PlanConfig`; None for the
            recipe's.
        calibration: A topology.json of `rowmesh calibrate`; None for the recipe's.
        topology: Whose rank 0 the batches are of.
    """

    tiers: str | None = None
    profile: str | None = None
    groups: str | None = None
    layout: str | None = None
    sync: str | None = None
    depth: str | None = None
    merge: str | None = None
    codecs: str | None = None
    allow: str | None = None
    calibration: str | None = None
    topology: Topology = field(default_factory=Topology)

    def within(self, settings: PlanConfig) -> PlanConfig:
        """A recipe's settings with what is given here."""
        given = {name: value for name, value in self.given.items() if value is not None}
        return dataclasses.replace(settings, **given)  # type: ignore[arg-type]

    @property
    def given(self) -> dict[str, str | None]:
        """By the name of the recipe's setting."""
        names = ("tiers", "profile", "groups", "layout", "sync", "depth", "merge", "codecs")
        values = {name: getattr(self, name) for name in (*names, "allow")}
        return values | {"topology": self.calibration}


_ASSUMED: Final = Knowledge()


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Tables not yet placed, what a batch asks of them, and what goes with them.

    ``dense`` holds the elements of each dense gradient bucket. ``work`` is the flops and parameters
    of the dense layers, counted with hot rows or a calibration if there is a model.
    ``settings`` and ``sparse``, the update rule, are a recipe's.
    """

    tables: tuple[TablePlan, ...]
    stats: Stats
    dense: tuple[int, ...] = ()
    constraints: Constraints = field(default_factory=Constraints)
    work: tuple[float, float] | None = None
    settings: PlanConfig = field(default_factory=PlanConfig)
    sparse: str = "rowwise_adagrad"


def workload_of_run(config: RunConfig, *, knowledge: Knowledge = _ASSUMED) -> Workload:
    """The tables of a training run; ids that are assumed Zipf are so by its data's law."""
    if config.plan.file is not None:
        raise InputError(
            f"plan.file is {config.plan.file}, which is used as it is, but this makes a plan: add "
            f"--set plan.file=none"
        )
    model = build_model(config.model, config.data, seed=config.seed)
    tables, dense = blank_tables(model)
    settings = knowledge.within(config.plan)
    has_hot_rows = parse_tiers(settings.tiers) != 0
    depends = has_hot_rows or settings.topology is not None
    if settings.profile is None and not has_hot_rows:
        stats = assume_stats(model, config.data)
    else:
        stats = count_accesses(settings, model, config.data, knowledge.topology)
    return Workload(
        tables=tuple(tables),
        stats=stats,
        dense=dense,
        constraints=config.plan.constraints,
        work=count_work(config, knowledge.topology) if depends else None,
        settings=settings,
        sparse=config.optimiser.sparse,
    )


def is_recipe(path: Path) -> bool:
    """Whether this is a recipe's file or name, and not a file of tables."""
    is_file = path.exists() and not path.is_dir()  # or a pipe
    return path.suffix in (".toml", ".py") or not (path.suffix or is_file)


def read_workload(
    path: Path,
    *,
    batch_size: int,
    alpha: float,
    knowledge: Knowledge = _ASSUMED,
    settings: Sequence[str] = (),
) -> Workload:
    """The workload in a file: ``{"tables": [{name, num_embeddings, ...}], "constraints": {...}}``.

    A table has name, num_embeddings, embedding_dim and feature_names; optional are
    pooling_factor (mean ids in a bag, default 1), data_type (fp32, fp16, bf16) and pooling (sum,
    mean, or none for a sequence). Constraints are as in `parse_constraints`, and optional.
    ``settings`` are overrides of a recipe.

    Raises:
        InputError: Names the file, the field, its value and what it should be.
    """
    if is_recipe(path):
        return workload_of_run(load_recipe(path, settings), knowledge=knowledge)
    if settings:
        raise InputError(f"--set {settings[0]} changes a recipe, but {path} is a file of tables")
    document = read_json(path)
    try:
        return _of_document(document, batch_size, alpha, knowledge)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _of_document(document: Any, batch_size: int, alpha: float, knowledge: Knowledge) -> Workload:
    _check_fields(document, {"tables": list}, {"constraints": dict}, "the file")
    configs = [_config(table, f"tables[{i}]") for i, table in enumerate(document["tables"])]
    names = [config.name for config in configs]
    if not names:
        raise InputError("tables is empty: at least one table is needed")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"tables named more than once: {', '.join(twice)}")
    if batch_size < 1:
        raise InputError(f"batch is {batch_size}, but must be at least 1")
    if knowledge.profile is not None:
        stats = read_profile(knowledge.profile, configs, batch_size=batch_size)
    elif parse_tiers(knowledge.tiers or "off") != 0:
        raise InputError(
            f"tiers {knowledge.tiers!r} needs counted accesses: give --profile, or plan a recipe"
        )
    else:
        stats = _assume(document["tables"], configs, batch_size, alpha)
    return Workload(
        tables=tuple(blank_table(config) for config in configs),
        stats=stats,
        constraints=parse_constraints(document.get("constraints", {})),
        settings=dataclasses.replace(knowledge, profile=None).within(PlanConfig()),
    )


def _assume(
    tables: list[dict[str, Any]], configs: list[TableConfig], batch_size: int, alpha: float
) -> Stats:
    factors = {t["name"]: float(t.get("pooling_factor", 1.0)) for t in tables}
    return Stats.assume(configs, batch_size=batch_size, pooling_factors=factors, alpha=alpha)


def _config(document: Any, where: str) -> TableConfig:
    _check_fields(document, _REQUIRED, _OPTIONAL, where)
    features = document["feature_names"]
    if not features or not all(isinstance(name, str) for name in features):
        raise InputError(f"{where}.feature_names must be a list of names, got {shown(features)}")
    factor = document.get("pooling_factor", 1.0)
    if not 0.0 <= factor < float("inf"):
        raise InputError(f"{where}.pooling_factor is {factor}, but must be from 0 and finite")
    pooling = document.get("pooling", "sum")
    if pooling not in _POOLINGS:
        raise InputError(
            f"{where}: unknown pooling {shown(pooling)}{did_you_mean(pooling, _POOLINGS)}"
        )
    known = {f.name for f in dataclasses.fields(TableConfig)}
    fields = {key: value for key, value in document.items() if key in known}
    fields["data_type"] = parse_dtype(document.get("data_type", "fp32"))
    if pooling == "none":
        return EmbeddingConfig(**fields)
    return EmbeddingBagConfig(**fields, pooling=pooling)


def _check_fields(
    document: Any, required: Mapping[str, type], optional: Mapping[str, type], where: str
) -> None:
    """Every required field is there, none is unknown, all have their type."""
    if not isinstance(document, dict):
        raise InputError(f"{where} must be an object, got {shown(document)}")
    known = {**required, **optional}
    for name, value in document.items():
        if name not in known:
            raise InputError(f"{where}: unknown field {shown(name)}{did_you_mean(name, known)}")
        kinds = (int, float) if known[name] is float else (known[name],)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InputError(f"{where}.{name} must be {known[name].__name__}, got {shown(value)}")
    if missing := [name for name in required if name not in document]:
        raise InputError(f"{where}: missing {', '.join(missing)}")
