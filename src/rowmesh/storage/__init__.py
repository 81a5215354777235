"""Row stores: where a rank keeps the rows it holds."""

from rowmesh.storage.ram import allocate_rows, keep_freed_memory

__all__ = ["allocate_rows", "keep_freed_memory"]
