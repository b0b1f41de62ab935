"""Images with constant rows, and the assertion that skipped strips change only the work."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sft
from sft.common.torch_internals import pytree
from tests.helpers.exactness import gradient_errors, plan_of, relative_error
from tests.helpers.flops import StepMeter

__all__ = ["Skipped", "assert_exact_skipping", "banded_image"]

_LEARNING_RATE = 1e-2
_TOLERANCE = 1e-10
_SMALLEST_SHARE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Measurements of :func:`assert_exact_skipping`."""

    forward: int
    """Strips left out of a forward pass."""
    backward: int
    """The same of a backward pass, restored strips included."""
    num_forward: int
    """All strips of a forward pass."""
    flops: int
    """Counted in one step."""
    plan: sft.Plan
    """Of the step."""


def banded_image(shape: tuple[int, ...], *bands: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random image in which each of some bands of rows, ``[first, last+1)``, repeats one row."""
    image = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    for first, last in bands:
        image[:, :, first:last] = image[:, :, first : first + 1]
    return image


def assert_exact_skipping(
    model: nn.Module,
    x: Tensor,
    *,
    options: sft.Options,
    budget: int | str = "4GiB",
    input_grad: bool = True,
    steps: int = 2,
    source: Any = None,
) -> Skipped:
    """Assert that the compiled model equals eager PyTorch in float64 with strips left out, and stays within its plan.

    Outputs, all gradients, buffers and updated parameters are compared as in :func:`assert_exact`. The gradients of outputs that are images
    are constant where the image is. The counted and the skipped FLOPs together are those of the plan.
    """
    eager, own = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    net_input = x if source is None else source
    net = sft.compile(own, x if source is None else [source], budget=budget, options=options)
    for step in range(steps):
        x_eager, x_ours = (x.clone().requires_grad_(input_grad) for _ in range(2))
        y_eager, y_ours = _leaves(eager(x_eager)), _leaves(net(x_ours if source is None else net_input))
        grads = [_gradient(y, x, seed=step) for y in y_eager]
        torch.autograd.backward(y_eager, grads)
        torch.autograd.backward(y_ours, grads)
        for ours, theirs in zip(y_ours, y_eager, strict=True):
            assert relative_error(ours, theirs) <= _TOLERANCE
        reference = {name: p.grad for name, p in eager.named_parameters()}
        errors = gradient_errors({name: p.grad for name, p in net.named_parameters()}, reference)
        assert max(errors.values(), default=0.0) <= _TOLERANCE, errors
        largest = max((float(g.abs().max()) for g in reference.values() if g is not None), default=0.0)
        if input_grad and source is None:
            assert x_ours.grad is not None and x_eager.grad is not None
            scale = max(_SMALLEST_SHARE * largest, float(x_eager.grad.abs().max()))
            assert relative_error(x_ours.grad, x_eager.grad, scale=scale) <= _TOLERANCE
        for name, buffer in eager.named_buffers():
            assert relative_error(dict(net.named_buffers())[name], buffer) <= _TOLERANCE, name
        for module in (eager, net):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.data -= _LEARNING_RATE / max(largest, 1e-300) * parameter.grad
            module.zero_grad(set_to_none=True)
        updated = gradient_errors(dict(net.named_parameters()), dict(eager.named_parameters()))
        assert max(updated.values(), default=0.0) <= _TOLERANCE, updated
    return _measured(net, x, net_input if source is not None else None, input_grad)


def _measured(net: Any, x: Tensor, source: Any, input_grad: bool) -> Skipped:
    """Measured step: its peak is within the projection, and its FLOPs without the skipped ones are counted."""
    leaf = x.clone().requires_grad_(input_grad)
    plan = plan_of(net, leaf) if source is None else net.plan_for(source)
    with StepMeter() as counter:
        outputs = _leaves(net(x.clone().requires_grad_(input_grad) if source is None else source))
        torch.autograd.backward(outputs, [_gradient(y, x, seed=0) for y in outputs])
        del outputs
    net.zero_grad(set_to_none=True)
    skipping = net.last_skipping
    assert skipping is not None
    assert counter.flops + skipping.skipped_flops == plan.flops, (
        f"{counter.flops} counted, {skipping.skipped_flops} left out of {plan.flops}"
    )
    assert counter.peak.num_bytes <= plan.projected_peak_bytes
    return Skipped(
        forward=skipping.forward.num_skipped,
        backward=skipping.backward.num_skipped,
        num_forward=skipping.forward.num_strips,
        flops=counter.flops,
        plan=plan,
    )


def _gradient(output: Tensor, x: Tensor, *, seed: int) -> Tensor:
    """Gradient of an output: random columns for an image, equal in all rows; otherwise random numbers."""
    generator = torch.Generator().manual_seed(seed)
    if output.dim() < 4:
        return torch.randn(output.shape, dtype=output.dtype, generator=generator)
    shape = (*output.shape[:2], 1, *output.shape[3:])
    return torch.randn(shape, dtype=output.dtype, generator=generator).expand(output.shape)


def _leaves(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
