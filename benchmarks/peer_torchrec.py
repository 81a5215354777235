"""The peer: TorchRec's DLRM on the ids, initial weights and step of ours, under torchrun.

Runs where TorchRec is installed, with rowmesh's ``src`` on PYTHONPATH (for data and weights)::

    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/peer_torchrec.py --sharding planner

Rank 0 prints one line, ``RESULT`` and a JSON object. Times are medians on rank 0 (collectives
lock the ranks together); a loss is the mean over all samples of all ranks.
"""

import argparse
import json
import logging
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torchrec
from cores import add_own_cores_flag, bind_to_own_cores
from harness.gates import Gate
from harness.rounds import nic_bytes, timed
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import (
    DLRM,
    DenseArch,
    DLRMTrain,
    InteractionArch,
    OverArch,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from rowmesh.cost import load_calibration
from rowmesh.data.synthetic import SyntheticClicks
from rowmesh.models.layers import seed_dense
from rowmesh.nn.init import initial_values
from rowmesh.storage import keep_freed_memory
from rowmesh.tables import TableConfig

EPS = 1e-8
CPU = torch.device("cpu")
ROWS_AT_ONCE = 8192


def main() -> None:
    """Train, measure, print."""
    args = parse_args()
    warnings.filterwarnings("ignore")  # TorchRec uses deprecated parts of torch and of itself
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if not args.default_malloc:
        keep_freed_memory()
    dist.init_process_group("gloo")
    clicks = SyntheticClicks(
        cap=int(args.cap),
        alpha=args.alpha,
        pooling=args.pooling,
        batch_size=args.batch,
        labels="coin",
    )
    tables = clicks.tables(args.dim)
    model = make_model(tables, args, clicks.num_dense)
    seconds = time.perf_counter()
    sharders = [EmbeddingBagCollectionSharder(qcomm_codecs_registry=make_codecs(args.qcomm))]
    plan = make_plan(model, sharders, tables, args)
    plan_s = time.perf_counter() - seconds
    sharded = DistributedModelParallel(module=model, device=CPU, plan=plan, sharders=sharders)
    fill_tables(sharded, tables, args.seed)
    step = make_step(sharded, endless(make_batches(clicks, args.batches)), args)

    if args.gate:
        serve(step, args, plan)
        leave()
    cpu = time.process_time()
    losses, step_ms, sent_mb = run_steps(step, args)
    cpu = time.process_time() - cpu
    dense_ms = run_dense(args, len(tables), clicks.num_dense)
    sent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sent, sent_mb if os.environ.get("LOCAL_RANK", "0") == "0" else None)
    if dist.get_rank() == 0:
        hosts = [mb for mb in sent if mb is not None]
        result = {
            "ms_median": round(median(step_ms), 3),
            "ms_min": round(min(step_ms), 3),
            "samples_s": round(args.batch * dist.get_world_size() / median(step_ms) * 1e3),
            "cpu_ms": round(1e3 * cpu / (args.warmup + args.steps), 1),
            "ms_dense": round(median(dense_ms), 3),
            "mb_host_step": round(sum(hosts) / len(hosts), 4) if hosts else None,
            "plan": count_kinds(plan),
            "plan_s": round(plan_s, 2),
            "world": dist.get_world_size(),
            "args": vars(args),
            "versions": {"torch": torch.__version__, "torchrec": torchrec.__version__},
            "machine": {"cpus": os.cpu_count(), "processor": platform.machine()},
        }
        if args.losses:
            result["losses"] = losses
        print("RESULT " + json.dumps(result), flush=True)
    leave()


def leave() -> NoReturn:
    """End all ranks; gloo's threads have been seen to abort an orderly exit after the result."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def parse_args() -> argparse.Namespace:
    """The flags; the defaults are the shapes of the reports."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--sharding", default="planner", choices=["planner", "table_wise"])
    parser.add_argument(
        "--topology", help="of rowmesh calibrate: how fast links are, for the planner"
    )
    parser.add_argument("--pipeline", default="none", choices=["none", "sparse_dist"])
    parser.add_argument("--qcomm", default="fp32", choices=["fp32", "fp16", "int8"])
    parser.add_argument("--cap", type=float, default=1e6, help="upper limit on a table's rows")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2048, help="samples per rank")
    parser.add_argument("--pooling", type=int, default=1)
    parser.add_argument("--alpha", type=float, default=1.05)
    parser.add_argument("--bottom", type=sizes, default=sizes("512,256,64"))
    parser.add_argument("--top", type=sizes, default=sizes("512,512,256,1"))
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--dense-opt", default="adagrad", choices=["adagrad", "sgd"])
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", type=int, default=10, help="distinct batches, used in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--default-malloc", action="store_true", help="as in bench_dlrm.py")
    add_own_cores_flag(parser)
    parser.add_argument("--losses", action="store_true", help="of all steps, warm-up included")
    parser.add_argument("--gate", help="as in bench_dlrm.py")
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    """``"512,256"`` as a list."""
    return [int(size) for size in text.split(",")]


