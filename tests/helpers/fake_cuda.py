"""Fake CUDA device for tests: tensors in host memory stand for tensors on the device, and every access is checked for races.

Inside :func:`fake_cuda` the streams, events and page locks of ``torch.cuda`` are objects of this module. A function mode maps ``cuda`` in
factory calls to the CPU and reports ``cuda`` as the device of the tensors that it made; a dispatch mode gives every operator to a
:class:`~tests.helpers.happens_before.RaceChecker` as work on the current stream. The bytes are real, so results can be compared.

Host threads are timelines (:mod:`tests.helpers.thread_order`).
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sft.common.pinned_memory import copy_streams
from sft.common.torch_internals import TorchDispatchMode, pytree
from tests.helpers.happens_before import Allocation, ByteView, RaceChecker, Timeline, library_line
from tests.helpers.host_memory_accesses import watch_host_memory
from tests.helpers.thread_order import order_threads

__all__ = ["DEVICE", "Capture", "FakeEvent", "FakeGpu", "FakeStream", "fake_cuda", "observed"]

DEVICE = torch.device("cuda", 0)
_SCALAR_READS = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy"})
_View = tuple[Allocation, ByteView]


class Capture:
    """Stream capture: the streams that work is recorded from.

    The rules are CUDA's (programming guide, "Creating a Graph Using Stream Capture"): a stream joins by its wait for an event of the
    capture, no captured stream waits for an event outside of it, the host waits for none of its events, and all streams have joined the
    first one at the end.

    Args:
        origin: the stream that begins the capture.
    """

    def __init__(self, origin: FakeStream) -> None:
        self._origin, self._streams, self.has_ended = origin, [origin], False

    def __enter__(self) -> Capture:
        self._origin.capture = self
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.has_ended = True
        for stream in self._streams:
            stream.capture = None
            number = stream.timeline.number
            if error is None and self._origin.timeline.clock.get(number, 0) < stream.timeline.clock.get(number, 0):
                raise RuntimeError("capturing stream has unjoined work")

    def wait(self, stream: FakeStream) -> None:
        """Let a stream wait for an event of the capture."""
        if self.has_ended or stream.capture not in (None, self):
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
        if stream.capture is None:
            stream.capture = self
            self._streams.append(stream)


class FakeEvent:
    """CUDA event: the clock of a stream."""

    def __init__(self, gpu: FakeGpu | None = None, *_: Any, **__: Any) -> None:
        self._gpu = gpu if isinstance(gpu, FakeGpu) else _active()
        self.clock: dict[int, int] = {}
        self.capture: Capture | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        """After all work queued on a stream so far."""
        stream = stream or self._gpu.current_stream()
        self.clock, self.capture = stream.timeline.snapshot(), stream.capture

    def wait(self, stream: FakeStream | None = None) -> None:
        """Make a stream wait."""
        (stream or self._gpu.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Make the calling thread wait."""
        _refuse_capture(self.capture)
        self._gpu.num_synchronizations += 1
        self._gpu.thread().join(self.clock)

    def query(self) -> bool:
        """True if the calling thread has waited for it."""
        _refuse_capture(self.capture)
        known = self._gpu.thread().clock
        return all(tick <= known.get(number, 0) for number, tick in self.clock.items())


class FakeStream:
    """CUDA stream: a timeline."""

    def __init__(self, device: Any = None, *, name: str = "") -> None:
        self.gpu = _active()
        self.gpu.num_streams += 1
        self.timeline = self.gpu.checker.timeline(name or f"stream {self.gpu.num_streams}")
        self.device = DEVICE
        self.capture: Capture | None = None

    def wait_event(self, event: FakeEvent) -> None:
        if event.capture is not None:
            event.capture.wait(self)
        elif self.capture is not None:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        self.timeline.join(event.clock)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        _refuse_capture(self.capture)
        self.gpu.num_synchronizations += 1
        self.gpu.thread().join(self.timeline.clock)

    def query(self) -> bool:
        return False


def _refuse_capture(capture: Capture | None) -> None:
    if capture is not None:
        raise RuntimeError("operation not permitted when stream is capturing")


@dataclass(slots=True)
class _HostRange:
    start: int
    stop: int
    allocation: Allocation


