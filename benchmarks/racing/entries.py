"""Who races: settings of rowmesh and of TorchRec, exact and lossy."""

from pathlib import Path

from harness.contestants import OWN_CORES, Entry

__all__ = ["THEIRS_PLAIN", "ours", "ours_lossy", "theirs", "theirs_lossy", "with_own_cores"]


def _ours(name: str, *flags: str) -> Entry:
    return Entry(role="ours", name=name, flags=flags)


def _theirs(name: str, *flags: str, role: str = "theirs") -> Entry:
    return Entry(role=role, name=name, flags=(*flags, "--pipeline", "sparse_dist"))


THEIRS_PLAIN = Entry(
    role="theirs_plain",
    name="table-wise, no pipeline",
    flags=("--sharding", "table_wise", "--pipeline", "none"),
)
AUTO = ("--plan", "auto", "--tiers", "auto", "--depth", "auto")


def ours(topologies: list[Path], *, hosts: int) -> tuple[Entry, ...]:
    """rowmesh's exact settings: what its planner chooses for each of the links (hot rows, depth,
    whatever else is exact), and two fixed splits two batches deep.

    Inside one host there is little to hide, so a fixed split is tried without depth, too.
    """
    autos = [
        _ours(f"auto for {t.stem}", *AUTO, *_topology_flags(topologies, t)) for t in topologies
    ]
    flags = _topology_flags(topologies, topologies[0])
    fixed = [("table-wise", "table_wise", "2"), ("row-wise", "row_wise", "2")]
    if hosts == 1:
        fixed.append(("table-wise, depth 1", "table_wise", "1"))
    return (
        *autos,
        *(_ours(name, "--plan", split, "--depth", d, *flags) for name, split, d in fixed),
    )


def _topology_flags(files: list[Path], first: Path) -> list[str]:
    ordered = sorted(files, key=lambda path: path != first)
    return [word for path in ordered for word in ("--topology", str(path))]


def theirs(topologies: list[Path], *, hosts: int) -> tuple[Entry, ...]:
    """TorchRec's exact settings; its planner also told how fast each of the links is."""
    told = [
        _theirs(f"planner told of {t.stem}", "--sharding", "planner", "--topology", str(t))
        for t in topologies
    ]
    return (
        _theirs("table-wise", "--sharding", "table_wise"),
        _theirs("planner", "--sharding", "planner"),
        *(told if hosts > 1 else ()),
    )


def ours_lossy(exact: Entry, topologies: list[Path], first: Path) -> tuple[Entry, ...]:
    """The best exact setting with two codecs, and what the planner takes if it may be lossy.

    Args:
        exact: The best exact setting.
        topologies: Of all rates.
        first: The one to plan for.
    """
    auto = (*AUTO, "--allow", "lossy", *_topology_flags(topologies, first))
    return (
        *(
            Entry(role="ours_lossy", name=f"{exact.name} {c}", flags=(*exact.flags, "--codecs", c))
            for c in ("bf16", "int8,dense=bf16")
        ),
        Entry(role="ours_lossy", name=f"auto for {first.stem}, lossy allowed", flags=auto),
    )


def with_own_cores(entry: Entry) -> Entry:
    """A setting with cores of its own for every rank (benchmarks/cores.py)."""
    name = f"{entry.name}, own cores"
    return Entry(role=entry.role, name=name, flags=(*entry.flags, OWN_CORES))


def theirs_lossy(exact: Entry) -> tuple[Entry, ...]:
    """TorchRec's lossy settings with the sharding of its best exact one."""
    return tuple(
        Entry(
            role="theirs_lossy",
            name=f"{exact.name} {precision}",
            flags=(*exact.flags, "--qcomm", precision),
        )
        for precision in ("fp16", "int8")
    )
