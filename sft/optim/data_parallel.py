"""Ranks that train one model, each on samples of its own: what an optimizer of streamed weights says to the others.

Each rank has all weights, and of every parameter a *share*: as many of its elements as any other rank, in the order of memory. It receives
the gradients of its share from all ranks, takes their mean, updates its share with the state that only it has, and sends the result to the
others. That is as many bytes as an all-reduce of the gradients, and a rank keeps and computes only its part of the optimizer (the first
stage of ZeRO: Rajbhandari et al., 2020). An update looks at one element at a time, so a share of it is exact.

Sums are taken in the order of the ranks, by one of them, so all end up with the same bits.
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
    """One rank among others, or alone.

    Args:
        group: a process group of ``torch.distributed``; None for a rank that is alone.
        device: where gradients and weights are when they are sent.
        timeout: how long to wait for another rank.

    Raises:
        InputError: this process is not in the group.
    """

    def __init__(self, group: Any, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        self.count, self.place = 1, 0
        self._link: ProcessTransport | None = None
        self._is_guarded = False
        if group is None:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        if dist.get_rank() not in ranks:
            raise InputError(
                f"this process (rank {dist.get_rank()}) is not in the group of ranks {ranks}; make the optimizer on these only"
            )
        self.count, self.place = len(ranks), ranks.index(dist.get_rank())
        if self.count > 1:
            self._link = ProcessTransport(ranks, {"mesh": tuple(range(self.count))}, timeout, device, "optimizer")

    def share_of(self, num_elements: int, place: int | None = None) -> tuple[int, int]:
        """The first element of a rank's share, and the one behind its last."""
        length = -(-num_elements // self.count)
        start = min(num_elements, (self.place if place is None else place) * length)
        return start, min(num_elements, start + length)

    def shape_of_share(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's share; that of the whole where the rank is alone."""
        start, stop = self.share_of(math.prod(shape))
        return shape if self.count == 1 else (stop - start,)

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's share of a tensor, as a view."""
        return tensor if self.count == 1 else self._part(tensor, self.place)

    def _part(self, tensor: Tensor, place: int) -> Tensor:
        start, stop = self.share_of(tensor.numel(), place)
        return tensor.view(-1)[start:stop]

    def rounds(self) -> Iterator[tuple[int, int]]:
        """Whom to send to and whom to receive from, round by round."""
        for distance in range(1, self.count):
            yield (self.place + distance) % self.count, (self.place - distance) % self.count

    def swap(self, send: tuple[int, Tensor], receive: tuple[int, Tensor]) -> None:
        """Send to one rank while receiving from another."""
        assert self._link is not None
        messages = [Message(send[0], send[1], is_sent=True), Message(receive[0], receive[1], is_sent=False)]
        self._link.wait(self._link.post("mesh", "parameters", messages))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """What fails inside fails on all ranks.

        Raises:
            RankError: another rank failed, or does not answer.
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

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, in the order of the ranks."""
        return [tensor] if self._link is None else self._link.all_gather("mesh", tensor)

    def numbers(self, own: Sequence[float]) -> list[list[float]]:
        """Everybody's numbers, in the order of the ranks."""
        if self._link is None:
            return [list(own)]
        return [found.tolist() for found in self.gathered(torch.tensor(own, dtype=torch.float64, device=self.device))]

    def settle(self) -> None:
        """Wait until all ranks have come this far."""
        self.numbers([0.0])

    def agree(self, what: Any, remedy: str) -> None:
        """Make sure that all ranks have, or do, the same.

        Raises:
            InputError: they do not.
        """
        if self._link is None:
            return
        digest = what if isinstance(what, bytes) else hashlib.sha256(repr(what).encode()).digest()
        own = torch.frombuffer(bytearray(digest[:8]), dtype=torch.uint8).to(self.device)
        differing = [place for place, other in enumerate(self.gathered(own)) if not torch.equal(other, own)]
        if differing:
            raise InputError(f"ranks {differing} of the group differ from rank {self.place} of it: {remedy}")

    def staging(self, sizes: Mapping[str, tuple[int, torch.dtype]]) -> ShardStaging:
        """Room for the messages about so many elements of such types."""
        return ShardStaging(self, sizes)

    def staging_bytes(self, sizes: Mapping[str, tuple[int, torch.dtype]]) -> int:
        """What that room takes."""
        if self.count == 1 or not sizes:
            return 0
        share_bytes = sum(-(-number // self.count) * dtype.itemsize for number, dtype in sizes.values())
        # A gradient that is laid out otherwise is copied before parts of it are sent.
        return share_bytes * (self.count + 1) + max(number * dtype.itemsize for number, dtype in sizes.values())

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all ranks."""
        if self.count == 1:
            return
        for tensor in tensors:
            values = {"": tensor if tensor.is_contiguous() else tensor.contiguous()}
            staging = self.staging({"": (tensor.numel(), tensor.dtype)})
            self.own(values[""]).copy_(staging.reduced(values)[""])
            staging.spread(values)
            if values[""] is not tensor:
                tensor.copy_(values[""])

    def whole(self, share: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Tensors of this shape, of which each rank has a share: ``[number, share]`` on the host becomes ``[number, *shape]``."""
        if self.count == 1:
            return share
        length = -(-math.prod(shape) // self.count)
        padded = torch.zeros((share.shape[0], length), dtype=share.dtype, device=self.device)
        padded[:, : share.shape[1]].copy_(share)
        parts = [part.to(share.device) for part in self.gathered(padded)]
        return torch.cat(parts, 1)[:, : math.prod(shape)].reshape(share.shape[0], *shape)


class ShardStaging:
    """Room for messages: one share for each rank to receive, and one to send. Made by :meth:`DataParallelGroup.staging`."""

    def __init__(self, replicas: DataParallelGroup, sizes: Mapping[str, tuple[int, torch.dtype]]) -> None:
        self._replicas = replicas
        count, device = replicas.count, replicas.device
        self._at: dict[str, tuple[torch.dtype, int]] = {}
        lengths: dict[torch.dtype, int] = {}
        for name, (number, dtype) in sizes.items():
            self._at[name] = (dtype, lengths.get(dtype, 0))
            lengths[dtype] = lengths.get(dtype, 0) + -(-number // count)
        used = lengths if count > 1 else {}
        self._arrived = {dtype: torch.zeros((count, length), dtype=dtype, device=device) for dtype, length in used.items()}
        self._sent = {dtype: torch.zeros(length, dtype=dtype, device=device) for dtype, length in used.items()}

    def reduced(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each tensor this rank's share of the mean over all ranks; valid until the next message."""
        replicas = self._replicas
        if replicas.count == 1:
            return dict(tensors)
        for target, source in replicas.rounds():
            self._pack(tensors, target)
            for dtype, sent in self._sent.items():
                replicas.swap((target, sent), (source, self._arrived[dtype][source]))
        self._pack(tensors, replicas.place)
        for dtype, arrived in self._arrived.items():
            arrived[replicas.place].copy_(self._sent[dtype])
            for other in arrived[1:]:
                arrived[0].add_(other)
            arrived[0].div_(replicas.count)
        return {name: self._piece(name, tensor, 0, replicas.place) for name, tensor in tensors.items()}

    def spread(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the other ranks' shares of contiguous tensors with what these ranks have there."""
        replicas = self._replicas
        if replicas.count == 1:
            return
        self._pack(tensors, replicas.place)
        for target, source in replicas.rounds():
            for dtype, sent in self._sent.items():
                replicas.swap((target, sent), (source, self._arrived[dtype][source]))
            for name, tensor in tensors.items():
                replicas._part(tensor, source).copy_(self._piece(name, tensor, source, source))

    def _pack(self, tensors: Mapping[str, Tensor], place: int) -> None:
        """Put a rank's shares into what is sent."""
        for name, tensor in tensors.items():
            part = self._replicas._part(tensor.reshape(-1), place)
            dtype, at = self._at[name]
            self._sent[dtype][at : at + part.numel()].copy_(part)

    def _piece(self, name: str, tensor: Tensor, row: int, place: int) -> Tensor:
        """Where in what has arrived a rank's share of a tensor is."""
        dtype, at = self._at[name]
        start, stop = self._replicas.share_of(tensor.numel(), place)
        return self._arrived[dtype][row, at : at + stop - start]
