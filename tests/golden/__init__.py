"""Golden cases: drawn plans, their bytes, and hashes of what training under them gives.

A change that should not alter results shows them unchanged; one that should replaces them
(``python -m tests.golden``) and says why. A case is stored as it was drawn, so that neither
hypothesis nor the strategies may change it. All numbers that are hashed are those of any CPU: the
loss is linear in what is looked up, with small dyadic coefficients, and sums of those are exact.
"""

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import rowmesh as rm
from rowmesh.comm.mesh import Mesh
from rowmesh.placement.document import plan_to_json
from rowmesh.tables import dense_parameters
from tests.cases import Case, Collection, Model, Table, cases, grouped, train_case
from tests.ranks import run_on_ranks

__all__ = ["FILE", "draw", "found", "read", "write"]

FILE = Path(__file__).parent / "cases.json.xz"
COUNT = 64  # what losses are divided by: a power of two
ROUNDED = ("adagrad", "adam")  # rules whose roots are not the same on all CPUs
EDGES = ["rows", "pooled", "backward", "hot gradients", "dense"]


class Dyadic(Case):
    """A case whose dense inputs and weights of ids are quarters."""

    def batch(self, step: int, rank: int) -> dict[str, Any]:
        """As of a `Case`, rounded."""
        found = super().batch(step, rank)
        features = found["features"]
        rounded = rm.KeyedJaggedTensor(
            features.keys(),
            features.values(),
            (features.weights_or_none() * 4).round() / 4,
            lengths=features.lengths(),
            stride=features.stride(),
        )
        return found | {"dense": (found["dense"] * 4).round() / 4, "features": rounded}


class Linear(Model):
    """The model of the central property, but with a loss linear in all parameters."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.seen: list[Tensor] = []
        for parameter in dense_parameters(self):
            with torch.no_grad():
                parameter.copy_(_dyadic(parameter.shape))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """A loss per sample."""
        dense = batch["dense"]
        found = dense[:, 0] * self.hidden.weight.sum() + dense[:, 1] * self.hidden.bias.sum()
        if len(found) and batch["labels"][0] > 0.5:
            found = found + dense[:, 2] * self.sometimes.weight.sum()
        for collection in self.collections:
            looked_up = collection(batch["features"])
            if isinstance(looked_up, dict):
                parts = [jagged.to_padded_dense(4).flatten(1) for jagged in looked_up.values()]
            else:
                parts = [looked_up.values()]
            for part in parts:
                self.seen.append(part.detach().clone())
                found = found + (part * _dyadic(part.shape)).sum(1)
        return found


def _dyadic(shape: torch.Size) -> Tensor:
    """Quarters from -1 to 1.5, none of them zero."""
    numbers = torch.arange(shape.numel()) * 7 % 10 - 4
    return (numbers + (numbers >= 0)).view(shape) / 4


def _hash(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _train(mesh: Mesh, case: Case) -> dict[str, Any]:
    """One rank's part of a golden case."""
    model = Linear(case)
    run = train_case(mesh, case, model=model, count=COUNT)
    states = [run.states[t][n] for t in sorted(run.states) for n in sorted(run.states[t])]
    is_rounded = case.rule in ROUNDED
    tables = [w for n, w in sorted(run.weights.items()) if "collections." in n and not is_rounded]
    dense = [w for n, w in sorted(run.weights.items()) if "collections." not in n]
    seen = model.seen[: len(case.collections) if is_rounded else None]
    weighted = any(c.kind == "weighted" for c in case.collections)
    return {
        "ledger": run.ledgers,
        "tables": _hash(tables),
        "states": _hash(states),
        "dense": _hash(dense),
        "outputs": "" if weighted else _hash(seen),
    }


def found(case: Case) -> dict[str, Any]:
    """The plan of a case, and what training under it gives: of rank 0, ledgers of every rank."""
    ranks = run_on_ranks(case.world, _train, case, hosts=case.hosts)
    return {
        "plan": json.loads(plan_to_json(case.plan())),
        "ledgers": [r["ledger"] for r in ranks],
        "outputs": [r["outputs"] for r in ranks],
        **{key: ranks[0][key] for key in ("tables", "states", "dense")},
    }


def _draws() -> Iterator[tuple[int, st.SearchStrategy[Case]]]:
    yield 40, cases(world=1)
    yield 100, cases(world=2)
    yield 140, cases(world=4)
    yield 60, cases(world=4, hosts=2, merged=True)
    for world in (2, 4):
        yield 40, cases(world=world, exact=False)
        for mode in ("gradients", "weights", "moments-first"):
            yield 24, grouped(world=world, mode=mode)
        yield 30, _coded(world)


@st.composite
def _coded(draw: st.DrawFn, world: int) -> Case:
    codecs = st.sampled_from(["fp32", "fp16", "bf16", "int8"])
    stacks = ",".join(f"{edge}={draw(codecs)}" for edge in EDGES)
    return replace(draw(cases(world=world)), codecs=stacks)


def draw() -> list[Case]:
    """Cases drawn anew, at least 500 of them, none twice."""
    drawn: dict[str, Case] = {}
    for number, strategy in _draws():

        @settings(
            derandomize=True,
            deadline=None,
            max_examples=number,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(strategy)
        def keep(case: Case) -> None:
            rule = "rowwise" if case.rule in ROUNDED and len(drawn) % 4 else case.rule
            case = Dyadic(**vars(case) | {"dense": "dyadic", "rule": rule})
            drawn.setdefault(json.dumps(asdict(case)), case)

        keep()
    return list(drawn.values())


def write(rows: list[tuple[Case, dict[str, Any]]]) -> None:
    """Store cases and what was found."""
    lines = [json.dumps({"case": asdict(case)} | values) for case, values in rows]
    FILE.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode(), preset=9))


def read() -> list[tuple[Case, dict[str, Any]]]:
    """What `write` stored."""
    rows = []
    for line in lzma.decompress(FILE.read_bytes()).decode().splitlines():
        document = json.loads(line)
        rows.append((_case(document.pop("case")), document))
    return rows


def _case(document: dict[str, Any]) -> Case:
    """A case as `asdict` wrote it."""
    fields = dict(document)
    for name in ("collections", "later"):
        fields[name] = tuple(_collection(c) for c in fields[name])
    return Dyadic(**fields | {"sync": tuple(fields["sync"])})


def _collection(document: dict[str, Any]) -> Collection:
    tables = [
        Table(**{k: tuple(v) if isinstance(v, list) else v for k, v in t.items()})
        for t in document["tables"]
    ]
    return Collection(tables=tuple(tables), kind=document["kind"])
