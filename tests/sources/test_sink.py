"""Gradients that are written to host arrays: sums of overlapping strips, zeros without a strip, refusals that write nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sft import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import ArraySink, Layout, RowSink
from sft.sources.host_arrays import axis_order

LAYOUTS: list[Layout] = ["CHW", "HWC", "NCHW", "NHWC"]
SHAPE = (1, 3, 6, 5)


@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: Interval(*sorted(pair))), max_size=8),
    st.sampled_from([np.float32, np.float64, torch.bfloat16]),
    st.data(),
)
def test_the_sum_of_all_strips(layout: Layout, num: int, intervals: list[Interval], dtype: Any, data: st.DataObject) -> None:
    extents = {"N": num if len(layout) == 4 else 1, "C": 3, "H": 9, "W": 4}
    sizes = tuple(extents[axis] for axis in layout)
    # The earlier content of the array, even NaN, has no effect.
    array = torch.full(sizes, float("nan"), dtype=dtype) if isinstance(dtype, torch.dtype) else np.full(sizes, np.nan, dtype)
    shape = (extents["N"], 3, 9, 4)
    gradient_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    sink = ArraySink(array, shape=shape, dtype=gradient_dtype, layout=layout)
    assert isinstance(sink, RowSink) and sink.shape == shape
    expected = torch.zeros(shape, dtype=gradient_dtype)
    for seed, rows in enumerate(intervals):
        batch = Interval(0, shape[0])
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, shape[0] - 1))
            batch = Interval(start, data.draw(st.integers(start + 1, shape[0])))
        # Small integers: sums are exact in every type and in any order.
        strip = torch.randint(-8, 9, (len(batch), 3, len(rows), 4), generator=torch.Generator().manual_seed(seed)).to(gradient_dtype)
        expected[batch.start : batch.stop, :, rows.start : rows.stop] += strip
        (sink if len(batch) == shape[0] else sink.samples(batch)).add(rows, strip)
    sink.finish()
    sink.finish()
    written = torch.as_tensor(array)
    whole = (written if len(layout) == 4 else written[None]).permute(axis_order(layout, "NCHW"))
    assert torch.equal(whole, expected.to(whole.dtype))


def test_additions_keep_their_order() -> None:
    array = np.empty(SHAPE, np.float32)
    strips = [torch.full(SHAPE, value) for value in (1e8, 1.0, -1e8)]
    sink = ArraySink(array, shape=SHAPE, dtype=torch.float32)
    for strip in strips:
        sink.add(Interval(0, 6), strip)
    assert np.array_equal(array, ((strips[0] + strips[1]) + strips[2]).numpy())


@pytest.mark.parametrize(
    ("array", "arguments", "message"),
    [
        ([1.0], {}, "list"),
        (np.ones((3, 5)), {}, "2 axes"),
        (np.ones((3, 6, 4)), {}, r"expected \(N, C, H, W\) = \(1, 3, 6, 5\)"),
        (np.ones((2, 3, 6, 5)), {}, "expected"),
        (np.ones((3, 6, 5)), {"layout": "HWC"}, "as HWC: expected"),
        (np.ones((4, 4, 4)), {"shape": (1, 4, 4, 4)}, "CHW or HWC"),
        (np.ones(SHAPE, np.int64), {}, "<i8"),
        (np.ones(SHAPE, ">f4"), {}, "native"),
        (np.ones(SHAPE, np.float16), {}, "rounded"),
        (np.ones(SHAPE, np.float32), {"dtype": torch.float64}, "rounded"),
        (torch.ones(SHAPE, dtype=torch.bfloat16), {"dtype": torch.float16}, "rounded"),
        (torch.ones(SHAPE, dtype=torch.int64), {}, "<i8"),
        (torch.ones(SHAPE, requires_grad=True), {}, "requires grad"),
        (torch.ones(SHAPE, device="meta"), {}, "meta"),
        (np.broadcast_to(np.ones(5), SHAPE), {}, "read-only"),
        (torch.ones(5).expand(SHAPE), {}, "share memory"),
        (torch.ones(99).as_strided(SHAPE, (90, 15, 2, 1)), {}, "share memory"),
        (np.ones(SHAPE)[..., ::-1], {}, "flipped"),
        (np.ma.masked_array(np.ones(SHAPE), False), {}, "mask"),
    ],
)
def test_wrong_arrays_are_refused_untouched(array: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ArraySink(array, **{"shape": SHAPE, "dtype": torch.float32, **arguments})
    if isinstance(array, torch.Tensor):
        array = np.ones(1) if array.is_meta else array.detach().double().numpy()
    assert (np.asarray(array, float) == 1).all()


def test_wrong_gradients_are_refused_and_nothing_is_written() -> None:
    array = np.full(SHAPE, 7, np.float32)
    sink = ArraySink(array, shape=SHAPE, dtype=torch.float32)
    for rows, gradient, message in [
        (Interval(-1, 2), torch.zeros(1, 3, 3, 5), "6 rows"),
        (Interval(5, 7), torch.zeros(1, 3, 2, 5), "6 rows"),
        (Interval(2, 4), torch.zeros(1, 3, 3, 5), "they have shape"),
        (Interval(2, 4), torch.zeros(3, 2, 5), "they have shape"),
        (Interval(2, 4), torch.zeros(1, 3, 2, 5, dtype=torch.float64), "rounded"),
        (Interval(2, 4), torch.zeros(1, 3, 2, 5, dtype=torch.int32), "rounded"),
    ]:
        with pytest.raises(InputError, match=message):
            sink.add(rows, gradient)
    with pytest.raises(InputError, match="it has 1"):
        sink.samples(Interval(0, 2))
    sink.add(Interval(3, 3), torch.empty(1, 3, 0, 5))
    assert (array == 7).all()


def test_a_memmap_reaches_its_file(tmp_path: Path) -> None:
    path = tmp_path / "gradient.npy"
    sink = ArraySink(np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(6, 5, 3)), shape=SHAPE, dtype=torch.float32)
    sink.add(Interval(2, 6), torch.ones(1, 3, 4, 5))
    sink.add(Interval(1, 3), torch.ones(1, 3, 2, 5))
    sink.finish()
    assert np.load(path)[:, 4, 2].tolist() == [0, 1, 2, 1, 1, 1]
    with pytest.raises(InputError, match="read-only"):
        ArraySink(np.load(path, mmap_mode="r"), shape=SHAPE, dtype=torch.float32)
    os.truncate(path, 200)
    with pytest.raises(SourceError, match="cut short"):
        sink.add(Interval(0, 6), torch.ones(SHAPE))
    with pytest.raises(SourceError, match="cut short"):
        sink.finish()