def make_model(tables: list[Any], args: argparse.Namespace, num_dense: int) -> DLRMTrain:
    """TorchRec's DLRM with its loss; tables on meta, dense layers seeded as ours."""
    bags = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                embedding_dim=t.embedding_dim,
                num_embeddings=t.num_embeddings,
                feature_names=t.feature_names,
            )
            for t in tables
        ],
    )
    model = DLRM(
        embedding_bag_collection=bags,
        dense_in_features=num_dense,
        dense_arch_layer_sizes=args.bottom,
        over_arch_layer_sizes=args.top,
        dense_device=CPU,
    )
    dense = chain(model.dense_arch.named_parameters(), model.over_arch.named_parameters())
    seed_dense(dense, args.seed)
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": args.lr, "eps": EPS})
    return DLRMTrain(model)


def make_codecs(precision: str) -> Any:
    """What travels in fewer bits, both ways; None for fp32."""
    if precision == "fp32":
        return None
    kind = CommType(precision)
    return get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=kind, backward_precision=kind), device=CPU
    )


def make_plan(
    model: nn.Module, sharders: list[Any], tables: list[Any], args: argparse.Namespace
) -> ShardingPlan:
    """TorchRec's own planner, told the true pooling; table_wise leaves it only the ranks."""
    types = {"sharding_types": [args.sharding]} if args.sharding != "planner" else {}
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=dist.get_world_size(),
            local_world_size=get_local_size(),
            compute_device="cpu",
            **link_speeds(args.topology),
        ),
        batch_size=args.batch,
        constraints={
            t.name: ParameterConstraints(pooling_factors=[float(args.pooling)], **types)
            for t in tables
        },
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    )
    return planner.collective_plan(model, sharders, dist.GroupMember.WORLD)


def link_speeds(file: str | None) -> dict[str, float]:
    """As TorchRec's planner takes them, in bytes a millisecond; its own guess without a file."""
    if file is None:
        return {}
    rates = load_calibration(file).rates
    return {
        "intra_host_bw": rates.host_bytes_per_s / 1e3,
        "inter_host_bw": rates.cross_bytes_per_s / 1e3,
    }


def count_kinds(plan: ShardingPlan) -> dict[str, int]:
    """Number of tables of each sharding type and kernel."""
    shardings = chain.from_iterable(module.values() for module in plan.plan.values())
    return dict(Counter(f"{s.sharding_type}/{s.compute_kernel}" for s in shardings))


def fill_tables(model: nn.Module, tables: list[TableConfig], seed: int) -> None:
    """Write rowmesh's initial values into this rank's shards, where the plan put them."""
    of_key = {f"embedding_bags.{t.name}.weight": t for t in tables}
    for key, value in model.state_dict().items():
        config = of_key.pop(key[key.find("embedding_bags.") :], None)
        if config is None:
            continue
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                fill_block(shard.tensor, config, row, column, seed)
        else:
            fill_block(value, config, 0, 0, seed)
    if of_key:
        raise RuntimeError(f"the sharded model has no {sorted(of_key)}")


def fill_block(out: Tensor, config: TableConfig, row: int, column: int, seed: int) -> None:
    """``out`` is the table's block that starts at (row, column)."""
    for start in range(0, out.shape[0], ROWS_AT_ONCE):
        part = out.detach()[start : start + ROWS_AT_ONCE]
        rows = torch.arange(row + start, row + start + len(part))
        values = initial_values(config, rows, seed=seed)
        part.copy_(values[:, column : column + out.shape[1]])


def make_batches(clicks: SyntheticClicks, count: int) -> list[Batch]:
    """This rank's batches, as TorchRec's type."""
    batches = []
    for number in range(count):
        batch = clicks.batch_at(dist.get_rank(), number)
        ids = batch.sparse_features
        features = KeyedJaggedTensor(
            keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), stride=ids.stride()
        )
        batches.append(Batch(batch.dense_features, features, batch.labels))
    return batches


def endless(batches: list[Batch]) -> Iterator[Batch]:
    """The batches in turn, each time as a new object: offsets cached in one step are not kept."""
    while True:
        for batch in batches:
            ids = batch.sparse_features
            fresh = KeyedJaggedTensor(
                keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), stride=ids.stride()
            )
            yield Batch(batch.dense_features, fresh, batch.labels)


