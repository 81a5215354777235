"""``python -m papers NAME [options]``; without a name, which papers there are."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.options import one_sentence
from rowmesh.errors import InputError, did_you_mean

HERE = Path(__file__).parent


def papers() -> dict[str, str]:
    """Names, and the titles of their pages."""
    found = sorted(HERE.glob("*/README.md"))
    return {path.parent.name: path.read_text().partition("\n")[0].strip("# ") for path in found}


def main(words: Sequence[str]) -> None:
    """List, or run one; its --out is its name unless said otherwise.

    Raises:
        InputError: If there is no such paper.
    """
    known = papers()
    if not words or words[0] in ("-h", "--help"):
        print("python -m papers NAME [--help, --quick, ...]\n")
        print("\n".join(f"{name:10} {title}" for name, title in known.items()))
        return
    name, *more = words
    if name not in known:
        raise InputError(f"paper {name!r} is unknown{did_you_mean(name, known)}")
    importlib.import_module(f"papers.{name}.run").main(["--out", name, *more])


if __name__ == "__main__":
    with one_sentence():
        main(sys.argv[1:])
