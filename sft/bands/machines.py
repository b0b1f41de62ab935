"""The machines of a rank in a mesh: of byte counts, and of real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sft.bands.comm import Comm, Parcel
from sft.bands.merge import merge
from sft.bands.traffic import Message, Over, Topic, Traffic
from sft.bands.underway import Agenda
from sft.errors import InternalError
from sft.execute.machine import TorchMachine
from sft.plan.laps import LapMachine
from sft.walk.machine import Handle, Phantom

__all__ = ["BandLapMachine", "BandTorchMachine", "CountingLink", "dense"]


@dataclass(slots=True)
class CountingLink:
    """A link to nobody: what goes over it is only counted."""

    traffic: Traffic = field(default_factory=Traffic)

    def post(self, over: Over, topic: Topic, messages: Sequence[Message]) -> int:
        return 0

    def wait(self, ticket: int) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class BandLapMachine(LapMachine):
    """A machine of byte counts that takes down laps.

    Attributes:
        comm: this rank's part in the exchanges.
        agenda: what is to be done between strips.
        parcels: rows that are under way.
    """

    comm: Comm
    agenda: Agenda = field(default_factory=Agenda)
    parcels: dict[tuple[str, bool], Parcel] = field(default_factory=dict)

    def copy(self, target: Handle, source: Handle) -> None:
        pass

    def scale(self, handle: Handle, factor: Handle) -> None:
        pass

    def flat(self, handle: Handle, start: int, length: int) -> Phantom:
        assert isinstance(handle, Phantom)
        return handle.view()

    def merge(self, kind: str, parts: Sequence[Handle], largest: bool, scratch_bytes: int) -> None:
        self.meter.spike(scratch_bytes)

    def synchronized_share(self, moments: Handle, num_elements: int) -> Phantom:
        return Phantom(self.meter, moments.num_bytes if moments is not None else 0)


@dataclass(slots=True, kw_only=True)
class BandTorchMachine(TorchMachine):
    """A machine of real tensors.

    Attributes:
        comm: this rank's part in the exchanges.
        agenda: what is to be done between strips.
        parcels: rows that are under way.
    """

    comm: Comm
    agenda: Agenda = field(default_factory=Agenda)
    parcels: dict[tuple[str, bool], Parcel] = field(default_factory=dict)

    def copy(self, target: Handle, source: Handle) -> None:
        target.copy_(source)

    def scale(self, handle: Handle, factor: Handle) -> None:
        handle.mul_(factor)

    def flat(self, handle: Handle, start: int, length: int) -> torch.Tensor:
        return dense(handle).view(-1).narrow(0, start, length)

    def merge(self, kind: str, parts: Sequence[Handle], largest: bool, scratch_bytes: int) -> None:
        merge(kind, parts, largest=largest)

    def synchronized_share(self, moments: Handle, num_elements: int) -> torch.Tensor:
        share: torch.Tensor = num_elements / moments[..., 2:]
        return share


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions in the order of its memory, contiguous, as a view.

    Raises:
        InternalError: it is not one piece of memory.
    """
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim] != 1), reverse=True)
    found = tensor.permute(order)
    if not found.is_contiguous():
        raise InternalError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not one piece of memory")
    return found
