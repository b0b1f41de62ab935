"""Joint traces replay to the function's result and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sft.common.errors import InternalError
from sft.lower.custom_ops import BY_SHAPE, FUNCTIONS, statistics
from sft.lower.joint_traces import JointTrace, SlotArg, TracedCall, resolve_target, trace_joint
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


#: Shapes of operands and options by target.
_CALLS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
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
    "sft.align_dims": ([(2, 3)], {"shape": (2, 3, 1, 1)}),
    "sft.argmax": ([(1, 4, 3, 5)], {"axes": 2}),
    "sft.assign_channels": ([(1, 4, 2, 6), (1, 2, 2, 6)], {"dim": 1, "start": 1, "stop": 3, "step": 1, "selects": False}),
    "sft.axis_minmax": ([(2, 4, 7, 5)], {"largest": True, "reduced": (1,), "axes": 2}),
    "sft.axis_sum": ([(2, 4, 3, 5)], {"reduced": (1,), "divides": True, "keepdim": False, "axes": 2}),
    "sft.border_rows": ([(1, 4, 6, 5)], {"low": 2, "high": 1, "axes": 2}),
    "sft.circular_pad": ([(1, 3, 6, 5), (1, 3, 3, 5)], {"low": 2, "high": 1, "axes": 2}),
    "sft.constant_image": ([(1, 4, 2, 5)], {"channels": 4, "value": 0, "dtype": "float64", "axes": 2}),
    "sft.contract_pixels": ([(1, 3, 10), (1, 5, 10)], {"left": ((), (1,)), "right": ((), (1,)), "shape": (3, 5), "axes": 1}),
    "sft.expand_channels": ([(1, 4, 1, 3)], {"channels": (4, 2)}),
    "sft.kernel_rows": ([(4, 2, 3, 5)], {}),
    "sft.logsumexp": ([(1, 4, 3, 5)], {"axes": 2}),
    "sft.minmax": ([(1, 4, 3, 5)], {"largest": False, "axes": 2}),
    "sft.mix_channels": ([(1, 5, 1, 4), (1, 1, 3, 5, 1)], {"part": ((), (1,)), "channels": (3,), "axes": 2}),
    "sft.moments": ([(2, 4, 3, 5)], {"groups": 2, "per_sample": True, "axes": 2}),
    "sft.pad_channels": ([(1, 4, 2, 6)], {"dim": 1, "low": 2, "high": 1, "mode": "replicate"}),
    "sft.pixel_shuffle": ([(1, 1, 3, 2, 2, 4)], {"rest": (1,), "places": ((2,), (3,)), "factors": (3, 2)}),
    "sft.pixel_unshuffle": ([(1, 3, 2, 4)], {"factors": (2, 2)}),
    "sft.rearrange": ([(1, 6, 4, 5)], {"split": (2, 3), "order": (1, 0), "shape": (3, 2), "axes": 2}),
    "sft.restore_dims": ([(2, 6)], {"order": (1, 0), "shape": (6, 2, 1)}),
    "sft.spatial_side_input": ([(3,), (1, 4, 3, 3)], {"split": (3, 1, 1, 1), "order": (1, 2, 0, 3), "axes": 2}),
    "aten.adaptive_avg_pool2d.default": ([(2, 4, 9, 7)], {"output_size": (3, 2)}),
    "aten.amax.default": ([(2, 3, 4)], {"dim": (2,), "keepdim": True}),
    "aten.cat.default": ([(1, 2, 3), (1, 4, 3)], {"dim": 1}),
    "aten.einsum.default": ([(2, 3, 4), (2, 4, 5)], {"equation": "nij,njk->nki"}),
    "aten.expand.default": ([(1, 2, 1, 3)], {"size": (4, 2, 5, 3)}),
    "aten.gelu.default": ([(1, 3, 4)], {"approximate": "tanh"}),
    "aten.linear.default": ([(2, 3, 4), (5, 4), (5,)], {}),
    "aten.matmul.default": ([(2, 3, 4), (4, 5)], {}),
    "aten.pad.default": ([(1, 4, 5, 6)], {"pad": (1, 2, 0, 1), "mode": "reflect"}),
    "aten.permute.default": ([(1, 2, 3, 4)], {"dims": (2, 0, 1, 3)}),
    "aten.relu.default": ([(1, 3, 2)], {}),
    "aten.repeat.default": ([(1, 2, 3)], {"repeats": (4, 1, 2)}),
    "aten.sigmoid.default": ([(1, 2, 3)], {}),
    "aten.stack.default": ([(1, 2, 3), (1, 2, 3)], {"dim": 1}),
    "aten.tanh.default": ([(1, 2, 3)], {}),
    "aten.unsqueeze.default": ([(2, 3)], {"dim": 1}),
    "aten.view.default": ([(2, 6, 5)], {"size": (2, 30)}),
    "aten.add.Tensor": ([(2, 3), (3,)], {"alpha": 2}),
    "aten.div.Tensor": ([(2, 3), (2, 1)], {}),
    "aten.mul.Tensor": ([(2, 3), (3,)], {}),
    "aten.slice.Tensor": ([(4, 6)], {"dim": 1, "start": 1, "end": 5, "step": 2}),
    "aten.sub.Tensor": ([(2, 3), (3,)], {}),
    "aten.log_softmax.int": ([(1, 4, 2)], {"dim": 1}),
    "aten.select.int": ([(1, 4, 2)], {"dim": 1, "index": 2}),
    "aten.softmax.int": ([(1, 4, 2)], {"dim": -1}),
    "aten.transpose.int": ([(1, 4, 2)], {"dim0": 1, "dim1": 2}),
    "aten.mean.dim": ([(1, 4, 2)], {"dim": (1,), "keepdim": False}),
    "aten.squeeze.dim": ([(2, 4, 1)], {"dim": -1}),
    "aten.sum.dim_IntList": ([(2, 4, 3)], {"dim": (0, 2), "keepdim": True}),
    "aten.upsample_bilinear2d.vec": ([(2, 3, 4, 5)], {"output_size": (8, 7), "align_corners": False, "scale_factors": None}),
    "aten.upsample_nearest2d.vec": ([(2, 3, 4, 5)], {"output_size": None, "scale_factors": (2.0, 2.0)}),
}


def _function(target: str, options: dict[str, Any]) -> Callable[..., Tensor]:
    """The function of a target with options; lists of tensors are positional arguments."""
    if target in FUNCTIONS:
        return partial(FUNCTIONS[target], **options)
    overload = resolve_target(target)
    if target == "aten.einsum.default":
        return lambda *tensors: overload(options["equation"], tensors)
    if target in ("aten.cat.default", "aten.stack.default"):
        return lambda *tensors: overload(tensors, **options)
    return partial(overload, **options)


@pytest.mark.parametrize("target", sorted(BY_SHAPE - {"sft.cross_entropy"}))
def test_functions_by_shape_call_the_same_on_any_device(target: str) -> None:
    shapes, options = _CALLS[target]
    for dtype, needs in product((torch.float64, torch.float32, torch.bfloat16), (True, False)):
        specs = [ArgumentSpec(shape, dtype, needs) for shape in shapes]
        ours, expected = (trace_joint(_function(target, options), specs, by_shape=by_shape) for by_shape in (True, False))
        assert ours == expected
        assert ours.forward


def test_a_cross_entropy_is_by_shape() -> None:
    specs = [ArgumentSpec((2, 4, 3, 5), torch.float32, True), ArgumentSpec((2, 1, 3, 5), torch.int64)]
    function = partial(FUNCTIONS["sft.cross_entropy"], weight=None, ignore_index=-100, label_smoothing=0.1)
    ours, expected = (trace_joint(function, specs, by_shape=by_shape) for by_shape in (True, False))
    assert ours == expected
    assert ours.forward and ours.backward


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
