"""The handle of a compiled model: plan, statistics and calls, under names that cannot clash with the model's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sft.api.call_arguments import bind_arguments, bind_shapes, describes_shapes
from sft.api.engine import Engine
from sft.api.inputs import hints_of, shapes_of
from sft.common.errors import InputError
from sft.common.transform_checks import refuse_tracing
from sft.planner.plan import Plan
from sft.torch_runtime.pass_statistics import Reading, Skipping
from sft.weights import StreamCounters

__all__ = ["HANDLE_NAMES", "CompiledHandle", "of"]

#: Public names of a handle that a compiled model has as well, where the model has no attribute of that name.
HANDLE_NAMES = ("band_rows", "last_reading", "last_skipping", "plan", "plan_for", "weight_counters")


class CompiledHandle:
    """Plan, statistics and calls of a compiled model, as :func:`of` returns it.

    A compiled model has the same names itself (``net.plan``), except for those that the model's class, or the model, defines.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The engine, which runs the calls; not part of the public interface."""
        return self._engine

    def __repr__(self) -> str:
        plan = self._engine.last_plan
        return f"<compiled {type(self._engine.model).__name__}, {'no plan yet' if plan is None else repr(plan)}>"

    def __call__(self, *inputs: Any, input_grad: Any = None, **keywords: Any) -> Any:
        """The model's output, without hooks of the root: ``forward`` of the compiled model.

        Inputs that are not tensors on the model's device are read strip by strip, and are never completely in its memory: host tensors of a
        model on another device, NumPy arrays and memmaps (uint8 pixels divided by 255), slides (`sft.sources.Raster`), and any other
        `sft.sources.Source`. They must stay unchanged until the backward pass has completed: it reads them again, and changes are not
        detected.

        Args:
            inputs: of shape ``[N, C, H, W]``; arrays also with other orders of axes, see `sft.sources.ArraySource`. Also containers of
                inputs (lists, dictionaries, named tuples, dataclasses that are registered with ``torch.export.register_dataclass``), and
                constants (numbers, texts, flags): the model is captured for each value of a constant.
            input_grad: a writable array (or `sft.sources.RowSink`) of the input's shape that the backward pass fills with the
                input's gradient, strip by strip; its former content is replaced. For several inputs a sequence, None where no gradient is
                requested. If the backward pass fails, its content is undefined. Default: `None`
            keywords: inputs by the names of the model's own ``forward``.

        Raises:
            InputError: an argument is wrong; no state was changed.
            UnsupportedError: the call is traced instead of run.
            SourceError: rows cannot be read, or an output cannot be written; no state was changed.
            BudgetError: no plan fits.
        """
        return self.run(inputs, keywords, input_grad)

    def run(self, inputs: Sequence[Any], keywords: Mapping[str, Any], input_grad: Any = None) -> Any:
        """The model's output for a tuple of arguments and a dictionary of keywords, which may have any names."""
        refuse_tracing((*inputs, *keywords.values()))
        arguments = bind_arguments(self._engine.model, inputs, keywords)
        return self._engine.run(arguments.inputs, input_grad, arguments.structure)

    @property
    def plan(self) -> Plan:
        """The plan of the last call, or of the shape given to ``compile``."""
        plan = self._engine.last_plan
        if plan is None:
            raise InputError("no plan yet: the input shape varies; call the module or plan_for(shape) first")
        return plan

    def plan_for(self, *inputs: Any, input_grad: Any = None, **keywords: Any) -> Plan:
        """The plan for these inputs, passed as in a call, or as shapes (of tensors on the device)."""
        if not describes_shapes(inputs, keywords):
            arguments = bind_arguments(self._engine.model, inputs, keywords)
            return self._engine.plan_for_inputs(arguments.inputs, input_grad, arguments.structure)
        is_single = len(inputs) == 1 and not isinstance(inputs[0], Mapping)
        input_shape, structure = bind_shapes(self._engine.model, keywords or (inputs[0] if is_single else inputs))
        requested = shapes_of(input_shape)
        shapes = [tuple(extent for extent in shape if extent is not None) for shape in requested]
        if shapes != list(requested):
            raise InputError(f"plan_for needs every extent, got {inputs!r}")
        return self._engine.plan_for_shapes(shapes, hints_of(input_shape), structure)

    @property
    def last_reading(self) -> Reading | None:
        """Statistics of the last call's streamed inputs: bytes, and time hidden by prefetching; None if all inputs were resident."""
        return self._engine.last_reading

    @property
    def last_skipping(self) -> Skipping | None:
        """Strips that the last call skipped; its backward pass adds its own. None without ``Options(skip_repeats=True)``."""
        return self._engine.last_skipping

    @property
    def weight_counters(self) -> StreamCounters | None:
        """Counters of all passes over streamed weights; None if they are not streamed yet."""
        streamed = self._engine.streamed_weights
        return None if streamed is None else streamed.counters

    def band_rows(self, extent: int) -> tuple[int, int]:
        """First and last (exclusive) row of this rank, for a value of ``extent`` rows.

        Raises:
            InputError: the model was not compiled for a mesh of processes, or no plan exists yet.
        """
        return self._engine.band_rows(extent)


def of(net: nn.Module) -> CompiledHandle:
    """The handle of a compiled model: its plan, statistics and calls, also where the model has attributes of these names.

    >>> import sft
    >>> net = sft.compile(nn.Conv2d(3, 4, 3), (1, 3, 32, 32), budget="1MiB")
    >>> sft.of(net).plan.budget_bytes
    1048576

    Args:
        net: a model that :func:`compile` returned; also inside of a wrapper (``DistributedDataParallel``, ``torch.compile``).

    Raises:
        InputError: the model is not compiled.
    """
    inner: Any = net
    while isinstance(inner, nn.Module) and not hasattr(type(inner), "_sft_engine"):
        inner = vars(inner)["_modules"].get("module") or vars(inner)["_modules"].get("_orig_mod")
    if inner is None or not isinstance(inner, nn.Module):
        raise InputError(f"{type(net).__name__} is not a compiled model; give what sft.compile returned")
    engine: Engine = inner._sft_engine  # type: ignore[assignment]
    return CompiledHandle(engine)
