"""`rm.adopt`: which plain embeddings of a model become tables, and why one cannot."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from rowmesh.errors import InputError, did_you_mean
from rowmesh.nn.adopted import convert, table_name
from rowmesh.nn.collections import Collection
from rowmesh.runtime.adopt import adopt_collections
from rowmesh.tables import BYTES_OF, SKIPPED, named_collections, uncompiled

__all__ = ["adopt"]

_Plain = nn.Embedding | nn.EmbeddingBag
_OWN = ("forward", "__call__", "__getattr__", "__setattr__", "_load_from_state_dict")


def adopt(model: nn.Module, *, skip: Sequence[str] = ()) -> nn.Module:
    """Make every ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model a table, in place.

    The modules stay the objects they are, at all their paths, with their values, attributes, hooks
    and state-dict keys; on one device the model does what it did. `rowmesh.make_plan` then places
    their tables, and `rowmesh.shard` spreads them. A table is named by the module's path, with
    ``_`` for dots. Modules that share one weight are one table. Collections of TorchRec's become
    rowmesh's, as `rowmesh.shard` makes them.

    On a mesh, ids may have any shape, and reading ``weight`` looks up **all** rows, with gradient.
    A row is updated by the rule for tables if a forward looked it up, its ids that are padding
    left out.

    Args:
        model: Before `rowmesh.shard`, on any device or on ``meta``.
        skip: Paths, or patterns as of files, of embeddings to leave as they are.

    Returns:
        ``model``.

    Raises:
        InputError: Before anything is changed, naming an embedding that cannot be a table, and
            why: ``max_norm``, ``scale_grad_by_freq``, a forward, parameters or hooks of its own,
            a weight that another module uses, or of another dtype than fp32, fp16 and bf16.
    """
    if hasattr(uncompiled(model), "_rowmesh_dense"):
        raise InputError("this model is sharded already: adopt its embeddings before rm.shard")
    paths: dict[nn.Module, list[str]] = {}
    for path, module in uncompiled(model).named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    inside = {m for _, c, _ in named_collections(model) for m in c.modules()}
    plain = {m: paths[m] for m in paths if isinstance(m, _Plain) and m not in inside}
    kept = _skipped(plain, skip)
    chosen = [m for m in plain if m not in kept and not isinstance(m, Collection)]
    for module in chosen:
        _check(module, paths[module][0] or type(module).__name__)
    _check_sharing(paths, chosen)
    taken = {c.name for _, _, configs in named_collections(model) for c in configs}
    model = adopt_collections(model)
    groups: dict[int, list[nn.Module]] = {}
    for module in chosen:
        groups.setdefault(id(module._parameters["weight"]), []).append(module)
    for modules in groups.values():
        name = table_name(paths[modules[0]][0], taken)
        convert(modules, name)
        taken.add(name)
    for module in kept:
        setattr(module, SKIPPED, True)
    return model


def _skipped(plain: dict[_Plain, list[str]], patterns: Sequence[str]) -> list[_Plain]:
    if isinstance(patterns, str):
        raise InputError(f"skip is a list of paths, as skip=[{patterns!r}]")
    known = [path for paths in plain.values() for path in paths]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in known):
            raise InputError(f"skip: no embedding is at {pattern!r}{did_you_mean(pattern, known)}")
    return [
        m for m, paths in plain.items() if any(fnmatchcase(p, s) for p in paths for s in patterns)
    ]


def _check(module: _Plain, path: str) -> None:
    """Refuse what a table cannot do."""
    base = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    kind = type(module)
    own = [n for n in _OWN if getattr(kind, n) is not getattr(base, n) or n in vars(module)]
    names = [name for name, _ in module.named_parameters()]
    weight = module._parameters.get("weight")
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in BYTES_OF)
    faults = [
        (bool(own), f"{kind.__name__} has its own {', '.join(own)}"),
        (hasattr(kind, "weight"), "its weight is computed (a parametrisation)"),
        (names != ["weight"], f"its parameters are {names}, not a weight alone"),
        (module.max_norm is not None, f"max_norm={module.max_norm} changes rows in the forward"),
        (bool(module.scale_grad_by_freq), "scale_grad_by_freq=True needs the ids of all ranks"),
    ]
    if weight is not None:
        faults += [
            (type(weight) is not nn.Parameter, f"its weight is a {type(weight).__name__}"),
            (weight.dtype not in BYTES_OF, f"its weight is {weight.dtype}, not one of {dtypes}"),
            (_is_hooked(weight), "its weight has hooks on its gradient"),
        ]
    for is_fault, what in faults:
        if is_fault:
            raise InputError(
                f"embedding {path!r} cannot be a table: {what}; leave it as it is with "
                f"rm.adopt(model, skip=[{path!r}])"
            )


def _is_hooked(weight: nn.Parameter) -> bool:
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def _check_sharing(paths: dict[nn.Module, list[str]], chosen: Sequence[nn.Module]) -> None:
    """Refuse to part an embedding from another module that uses its weight."""
    owners = {id(m._parameters["weight"]): m for m in chosen}
    for module, (path, *_) in paths.items():
        for key, parameter in module._parameters.items():
            owner = owners.get(id(parameter))
            if owner is not None and module not in chosen:
                raise InputError(
                    f"embedding {paths[owner][0]!r} cannot be a table: its weight is also {key!r} "
                    f"of {path or type(module).__name__!r} ({type(module).__name__}); use "
                    f"embedding.weight in the forward instead, or leave it as it is with "
                    f"rm.adopt(model, skip=[{paths[owner][0]!r}])"
                )
