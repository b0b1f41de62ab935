"""The class of compiled modules.

A compiled module is an instance of a subclass of the model's class that shares the model's ``__dict__``: parameters, buffers, submodules,
hooks and the training flag are the same objects under the same names in both. The engine is stored in a slot outside that dictionary, so
``state_dict`` and all other code that traverses a module never sees it.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from sft.api.engine import Engine
from sft.api.inputs import dtypes_of, is_streamable_input, shapes_of
from sft.common.errors import InputError
from sft.common.transform_checks import dynamo_disabled, positional_inputs, refuse_tracing, refuse_wrapping
from sft.planner.plan import Plan
from sft.torch_runtime.pass_statistics import Reading, Skipping
from sft.weights import StreamCounters

__all__ = ["CompiledModule", "wrap_module"]


class _OverridableMethod:
    """A method that tools may replace on an instance (``net.forward = wrapped``), stored outside the dictionary that the model shares."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, net: Any, owner: type | None = None) -> Any:
        if net is None:
            return self._method
        return net._sft_forward or types.MethodType(self._method, net)

    def __set__(self, net: Any, replacement: Callable[..., Any]) -> None:
        object.__setattr__(net, "_sft_forward", replacement)

    def __delete__(self, net: Any) -> None:
        object.__setattr__(net, "_sft_forward", None)


