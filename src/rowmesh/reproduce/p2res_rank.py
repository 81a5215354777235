"""A rank of `measure_p2res`: rank 0 prints a line of JSON for every curve."""

import json
import sys

from rowmesh.comm.mesh import init_mesh
from rowmesh.reproduce.p2res import settings_of
from rowmesh.reproduce.sweep import sweep
from rowmesh.train.calibrate import calibrate
from rowmesh.train.launch import settle_rank

__all__: list[str] = []


def main() -> None:
    """Calibrate, then curve after curve."""
    settle_rank()
    settings = settings_of(json.loads(sys.argv[1]))
    with init_mesh() as mesh:
        calibration = calibrate(settings[0].config, mesh)
        for setting in settings:
            found = sweep(setting, mesh, calibration)
            if mesh.rank == 0:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
