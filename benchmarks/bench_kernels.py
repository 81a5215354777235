"""Compiled kernels against their torch paths, on the shapes of bench_dlrm.py, in one process.

::

    OMP_NUM_THREADS=1 python benchmarks/bench_kernels.py

One thread, numpy's library too. Both paths of a call alternate, and their results are compared
before: bit for bit, or closely where the two add in other orders. Prints ``RESULT`` and a JSON
object: medians in ms of the thread's time and their ratio (torch over native) for pooling 1 and
20, under an automatic plan for two hosts and a row-wise one, and for the dense layers and codecs.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import rowmesh as rm
from rowmesh.comm.codecs import RowInt8
from rowmesh.data.synthetic import SyntheticClicks
from rowmesh.models.layers import MLP, PairwiseDots
from rowmesh.models.linear import Linear
from rowmesh.native import describe, is_available
from rowmesh.native import library as native_library
from rowmesh.nn.bags import check_ids, flatten
from rowmesh.nn.kernels import coalesce
from rowmesh.optim.squares import mean_squares
from rowmesh.runtime.routes import route_bags
from rowmesh.runtime.stacks import StackLayout, lay_out
from rowmesh.storage import allocate_rows, keep_freed_memory

Case = tuple[str, Callable[[], Any]]
HOSTS = rm.Topology(hosts=2, local=1)


def main() -> None:
    """Measure and print."""
    args = parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    assert is_available(), f"no compiled kernels: {describe()}"
    found = {
        f"pooling {pooling}, {split}": dict(measure(args, cases(args, pooling, split), same))
        for pooling in args.pooling
        for split in ("auto", "row_wise")
    }
    found["codecs"] = dict(measure(args, codec_cases(args), same))
    found["layers"] = dict(measure(args, layer_cases(args), close))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    result = {
        "shapes": found,
        "arguments": vars(args),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "kernels": describe(),
    }
    print("RESULT " + json.dumps(result), flush=True)


def parse_args() -> argparse.Namespace:
    """The shapes; the default is bench_dlrm.py's with the cap of the race."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cap", type=int, default=200_000, help="most rows of a table")
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--batch", type=int, default=2048)
    p.add_argument("--alpha", type=float, default=1.05)
    p.add_argument("--pooling", type=int, nargs="+", default=[1, 20])
    p.add_argument("--repeats", type=int, default=21)
    return p.parse_args()


def measure(
    args: argparse.Namespace, given: Iterable[Case], equal: Callable[[Any, Any], bool]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Times of every case."""
    for name, call in given:
        with without_kernels():
            expected = call()
        assert equal(call(), expected), f"{name}: the two paths differ"
        native, plain = [], []
        for _ in range(args.repeats):
            native.append(timed(call))
            with without_kernels():
                plain.append(timed(call))
        ours, theirs = median(native), median(plain)
        yield (
            name,
            {"native": round(ours, 3), "torch": round(theirs, 3), "ratio": round(theirs / ours, 2)},
        )


@contextmanager
def without_kernels() -> Iterator[None]:
    """The torch paths, inside; layers as torch has them."""
    off = mock.patch.object(native_library, "_find", return_value=(None, "off"))
    with off, mock.patch.object(Linear, "forward", nn.Linear.forward):
        yield


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of this thread; others that run on its core do not count."""
    started = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - started)


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit; nested values part by part."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return bool(a == b)


def close(a: Any, b: Any) -> bool:
    """Equal but for the order of sums."""
    pairs = zip(a, b, strict=True)
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max())) for x, y in pairs)


def layer_cases(args: argparse.Namespace) -> Iterator[Case]:
    """DLRM's interaction of 26 features, the first layer behind it, and all its dense layers."""
    rng = torch.Generator().manual_seed(0)
    dots, features = PairwiseDots(26, args.dim), 26 * args.dim
    dense, pooled = (
        torch.randn(args.batch, n, generator=rng).requires_grad_() for n in (args.dim, features)
    )
    layer = Linear(dots.out_features, 512)
    x = dots(dense, pooled).detach().requires_grad_()
    yield from both_ways("pairwise dots", lambda: dots(dense, pooled), [dense, pooled])
    yield from both_ways("linear", lambda: layer(x), [x, *layer.parameters()])
    bottom = MLP(13, (512, 256, args.dim), relu_last=True)
    top = MLP(dots.out_features, (512, 512, 256, 1), relu_last=False)
    inputs = torch.randn(args.batch, 13, generator=rng)
    weights = [pooled, *bottom.parameters(), *top.parameters()]
    yield from both_ways("dense layers", lambda: top(dots(bottom(inputs), pooled)), weights)


