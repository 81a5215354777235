"""Communication: the mesh, its lanes, exchanges on them, the ledger, and the failure protocol."""

from rowmesh.comm.ledger import Ledger
from rowmesh.comm.mesh import Mesh, init_mesh

__all__ = ["Ledger", "Mesh", "init_mesh"]
