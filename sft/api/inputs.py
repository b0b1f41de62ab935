"""Inputs of a compiled model: the arguments of ``net(x)``, and the ``input_shape`` of ``sft.compile``.

A call resolves each argument to a resident tensor or to a source that is read strip by strip:

========================================  ====================================================================================
argument                                  resolved to
========================================  ====================================================================================
tensor on the model's device              itself: resident, and counted with its full size
tensor on the host, model on a device     a source: exact, rows are copied to the device when needed
NumPy array, memmap, Zarr or dask array   a source: integers divided by 255, 65535 or 32767, floats unchanged; axes as in
                                          `sft.sources.ArraySource`
`sft.sources.Raster` (a slide, a crop)    a source: the same normalisation
`sft.sources.LabelSource`                 itself: integers unchanged, for a loss inside the model
any `sft.sources.Source`                  itself; `ArraySource` and `Normalized` define the normalisation of pixels
========================================  ====================================================================================

With ``input_grad=`` a tensor on the host becomes a source too.

Integer tensors (labels, masks) are unchanged. A tensor of an image's size without channels, ``[N, H, W]`` next to ``[N, C, H, W]``, is
treated as an image of one channel; the capture removes that channel before the model sees it.

An ``input_shape`` is a shape, a tensor that represents one, an input that is streamed, or a sequence of these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.analysis.frontend.capture import is_channels_last
from sft.analysis.ir.axes import Axes
from sft.common.byte_units import is_integer
from sft.common.errors import InputError, typed
from sft.sources.arrays import ArraySource
from sft.sources.chunked_arrays import is_chunked_array
from sft.sources.host_arrays import as_host_array
from sft.sources.image import Image, Raster
from sft.sources.normalize import Normalized
from sft.sources.sink import ArraySink, RowSink
from sft.sources.source import Source

__all__ = [
    "InputHint",
    "InputShape",
    "InputSpec",
    "ResolvedInput",
    "add_missing_channels",
    "check_extents",
    "examples_of",
    "find_missing_channels",
    "floating_input",
    "hints_of",
    "is_streamable_input",
    "resolve_inputs",
    "shapes_of",
]

#: Maximal extent of an image along any axis: schedules have an entry per row of each value, and more rows would exhaust host memory.
_MAX_EXTENT = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Properties of an input that plans depend on.

    Attributes:
        shape: ``(N, C, H, W)``.
        dtype: element type of the model's input.
        channels_last: whether it is a tensor in channels-last layout.
        needs_grad: whether its gradient is requested.
        from_source: whether it is read strip by strip.
        splits_batch: whether it can be read in groups of batch elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False
    needs_grad: bool = False
    from_source: bool = False
    splits_batch: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InputHint:
    """Facts about an input of a given shape.

    Attributes:
        dtype: element type of an integer input; ``None`` for the model's type.
        needs_grad: whether its gradient is requested.
        channels_last: whether its layout is channels last.
    """

    dtype: torch.dtype | None = None
    needs_grad: bool = False
    channels_last: bool = False

    @classmethod
    def of(cls, example: torch.Tensor) -> InputHint:
        """The facts about a tensor."""
        dtype = None if example.dtype.is_floating_point else example.dtype
        return cls(dtype=dtype, needs_grad=example.requires_grad, channels_last=is_channels_last(example))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResolvedInput:
    """One input of a call.

    Attributes:
        tensor: the tensor, if it is resident.
        source: the source, if it is read strip by strip.
        version_guard: the tensor that the source reads; its version is checked before the backward pass.
        make_sink: makes the sink of the source's gradient, if that is requested.
    """

    tensor: Tensor | None = None
    source: Source | None = None
    version_guard: Tensor | None = None
    make_sink: Callable[[], RowSink] | None = None

    @property
    def _value(self) -> Tensor | Source:
        value = self.tensor if self.source is None else self.source
        assert value is not None
        return value

    @property
    def shape(self) -> tuple[int, ...]:
        """``(N, C, H, W)``."""
        return tuple(self._value.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the model's input."""
        return self._value.dtype

    @property
    def needs_grad(self) -> bool:
        """True if its gradient is requested."""
        return self.make_sink is not None or (self.tensor is not None and self.tensor.requires_grad)

    @property
    def is_streamed(self) -> bool:
        """True if it is read, or its gradient written, strip by strip."""
        return self.source is not None or self.make_sink is not None

    @property
    def is_channels_last(self) -> bool:
        """True if it is a tensor in channels-last layout."""
        return self.tensor is not None and is_channels_last(self.tensor)

    @property
    def splits_batch(self) -> bool:
        """True if it can be read in groups of batch elements."""
        if not self.is_streamed or self.shape[:1] in ((), (1,)):
            return True
        endpoints = [endpoint for endpoint in (self.source, self.make_sink and self.make_sink()) if endpoint is not None]
        return all(hasattr(endpoint, "samples") for endpoint in endpoints)

    @property
    def spec(self) -> InputSpec:
        """Its properties."""
        return InputSpec(
            shape=self.shape,
            dtype=self.dtype,
            channels_last=self.is_channels_last,
            needs_grad=self.needs_grad,
            from_source=self.source is not None,
            splits_batch=self.splits_batch,
        )


