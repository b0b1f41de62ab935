"""A segment that runs on whole tensors, as plain PyTorch runs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from sft.runtime.machine import Buffer, Gradients, Machine, Residuals, ValueBindings

__all__ = ["WholeSegment"]

_NO_OFFSET = (0, 0, 0)


@dataclass(kw_only=True)
class WholeSegment:
    """A segment that runs like plain PyTorch: everything that its backward needs is kept.

    Inputs that are not resident are read whole for its forward pass, and again for its backward pass.
    """

    #: gradients come out as buffers of their own, made where they are first added to
    accumulates: ClassVar[bool] = False
    #: its outputs are whole on the device, wherever they go then
    to_host: ClassVar[frozenset[str]] = frozenset()

    scope: SegmentInfo
    step: StripStep
    sides: tuple[str, ...]
    from_source: frozenset[str] = frozenset()
    _programs: dict[bool, tuple[Program, Program | None]] = field(default_factory=dict, repr=False)

    def programs(self, training: bool) -> tuple[Program, Program | None]:
        """The forward and, when training, the backward program."""
        if training not in self._programs:
            self._programs[training] = lower_whole(self.scope, self.step, training=training)
        return self._programs[training]

    @property
    def lowered(self) -> tuple[Program, ...]:
        """The programs lowered so far."""
        return tuple(program for pair in self._programs.values() for program in pair if program is not None)

    def self_allocated(self, keep: bool) -> frozenset[str]:
        """Outputs that its forward program makes itself, and that need no buffer beforehand."""
        program, _ = self.programs(keep)
        return frozenset(port.name for port in program.results)

    @property
    def views(self) -> frozenset[str]:
        """Outputs that what its backward pass needs are views of."""
        forward, _ = self.programs(True)
        viewed = _storage_roots(forward, forward.saved)
        outputs = (*forward.results.items(), *((port, slot) for port, slot in forward.ports.items() if port.role == "out"))
        return frozenset(port.name for port, slot in outputs if slot.root in viewed)

    @property
    def _own(self) -> tuple[int, ...]:
        """Of the slots that it saves those of storages that nobody else knows, one of each."""
        forward, _ = self.programs(True)
        others = {slot.root for slot in (*forward.ports.values(), *forward.results.values())}
        roots = {out.number: out.root for i in forward.instructions for out in i.outputs if out is not None}
        return tuple({roots[number]: number for number in forward.saved if roots[number] not in others}.values())

    @property
    def keeps_buffers(self) -> bool:
        """Whether its backward pass needs buffers that nobody else knows."""
        return bool(self._own)

    def buffers(self, machine: Machine, saved: Residuals) -> Sequence[Buffer]:
        """These buffers."""
        return machine.buffers_of(saved, self._own)

    def backward_reads(self, reads: Sequence[str]) -> Sequence[str]:
        """Of the values that it reads those that its backward pass needs: what its program binds, and what saved tensors are views of.

        Also those whose gradients it makes: who takes the gradient of a streamed weight updates the weight.
        """
        forward, backward = self.programs(True)
        assert backward is not None
        viewed = _storage_roots(forward, forward.saved)
        bound = {port.name for port in backward.ports if port.role in ("source", "side")}
        bound |= {port.name for port, slot in forward.ports.items() if port.role in ("source", "side") and slot.root in viewed}
        bound |= {port.name for port in backward.results if port.role == "grad_side"}
        return [name for name in reads if name in bound]

    def forward(self, machine: Machine, values: ValueBindings, *, keep: bool) -> Residuals:
        """Run it; with ``keep`` what the backward needs is returned."""
        program, _ = self.programs(keep)
        bindings = {port: self._given(machine, port.name, values) for port in program.ports if port.role in ("source", "side", "out")}
        bindings |= {port: _NO_OFFSET for port in program.ports if port.role == "origin"}
        results, saved = machine.run(program, bindings)
        viewed = _storage_roots(program, program.saved)
        for port, slot in program.ports.items():
            if port.name in self.from_source and port.role == "source" and slot.root in viewed:
                saved.loaded[port.name] = bindings[port]
        for port, handle in results.items():
            values.by_name[port.name] = handle
            if program.results[port].root in viewed:
                saved.handed.append(handle)
        return saved

    def _given(self, machine: Machine, name: str, values: ValueBindings) -> Buffer:
        """A value from outside; an input that is not resident is read as a whole."""
        handle = values.by_name[name]
        return machine.load(handle, self.scope.shapes[name], self.scope.dtype_of(name)) if name in self.from_source else handle

    @property
    def saves(self) -> bool:
        """Whether its backward pass needs anything of its forward pass."""
        return bool(self.programs(True)[0].saved)

    def backward(self, machine: Machine, values: ValueBindings, saved: Residuals | None, grads: Gradients, *, consume: bool = True) -> None:
        """Differentiate it; gradients of sources come out as new buffers, or are added to those that exist."""
        _, program = self.programs(True)
        assert program is not None
        saves, saved = saved is not None, saved or Residuals({})
        bindings: dict[Port, Buffer] = {}
        for port in program.ports:
            if port.role == "source" and port.name in saved.loaded:
                bindings[port] = saved.loaded[port.name]
            elif port.role in ("source", "side") and port.name in values.by_name:
                bindings[port] = self._given(machine, port.name, values)
            elif port.role in ("grad_out", "grad_side"):
                bindings[port] = grads.by_name[port.name]
            elif port.role == "origin":
                bindings[port] = _NO_OFFSET
        held = saved if consume else saved.fork()
        results, _ = machine.run(program, bindings, held if saves else None)
        del held
        if consume:
            saved.handed.clear()  # not before: the program reads them to its end
        for port in list(results):
            handle = results.pop(port)
            if port.name in grads.sinks:
                batch = Interval(0, self.scope.shapes[port.name][0])
                machine.give(grads.sinks[port.name], batch, Interval(0, self.scope.extent(port.name, ROWS)), handle)
            elif port.name in grads.by_name:
                machine.add(grads.by_name[port.name], handle)
            else:
                # Autograd copies the gradient of an input that is laid out in another way, when all others are there.
                grads.by_name[port.name] = machine.channels_first(handle) if port.name in self._inputs_channels_first else handle
            del handle

    @cached_property
    def _inputs_channels_first(self) -> frozenset[str]:
        """The model's own inputs among the sources that are no images with channels last."""
        scope = self.scope
        inputs = [name for name in scope.sources if scope.graph[name].kind == "input" and len(scope.shapes[name]) in CHANNELS_LAST]
        return frozenset(inputs) - scope.in_layout


def _storage_roots(program: Program, slots: Iterable[int]) -> frozenset[int]:
    """The slots that own the memory of these."""
    roots = {out.number: out.root for i in program.instructions for out in i.outputs if out is not None}
    return frozenset(roots[number] for number in slots)
