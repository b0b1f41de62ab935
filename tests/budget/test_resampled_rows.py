"""Scratch memory of row resampling: the copy of rows that are not dense in memory, and the tables of indices and weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import interpolate

import sft
from sft.lower.builder import ProgramBuilder
from sft.lower.rules.resampled_range import ResampledRange
from tests.helpers.models import seeded

_Key = tuple[ResampledRange, tuple[int, ...]]


class _HalfTheChannels(nn.Module):
    """Resampled rows of half the channels of a convolution."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Conv2d(3, 8, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        return interpolate(self.layer(x).chunk(2, dim=1)[1], scale_factor=(self.factor, 1.0), mode="bilinear", align_corners=False)


@contextmanager
def _recorded() -> Iterator[tuple[dict[_Key, int], list[tuple[_Key, int]]]]:
    """Scratch bytes of the instructions emitted inside, and the bytes that each call allocates beyond its result."""
    scratch_bytes: dict[_Key, int] = {}
    temporary_bytes: list[tuple[_Key, int]] = []
    emit, run = ProgramBuilder.call, ResampledRange.__call__

    def recorded_emit(builder: ProgramBuilder, span: Any, value: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(span, ResampledRange):
            key = (span, value.shape)
            scratch_bytes[key] = min(keywords["scratch_bytes"], scratch_bytes.get(key, keywords["scratch_bytes"]))
        return emit(builder, span, value, *arguments, **keywords)

    def measured_run(span: ResampledRange, value: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        with sft.measure_peak("cpu") as peak:
            out = run(span, value, *arguments, **keywords)
        temporary_bytes.append(((span, tuple(value.shape)), peak.num_bytes - out.nbytes))
        return out

    with patch.object(ProgramBuilder, "call", recorded_emit), patch.object(ResampledRange, "__call__", measured_run):
        yield scratch_bytes, temporary_bytes


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_copies_of_scattered_rows_count(factor: float) -> None:
    """Each call allocates its result and at most the scratch bytes of its instruction."""
    model = seeded(lambda: _HalfTheChannels(factor))
    x = torch.rand(1, 3, 32, 64, dtype=torch.float64)
    with _recorded() as (scratch_bytes, temporary_bytes), torch.no_grad():
        net: Any = sft.compile(model, [x], budget="1GiB", options=sft.Options(tile=(8, None)))
        assert torch.allclose(net(x), model(x), atol=1e-12)
    assert temporary_bytes and all(num_bytes <= scratch_bytes[key] for key, num_bytes in temporary_bytes)
    assert any(num_bytes >= math.prod(key[1]) * 8 for key, num_bytes in temporary_bytes)  # there was a copy


@example(shape=(1, 2, 5, 4), sizes=(1, 2), mode="nearest", rows=1, dtype=torch.float64)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(3, 24), st.integers(1, 6)),
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 9)),
    mode=st.sampled_from(["nearest", "nearest-exact", "bilinear", "bicubic"]),
    rows=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_tables_of_thin_strips_count(
    shape: tuple[int, int, int, int], sizes: tuple[int, int], mode: str, rows: int, dtype: torch.dtype
) -> None:
    """Strips of few columns, in which the tables are as large as the strip; forwards and backwards."""
    layers = nn.Conv2d(shape[1], shape[1], 1), nn.Upsample(sizes, mode=mode, align_corners=None if "nearest" in mode else False)
    model = nn.Sequential(*layers).to(dtype)
    with _recorded() as (scratch_bytes, temporary_bytes):
        net: Any = sft.compile(model, [torch.rand(shape, dtype=dtype)], budget="1GiB", options=sft.Options(tile=(rows, None)))
        net(torch.rand(shape, dtype=dtype)).sum().backward()
    assert all(num_bytes <= scratch_bytes[key] for key, num_bytes in temporary_bytes), (temporary_bytes, scratch_bytes)
