"""What races, ablations and papers share: turns, cells, flags, figures, tables; and `papers`."""

import itertools
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from benchmarks.harness import options
from benchmarks.harness.cells import Cells, find, store
from benchmarks.harness.figures import ratio
from benchmarks.harness.hosts import measure_on_hosts
from benchmarks.harness.options import Report, parse, parse_shape
from benchmarks.harness.pages import check_out, table, write_page
from benchmarks.harness.turns import turns
from papers.__main__ import main
from papers.p2res.curves import Curves
from rowmesh.errors import InputError, PeerError
from tests.processes import ROOT, finish, start


def test_turns_go_forward_and_then_backward() -> None:
    said: list[str] = []
    rounds = itertools.islice(turns(["a", "b", "c"], lambda arm: said.append(arm) or len(said)), 3)
    assert list(rounds) == [
        {"a": 1, "b": 2, "c": 3},
        {"c": 4, "b": 5, "a": 6},
        {"a": 7, "b": 8, "c": 9},
    ]
    assert "".join(said) == "abccbaabc"


def test_a_ratio_is_taken_round_by_round() -> None:
    found = ratio([2.0, 4.0, 8.0, 16.0, 32.0, 64.0], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert found.told(2) == "2.00 [2.00, 2.00]"
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


# Cells


def test_a_cell_is_found_by_all_it_depends_on(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cell.json"
    assert find(path, {"lr": 1}) is None
    store(path, {"ne": 0.5}, asked={"lr": 1})
    assert find(path, {"lr": 1}) == {"ne": 0.5}
    assert find(path, {"lr": 2}) is None
    path.write_text('{"asked": ')
    assert find(path, {"lr": 1}) is None


def test_cells_of_this_code_and_machine_are_found_and_others_named(tmp_path: Path) -> None:
    cells = Cells.of(tmp_path / "r", {"rounds": 6})
    assert set(cells.asked) == {"code", "machine", "settings"}
    assert cells.every() == []
    cells.store("1x2", {"ms": 3})
    late = Cells(cells.folder, cells.asked, {"commit": "abc", "date": "9999-01-01"})
    late.store("4x1", {"ms": 4})
    assert re.match(r"2.* to 9999-01-01; commit \w.*, abc; .* cores; rounds=6\.$", late.header())
    assert Cells.of(tmp_path / "r", {"rounds": 6}).find("1x2") == {"ms": 3}
    with pytest.raises(InputError, match=r"1x2\.json is of other settings .*--again"):
        Cells.of(tmp_path / "r", {"rounds": 7}).find("1x2")
    (tmp_path / "r/1x2.json").write_text("[]")
    with pytest.raises(InputError, match="is no result of this kind"):
        cells.find("1x2")


def test_a_stored_experiment_needs_no_hosts(tmp_path: Path) -> None:
    asked = Curves(shapes=((9, 9),), alphas=(1.0, 1.1), dedup=(True,), rates=("1gbit",))
    cells = Cells.of(tmp_path, asdict(asked))
    for number in range(2):
        cells.store(f"9x9_1gbit_{number}", {"case": number})
    told: list[str] = []
    found = measure_on_hosts(
        asked, cells, again=False, describe=lambda case: told.append(case["case"]) or ""
    )
    assert list(found) == [{"case": 0}, {"case": 1}]
    assert told == [0, 1]


# Flags


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One of each kind of field."""

    shapes: Annotated[tuple[tuple[int, int], ...], "hosts"] = ((2, 2),)
    dedup: Annotated[tuple[bool, ...], "distinct rows"] = (False, True)
    seeds: Annotated[tuple[int, ...], "data sets"] = (1, 2)
    parts: Annotated[tuple[str, ...], "what", ("speed", "bytes")] = ("speed",)
    held_out: Annotated[float, "50 % of it"] = 0.5
    data: Annotated[Path, "a folder"] = Path("here")
    fast: Annotated[bool, "a switch"] = False


def read(*words: str) -> Any:
    return parse(words, Report, Settings, command="it", about=None, quick={"seeds": (9,)})


def test_a_dataclass_says_its_flags() -> None:
    report, found = read("--out", "x")
    assert (report.out, found) == (Path("x"), Settings())
    words = "--shapes 4x1,1x2 --dedup on --seeds 11-13,7 --parts bytes,speed --held-out 1e-3 --fast"
    _, found = read(*words.split(), "--data", "a/b")
    assert found == Settings(
        shapes=((4, 1), (1, 2)),
        dedup=(True,),
        seeds=(11, 12, 13, 7),
        parts=("bytes", "speed"),
        held_out=1e-3,
        data=Path("a/b"),
        fast=True,
    )


def test_quick_changes_defaults_and_not_what_is_said() -> None:
    assert read("--quick")[1].seeds == (9,)
    assert read("--quick", "--seeds", "3")[1].seeds == (3,)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--seed 1", "unrecognized arguments: --seed 1; --help lists the flags"),
        ("--parts sped", "--parts: 'sped' is unknown: did you mean 'speed'?"),
        ("--dedup yes", "--dedup 'yes': say on, off, or off,on"),
        ("--seeds 1.5", "--seeds: '1.5' is not a whole number"),
        ("--held-out much", "--held_out: 'much' is not a number"),
        ("--seeds=", "--seeds: '' is not a whole number"),
    ],
)
def test_a_wrong_word_is_named(words: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        read(*words.split())


@pytest.mark.parametrize("word", ["2", "0x1", "2x", "axb"])
def test_a_shape_is_hosts_and_ranks(word: str) -> None:
    assert parse_shape("2x3") == (2, 3)
    with pytest.raises(InputError, match="say hosts x ranks, as 2x2"):
        parse_shape(word)


def test_help_lists_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    told = capsys.readouterr().out
    for words in ("hosts (default 2x2)", "(default off,on)", "50 % of it (default 0.5)"):
        assert words in told


@pytest.mark.parametrize(
    ("error", "code"),
    [(InputError("a\nb"), 2), (PeerError("a b"), 1), (KeyboardInterrupt(), 130)],
)
def test_a_program_ends_with_one_sentence(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, options.one_sentence():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err in ("a b\n", "stopped\n")


# Pages


def test_a_table_has_numbers_at_the_right() -> None:
    assert table(["name", "set", "ms"], [["a", "b", 1]], left=2) == [
        "| name | set | ms |",
        "| --- | --- | --: |",
        "| a | b | 1 |",
    ]


def test_a_page_is_written_with_its_figures_and_picture(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "r.1"
    check_out(out)
    write_page(out, "# page\n\ntext", {"ms": 1}, header="today", picture="<svg/>")
    assert json.loads((tmp_path / "folder/r.1.json").read_text()) == {"ms": 1}
    assert (tmp_path / "folder/r.1.md").read_text() == "# page\n\ntoday\n\ntext"
    assert (tmp_path / "folder/r.1.svg").read_text() == "<svg/>"
    with pytest.raises(InputError, match="cannot make the folder"):
        check_out(tmp_path / "folder/r.1.md" / "r")


# Papers


def test_papers_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    told = capsys.readouterr().out
    assert "p2res      Hot rows on every rank: P2RES\n" in told
    assert "two_d " in told


def test_a_paper_that_is_not_there_ends_with_2_and_one_sentence() -> None:
    code, out, said = finish(start("p2re", module="papers", cwd=ROOT))
    assert (code, out, said) == (2, "", "paper 'p2re' is unknown: did you mean 'p2res'?\n")
