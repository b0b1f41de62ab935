"""Pools of tiles: the interpreted kernels against PyTorch and a plain reference on the untiled image; memory around the tiles is NaN."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sft.kernels.geometry import Geometry, KernelWindow
from sft.kernels.pool.taps import is_packed, tap_channels
from tests.helpers.tile_buffers import assert_nothing_else_written, empty_buffer, fill_buffer, pixels_of, tile_geometry
from tests.helpers.triton_process import interpret, needs_triton
from tests.kernels.oracles.pool import pack_taps, reference_average_pool, reference_average_pool_gradient, reference_max_pool

_NUM_CHANNELS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    name: str
    extents: tuple[int, int]
    window: KernelWindow
    average: dict[str, Any] | None = None
    sizes: dict[str, Any] = field(default_factory=dict)

    def whole(self, x: Tensor) -> Tensor:
        """PyTorch's own pool."""
        w = self.window
        if self.average is None:
            return F.max_pool2d(x, w.kernel, w.stride, w.padding, w.dilation)
        options = {"count_include_pad": self.average["count_padding"], "divisor_override": self.average["divisor"]}
        return F.avg_pool2d(x, w.kernel, w.stride, w.padding, **options)


_POOLS = [
    _Pool(name="max 2x2", extents=(9, 10), window=KernelWindow(kernel=2, stride=2)),
    _Pool(name="max 3x3", extents=(10, 9), window=KernelWindow(kernel=3, stride=2, padding=1)),
    _Pool(name="max 3x3 dense, dilated", extents=(9, 11), window=KernelWindow(kernel=3, dilation=2, padding=1)),
    _Pool(name="average 2x2", extents=(8, 9), window=KernelWindow(kernel=2, stride=2), average={"count_padding": True, "divisor": None}),
    _Pool(
        name="average 3x3",
        extents=(9, 8),
        window=KernelWindow(kernel=3, stride=2, padding=1),
        average={"count_padding": False, "divisor": None},
    ),
    _Pool(
        name="average 3x3, padding counts",
        extents=(8, 9),
        window=KernelWindow(kernel=3, padding=1),
        average={"count_padding": True, "divisor": None},
    ),
    _Pool(name="sum", extents=(8, 7), window=KernelWindow(kernel=3, stride=3), average={"count_padding": True, "divisor": 1}),
]


