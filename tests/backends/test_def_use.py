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
    e = ProgramBuilder(dtype=torch.float32)
    return e, e.port("source", "x", _SHAPE), e.port("side", "w", (8, 8, 3, 3))


def _conv(e: ProgramBuilder, x: Slot, w: Slot) -> Slot:
    return e.call(aten.convolution.default, x, w, None, *_PLAIN, shape=_SHAPE)


def _names(e: ProgramBuilder, laid_out_roles: Sequence[str] = ("source", "side")) -> list[str]:
    """Calls of the program with kernels, without allocations and views."""
    laid_out = [port for port in e.ports if port.role in laid_out_roles]
    KernelBackend(selector=AlwaysKernel()).rewrite(e, laid_out, training=True)
    names = []
    for instruction in e.finish().instructions:
        call, function = kernel_call_of(instruction.function), instruction.function
        if call is not None:
            names.append(function.__qualname__ + (" relu" if getattr(call, "relu", False) else ""))
        elif function not in (torch.empty, aten.slice.Tensor):
            names.append(str(function).removeprefix("aten."))
    return names


def _relu(e: ProgramBuilder, slot: Slot) -> Slot:
    return e.call(aten.relu_.default, slot, writes=slot)


def test_fusion_without_conflicting_accesses() -> None:
    e, x, w = _emitter()
    e.result("append", "y", _relu(e, _conv(e, x, w)))
    assert _names(e) == ["ConvolutionCall.run relu"]


def test_a_weight_of_unknown_layout_gets_a_counted_copy() -> None:
    e, x, w = _emitter()
    e.result("append", "y", _relu(e, _conv(e, x, w)))
    assert _names(e, ["source"]) == ["copy_.default", "ConvolutionCall.run relu"]
    (copied,) = (
        instruction for instruction in e.instructions if instruction.function is torch.empty and instruction.num_bytes == w.num_bytes
    )
    assert copied.outputs[0] is not None and copied.outputs[0].shape == w.shape


def test_a_reader_between_convolution_and_relu() -> None:
    e, x, w = _emitter()
    y = _conv(e, x, w)
    e.result("append", "z", e.call(aten.mul.Tensor, y, 2.0, shape=_SHAPE))
    e.result("append", "y", _relu(e, y))
    assert _names(e) == ["ConvolutionCall.run", "mul.Tensor", "relu_.default"]


def test_a_branch_that_changes_before_the_relu() -> None:
    e, x, w = _emitter()
    branch = e.call(aten.clone.default, x, shape=_SHAPE)
    total = e.call(aten.add.Tensor, _conv(e, x, w), branch, shape=_SHAPE)
    e.call(aten.mul_.Tensor, branch, branch, writes=branch)
    e.result("append", "branch", branch)
    e.result("append", "y", _relu(e, total))
    assert _names(e) == ["clone.default", "ConvolutionCall.run", "mul_.Tensor", "relu_.default"]


def test_an_operand_that_changes_before_the_relu() -> None:
    e, x, w = _emitter()
    own = e.call(aten.clone.default, x, shape=_SHAPE)
    y = _conv(e, own, w)
    e.call(aten.mul_.Tensor, own, own, writes=own)
    e.result("append", "own", own)
    e.result("append", "y", _relu(e, y))
    assert _names(e) == ["clone.default", "ConvolutionCall.run", "mul_.Tensor", "relu_.default"]


def test_a_padded_copy_of_a_changing_operand_stays() -> None:
    e, x, w = _emitter()
    own = e.call(aten.clone.default, x, shape=_SHAPE)
    padded = e.call(aten.constant_pad_nd.default, own, [0, 0, 1, 0], 0.0, shape=(1, 8, 7, 6))
    e.call(aten.mul_.Tensor, own, own, writes=own)
    e.result("append", "own", own)
    e.result("append", "y", e.call(aten.convolution.default, padded, w, None, *_PLAIN, shape=(1, 8, 7, 6)))
    assert _names(e) == ["clone.default", "constant_pad_nd.default", "mul_.Tensor", "ConvolutionCall.run"]


def test_an_unused_padded_copy_is_removed() -> None:
    e, x, w = _emitter()
    padded = e.call(aten.constant_pad_nd.default, x, [0, 0, 1, 0], 0.0, shape=(1, 8, 7, 6))
    e.result("append", "y", e.call(aten.convolution.default, padded, w, None, *_PLAIN, shape=(1, 8, 7, 6)))
    assert _names(e) == ["ConvolutionCall.run"]


def test_a_buffer_of_the_callers_layout_is_copied_into() -> None:
    e, x, w = _emitter()
    e.copy(e.port("out", "y", _SHAPE), _relu(e, _conv(e, x, w)))
    assert _names(e) == ["ConvolutionCall.run relu", "copy_.default"]


def test_a_masked_gradient_with_another_reader_stays_in_memory() -> None:
    e, x, w = _emitter()
    y = e.call(aten.relu.default, x, shape=_SHAPE)
    arriving = e.call(aten.clone.default, x, shape=_SHAPE)
    masked = e.call(aten.threshold_backward.default, arriving, y, 0, shape=_SHAPE)
    made = e.slot(_SHAPE), None, None
    e.call_many(aten.convolution_backward.default, (masked, x, w, None, *_PLAIN, [True, False, False]), made)
    e.result("grad_source", "x", made[0])
    alone = ProgramBuilder(
        dtype=e.dtype, instructions=list(e.instructions), ports=dict(e.ports), results=dict(e.results), _num_slots=e._num_slots
    )
    assert _names(alone) == ["relu.default", "clone.default", "DataGradientCall.run"]
    e.result("grad_carry", "masked", masked)
    assert _names(e) == ["relu.default", "clone.default", "threshold_backward.default", "DataGradientCall.run"]


def test_a_gradient_of_unknown_layout_gets_a_counted_copy() -> None:
    e, x, w = _emitter()
    made = e.slot(_SHAPE), None, None
    arriving = e.port("grad_out", "y", _SHAPE)
    e.call_many(aten.convolution_backward.default, (arriving, x, w, None, *_PLAIN, [True, False, False]), made)
    e.result("grad_source", "x", made[0])
    assert _names(e) == ["copy_.default", "DataGradientCall.run"]
    assert e.finish().peak_bytes == 2 * made[0].num_bytes


def test_ports_are_never_allocated() -> None:
    e, x, w = _emitter()
    e.result("append", "y", _conv(e, x, w))
    _names(e)
    made = {out.number for i in e.instructions for out in i.outputs if out is not None}
    assert made.isdisjoint({e.ports[Port("source", "x")].number, e.ports[Port("side", "w")].number})
