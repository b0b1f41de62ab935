"""``nn.SyncBatchNorm`` in a compiled model: its moments are merged over the images of all replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sft.analysis.ir.graph import Graph
from sft.common.errors import UnsupportedError
from sft.distributed.mesh import LiveMesh, MeshShape

__all__ = ["check_sync_batch_norms", "synchronized_moments", "without_sync_batch_norm"]


class _LocalBatchNorm(nn.modules.batchnorm._BatchNorm):
    """The BatchNorm that replaces a SyncBatchNorm during capture."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def _sync_batch_norms(model: nn.Module) -> dict[str, Any]:
    """SyncBatchNorms of a model by name, also while they are replaced."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is _LocalBatchNorm or (isinstance(module, nn.SyncBatchNorm) and type(module).forward is nn.SyncBatchNorm.forward)
    }


@contextmanager
def without_sync_batch_norm(model: nn.Module) -> Iterator[None]:
    """Replace SyncBatchNorms by BatchNorms inside the context, for capture."""
    modules: list[tuple[nn.Module, type[nn.Module]]] = [(module, module.__class__) for module in _sync_batch_norms(model).values()]
    try:
        for module, _ in modules:
            module.__class__ = _LocalBatchNorm
        yield
    finally:
        for module, original in modules:
            module.__class__ = original


def check_sync_batch_norms(model: nn.Module, mesh: LiveMesh | MeshShape | None) -> None:
    """Refuse SyncBatchNorms over other ranks than those of the mesh.

    Raises:
        UnsupportedError: with the names of the norms.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    problems = []
    for name, module in _sync_batch_norms(model).items():
        ranks = (
            tuple(range(dist.get_world_size()))
            if module.process_group is None
            else tuple(dist.get_process_group_ranks(module.process_group))
        )
        mesh_ranks = mesh.ranks if isinstance(mesh, LiveMesh) else ()
        if module.training and len(ranks) > 1 and sorted(ranks) != sorted(mesh_ranks):
            problems.append(
                f"{name}: SyncBatchNorm over ranks {list(ranks)}, but the mesh has {list(mesh_ranks) or 'none'}; compile with a mesh of "
                "just these ranks, or use BatchNorm"
            )
    if problems:
        raise UnsupportedError(problems)


def synchronized_moments(model: nn.Module, graph: Graph, mesh: LiveMesh | MeshShape) -> frozenset[str]:
    """Names of the moments that are merged over all replicas."""
    shape = mesh.shape if isinstance(mesh, LiveMesh) else mesh
    paths = set(_sync_batch_norms(model))
    if shape.num_replicas == 1:
        return frozenset()
    return frozenset(node.name for node in graph.nodes if node.target == "sft.moments" and node.module_path in paths)