def _problem(pool: _Pool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dy, y and dx of the whole image in ``dtype``; small integers, so there are ties."""
    random = torch.Generator().manual_seed(2)
    x = torch.randint(-4, 5, (2, _NUM_CHANNELS, *pool.extents), generator=random).to(dtype).requires_grad_()
    y = pool.whole(x)
    dy = torch.randint(-8, 9, y.shape, generator=random).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    return x.detach(), dy, y.detach(), dx


def _tiles(size: tuple[int, ...]) -> list[tuple[range, range]]:
    rows, columns = ([range(n // 3), range(n // 3, n // 3 + 2), range(n // 3 + 2, n)] for n in size[-2:])
    return list(itertools.product(rows, (range(columns[1].start), range(columns[1].start, size[-1]))))


def _last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


def _geometry(pool: _Pool, tile: tuple[range, range], *, adjoint: bool = False) -> Geometry:
    return tile_geometry(pool.extents, (pool.window, pool.window), tile, adjoint=adjoint)


def _taps(pool: _Pool, x: Tensor) -> Tensor:
    geometry = Geometry.whole(pool.extents, pool.window, pool.window)
    _, taps = reference_max_pool(x, geometry)
    return _last(pack_taps(taps) if is_packed(geometry) else taps)


def test_nan_and_equal_elements_as_in_pytorch() -> None:
    x = torch.tensor([[[[1.0, float("nan"), 2.0, 2.0], [float("nan"), 0.0, 2.0, -1.0]]]])
    geometry = Geometry.whole((2, 4), KernelWindow(kernel=2, stride=2), KernelWindow(kernel=2, stride=2))
    theirs, indices = F.max_pool2d(x, 2, return_indices=True)
    ours, taps = reference_max_pool(x, geometry)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert torch.equal(taps.long(), indices // 4 % 2 * 2 + indices % 2)


def test_packed_taps_are_two_bits_of_each_channel() -> None:
    taps = torch.randint(4, (2, 7, 3, 5), dtype=torch.uint8)
    packed = pack_taps(taps)
    assert packed.shape == (2, 2, 3, 5)
    assert all(torch.equal(packed[:, channel // 4] >> channel % 4 * 2 & 3, taps[:, channel]) for channel in range(7))


@needs_triton
def test_interpreted_kernels(tmp_path: Path) -> None:
    """In fp32 the bits of PyTorch's untiled maximum and of our own reference; in half precision integers, which are exact."""
    jobs: list[dict[str, Any]] = []
    expected: list[tuple[list[Tensor], str]] = []

    def add(launch: str, arguments: dict[str, Any], results: list[str], truth: list[Tensor], name: str) -> None:
        arguments |= {"block": (128, 8)}
        jobs.append(
            {"run": "launch", "module": "sft.kernels.pool.pool_triton", "function": launch, "arguments": arguments, "results": results}
        )
        expected.append((truth, name))

    for pool, dtype in itertools.product(_POOLS, (torch.float32, torch.float16, torch.bfloat16)):
        if dtype != torch.float32 and pool.average is not None and pool.average["divisor"] != 1:
            continue
        x, dy, y, dx = _problem(pool, dtype)
        whole = Geometry.whole(pool.extents, pool.window, pool.window)
        if pool.average is not None and dtype == torch.float32:
            y, dx = reference_average_pool(x, whole, **pool.average), reference_average_pool_gradient(dy, whole, **pool.average)
        taps = _taps(pool, x) if pool.average is None else None
        outputs = _tiles(tuple(y.shape)) if dtype == torch.float32 else [(range(y.shape[2]), range(y.shape[3]))]
        inputs = _tiles(pool.extents) if dtype == torch.float32 else [(range(pool.extents[0]), range(pool.extents[1]))]
        for tile in outputs:
            geometry = _geometry(pool, tile)
            arguments: dict[str, Any] = {"x": fill_buffer(x, (geometry.height.input, geometry.width.input), dtype), "geometry": geometry}
            arguments["out"] = empty_buffer(2, _NUM_CHANNELS, geometry.output_size, dtype)
            if taps is None:
                assert pool.average is not None
                add("launch_average_pool", arguments | pool.average, ["out"], [pixels_of(y, tile)], pool.name)
            else:
                arguments["taps"] = empty_buffer(2, tap_channels(_NUM_CHANNELS, geometry), geometry.output_size, torch.uint8)
                add("launch_max_pool", arguments, ["out", "taps"], [pixels_of(y, tile), pixels_of(taps, tile)], pool.name)
        for tile in inputs:
            geometry = _geometry(pool, tile, adjoint=True)
            spans = (geometry.height.output, geometry.width.output)
            arguments = {"gradient": fill_buffer(dy, spans, dtype), "geometry": geometry}
            arguments["out"] = empty_buffer(2, _NUM_CHANNELS, geometry.input_size, dtype)
            if taps is None:
                assert pool.average is not None
                add("launch_average_pool_gradient", arguments | pool.average, ["out"], [pixels_of(dx, tile)], pool.name)
            else:
                arguments["taps"] = fill_buffer(taps, spans, torch.uint8)
                add("launch_max_pool_gradient", arguments, ["out"], [pixels_of(dx, tile)], pool.name)
    for (truth, name), results, job in zip(expected, interpret(jobs, tmp_path), jobs, strict=True):
        context = (name, job["function"], job["arguments"]["geometry"])
        for ours, theirs in zip(results, truth, strict=True):
            assert torch.equal(ours, theirs), context
            if ours.dtype != torch.uint8:
                assert_nothing_else_written(ours, context)
