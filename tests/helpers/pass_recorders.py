"""Recorders of passes without a GPU: a recording is a list of operators, which a replay runs again on the same tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.common.torch_internals import TorchDispatchMode, op_schema, pytree
from tests.helpers.fake_cuda import Capture, FakeGpu, FakeStream

__all__ = ["CaptureRecorder", "LogRecorder"]


class _Log(TorchDispatchMode):
    """Operators with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any, list[int]]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[Any, bytes]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        inputs = _tensors((args, kwargs or {}))
        if any(each.alias_info is not None and each.alias_info.is_write for each in op_schema(func).arguments):
            for storage in {each.untyped_storage() for each in inputs}:
                if storage._cdata not in self._own | self._before.keys():
                    self._before[storage._cdata] = (storage, ctypes.string_at(storage.data_ptr(), storage.nbytes()))
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in inputs}
        self._own |= {each.untyped_storage()._cdata for each in _tensors(result)} - known
        self.calls.append((func, args, kwargs or {}, result, [each.untyped_storage().nbytes() for each in _tensors(result)]))
        return result

    def restore(self) -> None:
        """Restore memory from before the recording, since a recording runs nothing."""
        for storage, content in self._before.values():
            if storage.nbytes() == len(content):
                ctypes.memmove(storage.data_ptr(), content, len(content))
        self._before.clear()

    def replay(self) -> None:
        """Run all operators again on the same tensors."""
        for func, args, kwargs, old, sizes in self.calls:
            returns = [each.alias_info for each in op_schema(func).returns]
            if any(alias is not None and not alias.is_write for alias in returns):
                continue  # a view
            with torch.no_grad():
                for result, size in zip(_tensors(old), sizes, strict=True):
                    if result.untyped_storage().nbytes() < size and size:  # its copy was on the host at the end of the recording
                        torch.ops.sft.resize_storage_(result, size)
                if func.__name__.startswith("empty"):
                    continue
                new = func(*args, **kwargs)
                if all(alias is None for alias in returns):
                    for result, value in zip(_tensors(old), _tensors(new), strict=True):
                        result.copy_(value)


@dataclass
class LogRecorder:
    """Recorder that runs a pass and logs its operators.

    Attributes:
        num_records: number of recordings.
        fails_at: number of the recording that fails.
        num_closed: number of times that its memory was freed.
        is_recorded: true while the caller records.
        input_sizes: bytes of the inputs, in the order in which they were made.
    """

    num_records: int = 0
    fails_at: int | None = None
    num_closed: int = 0
    is_recorded: bool = False
    input_sizes: list[int] = field(default_factory=list)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_records += 1
        with _Log() as log, pytest.MonkeyPatch.context() as patches:
            # As on a GPU: operators read the seed of their step from its tensor.
            patches.setattr("sft.lower.rules.random.seed_word", lambda seed: seed)
            work()
        log.restore()
        if self.num_records == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        replay: Callable[[], None] = log.replay
        return replay

    def allocate_inputs(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        inputs = make()
        self.input_sizes = [each.nbytes for each in inputs.values()]
        return inputs

    def close(self) -> None:
        self.num_closed += 1


@dataclass
class CaptureRecorder(LogRecorder):
    """Recorder on the fake CUDA device, by the rules of stream captures.

    Attributes:
        gpu: the device.
    """

    gpu: FakeGpu = field(kw_only=True)
    _stream: FakeStream | None = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        stream = self._stream = self._stream or FakeStream(name="stream of recordings")
        with self._in_order(stream), Capture(stream), self.gpu.on_stream(stream):  # here a recording runs, too
            replay = super().record(work)

        def replay_in_order() -> None:
            with self._in_order(stream), self.gpu.on_stream(stream):
                replay()

        return replay_in_order

    @contextmanager
    def _in_order(self, stream: FakeStream) -> Iterator[None]:
        """Order work on a stream between the work before it and after it on the current one."""
        compute = self.gpu.current_stream()
        stream.wait_stream(compute)
        yield
        compute.wait_stream(stream)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
