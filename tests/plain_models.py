"""Drawn single-device models of plain embeddings, and their training in float64, one process.

A `PlainCase` is plain data: ranks rebuild its model and samples. The reference knows nothing of
rowmesh: the model in float64, all samples in one batch, one torch optimiser.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.mesh import Mesh

LR = 0.1
RULES = {
    "sgd": (functools.partial(torch.optim.SGD, lr=LR), rm.SGD(lr=LR)),
    "adagrad": (functools.partial(torch.optim.Adagrad, lr=LR, eps=0.1), rm.Adagrad(lr=LR, eps=0.1)),
}
WIDTH = 3  # ids of a sample where it has a fixed number
KINDS = ["flat", "list", "grid", "sum", "mean", "max", "weighted", "bags", "ended"]
BAGS = {
    "sum": "sum",
    "mean": "mean",
    "max": "max",
    "weighted": "sum",
    "bags": "mean",
    "ended": "sum",
}


@dataclass(frozen=True, kw_only=True)
class Plain:
    """One embedding; ``kind`` says of which shape its ids are, ``tied`` whose weight it has."""

    kind: str
    rows: int
    dim: int
    padding: int | None = None
    is_int32: bool = False
    calls: int = 1
    is_read: bool = False  # its weight, as by a tied softmax
    is_frozen: bool = False
    tied: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlainCase:
    """``parts[step][rank]`` samples; which ids they have follows from the seed."""

    embeddings: tuple[Plain, ...]
    parts: tuple[tuple[int, ...], ...]
    split: str = "auto"
    rule: str = "sgd"
    seed: int = 0


class PlainModel(nn.Module):
    def __init__(self, case: PlainCase) -> None:
        super().__init__()
        torch.default_generator.manual_seed(case.seed)
        self.case, self.tables, width = case, nn.ModuleList(), 0
        for plain in case.embeddings:
            options: dict[str, Any] = {"padding_idx": plain.padding}
            if plain.kind in BAGS:
                options |= {"mode": BAGS[plain.kind], "include_last_offset": plain.kind == "ended"}
                module: Any = nn.EmbeddingBag(plain.rows, plain.dim, **options)
            else:
                module = nn.Embedding(plain.rows, plain.dim, **options)
            if plain.tied is None:
                nn.init.normal_(module.weight)  # padding too: it is a row like others, once
            else:
                module.weight = self.tables[plain.tied].weight
            module.weight.requires_grad_(not plain.is_frozen)
            self.tables.append(module)
            width += plain.dim * plain.calls + (plain.is_read and plain.rows)
        self.out = nn.Linear(width, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        count = len(batch["label"])
        parts = []
        for t, (plain, module) in enumerate(zip(self.case.embeddings, self.tables, strict=True)):
            for call in range(plain.calls):
                found = self.look_up(plain, module, batch, f"{t}.{call}")
                each = (
                    found.numel() // max(count, 1) // plain.dim
                )  # -1 cannot be told of no samples
                parts.append(torch.tanh(found).reshape(count, each, plain.dim).sum(1))
            if plain.is_read:
                parts.append(torch.tanh(parts[-1] @ module.weight.t()))
        hidden = torch.tanh(self.out(torch.cat(parts, dim=1)))
        return (hidden.sum(1) - batch["label"].to(hidden.dtype)).square()

    def look_up(self, plain: Plain, module: Any, batch: dict[str, Tensor], key: str) -> Tensor:
        ids = batch[f"{key}.ids"]
        if plain.kind in ("bags", "ended"):
            ends = batch[f"{key}.lengths"].cumsum(0)
            starts = torch.cat([ends.new_zeros(1), ends])
            found: Tensor = module(ids, starts if plain.kind == "ended" else starts[:-1])
        elif plain.kind == "weighted":
            weights = batch[f"{key}.weights"].to(self.out.weight.dtype).requires_grad_()
            found = module(ids, per_sample_weights=weights)
        else:
            found = module(ids)
        return found


def samples_of(case: PlainCase, step: int, first: int, last: int) -> dict[str, Tensor]:
    """Samples ``first`` to ``last`` of a step's global batch."""
    count = sum(case.parts[step])
    generator = torch.Generator().manual_seed(100 * case.seed + step)
    found = {"label": torch.rand(count, generator=generator)[first:last]}
    for t, plain in enumerate(case.embeddings):
        dtype = torch.int32 if plain.is_int32 else torch.int64
        for call in range(plain.calls):
            shape = {"flat": (count,), "grid": (count, 2, WIDTH)}.get(plain.kind, (count, WIDTH))
            ids = torch.randint(0, plain.rows, shape, generator=generator).to(dtype)
            lengths = torch.randint(0, WIDTH + 1, (count,), generator=generator)
            weights = torch.rand(shape, generator=generator) + 0.5
            ids, lengths, weights = (x[first:last] for x in (ids, lengths, weights))
            if plain.kind in ("bags", "ended"):
                ids = ids[torch.arange(WIDTH) < lengths.unsqueeze(1)]
                found[f"{t}.{call}.lengths"] = lengths.to(dtype)  # torch wants one dtype of both
            found |= {f"{t}.{call}.ids": ids, f"{t}.{call}.weights": weights}
    return found


