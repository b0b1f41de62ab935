"""Copies from a CUDA device to the host: each has a page-locked buffer, and a thread uses it when the copy is complete.

Host outputs, staged cuts and gradients of inputs are scattered into memory that is not page-locked. A direct copy there would make the host
wait until all queued work is complete. Here the buffer is copied on a stream of its own; the computation's stream waits for the copy, since
the memory on the device is used again, and the host continues. One thread scatters the buffers in order, so sums keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sft.common.pinned_memory import copy_streams
from sft.sources.strip_reader import aligned_bytes, read_chunks
from sft.torch_runtime.host.staging import HostStaging, StagingRange

__all__ = ["HostTransfers", "row_pieces"]

#: Copies in one direction that are under way at once.
_MAX_RUNNING = 2


@dataclass(slots=True)
class _Download:
    """Copy to the host that is under way, or that the thread has not used yet."""

    destination: int
    staged: StagingRange
    used: Future[None]


@dataclass(slots=True)
class HostTransfers:
    """Copies of one pass between a CUDA device and host memory that is not page-locked.

    Attributes:
        device: the device.
        staging: page-locked memory.
    """

    device: torch.device
    staging: HostStaging
    _downloads: deque[_Download] = field(default_factory=deque)
    _uploads: deque[tuple[Any, StagingRange]] = field(default_factory=deque)
    _thread: ThreadPoolExecutor | None = None

    def download(self, tensor: Tensor, use: Callable[[Tensor], None], destination: object) -> None:
        """Copy a tensor to the host and let the thread use the copy, after all earlier ones.

        Args:
            tensor: on the device; its memory may be used again by the computation's stream.
            use: receives the copy, which is valid during the call.
            destination: object that the call changes; :meth:`wait` waits for its changes.

        Raises: errors of earlier calls.
        """
        while len(self._downloads) >= _MAX_RUNNING:
            self._finish_oldest()
        staged, host = self._staged(tensor)
        stream, compute = copy_streams(self.device).down, torch.cuda.current_stream(self.device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            _copy_by_sample(host, tensor)
            done = stream.record_event()
        compute.wait_event(done)

        def run() -> None:
            done.synchronize()
            with torch.no_grad():
                use(host)

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="sft-host-writer")
        self._downloads.append(_Download(id(destination), staged, self._thread.submit(run)))

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Fill a tensor on the device from host memory; the computation waits for the copy, and the host does not."""
        while len(self._uploads) >= _MAX_RUNNING:
            self._finish_oldest_upload()
        staged, host = self._staged(target)
        host.copy_(source)
        stream, compute = copy_streams(self.device).up, torch.cuda.current_stream(self.device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            _copy_by_sample(target, host)
            done = stream.record_event()
        compute.wait_event(done)
        self._uploads.append((done, staged))

    def wait(self, destination: object) -> None:
        """Wait until all changes of a destination are complete.

        Raises: errors of the calls.
        """
        while any(each.destination == id(destination) for each in self._downloads):
            self._finish_oldest()

    def finish(self) -> None:
        """Wait for all copies and calls, and free their buffers.

        Raises: the first error of a call.
        """
        errors: list[BaseException] = []
        while self._downloads:
            try:
                self._finish_oldest()
            except BaseException as error:
                errors.append(error)
        while self._uploads:
            self._finish_oldest_upload()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Finish, and stop the thread."""
        try:
            self.finish()
        finally:
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.shutdown(wait=True)

    def _finish_oldest(self) -> None:
        download = self._downloads[0]
        try:
            download.used.result()
        finally:
            if download.used.done():  # not if Ctrl-C ended the wait
                self._downloads.popleft()
                self.staging.free(download.staged)

    def _finish_oldest_upload(self) -> None:
        done, staged = self._uploads.popleft()
        done.synchronize()
        self.staging.free(staged)

    def _staged(self, tensor: Tensor) -> tuple[StagingRange, Tensor]:
        """Page-locked memory for a tensor's elements, as a tensor of its shape in its order of dimensions."""
        num_bytes = tensor.numel() * tensor.element_size()
        staged = self.staging.allocate(aligned_bytes(num_bytes))
        order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
        flat = staged.take(num_bytes, aligned_bytes(num_bytes)).view(tensor.dtype)
        inverse = [order.index(dim) for dim in range(tensor.dim())]
        return staged, flat.view([tensor.shape[dim] for dim in order]).permute(inverse)


def _copy_by_sample(target: Tensor, source: Tensor) -> None:
    """Copy asynchronously, one batch element at a time: rows of several are not dense, and CUDA would copy them through a buffer."""
    is_dense = _is_dense(target) and _is_dense(source)
    for sample in range(1 if is_dense or target.dim() < 3 else target.shape[0]):
        to, of = (target, source) if is_dense or target.dim() < 3 else (target[sample], source[sample])
        order = sorted(range(to.dim()), key=lambda dim: (to.stride(dim), to.shape[dim]), reverse=True)
        to.permute(order).copy_(of.permute(order), non_blocking=True)


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()


def row_pieces(tensor: Tensor, *, whole: bool) -> list[tuple[int, Tensor]]:
    """Pieces of a tensor that are copied one after the other, each with its first row.

    Args:
        tensor: a strip, or a full value.
        whole: true for a full value: an image is copied in chunks of rows, so that its page-locked buffers stay small.
    """
    if not whole or tensor.dim() < 4 or tensor.stride(1) != 1 or not tensor.numel():
        return [(0, tensor)]
    row_bytes = tensor.numel() // tensor.shape[2] * tensor.element_size()
    chunks = read_chunks(tensor.shape[2], row_bytes)
    return [(rows.start, tensor if len(chunks) == 1 else tensor.narrow(2, rows.start, len(rows))) for rows in chunks]
