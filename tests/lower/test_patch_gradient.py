"""Gradients of products that add to their accumulator in place."""

from __future__ import annotations

import pytest
import torch

from sft.lower.grad_accumulation import add_patch_gradient


@pytest.mark.parametrize("channels_last", [False, True, None])
@pytest.mark.parametrize(("out", "kernel"), [((3,), (2,)), ((2, 3), (4, 2)), ((2, 1, 3), (2, 3, 1))])
def test_patch_gradient(out: tuple[int, ...], kernel: tuple[int, ...], channels_last: bool | None) -> None:
    """The weight gradient of a convolution of adjacent patches, for accumulators of any memory layout."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, *(size * px for size, px in zip(out, kernel, strict=True)), dtype=torch.float64, generator=generator)
    weight = torch.randn(4, 3, *kernel, dtype=torch.float64, generator=generator, requires_grad=True)
    grad = torch.randn(2, 4, *out, dtype=torch.float64, generator=generator)
    convolution = (torch.conv1d, torch.conv2d, torch.conv3d)[len(kernel) - 1]
    convolution(image, weight, stride=kernel).backward(grad)
    total = torch.ones(4, 3, *kernel, dtype=torch.float64)
    if channels_last is None:  # neither contiguous nor channels last
        total = torch.ones(3, 4, *kernel, dtype=torch.float64).transpose(0, 1)
    elif channels_last:
        total = torch.ones(4, *kernel, 3, dtype=torch.float64).movedim(-1, 1)
    add_patch_gradient(total, grad, image)
    assert weight.grad is not None
    torch.testing.assert_close(total, 1 + weight.grad)
