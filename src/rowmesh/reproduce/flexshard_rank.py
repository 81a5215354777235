"""A rank of `measure_flexshard`: rank 0 prints a line of JSON for every table."""

import json
import sys
from typing import Any

from rowmesh.comm.mesh import init_mesh
from rowmesh.reproduce.flexshard import FlexShard, compare_tiers, config_of
from rowmesh.train.calibrate import calibrate
from rowmesh.train.launch import settle_rank

__all__: list[str] = []


def main() -> None:
    """Calibrate, then table after table."""
    settle_rank()
    words: dict[str, Any] = json.loads(sys.argv[1])
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in words.items()
    }
    asked = FlexShard(**fields)
    with init_mesh() as mesh:
        calibration = calibrate(config_of(asked), mesh)
        for dedup in asked.dedups:
            found = compare_tiers(asked, dedup, mesh, calibration)
            if mesh.rank == 0:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
