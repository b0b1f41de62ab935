"""Streamed weights of a compiled model, for one pass: from the records of a store to buffers on the device, and gradients to a sink.

On CUDA copies run on the stream that brings values back from the host (``sft.torch_runtime.offload``), with the same rules: buffers are
taken and given back on the computation's stream, and events say who waits for whom. From a store that is slow (a file) a thread copies, so
that the computation does not wait for the disk while it has something to do. On the CPU, from the host's memory, a copy is done when it
was begun.
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
from sft.torch_runtime.offload import storage_as_bytes, upload_stream
from sft.weights import Store, StreamCounters

__all__ = ["BoundWeights", "GradientReceiver", "WeightPass", "WeightProvider"]


class GradientReceiver(Protocol):
    """Takes the gradients of one backward pass, a parameter at a time."""

    def put(self, block: int, grads: dict[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Take a gradient; see `sft.repeat.streamed.BlockSink`."""
        ...

    def collect(self) -> Mapping[str, Tensor]:
        """The gradients that are autograd's to hand on, by parameter, when the pass is done."""
        ...


class WeightProvider(Protocol):
    """The streamed parameters of a model."""

    device: torch.device
    store: Store
    counters: StreamCounters

    def record_of(self, path: str) -> int:
        """The number of a parameter's record."""
        ...

    def versions(self) -> Any:
        """What changes when the weights do."""
        ...

    def taking(self, order: Sequence[int]) -> AbstractContextManager[GradientReceiver]:
        """What takes the gradients of a backward pass, whose records are updated in this order."""
        ...


@dataclass(frozen=True, slots=True)
class BoundWeights:
    """The streamed weights of one call of a compiled model.

    Attributes:
        owner: has them.
        paths: their names in the model, by those of their values.
        versions: of the weights that the call computes with.
    """

    owner: WeightProvider
    paths: Mapping[str, str]
    versions: Any

    @classmethod
    def of(cls, owner: WeightProvider, paths: Mapping[str, str]) -> BoundWeights:
        """For a call that begins now."""
        return cls(owner, paths, owner.versions())

    @contextlib.contextmanager
    def forward(self) -> Iterator[WeightPass]:
        """A forward pass."""
        weights = self._pass()
        try:
            yield weights
        finally:
            weights.close()

    @contextlib.contextmanager
    def backward(self, reached: Collection[str], grads: dict[str, Any]) -> Iterator[WeightPass]:
        """A backward pass; gradients that autograd is to hand on come into ``grads``, by the names of their values.

        Args:
            reached: the values that gradients flow to.
            grads: gains gradients, when the pass is through.
        """
        with self._grad_transfer(reached) as sink:
            weights = self._pass(sink, reached)
            try:
                yield weights
            finally:
                weights.close()
            collected = {} if sink is None else sink.collect()
            grads.update((name, collected[path]) for name, path in self.paths.items() if path in collected)

    def _grad_transfer(self, reached: Collection[str]) -> AbstractContextManager[GradientReceiver | None]:
        """What takes the gradients; nothing where none is made of weights: the pass is then no step of theirs."""
        if not any(name in reached for name in self.paths):
            return contextlib.nullcontext()
        return self.owner.taking([self.owner.record_of(path) for path in self.paths.values()])

    def check(self) -> None:
        """Whether the weights are still those of the call, as autograd says of parameters that were changed in place.

        Raises:
            RuntimeError: they are not.
        """
        if self.owner.versions() != self.versions:
            raise RuntimeError(
                "streamed weights of the compiled model were changed after its forward pass, and its backward pass needs them as they "
                "were; call backward before step()"
            )

    def _pass(self, sink: GradientReceiver | None = None, reached: Collection[str] = ()) -> WeightPass:
        owner = self.owner
        records = {name: owner.record_of(path) for name, path in self.paths.items()}
        return WeightPass(
            device=owner.device, store=owner.store, records=records, paths=self.paths, counters=owner.counters, sink=sink, reached=reached
        )


