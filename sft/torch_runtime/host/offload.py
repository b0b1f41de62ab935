"""Offloading on torch devices: copies between the device and the host, asynchronous on CUDA.

A buffer that leaves is emptied, not replaced: its storage returns its bytes to the allocator and gets new ones later, and all tensors on it
stay valid. The meter of `sft.measure_peak` sees both, since an operator of ours resizes the storage and declares it.

*Streams.* On CUDA each direction has a stream of its own; events order them, and the host never waits.

- Offload: the stream waits for an event that the computation records after writing the buffer. A release makes the computation wait for the
  copy; only then is the storage emptied.
- Prefetch: the storage is filled on the computation's stream, since the allocator knows when the block's last user on that stream is
  complete; the copy
  stream waits for an event recorded after that. The first program that reads the buffer waits for the copy.

So every buffer is allocated and freed on the computation's stream, and freed only after a wait for the copy streams: ``record_stream``,
which leaves the order to the allocator's guess, is not needed. The computation's stream is queried before another stream is entered, never
inside. A range of the slab is given to another copy only after a wait for the last one.

*Strips of cuts on the host* (:mod:`sft.torch_runtime.host.streamed_cuts`) are in the slab, too. Each copy of a strip is one copy of bytes,
which CUDA does in the background. For the copy of a view with gaps between page-locked memory and the device PyTorch makes contiguous
copies first, one of them by the host (``copy_requires_temporaries`` in ATen's ``native/cuda/Copy.cu``), which no graph could contain.

A pass that is recorded as a CUDA graph contains its copies: the streams join the recording by their first wait, and the computation waits
for all copies before it ends (:meth:`HostOffloader.finish`). Replays copy the same ranges of the slab.

On other devices a copy is synchronous.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sft.common.pinned_memory import copy_streams
from sft.runtime.offload import HostArena, OffloadedValue
from sft.torch_runtime.host.host_memory import SlabLease

__all__ = ["HostOffloader", "SlabRange", "storage_as_bytes"]

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_LIBRARY.define("resize_storage_(Tensor(a!) tensor, int num_bytes) -> ()")


def _resize_storage(tensor: Tensor, num_bytes: int) -> None:
    tensor.untyped_storage().resize_(num_bytes)


_LIBRARY.impl("resize_storage_", _resize_storage, "CompositeExplicitAutograd")


@dataclass(slots=True, eq=False, weakref_slot=True)
class SlabRange:
    """Range of a step's slab; it is free when the last reference is dropped.

    Attributes:
        data: its bytes.
    """

    data: Tensor = field(repr=False)


@dataclass(slots=True)
class HostOffloader:
    """Copies of one step on the host.

    Attributes:
        device: device of the buffers.
        lease: slab of the copies.
        may_exceed_slab: True if copies beyond the slab get memory of their own. The size of a plan's slab assumes a backward pass that
            frees the copies that it has read; with a retained graph they stay.
        is_recorded: True for the copies of passes that are recorded as CUDA graphs.
    """

    device: torch.device
    lease: SlabLease
    may_exceed_slab: bool = False
    is_recorded: bool = False
    _arena: HostArena = field(default_factory=HostArena)
    _overflow: dict[int, Tensor] = field(default_factory=dict)

    def offload(self, target: str, tensors: Sequence[Tensor]) -> OffloadedValue:
        """Begin to copy the storages of these tensors to the host, each once."""
        # Torch keeps one Python object for each storage while the storage lives.
        buffers = [storage_as_bytes(tensor) for tensor in {id(tensor.untyped_storage()): tensor for tensor in tensors}.values()]
        sizes = tuple(buffer.numel() for buffer in buffers)
        copy = OffloadedValue(target, buffers, sizes, self._allocate(sum(sizes)))
        with self._on_copy_stream("down") as stream:
            for buffer, host_bytes in self._buffers_with_slab(copy):
                host_bytes.copy_(buffer, non_blocking=True)
            copy.offload_done = _record_event(stream)
        return copy

    def release(self, copy: OffloadedValue) -> None:
        """Wait for the copy to the host, and for one from it that is under way, and empty the storages."""
        self._wait_copies(copy)
        for buffer in copy.buffers:
            torch.ops.sft.resize_storage_(buffer, 0)
        copy.is_away = True

    def prefetch(self, copy: OffloadedValue) -> None:
        """Allocate the storages' bytes again and begin to copy back."""
        for buffer, size in zip(copy.buffers, copy.sizes, strict=True):
            torch.ops.sft.resize_storage_(buffer, size)
        with self._on_copy_stream("up") as stream:
            for buffer, host_bytes in self._buffers_with_slab(copy):
                buffer.copy_(host_bytes, non_blocking=True)
            copy.prefetch_done = _record_event(stream)
        copy.is_away, copy.is_arriving = False, True

    def wait_prefetch(self, copy: OffloadedValue) -> None:
        """Make the computation's stream wait for the copy back."""
        self._wait_copies(copy)

    def free_offload(self, copy: OffloadedValue) -> None:
        """Free the copy on the host, after a wait for copies under way."""
        self._wait_copies(copy)
        copy.buffers.clear()
        self._free(copy.start)

    def reserve(self, num_bytes: int) -> SlabRange:
        """Allocate a range of the slab for strips that are copied with :meth:`begin_copy`."""
        start = self._allocate(num_bytes)
        reserved = SlabRange(self._bytes_at(start, num_bytes))
        weakref.finalize(reserved, self._free, start).atexit = False
        return reserved

    def begin_copy(self, direction: str, blocks: Iterable[tuple[Tensor, Tensor]], allocated: Any = None) -> Any:
        """Begin to copy the blocks of a strip.

        Args:
            direction: ``"down"`` to the host, ``"up"`` to the device.
            blocks: contiguous targets of one type, each with its source.
            allocated: event after which the copies begin. Default: `None` (all work queued so far)

        Returns:
            Event for :meth:`wait_copy`; ``None`` for a copy that is complete.
        """
        with self._on_copy_stream(direction, allocated) as stream:
            for target, source in blocks:
                target.copy_(source, non_blocking=True)
            return _record_event(stream)

    def wait_copy(self, done: Any) -> None:
        """Make the computation's stream wait for a copy."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def finish(self, copies: Iterable[OffloadedValue]) -> None:
        """Make the computation's stream wait for all copies of these values: no event of a recording is known to the next one."""
        for copy in copies:
            self._wait_copies(copy)

    def quiesce(self) -> None:
        """Make the computation's stream wait for all copies, when a failed step frees buffers that copies may still access."""
        if self.device.type == "cuda":
            compute, streams = torch.cuda.current_stream(self.device), copy_streams(self.device)
            compute.wait_stream(streams.down)
            compute.wait_stream(streams.up)

    def _buffers_with_slab(self, copy: OffloadedValue) -> Iterator[tuple[Tensor, Tensor]]:
        """Each buffer with its bytes in the slab; empty in a dry run."""
        if self.device.type == "meta":
            return
        data, offset = self._bytes_at(copy.start, copy.num_bytes), 0
        for buffer, size in zip(copy.buffers, copy.sizes, strict=True):
            yield buffer, data[offset : offset + size]
            offset += size

    def _allocate(self, num_bytes: int) -> int:
        """Offset of a range of the slab; of one beyond its end, that of memory of its own."""
        start = self._arena.allocate(num_bytes)
        if self.may_exceed_slab and self.device.type != "meta" and start + num_bytes > self.lease.data.numel():
            self._overflow[start] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")
        return start

    def _bytes_at(self, start: int, num_bytes: int) -> Tensor:
        """Bytes of a range."""
        overflow = self._overflow.get(start)
        return self.lease.slice(start, num_bytes) if overflow is None else overflow

    def _free(self, start: int) -> None:
        self._overflow.pop(start, None)
        self._arena.free(start)

    def _wait_copies(self, copy: OffloadedValue) -> None:
        """Make the computation's stream wait for the copies under way."""
        for event in (copy.offload_done, copy.prefetch_done):
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)
        copy.offload_done = copy.prefetch_done = None
        copy.is_arriving = False

    @contextmanager
    def _on_copy_stream(self, direction: str, begin: Any = None) -> Iterator[Any]:
        """Context on the copy stream of a direction, after an event (``None``: all work queued so far).

        Without effect on devices without streams.
        """
        if self.device.type != "cuda":
            yield None
            return
        stream = getattr(copy_streams(self.device, recorded=self.is_recorded), direction)
        if begin is None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            stream.wait_event(begin)
        with torch.cuda.stream(stream):
            yield stream


def _record_event(stream: Any) -> Any:
    """Event after all work queued on a stream so far; ``None`` without a stream."""
    return None if stream is None else stream.record_event()


def storage_as_bytes(tensor: Tensor) -> Tensor:
    """View of all bytes of a tensor's storage."""
    size = tensor.untyped_storage().nbytes()
    return tensor.detach().as_strided((size // tensor.element_size(),), (1,), 0).view(torch.uint8)
