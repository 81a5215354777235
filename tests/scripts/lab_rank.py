"""A rank without torch: says who it is; the rank named by the first argument fails.

It fails once the others have spoken: torchrun ends the ranks beside one that failed, and they may
not even have begun.

lab_rank.py [RANK CODE FOLDER]
"""

import os
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "TB_HOST")
print(" ".join(f"{name}={os.environ[name]}" for name in names))
print(f"rank {rank} says hello", file=sys.stderr)
if sys.argv[1:]:
    fails, code, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    sys.stdout.flush()
    (folder / f"spoken{rank}").touch()
    if rank == fails:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("spoken*"))) < int(os.environ["WORLD_SIZE"]):
            assert time.monotonic() < deadline, "the others never spoke"
            time.sleep(0.02)
        print(f"rank {rank} has had enough", file=sys.stderr)
        raise SystemExit(code)
