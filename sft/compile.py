"""``sft.compile``, ``sft.plan`` and ``sft.check``.

A compiled module is an instance of a subclass of the model's own class that shares the model's ``__dict__``: parameters, buffers,
submodules, hooks and the training flag are the same objects under the same names, whichever of the two is asked or changed. The
engine sits in a slot of its own, outside that dictionary, so ``state_dict`` and everything else that walks a module never sees it.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sft.bands.mesh import resolve_mesh
from sft.deep.parameters import StreamedParameters
from sft.engine import Engine
from sft.errors import InputError, UnsupportedError
from sft.execute.reading import Reading
from sft.execute.skipping import Skipping
from sft.inputs import check_extents, is_readable
from sft.options import Options
from sft.outputs import Output, resolve_output
from sft.placing import refuse_streaming, usable
from sft.plan.types import Plan
from sft.surroundings import not_compiled, positional_inputs, refuse_tracing, refuse_wrapping
from sft.units import parse_bytes
from sft.weights import Counters

__all__ = ["CheckReport", "check", "compile", "plan"]

InputShape = Any

#: The memory of a small card.
DEFAULT_BUDGET = "11GiB"


def compile(
    model: nn.Module,
    input_shape: InputShape,
    *,
    budget: int | str | None = None,
    device: torch.device | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    output: Output = "device",
    plan: Plan | None = None,
    mesh: Any = None,
    options: Options | None = None,
) -> Any:
    """A module that computes what ``model`` computes, with the same gradients, inside ``budget`` bytes.

    Args:
        model: any ``nn.Module`` of supported operators. It is shared, not copied. Its weights may be sharded: by ``fully_shard`` (FSDP2),
            applied before, to the model itself and any of its parts. Outputs, gradients and updates are those of whole weights.
        input_shape: shape of the input, ``(N, C, H, W)``, or a sequence of shapes for several inputs. Inputs of three to five dimensions
            are images; a model without any (vectors ``(N, F)``, token ids ``(N, L)``) runs in stages on whole tensors. ``None`` stands
            for an extent that varies; then planning waits for the first call. A new size re-plans on its first use. A tensor (on any
            device, such as ``torch.empty(1, H, W, dtype=torch.long, device="meta")``) stands for its shape, for the type of its numbers
            where these are whole, and for inputs that want a gradient where it requires one. Or the input itself where it will be read in
            strips (an array, a slide, a source): the plan then is one for inputs that are never resident.
        budget: what the card may hold, in bytes or as ``"11GiB"``: parameters, their gradients, buffers, the optimizer's state
            when ``optimizer`` is given, inputs, outputs, and all that the step makes. Default: `None` (11 GiB, or the budget that a given
            ``plan`` was made for).
        device: where to run; the model is moved there. The model's own device by default.
        optimizer: counts its state into the budget.
        output: where outputs go, those of every call. ``"device"``; ``"band"`` (see ``mesh``); ``"host"`` for CPU tensors, which may be
            larger than the device: they leave it strip by strip, losses on them run on the host, and their gradients enter strip by
            strip. Or the path of a ``.npy`` file (a list, one for each output, where there are several): the tensor is then the mapped
            file, which appears when a call has succeeded and is replaced by the next call. None of their bytes are in ``budget``.
        plan: a plan made before, by :func:`plan` or from JSON, used for inputs of its shape that, like the outputs, are where it says. One
            that needs more than ``budget`` here (it may have been made on another machine) is refused.
        mesh: a ``torch.distributed`` ``DeviceMesh`` with dimensions ``"replica"`` and ``"band"`` (one may be left out): all its ranks
            compile and call the model together. Ranks along ``"band"`` share one image, of which each runs a band of rows; all of them
            give the same input (a tensor of the whole image, or a source, of which each reads its own rows and a few of its neighbours').
            Outputs are whole and equal on all of them, so that each computes the same loss; with ``output="band"`` outputs that are
            images stay where they are made, ``net.band_rows(output)`` says which rows those are, and the loss that is minimised is the sum
            over bands of what each computes of its own rows. Ranks along ``"replica"`` have images of their own. After ``backward`` the
            parameters' gradients are equal on all ranks: sums over bands, means over replicas. Or a pair ``(replicas, bands)``, to plan
            without any processes. ``budget`` is each rank's.
        options: wishes about the plan.

    Raises:
        UnsupportedError: operators without an exact rule, each with its module path and a remedy.
        BudgetError: no plan fits.
        InputError: an argument is wrong.
    """
    destination = resolve_output(output)
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, _Compiled):
        raise InputError("the model is compiled already; compile the original")
    _check_model(model)
    if options is not None and not isinstance(options, Options):
        raise InputError(f"options must be an sft.Options, got {type(options).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; leave it out where there is none")
    resolved = resolve_mesh(mesh, (options or Options()).mesh_timeout)
    if destination.in_bands and resolved is None:
        raise InputError("output='band' is for several ranks: give a mesh, or output='device'")
    if plan is not None and not isinstance(plan, Plan):
        raise InputError(f"plan must be an sft.Plan, got {type(plan).__name__}; read JSON with sft.Plan.from_json")
    if plan is not None and (resolved is not None or plan.mesh is not None):
        raise InputError("plan: plans that are handed in are for one device; leave plan out with mesh, and make another without")
    examples = _examples(input_shape)
    shapes = () if examples else _shapes(input_shape)
    if budget is None:
        budget = DEFAULT_BUDGET if plan is None else plan.budget_bytes
    budget_bytes = parse_bytes(budget)
    if (options or Options()).streams_weights:
        refuse_streaming(resolved, None)
    if device is not None:
        _place(model, usable(device), options or Options())
    engine = Engine(
        model,
        budget_bytes=budget_bytes,
        options=options or Options(),
        optimizer=optimizer,
        plan=plan,
        destination=destination,
        mesh=resolved,
    )
    net = _wrap(model, engine)
    if examples:
        engine.last_plan = engine.plan_for_inputs(examples)
    elif all(extent is not None for shape in shapes for extent in shape):
        known = [tuple(extent for extent in shape if extent is not None) for shape in shapes]
        engine.last_plan = engine.plan_for_shapes(known, _dtypes(input_shape), _input_grads(input_shape))
    return net


def plan(
    model: nn.Module,
    input_shape: InputShape,
    *,
    budget: int | str = DEFAULT_BUDGET,
    options: Options | None = None,
    **compile_arguments: Any,
) -> Plan:
    """The plan that :func:`compile` would use; runs nothing. The model may be on the meta device.

    Raises:
        UnsupportedError, BudgetError, InputError: as :func:`compile`.
    """
    net = compile(model, input_shape, budget=budget, options=options, **compile_arguments)
    if net._sft_engine.last_plan is None:
        raise InputError(f"a plan needs every extent, got input_shape {input_shape!r}")
    found: Plan = net._sft_engine.last_plan
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What of a model runs in strips.

    Attributes:
        ok: whether the model compiles.
        problems: why not: one line an operator, with module path and remedy.
        num_streamed: operators that run in strips.
        num_whole: operators that run on whole tensors.
        num_phases: runs between barriers (global values).
        whole_reasons: why operators that read an image run on whole tensors: one line each, with module path and remedy.
    """

    ok: bool
    problems: tuple[str, ...] = ()
    num_streamed: int = 0
    num_whole: int = 0
    num_phases: int = 0
    whole_reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.ok:
            return "cannot be compiled exactly:\n" + "\n".join(f"  - {problem}" for problem in self.problems)
        lines = [f"exact: {self.num_streamed} operators in strips, {self.num_whole} whole, {self.num_phases} phase(s) between barriers"]
        if self.whole_reasons:
            lines += ["on whole tensors, where they fit:", *(f"  - {reason}" for reason in self.whole_reasons)]
        return "\n".join(lines)


def check(model: nn.Module, input_shape: InputShape) -> CheckReport:
    """What of ``model`` can run in strips, what cannot, and what to do about it. Never raises."""
    try:
        _check_model(model)
        engine = Engine(model, budget_bytes=2**62, options=Options(), optimizer=None, plan=None)
        shapes = [tuple(256 if extent is None else extent for extent in shape) for shape in _shapes(input_shape)]
        engine.plan_for_shapes(shapes, _dtypes(input_shape))
        phases = engine.phases()
    except UnsupportedError as error:
        return CheckReport(ok=False, problems=error.problems)
    except Exception as error:
        return CheckReport(ok=False, problems=(f"{type(error).__name__}: {error}",))
    streamed = sum(len(phase.streamed) for phase in phases.phases)
    whole = sum(len(phase.tail) for phase in phases.phases)
    return CheckReport(
        ok=True,
        num_streamed=streamed,
        num_whole=whole,
        num_phases=len(phases.phases) - bool(phases.prologue),
        whole_reasons=tuple(dict.fromkeys(phases.whole_reasons.values())),
    )


def _check_model(model: nn.Module) -> None:
    """Refuse modules that cannot be looked into."""
    if type(model).__call__ is not nn.Module.__call__ and not isinstance(model, (torch.fx.GraphModule, torch.jit.ScriptModule)):
        raise InputError(
            f"(the model itself): {type(model).__name__} has a `__call__` of its own, which would run around and inside of what is "
            "compiled; move what it does into `forward`, or compile nn.Sequential(model)"
        )
    for path, module in model.named_modules():
        where = f"{path or '(the model itself)'}: {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"{where}: a scripted or traced module cannot be captured; give the module that it was made of")
        if any(is_lazy(value) for value in (*module._parameters.values(), *module._buffers.values())):
            raise InputError(f"{where}: its parameters are not initialised yet; call the model once before it is compiled")


def _place(model: nn.Module, device: torch.device, options: Options) -> None:
    """Move a model to a device: of one whose weights are streamed only what is resident."""
    if not options.streams_weights:
        model.to(device)
        return
    taken = StreamedParameters.of(model, device, options.weights_file)
    own = {id(param) for param in taken.params.values()}
    with torch.no_grad():
        for module in model.modules():
            for param in module._parameters.values():
                if param is not None and id(param) not in own:
                    param.data = param.to(device)
            module._buffers.update((name, None if buffer is None else buffer.to(device)) for name, buffer in module._buffers.items())


def _examples(inputs: Any) -> tuple[Any, ...]:
    """The inputs themselves, where one of them is to be read in strips; empty where they are shapes."""
    if is_readable(inputs):
        return (inputs,)
    is_several = isinstance(inputs, (list, tuple)) and any(is_readable(value) for value in inputs)
    return tuple(inputs) if is_several else ()


def _items(input_shape: InputShape) -> list[Any]:
    """What stands for each input: a shape or a tensor."""
    if isinstance(input_shape, torch.Tensor):
        return [input_shape]
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str) or not input_shape:
        raise InputError(f"input_shape {input_shape!r}: give (N, C, H, W), or a sequence of such shapes")
    items = list(input_shape)
    is_each = [isinstance(item, (torch.Tensor, Sequence)) and not isinstance(item, str) for item in items]
    return items if all(is_each) else [items]


