"""The geometry contract against brute force: rows that a window reads, rows of a buffer that are data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sft import InputError
from sft.kernels.geometry import Geometry, KernelWindow, Span, TileAxis, is_channels_last

_windows = st.builds(
    KernelWindow, kernel=st.integers(1, 4), stride=st.integers(1, 3), dilation=st.integers(1, 3), padding=st.integers(0, 4)
)
_spans = st.builds(Span, start=st.integers(-6, 20), size=st.integers(0, 12), extent=st.integers(0, 16))


def _reads(window: KernelWindow, output: int) -> list[int]:
    return [output * window.stride - window.padding + window.dilation * tap for tap in range(window.kernel)]


@given(_spans)
def test_data_rows_are_those_of_the_image(span: Span) -> None:
    low, high = span.data
    assert list(range(low, high)) == [row for row in range(span.size) if 0 <= span.start + row < span.extent]


@given(_windows, st.integers(-5, 10), st.integers(0, 6))
def test_reads_and_writes_are_the_tightest_ranges(window: KernelWindow, start: int, size: int) -> None:
    rows = [row for output in range(start, start + size) for row in _reads(window, output)]
    first, last = window.reads(start, start + size)
    assert last - first == 0 if not rows else (first, last) == (min(rows), max(rows) + 1)
    first, last = window.writes(start, start + size)
    reaches = range(-40, 40)
    outputs = [o for o in reaches if _reads(window, o)[0] < start + size and _reads(window, o)[-1] >= start] if size else []
    assert list(range(first, last)) == outputs


@given(_windows, _spans, _spans)
def test_shift_is_the_first_row_that_the_first_output_reads(window: KernelWindow, input: Span, output: Span) -> None:
    axis = TileAxis(input=input, output=output, window=window)
    assert axis.shift == _reads(window, output.start)[0] - input.start


@given(_windows, st.integers(1, 16))
def test_outputs_of_an_untiled_image(window: KernelWindow, extent: int) -> None:
    geometry = Geometry.whole((extent, extent), window, window)
    assert geometry.output_size[0] == len([o for o in range(60) if _reads(window, o)[-1] < extent + window.padding])


def test_invalid_geometries_are_refused() -> None:
    with pytest.raises(InputError, match="size=-1"):
        Span(start=0, size=-1, extent=3)
    with pytest.raises(InputError, match="stride=0"):
        KernelWindow(kernel=1, stride=0)


def test_channels_last_buffers() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert is_channels_last(x.to(memory_format=torch.channels_last)[:, :, 1:3]) and is_channels_last(x[:, :1])
    assert not is_channels_last(x)
