"""Untiled segment: runs on full tensors, as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from sft.analysis.frontend.capture import CHANNELS_LAST
from sft.analysis.ir.axes import ROWS
from sft.analysis.tiling.strips import StripStep
from sft.common.interval import Interval
from sft.lower.context import SegmentInfo
from sft.lower.lower_whole import lower_whole
from sft.lower.program import Port, Program
from sft.runtime.machine import Buffer, Gradients, HostOps, Machine, ProgramOps, Residuals, ValueBindings

__all__ = ["WholeSegment"]

_NO_OFFSET = (0, 0, 0)


@dataclass(kw_only=True)
class WholeSegment:
    """Segment that runs like plain PyTorch: its forward saves the residuals that its backward needs.

    Inputs that are not resident are read in full for its forward, and again for its backward.

    Attributes:
        scope: input of the lowering.
        step: one strip that covers the image.
        sides: side inputs that it reads.
        from_source: inputs, and cuts on the host, that are not resident.
    """

    #: its programs allocate the gradients
    accumulates: ClassVar[bool] = False
    #: its outputs are buffers on the device, also those that are copied to the host afterwards
    to_host: ClassVar[frozenset[str]] = frozenset()

    scope: SegmentInfo
    step: StripStep
    sides: tuple[str, ...]
    from_source: frozenset[str] = frozenset()
    _programs: dict[bool, tuple[Program, Program | None]] = field(default_factory=dict, repr=False)
    _storages: dict[bool, frozenset[int]] = field(default_factory=dict, repr=False)

    def programs(self, training: bool) -> tuple[Program, Program | None]:
        """The forward program and, in training, the backward program."""
        if training not in self._programs:
            self._programs[training] = lower_whole(self.scope, self.step, training=training)
        return self._programs[training]

    def _saved_storages(self, training: bool) -> frozenset[int]:
        """Root slots of the residuals of the forward program."""
        if training not in self._storages:
            program, _ = self.programs(training)
            roots = {out.number: out.root for i in program.instructions for out in i.outputs if out is not None}
            self._storages[training] = frozenset(roots[number] for number in program.residuals)
        return self._storages[training]

    @property
    def lowered_programs(self) -> tuple[Program, ...]:
        """The programs lowered so far."""
        return tuple(program for pair in self._programs.values() for program in pair if program is not None)

    def self_allocated(self, keep: bool) -> frozenset[str]:
        """Outputs that its forward program allocates."""
        program, _ = self.programs(keep)
        return frozenset(port.name for port in program.results)

    @property
    def reusable_sources(self) -> Mapping[str, tuple[str, ...]]:
        """None: its programs decide which operands they overwrite."""
        return {}

    @property
    def views(self) -> frozenset[str]:
        """Outputs that own memory of the residuals."""
        forward, _ = self.programs(True)
        viewed = self._saved_storages(True)
        outputs = (*forward.results.items(), *((port, slot) for port, slot in forward.ports.items() if port.role == "out"))
        return frozenset(port.name for port, slot in outputs if slot.root in viewed)

    @property
    def _private_slots(self) -> tuple[int, ...]:
        """Saved slots in memory of neither an input nor an output, one for each storage."""
        forward, _ = self.programs(True)
        shared = {slot.root for slot in (*forward.ports.values(), *forward.results.values())}
        roots = {out.number: out.root for i in forward.instructions for out in i.outputs if out is not None}
        return tuple({roots[number]: number for number in forward.residuals if roots[number] not in shared}.values())

    @property
    def keeps_buffers(self) -> bool:
        """True if some residuals are buffers that only the segment references."""
        return bool(self._private_slots)

    def buffers(self, machine: ProgramOps, saved: Residuals) -> Sequence[Buffer]:
        """These buffers."""
        return machine.residual_buffers(saved, self._private_slots)

    def backward_reads(self, reads: Sequence[str]) -> Sequence[str]:
        """Values that its backward needs: those that its program binds, and those that residuals are views of.

        Side inputs count, too, if it computes their gradients: the receiver of a streamed weight's gradient may update the weight.
        """
        forward, backward = self.programs(True)
        assert backward is not None
        viewed = self._saved_storages(True)
        bound = {port.name for port in backward.ports if port.role in ("source", "side")}
        bound |= {port.name for port, slot in forward.ports.items() if port.role in ("source", "side") and slot.root in viewed}
        bound |= {port.name for port in backward.results if port.role == "grad_side"}
        return [name for name in reads if name in bound]

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> Residuals:
        """Run the forward program; with ``keep`` the residuals are returned."""
        program, _ = self.programs(keep)
        bindings = {port: self._bound_value(machine, port.name, values) for port in program.ports if port.role in ("source", "side", "out")}
        bindings |= {port: _NO_OFFSET for port in program.ports if port.role == "origin"}
        results, saved = machine.run(program, bindings)
        viewed = self._saved_storages(keep)
        for port, slot in program.ports.items():
            if port.name in self.from_source and port.role == "source" and slot.root in viewed:
                saved.inputs[port.name] = bindings[port]
        for port, buffer in results.items():
            values.by_name[port.name] = buffer
            if program.results[port].root in viewed:
                saved.outputs.append(buffer)
        return saved

    def _bound_value(self, machine: HostOps, name: str, values: ValueBindings) -> Buffer:
        """Buffer of a value from outside; an input that is not resident is read in full."""
        value = values.by_name[name]
        return machine.read_input(value, self.scope.shapes[name], self.scope.dtype_of(name)) if name in self.from_source else value

    @property
    def saves(self) -> bool:
        """True if its backward needs residuals."""
        return bool(self.programs(True)[0].residuals)

    def backward(self, machine: Machine, values: ValueBindings, saved: Residuals | None, grads: Gradients, *, consume: bool = True) -> None:
        """Run the backward program; gradients of sources are new buffers, or are added to existing ones."""
        _, program = self.programs(True)
        assert program is not None
        has_residuals, saved = saved is not None, saved or Residuals({})
        bindings: dict[Port, Buffer] = {}
        for port in program.ports:
            if port.role == "source" and port.name in saved.inputs:
                bindings[port] = saved.inputs[port.name]
            elif port.role in ("source", "side") and port.name in values.by_name:
                bindings[port] = self._bound_value(machine, port.name, values)
            elif port.role in ("grad_out", "grad_side"):
                bindings[port] = grads.by_name[port.name]
            elif port.role == "origin":
                bindings[port] = _NO_OFFSET
        consumed = saved if consume else saved.fork()
        results, _ = machine.run(program, bindings, consumed if has_residuals else None)
        del consumed
        if consume:
            saved.outputs.clear()  # not before: the program reads them to its end
        for port in list(results):
            gradient = results.pop(port)
            if port.name in grads.sinks:
                batch = Interval(0, self.scope.shapes[port.name][0])
                machine.add_to_sink(grads.sinks[port.name], batch, Interval(0, self.scope.extent(port.name, ROWS)), gradient)
            elif port.name in grads.by_name:
                machine.add(grads.by_name[port.name], gradient)
            else:
                # Autograd copies the gradient of an input in another layout, when every other gradient exists.
                grads.by_name[port.name] = machine.to_channels_first(gradient) if port.name in self._inputs_channels_first else gradient
            del gradient

    @cached_property
    def _inputs_channels_first(self) -> frozenset[str]:
        """Sources that are inputs of the model in channels-first layout."""
        scope = self.scope
        inputs = [name for name in scope.sources if scope.graph[name].kind == "input" and len(scope.shapes[name]) in CHANNELS_LAST]
        return frozenset(inputs) - scope.in_program_layout
