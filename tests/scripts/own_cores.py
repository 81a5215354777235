"""A rank that prints what its computing, a communication and a gloo thread may run on."""

import os
import sys
from pathlib import Path

from rowmesh import init_mesh


def main() -> None:
    before = os.sched_getaffinity(0)
    with init_mesh() as mesh:
        own = os.sched_getaffinity(0)
        free = mesh.later("test", lambda: os.sched_getaffinity(0), of=mesh.wire).result()
        bound = [t for t in Path("/proc/self/task").iterdir() if cores_of(t) != before]
    after = os.sched_getaffinity(0)
    print(sorted(own), free == before, len(bound), after == before, file=sys.stdout)


def cores_of(thread: Path) -> set[int]:
    return os.sched_getaffinity(int(thread.name))


if __name__ == "__main__":
    main()