def _dtypes(input_shape: InputShape) -> list[torch.dtype | None]:
    """The element type of each input that holds whole numbers; the others have the model's."""
    given = [item.dtype if isinstance(item, torch.Tensor) else None for item in _items(input_shape)]
    return [None if dtype is None or dtype.is_floating_point else dtype for dtype in given]


def _input_grads(input_shape: InputShape) -> tuple[bool, ...]:
    """Of which inputs the gradient is wanted."""
    return tuple(isinstance(item, torch.Tensor) and item.requires_grad for item in _items(input_shape))


def _shapes(input_shape: InputShape) -> tuple[tuple[int | None, ...], ...]:
    """One shape, or several, with ``None`` for extents that vary."""
    shapes = [tuple(item.shape) if isinstance(item, torch.Tensor) else tuple(item) for item in _items(input_shape)]
    if not any(shapes):
        raise InputError(f"input_shape {shapes[0]}: no extents, expected at least one, the batch; (N, C, H, W) for images")
    for shape in shapes:
        for extent in shape:
            if extent is not None and (isinstance(extent, bool) or not isinstance(extent, int) or extent < 1):
                raise InputError(f"input_shape {shape}: extent {extent!r} is not a positive integer (or None for one that varies)")
        check_extents("input_shape", shape)
    return tuple(shapes)


