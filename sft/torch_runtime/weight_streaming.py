"""Streamed weights of one pass on torch devices: from the records of a store to device buffers, and gradients to a sink.

On CUDA, copies run on the stream that also prefetches offloaded values (``sft.torch_runtime.host.offload``), under the same rules: buffers
are allocated and freed on the computation's stream, and events order the streams. From a slow store (a file) a thread copies, so that the
computation does not wait for the disk. On the CPU, copies from host memory are synchronous.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sft.common.errors import SourceError
from sft.common.pinned_memory import copy_streams
from sft.torch_runtime.host.offload import storage_as_bytes
from sft.weights import Store, StreamCounters
from sft.weights.gradient_sinks import BlockSink

__all__ = ["BoundWeights", "WeightPass", "WeightProvider"]


class WeightProvider(Protocol):
    """Interface of the streamed parameters of a model."""

    device: torch.device
    store: Store
    counters: StreamCounters

    def record_of(self, path: str) -> int:
        """Number of a parameter's record."""
        ...

    def versions(self) -> Any:
        """Value that changes with the weights."""
        ...

    def open_sink(self, order: Sequence[int]) -> AbstractContextManager[BlockSink]:
        """Sink of the gradients of a backward pass, which updates records in this order."""
        ...


@dataclass(frozen=True, slots=True)
class BoundWeights:
    """Streamed weights of one call of a compiled model.

    Attributes:
        provider: the streamed parameters of the model.
        paths: parameter names in the model, by value name.
        versions: version of the weights that the call computes with.
    """

    provider: WeightProvider
    paths: Mapping[str, str]
    versions: Any

    @classmethod
    def of(cls, provider: WeightProvider, paths: Mapping[str, str]) -> BoundWeights:
        """Weights of a call that begins now."""
        return cls(provider, paths, provider.versions())

    @contextlib.contextmanager
    def forward(self) -> Iterator[WeightPass]:
        """Context with the weights of a forward pass."""
        weights = self._pass()
        try:
            yield weights
        finally:
            weights.close()

    @contextlib.contextmanager
    def backward(self, reached: Collection[str], grads: dict[str, Any]) -> Iterator[WeightPass]:
        """Context with the weights of a backward pass.

        Args:
            reached: values that gradients reach.
            grads: receives, at the end of the pass, the gradients that autograd returns, by value name.
        """
        with self._open_sink(reached) as sink:
            weights = self._pass(sink, reached)
            try:
                yield weights
            finally:
                weights.close()
            collected = {} if sink is None else sink.collect()
            grads.update((name, collected[path]) for name, path in self.paths.items() if path in collected)

    def _open_sink(self, reached: Collection[str]) -> AbstractContextManager[BlockSink | None]:
        """Sink of the gradients; ``None`` if no weight is reached, since the pass then does not count as a step of an optimizer."""
        if not any(name in reached for name in self.paths):
            return contextlib.nullcontext()
        return self.provider.open_sink([self.provider.record_of(path) for path in self.paths.values()])

    def check(self) -> None:
        """Check that the weights are still those of the call, as autograd does for parameters that were changed in place.

        Raises:
            RuntimeError: they have changed.
        """
        if self.provider.versions() != self.versions:
            raise RuntimeError(
                "streamed weights of the compiled model were changed after its forward pass, and its backward pass needs them as they "
                "were; call backward before step()"
            )

    def _pass(self, sink: BlockSink | None = None, reached: Collection[str] = ()) -> WeightPass:
        provider = self.provider
        records = {name: provider.record_of(path) for name, path in self.paths.items()}
        return WeightPass(
            device=provider.device,
            store=provider.store,
            records=records,
            paths=self.paths,
            counters=provider.counters,
            sink=sink,
            reached=reached,
        )


