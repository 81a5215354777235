"""A rank of `measure_speed`: rank 0 prints a line of JSON."""

import json
import sys
from typing import Any

from rowmesh.comm.mesh import init_mesh
from rowmesh.reproduce.two_d_speed import Speed, compare_groups, config_of
from rowmesh.train.calibrate import calibrate
from rowmesh.train.launch import settle_rank

__all__: list[str] = []


def main() -> None:
    """Calibrate, then every plan in turn."""
    settle_rank()
    words: dict[str, Any] = json.loads(sys.argv[1])
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in words.items()
    }
    asked = Speed(**fields)
    with init_mesh() as mesh:
        calibration = calibrate(config_of(asked), mesh)
        found = compare_groups(asked, mesh, calibration)
        if mesh.rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
