"""Rewrites with conflicting accesses: hand-written programs in which another instruction accesses values that a kernel would fuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sft.backends.kernel_call import kernel_call_of
from sft.backends.rewriter import KernelBackend
from sft.backends.selector import AlwaysKernel
from sft.lower.builder import ProgramBuilder
from sft.lower.program import Port, Slot

aten = torch.ops.aten
_SHAPE = (1, 8, 6, 6)
_PLAIN = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _emitter() -> tuple[ProgramBuilder, Slot, Slot]:
    """An emitter with a laid-out image and a weight."""
    builder = ProgramBuilder(dtype=torch.float32)
    return builder, builder.port("source", "x", _SHAPE), builder.port("side", "w", (8, 8, 3, 3))


def _conv(builder: ProgramBuilder, x: Slot, w: Slot) -> Slot:
    return builder.call(aten.convolution.default, x, w, None, *_PLAIN, shape=_SHAPE)


def _names(builder: ProgramBuilder, laid_out_roles: Sequence[str] = ("source", "side")) -> list[str]:
    """Calls of the program with kernels, without allocations and views."""
    laid_out = [port for port in builder.ports if port.role in laid_out_roles]
    KernelBackend(selector=AlwaysKernel()).rewrite(builder, laid_out, training=True)
    names = []
    for instruction in builder.finish().instructions:
        call, function = kernel_call_of(instruction.function), instruction.function
        if call is not None:
            names.append(function.__qualname__ + (" relu" if getattr(call, "relu", False) else ""))
        elif function not in (torch.empty, aten.slice.Tensor):
            names.append(str(function).removeprefix("aten."))
    return names


def _relu(builder: ProgramBuilder, slot: Slot) -> Slot:
    return builder.call(aten.relu_.default, slot, writes=slot)


def test_fusion_without_conflicting_accesses() -> None:
    builder, x, w = _emitter()
    builder.result("append", "y", _relu(builder, _conv(builder, x, w)))
    assert _names(builder) == ["ConvolutionCall.run relu"]


def test_a_weight_of_unknown_layout_gets_a_counted_copy() -> None:
    builder, x, w = _emitter()
    builder.result("append", "y", _relu(builder, _conv(builder, x, w)))
    assert _names(builder, ["source"]) == ["copy_.default", "ConvolutionCall.run relu"]
    (copied,) = (
        instruction for instruction in builder.instructions if instruction.function is torch.empty and instruction.num_bytes == w.num_bytes
    )
    assert copied.outputs[0] is not None and copied.outputs[0].shape == w.shape


def test_a_reader_between_convolution_and_relu() -> None:
    builder, x, w = _emitter()
    y = _conv(builder, x, w)
    builder.result("append", "z", builder.call(aten.mul.Tensor, y, 2.0, shape=_SHAPE))
    builder.result("append", "y", _relu(builder, y))
    assert _names(builder) == ["ConvolutionCall.run", "mul.Tensor", "relu_.default"]


def test_a_branch_that_changes_before_the_relu() -> None:
    builder, x, w = _emitter()
    branch = builder.call(aten.clone.default, x, shape=_SHAPE)
    total = builder.call(aten.add.Tensor, _conv(builder, x, w), branch, shape=_SHAPE)
    builder.call(aten.mul_.Tensor, branch, branch, writes=branch)
    builder.result("append", "branch", branch)
    builder.result("append", "y", _relu(builder, total))
    assert _names(builder) == ["clone.default", "ConvolutionCall.run", "mul_.Tensor", "relu_.default"]


def test_an_operand_that_changes_before_the_relu() -> None:
    builder, x, w = _emitter()
    own = builder.call(aten.clone.default, x, shape=_SHAPE)
    y = _conv(builder, own, w)
    builder.call(aten.mul_.Tensor, own, own, writes=own)
    builder.result("append", "own", own)
    builder.result("append", "y", _relu(builder, y))
    assert _names(builder) == ["clone.default", "ConvolutionCall.run", "mul_.Tensor", "relu_.default"]


def test_a_padded_copy_of_a_changing_operand_stays() -> None:
    builder, x, w = _emitter()
    own = builder.call(aten.clone.default, x, shape=_SHAPE)
    padded = builder.call(aten.constant_pad_nd.default, own, [0, 0, 1, 0], 0.0, shape=(1, 8, 7, 6))
    builder.call(aten.mul_.Tensor, own, own, writes=own)
    builder.result("append", "own", own)
    builder.result("append", "y", builder.call(aten.convolution.default, padded, w, None, *_PLAIN, shape=(1, 8, 7, 6)))
    assert _names(builder) == ["clone.default", "constant_pad_nd.default", "mul_.Tensor", "ConvolutionCall.run"]


def test_an_unused_padded_copy_is_removed() -> None:
    builder, x, w = _emitter()
    padded = builder.call(aten.constant_pad_nd.default, x, [0, 0, 1, 0], 0.0, shape=(1, 8, 7, 6))
    builder.result("append", "y", builder.call(aten.convolution.default, padded, w, None, *_PLAIN, shape=(1, 8, 7, 6)))
    assert _names(builder) == ["ConvolutionCall.run"]


def test_a_buffer_of_the_callers_layout_is_copied_into() -> None:
    builder, x, w = _emitter()
    builder.copy(builder.port("out", "y", _SHAPE), _relu(builder, _conv(builder, x, w)))
    assert _names(builder) == ["ConvolutionCall.run relu", "copy_.default"]


def test_a_masked_gradient_with_another_reader_stays_in_memory() -> None:
    builder, x, w = _emitter()
    y = builder.call(aten.relu.default, x, shape=_SHAPE)
    arriving = builder.call(aten.clone.default, x, shape=_SHAPE)
    masked = builder.call(aten.threshold_backward.default, arriving, y, 0, shape=_SHAPE)
    made = builder.slot(_SHAPE), None, None
    builder.call_many(aten.convolution_backward.default, (masked, x, w, None, *_PLAIN, [True, False, False]), made)
    builder.result("grad_source", "x", made[0])
    alone = ProgramBuilder(
        dtype=builder.dtype,
        instructions=list(builder.instructions),
        ports=dict(builder.ports),
        results=dict(builder.results),
        _num_slots=builder._num_slots,
    )
    assert _names(alone) == ["relu.default", "clone.default", "DataGradientCall.run"]
    builder.result("grad_carry", "masked", masked)
    assert _names(builder) == ["relu.default", "clone.default", "threshold_backward.default", "DataGradientCall.run"]


def test_a_gradient_of_unknown_layout_gets_a_counted_copy() -> None:
    builder, x, w = _emitter()
    made = builder.slot(_SHAPE), None, None
    arriving = builder.port("grad_out", "y", _SHAPE)
    builder.call_many(aten.convolution_backward.default, (arriving, x, w, None, *_PLAIN, [True, False, False]), made)
    builder.result("grad_source", "x", made[0])
    assert _names(builder) == ["copy_.default", "DataGradientCall.run"]
    assert builder.finish().peak_bytes == 2 * made[0].num_bytes


def test_ports_are_never_allocated() -> None:
    builder, x, w = _emitter()
    builder.result("append", "y", _conv(builder, x, w))
    _names(builder)
    made = {out.number for i in builder.instructions for out in i.outputs if out is not None}
    assert made.isdisjoint({builder.ports[Port("source", "x")].number, builder.ports[Port("side", "w")].number})
