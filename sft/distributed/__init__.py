"""One image over several ranks: bands of rows, and slides over replicas, on ``torch.distributed``."""

from __future__ import annotations

from sft.distributed.mesh import LiveMesh, MeshShape, resolve_mesh

__all__ = ["LiveMesh", "MeshShape", "resolve_mesh"]
