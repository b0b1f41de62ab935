"""Traces against real calls: dtype, shape and bytes of each result, forward and backward, for dtypes with other accumulation types in
ATen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sft.lower.joint_traces import JointTrace, SlotArg, TracedCall, trace_joint
from sft.lower.op_recorder import ArgumentSpec
from sft.lower.program import DEVICE

_TOKENS, _IMAGE, _LABELS = (2, 2, 12, 4), (2, 4, 9, 7), (2, 9, 7)


def _lstm(x: Tensor, *weights: Tensor) -> Tensor:
    state = x.new_zeros((1, x.shape[1], 5))
    return torch.lstm(x, (state, state), weights, True, 1, 0.0, True, False, False)[0]


#: Functions, and the shapes of their floating-point operands.
_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "attention": (F.scaled_dot_product_attention, (_TOKENS,) * 3),
    "causal attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (_TOKENS,) * 3),
    "softmax": (lambda x: x.softmax(1), (_IMAGE,)),
    "log_softmax": (lambda x: x.log_softmax(1), (_IMAGE,)),
    "logsumexp": (lambda x: x.logsumexp((2, 3)), (_IMAGE,)),
    "mean": (lambda x: x.mean((2, 3)), (_IMAGE,)),
    "var": (lambda x: x.var((2, 3)), (_IMAGE,)),
    "cumsum": (lambda x: x.cumsum(1), (_IMAGE,)),
    "layer_norm": (lambda x, weight, bias: F.layer_norm(x, (7,), weight, bias), (_IMAGE, (7,), (7,))),
    "group_norm": (lambda x, weight, bias: F.group_norm(x, 2, weight, bias), (_IMAGE, (4,), (4,))),
    "batch_norm": (lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True), (_IMAGE, (4,), (4,))),
    "conv2d": (F.conv2d, (_IMAGE, (6, 4, 3, 3), (6,))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (_IMAGE,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2), (_IMAGE,)),
    "unfold": (lambda x: F.unfold(x, 3), (_IMAGE,)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (_IMAGE,)),
    "topk": (lambda x: x.topk(2, 1)[0], (_IMAGE,)),
    "unbind": (lambda x: x.unbind(1)[2], (_IMAGE,)),
    "lstm": (_lstm, ((3, 2, 4), (20, 4), (20, 5), (20,), (20,))),
    "cdist": (torch.cdist, ((2, 5, 3), (2, 6, 3))),
    "binary_cross_entropy": (lambda x, y: F.binary_cross_entropy_with_logits(x, y), (_IMAGE, _IMAGE)),
}
#: Functions without kernels for bfloat16 on the CPU.
_NOT_IN_HALF = ("cdist",)


def _run(trace: JointTrace, inputs: list[Tensor]) -> list[str]:
    """Run the calls of a trace; the results that differ from their description."""
    values: dict[int, Any] = dict(enumerate(inputs))
    problems: list[str] = []

    def resolve(value: Any) -> Any:
        if isinstance(value, SlotArg):
            return values[value.index]
        return [resolve(item) for item in value] if isinstance(value, tuple) else torch.device("cpu") if value is DEVICE else value

    def call(traced: TracedCall) -> None:
        outputs = traced.function(*map(resolve, traced.arguments), **{key: resolve(value) for key, value in traced.keywords})
        for position, (result, value) in enumerate(zip(traced.results, outputs if traced.has_many else (outputs,), strict=True)):
            if result is None:
                is_view = value is None or value.untyped_storage().data_ptr() in {v.untyped_storage().data_ptr() for v in values.values()}
                problems.extend([] if is_view else [f"{traced.function}, result {position}: not counted"])
                continue
            values[result.index] = value
            described = torch.empty(result.shape, dtype=result.dtype)
            pairs = [(value.dtype, described.dtype), (value.shape, described.shape)]
            if result.view_of is None:
                pairs.append((value.untyped_storage().nbytes(), described.untyped_storage().nbytes()))
            problems.extend(f"{traced.function}, result {position}: {real}, not {said}" for real, said in pairs if real != said)

    for traced in trace.forward:
        call(traced)
    values[trace.num_inputs] = torch.ones_like(values[trace.result])
    for traced in trace.backward:
        call(traced)
    for number, gradient in enumerate(trace.gradients):
        assert gradient is not None and values[gradient].shape == inputs[number].shape
    return problems


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "batch_norm"])
def test_statistics_of_norms_with_weights_in_single_precision(name: str, dtype: torch.dtype) -> None:
    """As under autocast: kernels on fake tensors return half of the bytes."""
    function, (image, *weights) = _FUNCTIONS[name]
    specs = [ArgumentSpec(image, dtype, True), *(ArgumentSpec(shape, torch.float32, True) for shape in weights)]
    assert _run(trace_joint(function, specs), [torch.rand(spec.shape).to(spec.dtype) for spec in specs]) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _FUNCTIONS)
@torch.no_grad()  # the mode in which programs run
def test_results_are_those_of_real_calls(name: str, dtype: torch.dtype) -> None:
    """Traces run on fake tensors with other kernels than ATen's: a wrong dtype is a wrong number of bytes in every budget."""
    if name in _NOT_IN_HALF and dtype == torch.bfloat16:
        pytest.skip("no kernel of this dtype on the CPU")
    function, shapes = _FUNCTIONS[name]
    trace = trace_joint(function, [ArgumentSpec(shape, dtype, True) for shape in shapes])
    assert _run(trace, [torch.rand(shape).to(dtype) for shape in shapes]) == []
