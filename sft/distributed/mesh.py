"""Mesh of ranks: number of replicas, number of bands, and the position of this rank.

``sft.compile(mesh=...)`` takes a ``torch.distributed.device_mesh.DeviceMesh`` with dimensions called ``"replica"`` and ``"band"``, in this
order; one of them may be omitted. Ranks along ``"band"`` share one image, ranks along ``"replica"`` have images of their own. A pair of
numbers plans without processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sft.common.errors import InputError, typed

__all__ = ["LiveMesh", "MeshShape", "refuse_sinks_on_mesh", "resolve_mesh"]

_MESH_DIM_NAMES = ("replica", "band")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Extents of a mesh, enough to plan without processes.

    Attributes:
        num_replicas: images that are processed at once.
        num_bands: ranks that share one image.
    """

    num_replicas: int = 1
    num_bands: int = 1

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.num_bands < 1:
            raise InputError(f"a mesh of {self.num_replicas} x {self.num_bands} ranks; both numbers must be positive")

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.num_replicas * self.num_bands


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveMesh:
    """A mesh of running processes, as seen by one of them.

    Attributes:
        shape: its extents.
        replica: index of this rank's replica.
        band: index of this rank's band.
        ranks: the global ranks, replica by replica, band by band.
        timeout: longest wait for another rank.
    """

    shape: MeshShape
    replica: int
    band: int
    ranks: tuple[int, ...]
    timeout: timedelta


def resolve_mesh(mesh: Any, timeout: timedelta) -> LiveMesh | MeshShape | None:
    """Convert the argument ``mesh`` of ``sft.compile``.

    Raises:
        InputError: it is not a mesh with these dimensions, or this process is not in it.
    """
    if mesh is None or isinstance(mesh, MeshShape):
        return mesh
    if isinstance(mesh, tuple) and len(mesh) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in mesh):
        return MeshShape(num_replicas=mesh[0], num_bands=mesh[1])
    if not dist.is_available():
        raise InputError("mesh: this build of torch has no torch.distributed; leave mesh out")
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise InputError(
            f"mesh is {typed(mesh)}; give a DeviceMesh: init_device_mesh(device_type, (replicas, bands), "
            "mesh_dim_names=('replica', 'band')), or a pair (replicas, bands) to plan only"
        )
    names = mesh.mesh_dim_names or ()
    if not names or tuple(name for name in _MESH_DIM_NAMES if name in names) != tuple(names):
        raise InputError(
            f"mesh has dimensions {names or 'without names'}; name them 'replica' and 'band', in this order: "
            "init_device_mesh(device_type, (replicas, bands), mesh_dim_names=('replica', 'band'))"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise InputError(f"this process is not in the mesh (ranks {mesh.mesh.flatten().tolist()}); compile on its ranks only")
    extents = dict(zip(names, mesh.mesh.shape, strict=True))
    index = dict(zip(names, coordinate, strict=True))
    return LiveMesh(
        shape=MeshShape(num_replicas=int(extents.get("replica", 1)), num_bands=int(extents.get("band", 1))),
        replica=int(index.get("replica", 0)),
        band=int(index.get("band", 0)),
        ranks=tuple(int(rank) for rank in mesh.mesh.flatten().tolist()),
        timeout=timeout,
    )


def refuse_sinks_on_mesh(input_grad: Any) -> None:
    """Refuse sinks for an input's gradient: its rows at the borders of bands are sums over ranks.

    Raises:
        InputError: a sink is given.
    """
    if input_grad is not None:
        raise InputError("input_grad is for one device; with mesh give a tensor that requires grad, whose .grad is complete on every rank")
