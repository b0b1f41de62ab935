"""The class of compiled modules.

A compiled module is an instance of a subclass of the model's own class that shares the model's ``__dict__``: parameters, buffers,
submodules, hooks and the training flag are the same objects under the same names, whichever of the two is asked or changed. The
engine sits in a slot of its own, outside that dictionary, so ``state_dict`` and everything else that walks a module never sees it.
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
from sft.common.call_guards import dynamo_disabled, positional_inputs, refuse_tracing, refuse_wrapping
from sft.common.errors import InputError
from sft.planner.plan import Plan
from sft.torch_runtime.input_streaming import Reading
from sft.torch_runtime.skip_constant import Skipping
from sft.weights import StreamCounters

__all__ = ["CompiledModule", "wrap_module"]


class _OverridableMethod:
    """A method that tools replace on an instance (``net.forward = wrapped``): kept apart from the dictionary, which is the model's, too."""

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
    """What a compiled module adds to its model's class."""

    __slots__ = ()
    _sft_engine: Engine
    _sft_forward: Callable[..., Any] | None

    @_OverridableMethod
    @dynamo_disabled
    def forward(self, *inputs: Any, input_grad: Any = None, **keywords: Any) -> Any:
        """The model's output.

        Inputs that are no tensors on the model's device are read strip by strip and never whole in its memory: host tensors of a
        model that is elsewhere, NumPy arrays and memmaps (uint8 pixels divided by 255), slides (`sft.sources.Raster`), and whatever else
        is a `sft.sources.Source`. They must stay as they are until the backward pass is through: it reads them again, and nobody
        would notice a change.

        Args:
            inputs: of shape ``[N, C, H, W]``; arrays also with other orders of axes, see `sft.sources.ArraySource`. By position, or by the
                names that the model's own ``forward`` has for them.
            input_grad: a writable array (or `sft.sources.RowSink`) of the input's shape that the backward pass fills with the
                input's gradient, strip by strip: what it held is replaced. For several inputs a sequence, None where no gradient is
                wanted. If the backward pass fails, its content is undefined. Default: `None`

        Raises:
            InputError: an argument is wrong; nothing was changed.
            UnsupportedError: somebody traces the call instead of running it.
            SourceError: rows cannot be read, or an output cannot be written; nothing was changed.
            BudgetError: no plan fits.
        """
        refuse_tracing(inputs)
        return self._sft_engine.run(positional_inputs(self._sft_engine.model, inputs, keywords), input_grad)

    @property
    def last_reading(self) -> Reading | None:
        """What the last call read of inputs that are not resident, and how much of the time was hidden; None if they all were."""
        return self._sft_engine.last_reading

    @property
    def last_skipping(self) -> Skipping | None:
        """What strips the last call left out; its backward pass adds its own. None without ``Options(skip_repeats=True)``."""
        return self._sft_engine.last_skipping

    @property
    def weight_counters(self) -> StreamCounters | None:
        """What passes have read of streamed weights, summed up; None if they were not streamed yet."""
        taken = self._sft_engine.streamed_weights
        return None if taken is None else taken.counters

    @property
    def plan(self) -> Plan:
        """The plan of the last call, or of the shape given to ``compile``."""
        found = self._sft_engine.last_plan
        if found is None:
            raise InputError("no plan yet: the input shape varies; call the module or plan_for(shape) first")
        return found

    def band_rows(self, extent: int) -> tuple[int, int]:
        """Of a value of so many rows the first one that is this rank's, and the one behind its last.

        Raises:
            InputError: the model was not compiled for a mesh of processes, or there is no plan yet.
        """
        return self._sft_engine.band_rows(extent)

    def plan_for(self, *inputs: Any, input_grad: Any = None) -> Plan:
        """The plan for these inputs, given as a call would give them or as shapes (of tensors on the device)."""
        if inputs and all(isinstance(value, torch.Tensor) or is_streamable_input(value) for value in inputs):
            return self._sft_engine.plan_for_inputs(inputs, input_grad)
        given = inputs[0] if len(inputs) == 1 else inputs
        wanted = shapes_of(given)
        shapes = [tuple(extent for extent in shape if extent is not None) for shape in wanted]
        if shapes != list(wanted):
            raise InputError(f"plan_for needs every extent, got {inputs!r}")
        return self._sft_engine.plan_for_shapes(shapes, dtypes_of(given))

    #: What ``nn.Module.compile`` of the plain model leaves in the shared dictionary: it would run that model, and on its own.
    _compiled_call_impl = property(lambda self: None)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """What ``nn.Module`` has for ``torch.compile`` in place."""
        refuse_wrapping("its own method compile()", "use torch.compile(net), which compiles what is around it")

    def __prepare_scriptable__(self) -> Any:
        """What ``torch.jit.script`` asks for."""
        refuse_wrapping("torch.jit.script", "script the original model")

    def _replicate_for_data_parallel(self) -> Any:
        """What ``nn.DataParallel`` asks for, with more than one device."""
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
    """What a compiled module adds to the class of a model that is sharded by ``fully_shard``."""

    __slots__ = ()

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        sharding = self._sft_engine.sharding
        assert sharding is not None
        self._sft_engine.meet()  # FSDP would wait for its own timeout, and not say for whom
        with sharding.calling():
            return super().__call__(*inputs, **keywords)  # type: ignore[misc]  # the model's class follows in the order of classes

    def _get_fsdp_state(self) -> Any:
        """FSDP finds the state of a module by the object that it was given."""
        model: Any = self._sft_engine.model
        return model._get_fsdp_state()


def _refuse_copies(engine: Engine) -> None:
    """
    Raises:
        InputError: the weights have a file, which is one model's.
    """
    file = engine.preparation.options.weights_file
    if file is not None:
        raise InputError(f"the weights are streamed from {file.path}, which is this model's alone; take the state_dict instead of a copy")


def _copy_settings(engine: Engine) -> dict[str, Any]:
    """What a copy is compiled with; an optimizer is one of the original's parameters, and the copy's is not known."""
    asked = engine.preparation
    return {
        "budget_bytes": asked.budget_bytes,
        "options": asked.options,
        "optimizer": asked.optimizer if isinstance(asked.optimizer, int) else None,
        "plan": asked.given_plan,
        "destination": asked.destination,
        "mesh": asked.mesh,
        "backend": asked.backend,
    }


def _rebuild(model: nn.Module, settings: dict[str, Any]) -> Any:
    return wrap_module(model, Engine(model, **settings))


def wrap_module(model: nn.Module, engine: Engine) -> Any:
    base: Any = type(model)
    cls: Any = _compiled_class(base, CompiledModule if engine.sharding is None else _CompiledShardedModule)
    net = nn.Module.__new__(cls)  # a class's own __new__ would make, or initialize, something else
    object.__setattr__(net, "__dict__", model.__dict__)
    object.__setattr__(net, "_sft_engine", engine)
    object.__setattr__(net, "_sft_forward", None)
    return net


@cache
def _compiled_class(cls: Any, addition: type[CompiledModule]) -> type[nn.Module]:
    def new(compiled: type[nn.Module], *args: Any, **keywords: Any) -> Any:
        """Modules that make others of their own class (a slice of an ``nn.Sequential``) make plain ones: nobody has compiled these."""
        return cls(*args, **keywords)

    return type(
        cls.__name__,
        (addition, cls),
        {"__slots__": ("_sft_engine", "_sft_forward"), "__module__": cls.__module__, "__doc__": cls.__doc__, "__new__": new},
    )