def both_ways(name: str, call: Callable[[], Tensor], inputs: list[Tensor]) -> Iterator[Case]:
    """The result alone, and with the gradients of all inputs."""
    grad = torch.randn(call().shape, generator=torch.Generator().manual_seed(1))
    yield f"{name}, forward", lambda: [call().detach()]
    yield f"{name}, both", lambda: torch.autograd.grad(call(), inputs, grad)


def codec_cases(args: argparse.Namespace) -> Iterator[Case]:
    """int8 of about as many rows as a rank's batch asks for."""
    rows = torch.randn(7000, args.dim, generator=torch.Generator().manual_seed(0))
    codec, back = RowInt8(), torch.empty_like(rows)
    parts = [torch.empty(size, dtype=dtype) for dtype, size in codec.parts(*rows.shape)]

    def encode() -> list[Tensor]:
        codec.encode(rows, parts)
        return [part.clone() for part in parts]

    def decode() -> Tensor:
        codec.decode(parts, back)
        return back.clone()

    yield "int8 encode", encode
    yield "int8 decode", decode


def cases(args: argparse.Namespace, pooling: int, split: str) -> Iterator[Case]:
    """What a step calls, on the ids of rank 0 of two; gradients are random."""
    clicks = SyntheticClicks(
        cap=args.cap,
        alpha=args.alpha,
        pooling=pooling,
        batch_size=args.batch,
        labels="coin",
    )
    tables = rm.EmbeddingBagCollection(clicks.tables(args.dim), device="meta", seed=0)
    layout = widest_layout(clicks, tables, args.dim, split)
    readers = [tables.readers[r] for r in layout.readers]
    features = [clicks.batch_at(rank, 0).sparse_features for rank in range(2)]
    bags = [flatten(f, readers, pooled=True, weighted=False) for f in features]
    routes = [route_bags(layout, b, training=True) for b in bags]
    yield "flatten", lambda: flatten(features[0], readers, pooled=True, weighted=False)
    uneven = uneven_bags(features[0])
    yield "flatten, uneven bags", lambda: flatten(uneven, readers, pooled=True, weighted=False)
    yield "check_ids", lambda: check_ids(bags[0], readers, tables.configs())
    yield "route_bags", lambda: route_bags(layout, bags[0], training=True)
    rng = torch.Generator().manual_seed(0)
    asked = [r.requests[0] for r in routes]
    slots = torch.cat([torch.cat([r.rows, r.pooled_slots()]) for r in asked])
    ends = [0, asked[0].num_vectors]
    index = torch.cat([r.vector_of_id() + first for r, first in zip(asked, ends, strict=True)])
    grads = torch.randn((sum(r.num_vectors for r in asked), args.dim), generator=rng)
    sizes = torch.tensor([len(r.rows) + len(r.pooled) for r in asked])
    source = torch.repeat_interleave(torch.arange(2, dtype=torch.int32), sizes)
    labels = [source] if layout.has_repeats else []
    yield "coalesce", lambda: coalesce(slots, grads, index=index, labels=labels)
    rows, grad = coalesce(slots, grads, index=index, labels=labels)
    rows, rule = rows.long(), rm.RowwiseAdagrad(lr=0.05)
    yield "mean_squares", lambda: mean_squares(grad)
    weight = allocate_rows(
        layout.asked_slots[0], args.dim, dtype=torch.float32, device=torch.device("cpu")
    )
    weight.zero_()
    state = rule.new_state(len(weight), args.dim, device=weight.device)

    yield "row-wise AdaGrad", lambda: rule.update(weight, state, rows, grad, 0.05)


def uneven_bags(features: rm.KeyedJaggedTensor) -> rm.KeyedJaggedTensor:
    """The same ids in bags of 0, 1 or 2 times as many."""
    lengths = features.lengths().view(-1, 2).clone()
    shift = torch.arange(len(lengths)) % 3 - 1
    lengths += torch.stack([shift, -shift], dim=1) * lengths
    return rm.KeyedJaggedTensor(features.keys(), features.values(), lengths=lengths.view(-1))


def widest_layout(
    clicks: SyntheticClicks, tables: rm.EmbeddingBagCollection, dim: int, split: str
) -> StackLayout:
    """The stack with most readers, as rank 0 of two hosts sees it."""
    model = nn.ModuleDict({"tables": tables})
    sample = [clicks.batch_at(0, number).sparse_features for number in range(10, 14)]
    stats = rm.Stats.from_batches(clicks.tables(dim), sample)
    plan = rm.make_plan(model, HOSTS, stats=stats, split=split)
    layouts = lay_out(
        plan.tables,
        [plan.groups(t) for t in plan.tables],
        tables.readers,
        topology=HOSTS,
        rank=0,
        device=torch.device("cpu"),
    )
    return max(layouts, key=lambda layout: len(layout.readers))


if __name__ == "__main__":
    main()
