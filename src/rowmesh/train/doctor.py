"""`rowmesh doctor`: everything looked at, and which parts of rowmesh run here."""

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rowmesh import native
from rowmesh.comm.shared import why_not_shared
from rowmesh.extras import EXTRAS
from rowmesh.lab import check_permitted
from rowmesh.models.products import why_torch
from rowmesh.train.hardware import (
    ROOT,
    Finding,
    check_compiler,
    check_cores,
    check_descriptors,
    check_huge_pages,
    check_memory,
    check_shared_memory,
)
from rowmesh.train.network import check_hostname, check_interfaces, check_trial

__all__ = ["Feature", "can_train", "check_backends", "examine", "features"]

_NEEDED = ("torch", "gloo", "memory", "file descriptors", "two ranks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """A part of rowmesh, and whether it runs on this machine.

    Args:
        name: Of the part.
        works: Whether it runs.
        reason: Why not; empty if it does.
    """

    name: str
    works: bool
    reason: str = ""


def examine(root: Path = ROOT, *, trial_timeout_s: float = 60.0) -> Iterator[Finding]:
    """Look at the machine and what is installed, the trial of two ranks last."""
    yield check_cores(root)
    yield check_memory(root)
    yield check_shared_memory(root)
    yield check_descriptors(root)
    yield check_huge_pages(root)
    yield from check_interfaces(root)
    yield check_hostname()
    yield Finding(
        name="torch", value=f"{torch.__version__}, Python {sys.version.split()[0]}", ok=True
    )
    yield from check_backends()
    yield from (check_extra(package) for package in EXTRAS)
    yield check_compiler()
    yield check_kernels()
    yield check_products()
    yield check_messages()
    yield check_lab()
    yield check_trial(timeout_s=trial_timeout_s)


def check_backends() -> Iterator[Finding]:
    """What ranks can talk through, and the CUDA devices."""
    has_gloo = dist.is_available() and dist.is_gloo_available()
    advice = "" if has_gloo else "install a torch built with it: ranks on CPU talk through gloo"
    yield Finding(name="gloo", value="yes" if has_gloo else "no", ok=has_gloo, advice=advice)
    has_nccl = dist.is_available() and dist.is_nccl_available()
    yield Finding(name="nccl", value="yes" if has_nccl else "no", ok=True if has_nccl else None)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    value = f"{len(names)}: {', '.join(dict.fromkeys(names))}" if names else "none"
    advice = (
        "not used unless asked: init_mesh(device='cuda') or ROWMESH_DEVICE=cuda" if names else ""
    )
    yield Finding(name="CUDA devices", value=value, ok=True if names else None, advice=advice)


def check_extra(package: str) -> Finding:
    """The version of an optional package, or how to install it."""
    extra = EXTRAS[package]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        advice = f"pip install '{extra.requirement}' for {extra.purpose}"
        return Finding(name=package, value="not installed", ok=None, advice=advice)
    return Finding(name=package, value=version, ok=True, advice=f"for {extra.purpose}")


def check_lab() -> Finding:
    """Whether hosts can be emulated here, tried by making one; or what it takes."""
    reason = check_permitted()
    value, ok = ("yes", True) if reason is None else ("no", None)
    return Finding(name="emulated hosts", value=value, ok=ok, advice=reason or "for rowmesh lab")


def check_kernels() -> Finding:
    """Whether compiled kernels are used, or the torch paths: equal in results, slower."""
    name, value = "compiled kernels", native.describe()
    if native.is_available():
        return Finding(name=name, value=value, ok=True)
    advice = "same results, slower; a C compiler at pip install builds them (docs/kernels.md)"
    return Finding(name=name, value=f"{value}: torch is used", ok=None, advice=advice)


def check_products() -> Finding:
    """Whose library multiplies large matrices of dense layers in a rank with one thread."""
    reason = why_torch(num_threads=1)
    if reason is None:
        value = "by numpy's library, in ranks with one thread"
    else:
        value = f"by torch's library: {reason}"
    return Finding(name="matrix products", value=value, ok=True, advice="docs/kernels.md")


def check_messages() -> Finding:
    """Whether ranks of a host exchange through memory they share, or by gloo; the same bits."""
    name, reason = "messages inside a host", why_not_shared()
    if reason is None:
        advice = "if /dev/shm has room; the trial of two ranks says what they used"
        return Finding(name=name, value="through shared memory", ok=True, advice=advice)
    advice = "same results, slower (docs/notes/shared_memory.md)"
    return Finding(name=name, value=f"by gloo: {reason}", ok=None, advice=advice)


def can_train(findings: Sequence[Finding]) -> bool:
    """Whether nothing that training on CPU needs is missing; what is unknown counts as there."""
    return all(f.ok is not False for f in findings if f.name in _NEEDED)


def features(findings: Sequence[Finding]) -> list[Feature]:
    """What runs here, from what was found."""
    by_name = {f.name: f for f in findings}

    def feature(name: str, *needs: str) -> Feature:
        lacking = [n for n in needs if n not in by_name or by_name[n].ok is False]
        lacking += [n for n in needs if n not in _NEEDED and n in by_name and by_name[n].ok is None]
        reasons = [f"{n}: {by_name[n].value if n in by_name else 'unknown'}" for n in lacking]
        return Feature(name=name, works=not lacking, reason="; ".join(reasons))

    return [
        feature("train in one process", "torch", "memory"),
        feature("train on several ranks of this host, CPU", *_NEEDED),
        feature("train on several hosts, CPU", *_NEEDED, "host name"),
        feature(
            "train on GPUs (no GPU has run rowmesh yet: prove your plan with rm.verify)",
            "nccl",
            "CUDA devices",
        ),
        *(feature(purpose, package) for package, (_, _, purpose) in EXTRAS.items()),
        feature("emulate hosts with links of a chosen rate", "emulated hosts"),
    ]
