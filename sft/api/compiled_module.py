"""The class of compiled modules.

A compiled module is an instance of a subclass of the model's class that shares the model's ``__dict__``: parameters, buffers, submodules,
hooks and the training flag are the same objects under the same names in both. The engine is stored in a slot outside that dictionary, so
``state_dict`` and all other code that traverses a module never sees it.

``forward`` has the metadata of the model's own: signature, documentation and annotations. Trainers read the signature: Hugging Face's
``Trainer`` passes those columns of a batch that ``forward`` names.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from torch import nn

from sft.api.compiled_handle import HANDLE_NAMES, CompiledHandle
from sft.api.engine import Engine
from sft.common.errors import InputError
from sft.common.transform_checks import break_graph_where_compiled, dynamo_disabled, not_inlined, refuse_wrapping

__all__ = ["CompiledModule", "wrap_module"]


#: The argument that a compiled model adds, where its model has none of that name.
_INPUT_GRAD = inspect.Parameter("input_grad", inspect.Parameter.KEYWORD_ONLY, default=None)


def _forward_like(own: Callable[..., Any], *, is_bound: bool = False) -> Callable[..., Any]:
    """A function of a compiled module and the arguments of a call, with the metadata of ``own``.

    Args:
        own: ``forward`` of the model's class.
        is_bound: ``own`` is a function of the arguments alone, as in the dictionary of an instance. Default: `False`
    """
    signature = _signature(own, is_bound=is_bound)
    takes_input_grad = signature is not None and _INPUT_GRAD.name in signature.parameters

    @functools.wraps(own)
    def forward(net: Any, *args: Any, **kwargs: Any) -> Any:
        handle = CompiledHandle(net._sft_engine)
        if takes_input_grad:  # the model's own argument of that name
            return handle.run(args, kwargs)
        input_grad = kwargs.pop(_INPUT_GRAD.name, None)
        return handle.run(args, kwargs, input_grad)

    if signature is not None:
        forward.__signature__ = signature if takes_input_grad else _with_input_grad(signature)  # type: ignore[attr-defined]
    return dynamo_disabled(forward)


def _signature(own: Callable[..., Any], *, is_bound: bool) -> inspect.Signature | None:
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):  # a function of C
        return None
    if not is_bound:
        return signature
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.POSITIONAL_ONLY not in kinds:
        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    if "self" in signature.parameters:
        parameters = [inspect.Parameter("_net", parameters[0].kind)]
    return signature.replace(parameters=[*parameters, *signature.parameters.values()])


def _with_input_grad(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    has_keywords = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - has_keywords, _INPUT_GRAD)
    return signature.replace(parameters=parameters)


class _ForwardMethod:
    """The method ``forward`` of a compiled class. Tools may replace it on an instance (``net.forward = wrapped``).

    A replacement is stored outside the dictionary that the model shares. The metadata (signature, documentation, annotations) are those of
    the model's own ``forward``, also where the model has one of its own in its dictionary.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self._function = _forward_like(own)

    @not_inlined
    def __get__(self, net: Any, owner: type | None = None) -> Any:
        if net is None:
            return self._function
        break_graph_where_compiled()
        if net._sft_forward is not None:
            return net._sft_forward
        instance_forward = vars(net).get("forward")
        return types.MethodType(self._function if instance_forward is None else _bound_forward_like(instance_forward), net)

    def __set__(self, net: Any, replacement: Callable[..., Any]) -> None:
        object.__setattr__(net, "_sft_forward", replacement)

    def __delete__(self, net: Any) -> None:
        object.__setattr__(net, "_sft_forward", None)


@lru_cache(maxsize=64)
def _bound_forward_like(own: Callable[..., Any]) -> Callable[..., Any]:
    return _forward_like(own, is_bound=True)


class _HandleName:
    """A public name of the handle on the compiled module itself; an attribute of the model of that name replaces it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = vars(CompiledHandle)[name].__doc__

    def __get__(self, net: Any, owner: type | None = None) -> Any:
        if net is None:
            return self
        try:
            return getattr(net._sft_engine.model, self._name)
        except AttributeError:
            return getattr(CompiledHandle(net._sft_engine), self._name)


class CompiledModule:
    """The methods that a compiled module adds to its model's class."""

    __slots__ = ()
    _sft_engine: Engine
    _sft_forward: Callable[..., Any] | None

    #: Hides the entry of ``nn.Module.compile`` of the plain model in the shared dictionary, which would run that model.
    _compiled_call_impl = property(lambda self: None)

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharding = self._sft_engine.settings.sharding
        assert sharding is not None
        self._sft_engine.meet()  # FSDP would wait for its own timeout, and not name the missing rank
        with sharding.call_context():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # the model's class follows in the order of classes

    def _get_fsdp_state(self) -> Any:
        """State of FSDP, which looks it up by the object that it sharded."""
        model: Any = self._sft_engine.model
        return model._get_fsdp_state()


vars(_CompiledShardedModule)["__call__"].__signature__ = inspect.signature(nn.Module.__call__)


def _refuse_compile(net: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse the in-place ``torch.compile`` of ``nn.Module``."""
    refuse_wrapping("its own method compile()", "use torch.compile(net), which compiles what is around it")


def _refuse_copies(engine: Engine) -> None:
    """Refuse to copy a model with weights in a file.

    Raises:
        InputError: the file belongs to one model.
    """
    file = engine.settings.options.weights_file
    if file is not None:
        raise InputError(f"the weights are streamed from {file.path}, a file of this model only; use its state_dict() instead of a copy")


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

    new.__signature__ = inspect.signature(cls.__init__)  # type: ignore[attr-defined]
    names: dict[str, Any] = {name: _HandleName(name) for name in HANDLE_NAMES if not hasattr(cls, name)}
    if cls.compile is nn.Module.compile:  # the model may have a method of that name
        names["compile"] = _refuse_compile
    names |= {"__slots__": ("_sft_engine", "_sft_forward"), "__module__": cls.__module__, "__doc__": cls.__doc__, "__new__": new}
    return type(cls.__name__, (addition, cls), {**names, "forward": _ForwardMethod(cls.forward)})
