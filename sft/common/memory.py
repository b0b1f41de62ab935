"""Measured peak memory: the maximum of the bytes that a block of code holds on a device.

On CUDA the caching allocator counts, and its counters are read. The CPU has no such counter, and process memory is too coarse (freed pages
that the allocator keeps, thread pools, code). The CPU meter therefore watches the dispatcher: each storage that first appears as the output
of an operator counts with its full size, once for all views, until the C++ storage dies. A weak reference to the Python storage reports its
death: PyTorch preserves that object for as long as the C++ storage lives, so a tensor that only autograd holds still counts.

The number is exact and repeatable to the byte, which lets tests assert ``measured <= projected <= budget``. Memory that the dispatcher does
not show is not counted:

- scratch inside one operator (workspaces, the temporaries of a composite kernel);
- storages that no operator made: NumPy buffers, ``torch.tensor`` of a Python list, a storage built or resized by hand;
- tensors without a storage (sparse, MKL-DNN);
- work of other threads. The backward pass of CPU and meta tensors runs on the caller's thread and is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from sft.common.errors import InputError
from sft.common.torch_internals import TorchDispatchMode, is_composite_op, is_traceable_wrapper_subclass_type, op_schema

__all__ = ["Peak", "measure_peak"]


#: Counters of CUDA's allocator.
_COUNTERS = ("allocated_bytes", "requested_bytes")


class _Meter(Protocol):
    @property
    def peak_bytes(self) -> int: ...
    @property
    def requested_peak_bytes(self) -> int: ...
    @property
    def current_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Peak:
    """Live reading of one ``measure_peak`` block, valid inside the block and after it."""

    #: The measured device.
    device: torch.device
    #: The counter that is read.
    _meter: _Meter

    @property
    def num_bytes(self) -> int:
        """Peak bytes inside the block, above its start."""
        return self._meter.peak_bytes

    @property
    def requested_bytes(self) -> int:
        """Peak bytes without the rounding of CUDA's allocator; ``num_bytes`` counts its blocks."""
        return self._meter.requested_peak_bytes

    @property
    def current_bytes(self) -> int:
        """Bytes held now, above the start of the block: on CPU and meta those of storages made inside it (never negative)."""
        return self._meter.current_bytes

    def __repr__(self) -> str:
        return f"Peak(num_bytes={self.num_bytes}, current_bytes={self.current_bytes}, device={str(self.device)!r})"


@contextmanager
def measure_peak(device: torch.device | str = "cpu") -> Iterator[Peak]:
    """Measure the peak of the device memory that the block allocates.

    Blocks nest, and each counts from its own start. Tensors that exist before the block do not count, not even as
    the result of an in-place operator; only their growth (``resize_``, ``out=``) does.

    To meter a dry run, use ``device="meta"``: it counts meta tensors, and fake tensors of any claimed device.
    Enter the ``FakeTensorMode`` outside this block; inside, its shape propagation would count as the program's work.

    On a CUDA device a block resets torch's own peak counters (``torch.cuda.max_memory_allocated``), which cannot be set back. Planning
    for a CUDA device measures programs in such blocks: read torch's counters over calls that need no new plan, or read this meter.

    >>> import torch
    >>> with measure_peak() as peak:
    ...     squares = torch.arange(1000, dtype=torch.float32) ** 2
    >>> peak.num_bytes, peak.current_bytes
    (8000, 4000)

    Args:
        device: ``"cpu"``, ``"meta"``, or a CUDA device.

    Yields:
        The reading; ``peak.num_bytes`` is the peak in bytes.

    Raises:
        InputError: the device is unknown, has no meter, or is not on this machine.
    """
    resolved = _resolve(device)
    if resolved.type == "cuda":
        cuda_meter = _CudaMeter(resolved)
        cuda_meter.start()
        try:
            yield Peak(device=resolved, _meter=cuda_meter)
        finally:
            cuda_meter.stop()
    else:
        with _DispatchMeter(resolved.type) as dispatch_meter:
            yield Peak(device=resolved, _meter=dispatch_meter)


def _resolve(device: torch.device | str) -> torch.device:
    """Check the device; ``"cuda"`` becomes the current CUDA device."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"cannot measure on {device!r}: not a device; use 'cpu', 'meta' or 'cuda'") from error
    if resolved.type not in ("cpu", "meta", "cuda"):
        raise InputError(f"cannot measure on {str(resolved)!r}: it has no meter; use 'cpu', 'meta' or 'cuda'")
    if resolved.type != "cuda":
        return resolved
    num_devices = torch.cuda.device_count()
    if num_devices == 0 or (resolved.index or 0) >= num_devices:
        raise InputError(
            f"cannot measure on {str(resolved)!r}: this machine has {num_devices} CUDA devices; use one of them, or 'cpu' or 'meta'"
        )
    return torch.device("cuda", torch.cuda.current_device()) if resolved.index is None else resolved


class _CountedStorage(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with the bytes that it contributes."""

    __slots__ = ("base_bytes", "key", "num_bytes")

    key: int  # id of the storage: stable, as PyTorch keeps one Python object for each storage
    base_bytes: int  # its size before the block; 0 if the block made it
    num_bytes: int  # its present contribution


