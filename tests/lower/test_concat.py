"""Dense blocks (Huang et al. 2017): every layer reads the concatenation of all earlier values, each a slice of its own buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.lower.concat import DimSlice, add_slices, cat_slices, cat_slices_into
from sft.lower.lower_strip import emit_strip
from sft.planner.plan import SegmentChoice
from sft.planner.region_builder import build_region
from sft.runtime.tiled_segment import TiledSegment
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.problems import problem_of
from tests.helpers.tilings import tiled_options


class _DenseBlock(nn.Module):
    """A dense block with some kernel sizes, order of concatenation, and detached layers."""

    def __init__(
        self, kernels: tuple[int, ...], axes: int = 2, *, newest_first: bool = False, detached: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.newest_first, self.detached = newest_first, detached
        self.layers = nn.ModuleList(
            conv(2 + number + (number > 0), 1 + (number == 0), kernel, padding=kernel // 2) for number, kernel in enumerate(kernels)
        )

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for number, layer in enumerate(self.layers):
            made = torch.tanh(layer(torch.cat(values[::-1] if self.newest_first else values, 1)))
            values.append(made.detach() if number in self.detached else made)
        return torch.cat(values, 1) * values[-1]


@st.composite
def _blocks(draw: st.DrawFn) -> tuple[nn.Module, Tensor, sft.Options]:
    axes = draw(st.sampled_from([1, 2, 2, 2, 3]))
    kernels = tuple(draw(st.lists(st.sampled_from([1, 3, 5]), min_size=2, max_size=5)))
    detached = frozenset(draw(st.lists(st.integers(0, len(kernels) - 2), max_size=2)))
    extents = tuple(draw(st.integers(5, 17 if axis < 2 else 6)) for axis in range(axes))
    newest_first = draw(st.booleans())
    note(f"kernels {kernels}, detached {set(detached)}, newest first {newest_first}")
    model = seeded(lambda: _DenseBlock(kernels, axes, newest_first=newest_first, detached=detached))
    return model, image(draw(st.integers(1, 2)), 2, *extents), draw(tiled_options(extents))


@given(_blocks())
def test_dense_blocks_are_exact_under_any_tiling(case: tuple[nn.Module, Tensor, sft.Options]) -> None:
    model, x, options = case
    assert_exact(model, x, options=options, steps=1)


@pytest.mark.parametrize("kind", ["forward", "joint"])
def test_the_number_of_instructions_is_linear_in_the_depth(kind: str) -> None:
    counts = []
    for depth in (4, 8, 12):
        problem = problem_of(_DenseBlock((3,) * depth), (1, 2, 64, 16), training=kind == "joint")
        names = problem.sized.phases.phases[0].streamed
        choice = SegmentChoice(nodes=names, mode="tiled", strip_rows=8, batch_tile=1)
        (segment,) = build_region(problem, (choice,)).segments
        assert isinstance(segment, TiledSegment)
        emitter = emit_strip(segment.scope_of(segment.sweeps[0]), segment.step(4), kind)  # type: ignore[arg-type]
        emitter.prune()
        counts.append(len(emitter.instructions))
    assert counts[2] - counts[1] == counts[1] - counts[0]


def test_slices_are_concatenated_and_added_like_views() -> None:
    first, second = torch.randn(2, 3, 7, 5), torch.randn(2, 2, 4, 5)
    spans = ((DimSlice(2, 1, 3), DimSlice(3, 2, 2)), (DimSlice(2, 0, 3), DimSlice(3, 3, 2)))
    expected = torch.cat([first[:, :, 1:4, 2:4], second[:, :, :3, 3:]], 1)
    torch.testing.assert_close(cat_slices((first, second), spans, 1), expected, rtol=0, atol=0)
    out = torch.empty(2, 5, 3, 2)
    cat_slices_into(out, (first, second), spans, 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    total = torch.zeros(2, 2, 4, 5)
    add_slices(total, ((DimSlice(2, 1, 3),), ()), (first, second), ((DimSlice(1, 1, 2), DimSlice(2, 4, 3)), ()))
    torch.testing.assert_close(total[:, :, :1], second[:, :, :1], rtol=0, atol=0)
    torch.testing.assert_close(total[:, :, 1:], first[:, 1:, 4:] + second[:, :, 1:], rtol=0, atol=0)
