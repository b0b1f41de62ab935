"""Lowering of a traced block to flat programs: its first run, its recomputation, and its backward.

The programs come from one trace, by dropping unused results and by splitting between forward and backward:

- ``first``, ``first_save``: the output and the buffers' next values; the latter also leaves the residuals of ``backward``.
- ``again``, ``again_save``: the same without next values of buffers. Recomputations run these, so each buffer changes once in a step.
- ``backward``, and ``backward_last`` for a block with an input that needs no gradient.

Views of the input and of parameters are recomputed in the backward program instead of being saved, since weights may have left the device
in between. Random masks are functions of a seed, the call's number in the block (*site*), the block's number (*draw*) and the element's
position, so a recomputation has the same bits in any order of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sft.common.errors import InternalError, UnsupportedError
from sft.common.memory import measure_peak
from sft.common.torch_internals import op_schema
from sft.kernels.rng.dropout import write_mask
from sft.kernels.rng.mask_tile import MaskTile
from sft.kernels.rng.philox import KeyWord
from sft.lower.builder import ProgramBuilder
from sft.lower.joint_traces import SlotArg, TracedCall
from sft.lower.program import Instruction, Port, Program, Slot
from sft.repeat.trace import BlockTrace

__all__ = ["DRAW", "GRAD_INPUT", "GRAD_OUTPUT", "INPUT", "OUTPUT", "BlockPrograms", "lower_block"]

aten = torch.ops.aten

INPUT = Port("source", "x")
OUTPUT = Port("out", "x")
GRAD_OUTPUT = Port("grad_out", "x")
GRAD_INPUT = Port("grad_source", "x")
#: Bound to (seed, block number).
DRAW = Port("origin", "draw")

#: Norms that update running statistics in place: positions of the statistics and of the training flag in the arguments.
_UPDATING_NORMS = {aten.native_batch_norm.default: (3, 4, 5), aten.cudnn_batch_norm.default: (3, 4, 5)}
#: Their derivatives, which do not read the statistics in training: the same positions (no flag: always training).
_UPDATING_NORMS_BACKWARD: dict[Any, tuple[int, int, int | None]] = {
    aten.native_batch_norm_backward.default: (3, 4, 7),
    aten.cudnn_batch_norm_backward.default: (3, 4, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrograms:
    """The programs of a block.

    Attributes:
        first: forward of the first run.
        first_save: the same, leaving the residuals of ``backward``.
        again: forward of a recomputation.
        again_save: the same, leaving the residuals of ``backward``.
        backward: gradients of the input and of the parameters.
        backward_last: gradients of the parameters.
        constants: tensors that the block made of Python values.
        output_bytes: bytes of the output's storage.
        grad_bytes: bytes of the storage of the input's gradient.
        saved_bytes: bytes that ``first_save`` leaves in addition to the output.
        reads_output: True if ``backward`` reads the output.
        updated: buffers that change.
        with_gradient: parameters that get a gradient.
        is_random: True if the block draws random masks.
    """

    first: Program
    first_save: Program
    again: Program
    again_save: Program
    backward: Program
    backward_last: Program
    constants: dict[Port, Tensor]
    output_bytes: int
    grad_bytes: int
    saved_bytes: int
    reads_output: bool
    updated: tuple[str, ...]
    with_gradient: tuple[str, ...]
    is_random: bool


def lower_block(trace: BlockTrace) -> BlockPrograms:
    """Lower a trace to programs.

    Raises:
        UnsupportedError: a random operator without positions, or a buffer that changes and that the output depends on.
    """
    first = _BlockLowering(trace, again=False).forward_only()
    first_save, _ = _BlockLowering(trace, again=False).both(input_grad=True)
    lowering = _BlockLowering(trace, again=True)
    again_save, backward = lowering.both(input_grad=True)
    recomputed = _BlockLowering(trace, again=True).forward_only()
    _, backward_last = _BlockLowering(trace, again=True).both(input_grad=False)
    if first_save.residuals != again_save.residuals:
        raise InternalError("a recomputed block leaves other residuals than the block itself")
    updated = lowering.updated
    stateful = [name for name in updated for program in (again_save, backward) if Port("side", name) in program.ports]
    if stateful:
        raise UnsupportedError(
            [f"buffer {name} of the repeated block: it is changed, and the output depends on it; keep it fixed" for name in {*stateful}]
        )
    sizes = {out.number: out.num_bytes for i in first_save.instructions for out in i.outputs if out is not None}
    roots = {out.number: out.root for i in first_save.instructions for out in i.outputs if out is not None}
    saved_roots = {roots[number] for number in first_save.residuals}
    output_root = first_save.results[OUTPUT].root
    return BlockPrograms(
        first=first,
        first_save=first_save,
        again=recomputed,
        again_save=again_save,
        backward=backward,
        backward_last=backward_last,
        constants=lowering.constants,
        output_bytes=first_save.result_bytes[OUTPUT],
        grad_bytes=backward.result_bytes[GRAD_INPUT],
        saved_bytes=sum(sizes[root] for root in saved_roots if root != output_root),
        reads_output=output_root in saved_roots,
        updated=tuple(updated),
        with_gradient=tuple(port.name for port in backward.result_bytes if port.role == "grad_side"),
        is_random=any(DRAW in program.ports for program in (first, again_save, backward)),
    )


class _BlockLowering:
    """One lowering of a trace; ``again`` for a recomputation."""

    def __init__(self, trace: BlockTrace, *, again: bool) -> None:
        self.trace, self.again = trace, again
        self.builder = ProgramBuilder(dtype=trace.x.dtype)
        calls = trace.calls
        ports = [INPUT, *(Port("side", name) for name in (*trace.params, *trace.buffers)), GRAD_OUTPUT]
        metas = [trace.x, *trace.params.values(), *trace.buffers.values(), trace.x]
        self._slots: dict[int, Slot] = {
            index: self.builder.port(port.role, port.name, meta.shape, meta.dtype)
            for index, (port, meta) in enumerate(zip(ports, metas, strict=True))
        }
        self._buffers = dict(zip(trace.buffers, range(1 + len(trace.params), calls.num_inputs), strict=True))
        self.constants = {Port("constant", f"constant{index}"): value for index, value in calls.constants.items()}
        for (port, value), index in zip(self.constants.items(), calls.constants, strict=True):
            self._slots[index] = self.builder.port(port.role, port.name, value.shape, value.dtype)
        self._producers = {
            result.index: call for call in (*calls.forward, *calls.backward) for result in call.results if result is not None
        }
        self._from_grad = {calls.num_inputs, *(result.index for call in calls.backward for result in call.results if result is not None)}
        self._backward_views: dict[int, Slot] = {}  # views of ports, recomputed for the backward pass
        self._sites: dict[int, int] = {}
        self._statistics = self._updated_statistics()

    @property
    def updated(self) -> list[str]:
        """Buffers that change."""
        return [
            name
            for (name, buffer), value in zip(self._buffers.items(), self.trace.next_values, strict=True)
            if value in self._statistics or not self._is_clone(value, buffer)
        ]

    def forward_only(self) -> Program:
        """The forward program."""
        self._forward()
        return self.builder.finish()

    def both(self, *, input_grad: bool) -> tuple[Program, Program]:
        """The forward program that leaves residuals, and the backward program."""
        self._forward()
        turn = len(self.builder.instructions)
        for call in self.trace.calls.backward:
            self._emit(call, self._slots, is_backward=True)
        ports = [GRAD_INPUT, *(Port("grad_side", name) for name in self.trace.params)]
        for port, value in zip(ports, self.trace.grads, strict=True):
            if value is not None and (input_grad or port != GRAD_INPUT):
                self._result(port, value)
        return self.builder.split(turn)

    def _forward(self) -> None:
        for call in self.trace.calls.forward:
            self._emit(call, self._slots, is_backward=False)
        self._result(OUTPUT, self.trace.calls.result)
        if not self.again:
            changed = set(self.updated)
            for name, value in zip(self._buffers, self.trace.next_values, strict=True):
                if name in changed:
                    self._result(Port("update", name), value)

    def _is_clone(self, value: int, buffer: int) -> bool:
        """True if a value is a clone of a buffer."""
        call = self._producers.get(value)
        return call is not None and call.function is aten.clone.default and call.arguments[0] == SlotArg(buffer)

    def _updated_statistics(self) -> set[int]:
        """Clones of running statistics that norms update."""
        return {
            argument.index
            for call in self._producers.values()
            if call.function in _UPDATING_NORMS
            for argument in _statistics_of(call, _UPDATING_NORMS[call.function])
            if isinstance(argument, SlotArg)
        }

    def _result(self, port: Port, value: int) -> None:
        """Return a value to the caller, in a storage of its own."""
        slot = self._slots[value]
        roots = {other.root for other in self.builder.results.values()} | {other.root for other in self.builder.ports.values()}
        if slot.root in roots:
            slot = self.builder.call(aten.clone.default, slot, shape=slot.shape, dtype=slot.dtype)
        self.builder.result(port.role, port.name, slot)

    def _emit(self, call: TracedCall, slots: dict[int, Slot], *, is_backward: bool) -> None:
        """Emit a call; its results are added to ``slots``."""
        outputs: list[Slot | None] = []
        for result in call.results:
            if result is None:
                outputs.append(None)
                continue
            root = None if result.view_of is None else self._slots[result.view_of].root
            slots[result.index] = slot = self.builder.slot(result.shape, result.dtype, root)
            outputs.append(slot)
        function: Callable[..., Any] = call.function
        arguments = [self._converted(argument, is_backward) for argument in call.arguments]
        keywords = {name: self._converted(argument, is_backward) for name, argument in call.keywords}
        writes: tuple[Slot, ...] = ()
        if function in _UPDATING_NORMS:
            low, high, _ = positions = _UPDATING_NORMS[function]
            if _statistics_of(call, positions) and self.again:
                arguments[low] = arguments[high] = None
            elif _statistics_of(call, positions):
                writes = tuple(slot for slot in (arguments[low], arguments[high]) if slot is not None)
        elif function in _UPDATING_NORMS_BACKWARD:
            low, high, flag = _UPDATING_NORMS_BACKWARD[function]
            if flag is None or call.arguments[flag]:
                arguments[low] = arguments[high] = None
        elif torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()) and not _has_zero_dropout(call):
            function, arguments, keywords = self._random(call, arguments)
        if writes:
            num_bytes = sum(out.num_bytes for out in outputs if out is not None and out.root == out.number)
            self.builder.instructions.append(
                Instruction(function, tuple(arguments), keywords, tuple(outputs), writes=writes, num_bytes=num_bytes)
            )
        else:
            self.builder.call_into(
                function,
                tuple(arguments),
                keywords,
                tuple(outputs),
                has_many=call.has_many,
                scratch_bytes=_scratch_bytes(function, arguments),
            )

    def _slot(self, value: int, is_backward: bool) -> Slot:
        """The slot of a value. In the backward program a view of a port is a recomputed one."""
        slot = self._slots[value]
        is_port_view = slot.number != slot.root and any(slot.root == port.number for port in self.builder.ports.values())
        if not (is_backward and is_port_view) or value in self._from_grad:
            return slot
        if value not in self._backward_views:
            self._emit(self._producers[value], self._backward_views, is_backward=True)
        return self._backward_views[value]

    def _converted(self, value: Any, is_backward: bool) -> Any:
        """An argument with indices replaced by slots."""
        if isinstance(value, SlotArg):
            return self._slot(value.index, is_backward)
        return tuple(self._converted(item, is_backward) for item in value) if isinstance(value, tuple) else value

    def _random(self, call: TracedCall, arguments: list[Any]) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """A random mask as a function of positions."""
        result = next(result for result in call.results if result is not None)
        site = self._sites.setdefault(result.index, len(self._sites))
        draw = self.builder.port(DRAW.role, DRAW.name, (), torch.int64)
        if call.function is aten.bernoulli.p and len(call.arguments) == 2:
            return _bernoulli, [draw, result.shape, call.arguments[1], site, result.dtype, self.trace.device], {}
        if call.function is aten.native_dropout.default and call.arguments[2]:
            return _native_dropout, [draw, arguments[0], call.arguments[1], site], {}
        raise UnsupportedError([f"(the repeated block): {call.function} draws random numbers that follow no position; use dropout"])


def _statistics_of(call: TracedCall, positions: tuple[int, int, int]) -> tuple[Any, ...]:
    """The running statistics that a norm updates; none in evaluation."""
    low, high, flag = positions
    return (call.arguments[low], call.arguments[high]) if call.arguments[flag] else ()


def _scratch_bytes(function: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """Temporary bytes of a random mask; in plain PyTorch the integers of Philox."""
    if function is _bernoulli:
        return _mask_scratch_bytes(tuple(arguments[1]), arguments[4])
    if function is _native_dropout:
        # The product with the mask exists while it is scaled.
        product: int = arguments[1].num_bytes
        return max(_mask_scratch_bytes(tuple(arguments[1].shape), torch.bool) - product, product)
    return 0


@lru_cache(maxsize=256)
def _mask_scratch_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    with measure_peak("meta") as peak:
        mask = _bernoulli((0, 0), shape, 0.5, 0, dtype, torch.device("meta"))
    return peak.num_bytes - mask.numel() * mask.element_size()


def _has_zero_dropout(call: TracedCall) -> bool:
    """True for an operator with an inner dropout (attention) of probability 0."""
    names = [argument.name for argument in op_schema(call.function).arguments]
    values: Mapping[str, Any] = {**dict(zip(names, call.arguments, strict=False)), **dict(call.keywords)}
    return "dropout_p" in names and values.get("dropout_p", 0.0) == 0.0


def _bernoulli(
    draw: tuple[KeyWord, int], shape: tuple[int, ...], kept: float, site: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Ones with a probability of ``kept``, otherwise zeros."""
    seed, block = draw
    padded = (*shape, 1, 1, 1, 1)
    extents = (padded[0], padded[1], padded[2], max(1, torch.Size(shape[3:]).numel()))
    tile = MaskTile(shape=extents, extents=extents, origin=(0, 0, 0), seed=seed, site=site, draw=block, p=1 - kept, kind="element")
    out = torch.empty(extents, dtype=dtype, device=device)
    write_mask(tile, out)
    return out.view(tuple(shape))


def _native_dropout(draw: tuple[KeyWord, int], x: Tensor, p: float, site: int) -> tuple[Tensor, Tensor]:
    """``aten.native_dropout`` with such a mask."""
    mask = _bernoulli(draw, tuple(x.shape), 1 - p, site, torch.bool, x.device)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
