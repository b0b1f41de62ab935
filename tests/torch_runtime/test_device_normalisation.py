"""Pixels that a device normalises: the bits of the host, in the projected bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sft.common.interval import Interval
from sft.runtime.simulated_machine import SimulatedMachine
from sft.sources import ArraySource
from sft.torch_runtime.host.input_streaming import DeviceNormalizer, SourceStripLoader, Uploads, load_source
from sft.torch_runtime.pass_statistics import PassReading
from tests.helpers.fake_cuda import DEVICE, FakeGpu, fake_cuda, observed

_PIXEL_TYPES = (torch.uint8, torch.uint16, torch.int16, torch.float16, torch.bfloat16)


@st.composite
def _pixel_sources(draw: st.DrawFn) -> ArraySource:
    """Arrays of any layout, type and normalisation."""
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    pixel_type = draw(st.sampled_from(_PIXEL_TYPES if dtype.itemsize < 8 else (*_PIXEL_TYPES, torch.float32)))
    layout = draw(st.sampled_from(["HWC", "CHW", "NHWC", "NCHW"]))
    extents = {axis: draw(st.integers(1, most)) for axis, most in (("N", 3), ("H", 9), ("W", 7))} | {"C": 3}
    shape = [extents[axis] for axis in layout]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if pixel_type.is_floating_point:
        array = torch.from_numpy(rng.normal(0, 3, shape)).to(pixel_type)
    else:
        limits = torch.iinfo(pixel_type)
        array = torch.from_numpy(rng.integers(limits.min, limits.max + 1, shape)).to(pixel_type)
    low, span, mean, std = (st.floats(*ends, width=32) for ends in ((-300, 200), (0.5, 65536), (-3, 3), (0.015625, 5)))
    value_range = draw(st.none() | st.tuples(low, span).map(lambda pair: (pair[0], pair[0] + pair[1])))
    return ArraySource(
        array if pixel_type is torch.bfloat16 else array.numpy(),
        layout=layout,  # type: ignore[arg-type]  # one of the four
        mean=draw(st.none() | st.tuples(mean, mean, mean)),
        std=draw(st.none() | st.tuples(std, std, std)),
        value_range=value_range,
        clip=draw(st.booleans()) and (value_range is not None or not pixel_type.is_floating_point),
        dtype=dtype,
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _read(source: ArraySource) -> Tensor:
    """All numbers, computed by the host."""
    numbers = torch.empty(source.shape, dtype=source.dtype)
    source.rows(Interval(0, source.shape[2]), numbers)
    return numbers


@given(source=_pixel_sources())
def test_a_device_normalises_pixels_to_the_bits_of_the_host(source: ArraySource) -> None:
    """For each type of numbers: float16 and bfloat16 are computed in float32 and rounded once."""
    pixels = torch.empty(source.shape, dtype=source.normalizer.pixel_dtype)
    source.pixel_rows(Interval(0, source.shape[2]), pixels)
    normalize = DeviceNormalizer(source.normalizer, source.dtype, torch.device("cpu"))
    result = torch.empty(source.shape, dtype=source.dtype).permute(0, 2, 3, 1)
    work = result if source.dtype is normalize.work_dtype else torch.empty(result.shape, dtype=normalize.work_dtype)
    normalize(pixels.permute(0, 2, 3, 1), result, work)
    assert torch.equal(_bits(result.permute(0, 3, 1, 2)), _bits(_read(source)))


class _PeakOfTensors:
    """Peak bytes of tensors on a fake device."""

    def __init__(self, gpu: FakeGpu, patches: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        allocate = FakeGpu._allocate

        def note(this: FakeGpu, tensor: Tensor, label: str) -> None:
            allocate(this, tensor, label)
            self.num_bytes = max(self.num_bytes, sum(each.num_bytes for _, each in gpu._device.values()))

        patches.setattr(FakeGpu, "_allocate", note)


@given(source=_pixel_sources(), strip_rows=st.integers(1, 9), full_read_bytes=st.sampled_from([1, 200, 2**20]))
def test_pixels_pass_through_the_memory_of_the_plan(source: ArraySource, strip_rows: int, full_read_bytes: int) -> None:
    """In several strips, in a single one, and as a full image: the bits of the host, in the bytes of the simulated loaders."""
    num, channels, height, width = source.shape
    row_bytes = num * channels * width * source.dtype.itemsize
    order = [Interval(top, min(top + strip_rows, height)) for top in range(0, height, strip_rows)]
    copied: set[torch.dtype] = set()
    copy_pixels = Uploads.copy

    def note(uploads: Uploads, target: Tensor, pixels: Tensor, allocated: Any) -> Any:
        copied.add(pixels.dtype)
        return copy_pixels(uploads, target, pixels, allocated)

    for is_whole in (False, True):
        simulated = SimulatedMachine(on_host=False)
        with pytest.MonkeyPatch.context() as patches, fake_cuda() as gpu:
            peak = _PeakOfTensors(gpu, patches)
            patches.setattr(Uploads, "copy", note)
            for module in ("sft.sources.strip_reader", "sft.runtime.simulated_machine"):
                patches.setattr(f"{module}.FULL_READ_BYTES", full_read_bytes)
            result = torch.empty(source.shape, dtype=source.dtype)
            with observed(gpu):
                if is_whole:
                    simulated.read_input(None, source.shape, source.dtype)
                    out = torch.empty(source.shape, dtype=source.dtype, device=DEVICE, memory_format=torch.channels_last)
                    load_source(source, out, PassReading())
                    result.copy_(out)
                else:
                    simulated.open_input(None, Interval(0, num), order, row_bytes, source.dtype).close()
                    loader = SourceStripLoader(source, Interval(0, num), order, DEVICE, PassReading())
                    for rows in order:
                        result[:, :, rows.start : rows.stop].copy_(loader.take(rows))
                    loader.close()
            assert not gpu.checker.races
        assert torch.equal(_bits(result), _bits(_read(source)))
        assert peak.num_bytes <= simulated.memory.peak_bytes + 4 * channels * 8  # and the vectors of the normalisation
    assert source.normalizer.pixel_dtype in copied
