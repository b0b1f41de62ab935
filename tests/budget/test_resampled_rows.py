"""Row resampling of strips whose rows are not dense in memory: the copy into a matrix of rows counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import sft
from sft.lower.builder import ProgramBuilder
from sft.lower.rules.resampled_range import ResampledRange
from tests.helpers.models import seeded


class _HalfTheChannels(nn.Module):
    """Resampled rows of half the channels of a convolution."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Conv2d(3, 8, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        return interpolate(self.layer(x).chunk(2, dim=1)[1], scale_factor=(self.factor, 1.0), mode="bilinear", align_corners=False)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_copies_of_scattered_rows_count(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call allocates its result and at most the scratch bytes of its instruction."""
    scratch_bytes: dict[tuple[ResampledRange, tuple[int, ...]], int] = {}
    temporary_bytes: list[tuple[tuple[ResampledRange, tuple[int, ...]], int]] = []
    emit, run = ProgramBuilder.call, ResampledRange.__call__

    def recorded_emit(builder: ProgramBuilder, span: Any, value: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(span, ResampledRange):
            scratch_bytes[span, value.shape] = keywords["scratch_bytes"]
        return emit(builder, span, value, *arguments, **keywords)

    def measured_run(span: ResampledRange, value: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        with sft.measure_peak("cpu") as peak:
            out = run(span, value, *arguments, **keywords)
        temporary_bytes.append(((span, tuple(value.shape)), peak.num_bytes - out.nbytes))
        return out

    monkeypatch.setattr(ProgramBuilder, "call", recorded_emit)
    monkeypatch.setattr(ResampledRange, "__call__", measured_run)
    model = seeded(lambda: _HalfTheChannels(factor))
    x = torch.rand(1, 3, 32, 64, dtype=torch.float64)
    with torch.no_grad():
        net: Any = sft.compile(model, [x], budget="1GiB", options=sft.Options(tile=(8, None)))
        assert torch.allclose(net(x), model(x), atol=1e-12)
    assert temporary_bytes and all(num_bytes <= scratch_bytes[key] for key, num_bytes in temporary_bytes)
    assert any(num_bytes >= math.prod(key[1]) * 8 for key, num_bytes in temporary_bytes)  # there was a copy
