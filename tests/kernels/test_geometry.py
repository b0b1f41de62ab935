"""The geometry contract against brute force: which rows a window reads, which of them a buffer must hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sft import InputError
from sft.kernels.geometry import Geometry, KernelWindow, Span, TileAxis, check_buffer

_windows = st.builds(
    KernelWindow, kernel=st.integers(1, 4), stride=st.integers(1, 3), dilation=st.integers(1, 3), padding=st.integers(0, 4)
)
_spans = st.builds(Span, start=st.integers(-6, 20), size=st.integers(0, 12), extent=st.integers(0, 16))


def _reads(window: KernelWindow, output: int) -> list[int]:
    return [output * window.stride - window.padding + window.dilation * tap for tap in range(window.kernel)]


@given(_spans)
def test_data_is_what_lies_in_the_image(span: Span) -> None:
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
def test_missing_rows(window: KernelWindow, input: Span, output: Span) -> None:
    """Nothing is missing exactly if the range of all rows that are read, cut to the image, is in the buffer."""
    axis = TileAxis(input=input, output=output, window=window)
    reads = [row for o in range(output.start, output.stop) if 0 <= o < output.extent for row in _reads(window, o)]
    needed = [row for row in range(min(reads, default=0), max(reads, default=-1) + 1) if 0 <= row < input.extent]
    assert (axis.missing_input() is None) == all(input.start <= row < input.stop for row in needed)
    if reads:
        assert axis.missing_input() in (None, (needed[0], needed[-1] + 1) if needed else None)
    assert axis.shift == _reads(window, output.start)[0] - input.start


@given(_windows, st.integers(1, 16), st.data())
def test_a_whole_image_lacks_nothing(window: KernelWindow, extent: int, data: st.DataObject) -> None:
    geometry = Geometry.whole((extent, extent), window, window)
    geometry.check_forward()
    geometry.check_adjoint()
    assert geometry.output_size[0] == len([o for o in range(60) if _reads(window, o)[-1] < extent + window.padding])


def test_a_missing_halo_is_an_error_that_names_the_rows() -> None:
    window = KernelWindow(kernel=3, padding=1)
    width = TileAxis(input=Span.whole(9), output=Span.whole(9), window=window)

    def geometry(start: int, size: int, output: tuple[int, int]) -> Geometry:
        span = Span(start=output[0], size=output[1], extent=20)
        return Geometry(height=TileAxis(input=Span(start=start, size=size, extent=20), output=span, window=window), width=width)

    geometry(0, 5, (0, 4)).check_forward()
    geometry(-1, 6, (0, 4)).check_forward()
    geometry(15, 5, (16, 4)).check_forward()
    with pytest.raises(InputError, match=r"height: the outputs read input \[0, 6\), the buffer holds \[0, 5\)"):
        geometry(0, 5, (0, 5)).check_forward()
    with pytest.raises(InputError, match=r"outputs \[17, 21\) are not all in \[0, 20\)"):
        geometry(15, 5, (17, 4)).check_forward()
    geometry(5, 2, (4, 4)).check_adjoint()
    with pytest.raises(InputError, match=r"the gradient reads outputs \[4, 8\), the buffer holds \[5, 8\)"):
        geometry(5, 2, (5, 3)).check_adjoint()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="size=-1"):
        Span(start=0, size=-1, extent=3)
    with pytest.raises(InputError, match="stride=0"):
        KernelWindow(kernel=1, stride=0)
    problems: list[str] = []
    x = torch.zeros(2, 3, 4, 5)
    check_buffer("x", x.to(memory_format=torch.channels_last)[:, :, 1:3], 2, 3, (2, 5), problems)
    check_buffer("y", x[:, :1], 2, 1, (4, 5), problems)
    assert problems == []
    check_buffer("x", x, 2, 3, (4, 5), problems)
    check_buffer("x", x, 2, 3, (4, 4), problems)
    assert ["channels-last" in line for line in problems] == [True, False] and "(2, 3, 4, 4)" in problems[1]
