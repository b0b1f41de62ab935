"""Host arrays, in memory or mapped from a file: axis order, and safe access to mappings.

*Axes are never guessed.* ``[3, 20000, 3]`` may be three rows or three channels, and the wrong choice trains without complaint.
Without an explicit layout the channel axis is the one candidate of 1, 3 or 4 entries; if both candidates or none have that, the
array is refused.

*A mapped file may shrink.* Touching a page beyond its end kills the process (SIGBUS) instead of raising. Its size is therefore
compared before every access, at the cost of one ``fstat``.

*A mapped file stays in memory.* Pages that were read count as the process's memory until the kernel reclaims them. A reader of strips
does not need them again, so they are released at once; the contents of the file stay in the kernel's cache. A release also drops pages
that the kernel mapped ahead, so images of a batch are read and released together.
"""

from __future__ import annotations

import mmap
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.errors import InputError, SourceError, typed

__all__ = [
    "AnyArray",
    "HostArray",
    "Layout",
    "as_host_array",
    "axis_order",
    "check_mapping",
    "convert_pixels",
    "copy_pixels",
    "copy_serially",
    "release_pages",
    "resolve_layout",
]

#: Names of an array's axes in order: batch, channels, rows (height), columns (width).
Layout: TypeAlias = Literal["CHW", "HWC", "NCHW", "NHWC"]
AnyArray: TypeAlias = npt.NDArray[Any]
HostArray: TypeAlias = AnyArray | Tensor

_LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_USUAL_CHANNELS = (1, 3, 4)
#: Channels are at most this fraction of the extent that would have the channels in another order.
_FEW_CHANNELS = 16
#: Numbers up to which an operator of torch runs in the calling thread (``at::internal::GRAIN_SIZE``).
_SERIAL_NUMBERS = 32768
#: On a page fault Linux maps the surrounding folio of its cache as well: up to a huge page.
_FAULT_AROUND_BYTES = 2 << 20


