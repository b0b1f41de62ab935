"""Data and domain parallelism on ``torch.distributed``: bands of rows of one image, and replicas with images of their own."""

from __future__ import annotations

from sft.distributed.mesh import LiveMesh, MeshShape, resolve_mesh

__all__ = ["LiveMesh", "MeshShape", "resolve_mesh"]
