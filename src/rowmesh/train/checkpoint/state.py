"""What a checkpoint holds besides tables, by names that do not depend on the plan.

Dense parameters and buffers, the dense optimiser's state under its parameters' names, learning
rates, and the random generators of every rank.
"""

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rowmesh.errors import InputError, StepError, shown
from rowmesh.files import parse_json
from rowmesh.runtime.embeddings import sharded_engines
from rowmesh.runtime.optimizer import Optimizer
from rowmesh.runtime.regions import dense_state
from rowmesh.tables import uncompiled
from rowmesh.train.checkpoint.document import check_jsonable

__all__ = [
    "check_drained",
    "check_restore",
    "dense_tensors",
    "describe_optimizer",
    "random_state",
    "restore_optimizer",
    "restore_random_state",
]


def check_drained(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Refuse a moment between backward and step, whose gradients would be lost or misused.

    Raises:
        StepError: Says what to call first.
    """
    is_sent = any(ticket.is_sent for e in sharded_engines(model) for ticket in e.tickets)
    if is_sent or (optimizer is not None and optimizer._pending is not None):
        raise StepError(
            "a checkpoint between backward and step: call opt.step() or opt.zero_grad() first"
        )


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Dense parameters and buffers, ``dense.<name>``: the model's own memory, not copies."""
    found = dense_state(model)
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"the model's state {name!r} is {type(value).__name__}, but a checkpoint holds "
                f"tensors: make it a buffer, or put it into extra"
            )
    return {f"dense.{name}": value.detach() for name, value in found.items()}


def describe_optimizer(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """State tensors ``dense_state.<parameter>.<name>``, and the rest of it for metadata.json."""
    dense = optimizer.dense
    if dense is None:
        return {}, None
    names = _names(model)
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in dense.state.items():
        scalars[names[id(parameter)]] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"dense_state.{names[id(parameter)]}.{name}"] = value.detach()
            else:
                scalars[names[id(parameter)]][name] = value
    groups = [
        {
            "params": [names[id(p)] for p in group["params"]],
            "options": {k: v for k, v in group.items() if k != "params"},
        }
        for group in dense.param_groups
    ]
    document = {"kind": type(dense).__name__, "groups": groups, "scalars": scalars}
    check_jsonable(document, "the dense optimiser")
    return tensors, document


def _names(model: nn.Module) -> dict[int, str]:
    """By identity of the parameter."""
    return {id(p): name for name, p in uncompiled(model).named_parameters()}


def check_optimizer(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any] | None) -> None:
    """Refuse the state of another dense optimiser or of other parameter groups.

    Raises:
        InputError: Names both sides.
    """
    _, ours = describe_optimizer(model, optimizer)
    kinds = [None if side is None else side["kind"] for side in (saved, ours)]
    if kinds[0] != kinds[1]:
        raise InputError(
            f"the checkpoint's dense optimiser is {kinds[0]}, the model's is {kinds[1]}"
        )
    if saved is None or ours is None:
        return
    groups = [[group["params"] for group in side["groups"]] for side in (saved, ours)]
    if groups[0] != groups[1]:
        raise InputError(
            f"the parameter groups of the dense optimiser are {groups[0]} in the checkpoint, "
            f"{groups[1]} here"
        )