class _DispatchMeter(TorchDispatchMode):
    """Counter of the storages of one device type that operators make while the mode is active."""

    supports_higher_order_operators = True

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.current_bytes = 0
        self.peak_bytes = 0
        self._device_type = device_type
        self._counted: dict[int, _CountedStorage] = {}
        self._effects: dict[object, _Effect] = {}
        self._on_death: Callable[[_CountedStorage], None] = self._release

    @property
    def requested_peak_bytes(self) -> int:
        return self.peak_bytes

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            return NotImplemented  # the wrapper unpacks itself; its inner operators come back here
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator and count the storages that it makes."""
        effect = self._effects.get(func)
        if effect is None:
            effect = self._effects[func] = _effect_of(func)
        if effect == "aliases":
            return func(*args, **kwargs)
        before = [(s, s.nbytes()) for s in _storages((args, kwargs))] if effect == "resizes" else []

        result = func(*args, **kwargs)

        input_keys: set[int] | None = None
        for storage in _storages(result):
            if id(storage) in self._counted or storage.device.type != self._device_type:
                continue
            if input_keys is None:
                input_keys = {id(s) for s in _storages((args, kwargs))}
            if id(storage) not in input_keys:  # else it is older than the block: an alias is not an allocation
                self._count(storage, base_bytes=0)
        for storage, num_bytes in before:
            if id(storage) in self._counted or (storage.nbytes() > num_bytes and storage.device.type == self._device_type):
                self._count(storage, base_bytes=num_bytes)
        return result

    def _count(self, storage: torch.UntypedStorage, *, base_bytes: int) -> None:
        """Start to count a storage, or update its size."""
        key = id(storage)
        counted = self._counted.get(key)
        if counted is None:
            counted = _CountedStorage(storage, self._on_death)
            counted.key, counted.base_bytes, counted.num_bytes = key, base_bytes, 0
            self._counted[key] = counted
        num_bytes = max(0, storage.nbytes() - counted.base_bytes)
        self.current_bytes += num_bytes - counted.num_bytes
        counted.num_bytes = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _release(self, counted: _CountedStorage) -> None:
        del self._counted[counted.key]
        self.current_bytes -= counted.num_bytes


#: Effect of an operator on storages: it returns storages of its arguments, may resize them, or may make new ones.
_Effect = Literal["aliases", "resizes", "makes"]


def _effect_of(func: Any) -> _Effect:
    """Effect of an operator, derived from its schema. Most of a model's operators are views and in-place writes, which make no storage."""
    schema = op_schema(func)
    if schema is None:  # a higher-order operator
        return "makes"
    written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    # The ``out=`` forms and the resize family.
    if any(argument.kwarg_only for argument in written) or (bool(written) and "resize" in schema.name):
        return "resizes"
    if not schema.returns or not all(returned.alias_info for returned in schema.returns) or schema.name == "aten::set_":
        return "makes"
    # The result of a composite like ``contiguous`` may also be a copy.
    return "makes" if is_composite_op(func) else "aliases"


def _storages(value: Any) -> list[torch.UntypedStorage]:
    """The storages of all tensors in an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        return [value.untyped_storage()] if value.layout is torch.strided else []
    if isinstance(value, (list, tuple)):
        return [storage for item in value for storage in _storages(item)]
    if isinstance(value, dict):
        return [storage for item in value.values() for storage in _storages(item)]
    return []


class _CudaMeter:
    """Reader of the caching allocator's counters (blocks and requested bytes); open meters share its one resettable peak."""

    _open: list[_CudaMeter] = []  # noqa: RUF012  # shared on purpose

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = dict.fromkeys(_COUNTERS, 0)
        self._highest_bytes = dict.fromkeys(_COUNTERS, 0)
        self._is_open = False

    def start(self) -> None:
        torch.cuda.init()
        for meter in self._open:
            meter._keep_highest()  # the reset below wipes the peaks of the enclosing blocks
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start_bytes = self._read("current")
        self._highest_bytes = dict(self._start_bytes)
        self._is_open = True
        self._open.append(self)

    def stop(self) -> None:
        self._keep_highest()
        self._is_open = False
        self._open.remove(self)

    @property
    def peak_bytes(self) -> int:
        return self._peak("allocated_bytes")

    @property
    def requested_peak_bytes(self) -> int:
        return self._peak("requested_bytes")

    @property
    def current_bytes(self) -> int:
        return self._read("current")["allocated_bytes"] - self._start_bytes["allocated_bytes"]

    def _peak(self, counter: str) -> int:
        if self._is_open:
            self._keep_highest()
        return self._highest_bytes[counter] - self._start_bytes[counter]

    def _keep_highest(self) -> None:
        now = self._read("peak")
        self._highest_bytes = {counter: max(self._highest_bytes[counter], now[counter]) for counter in _COUNTERS}

    def _read(self, statistic: str) -> dict[str, int]:
        stats = torch.cuda.memory_stats(self._device)
        return {counter: int(stats.get(f"{counter}.all.{statistic}", 0)) for counter in _COUNTERS}
