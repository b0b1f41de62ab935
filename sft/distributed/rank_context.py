"""A rank of a running mesh: its transport, the agreements between ranks, and the machines that it runs passes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sft.common.errors import InputError
from sft.distributed.communicator import Communicator
from sft.distributed.machines import BandTorchMachine
from sft.distributed.mesh import LiveMesh
from sft.distributed.process_transport import ProcessTransport
from sft.distributed.transport import RankGroup, RankTraffic

__all__ = ["RankContext"]


class RankContext:
    """Communication state of one rank.

    Args:
        mesh: the mesh and this rank's position in it.
        device: device of this rank's tensors.
    """

    def __init__(self, mesh: LiveMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        num_bands = mesh.shape.num_bands
        first = mesh.replica * num_bands
        members: dict[RankGroup, tuple[int, ...]] = {
            "band": tuple(range(first, first + num_bands)),
            "replica": tuple(range(mesh.band, mesh.shape.num_ranks, num_bands)),
            "mesh": tuple(range(mesh.shape.num_ranks)),
        }
        self.transport = ProcessTransport(mesh.ranks, members, mesh.timeout, device, "model")
        self.comm = Communicator(transport=self.transport, shape=mesh.shape, replica=mesh.replica, band=mesh.band)

    @property
    def traffic(self) -> RankTraffic:
        """Bytes that this rank has sent and received in its steps."""
        return self.transport.traffic

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Run the body as a collective: it fails on all ranks if it fails on one, and returns when all ranks have finished it.

        Raises:
            RankError: another rank failed.
        """
        with self.transport.propagate_failures():
            yield
            self._all_arrived()

    def barrier(self) -> None:
        """Wait for all ranks. Used before waits of other libraries, which cannot name a missing rank.

        Raises:
            RankError: a rank is missing.
        """
        with self.transport.propagate_failures():
            self._all_arrived()

    def _all_arrived(self) -> None:
        """Wait until all ranks have reached this call."""
        self.transport.all_gather("mesh", torch.zeros(1, dtype=torch.uint8, device=self.device))

    def machine(self, device: torch.device, **arguments: Any) -> BandTorchMachine:
        """The machine of one pass on this rank; ``arguments`` are those of ``TorchMachine``."""
        return BandTorchMachine(device=device, comm=self.comm, **arguments)

    def check_agreement(self, value: Any, remedy: str) -> None:
        """Check that a value (inputs, modes, decisions) is the same on all bands of this image.

        Raises:
            InputError: it differs.
        """
        digest = hashlib.sha256(repr(value).encode()).digest()[:8]
        local = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.device)
        differing = [band for band, remote in enumerate(self.transport.all_gather("band", local)) if not torch.equal(remote, local)]
        if differing:
            raise InputError(f"bands {differing} of this image differ from band {self.mesh.band} ({value}); {remedy}")

    def minimum(self, value: int) -> int:
        """The least of the values of all ranks of the mesh."""
        local = torch.tensor([value], dtype=torch.int64, device=self.device)
        return min(int(remote) for remote in self.transport.all_gather("mesh", local))

    def broadcast_seed(self, seed: torch.Tensor) -> torch.Tensor:
        """The seed of the first band of this image, so that all bands draw rows of one mask."""
        shared = seed.to(self.device)
        self.transport.broadcast("band", shared)
        return shared.to(seed.device)

    def broadcast_buffers(self, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Next values of the buffers, on all ranks those of the first replica's images; returns when all ranks have arrived."""
        values = buffers
        if self.mesh.shape.num_replicas > 1:
            values = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in buffers]
            for tensor in values:
                self.transport.broadcast("mesh", tensor)
        self._all_arrived()
        return values