def restore_optimizer(
    optimizer: Optimizer, saved: dict[str, Any] | None, tensors: dict[str, Tensor]
) -> None:
    """Give the dense optimiser what `describe_optimizer` found; the groups are the same."""
    dense = optimizer.dense
    if saved is None or dense is None:
        return
    names = [name for group in saved["groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: dict(values) for name, values in saved["scalars"].items()}
    for key, tensor in tensors.items():
        parameter, _, name = key.removeprefix("dense_state.").rpartition(".")
        state[numbers[parameter]][name] = tensor
    groups = []
    for theirs, ours in zip(saved["groups"], dense.param_groups, strict=True):
        options = {
            name: tuple(value) if isinstance(ours.get(name), tuple) else value
            for name, value in theirs["options"].items()
        }
        groups.append(options | {"params": [numbers[name] for name in theirs["params"]]})
    dense.load_state_dict({"state": state, "param_groups": groups})
    optimizer.param_groups[:-1] = dense.param_groups


def random_state() -> Tensor:
    """The states of Python's, numpy's and torch's generators of this process, as bytes of JSON."""
    kind, keys, *rest = np.random.get_state()
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state().tolist()
    return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8)


def check_restore(
    optimizer: Optimizer | None, document: dict[str, Any], tensors: dict[str, Tensor], saved: Tensor
) -> None:
    """Refuse what `restore_optimizer` and `restore_random_state` would stumble over half-way.

    Args:
        optimizer: Of the same kind and groups, as `check_optimizer` says.
        document: From metadata.json.
        tensors: The dense optimiser's state, read.
        saved: Of the random generators, read.

    Raises:
        InputError: If it is not what a save writes.
    """
    try:
        _set_generators(saved, random.Random(), np.random.RandomState(), torch.Generator())
    except Exception as error:  # whatever generators say of a wrong state
        raise InputError(f"the saved random state is none: {shown(error)}") from None
    if optimizer is None:
        return
    ours = {k: v for k, v in optimizer.param_groups[-1].items() if k != "params"}
    _check_alike("the sparse parameter group", document["sparse_group"], ours)
    dense, found = optimizer.dense, document["dense_optimizer"]
    if dense is None:
        return
    parameters: dict[str, Tensor] = {}
    for theirs, group in zip(found["groups"], dense.param_groups, strict=True):
        options = {k: v for k, v in group.items() if k != "params"}
        _check_alike("a dense parameter group", theirs.get("options"), options)
        parameters |= dict(zip(theirs["params"], group["params"], strict=True))
    scalars = found.get("scalars")
    if not isinstance(scalars, dict) or not all(
        name in parameters and isinstance(state, dict) for name, state in scalars.items()
    ):
        raise InputError(f"the dense optimiser's state is {shown(scalars)}, not of its parameters")
    for key, tensor in tensors.items():
        name = key.removeprefix("dense_state.").rpartition(".")[0]
        if name not in scalars or tensor.numel() not in (1, parameters[name].numel()):
            raise InputError(f"{key!r} is not of the dense optimiser's parameters")


def _check_alike(what: str, saved: Any, ours: dict[str, Any]) -> None:
    """The same options, each of the same kind: a number, a word, a flag, a list or nothing."""
    if not isinstance(saved, dict) or saved.keys() != ours.keys():
        raise InputError(f"{what} is {shown(saved)} in the checkpoint, {shown(ours)} here")
    for name, value in saved.items():
        kinds = [
            float if type(v) is int else list if type(v) is tuple else type(v)
            for v in (value, ours[name])
        ]
        if kinds[0] is not kinds[1] and type(None) not in kinds:
            raise InputError(
                f"{name!r} of {what} is {shown(value)} in the checkpoint, {shown(ours[name])} here"
            )


def _set_generators(
    saved: Tensor, python: Any, numpy: np.random.RandomState | Any, generator: torch.Generator
) -> dict[str, Any]:
    """Set generators to what `random_state` gave; returns all of it."""
    found: dict[str, Any] = parse_json(saved.numpy().tobytes(), where="the saved random state")
    version, keys, gauss = found["python"]
    python.setstate((version, tuple(keys), gauss))
    numpy.set_state(tuple(found["numpy"]))
    generator.set_state(torch.tensor(found["torch"], dtype=torch.uint8))
    return found


def restore_random_state(saved: Tensor, *, rank: int, derive: bool) -> None:
    """Set the generators to what `random_state` gave.

    With ``derive``, seed them from a hash of ``saved`` and the rank instead: ranks differ, and
    two such loads agree.
    """
    text = saved.numpy().tobytes()
    if derive:
        digest = hashlib.sha256(text + str(rank).encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return
    found = _set_generators(saved, random, np.random, torch.default_generator)
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(found["cuda"], dtype=torch.uint8))
