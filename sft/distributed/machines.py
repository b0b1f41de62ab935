"""Machines of a rank: simulated on byte counts, and real on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sft.common.errors import InternalError
from sft.distributed.communicator import CommQueue, Communicator, RowExchange
from sft.distributed.merge_statistics import merge_statistics
from sft.distributed.transport import Message, RankGroup, RankTraffic, Topic
from sft.planner.projection import TracingMachine
from sft.runtime.machine import Buffer
from sft.runtime.simulated_machine import SimulatedBuffer
from sft.torch_runtime.machine import TorchMachine

__all__ = ["BandTorchMachine", "BandTracingMachine", "CountingTransport", "memory_order_view"]


@dataclass(slots=True)
class CountingTransport:
    """A transport without peers that only counts the bytes."""

    traffic: RankTraffic = field(default_factory=RankTraffic)

    def post(self, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> int:
        return 0

    def wait(self, ticket: int) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class BandTracingMachine(TracingMachine):
    """Simulated machine of a rank; it records a trace of the schedule.

    Attributes:
        comm: the communicator of the rank.
        comm_queue: communication to do between strips.
        row_exchanges: pending exchanges of rows.
    """

    comm: Communicator
    comm_queue: CommQueue = field(default_factory=CommQueue)
    row_exchanges: dict[tuple[str, bool], RowExchange] = field(default_factory=dict)

    def scale(self, handle: Buffer, factor: Buffer) -> None:
        """Writes data without an allocation."""

    def flat(self, handle: Buffer, start: int, length: int) -> SimulatedBuffer:
        assert isinstance(handle, SimulatedBuffer)
        return handle.view()

    def merge(self, kind: str, parts: Sequence[Buffer], largest: bool, scratch_bytes: int) -> None:
        self.memory.record_peak(scratch_bytes)

    def synchronized_share(self, moments: Buffer, num_elements: int) -> SimulatedBuffer:
        return SimulatedBuffer(self.memory, moments.num_bytes if moments is not None else 0)


@dataclass(slots=True, kw_only=True)
class BandTorchMachine(TorchMachine):
    """Torch machine of a rank.

    Attributes:
        comm: the communicator of the rank.
        comm_queue: communication to do between strips.
        row_exchanges: pending exchanges of rows.
    """

    comm: Communicator
    comm_queue: CommQueue = field(default_factory=CommQueue)
    row_exchanges: dict[tuple[str, bool], RowExchange] = field(default_factory=dict)

    def scale(self, handle: Buffer, factor: Buffer) -> None:
        handle.mul_(factor)

    def flat(self, handle: Buffer, start: int, length: int) -> torch.Tensor:
        return memory_order_view(handle).view(-1).narrow(0, start, length)

    def merge(self, kind: str, parts: Sequence[Buffer], largest: bool, scratch_bytes: int) -> None:
        merge_statistics(kind, parts, largest=largest)

    def synchronized_share(self, moments: Buffer, num_elements: int) -> torch.Tensor:
        fraction: torch.Tensor = num_elements / moments[..., 2:]
        return fraction


def memory_order_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions in memory order, as a contiguous view.

    Raises:
        InternalError: its memory is not contiguous.
    """
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim] != 1), reverse=True)
    view = tensor.permute(order)
    if not view.is_contiguous():
        raise InternalError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous in any order of its dimensions"
        )
    return view