class _Replaceable:
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


class _Compiled:
    """What a compiled module adds to its model's class."""

    __slots__ = ()
    _sft_engine: Engine
    _sft_forward: Callable[..., Any] | None

    @_Replaceable
    @not_compiled
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
    def weight_counters(self) -> Counters | None:
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
        if inputs and all(isinstance(value, torch.Tensor) or is_readable(value) for value in inputs):
            return self._sft_engine.plan_for_inputs(inputs, input_grad)
        given = inputs[0] if len(inputs) == 1 else inputs
        wanted = _shapes(given)
        shapes = [tuple(extent for extent in shape if extent is not None) for shape in wanted]
        if shapes != list(wanted):
            raise InputError(f"plan_for needs every extent, got {inputs!r}")
        return self._sft_engine.plan_for_shapes(shapes, _dtypes(given))

    def __prepare_scriptable__(self) -> Any:
        """What ``torch.jit.script`` asks for."""
        refuse_wrapping("torch.jit.script", "script the original model")

    def _replicate_for_data_parallel(self) -> Any:
        """What ``nn.DataParallel`` asks for, with more than one device."""
        refuse_wrapping("nn.DataParallel", "use nn.parallel.DistributedDataParallel")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        engine = self._sft_engine
        _refuse_copies(engine)
        return _rebuild(copy.deepcopy(engine.model, memo), _settings(engine))

    def __reduce_ex__(self, protocol: Any) -> Any:
        engine = self._sft_engine
        _refuse_copies(engine)
        return _rebuild, (engine.model, _settings(engine))


