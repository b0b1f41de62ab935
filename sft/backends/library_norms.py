"""Gradient of a frozen norm by PyTorch's fast kernels, in programs for a CUDA device.

``native_batch_norm_backward`` in evaluation mode computes the image's gradient in a kernel of mixed element types: 29e9 elements a second
on an H100 (bfloat16, channels last), where the memory permits 480e9. The gradient of an affine map of each channel is the map without its
shift, which the forward operator computes at the memory's bandwidth:

.. code-block:: text

    dx, dw, db = native_batch_norm_backward(dy, x, w, mean, var)
                                    _, dw, db = native_batch_norm_backward(dy, x, w, mean, var)      sums alone, if a gradient is needed
                                    dx = native_batch_norm(dy, w, no bias, zeros, var)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sft.backends.pattern import MatchContext, Rewrite
from sft.lower.program import Instruction, Slot

__all__ = ["match_frozen_norm_image_gradients"]

aten = torch.ops.aten


def match_frozen_norm_image_gradients(context: MatchContext) -> Iterator[Rewrite]:
    """Gradients of batch norms in evaluation mode with respect to the image."""
    if context.fusion_device is None:
        return
    for at, call in list(context.unclaimed_calls(aten.native_batch_norm_backward.default)):
        is_training, image = call.arguments[7], call.outputs[0]
        if not is_training and image is not None and all(out is None or out.root == out.number for out in call.outputs):
            yield Rewrite(removed=frozenset((at,)), inserted={at: tuple(_calls(context, call, image))})


def _calls(context: MatchContext, call: Instruction, image: Slot) -> Iterator[Instruction]:
    gradient, _, weight, mean, variance, *_, eps, (_, *mask) = call.arguments
    sums = call.outputs[1:]
    if any(out is not None for out in sums):
        num_bytes = sum(out.num_bytes for out in sums if out is not None)
        arguments = (*call.arguments[:-1], [False, *mask])
        yield Instruction(call.function, arguments, {}, (None, *sums), (), 0, num_bytes, call.scratch_bytes, call.owner)
    zeros = context.builder.slot(mean.shape, mean.dtype)
    yield Instruction(aten.zeros_like.default, (mean,), {}, (zeros,), (), 0, zeros.num_bytes, 0, call.owner)
    arguments = (gradient, weight, None, zeros, variance, 0.0, eps)
    function = aten._native_batch_norm_legit_no_training.default
    yield Instruction(function, arguments, {}, (image, None, None), (), 0, image.num_bytes, 0, call.owner)
