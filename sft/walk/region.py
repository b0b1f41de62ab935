"""Running all segments of a model in order, and back.

Cuts (the values between segments) are whole buffers. A cut lives from the segment that makes it to the backward pass of the first
segment that reads it, since that one recomputes from it; its gradient lives from the backward pass of its last reader to that of its
maker. Nothing outside is touched before the end: outputs, gradients of inputs and of parameters are buffers of the region's own.

An output on the host that leaves its segment strip by strip (``to_host``) has no buffer here. Any other output on the host (small, made on
whole tensors, or read by later segments) is a cut that is copied when its segment is done; its gradient is loaded before the backward
pass of the last segment that has to do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

from sft.analysis.graph import Graph
from sft.lower.context import Scope
from sft.walk.machine import Handle, Machine
from sft.walk.values import Gradients, Values

__all__ = ["Region", "Tape"]


class Segment(Protocol):
    """What a region asks of its segments."""

    @property
    def accumulates(self) -> bool: ...
    @property
    def scope(self) -> Scope: ...
    @property
    def sides(self) -> tuple[str, ...]: ...
    @property
    def to_host(self) -> frozenset[str]: ...
    def forward(self, machine: Machine, values: Values, *, keep: bool) -> Any: ...
    def backward(self, machine: Machine, values: Values, saved: Any, grads: Gradients, *, consume: bool = True) -> None: ...


@dataclass(slots=True)
class Tape:
    """What a forward pass leaves for the backward pass: cuts, and each segment's own (row stores, or saved tensors)."""

    values: Values = field(default_factory=Values)
    kept: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class Region:
    """A model cut into segments.

    Attributes:
        graph: the model.
        segments: in order.
        reads: for each segment the values it takes from outside: sources and side tensors.
        makes: for each segment the values that others, or the caller, need.
        shapes: shape of every value for this input.
        dtypes: element type of every value (``torch.dtype``).
        grad_dtypes: element type in which its gradient is summed up; a parameter's is rounded to the parameter's type at the end.
        requires_grad: values that need a gradient.
        outputs: the model's outputs, each once.
        contiguous: outputs that are laid out channels first.
        from_source: inputs that are read while walks run; their handles are sources, their gradients go to sinks.
        host_outputs: outputs that are on the host, with their gradients.
    """

    graph: Graph
    segments: Sequence[Any]
    reads: Sequence[tuple[str, ...]]
    makes: Sequence[tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, Any]
    grad_dtypes: Mapping[str, Any]
    requires_grad: frozenset[str]
    outputs: tuple[str, ...]
    contiguous: frozenset[str]
    from_source: frozenset[str] = frozenset()
    host_outputs: frozenset[str] = frozenset()

    def forward(
        self, machine: Machine, given: Mapping[str, Handle], *, keep: bool, hosts: Mapping[str, Handle] | None = None
    ) -> tuple[dict[str, Handle], Tape]:
        """Compute the outputs from inputs, parameters and buffers.

        Args:
            machine: what runs the programs.
            given: handles of inputs, parameters and buffers by value name.
            keep: whether a backward pass follows.
            hosts: what takes the outputs that are on the host; it is returned in their place.
        """
        tape, hosts = Tape(Values(dict(given))), hosts or {}
        outputs: dict[str, Handle] = {name: given[name] for name in self.outputs if name in given}
        outputs.update({name: hosts[name] for name in self.host_outputs})
        for index, segment in enumerate(self.segments):
            for name in self.makes[index]:
                if name in segment.to_host:
                    tape.values.by_name[name] = hosts[name]
                    continue
                handle = machine.allocate(self.shapes[name], self.dtypes[name], zero=False, contiguous=name in self.contiguous)
                tape.values.by_name[name] = handle
                if name in self.outputs and name not in self.host_outputs:
                    outputs[name] = handle
                del handle
            tape.kept.append(segment.forward(machine, tape.values, keep=keep and self._differentiated[index]))
            for name in self.makes[index]:
                if name in self.host_outputs - segment.to_host:
                    machine.put(hosts[name], tape.values.by_name[name])
            if not keep:
                tape.kept.clear()
            self._drop_values(tape.values, partial(self._read_after, index=index, keep=keep))
        return outputs, tape

    @cached_property
    def _differentiated(self) -> tuple[bool, ...]:
        """Which segments have a backward pass; one whose values are all frozen keeps nothing for it."""
        needed = self.requires_grad
        return tuple(
            not needed.isdisjoint(makes) and not needed.isdisjoint(segment.scope.names)
            for makes, segment in zip(self.makes, self.segments, strict=True)
        )

    @cached_property
    def _last_reader(self) -> dict[str, int]:
        """For each value the last segment whose forward pass reads it."""
        return {name: index for index, reads in enumerate(self.reads) for name in reads}

    @cached_property
    def _first_reader_back(self) -> dict[str, int]:
        """For each value the first segment whose backward pass reads it."""
        indices = range(len(self.reads) - 1, -1, -1)
        return {name: index for index in indices if self._differentiated[index] for name in self.reads[index]}

    def _read_before(self, name: str, index: int) -> bool:
        """Whether the backward pass of a segment before ``index`` reads a value."""
        return self._first_reader_back.get(name, index) < index

    def _read_after(self, name: str, index: int, keep: bool) -> bool:
        """Whether a value is still read once segment ``index`` has run forward."""
        return self._last_reader.get(name, -1) > index or (keep and name in self._first_reader_back)

    def _drop_values(self, values: Values, wanted: Callable[[str], bool]) -> None:
        for name in [n for n in values.by_name if not wanted(n)]:
            del values.by_name[name]

    def backward(
        self,
        machine: Machine,
        tape: Tape,
        output_grads: Mapping[str, Handle],
        *,
        sinks: Mapping[str, Handle] | None = None,
        consume: bool = True,
    ) -> dict[str, Handle]:
        """Gradients of the inputs and parameters that need one, given those of the outputs that need one (on the host where they are).

        Those of inputs that are not resident go to their ``sinks`` instead, strip by strip.
        """
        values = tape.values if consume else Values(dict(tape.values.by_name))
        kept = tape.kept if consume else list(tape.kept)
        grads, borrowed = Gradients(dict(output_grads), dict(sinks or {})), set(output_grads) - self.host_outputs
        waiting = {name for name in self.host_outputs if name in output_grads}
        leaves = {node.name for node in self.graph.nodes if node.kind != "operator"}
        for index in range(len(self.segments) - 1, -1, -1):
            segment, saved = self.segments[index], kept.pop()
            makes = [name for name in self.makes[index] if name in self.requires_grad]
            if self._differentiated[index]:
                for name in makes:
                    if name in waiting - segment.to_host:
                        self._load_gradient(machine, name, values, grads, waiting)
                    elif name not in grads.by_name:
                        grads.by_name[name] = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
                for name in self.reads[index]:
                    if name in waiting and name not in self.makes[index]:
                        self._load_gradient(machine, name, values, grads, waiting)
                self._make_accumulators(machine, index, values, grads, borrowed)
                segment.backward(machine, values, saved, grads, consume=consume)
            del saved
            for name in self.makes[index]:
                grads.by_name.pop(name, None)
            self._drop_values(values, partial(self._read_before, index=index))
        found: dict[str, Handle] = {}
        for name in [name for name in grads.by_name if name in leaves]:
            handle = grads.by_name.pop(name)
            if self.grad_dtypes[name] != self.dtypes[name]:
                handle = machine.cast(handle, self.shapes[name], self.dtypes[name])
            found[name] = handle
            del handle
        return found

    def _load_gradient(self, machine: Machine, name: str, values: Values, grads: Gradients, waiting: set[str]) -> None:
        """Bring the gradient of an output from the host: all of it, to be added to."""
        own = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
        machine.fetch(grads.by_name[name], own)
        grads.by_name[name] = own
        waiting.discard(name)

    def _make_accumulators(self, machine: Machine, index: int, values: Values, grads: Gradients, borrowed: set[str]) -> None:
        """Zeros to add to: for side tensors always, for sources where strips add to them.

        The gradient of an output that is read inside too is the caller's: it is copied before anything is added.
        """
        segment = self.segments[index]
        for name in self.reads[index]:
            if name in borrowed and name not in self.makes[index] and name in self.requires_grad:
                own = machine.zeros_like(values.by_name.get(name), self.shapes[name], self.grad_dtypes[name])
                machine.add(own, grads.by_name[name])
                grads.by_name[name] = own
                borrowed.discard(name)
                del own
            if name not in self.requires_grad or name in grads.by_name or name in self.from_source:
                continue
            if name in segment.sides or segment.accumulates:
                handle = values.by_name[name]
                grads.by_name[name] = machine.zeros_like(handle, self.shapes[name], self.grad_dtypes[name])
                del handle