@dataclass(slots=True, kw_only=True)
class WeightPass:
    """Streamed weights of one pass of a region.

    Attributes:
        device: device of the buffers.
        store: store of the weights.
        records: number of each weight's record, by value name.
        paths: its name in the model, by value name.
        counters: statistics, updated.
        sink: sink of the gradients; ``None`` in a forward pass.
        reached: values that gradients reach; the gradients of other weights are zeros and are dropped.
    """

    device: torch.device
    store: Store
    records: Mapping[str, int]
    paths: Mapping[str, str]
    counters: StreamCounters
    sink: BlockSink | None = None
    reached: Collection[str] = ()
    _arriving: dict[str, Future[Any]] = field(default_factory=dict)
    _missing: set[str] = field(default_factory=set)
    _thread: ThreadPoolExecutor | None = None

    def load(self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype, buffer: Tensor | None, *, ahead: bool) -> Tensor:
        """Allocate a weight's bytes, under its earlier buffer if it has one, and begin to copy; see
        `sft.runtime.weight_prefetch.WeightOps`.
        """
        if buffer is None:
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            buffer = data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        else:
            torch.ops.sft.resize_storage_(buffer, num_bytes)
        if self.device.type != "meta":
            self._arriving[name] = self._begin(storage_as_bytes(buffer), self.store.record(self.records[name])[:num_bytes])
            self.counters.num_copies += 1
            self.counters.copied_bytes += num_bytes
            if not ahead:
                self._missing.add(name)
        return buffer

    def wait(self, names: Sequence[str]) -> None:
        """Make the computation wait for those of these weights that are being copied.

        Raises:
            SourceError: a file cannot be read any more.
        """
        started = time.perf_counter()
        for name in names:
            is_missing = name in self._missing
            is_complete = name not in self._arriving or self._arriving[name].done()
            self.counters.reads += 1
            self.counters.misses += is_missing
            self.counters.hits += is_complete and not is_missing
            self.counters.waits += not is_complete and not is_missing
            self._wait_copy(name)
        self._missing.clear()
        self.counters.wait_seconds += time.perf_counter() - started

    def _wait_copy(self, name: str) -> None:
        """Wait for a copy. It counts as under way until then: Ctrl-C may end the wait, and :meth:`free` waits again."""
        copy = self._arriving.get(name)
        if copy is None:
            return
        try:
            event = copy.result()
        except OSError as error:
            del self._arriving[name]
            raise SourceError(f"cannot read weights: {error}. The store must stay as it is during a pass.") from error
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        del self._arriving[name]

    def free(self, name: str, buffer: Tensor) -> None:
        """Free a weight's bytes, after the copy under way, whether that succeeds or not."""
        with contextlib.suppress(SourceError):
            self._wait_copy(name)
        torch.ops.sft.resize_storage_(buffer, 0)

    def send_gradient(self, name: str, gradient: Tensor, weight: Tensor) -> None:
        """Send a gradient to the sink, and write the weight to the store if the sink updated it."""
        if name in self.reached:
            assert self.sink is not None, "a backward pass that reaches weights has a sink"
            record, path = self.records[name], self.paths[name]
            if self.sink.put(record, {path: gradient}, {path: weight}):
                data = storage_as_bytes(weight)
                self.store.write(record, data, "weights")
                self.counters.written_bytes += data.numel()

    def close(self) -> None:
        """Wait for all copies under way, whether they succeed or not, and stop the thread; the pass reads the store no more."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        self._arriving.clear()
        if self.device.type == "cuda":
            copy_streams(self.device).up.synchronize()

    def _begin(self, target: Tensor, source: Tensor) -> Future[Any]:
        """Begin a copy; the future's result is a CUDA event to wait for, or ``None``."""
        copy = self._copy_function(target, source)
        if self.store.is_slow:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="sft-weights")
            return self._thread.submit(copy)
        done: Future[Any] = Future()
        done.set_result(copy())
        return done

    def _copy_function(self, target: Tensor, source: Tensor) -> Callable[[], Any]:
        """Function that copies, to be called in any thread."""
        if self.device.type != "cuda":

            def copy_here() -> None:
                # Not torch, which would start a team of threads in this one; nor NumPy, whose tensors cannot be resized.
                ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())

            return copy_here
        stream, allocated = copy_streams(self.device).up, torch.cuda.current_stream(self.device).record_event()

        def copy() -> Any:
            with torch.cuda.stream(stream):
                stream.wait_event(allocated)  # until then, earlier work may still use these bytes
                target.copy_(source, non_blocking=True)
                return stream.record_event()

        return copy
