"""Antialiased interpolation, down and up, in strips, panels and tiles; its windows are ATen's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

import sft
from sft.analysis.ir.ops.resize_matrix import AxisResampling, BandedMatrix, ResamplingKind
from tests.helpers.exactness import assert_exact
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.operator_cases import AroundFunction
from tests.helpers.tilings import is_tiled, tiled_options

_KINDS: dict[str, ResamplingKind] = {"bilinear": "antialiased linear", "bicubic": "antialiased cubic"}


def _matrix(band: BandedMatrix, num_columns: int) -> Tensor:
    out = np.zeros((len(band.start), num_columns))
    for row, (start, stop) in enumerate(zip(band.start, band.stop, strict=True)):
        out[row, start:stop] = band.weights[row, : stop - start]
    return torch.from_numpy(out)


@settings(max_examples=60)
@given(
    mode=st.sampled_from(sorted(_KINDS)),
    extent=st.integers(1, 90),
    length=st.integers(1, 120),
    scale=st.none() | st.floats(0.02, 3.0),
    align_corners=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_windows_and_weights_are_aten_s(
    mode: str, extent: int, length: int, scale: float | None, align_corners: bool, dtype: torch.dtype
) -> None:
    length = length if scale is None else max(1, int(extent * scale))
    scale = None if scale is None or int(extent * scale) < 1 else scale
    size: dict[str, Any] = {"size": (length, 3)} if scale is None else {"scale_factor": (scale, 1.0)}
    x = torch.randn(1, 2, extent, 3, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = F.interpolate(x, mode=mode, align_corners=align_corners, antialias=True, **size)
    gradient = torch.randn(y.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    (x_grad,) = torch.autograd.grad(y, x, gradient)
    is_double = dtype == torch.float64
    sampling = AxisResampling(
        kind=_KINDS[mode], extent=extent, length=length, scale=scale, align_corners=align_corners, is_double=is_double
    )
    tolerance = 1e-12 if is_double else 2e-5
    forward, adjoint = _matrix(sampling.forward, extent), _matrix(sampling.adjoint, length)
    torch.testing.assert_close(y.double(), forward @ x.double(), rtol=0, atol=tolerance)
    torch.testing.assert_close(x_grad.double(), adjoint @ gradient.double(), rtol=0, atol=tolerance)


@st.composite
def _cases(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, int], sft.Options, int]:
    extents = (draw(st.integers(2, 40)), draw(st.integers(2, 30)))
    how: dict[str, Any] = {"mode": draw(st.sampled_from(sorted(_KINDS))), "align_corners": draw(st.booleans())}
    if draw(st.booleans()):
        how["size"] = (draw(st.integers(1, 45)), draw(st.integers(1, 40)))
    else:
        factors = st.sampled_from([0.5, 0.25, 1.0, 1.7, 0.6, 2.0])
        how["scale_factor"] = tuple(max(draw(factors), 1.01 / extent) for extent in extents)
        how["recompute_scale_factor"] = draw(st.none() | st.just(True))
    note(f"{how}, {extents}")
    return how, extents, draw(tiled_options(extents)), draw(st.integers(1, 2))


@at_most(5)
@given(case=_cases())
def test_any_antialiased_resampling_any_tiling(case: tuple[dict[str, Any], tuple[int, int], sft.Options, int]) -> None:
    how, extents, options, batch = case
    model = seeded(lambda: _Resized(how))
    assert_exact(model, image(batch, 3, *extents), options=options, steps=1)


class _Resized(AroundFunction):
    """Resizing between convolutions; the resized input is added."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__(lambda x: F.interpolate(x, antialias=True, **how), axes=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(torch.tanh(self.layer(self.before(x))))
        return out + self.layer(x[:, :2])


@pytest.mark.parametrize("mode", sorted(_KINDS))
def test_it_streams(mode: str) -> None:
    model = seeded(lambda: _Resized({"mode": mode, "scale_factor": 0.3}))
    report = assert_exact(model, image(1, 3, 60, 21), options=sft.Options(tile=(12, 9)), steps=1)
    assert [segment.mode for segment in report.plan.segments] == ["tiled"]


def test_to_a_width_of_one_pixel_it_is_aten_s_own() -> None:
    """ATen then repeats the first row on the CPU (2.13); at any other width the same capture streams."""
    model = seeded(lambda: _Resized({"mode": "bilinear", "scale_factor": 0.25}))
    for width, streams in ((7, False), (8, True)):
        report = assert_exact(model, image(1, 3, 24, width), options=sft.Options(tile=(4, None)), steps=1)
        assert is_tiled(report.plan, "upsample") == streams
