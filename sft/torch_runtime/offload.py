"""Copies between the device and the host, beside the computation where the device can do that.

A buffer that leaves is emptied, not replaced: its storage gives its bytes back to the allocator and gets new ones later, and all tensors on
it stay what they are. The meter of `sft.measure_peak` sees both, since they are an operator of ours that says that it resizes.

*Streams.* On CUDA each direction has a stream of its own; what orders them is events, never a wait of the host.

- down: the stream waits for an event that the computation records behind whatever made the buffer; a release makes the computation wait for
  the copy, and only then is the storage emptied.
- up: the storage is filled on the computation's stream, whose allocator knows when the block's last user there is through; the stream waits
  for an event recorded behind that. Whoever reads the buffer waits for the copy.

So every buffer is allocated and freed on the computation's stream, and freed only behind a wait for what the other streams do with it:
``record_stream``, which leaves it to the allocator to guess, is not needed. The computation's stream is asked for before another one is
entered, never inside. A part of the slab is given to another copy only behind a wait for the last, too.

On other devices a copy is done when it was begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sft.runtime.offload import HostArena, OffloadedValue
from sft.torch_runtime.host_memory import SlabLease

__all__ = ["HostOffloader", "storage_as_bytes", "upload_stream"]

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_LIBRARY.define("resize_storage_(Tensor(a!) tensor, int num_bytes) -> ()")


def _resize_storage(tensor: Tensor, num_bytes: int) -> None:
    tensor.untyped_storage().resize_(num_bytes)


_LIBRARY.impl("resize_storage_", _resize_storage, "CompositeExplicitAutograd")


@dataclass(frozen=True, slots=True)
class _CopyStreams:
    down: torch.cuda.Stream
    up: torch.cuda.Stream


@cache
def _copy_streams(device: torch.device) -> _CopyStreams:
    return _CopyStreams(torch.cuda.Stream(device), torch.cuda.Stream(device))


def upload_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies from the host to a CUDA device."""
    return _copy_streams(device).up


@dataclass(slots=True)
class HostOffloader:
    """What of a step is on the host.

    Attributes:
        device: where buffers leave.
        lease: where they go.
        exceeds: whether copies that the slab has no room for get memory of their own. A plan's slab is for a backward pass that ends the
            use of what it has read; where the graph is retained, that stays.
    """

    device: torch.device
    lease: SlabLease
    exceeds: bool = False
    _arena: HostArena = field(default_factory=HostArena)
    _overflow: dict[int, Tensor] = field(default_factory=dict)

    def offload(self, target: str, tensors: Sequence[Tensor]) -> OffloadedValue:
        """Begin to copy the storages of these tensors, each once."""
        # Torch keeps one Python object for each storage, for as long as that lives.
        buffers = [storage_as_bytes(tensor) for tensor in {id(tensor.untyped_storage()): tensor for tensor in tensors}.values()]
        sizes = tuple(buffer.numel() for buffer in buffers)
        copy = OffloadedValue(target, buffers, sizes, self._arena.allocate(sum(sizes)))
        if self.exceeds and self.device.type != "meta" and copy.start + copy.num_bytes > self.lease.data.numel():
            self._overflow[copy.start] = torch.empty(copy.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")
        with self._on_copy_stream("down") as stream:
            for buffer, part in self._buffers_with_slab(copy):
                part.copy_(buffer, non_blocking=True)
            copy.offload_done = _record_event(stream)
        return copy

    def release(self, copy: OffloadedValue) -> None:
        """Wait for the copy to the host (and for one from it, if that is going on), and empty the storages."""
        self._wait_copies(copy)
        for buffer in copy.buffers:
            torch.ops.sft.resize_storage_(buffer, 0)
        copy.is_away = True

    def prefetch(self, copy: OffloadedValue) -> None:
        """Fill the storages again, and begin to copy back."""
        for buffer, size in zip(copy.buffers, copy.sizes, strict=True):
            torch.ops.sft.resize_storage_(buffer, size)
        with self._on_copy_stream("up") as stream:
            for buffer, part in self._buffers_with_slab(copy):
                buffer.copy_(part, non_blocking=True)
            copy.prefetch_done = _record_event(stream)
        copy.is_away, copy.is_arriving = False, True

    def wait_prefetch(self, copy: OffloadedValue) -> None:
        """Let the computation wait for the copy back."""
        self._wait_copies(copy)

    def free_offload(self, copy: OffloadedValue) -> None:
        """End the use of a copy: what it touches may go."""
        self._wait_copies(copy)
        copy.buffers.clear()
        self._overflow.pop(copy.start, None)
        self._arena.free(copy.start)

    def quiesce(self) -> None:
        """Let the computation wait for everything, when a step has failed and buffers go that copies may still touch."""
        if self.device.type == "cuda":
            compute, streams = torch.cuda.current_stream(self.device), _copy_streams(self.device)
            compute.wait_stream(streams.down)
            compute.wait_stream(streams.up)

    def _buffers_with_slab(self, copy: OffloadedValue) -> Iterator[tuple[Tensor, Tensor]]:
        """Each buffer, and its part of the slab; in a dry run there is nothing to copy."""
        own, offset = self._overflow.get(copy.start), 0
        for buffer, size in zip(copy.buffers, copy.sizes, strict=True):
            if self.device.type != "meta":
                yield buffer, self.lease.part(copy.start + offset, size) if own is None else own[offset : offset + size]
            offset += size

    def _wait_copies(self, copy: OffloadedValue) -> None:
        for event in (copy.offload_done, copy.prefetch_done):
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)
        copy.offload_done = copy.prefetch_done = None
        copy.is_arriving = False

    @contextmanager
    def _on_copy_stream(self, direction: str) -> Iterator[Any]:
        """On the stream of a direction, behind what the computation was asked so far; on a device without streams just here."""
        if self.device.type != "cuda":
            yield None
            return
        stream = getattr(_copy_streams(self.device), direction)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield stream


def _record_event(stream: Any) -> Any:
    """Something to wait for: all that the stream was asked so far."""
    return None if stream is None else stream.record_event()


def storage_as_bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, as a tensor on it."""
    size = tensor.untyped_storage().nbytes()
    return tensor.detach().as_strided((size // tensor.element_size(),), (1,), 0).view(torch.uint8)
