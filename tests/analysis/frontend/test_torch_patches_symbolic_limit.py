"""Networks with sizes that are quotients of quotients: captured for one size at a time, in seconds, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft
from sft.analysis.frontend.capture import capture
from sft.analysis.frontend.replacement_functions import SymbolicSizeTooComplexError
from sft.analysis.frontend.torch_patches import apply_patches
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded


class _Windows(nn.Module):
    """Mixing of pixels in windows of three by three, of an image resized to whole windows, as in mobile vision transformers."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.mixing = nn.ModuleList(nn.Linear(9, 9) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for mix in self.mixing:
            n, c, h, w = x.shape
            rows, columns = -(-h // 3), -(-w // 3)
            y = F.interpolate(x, size=(rows * 3, columns * 3), mode="bilinear")
            y = y.reshape(n * c * rows, 3, columns, 3).transpose(1, 2).reshape(n, c, rows * columns, 9)
            y = mix(y).reshape(n * c * rows, columns, 3, 3).transpose(1, 2).reshape(n, c, rows * 3, columns * 3)
            x = F.avg_pool2d(y, 3, 2)
        return x


def test_windows_of_windows_are_captured_for_one_size() -> None:
    model = seeded(lambda: _Windows(4))
    captured = capture(model, [(2, 3, 80, 68)], [torch.float64], torch.device("cpu"))
    assert captured.graph[captured.graph.inputs[0]].shape == (2, 3, 80, 68)
    net = sft.compile(model, (1, 3, None, None))
    for size in ((80, 68), (72, 100)):
        x = image(1, 3, *size)
        torch.testing.assert_close(net(x), model(x), rtol=1e-10, atol=1e-12)
    assert_exact(model, image(2, 3, 80, 68), options=sft.Options(tile=(8, None)), steps=1)


class _DoubledGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


def test_the_error_with_constant_sizes_is_the_reason() -> None:
    """Not the complexity of sizes, which is no fault of the model."""

    class Model(_Windows):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = _DoubledGrad.apply(super().forward(x))  # type: ignore[no-untyped-call]  # torch has no types for it
            return output

    with pytest.raises(sft.UnsupportedError, match=r"_DoubledGrad: a torch\.autograd\.Function has a backward of its own"):
        sft.compile(seeded(lambda: Model(4)), (2, 3, 80, 68))


def test_the_limit_is_on_the_length_of_a_size() -> None:
    class Asked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            size, total = x.shape[2], 0
            for divisor in range(3, 3 + self.length):
                total = total + size // divisor
            return x if total == 5 else x * 2

        def __init__(self, length: int) -> None:
            super().__init__()
            self.length = length

    def exported(length: int) -> torch.export.ExportedProgram:
        dynamic = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
        return torch.export.export(Asked(length), (torch.zeros(1, 3, 80, 40),), dynamic_shapes=(dynamic,), strict=False)

    with apply_patches("size_complexity_limit"):
        exported(5)
        with pytest.raises(Exception, match="more than 100 operations") as refused:
            exported(60)
    causes = [refused.value, refused.value.__cause__, refused.value.__context__]
    assert any(isinstance(cause, SymbolicSizeTooComplexError) for cause in causes)
    exported(60)
