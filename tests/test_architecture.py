"""The shape of the repository: who imports whom, how long a file may be, what is public."""

import ast
import re
import tomllib
from pathlib import Path

import rowmesh

ROOT = Path(rowmesh.__file__).parent
REPOSITORY = Path(__file__).parent.parent
WORDS = {
    "errors",
    "extras",
    "topology",
    "features",
    "tables",
    "placement",
    "stats",
    "typed",
    "files",
    "signals",
    "trace",
}

# A part may import the parts listed here, itself, and WORDS. Nothing else.
MAY_IMPORT: dict[str, set[str]] = {
    "cost": set(),
    "planners": {"cost"},
    "comm": {"native"},
    "storage": set(),
    "native": set(),
    "nn": {"native"},
    "optim": {"native"},
    "runtime": {"comm", "storage", "nn", "optim", "native"},
    "models": {"nn", "native"},
    "data": set(),
    "profile": {"data"},
    "lab": set(),
    "train": {
        *("planners", "cost", "runtime", "comm", "storage", "models", "nn", "data", "optim", "lab"),
        *("profile", "native"),
    },
    "recipes": {"train", "data"},
    "cli": {"train", "planners", "cost", "comm", "data", "models", "nn", "lab", "profile"},
}
NO_PROCESS_GROUPS = {
    *WORDS,
    *("cost", "planners", "nn", "optim", "models", "data", "profile", "storage", "lab"),
    "native",
}
MAX_LINES = 600


def part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path, *, relative: bool = False) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert relative or node.level == 0, f"{path} has a relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def sources() -> list[Path]:
    found = [p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py"]
    assert len(found) > 40
    return found


def test_imports_only_point_down() -> None:
    for path in sources():
        here = part(path)
        allowed = WORDS | {here} | MAY_IMPORT.get(here, set())
        used = {n.split(".")[1] for n in imported(path) if n.startswith("rowmesh.")}
        assert used <= allowed, f"{path} may not import {sorted(used - allowed)}"


def test_benchmarks_and_papers_stand_on_the_package_and_papers_on_the_harness() -> None:
    """Nothing of rowmesh imports either; a benchmark no paper; a paper of benchmarks the harness,
    and of papers its own."""
    for path in sources():
        used = {name.partition(".")[0] for name in imported(path)}
        assert not used & {"benchmarks", "harness", "papers"}, f"{path} imports {used}"
    for path in (REPOSITORY / "benchmarks").rglob("*.py"):
        assert not [n for n in imported(path, relative=True) if n.startswith("papers")], path
    papers = list((REPOSITORY / "papers").rglob("*.py"))
    assert len(papers) > 10
    for path in papers:
        own = f"papers.{path.parent.name}."
        for name in imported(path):
            assert not name.startswith("papers.") or name.startswith(own), f"{path}: {name}"
            assert not name.startswith("benchmarks.") or ".harness" in name, f"{path}: {name}"


def test_every_paper_has_a_page_a_run_and_reports() -> None:
    folders = [path for path in (REPOSITORY / "papers").iterdir() if (path / "run.py").exists()]
    assert {path.name for path in folders} == {"flexshard", "neo", "p2res", "two_d"}
    for folder in folders:
        page = (folder / "README.md").read_text()
        assert "\nPaper: " in page, "the paper and what it claims"
        assert "\n## Limits" in page
        assert f"python -m papers {folder.name}" in page
        assert list((folder / "reports").glob("*.md"))


def test_planning_and_models_never_touch_process_groups() -> None:
    for path in sources():
        if part(path) in NO_PROCESS_GROUPS:
            used = [n for n in imported(path) if n.startswith("torch.distributed")]
            assert not used, f"{path} imports {used}"


def test_one_file_makes_process_groups() -> None:
    makers = [
        p.name for p in sources() if re.search(r"new_group|init_process_group", p.read_text())
    ]
    assert makers == ["mesh.py"]


def test_files_stay_short() -> None:
    found = [*sources(), *ROOT.rglob("*.c")]
    lengths = {p: len(p.read_text().splitlines()) for p in found}
    assert not {p: n for p, n in lengths.items() if n > MAX_LINES}, "split these by concept"


def test_public_names_exist_and_are_sorted() -> None:
    names = rowmesh.__all__
    assert all(hasattr(rowmesh, name) for name in names)
    assert len(set(names)) == len(names)
    assert len(names) <= 50, "the public API is small"


def test_documents_name_files_that_exist() -> None:
    folders = [REPOSITORY / name for name in ("docs", "papers", "benchmarks")]
    for page in [REPOSITORY / "README.md", *(p for f in folders for p in f.rglob("*.md"))]:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
        for name in re.findall(r"`((?:src|tests|docs|benchmarks|papers|examples)/[\w/.]+)`", text):
            assert (REPOSITORY / name).exists(), f"{page.name} names {name}"


def test_readmes_one_line_installs_what_readme_uses_under_the_constraint() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = re.fullmatch(r"rowmesh\[(.+)\]", extras["all"][0])
    assert named is not None
    assert set(named[1].split(",")) == set(extras) - {"all", "dev"}
    first = re.search(r"```\n(pip install .+)\n", (REPOSITORY / "README.md").read_text())
    assert first is not None
    assert first[1] == "pip install -c constraints.txt -e '.[all]'"
    assert (REPOSITORY / "constraints.txt").read_text() == "torch==2.13.0\n"