@dataclass(slots=True, kw_only=True)
class WeightPass:
    """The weights of one pass of a region.

    Attributes:
        device: where they are used.
        store: where they are.
        records: the number of each weight's record, by the name of its value.
        paths: its name in the model, likewise.
        counters: gain what happens.
        sink: takes gradients; none in a forward pass.
        reached: the values that gradients flow to; those of others are zeros, which nobody is to act on.
    """

    device: torch.device
    store: Store
    records: Mapping[str, int]
    paths: Mapping[str, str]
    counters: StreamCounters
    sink: GradientReceiver | None = None
    reached: Collection[str] = ()
    _arriving: dict[str, Future[Any]] = field(default_factory=dict)
    _missing: set[str] = field(default_factory=set)
    _thread: ThreadPoolExecutor | None = None

    def load(self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype, handle: Tensor | None, *, ahead: bool) -> Tensor:
        """Take bytes for a weight, under the handle that there was, and begin to copy; ``ahead`` of its use, or for it."""
        if handle is None:
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            handle = data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        else:
            torch.ops.sft.resize_storage_(handle, num_bytes)
        if self.device.type != "meta":
            self._arriving[name] = self._begin(storage_as_bytes(handle), self.store.record(self.records[name])[:num_bytes])
            self.counters.num_copies += 1
            self.counters.copied_bytes += num_bytes
            if not ahead:
                self._missing.add(name)
        return handle

    def wait(self, names: Sequence[str]) -> None:
        """Let the computation wait for those that are on their way.

        Raises:
            SourceError: a file cannot be read any more.
        """
        started = time.perf_counter()
        for name in names:
            is_missing = name in self._missing
            is_there = name not in self._arriving or self._arriving[name].done()
            self.counters.reads += 1
            self.counters.misses += is_missing
            self.counters.hits += is_there and not is_missing
            self.counters.waits += not is_there and not is_missing
            self._wait_copy(name)
        self._missing.clear()
        self.counters.wait_seconds += time.perf_counter() - started

    def _wait_copy(self, name: str) -> None:
        """Wait for a copy. It is under way until then: Ctrl-C may end the wait, and whoever gives the bytes back waits again."""
        found = self._arriving.get(name)
        if found is None:
            return
        try:
            event = found.result()
        except OSError as error:
            del self._arriving[name]
            raise SourceError(f"cannot read weights: {error}. The store must stay as it is during a pass.") from error
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        del self._arriving[name]

    def free(self, name: str, handle: Tensor) -> None:
        """Give a weight's bytes back; of one that is on its way when it is through, whatever came of it."""
        with contextlib.suppress(SourceError):
            self._wait_copy(name)
        torch.ops.sft.resize_storage_(handle, 0)

    def send_gradient(self, name: str, gradient: Tensor, weight: Tensor) -> None:
        """Give a gradient to the sink, and write the weight if it was updated."""
        if name in self.reached:
            assert self.sink is not None, "a backward pass that reaches weights has a sink"
            record, path = self.records[name], self.paths[name]
            if self.sink.put(record, {path: gradient}, {path: weight}):
                data = storage_as_bytes(weight)
                self.store.write(record, data, "weights")
                self.counters.written_bytes += data.numel()

    def close(self) -> None:
        """Wait for what is under way, whatever came of it, and end the thread: nobody reads the store for this pass any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        self._arriving.clear()
        if self.device.type == "cuda":
            upload_stream(self.device).synchronize()

    def _begin(self, target: Tensor, source: Tensor) -> Future[Any]:
        """Begin a copy; the future's result is a CUDA event to wait for, if there is one."""
        copy = self._copying(target, source)
        if self.store.is_slow:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="sft-weights")
            return self._thread.submit(copy)
        done: Future[Any] = Future()
        done.set_result(copy())
        return done

    def _copying(self, target: Tensor, source: Tensor) -> Callable[[], Any]:
        """What copies, in whatever thread."""
        if self.device.type != "cuda":

            def copy_here() -> None:
                # Not torch, which would start a team of threads in this one; nor NumPy, who forbids its tensors to be resized.
                ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())

            return copy_here
        stream, taken = upload_stream(self.device), torch.cuda.current_stream(self.device).record_event()

        def copy() -> Any:
            with torch.cuda.stream(stream):
                stream.wait_event(taken)  # until then the bytes may be somebody else's
                target.copy_(source, non_blocking=True)
                return stream.record_event()

        return copy
