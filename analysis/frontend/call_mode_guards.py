"""Guards on the modes of a call: queries by which ``forward`` branches on grad mode, gradients, determinism or memory formats.

``forward`` may branch on ``torch.is_grad_enabled()``, ``weight.requires_grad`` or ``x.is_contiguous()``, and a graph has one branch. Such a
query becomes a *guard* (as in Dynamo): the trace returns the value that the call has, and the capture holds for calls with the same value.
Models without queries have one capture for all calls.

The trace itself is always the same, with gradients and channels first; only the returned values differ. Queries on tensors return the
state of the trace. Where the call's inputs differ (:attr:`CallModeGuards.needs_call_inputs`), the model is traced again on inputs with
the gradients and memory formats of the call's.

torch's own modules also query modes, to choose the faster of two equal computations. They see the modes of the trace, without a guard.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sft.analysis.frontend.torch_patches import MODE_SWITCHES, apply_patches, calling_frame
from sft.common.torch_internals import MODE_DECORATOR_MODULE

__all__ = ["CallModeGuards", "CallModes", "GuardKind", "GuardValues"]

GuardKind = Literal["grad mode", "inference mode", "deterministic", "gradients", "layouts"]

#: Values of guards, sorted by kind; comparable and hashable.
GuardValues = tuple[tuple[GuardKind, Any], ...]


@dataclass(frozen=True, kw_only=True)
class CallModes:
    """Modes of a call that `forward` may query. The defaults are the modes of the trace.

    Attributes:
        grad_enabled: true outside of ``torch.no_grad``.
        inference: true under ``torch.inference_mode``.
        deterministic: true under ``torch.use_deterministic_algorithms``.
        weights: ``requires_grad`` of each parameter.
        inputs: ``requires_grad`` of each input.
        channels_last: for each input, true where its memory format is channels last.
        weights_last: the same for parameters that are images.
    """

    grad_enabled: bool = True
    inference: bool = False
    deterministic: bool = False
    weights: tuple[bool, ...] = ()
    inputs: tuple[bool, ...] = ()
    channels_last: tuple[bool, ...] = ()
    weights_last: tuple[bool, ...] = ()

    def guard_value(self, kind: GuardKind) -> Any:
        """The value of one kind of guard; calls with equal values take the same branches."""
        values: dict[GuardKind, Any] = {
            "grad mode": self.grad_enabled,
            "inference mode": self.inference,
            "deterministic": self.deterministic,
            "gradients": (self.grad_enabled, self.weights, self.inputs),
            "layouts": (self.channels_last, self.weights_last),
        }
        return values[kind]

    def guard_values(self, kinds: Iterable[GuardKind]) -> GuardValues:
        """The values of several kinds of guards."""
        return tuple((kind, self.guard_value(kind)) for kind in sorted(kinds))

    def satisfies(self, values: GuardValues) -> bool:
        """Return true where this call has these values."""
        return all(self.guard_value(kind) == value for kind, value in values)


#: Queries on tensors, their kind of guard, and, in a tuple, their value where no result has a gradient; ``None`` where it is the same.
_TENSOR_QUERIES: Mapping[Any, tuple[GuardKind, Any]] = {
    Tensor.requires_grad.__get__: ("gradients", (False,)),  # type: ignore[attr-defined]  # getset descriptors
    Tensor.is_leaf.__get__: ("gradients", (True,)),  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__: ("gradients", (None,)),  # type: ignore[union-attr]
    Tensor.is_contiguous: ("layouts", None),
    Tensor.stride: ("layouts", None),
}

#: Functions of torch that return a mode (rows of the table of patches).
_MODE_QUERIES: Mapping[str, GuardKind] = {
    "is_grad_enabled": "grad mode",
    "is_inference_mode_enabled": "inference mode",
    "are_deterministic_algorithms_enabled": "deterministic",
}


class CallModeGuards:
    """Guards that one trace collects.

    Args:
        modes: modes of the call, which queries return.
        with_call_inputs: true where the trace's inputs have the gradients and memory formats of the call's.

    Attributes:
        kinds: guards so far.
        enables_grad: true where `forward` itself switches gradients on, as under ``torch.enable_grad``.
    """

    def __init__(self, modes: CallModes, *, with_call_inputs: bool = False) -> None:
        self.modes, self.with_call_inputs = modes, with_call_inputs
        self.kinds: set[GuardKind] = set()
        self.enables_grad = False
        self._switched: frozenset[GuardKind] = frozenset()  # modes that `forward` has switched: queries return their real value
        self._switched_outside: dict[Any, frozenset[GuardKind]] = {}  # the same outside of each context that is entered

    @property
    def needs_call_inputs(self) -> bool:
        """True where a query on a tensor may have another value for the call's inputs than for those of this trace."""
        depends_on_grads = "gradients" in self.kinds and any(self.modes.inputs)
        depends_on_layouts = "layouts" in self.kinds and any(self.modes.channels_last)
        return not self.with_call_inputs and (depends_on_grads or depends_on_layouts)

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """A context in which queries of this thread return the call's modes and become guards."""
        self._switched, self._switched_outside = frozenset(), {}
        switch_methods = {"__init__": self._on_init, "__enter__": self._on_enter, "__exit__": self._on_exit}
        replacements: dict[str, Callable[[Any], Any]] = {name: functools.partial(self._query, kind) for name, kind in _MODE_QUERIES.items()}
        replacements |= {name: switch_methods[name.rpartition(".")[2]] for name in MODE_SWITCHES}
        with apply_patches(replacements=replacements, namespaces=_model_namespaces(model)), _TensorQueryRecorder(self):
            yield

    def _query(self, kind: GuardKind, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of a function that returns a mode."""

        def query() -> bool:
            if _is_library_frame(calling_frame()):
                return bool(original())
            self.kinds.add(kind)
            return bool(original() if kind in self._switched else self.modes.guard_value(kind))

        return query

    def _on_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        def construct(context: Any, mode: bool) -> None:
            init(context, mode)
            self._note_switch(context, calling_frame())

        return construct

    def _on_enter(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        def enter_context(context: Any) -> Any:
            self._note_switch(context, calling_frame())
            return enter(context)

        return enter_context

    def _on_exit(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def exit_context(context: Any, *error: Any) -> Any:
            enables = self.enables_grad
            try:
                return leave(context, *error)  # torch leaves one mode by entering another
            finally:
                self._switched, self.enables_grad = self._switched_outside.pop(context, self._switched), enables

        return exit_context

    def _note_switch(self, context: Any, frame: FrameType) -> None:
        self._switched_outside.setdefault(context, self._switched)
        is_inference = isinstance(context, torch.inference_mode)
        self._switched |= {"grad mode", "inference mode"} if is_inference else {"grad mode"}
        enables = isinstance(context, torch.enable_grad) or getattr(context, "mode", is_inference) != is_inference
        if enables and not _is_library_frame(frame):
            self.enables_grad = True


class _TensorQueryRecorder(TorchFunctionMode):
    """A function mode that turns queries on tensors into guards."""

    def __init__(self, guards: CallModeGuards) -> None:
        super().__init__()
        self._guards = guards

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        query = _TENSOR_QUERIES.get(func)
        if query is None or _is_library_frame(sys._getframe(1)):
            return func(*args, **kwargs)
        kind, without_grad = query
        self._guards.kinds.add(kind)
        if without_grad is not None and not self._guards.modes.grad_enabled and not args[0].is_leaf:
            return without_grad[0]
        return func(*args, **kwargs)


def _is_library_frame(frame: FrameType) -> bool:
    """Return true for code of torch or of this package. A decorator that enters a mode counts as code of the decorated function."""
    name = str(frame.f_globals.get("__name__"))
    if name == MODE_DECORATOR_MODULE:
        name = str(getattr(frame.f_locals.get("func"), "__module__", name))
    return name.partition(".")[0] in ("torch", "sft")


def _model_namespaces(model: nn.Module) -> list[Any]:
    """Python modules that define the model's classes: they may have imported a function of torch by name."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    return [
        sys.modules[name] for name in sorted(names) if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins", "sft")
    ]
