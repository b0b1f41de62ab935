"""A segment that runs on whole tensors, as plain PyTorch runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sft.analysis.axes import ROWS
from sft.analysis.interval import Interval
from sft.analysis.schedule import Step
from sft.lower.context import Scope
from sft.lower.program import Port, Program
from sft.lower.step import lower_whole
from sft.walk.machine import Handle, Machine, Saved
from sft.walk.values import Gradients, Values

__all__ = ["WholeSegment"]

_NO_OFFSET = (0, 0, 0)


@dataclass(kw_only=True)
class WholeSegment:
    """A segment that runs like plain PyTorch: everything that its backward needs is kept.

    Inputs that are not resident are read whole for its forward pass, and again for its backward pass.
    """

    #: gradients of sources come out as buffers of their own
    accumulates: ClassVar[bool] = False
    #: its outputs are whole on the device, wherever they go then
    to_host: ClassVar[frozenset[str]] = frozenset()

    scope: Scope
    step: Step
    sides: tuple[str, ...]
    from_source: frozenset[str] = frozenset()
    _programs: dict[bool, tuple[Program, Program | None]] = field(default_factory=dict, repr=False)

    def programs(self, training: bool) -> tuple[Program, Program | None]:
        """The forward and, when training, the backward program."""
        if training not in self._programs:
            self._programs[training] = lower_whole(self.scope, self.step, training=training)
        return self._programs[training]

    def forward(self, machine: Machine, values: Values, *, keep: bool) -> Saved:
        """Run it; with ``keep`` what the backward needs is returned."""
        program, _ = self.programs(keep)
        bindings = {port: self._given(machine, port.name, values) for port in program.ports if port.role in ("source", "side", "out")}
        bindings |= {port: _NO_OFFSET for port in program.ports if port.role == "origin"}
        _, saved = machine.run(program, bindings)
        roots = {out.number: out.root for i in program.instructions for out in i.outputs if out is not None}
        viewed = {roots[number] for number in program.saved}
        for port, slot in program.ports.items():
            if port.name in self.from_source and port.role == "source" and slot.root in viewed:
                saved.loaded[port.name] = bindings[port]
        return saved

    def _given(self, machine: Machine, name: str, values: Values) -> Handle:
        """A value from outside; an input that is not resident is read as a whole."""
        handle = values.by_name[name]
        return machine.load(handle, self.scope.shapes[name], self.scope.dtype_of(name)) if name in self.from_source else handle

    def backward(self, machine: Machine, values: Values, saved: Saved, grads: Gradients, *, consume: bool = True) -> None:
        """Differentiate it; gradients of sources come out as new buffers, or are added to those that exist."""
        _, program = self.programs(True)
        assert program is not None
        bindings: dict[Port, Handle] = {}
        for port in program.ports:
            if port.role == "source" and port.name in saved.loaded:
                bindings[port] = saved.loaded[port.name]
            elif port.role in ("source", "side") and port.name in values.by_name:
                bindings[port] = self._given(machine, port.name, values)
            elif port.role in ("grad_out", "grad_side"):
                bindings[port] = grads.by_name[port.name]
            elif port.role == "origin":
                bindings[port] = _NO_OFFSET
        held = saved if consume else Saved(saved.values if not isinstance(saved.values, dict) else dict(saved.values))
        results, _ = machine.run(program, bindings, held)
        del held
        for port in list(results):
            handle = results.pop(port)
            if port.name in grads.sinks:
                batch = Interval(0, self.scope.shapes[port.name][0])
                machine.give(grads.sinks[port.name], batch, Interval(0, self.scope.extent(port.name, ROWS)), handle)
            elif port.name in grads.by_name:
                machine.add(grads.by_name[port.name], handle)
            else:
                grads.by_name[port.name] = handle
            del handle