def make_dense_optimizer(args: argparse.Namespace) -> Callable[[Any], torch.optim.Optimizer]:
    """A constructor of the dense optimiser."""
    if args.dense_opt == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=args.lr)
    return lambda parameters: torch.optim.Adagrad(parameters, lr=args.lr, eps=EPS)


def make_step(
    model: DistributedModelParallel, batches: Iterator[Batch], args: argparse.Namespace
) -> Callable[[], Tensor]:
    """One training step, which returns this rank's mean loss."""
    outside = dict(in_backward_optimizer_filter(model.named_parameters()))
    replicated = {name: p for name, p in outside.items() if ".embedding_bags." in name}
    layers = {name: p for name, p in outside.items() if name not in replicated}
    optimizers = [model.fused_optimizer, KeyedOptimizerWrapper(layers, make_dense_optimizer(args))]
    if replicated:  # data-parallel tables have no fused optimiser: give them the same rule
        rule = partial(RowWiseAdagrad, lr=args.lr, eps=EPS)
        optimizers.append(KeyedOptimizerWrapper(replicated, rule))
    optimizer = CombinedOptimizer(optimizers)
    if args.pipeline == "sparse_dist":
        pipeline = TrainPipelineSparseDist(model, optimizer, CPU, execute_all_batches=True)
        return lambda: pipeline.progress(batches)[0]

    def step() -> Tensor:
        optimizer.zero_grad()
        loss, _ = model(next(batches))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def serve(step: Callable[[], Tensor], args: argparse.Namespace, plan: ShardingPlan) -> None:
    """Take part in a race: the steps go on from the warm-up, so many at every gate.

    The pipeline has the ids of one batch ahead when a gate opens and again when the steps are
    done, so every step pays for one exchange of ids.
    """
    losses = mean_over_ranks(warm_up(step, args))

    def steps(count: int) -> dict[str, Any]:
        found = timed(step, count=count, barrier=dist.barrier)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found["nic"])
        return {"ms": found["ms"], "nic": everyone[:: get_local_size()]}

    ready = {
        "losses": losses,
        "plan": count_kinds(plan),
        "versions": {"torch": torch.__version__, "torchrec": torchrec.__version__},
    }
    Gate(args.gate, rank=dist.get_rank()).serve(ready, {"steps": steps})


def warm_up(step: Callable[[], Tensor], args: argparse.Namespace) -> list[Tensor]:
    """The first losses; then cores of its own for this rank, if asked for."""
    losses = [step() for _ in range(args.warmup)]
    if args.own_cores:  # threads that communicate have started
        bind_to_own_cores()
    return losses


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    """Losses of the global batches, all ranks having as many samples."""
    means = torch.stack([loss.detach() for loss in losses]).double()
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


def run_steps(
    step: Callable[[], Tensor], args: argparse.Namespace
) -> tuple[list[float], list[float], float | None]:
    """Losses of all steps; milliseconds and megabytes sent of the steps after the warm-up."""
    losses = warm_up(step, args)
    dist.barrier()
    before, step_ms = nic_bytes(), []
    dist.barrier()
    for _ in range(args.steps):
        start = time.perf_counter()
        losses.append(step())
        step_ms.append((time.perf_counter() - start) * 1e3)
    dist.barrier()
    after = nic_bytes()
    sent_mb = None if before is None or after is None else (after[0] - before[0]) / args.steps / 1e6
    return mean_over_ranks(losses), step_ms, sent_mb


def run_dense(args: argparse.Namespace, num_features: int, num_dense: int) -> list[float]:
    """Milliseconds of steps of the dense layers alone, on all ranks at once, without a network."""
    bottom = DenseArch(num_dense, args.bottom)
    interaction = InteractionArch(num_features)
    width = args.dim + num_features * (num_features + 1) // 2
    top = OverArch(width, args.top)
    parameters = list(chain(bottom.parameters(), top.parameters()))
    optimizer = make_dense_optimizer(args)(parameters)
    generator = torch.Generator().manual_seed(args.seed)
    dense = torch.randn(args.batch, num_dense, generator=generator)
    pooled = torch.randn(args.batch, num_features, args.dim, generator=generator) * 0.05
    pooled.requires_grad_()
    labels = (torch.rand(args.batch, generator=generator) < 0.25).float()
    loss_of = nn.BCEWithLogitsLoss()
    step_ms = []
    dist.barrier()
    for _ in range(3 + args.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        pooled.grad = None
        logits = top(interaction(bottom(dense), pooled)).squeeze(-1)
        loss_of(logits, labels).backward()
        optimizer.step()
        step_ms.append((time.perf_counter() - start) * 1e3)
    return step_ms[3:]


if __name__ == "__main__":
    main()
