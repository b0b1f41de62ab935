"""Data parallelism for optimizers of streamed weights: ranks train one model, each on its own samples.

Each rank has all weights and owns a *share* of every parameter: a contiguous range of its elements in memory order, of equal length on all
ranks. A rank receives the gradients of its share from all ranks, averages them, updates its share with the state that only it keeps, and
sends the result to the other ranks. That moves as many bytes as an all-reduce of the gradients, while each rank keeps and computes only
its fraction of the optimizer (the first stage of ZeRO: Rajbhandari et al., 2020). An update is elementwise, so updating a share is exact.

Sums are taken in rank order by one rank each, so all ranks end with the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sft.common.errors import InputError
from sft.distributed.process_transport import ProcessTransport
from sft.distributed.transport import Message

__all__ = ["DataParallelGroup", "ShardStaging"]


class DataParallelGroup:
    """This rank in a group of data-parallel ranks; without a group, the only one.

    Args:
        group: a process group of ``torch.distributed``; ``None`` for a single rank.
        device: device of gradients and weights when they are sent.
        timeout: how long to wait for another rank.

    Attributes:
        num_ranks: size of the group.
        rank: position of this rank in it.

    Raises:
        InputError: this process is not in the group.
    """

    def __init__(self, group: Any, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        self.num_ranks, self.rank = 1, 0
        self._link: ProcessTransport | None = None
        self._is_guarded = False
        if group is None:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        if dist.get_rank() not in ranks:
            raise InputError(
                f"this process (rank {dist.get_rank()}) is not in the group of ranks {ranks}; make the optimizer on these only"
            )
        self.num_ranks, self.rank = len(ranks), ranks.index(dist.get_rank())
        if self.num_ranks > 1:
            self._link = ProcessTransport(ranks, {"mesh": tuple(range(self.num_ranks))}, timeout, device, "optimizer")

    def share_of(self, num_elements: int, rank: int | None = None) -> tuple[int, int]:
        """First and last (exclusive) element of a rank's share; by default of this rank's."""
        length = -(-num_elements // self.num_ranks)
        start = min(num_elements, (self.rank if rank is None else rank) * length)
        return start, min(num_elements, start + length)

    def shape_of_share(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this rank's share; the full shape for a single rank."""
        start, stop = self.share_of(math.prod(shape))
        return shape if self.num_ranks == 1 else (stop - start,)

    def local_share(self, tensor: Tensor) -> Tensor:
        """View of this rank's share of a tensor."""
        return tensor if self.num_ranks == 1 else self._share(tensor, self.rank)

    def _share(self, tensor: Tensor, rank: int) -> Tensor:
        start, stop = self.share_of(tensor.numel(), rank)
        return tensor.view(-1)[start:stop]

    def rounds(self) -> Iterator[tuple[int, int]]:
        """Ranks to send to and to receive from, for each round of an all-to-all exchange."""
        for distance in range(1, self.num_ranks):
            yield (self.rank + distance) % self.num_ranks, (self.rank - distance) % self.num_ranks

    def exchange(self, send: tuple[int, Tensor], receive: tuple[int, Tensor]) -> None:
        """Send to one rank while receiving from another."""
        assert self._link is not None
        messages = [Message(send[0], send[1], is_sent=True), Message(receive[0], receive[1], is_sent=False)]
        self._link.wait(self._link.post("mesh", "parameters", messages))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A context in which a failure on one rank raises on all ranks.

        Raises:
            RankError: another rank failed or does not respond.
        """
        if self._link is None or self._is_guarded:
            yield
            return
        self._is_guarded = True
        try:
            with self._link.propagate_failures():
                yield
        finally:
            self._is_guarded = False

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order."""
        return [tensor] if self._link is None else self._link.all_gather("mesh", tensor)

    def all_gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks, in rank order."""
        if self._link is None:
            return [list(values)]
        return [tensor.tolist() for tensor in self.all_gather(torch.tensor(values, dtype=torch.float64, device=self.device))]

    def barrier(self) -> None:
        """Barrier: wait until all ranks have reached this call."""
        self.all_gather_numbers([0.0])

    def agree(self, value: Any, remedy: str) -> None:
        """Check that a value is equal on all ranks.

        Args:
            value: compared by its ``repr``, or a digest of it.
            remedy: last clause of the error message.

        Raises:
            InputError: it differs.
        """
        if self._link is None:
            return
        digest = value if isinstance(value, bytes) else hashlib.sha256(repr(value).encode()).digest()
        prefix = torch.frombuffer(bytearray(digest[:8]), dtype=torch.uint8).to(self.device)
        mismatches = [rank for rank, theirs in enumerate(self.all_gather(prefix)) if not torch.equal(theirs, prefix)]
        if mismatches:
            raise InputError(f"ranks {mismatches} of the group differ from rank {self.rank} of it: {remedy}")

    def staging(self, sizes: Mapping[str, tuple[int, torch.dtype]]) -> ShardStaging:
        """Message buffers for tensors of these numbers of elements and types."""
        return ShardStaging(self, sizes)

    def staging_bytes(self, sizes: Mapping[str, tuple[int, torch.dtype]]) -> int:
        """Bytes of these buffers on the device."""
        if self.num_ranks == 1 or not sizes:
            return 0
        share_bytes = sum(-(-number // self.num_ranks) * dtype.itemsize for number, dtype in sizes.values())
        # A gradient of another memory layout is copied before its shares are sent.
        return share_bytes * (self.num_ranks + 1) + max(number * dtype.itemsize for number, dtype in sizes.values())

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all ranks."""
        if self.num_ranks == 1:
            return
        for tensor in tensors:
            values = {"": tensor if tensor.is_contiguous() else tensor.contiguous()}
            staging = self.staging({"": (tensor.numel(), tensor.dtype)})
            self.local_share(values[""]).copy_(staging.reduce_shares(values)[""])
            staging.spread_shares(values)
            if values[""] is not tensor:
                tensor.copy_(values[""])

    def unshard(self, share: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Assemble full tensors from shares: ``[number, share]`` on the host becomes ``[number, *shape]``."""
        if self.num_ranks == 1:
            return share
        length = -(-math.prod(shape) // self.num_ranks)
        padded = torch.zeros((share.shape[0], length), dtype=share.dtype, device=self.device)
        padded[:, : share.shape[1]].copy_(share)
        shares = [each.to(share.device) for each in self.all_gather(padded)]
        return torch.cat(shares, 1)[:, : math.prod(shape)].reshape(share.shape[0], *shape)


class ShardStaging:
    """Message buffers: one share to receive per rank, and one to send. Made by :meth:`DataParallelGroup.staging`."""

    def __init__(self, group: DataParallelGroup, sizes: Mapping[str, tuple[int, torch.dtype]]) -> None:
        self._group = group
        count, device = group.num_ranks, group.device
        self._offsets: dict[str, tuple[torch.dtype, int]] = {}
        lengths: dict[torch.dtype, int] = {}
        for name, (number, dtype) in sizes.items():
            self._offsets[name] = (dtype, lengths.get(dtype, 0))
            lengths[dtype] = lengths.get(dtype, 0) + -(-number // count)
        used = lengths if count > 1 else {}
        self._received = {dtype: torch.zeros((count, length), dtype=dtype, device=device) for dtype, length in used.items()}
        self._sent = {dtype: torch.zeros(length, dtype=dtype, device=device) for dtype, length in used.items()}

    def reduce_shares(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reduce-scatter: this rank's share of the mean of each tensor over all ranks; valid until the next message."""
        group = self._group
        if group.num_ranks == 1:
            return dict(tensors)
        for target, source in group.rounds():
            self._pack(tensors, target)
            for dtype, sent in self._sent.items():
                group.exchange((target, sent), (source, self._received[dtype][source]))
        self._pack(tensors, group.rank)
        for dtype, received in self._received.items():
            received[group.rank].copy_(self._sent[dtype])
            for other in received[1:]:
                received[0].add_(other)
            received[0].div_(group.num_ranks)
        return {name: self._received_share(name, tensor, 0, group.rank) for name, tensor in tensors.items()}

    def spread_shares(self, tensors: Mapping[str, Tensor]) -> None:
        """All-gather in place: fill the other ranks' shares of contiguous tensors with their values."""
        group = self._group
        if group.num_ranks == 1:
            return
        self._pack(tensors, group.rank)
        for target, source in group.rounds():
            for dtype, sent in self._sent.items():
                group.exchange((target, sent), (source, self._received[dtype][source]))
            for name, tensor in tensors.items():
                group._share(tensor, source).copy_(self._received_share(name, tensor, source, source))

    def _pack(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Copy a rank's shares into the send buffers."""
        for name, tensor in tensors.items():
            share = self._group._share(tensor.reshape(-1), rank)
            dtype, offset = self._offsets[name]
            self._sent[dtype][offset : offset + share.numel()].copy_(share)

    def _received_share(self, name: str, tensor: Tensor, row: int, rank: int) -> Tensor:
        """A rank's share of a tensor in a row of the receive buffers."""
        dtype, offset = self._offsets[name]
        start, stop = self._group.share_of(tensor.numel(), rank)
        return self._received[dtype][row, offset : offset + stop - start]
