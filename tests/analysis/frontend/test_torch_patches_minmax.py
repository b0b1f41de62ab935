"""Networks that pad by the remainder of the image's size, as in TensorFlow: short size expressions, one capture for all sizes, exact."""

from __future__ import annotations

import builtins
import math

import pytest
import sympy as sp
import torch
from torch import Tensor, nn
from torch._export.non_strict_utils import _override_builtin_ops
from torch.nn import functional as F

import sft
from sft.analysis.frontend.capture import capture
from sft.analysis.frontend.torch_patches import apply_patches
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded


class SameConv(nn.Conv2d):
    """A convolution whose output is the input's size divided by the stride, rounded up."""

    def forward(self, x: Tensor) -> Tensor:
        def padding(extent: int, axis: int) -> int:
            stride, reach = self.stride[axis], self.kernel_size[axis]
            return max((math.ceil(extent / stride) - 1) * stride + reach - extent, 0)

        above, beside = padding(x.shape[-2], 0), padding(x.shape[-1], 1)
        return super().forward(F.pad(x, (beside // 2, beside - beside // 2, above // 2, above - above // 2)))


class SamePadded(nn.Module):
    def __init__(self, num_strides: int) -> None:
        super().__init__()
        kernels = [(3, 5, 1)[i % 3] for i in range(num_strides)]
        self.convs = nn.ModuleList(SameConv(3 if i == 0 else 4, 4, kernel, stride=2) for i, kernel in enumerate(kernels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in kernels)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return x.mean((2, 3))


@pytest.mark.parametrize("extents", [(32, 29), (31, 33)], ids=str)
def test_padding_by_the_size_is_exact(extents: tuple[int, int]) -> None:
    assert_exact(seeded(lambda: SamePadded(2)), image(2, 3, *extents), options=sft.Options(tile=(4, None)))


def test_sizes_stay_short() -> None:
    """Six strides: as Max and Min expressions, sizes have thousands of operations, and the exporter takes minutes."""
    captured = capture(SamePadded(6), [(1, 3, 200, 180)], [torch.float32], torch.device("cpu"))
    sizes = [extent for node in captured.graph.nodes for extent in node.shape if isinstance(extent, sp.Basic)]
    assert max(size.count_ops() for size in sizes) <= 40
    assert not any(size.has(sp.Max, sp.Min) for size in sizes)
    for height in range(150, 250):  # all remainders, the smallest images excepted
        assert captured.bind([(1, 3, height, 190)]) is not None


def test_builtins_are_not_replaced() -> None:
    before = builtins.max, builtins.min
    tensor = torch.tensor([1.0, 3.0])
    with apply_patches("exporter_minmax"):
        assert (builtins.max, builtins.min) == before
        with _override_builtin_ops():  # as the exporter does
            assert (max(3, 4), min([2, 1]), max("ab", key=ord), max([], default=5)) == (4, 1, "b", 5)
            assert max(tensor[0], tensor[1]) == 3
            with pytest.raises(ValueError, match="empty"):
                max([])
    assert (builtins.max, builtins.min) == before
