"""A rank without torch: says who it is; the rank named by the first argument fails.

lab_rank.py [RANK CODE]
"""

import os
import sys

rank = int(os.environ["RANK"])
names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "TB_HOST")
print(" ".join(f"{name}={os.environ[name]}" for name in names))
print(f"rank {rank} says hello", file=sys.stderr)
if sys.argv[1:] and rank == int(sys.argv[1]):
    print(f"rank {rank} has had enough", file=sys.stderr)
    raise SystemExit(int(sys.argv[2]))
