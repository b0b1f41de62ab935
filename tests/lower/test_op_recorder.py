"""Joint traces replay to the function's result and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.common.errors import InternalError
from sft.lower.custom_ops import BY_SHAPE, FUNCTIONS, statistics
from sft.lower.joint_traces import JointTrace, SlotArg, TracedCall, trace_joint
from sft.lower.op_recorder import ArgumentSpec, record_ops
from sft.lower.program import DEVICE


def _replay(trace: JointTrace, inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Run a trace and check the shape, type and storage of every result."""
    values: dict[int, Tensor] = {**dict(enumerate(inputs)), trace.num_inputs: grad}

    def resolve(item: Any) -> Any:
        if isinstance(item, SlotArg):
            return values[item.index]
        if item is DEVICE:
            return torch.device("cpu")
        return [resolve(each) for each in item] if isinstance(item, tuple) else item

    def run(call: TracedCall) -> None:
        output = call.function(*map(resolve, call.arguments), **{key: resolve(item) for key, item in call.keywords})
        for result, tensor in zip(call.results, output if call.has_many else (output,), strict=True):
            if result is not None:
                assert (tuple(tensor.shape), tensor.dtype) == (result.shape, result.dtype)
                if result.view_of is not None:
                    assert tensor.untyped_storage()._cdata == values[result.view_of].untyped_storage()._cdata
                values[result.index] = tensor

    for call in (*trace.forward, *trace.backward):
        run(call)
    return values[trace.result], [None if index is None else values[index] for index in trace.gradients]


def _cell(x: Tensor, weight: Tensor) -> Tensor:
    """A stack, transposed in place."""
    rows = [torch.tanh(row @ weight) for row in x.unbind(0)]
    return torch.stack(rows).transpose_(0, 1) * 2


def _writes_in_place(x: Tensor, weight: Tensor) -> Tensor:
    """In-place writes to a result, and through a view of it."""
    made = x @ weight
    made.add_(1.0).mul_(weight.sum())
    made[0].mul_(2.0)
    return made.exp()


def _uses_several_results(x: Tensor, weight: Tensor) -> Tensor:
    """A function that reads two of three results of a call."""
    first, _, last = torch.linalg.svd(x @ weight, full_matrices=False)
    made: Tensor = first.abs() @ last.abs()
    return made


def _detaches(x: Tensor, weight: Tensor) -> Tensor:
    """The second input has no gradient."""
    return torch.relu(x) * weight.detach().sum()


@pytest.mark.parametrize("function", [_cell, _writes_in_place, _uses_several_results, _detaches])
def test_a_trace_replays_to_the_result_and_gradients_of_its_function(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.rand(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    trace = trace_joint(function, [ArgumentSpec((3, 3), torch.float64, True)] * 2)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = function(*leaves)
    grad = torch.rand(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
    output, gradients = _replay(trace, [x, weight], grad)
    torch.testing.assert_close(output, expected.detach())
    for gradient, other in zip(gradients, wanted, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, other)


def test_dead_calls_are_dropped() -> None:
    trace = trace_joint(lambda x: (x * 3, x.exp())[1], [ArgumentSpec((4,), torch.float64)])
    assert [call.function for call in trace.forward] == [torch.ops.aten.exp.default]
    assert not trace.backward


def test_reading_a_tensor_from_outside_is_refused() -> None:
    """A cached trace would keep the tensor of the first model with such an operator."""
    constant = torch.ones(4)
    with pytest.raises(InternalError, match="neither its operand nor made by one of its calls"):
        trace_joint(lambda x: x * constant, [ArgumentSpec((4,), torch.float32, True)])


_ARGUMENTS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "sft.moment_mean": ([(2, 6, 3)], {"shape": (2, 6, 1, 1)}),
    "sft.variance": ([(2, 6, 3)], {"correction": 1.0, "shape": (2, 6)}),
    "sft.nth_root": ([(2, 6)], {"order": 3.0}),
    "sft.scale_shift": ([(2, 3, 3), (6,), (6,)], {"axes": 2, "channels": 6, "eps": 1e-5}),
    "sft.folded_weight": ([(6, 3, 3, 3), (6,), (6,)], {"eps": 1e-5, "dtype": "bfloat16"}),
    "sft.folded_bias": ([(6,)] * 5, {"eps": 1e-5, "dtype": "float32"}),
    "sft.affine": ([(2, 6, 4, 5), (2, 6, 1, 1, 2)], {}),
    "sft.running_mean": ([(2, 6, 3), (6,)], {"momentum": 0.1}),
    "sft.running_var": ([(2, 6, 3), (6,)], {"momentum": 0.1}),
    "sft.inverse_sqrt": ([(2, 6)], {"eps": None, "dtype": "float32"}),
}


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", sorted(BY_SHAPE))
def test_functions_by_shape_call_the_same_on_any_device(target: str, dtype: torch.dtype, needs: bool) -> None:
    shapes, options = _ARGUMENTS[target]
    specs = [ArgumentSpec(shape, dtype, needs) for shape in shapes]

    def function(*tensors: Tensor) -> Tensor:
        made: Tensor = FUNCTIONS[target](*tensors, **options)
        return made

    ours, expected = (trace_joint(function, specs, by_shape=by_shape) for by_shape in (True, False))
    assert ours == expected
    assert ours.forward


def test_a_cumulative_average_is_by_shape() -> None:
    """The number of batches is an integer without a gradient, on any device."""

    def function(moments: Tensor, running: Tensor, count: Tensor) -> Tensor:
        return statistics.running_mean(moments, running, 0.1, count, 1)

    specs = [ArgumentSpec((1, 6, 3), torch.float32), ArgumentSpec((6,), torch.float32), ArgumentSpec((), torch.int64)]
    ours, expected = (trace_joint(function, specs, by_shape=by_shape) for by_shape in (True, False))
    assert ours == expected


def test_nothing_is_computed_while_recording() -> None:
    """The tensors are larger than any memory."""
    recording = record_ops(lambda x: (x * 2).sum(), [ArgumentSpec((1 << 20, 1 << 20), torch.float64, True)])
    assert recording.gradients[0] is not None
    assert tuple(recording.gradients[0].shape) == (1 << 20, 1 << 20)
