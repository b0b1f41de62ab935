"""Strips that are read ahead: the right rows, each read once, in bounded memory, without a remaining thread."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sft import InputError, SourceError
from sft.common.interval import Interval
from sft.runtime.strip_checkpoints import Checkpoints
from sft.sources import ArraySource, StripReader
from tests.helpers.sources import reader_threads

MEAN, STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sft-strip-reader"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert reader_threads() == []


class Counting:
    """A source that counts the reads of each row, and fails at one of them."""

    def __init__(self, height_px: int, *, num: int = 1, dtype: torch.dtype = torch.float32, fails_at: int | None = None) -> None:
        self.shape = (num, 2, height_px, 3)
        self.dtype = dtype
        self.fails_at = fails_at
        self.counts = Counter[int]()
        self.content = torch.arange(num * 2 * height_px * 3).view(self.shape).to(dtype)

    def __repr__(self) -> str:
        return "Counting"

    def rows(self, interval: Interval, out: Tensor) -> None:
        assert interval and out.dtype is self.dtype and not torch.is_grad_enabled()
        if self.fails_at is not None and interval.start <= self.fails_at < interval.stop:
            raise RuntimeError("the disk is on fire")
        self.counts.update(range(interval.start, interval.stop))
        out.copy_(self.content[:, :, interval.start : interval.stop])


def strips_of(height_px: int, rows: int, halo: int) -> list[Interval]:
    """Strips of a convolution, which overlap by twice the halo."""
    return [Interval(top - halo, top + rows + halo).clip(height_px) for top in range(0, height_px, rows)]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: Interval(*sorted(pair))), max_size=12),
    st.integers(1, 3),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(2, 4),
)
def test_any_list_of_intervals(intervals: list[Interval], num: int, dtype: torch.dtype, num_buffers: int) -> None:
    source = Counting(20, num=num, dtype=dtype)
    served = 0
    with StripReader(source, intervals, num_buffers=num_buffers) as reader:
        assert len(reader) == len(intervals)
        for rows, strip in zip(intervals, reader, strict=True):
            assert strip.dtype is dtype and strip.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(strip, source.content[:, :, rows.start : rows.stop])
            strip.fill_(-1)  # a consumer may overwrite its strip: common rows were copied for the next one
            served += 1
    assert served == len(intervals)
    wanted = [rows for rows in intervals if rows]
    overlaps = sum(len(a.intersect(b)) for a, b in pairwise(wanted))
    assert sum(source.counts.values()) == reader.num_rows_read == sum(map(len, wanted)) - overlaps
    assert reader.read_bytes == reader.num_rows_read * num * 2 * 3 * dtype.itemsize


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_each_row_is_read_once_in_either_direction(height_px: int, rows: int, halo: int, backwards: bool) -> None:
    intervals = strips_of(height_px, rows, halo)
    if backwards:
        intervals.reverse()
    source = Counting(height_px)
    for interval, strip in zip(intervals, StripReader(source, intervals), strict=True):
        assert torch.equal(strip, source.content[:, :, interval.start : interval.stop])
    assert source.counts == Counter(range(height_px))


def test_the_order_of_a_backward_pass_with_states_kept_every_third_strip() -> None:
    strips = strips_of(70, 10, 3)
    intervals = [*strips, *(strips[action.strip] for action in Checkpoints(3).actions(len(strips)))]
    source = Counting(70)
    with StripReader(source, intervals) as reader:
        for interval in intervals:
            assert torch.equal(reader.take(interval), source.content[:, :, interval.start : interval.stop])
    # Once forward, once backward, once more where states are restored (strips 0, 1 and 3, 4 of 7), without rows common to neighbours.
    assert sum(source.counts.values()) == reader.num_rows_read < 70 * 2 + 4 * 16


# --- references to buffers ------------------------------------------------------------------------------------------


def test_the_reader_stays_a_bounded_number_of_strips_ahead() -> None:
    dropped = 0

    class Watched(Counting):
        calls = 0

        def rows(self, interval: Interval, out: Tensor) -> None:
            assert self.calls < dropped + 3, "read ahead too far"
            self.calls += 1
            super().rows(interval, out)

    intervals = strips_of(60, 2, 0)
    with StripReader(Watched(60), intervals, num_buffers=3) as reader:
        for interval in intervals:
            strip = reader.take(interval)
            dropped += 1
            del strip
    assert reader.buffer_bytes == 3 * 2 * 2 * 3 * 4


def test_a_referenced_strip_is_never_overwritten() -> None:
    source = Counting(40)
    intervals = strips_of(40, 4, 1)
    with StripReader(source, intervals, num_buffers=3) as reader:
        first = next(reader)
        pixels = first[0, 1, 2:]  # a view of a view refers to the buffer, too
        del first
        for interval in intervals[1:]:
            assert torch.equal(reader.take(interval), source.content[:, :, interval.start : interval.stop])
        assert torch.equal(pixels, source.content[0, 1, 2:5])
    assert torch.equal(pixels, source.content[0, 1, 2:5])


def test_references_to_all_buffers_are_an_error_until_one_is_dropped() -> None:
    source = Counting(40)
    with StripReader(source, strips_of(40, 4, 0)) as reader:
        strips = [next(reader), next(reader)]
        with pytest.raises(InputError, match=r"rows \[8, 12\).*all 2 buffers.*num_buffers"):
            next(reader)
        strips.pop(0)
        assert torch.equal(next(reader), source.content[:, :, 8:12])
    with pytest.raises(InputError, match="all 2 buffers"):
        list(StripReader(source, strips_of(40, 4, 0)))


def test_reading_a_large_array_allocates_a_few_strips(tmp_path: Path) -> None:
    array = np.lib.format.open_memmap(tmp_path / "large.npy", mode="w+", dtype=np.uint8, shape=(4096, 2048, 3))  # 24 MiB
    intervals = strips_of(4096, 64, 3)
    strip_bytes = 70 * 2048 * 3 * 4
    source = ArraySource(array, mean=MEAN, std=STD)
    tracemalloc.start()
    try:
        with StripReader(source, intervals) as reader:
            for strip in reader:
                del strip
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reader.num_rows_read == 4096
    assert peak_bytes < reader.buffer_bytes + 256 * 1024 < 2.5 * strip_bytes


# --- ends -----------------------------------------------------------------------------------------------------------


def test_an_error_of_the_thread_names_its_interval_and_stays() -> None:
    source = Counting(40, fails_at=17)
    reader = StripReader(source, strips_of(40, 4, 1))
    for _ in range(4):
        next(reader)
    for _ in range(2):
        with pytest.raises(SourceError, match=r"rows \[15, 21\) of Counting: RuntimeError: the disk is on fire") as caught:
            next(reader)
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert threads() == []


@pytest.mark.parametrize("num_taken", [0, 1, 3, 10])
def test_leaving_early_ends_the_thread(num_taken: int) -> None:
    source = Counting(40)
    with StripReader(source, strips_of(40, 4, 0)) as reader:
        strips = [next(reader).clone() for _ in range(num_taken)]
        strip = next(reader) if num_taken < 10 else strips[-1]
    assert threads() == []
    reader.close()
    row = min(num_taken, 9) * 4
    assert torch.equal(strip, source.content[:, :, row : row + 4]), "a strip outlives its reader"
    if num_taken < 9:
        with pytest.raises(InputError, match="closed"):
            next(reader)


def test_an_error_of_the_consumer_ends_the_thread() -> None:
    with pytest.raises(KeyError), StripReader(Counting(40), strips_of(40, 4, 0)):
        raise KeyError
    assert threads() == []


@pytest.mark.usefixtures("frozen_objects")
def test_a_forgotten_reader_ends_its_thread() -> None:
    reader = StripReader(Counting(40), strips_of(40, 4, 0))
    next(reader)
    assert len(threads()) == 1
    del reader
    gc.collect()
    assert threads() == []


def test_the_next_interval_is_checked() -> None:
    with StripReader(Counting(40), strips_of(40, 20, 0)) as reader:
        with pytest.raises(InputError, match=r"rows \[20, 40\).*position 0.*start=0, stop=20"):
            reader.take(Interval(20, 40))
        reader.take(Interval(0, 20))
        reader.take(Interval(20, 40))
        with pytest.raises(InputError, match=r"position 2.*nothing"):
            reader.take(Interval(0, 20))


def test_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with StripReader(Counting(40), strips_of(40, 20, 0)) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -2)  # the state in a forked child
            with pytest.raises(InputError, match="in each process"):
                next(reader)
        next(reader)


def test_wrong_arguments() -> None:
    source: Any = object()
    with pytest.raises(InputError, match="object"):
        StripReader(source, [])
    with pytest.raises(InputError, match=r"\[-1, 3\), \[38, 41\).*40 rows"):
        StripReader(Counting(40), [Interval(-1, 3), Interval(0, 3), Interval(38, 41)])
    with pytest.raises(InputError, match="1 buffers"):
        StripReader(Counting(40), [Interval(0, 3)], num_buffers=1)


def test_times_of_reading_and_waiting() -> None:
    with StripReader(Counting(40), []) as reader:
        assert list(reader) == [] and reader.read_seconds == reader.waited_seconds == 0
    with StripReader(Counting(40), strips_of(40, 4, 0)) as reader:
        for strip in reader:
            del strip
        assert reader.read_seconds > 0 and reader.waited_seconds > 0
