"""A rank of a mesh while it runs: its link, what it agrees on with the others, and its machines."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sft.common.errors import InputError
from sft.distributed.communicator import Communicator
from sft.distributed.link import RankGroup, RankTraffic
from sft.distributed.machines import BandTorchMachine
from sft.distributed.mesh import LiveMesh
from sft.distributed.process_link import ProcessTransport

__all__ = ["RankContext"]

#: Links made so far between the same ranks: all of them count alike, as they call the same models first in the same order.
_num_links: Counter[tuple[int, ...]] = Counter()


class RankContext:
    """One rank among others.

    Args:
        mesh: where it is.
        device: where its tensors are.
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
        name = f"{'-'.join(map(str, mesh.ranks))}/{_num_links[mesh.ranks]}"
        _num_links[mesh.ranks] += 1
        self.link = ProcessTransport(mesh.ranks, members, mesh.timeout, device, name)
        self.comm = Communicator(link=self.link, shape=mesh.shape, replica=mesh.replica, band=mesh.band)

    @property
    def traffic(self) -> RankTraffic:
        """What this rank has sent and received for its steps."""
        return self.link.traffic

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context that fails on all ranks if it fails on one, and ends on none before all are through.

        Raises:
            RankError: another rank failed.
        """
        with self.link.guarded():
            yield
            self._wait()

    def meet(self) -> None:
        """Make sure that all ranks are there, before something waits for them that does not know who is missing.

        Raises:
            RankError: one is not.
        """
        with self.link.guarded():
            self._wait()

    def _wait(self) -> None:
        """Until all ranks are here."""
        self.link.gathered("mesh", torch.zeros(1, dtype=torch.uint8, device=self.device))

    def machine(self, device: torch.device, **parts: Any) -> BandTorchMachine:
        """What runs a pass on this rank, of what a plain machine is made of."""
        return BandTorchMachine(device=device, comm=self.comm, **parts)

    def agree(self, what: Any, remedy: str) -> None:
        """Make sure that all bands of this image are asked the same, or do the same.

        Raises:
            InputError: they are not.
        """
        digest = hashlib.sha256(repr(what).encode()).digest()[:8]
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.device)
        differing = [band for band, other in enumerate(self.link.gathered("band", own)) if not torch.equal(other, own)]
        if differing:
            raise InputError(f"bands {differing} of this image differ from band {self.mesh.band} ({what}); {remedy}")

    def shared_seed(self, seed: torch.Tensor) -> torch.Tensor:
        """The seed of the first rank of this image, so that all bands draw parts of one mask."""
        common = seed.to(self.device)  # on the host itself, which is filled in place
        self.link.broadcast("band", common)
        return common.to(seed.device)

    def settled(self, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        """What buffers are to hold, once all ranks have come this far: the first replica's, whose images' statistics all take."""
        found = buffers
        if self.mesh.shape.num_replicas > 1:
            found = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in buffers]
            for tensor in found:
                self.link.broadcast("mesh", tensor)
        self._wait()
        return found