class FakeGpu:
    """State of the fake device.

    Attributes:
        checker: the accesses and races.
        blocking_copies: copies between the devices that made a host thread wait, each with the line of the library that began it.
        num_synchronizations: waits of host threads for events and streams.
        scalar_reads: values of tensors on the device that host threads waited for, each with the line of the library.
    """

    def __init__(self) -> None:
        self.checker = RaceChecker()
        self.blocking_copies: list[str] = []
        self.scalar_reads: list[str] = []
        self.num_synchronizations = self.num_streams = 0
        self._lock = threading.RLock()
        self._local = threading.local()
        self._device: dict[int, tuple[weakref.ref[Any], Allocation]] = {}  # by storage
        self._host: list[_HostRange] = []  # by address
        self.pinned: list[tuple[int, int]] = []
        self._cached: set[int] = set()  # addresses of torch's page-locked memory, which its allocator keeps until all copies are complete
        self.default_stream: FakeStream | None = None

    # Timelines.

    def current_stream(self, device: Any = None) -> FakeStream:
        """Stream of the calling thread."""
        stream = getattr(self._local, "stream", None) or self.default_stream
        assert stream is not None
        return stream

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream | None) -> Iterator[None]:
        """``torch.cuda.stream``."""
        former, self._local.stream = getattr(self._local, "stream", None), stream
        try:
            yield
        finally:
            self._local.stream = former

    def thread(self) -> Timeline:
        """Timeline of the calling thread."""
        timeline = getattr(self._local, "timeline", None)
        if timeline is None:
            timeline = self._local.timeline = self.checker.timeline(f"host thread {threading.current_thread().name}")
        return timeline

    def synchronize(self, device: Any = None) -> None:
        """``torch.cuda.synchronize``."""
        self.num_synchronizations += 1
        for timeline in self.checker.timelines:
            self.thread().join(timeline.clock)

    # Memory.

    def is_on_device(self, tensor: Tensor) -> bool:
        """True if a tensor stands for one on the device."""
        storage = tensor.untyped_storage()
        entry = self._device.get(storage._cdata)
        return entry is not None and entry[0]() is storage

    def adopt(self, tensor: Tensor) -> Tensor:
        """Declare a tensor to be on the device, written by the current stream."""
        with self._lock:
            if not self.is_on_device(tensor):
                self._allocate(tensor, "adopt")
        return tensor

    def pin(self, tensor: Tensor) -> None:
        """Declare host memory to be page-locked."""
        self.pinned.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))

    def is_pinned(self, tensor: Tensor) -> bool:
        """True if the tensor's storage is in page-locked memory."""
        start = tensor.data_ptr()
        return any(low <= start < high for low, high in self.pinned)

    def read(self, *tensors: Tensor) -> None:
        """Read tensors as the caller of the library does: on the current stream, or in the calling thread."""
        self._work("read by the caller", tensors, ())

    def write(self, *tensors: Tensor) -> None:
        """Write tensors as the caller of the library does."""
        self._work("write by the caller", (), tensors)

    def _allocate(self, tensor: Tensor, label: str) -> None:
        storage = tensor.untyped_storage()
        stream, key = self.current_stream(), storage._cdata
        allocation = Allocation(f"device memory of {storage.nbytes()} bytes", storage.nbytes(), stream.timeline)
        self._device[key] = (weakref.ref(storage, partial(self._free, key, allocation)), allocation)
        self._launch(stream, label, (), [(allocation, ByteView.flat(0, allocation.num_bytes))])

    def _free(self, key: int, allocation: Allocation, reference: Any = None) -> None:
        """Return a block to the stream that it was allocated on."""
        with self._lock:
            entry = self._device.get(key)
            if entry is None or entry[1] is not allocation:
                return
            if reference is not None:
                del self._device[key]
            if allocation.num_bytes:
                allocation.owner.join(self.thread().clock)
                self.checker.write_all(allocation.owner, f"free{library_line()}", allocation)

    def resize(self, tensor: Tensor, num_bytes: int) -> None:
        """Resize the storage of a tensor on the device: its bytes return to the allocator, or are allocated again."""
        storage = tensor.untyped_storage()
        with self._lock:
            _, allocation = self._device[storage._cdata]
            self._free(storage._cdata, allocation)
            storage.resize_(num_bytes)
            self._allocate(tensor, f"allocate{library_line()}")

    def host_allocation(self, start: int, num_bytes: int) -> _HostRange:
        """Range of host memory that contains these bytes; an unknown one is added."""
        index = bisect.bisect_right(self._host, start, key=lambda each: each.start) - 1
        if index >= 0 and self._host[index].stop >= start + num_bytes:
            return self._host[index]
        overlapping = [each for each in self._host if each.start < start + num_bytes and each.stop > start]
        for each in overlapping:  # its memory was freed and allocated again, or is a smaller range
            self._host.remove(each)
        return self.new_host_memory(start, num_bytes)

    def new_host_memory(self, start: int, num_bytes: int) -> _HostRange:
        """Register fresh host memory."""
        with self._lock:
            for each in [each for each in self._host if each.start < start + num_bytes and each.stop > start]:
                self._host.remove(each)
            new = _HostRange(start, start + num_bytes, Allocation(f"host memory of {num_bytes} bytes", num_bytes, self.thread()))
            bisect.insort(self._host, new, key=lambda each: each.start)
            return new

    def free_host_memory(self, start: int, num_bytes: int) -> None:
        """Free host memory: a write by the thread."""
        with self._lock:
            for each in [each for each in self._host if start <= each.start and each.stop <= start + num_bytes]:
                if start not in self._cached:
                    self.checker.write_all(self.thread(), "free", each.allocation)
                self._host.remove(each)
            self._cached.discard(start)

    def _view(self, tensor: Tensor) -> _View:
        size, storage = tensor.element_size(), tensor.untyped_storage()
        offset, strides = int(tensor.storage_offset()) * size, tuple(stride * size for stride in tensor.stride())
        if self.is_on_device(tensor):
            allocation = self._device[storage._cdata][1]
        else:
            known = self.host_allocation(storage.data_ptr(), storage.nbytes())
            allocation, offset = known.allocation, offset + storage.data_ptr() - known.start
        return allocation, ByteView(offset, tuple(tensor.shape), strides, size)

    # Work.

    def _launch(self, stream: FakeStream, label: str, reads: Sequence[_View], writes: Sequence[_View]) -> None:
        stream.timeline.join(self.thread().clock)
        self.checker.access(stream.timeline, label, reads, writes)

    def _work(self, label: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Work on the current stream if a tensor is on the device, otherwise in the calling thread."""
        with self._lock:
            views = [[self._view(each) for each in tensors if each.numel()] for tensors in (reads, writes)]
            if any(self.is_on_device(each) for each in (*reads, *writes)):
                self._launch(self.current_stream(), label, *views)
            else:
                self.checker.access(self.thread(), label, *views)

    def host_access(self, label: str, arrays: Sequence[Any], *, writes: bool) -> None:
        """Access to NumPy arrays by the calling thread."""
        with self._lock:
            views = [self._array_view(array) for array in arrays if array.size]
            self.checker.access(self.thread(), label, () if writes else views, views if writes else ())

    def _array_view(self, array: Any) -> _View:
        start = array.__array_interface__["data"][0]
        known = self.host_allocation(start, array.nbytes if array.flags.c_contiguous else _span(array))
        return known.allocation, ByteView(start - known.start, array.shape, array.strides, array.itemsize)

    def copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """Copy between the devices, on the current stream."""
        label = f"copy{library_line()}"
        host = source if self.is_on_device(target) else target
        with self._lock:
            self._launch(self.current_stream(), label, [self._view(source)], [self._view(target)])
            if not non_blocking or not self.is_pinned(host) or not _is_one_block(target, source):
                _refuse_capture(self.current_stream().capture)
                self.blocking_copies.append(label)
                self.thread().join(self.current_stream().timeline.clock)
        target.copy_(source)

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_device: bool) -> Any:
        """Run an operator and record its accesses."""
        inputs = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_device = on_device or any(self.is_on_device(each) for each in inputs)
        if func is torch.ops.sft.resize_storage_.default and is_device:
            return self.resize(args[0], args[1])
        if func is torch.ops.aten.copy_.default and self.is_on_device(args[0]) != self.is_on_device(args[1]) and args[1].numel():
            self.copy(args[0], args[1], non_blocking=kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            return args[0]
        known = {each.untyped_storage()._cdata for each in inputs}
        result = func(*args, **kwargs)
        outputs = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        with self._lock:
            fresh = {each.untyped_storage()._cdata: each for each in outputs if each.untyped_storage()._cdata not in known}
            for tensor in fresh.values():
                if is_device:
                    self._allocate(tensor, f"allocate {func}")
                elif func not in (torch.ops.aten.lift_fresh.default,) and tensor.untyped_storage().nbytes():
                    storage = tensor.untyped_storage()
                    self.new_host_memory(storage.data_ptr(), storage.nbytes())
                    if func is not torch.ops.aten.detach.default:
                        weakref.finalize(storage, self.free_host_memory, storage.data_ptr(), storage.nbytes()).atexit = False
            if not (func.is_view or func is torch.ops.aten.lift_fresh.default or func is torch.ops.aten.detach.default):
                written = [each for each, argument in _with_schema(func, args, kwargs) if argument.is_write]
                reads = [each for each in inputs if not any(each is other for other in written)]
                is_empty = func.__name__.startswith(("empty", "new_empty"))
                self._work(f"{func}{library_line()}", reads if not is_empty else (), written)
        return result


def _with_schema(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and argument.alias_info is not None:
                yield leaf, argument.alias_info


def _is_one_block(target: Tensor, source: Tensor) -> bool:
    """True if a copy between the devices is one copy of bytes: otherwise PyTorch makes contiguous copies first, one of them on the host."""
    strides = [tuple(s for s, n in zip(each.stride(), each.shape, strict=True) if n > 1) for each in (target, source)]
    order = sorted(range(target.dim()), key=lambda dim: (target.stride(dim), target.shape[dim]), reverse=True)
    return target.dtype == source.dtype and strides[0] == strides[1] and target.permute(order).is_contiguous()


def _span(array: Any) -> int:
    return int(sum((extent - 1) * abs(stride) for extent, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize)


class _DispatchMode(TorchDispatchMode):
    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_device = getattr(self._gpu._local, "on_device", False)
        return self._gpu.operator(func, args, kwargs or {}, on_device=on_device)


class _FunctionMode(TorchFunctionMode):
    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute in ("device", "is_cuda") and gpu.is_on_device(args[0]):
                return DEVICE if attribute == "device" else True
            return func(*args, **kwargs)
        if name == "pin_memory":
            host = args[0].clone()
            gpu.pin(host)
            return host
        if name == "is_pinned":
            return gpu.is_pinned(args[0])
        if name in _SCALAR_READS and isinstance(args[0], Tensor) and gpu.is_on_device(args[0]):
            gpu.scalar_reads.append(f"{name}{library_line()}")
            gpu.read(args[0])
            gpu.thread().join(gpu.current_stream().timeline.clock)
        if name in ("cpu", "cuda", "to") and isinstance(args[0], Tensor):
            return self._moved(func, name, args, kwargs)
        pins = kwargs.pop("pin_memory", False)
        on_device = any(_is_cuda(each) for each in (*args, *kwargs.values()))
        gpu._local.on_device = on_device
        try:
            args, kwargs = pytree.tree_map(lambda each: torch.device("cpu") if _is_cuda(each) else each, (tuple(args), kwargs))
            result = func(*args, **kwargs)
        finally:
            gpu._local.on_device = False
        if pins:
            gpu.pin(result)
            gpu._cached.add(result.data_ptr())
        return result

    def _moved(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        gpu, tensor = self._gpu, args[0]
        devices = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, (torch.device, str))]
        device = torch.device("cpu" if name == "cpu" else "cuda" if name == "cuda" else devices[0] if devices else "meta")
        if device.type == "meta":
            return func(*args, **kwargs)
        if (device.type == "cuda") == gpu.is_on_device(tensor):
            rest = [each for each in args[1:] if not isinstance(each, (torch.device, str))]
            kwargs.pop("device", None)
            return tensor.to(*rest, **kwargs) if rest or kwargs else tensor
        dtype = next((each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)), tensor.dtype)
        result = torch.empty_like(tensor, dtype=dtype)
        if device.type == "cuda":
            gpu._allocate(result, "allocate for a copy")
        gpu.copy(result, tensor, non_blocking=bool(kwargs.get("non_blocking", False)))
        return result


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (isinstance(value, str) and value.startswith("cuda"))


_gpus: list[FakeGpu] = []


def _active() -> FakeGpu:
    return _gpus[-1]


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeGpu]:
    """Context with a fake device; the modes are entered by :func:`observed`."""
    gpu = FakeGpu()
    _gpus.append(gpu)
    with pytest.MonkeyPatch.context() as patches:
        gpu.default_stream = FakeStream(name="the computation's stream")
        copy_streams.cache_clear()
        for name, value in {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "current_stream": gpu.current_stream,
            "stream": gpu.on_stream,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": gpu.synchronize,
        }.items():
            patches.setattr(torch.cuda, name, value)
        order_threads(patches, gpu.thread, lambda: observed(gpu))
        watch_host_memory(patches, gpu)
        try:
            yield gpu
        finally:
            copy_streams.cache_clear()
            _gpus.pop()


@contextlib.contextmanager
def observed(gpu: FakeGpu) -> Iterator[None]:
    """Context in which the calling thread's operators run on the fake device."""
    with _DispatchMode(gpu), _FunctionMode(gpu):
        yield