def is_streamable_input(value: object) -> bool:
    """True for inputs that are read in strips: arrays, slides and sources, but not tensors."""
    return not isinstance(value, Tensor) and (isinstance(value, (np.ndarray, Image, Source)) or is_chunked_array(value))


def floating_input(values: Sequence[Any]) -> Tensor | None:
    """The first tensor of floating-point numbers among the arguments of a call."""
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def resolve_inputs(
    values: Sequence[Any], input_grad: Any, dtype: torch.dtype, device: torch.device, *, casts: bool = False
) -> tuple[ResolvedInput, ...]:
    """Resolve the arguments of a call.

    Args:
        values: the arguments.
        input_grad: destination of the inputs' gradients: None, one array or sink, or a sequence of them with an entry per input.
        dtype: of the model.
        device: of the model.
        casts: whether autocast is on, so that a tensor may have another floating-point type.

    Raises:
        InputError: lists all problems of all inputs.
        SourceError: a slide cannot be opened.
    """
    if not values:
        raise InputError("no input given; call net(x) with a tensor of shape [N, C, H, W]")
    targets = _grad_targets(input_grad, len(values))
    problems: list[str] = []
    resolved: list[ResolvedInput] = []
    for position, (value, target) in enumerate(zip(values, targets, strict=True)):
        name = f"input {position}"
        try:
            if isinstance(value, Tensor):
                is_free = not value.dtype.is_complex and (not value.is_floating_point() or (casts and target is None))
                expected = value.dtype if is_free else dtype
                _check_tensor(name, value, expected, device, wants_sink=target is not None)
                is_host = value.device.type == "cpu" and (device.type != "cpu" or target is not None)
                entry = _host_tensor(name, value, dtype) if is_host else ResolvedInput(tensor=value)
            else:
                entry = ResolvedInput(source=_source(name, value, dtype))
            if target is not None:
                entry = _with_sink(name, entry, value, target, dtype)
            resolved.append(entry)
        except InputError as error:
            problems.append(str(error))
    if not problems and not any(entry.shape for entry in resolved):
        problems.append("input 0 has no dimensions; batch it with x[None]")
    if not problems and any(entry.is_streamed for entry in resolved):
        problems = _source_batch_error(resolved)
    if problems:
        raise InputError("; ".join(problems))
    return tuple(resolved)


def _source_batch_error(inputs: Sequence[ResolvedInput]) -> list[str]:
    """Problems of streamed images with fewer samples than another image: the model would treat them as full tensors."""
    axes = Axes.of_inputs([each.shape for each in inputs])
    counts = [each.shape[0] if axes.is_image_shape(each.shape) else 0 for each in inputs]
    return [
        f"input {position} has {count} sample(s), another image {max(counts)}: only images with as many are read or written in strips; "
        f"give a tensor on the model's device, or {max(counts)} samples"
        for position, (each, count) in enumerate(zip(inputs, counts, strict=True))
        if 0 < count < max(counts) and each.is_streamed
    ]


def find_missing_channels(shapes: Sequence[tuple[int, ...]]) -> tuple[bool, ...]:
    """For each input, whether it has the size of another image, but no channels.

    >>> find_missing_channels([(2, 3, 40, 24), (2, 40, 24), (2, 5)])
    (False, True, False)
    """
    axes = Axes.of_inputs(shapes)
    sizes = {(shape[0], *shape[2:]) for shape in shapes if axes.is_image_shape(shape)}
    return tuple(len(shape) == axes.rank - 1 and tuple(shape) in sizes for shape in shapes)


