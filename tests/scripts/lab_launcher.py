"""A process that opens a lab with a program in each host and then waits to be killed.

Leaves out `rowmesh/__init__`, and with it torch: the lab needs neither, and starts at once.
"""

import subprocess
import sys
import time
import types
from pathlib import Path

package = types.ModuleType("rowmesh")
package.__path__ = [str(Path(__file__).parents[2] / "src" / "rowmesh")]
sys.modules["rowmesh"] = package

from rowmesh.lab import Lab  # noqa: E402 - after the stand-in for the package

assert "torch" not in sys.modules

# what torchrun does: a child in a session of its own, out of reach of the parent's group
DETACHED = "setsid sleep 600 & echo started; exec sleep 600"

with Lab(2, rate="100mbit") as lab:
    for host in range(2):
        child = lab.spawn(host, ["sh", "-c", DETACHED], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
    print(lab.tag, flush=True)
    time.sleep(600)
