"""Integers become the default element type, which may change in a process: cached results are not used for another type."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import sft
from tests.helpers.exactness import assert_within_budget


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


class _Counts(nn.Module):
    """A network on the square roots of integers, as values of its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, dtype=torch.float32)

    def forward(self, counts: Tensor) -> Tensor:
        output: Tensor = self.conv(counts.sqrt().float())
        return output


class _Rounded(nn.Module):
    """Roots that are rounded to bfloat16: no operation if they have that type."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, dtype=torch.float32)

    def forward(self, counts: Tensor) -> Tensor:
        output: Tensor = self.conv(counts.float()) * counts.sqrt().to(torch.bfloat16).float()
        return output


@pytest.mark.parametrize("make", [_Counts, _Rounded])
@pytest.mark.parametrize("options", [sft.Options(tile=(8, None)), sft.Options(strategy="none"), sft.Options()])
def test_another_default_in_the_same_process(make: type[nn.Module], options: sft.Options) -> None:
    torch.manual_seed(0)
    model = make()
    counts = torch.randint(1, 99, (1, 3, 33, 30))
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        net = sft.compile(model, counts, options=options)
        output, expected = net(counts), model(counts)
        assert output.dtype == expected.dtype
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-5)
        gradients = [
            torch.autograd.grad(result.square().sum(), list(each.parameters())) for result, each in ((output, net), (expected, model))
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-2)


def test_bytes_are_projected_for_that_type() -> None:
    class Logarithms(nn.Module):
        def forward(self, counts: Tensor, x: Tensor) -> Tensor:
            return counts.log() + x

    counts, x = torch.randint(1, 9, (1, 4, 64, 64)), torch.randn(1, 4, 64, 64, dtype=torch.float32)
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        net = sft.compile(Logarithms(), (counts, x), options=sft.Options(tile=(8, None)))
        assert_within_budget(net, counts, x, budget="1GiB", input_grad=False)


def test_repeated_blocks_are_traced_for_that_type() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6, dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            rounded = (x * 40).long().abs().sqrt().to(torch.float32) / 7
            output: Tensor = x + self.linear(x) * rounded
            return output

    torch.manual_seed(0)
    repeat, x = sft.nn.Repeat(Block, 4), torch.randn(5, 6, dtype=torch.float32)
    outputs = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        outputs.append(repeat(x))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