def add_missing_channels(values: Sequence[ResolvedInput], lacking: Sequence[bool]) -> tuple[ResolvedInput, ...]:
    """Add a channel dimension to the inputs that lack it."""
    if not any(lacking):
        return tuple(values)
    return tuple(
        replace(value, tensor=value.tensor.unsqueeze(1)) if lacks and value.tensor is not None else value
        for value, lacks in zip(values, lacking, strict=True)
    )


def _grad_targets(input_grad: Any, num_inputs: int) -> list[Any]:
    if input_grad is None:
        return [None] * num_inputs
    targets = list(input_grad) if isinstance(input_grad, (list, tuple)) else [input_grad]
    if len(targets) != num_inputs:
        raise InputError(
            f"input_grad has {len(targets)} entries for {num_inputs} inputs; give a sequence with an array for each, None where the "
            "gradient is not wanted"
        )
    if not torch.is_grad_enabled() and any(target is not None for target in targets):
        raise InputError("input_grad is given, but gradients are off (torch.no_grad): no backward pass can fill it; leave it out")
    return targets


def check_extents(name: str, shape: Sequence[int | None]) -> None:
    """Refuse images above the maximal extent; ``None`` denotes an extent that varies.

    Raises:
        InputError: an extent is too large.
    """
    if len(shape) > 2 and max(extent or 0 for extent in shape) > _MAX_EXTENT:
        raise InputError(f"{name} {tuple(shape)}: no extent may be more than {_MAX_EXTENT}")


def _check_dense(name: str, value: Tensor) -> None:
    """Refuse tensors whose numbers are not one dense array: sparse, nested and quantized ones."""
    if value.is_nested:
        raise InputError(f"{name} is a nested tensor; give a dense tensor, such as value.to_padded_tensor(0.0)")
    if value.layout is not torch.strided:
        raise InputError(f"{name} has layout {value.layout}; give a dense tensor, such as value.to_dense()")
    if value.is_quantized:
        raise InputError(f"{name} is a quantized tensor ({value.dtype}); give value.dequantize()")


def _check_tensor(name: str, value: Tensor, dtype: torch.dtype, device: torch.device, *, wants_sink: bool) -> None:
    _check_dense(name, value)
    if value.is_complex():
        raise InputError(
            f"{name} has dtype {value.dtype}, and inputs are real: give real and imaginary parts as two inputs, and call "
            "torch.complex(real, imaginary) in `forward`"
        )
    if value.dtype != dtype:
        raise InputError(f"{name} has dtype {value.dtype}, the model {dtype}; convert one of them with .to()")
    check_extents(name, value.shape)
    moves = value.device.type == "cpu" and device.type not in ("cpu", "meta")
    if value.device != device and not moves:
        raise InputError(f"{name} is on {value.device}, the model on {device}; move one of them with .to()")
    if min(value.shape, default=1) < 1:
        raise InputError(f"{name} has shape {tuple(value.shape)}; every extent must be at least 1")
    if wants_sink and value.device.type != "cpu":
        raise InputError(f"{name} is on {value.device}, where its gradient is x.grad; leave out input_grad and use x.requires_grad_()")
    if value.requires_grad and (moves or wants_sink):
        why = "input_grad is given too" if wants_sink else f"it is on the host and the model on {device}"
        raise InputError(f"{name} requires grad, and {why}: its gradient is streamed; give x.detach() and input_grad=array")


def _host_tensor(name: str, value: Tensor, dtype: torch.dtype) -> ResolvedInput:
    if value.is_neg():
        raise InputError(f"{name} is a negated view; give value.resolve_neg()")
    if value.dim() < 3:
        raise InputError(f"{name} has {value.dim()} dimensions, and only images are read strip by strip; move it to the model's device")
    return ResolvedInput(source=ArraySource(value.detach(), layout="NCHW", dtype=dtype), version_guard=value)


def _source(name: str, value: Any, dtype: torch.dtype) -> Source:
    try:
        if isinstance(value, np.ndarray) or is_chunked_array(value):
            return ArraySource(value, dtype=dtype)
        if isinstance(value, Raster):
            return Normalized(value, dtype=dtype)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if isinstance(value, Source):
        shape = tuple(value.shape)
        if len(shape) != 4 or not all(isinstance(extent, int) and extent >= 1 for extent in shape):
            raise InputError(f"{name} is a source of shape {shape}; a source has four positive extents (N, C, H, W)")
        check_extents(name, shape)
        if not isinstance(value.dtype, torch.dtype):
            raise InputError(f"{name} is a source of dtype {value.dtype!r}; its dtype must be a torch.dtype, such as {dtype}")
        if value.dtype != dtype and value.dtype.is_floating_point:
            raise InputError(f"{name} is a source of {value.dtype}, the model has {dtype}; make the source with dtype={dtype}")
        return value
    hint = "; make it a source: sft.sources.Normalized(image, mean=..., std=...)" if isinstance(value, Image) else ""
    if isinstance(value, (NoneType, bool, int, float, str)):
        hint = "; a constant belongs into the model: compile a module whose forward calls it with this constant"
    if isinstance(value, (str, os.PathLike)) and Path(value).suffix:
        hint = _opened_text(value)
    raise InputError(f"{name} is {typed(value)}; give a tensor, a NumPy array, or a sft.sources.Source{hint}")