class CompiledModule:
    """The methods that a compiled module adds to its model's class."""

    __slots__ = ()
    _sft_engine: Engine
    _sft_forward: Callable[..., Any] | None

    @_OverridableMethod
    @dynamo_disabled
    def forward(self, *inputs: Any, input_grad: Any = None, **keywords: Any) -> Any:
        """The model's output.

        Inputs that are not tensors on the model's device are read strip by strip, and are never completely in its memory: host tensors of a
        model on another device, NumPy arrays and memmaps (uint8 pixels divided by 255), slides (`sft.sources.Raster`), and any other
        `sft.sources.Source`. They must stay unchanged until the backward pass has completed: it reads them again, and changes are not
        detected.

        Args:
            inputs: of shape ``[N, C, H, W]``; arrays also with other orders of axes, see `sft.sources.ArraySource`. By position, or by the
                names of the model's own ``forward``.
            input_grad: a writable array (or `sft.sources.RowSink`) of the input's shape that the backward pass fills with the
                input's gradient, strip by strip; its former content is replaced. For several inputs a sequence, None where no gradient is
                requested. If the backward pass fails, its content is undefined. Default: `None`

        Raises:
            InputError: an argument is wrong; no state was changed.
            UnsupportedError: the call is traced instead of run.
            SourceError: rows cannot be read, or an output cannot be written; no state was changed.
            BudgetError: no plan fits.
        """
        refuse_tracing(inputs)
        return self._sft_engine.run(positional_inputs(self._sft_engine.model, inputs, keywords), input_grad)

    @property
    def last_reading(self) -> Reading | None:
        """Statistics of the last call's streamed inputs: bytes, and time hidden by prefetching; None if all inputs were resident."""
        return self._sft_engine.last_reading

    @property
    def last_skipping(self) -> Skipping | None:
        """Strips that the last call skipped; its backward pass adds its own. None without ``Options(skip_repeats=True)``."""
        return self._sft_engine.last_skipping

    @property
    def weight_counters(self) -> StreamCounters | None:
        """Counters of all passes over streamed weights; None if they are not streamed yet."""
        streamed = self._sft_engine.streamed_weights
        return None if streamed is None else streamed.counters

    @property
    def plan(self) -> Plan:
        """The plan of the last call, or of the shape given to ``compile``."""
        plan = self._sft_engine.last_plan
        if plan is None:
            raise InputError("no plan yet: the input shape varies; call the module or plan_for(shape) first")
        return plan

    def band_rows(self, extent: int) -> tuple[int, int]:
        """First and last (exclusive) row of this rank, for a value of ``extent`` rows.

        Raises:
            InputError: the model was not compiled for a mesh of processes, or no plan exists yet.
        """
        return self._sft_engine.band_rows(extent)

    def plan_for(self, *inputs: Any, input_grad: Any = None) -> Plan:
        """The plan for these inputs, passed as in a call, or as shapes (of tensors on the device)."""
        if inputs and all(isinstance(value, torch.Tensor) or is_streamable_input(value) for value in inputs):
            return self._sft_engine.plan_for_inputs(inputs, input_grad)
        input_shape = inputs[0] if len(inputs) == 1 else inputs
        requested = shapes_of(input_shape)
        shapes = [tuple(extent for extent in shape if extent is not None) for shape in requested]
        if shapes != list(requested):
            raise InputError(f"plan_for needs every extent, got {inputs!r}")
        return self._sft_engine.plan_for_shapes(shapes, dtypes_of(input_shape))

    #: Hides the entry of ``nn.Module.compile`` of the plain model in the shared dictionary, which would run that model.
    _compiled_call_impl = property(lambda self: None)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refuse the in-place ``torch.compile`` of ``nn.Module``."""
        refuse_wrapping("its own method compile()", "use torch.compile(net), which compiles what is around it")

    def __prepare_scriptable__(self) -> Any:
        """Refuse ``torch.jit.script``."""
        refuse_wrapping("torch.jit.script", "script the original model")

    def _replicate_for_data_parallel(self) -> Any:
        """Refuse ``nn.DataParallel`` with more than one device."""
        refuse_wrapping("nn.DataParallel", "use nn.parallel.DistributedDataParallel")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        engine = self._sft_engine
        _refuse_copies(engine)
        return _rebuild(copy.deepcopy(engine.model, memo), _copy_settings(engine))

    def __reduce_ex__(self, protocol: Any) -> Any:
        engine = self._sft_engine
        _refuse_copies(engine)
        return _rebuild, (engine.model, _copy_settings(engine))


class _CompiledShardedModule(CompiledModule):
    """The additions to the class of a model that is sharded by ``fully_shard``."""

    __slots__ = ()

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        sharding = self._sft_engine.settings.sharding
        assert sharding is not None
        self._sft_engine.meet()  # FSDP would wait for its own timeout, and not name the missing rank
        with sharding.call_context():
            return super().__call__(*inputs, **keywords)  # type: ignore[misc]  # the model's class follows in the order of classes

    def _get_fsdp_state(self) -> Any:
        """State of FSDP, which looks it up by the object that it sharded."""
        model: Any = self._sft_engine.model
        return model._get_fsdp_state()


def _refuse_copies(engine: Engine) -> None:
    """Refuse to copy a model with weights in a file.

    Raises:
        InputError: the file belongs to one model.
    """
    file = engine.settings.options.weights_file
    if file is not None:
        raise InputError(f"the weights are streamed from {file.path}, which is this model's alone; take the state_dict instead of a copy")


def _copy_settings(engine: Engine) -> dict[str, Any]:
    """Engine arguments of a copy. An optimizer object belongs to the original's parameters, and is not passed on."""
    settings = engine.settings
    return {
        "budget_bytes": settings.budget_bytes,
        "options": settings.options,
        "optimizer": settings.optimizer if isinstance(settings.optimizer, int) else None,
        "plan": settings.plan,
        "destination": settings.destination,
        "mesh": settings.mesh,
        "backend": settings.backend,
        "limits": settings.limits,
    }


def _rebuild(model: nn.Module, settings: dict[str, Any]) -> Any:
    return wrap_module(model, Engine(model, **settings))


def wrap_module(model: nn.Module, engine: Engine) -> Any:
    """Make the compiled module of a model and its engine."""
    base: Any = type(model)
    cls: Any = _compiled_class(base, CompiledModule if engine.settings.sharding is None else _CompiledShardedModule)
    net = nn.Module.__new__(cls)  # the class's own __new__ may have side effects
    object.__setattr__(net, "__dict__", model.__dict__)
    object.__setattr__(net, "_sft_engine", engine)
    object.__setattr__(net, "_sft_forward", None)
    return net


@cache
def _compiled_class(cls: Any, addition: type[CompiledModule]) -> type[nn.Module]:
    def new(compiled: type[nn.Module], *args: Any, **keywords: Any) -> Any:
        """Make a plain module: methods that make modules of their own class (a slice of an ``nn.Sequential``) do not compile them."""
        return cls(*args, **keywords)

    return type(
        cls.__name__,
        (addition, cls),
        {"__slots__": ("_sft_engine", "_sft_forward"), "__module__": cls.__module__, "__doc__": cls.__doc__, "__new__": new},
    )