class _CompiledSharded(_Compiled):
    """What a compiled module adds to the class of a model that is sharded by ``fully_shard``."""

    __slots__ = ()

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        sharding = self._sft_engine.sharding
        assert sharding is not None
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


def _settings(engine: Engine) -> dict[str, Any]:
    """What a copy is compiled with; an optimizer is one of the original's parameters, and the copy's is not known."""
    asked = engine.preparation
    return {
        "budget_bytes": asked.budget_bytes,
        "options": asked.options,
        "optimizer": None,
        "plan": asked.given_plan,
        "destination": asked.destination,
        "mesh": asked.mesh,
        "backend": asked.backend,
    }


def _rebuild(model: nn.Module, settings: dict[str, Any]) -> Any:
    return _wrap(model, Engine(model, **settings))


def _wrap(model: nn.Module, engine: Engine) -> Any:
    base: Any = type(model)
    cls: Any = _compiled_class(base, _Compiled if engine.sharding is None else _CompiledSharded)
    net = nn.Module.__new__(cls)  # a class's own __new__ would make, or initialize, something else
    object.__setattr__(net, "__dict__", model.__dict__)
    object.__setattr__(net, "_sft_engine", engine)
    object.__setattr__(net, "_sft_forward", None)
    return net


@cache
def _compiled_class(cls: Any, addition: type[_Compiled]) -> type[nn.Module]:
    return type(
        cls.__name__,
        (addition, cls),
        {"__slots__": ("_sft_engine", "_sft_forward"), "__module__": cls.__module__, "__doc__": cls.__doc__},
    )
