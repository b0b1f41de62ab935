"""Abstract machine on which a compiled region runs.

The interpreter of a segment schedule (``sft.runtime.region``) moves *buffers* only: it asks a machine to allocate them, to take views of
rows, to run programs on them and to copy them between device and host. Two machines exist:

====================== ======================== ==================================================================
machine                buffer                   use
====================== ======================== ==================================================================
``TorchMachine``       ``torch.Tensor``         executes a step (``sft.torch_runtime.machine``)
``SimulatedMachine``   ``SimulatedBuffer``      projects its peak (``sft.runtime.simulated_machine``)
====================== ======================== ==================================================================

A simulated buffer is a number of bytes, which it returns when its last reference is dropped, as a tensor returns its storage. The same code
therefore executes a plan and projects its peak, and neither can drift from the other.

:class:`Machine` is composed of four protocols. Code that uses one of them takes only that one:

==================== =================================================
:class:`BufferOps`   buffers on the device: allocate, view, add
:class:`ProgramOps`  programs, and the residuals that they save
:class:`HostOps`     inputs, outputs, cuts and offloaded values on the host
:class:`WeightOps`   parameters that are streamed
==================== =================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sft.analysis.ir.axes import Axes
from sft.common.interval import Interval
from sft.lower.program import Port, Program
from sft.runtime.moves import ScheduleOp
from sft.runtime.offload import OffloadOps
from sft.runtime.strip_policy import StripOps
from sft.runtime.weight_prefetch import WeightOps

__all__ = [
    "DEFAULT_AXES",
    "Buffer",
    "BufferOps",
    "Gradients",
    "HostOps",
    "Machine",
    "OpaqueTensors",
    "ProgramOps",
    "Residuals",
    "StripLoader",
    "ValueBindings",
]

#: A tensor, or a simulated buffer.
Buffer = Any
DEFAULT_AXES = Axes()


class BufferOps(Protocol):
    """Buffers on the device."""

    def allocate(self, shape: tuple[int, ...], dtype: Any, *, zero: bool, contiguous: bool = False) -> Buffer:
        """Allocate a buffer; images are channels last unless ``contiguous``."""

    def zeros_like(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """Allocate zeros in the memory layout of ``buffer`` (``None``: the default layout) and in another element type."""

    def view(
        self, buffer: Buffer, batch: Interval | None, rows: Interval | None, columns: Interval | None = None, *, axes: Axes = DEFAULT_AXES
    ) -> Buffer:
        """View of some batch elements, and of rows and columns of an image with these axes; ``None`` selects all."""

    def fill(self, buffer: Buffer, value: float) -> None:
        """Set every element."""

    def add(self, target: Buffer, source: Buffer) -> None:
        """Add ``source`` to ``target`` in place."""

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy ``source`` into ``target``."""

    def cast(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """Copy of the buffer in another element type."""

    def to_channels_first(self, buffer: Buffer) -> Buffer:
        """The buffer in channels-first layout: itself, or a copy."""


class ProgramOps(Protocol):
    """Programs, and the residuals that a forward program saves for its backward program."""

    @property
    def has_data(self) -> bool:
        """False if buffers are byte counts, so that programs read none of their bindings."""

    def start_op(self, op: ScheduleOp) -> None:
        """Mark the begin of a schedule op; the op before it is complete."""

    def run(
        self, program: Program, bindings: Mapping[Port, Buffer], saved: Residuals | None = None
    ) -> tuple[dict[Port, Buffer], Residuals]:
        """Run a program on its bound ports.

        Args:
            program: the program.
            bindings: a buffer for each port.
            saved: residuals of the forward program, for a backward program; they are freed while it runs.

        Returns:
            The results by port, and the residuals that the program saves.
        """

    def residual_buffers(self, saved: Residuals, slots: Sequence[int]) -> Sequence[Buffer]:
        """The buffers of these slots: every slot that the program allocated for its backward program alone."""


class StripLoader(Protocol):
    """Iterator over the strips of an input that is read from the host while a sweep runs."""

    def take(self, rows: Interval) -> Buffer:
        """The next strip on the device; its memory returns to the loader when the last view of it is dropped."""

    def close(self) -> None:
        """Stop reading and free the loader's buffers, also before the last strip."""


class HostOps(OffloadOps, Protocol):
    """Transfers between the device and inputs, outputs, cuts and offloaded values on the host."""

    def open_input(self, source: Buffer, batch: Interval, order: Sequence[Interval], row_bytes: int, dtype: Any) -> StripLoader:
        """Open a loader of strips of an input.

        Args:
            source: the input's source, a cut on the host, or the gradient of a direct cut.
            batch: batch elements to read.
            order: rows of each strip, in the order in which they are taken.
            row_bytes: bytes of one row of these batch elements.
            dtype: element type.
        """

    def read_input(self, source: Buffer, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """Read a full input into a buffer, channels last."""

    def add_to_sink(self, sink: Buffer, batch: Interval, rows: Interval, gradient: Buffer) -> None:
        """Add the gradient of rows of an input, or of a cut on the host, to its sink."""

    def write_output(
        self,
        host: Buffer,
        source: Buffer,
        batch: Interval | None = None,
        rows: Interval | None = None,
        columns: Interval | None = None,
        *,
        axes: Axes = DEFAULT_AXES,
    ) -> None:
        """Copy a buffer into an output on the host, or into the region of it that :meth:`BufferOps.view` selects.

        A strip of a direct cut leaves until :meth:`finish_strips`; so does the gradient of one that is added to its sink.
        """

    def finish_strips(self, host: Buffer) -> None:
        """Wait for the copy of the strip that leaves to a direct cut, or to its gradient, and free the strip."""

    def known_rows(self, host: Buffer) -> int:
        """Number of leading rows of an output on the host that its consumer has already, so that they may be left out."""

    def read_output_grad(
        self,
        host: Buffer,
        target: Buffer,
        batch: Interval | None = None,
        rows: Interval | None = None,
        columns: Interval | None = None,
        *,
        axes: Axes = DEFAULT_AXES,
    ) -> None:
        """Fill a buffer with the gradient of an output on the host, or with the region of it that :meth:`BufferOps.view` selects."""

    def allocate_host_cut(self, shape: tuple[int, ...], dtype: Any, *, direct: bool) -> Buffer:
        """Allocate a cut on the host: a target of :meth:`write_output` and a source of :meth:`open_input`.

        Args:
            shape: its shape.
            dtype: its element type.
            direct: True for one in the slab of the step, of which only tiled segments read and write strips in full width.
        """

    def allocate_host_grad(self, shape: tuple[int, ...], dtype: Any, *, direct: bool) -> Buffer:
        """Allocate zeros on the host for the gradient of a cut: a sink of :meth:`add_to_sink`, read by :meth:`read_output_grad`."""


class Machine(BufferOps, ProgramOps, HostOps, WeightOps, Protocol):
    """All operations that a region needs."""

    @property
    def strip_ops(self) -> StripOps:
        """Operations on behalf of strip policies."""


@runtime_checkable
class OpaqueTensors(Protocol):
    """Several tensors in one slot; their structure is private to the functions that write and read it."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        """One tensor for each storage that the slot alone keeps alive."""

    def fork(self) -> Any:
        """Copy that can be consumed in place of this one; the tensors are shared."""


@dataclass(slots=True)
class Residuals:
    """Tensors that the forward program of an untiled segment saves for its backward program.

    Attributes:
        values: tensors by slot number, or one simulated buffer.
        inputs: images read from the host for the forward program that some saved tensors are views of.
        outputs: outputs of the segment that are among the saved tensors, or own their memory.
        is_retained: True if the residuals outlive the backward program that reads them (``retain_graph=True``).
    """

    values: Any
    inputs: dict[str, Buffer] = field(default_factory=dict)
    outputs: list[Buffer] = field(default_factory=list)
    is_retained: bool = False

    def fork(self) -> Residuals:
        """The same values for a backward program that is not the last one to read them."""
        if not isinstance(self.values, dict):
            return Residuals(self.values, is_retained=True)
        values = {slot: value.fork() if isinstance(value, OpaqueTensors) else value for slot, value in self.values.items()}
        return Residuals(values, is_retained=True)


@dataclass(slots=True)
class ValueBindings:
    """Environment of a region: buffers by value name.

    Attributes:
        by_name: cuts, parameters, buffers and global values on the device; for inputs that are not resident their sources; for outputs
            on the host their destinations.
        loaders: strip loaders of the current sweep, by input.
        loads_skipped: True if the loaders also read strips that the sweep leaves out.
    """

    by_name: dict[str, Buffer] = field(default_factory=dict)
    loaders: dict[str, StripLoader] = field(default_factory=dict)
    loads_skipped: bool = False


@dataclass(slots=True)
class Gradients:
    """Gradients of a region.

    Attributes:
        by_name: gradients by value name; on the host for outputs and cuts on the host.
        sinks: destinations of the gradients of inputs that are not resident, and of cuts on the host.
        loaders: strip loaders of the gradients of direct outputs in the current sweep, by output.
    """

    by_name: dict[str, Buffer] = field(default_factory=dict)
    sinks: dict[str, Buffer] = field(default_factory=dict)
    loaders: dict[str, StripLoader] = field(default_factory=dict)
