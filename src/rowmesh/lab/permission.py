"""Whether this machine lets us emulate hosts."""

import contextlib
import os
import sys

from rowmesh.errors import LabError
from rowmesh.lab.iproute import find_program
from rowmesh.lab.network import build_network
from rowmesh.lab.remains import remove
from rowmesh.lab.tags import new_tag

__all__ = ["check_permitted"]


def check_permitted() -> str | None:
    """None if hosts can be emulated here; else why not and what to do, in one sentence.

    Tries it: one host with a shaped link is made and removed, in a few hundredths of a second.
    """
    if not sys.platform.startswith("linux"):
        return f"hosts cannot be emulated on {sys.platform}: it takes Linux's network namespaces"
    lacking = [name for name in ("ip", "tc") if find_program(name) is None]
    if lacking:
        return f"hosts cannot be emulated without {' and '.join(lacking)}: install iproute2"
    tag = new_tag()
    try:
        build_network(tag, hosts=1, bits=10**9)
    except LabError as error:
        way = "run as root"
        if os.geteuid() == 0:
            way = "root needs CAP_SYS_ADMIN and CAP_NET_ADMIN, in a container --privileged"
        return f"hosts cannot be emulated here ({error}): {way}"
    finally:
        with contextlib.suppress(LabError):
            remove(tag)
    return None
