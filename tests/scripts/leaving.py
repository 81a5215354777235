"""Ranks whose last act is to send: to one that receives late, or to ranks that leave as well."""

import os
import sys
import time
from pathlib import Path

import torch

import rowmesh as rm
from rowmesh.comm.exchange import Lane

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
SIZE = 1 << 20  # more than a connection holds


def main() -> None:
    rm.init_mesh(timeout_s=30.0, shared_memory=False).close()  # what it left is not the next one's
    mesh = rm.init_mesh(timeout_s=30.0, shared_memory=HOW == "full")
    channel, peer = mesh.wire.channel("test", Lane.ROWS), 1 - mesh.rank
    sent = torch.full((SIZE,), float(mesh.rank))
    found = torch.zeros(SIZE)
    mesh.total(0)
    if HOW == "late":
        if mesh.rank == 0:
            channel.post(1, sends=[(1, sent)], receives=(), edge=None)
        else:
            time.sleep(1.0)
            channel.post(1, sends=(), receives=[(0, found)], edge=None).wait()
            assert not found.any()
            (FOLDER / "received").touch()
    elif HOW == "nobody":
        channel.post(1, sends=[(peer, sent)], receives=(), edge=None)
    else:  # more than shared memory holds; receives that nobody waits for
        assert mesh.wire.segment is not None
        for number in range(mesh.wire.segment.end.arena_bytes // (4 * SIZE) + 2):
            receives = [(peer, torch.zeros(SIZE))]
            channel.post(number, sends=[(peer, sent)], receives=receives, edge=None)
        assert mesh.wire.segment.num_by_gloo
        mesh.total(0)  # a rank that leaves takes what it has posted
    (FOLDER / f"ending-{os.environ['RANK']}").write_text(str(time.time()))


if __name__ == "__main__":
    main()
