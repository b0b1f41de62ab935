"""The machines of a rank in a mesh: of byte counts, and of real tensors."""

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
    """A link to nobody: what goes over it is only counted."""

    traffic: RankTraffic = field(default_factory=RankTraffic)

    def post(self, over: RankGroup, topic: Topic, messages: Sequence[Message]) -> int:
        return 0

    def wait(self, ticket: int) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class BandTracingMachine(TracingMachine):
    """A machine of byte counts that takes down laps.

    Attributes:
        comm: this rank's part in the exchanges.
        agenda: what is to be done between strips.
        row_exchanges: rows that are under way.
    """

    comm: Communicator
    comm_queue: CommQueue = field(default_factory=CommQueue)
    row_exchanges: dict[tuple[str, bool], RowExchange] = field(default_factory=dict)

    def scale(self, handle: Buffer, factor: Buffer) -> None:
        """Writes data and allocates nothing."""

    def flat(self, handle: Buffer, start: int, length: int) -> SimulatedBuffer:
        assert isinstance(handle, SimulatedBuffer)
        return handle.view()

    def merge(self, kind: str, parts: Sequence[Buffer], largest: bool, scratch_bytes: int) -> None:
        self.memory.record_peak(scratch_bytes)

    def synchronized_share(self, moments: Buffer, num_elements: int) -> SimulatedBuffer:
        return SimulatedBuffer(self.memory, moments.num_bytes if moments is not None else 0)


@dataclass(slots=True, kw_only=True)
class BandTorchMachine(TorchMachine):
    """A machine of real tensors.

    Attributes:
        comm: this rank's part in the exchanges.
        agenda: what is to be done between strips.
        row_exchanges: rows that are under way.
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
        share: torch.Tensor = num_elements / moments[..., 2:]
        return share


def memory_order_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions in the order of its memory, contiguous, as a view.

    Raises:
        InternalError: it is not one piece of memory.
    """
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim] != 1), reverse=True)
    found = tensor.permute(order)
    if not found.is_contiguous():
        raise InternalError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not one piece of memory")
    return found