def as_host_array(value: object, purpose: str) -> HostArray:
    """NumPy array that shares the memory of a value (a tensor of bfloat16, which NumPy lacks, stays a tensor).

    Args:
        value: array or tensor of the caller.
        purpose: for the error message: ``"read rows from"`` or ``"write gradients to"``.

    Raises:
        InputError: neither a plain NumPy array nor a dense host tensor, or a tensor that autograd tracks.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"cannot {purpose} a masked array: its mask would be lost. Fill it first: array.filled(value).")
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, Tensor):
        raise InputError(f"cannot {purpose} {typed(value)}: expected a NumPy array, a memmap or a host tensor. Convert it.")
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_neg():
        raise InputError(
            f"cannot {purpose} a tensor on {value.device} with layout {value.layout}: rows stream between host and device. "
            "Give a dense CPU tensor."
        )
    if value.requires_grad:
        raise InputError(f"cannot {purpose} a tensor that requires grad: gradients go to input_grad=. Give tensor.detach().")
    return value if value.dtype is torch.bfloat16 else value.numpy()


def resolve_layout(
    name: str, shape: tuple[int, ...], layout: Layout | None, *, expected: tuple[int, int, int, int] | None = None
) -> Layout:
    """Axis order of an array.

    >>> [resolve_layout("array", shape, None) for shape in [(200, 100, 3), (7, 640, 480)]], resolve_layout("array", (7, 64, 9), "CHW")
    (['HWC', 'CHW'], 'CHW')
    >>> resolve_layout("array", (1, 3, 200, 4), None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    sft.common.errors.InputError: cannot tell the axes of array of shape (1, 3, 200, 4): it may be NCHW or NHWC. ...

    Args:
        name: for the error message.
        shape: of the array.
        layout: explicit axis order; None to infer it if only one is possible.
        expected: ``(N, C, H, W)`` that the array must have, if known.

    Raises:
        InputError: wrong rank, an empty axis, an unknown, wrong or ambiguous layout.
    """
    if layout is not None and layout not in _LAYOUTS:
        raise InputError(f"cannot use layout {layout!r} for {name}: choose one of {', '.join(_LAYOUTS)}.")
    candidates = [known for known in _LAYOUTS if len(known) == len(shape) and layout in (None, known)]
    if not candidates:
        raise InputError(
            f"cannot use {name} of shape {shape} as {layout or 'an image'}: it has {len(shape)} axes. Give 3 axes (CHW, HWC) or 4 "
            "(NCHW, NHWC); add missing ones with array[None]. Signals and volumes are given as tensors: torch.from_numpy(array). Labels "
            "are given as sft.sources.LabelSource(array)."
        )
    if min(shape) < 1:
        raise InputError(f"cannot use {name} of shape {shape}: every extent must be at least 1. Give an array that is not empty.")
    if expected is not None:
        matching = [known for known in candidates if _extents(shape, known) == expected]
        if not matching:
            raise InputError(f"cannot use {name} of shape {shape} as {' or '.join(candidates)}: expected (N, C, H, W) = {expected}.")
        candidates = matching
    elif layout is None:
        candidates = [known for known in candidates if shape[known.index("C")] in _USUAL_CHANNELS] or _by_channels(shape, candidates)
    if len(candidates) > 1:
        raise InputError(
            f"cannot tell the axes of {name} of shape {shape}: it may be {' or '.join(candidates)}. Say which with layout=..., as in "
            f"sft.sources.ArraySource(array, layout={candidates[0]!r})."
        )
    return candidates[0]


def _by_channels(shape: tuple[int, ...], candidates: list[Layout]) -> list[Layout]:
    """Orders with the fewest channels, if other orders have many times as many."""
    counts = {known: shape[known.index("C")] for known in candidates}
    fewest = [known for known, count in counts.items() if count * _FEW_CHANNELS <= max(counts.values())]
    return fewest or candidates


def _extents(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    by_axis = dict(zip(layout, shape, strict=True))
    return tuple(by_axis.get(axis, 1) for axis in "NCHW")


def axis_order(layout: Layout, axes: str) -> tuple[int, ...]:
    """The permutation that brings an array of ``layout`` (a missing batch axis inserted in front) to ``axes``.

    >>> axis_order("CHW", "NHWC"), axis_order("NCHW", "NCHW")
    ((0, 2, 3, 1), (0, 1, 2, 3))
    """
    full = layout if len(layout) == 4 else "N" + layout
    return tuple(full.index(axis) for axis in axes)


def copy_serially(target: Tensor, source: Tensor) -> None:
    """Copy between host tensors of one shape in the calling thread.

    A larger copy of torch starts a team of threads. In a reader's thread it is a second team, which waits for cores that the network has.
    """
    if target.numel() <= _SERIAL_NUMBERS:
        target.copy_(source)
        return
    dim = next(dim for dim, extent in enumerate(target.shape) if extent > 1)
    step = max(1, target.shape[dim] * _SERIAL_NUMBERS // target.numel())
    for pieces in zip(target.split(step, dim), source.split(step, dim), strict=True):
        copy_serially(*pieces)


def convert_pixels(pixels: HostArray, out: AnyArray) -> None:
    """Copy pixels ``[..., rows, width, channels]`` into an array of a type that has all of their values."""
    if isinstance(pixels, Tensor):
        copy_serially(torch.from_numpy(out), pixels)
    elif pixels.strides[-1] == pixels.itemsize:
        np.copyto(out, pixels)
    else:  # planes: along the columns of one channel NumPy's inner loop is long, across the channels it would be three steps
        for channel in range(out.shape[-1]):
            np.copyto(out[..., channel], pixels[..., channel])


def copy_pixels(pixels: HostArray, out: Tensor) -> None:
    """Copy pixels ``[..., rows, width, channels]`` unchanged into ``out``, ``[..., channels, rows, width]`` of their type."""
    if isinstance(pixels, Tensor):  # bfloat16, which NumPy does not have
        pixels, out = pixels.view(torch.int16).numpy(), out.view(torch.int16)
    convert_pixels(pixels, out.detach().movedim(-3, -1).numpy())


def check_mapping(array: HostArray, name: str) -> None:
    """Refuse to touch an array in a file that has become shorter than its mapping.

    Raises:
        SourceError: the file was cut short after it was opened.
    """
    base, _ = _mapping_of(array)
    if base is None:
        return
    # Views inherit the offset of the memmap that they are of; the mapping starts at the page that holds it.
    offset = int(getattr(array, "offset", 0))
    end_bytes = offset - offset % mmap.ALLOCATIONGRANULARITY + len(base)
    if base.size() < end_bytes:
        raise SourceError(
            f"cannot access {name}: its file has {base.size()} bytes, {end_bytes} are mapped. It was cut short while it was open; "
            "restore it and open it again."
        )


def _mapping_of(array: HostArray) -> tuple[mmap.mmap | None, str]:
    """Mapping under an array, and its access mode if known."""
    base: Any = array
    mode = ""
    while isinstance(base, np.ndarray):
        mode = mode or str(getattr(base, "mode", "") or "")
        base = base.base
    return (base if isinstance(base, mmap.mmap) else None), mode


def release_pages(pixels: HostArray) -> None:
    """Release the pages of some rows of a mapped file to the kernel; a later access reads the same bytes again.

    Arrays that are not mapped are left alone, and so are copy-on-write mappings, whose changes exist in their pages alone.

    Args:
        pixels: ``[..., rows, width, channels]``, in any memory layout.
    """
    base, mode = _mapping_of(pixels)
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if base is None or advice is None or mode not in ("r", "r+", "w+") or not isinstance(pixels, np.ndarray) or not pixels.size:
        return
    start = np.frombuffer(base, np.uint8).__array_interface__["data"][0]
    for block in _blocks(pixels):
        first, end = _extent(block)
        low = max(0, first - start - _FAULT_AROUND_BYTES)
        low -= low % mmap.PAGESIZE
        base.madvise(advice, low, min(len(base), end - start + _FAULT_AROUND_BYTES) - low)


def _blocks(pixels: AnyArray) -> list[AnyArray]:
    """Stretches of a file: all pixels, or those of a batch element, or those of a channel's plane."""
    first, end = _extent(pixels)
    if end - first == pixels.nbytes:
        return [pixels]
    if pixels.ndim > 3:
        return [block for sample in pixels for block in _blocks(sample)]
    by_rows = abs(pixels.strides[0]) >= max(map(abs, pixels.strides))
    return [pixels] if by_rows else [pixels[..., channel] for channel in range(pixels.shape[2])]


def _extent(pixels: AnyArray) -> tuple[int, int]:
    """Addresses of an array's first byte in memory and of the byte after its last one."""
    low = high = pixels.__array_interface__["data"][0]
    for stride, extent in zip(pixels.strides, pixels.shape, strict=True):
        low += min(0, stride * (extent - 1))
        high += max(0, stride * (extent - 1))
    return low, high + pixels.itemsize