def part_of(case: PlainCase, step: int, rank: int) -> dict[str, Tensor]:
    first = sum(case.parts[step][:rank])
    return samples_of(case, step, first, first + case.parts[step][rank])


Result = tuple[list[Tensor], dict[str, Tensor]]


def train_reference(case: PlainCase) -> Result:
    """Losses of every step, and the state dict, in float64."""
    model = PlainModel(case).double()
    optimizer = RULES[case.rule][0]([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step, parts in enumerate(case.parts):
        found = model(samples_of(case, step, 0, sum(parts)))
        optimizer.zero_grad()
        found.mean().backward()
        optimizer.step()
        losses.append(found.detach())
    return losses, dict(model.state_dict())


def train_adopted(mesh: Mesh, case: PlainCase) -> tuple[Result, str, bool]:
    """The same sharded; what `rm.verify` says; and whether the state went back into the model."""
    make = lambda: rm.adopt(PlainModel(case))  # noqa: E731
    model = make()
    dense, sparse = RULES[case.rule]
    plan = rm.make_plan(model, mesh.topology, split=case.split, sparse=case.rule)
    rm.shard(model, plan, mesh)
    optimizer = rm.Optimizer(model, dense=dense, sparse=sparse)
    losses, batches = [], [part_of(case, step, mesh.rank) for step in range(len(case.parts))]
    for batch in mesh.batches(batches):
        found = model(batch)
        mesh.mean(found).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.detach())
    state = rm.full_state_dict(model)
    plain, fits = rm.unshard(model), True
    if plain is not None:
        original = PlainModel(case)
        original.load_state_dict(state)
        last = copy.deepcopy(batches[0])
        fits = torch.allclose(plain(last), original(last), atol=1e-6)
        fits &= list(plain.state_dict()) == list(original.state_dict())
    told = rm.verify(make, plan, mesh, batches, dense=dense, sparse=sparse)
    return (losses, state), str(told), fits


@st.composite
def plain_cases(draw: st.DrawFn, world: int) -> PlainCase:
    embeddings: list[Plain] = []
    for _ in range(draw(st.integers(1, 4))):
        rows, dim = draw(st.integers(1, 12)), draw(st.sampled_from([1, 4, 8]))
        plain = Plain(
            kind=draw(st.sampled_from(KINDS)),
            rows=rows,
            dim=dim,
            padding=draw(st.one_of(st.none(), st.integers(0, rows - 1))),
            is_int32=draw(st.booleans()),
            calls=draw(st.integers(1, 2)),
            is_read=draw(st.integers(0, 3)) == 0,
            is_frozen=draw(st.integers(0, 7)) == 0,
        )
        alike = [t for t, e in enumerate(embeddings) if (e.rows, e.dim) == (rows, dim)]
        if alike:
            owner = embeddings[alike[0]]
            plain = Plain(**{**vars_of(plain), "tied": alike[0], "is_frozen": owner.is_frozen})
        elif embeddings and draw(st.integers(0, 2)) == 0:
            owner = embeddings[0]
            shape = {"rows": owner.rows, "dim": owner.dim, "is_frozen": owner.is_frozen}
            padding = None if plain.padding is None else plain.padding % owner.rows
            plain = Plain(**{**vars_of(plain), **shape, "padding": padding, "tied": 0})
        embeddings.append(plain)
    steps = draw(st.integers(1, 2))
    counts = st.lists(st.integers(0, 3), min_size=world, max_size=world)
    parts = tuple(tuple(draw(counts.filter(any))) for _ in range(steps))
    return PlainCase(
        embeddings=tuple(embeddings),
        parts=parts,
        split=draw(st.sampled_from(["auto", "row_wise", "table_wise", "column_wise"])),
        rule=draw(st.sampled_from(sorted(RULES))),
        seed=draw(st.integers(0, 99)),
    )


def vars_of(plain: Plain) -> dict[str, Any]:
    return {name: getattr(plain, name) for name in Plain.__dataclass_fields__}
