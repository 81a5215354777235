"""``python -m tests.golden``: say which golden cases differ; ``--write`` stores what is found.

``--draw`` draws the cases anew first; without it the stored ones are kept.
"""

import argparse
import sys

from tests import golden


def main() -> None:
    """Compare, and write if told to."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store what is found")
    parser.add_argument("--draw", action="store_true", help="draw the cases anew")
    chosen = parser.parse_args()
    before = golden.read() if golden.FILE.exists() else []
    cases = golden.draw() if chosen.draw else [case for case, _ in before]
    known = {repr(case) + str(case.ids): values for case, values in before}
    rows, differ = [], 0
    for number, case in enumerate(cases):
        values = golden.found(case)
        rows.append((case, values))
        expected = known.get(repr(case) + str(case.ids), {})
        parts = [key for key in values if expected.get(key) != values[key]]
        differ += bool(parts)
        if parts and expected:
            print(f"case {number}, world {case.world} x {case.hosts}: {', '.join(parts)}")
    print(f"{len(rows)} cases, {differ} differ or are new")
    if chosen.write:
        golden.write(rows)
    elif differ:
        sys.exit(1)


if __name__ == "__main__":
    main()