def _opened_text(path: str | os.PathLike[str]) -> str:
    """Remedy for the path of a file in place of its image."""
    text = os.fspath(path)
    return f"; a file is opened first: sft.sources.open_image({text!r}), labels sft.sources.open_labels({text!r})"


def _with_sink(name: str, entry: ResolvedInput, value: Any, target: Any, dtype: torch.dtype) -> ResolvedInput:
    assert entry.source is not None
    shape = entry.source.shape
    if isinstance(target, RowSink):
        if tuple(target.shape) != tuple(shape):
            raise InputError(f"{name} has shape {tuple(shape)}, its sink {tuple(target.shape)}; give one of the same shape")
        return ResolvedInput(source=entry.source, version_guard=entry.version_guard, make_sink=lambda: target)
    try:
        make = partial(ArraySink, target, shape=shape, dtype=dtype)
        make()
        if isinstance(value, (np.ndarray, Tensor)) and _may_overlap(value, target):
            raise InputError("it shares memory with the input, which is read while the gradient is written. Give an array of its own.")
    except InputError as error:
        raise InputError(f"input_grad of {name}: {error}") from error
    return ResolvedInput(source=entry.source, version_guard=entry.version_guard, make_sink=make)


def _may_overlap(value: Any, target: Any) -> bool:
    arrays = [as_host_array(array, "compare memory of") for array in (value, target)]
    return all(isinstance(array, np.ndarray) for array in arrays) and np.may_share_memory(arrays[0], arrays[1])


InputShape = Any


def examples_of(inputs: Any) -> tuple[Any, ...]:
    """The inputs themselves, if one of them is streamed; empty if they are shapes."""
    if is_streamable_input(inputs):
        return (inputs,)
    is_several = isinstance(inputs, (list, tuple)) and any(is_streamable_input(value) for value in inputs)
    return tuple(inputs) if is_several else ()


def _items(input_shape: InputShape) -> list[Any]:
    """The entry of each input: a shape or a tensor."""
    if isinstance(input_shape, torch.Tensor):
        _check_dense("input 0", input_shape)
        return [input_shape]
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str) or not input_shape:
        hint = _opened_text(input_shape) if isinstance(input_shape, (str, os.PathLike)) else ""
        raise InputError(f"input_shape {input_shape!r}: give (N, C, H, W), or a sequence of such shapes{hint}")
    items = list(input_shape)
    for position, item in enumerate(items):
        if isinstance(item, torch.Tensor):
            _check_dense(f"input {position}", item)
    is_each = [isinstance(item, (torch.Tensor, Sequence)) and not isinstance(item, str) for item in items]
    return items if all(is_each) else [items]


def hints_of(input_shape: InputShape) -> tuple[InputHint, ...]:
    """For each input what its description says besides the shape."""
    return tuple(InputHint.of(item) if isinstance(item, torch.Tensor) else InputHint() for item in _items(input_shape))


def shapes_of(input_shape: InputShape) -> tuple[tuple[int | None, ...], ...]:
    """The shapes of the inputs, with ``None`` for extents that vary."""
    shapes = [tuple(item.shape) if isinstance(item, torch.Tensor) else tuple(item) for item in _items(input_shape)]
    shapes = [tuple(int(extent) if is_integer(extent) else extent for extent in shape) for shape in shapes]
    if not any(shapes):
        raise InputError(f"input_shape {shapes[0]}: no extents, expected at least one, the batch; (N, C, H, W) for images")
    for shape in shapes:
        for extent in shape:
            if extent is not None and not (is_integer(extent) and extent >= 1):
                raise InputError(f"input_shape {shape}: extent {extent!r} is not a positive integer (or None for one that varies)")
        check_extents("input_shape", shape)
    return tuple(shapes)
