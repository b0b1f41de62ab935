"""What `forward` asks of the call that it is traced for: answered as that call would be, and noted.

Python decides by ``torch.is_grad_enabled()``, ``weight.requires_grad`` or ``x.is_contiguous()``, and a graph has one side of the decision.
A model that asks has a capture for each answer; most do not ask, and have one capture for all calls. So the trace itself is the same for
all of them, with gradients and channels first, and only the answers differ. For tensors they are what the trace does, which then has inputs
as the call has them (:attr:`CallModeGuards.needs_call_inputs`).

torch's own modules ask as well, for something faster that computes the same. They are answered as the trace is, and not noted.
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

#: What was answered, in one order; comparable and hashable.
GuardValues = tuple[tuple[GuardKind, Any], ...]


@dataclass(frozen=True, kw_only=True)
class CallModes:
    """What of a call `forward` may ask; as it is by default, the trace is.

    Attributes:
        grad_enabled: whether the call is outside of ``torch.no_grad``.
        inference: whether it is under ``torch.inference_mode``.
        deterministic: whether it is under ``torch.use_deterministic_algorithms``.
        weights: for each parameter whether it requires a gradient.
        inputs: the same for the inputs.
        channels_last: for each input whether it is laid out channels last.
        weights_last: the same for parameters of images.
    """

    grad_enabled: bool = True
    inference: bool = False
    deterministic: bool = False
    weights: tuple[bool, ...] = ()
    inputs: tuple[bool, ...] = ()
    channels_last: tuple[bool, ...] = ()
    weights_last: tuple[bool, ...] = ()

    def answer(self, question: GuardKind) -> Any:
        """What tells calls apart that are answered differently."""
        answers: dict[GuardKind, Any] = {
            "grad mode": self.grad_enabled,
            "inference mode": self.inference,
            "deterministic": self.deterministic,
            "gradients": (self.grad_enabled, self.weights, self.inputs),
            "layouts": (self.channels_last, self.weights_last),
        }
        return answers[question]

    def answers(self, questions: Iterable[GuardKind]) -> GuardValues:
        """The answers to these."""
        return tuple((question, self.answer(question)) for question in sorted(questions))

    def agree(self, answers: GuardValues) -> bool:
        """Whether this call is answered so."""
        return all(self.answer(question) == answer for question, answer in answers)


#: What modules ask of tensors, and the answer where nothing computed has a gradient; ``None`` where that makes no difference.
_TENSOR_QUERIES: Mapping[Any, tuple[GuardKind, Any]] = {
    Tensor.requires_grad.__get__: ("gradients", (False,)),  # type: ignore[attr-defined]  # getset descriptors
    Tensor.is_leaf.__get__: ("gradients", (True,)),  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__: ("gradients", (None,)),  # type: ignore[union-attr]
    Tensor.is_contiguous: ("layouts", None),
    Tensor.stride: ("layouts", None),
}

#: Functions of torch that tell a mode.
_MODE_QUERIES: Mapping[str, GuardKind] = {
    "is_grad_enabled": "grad mode",
    "is_inference_mode_enabled": "inference mode",
    "are_deterministic_algorithms_enabled": "deterministic",
}


class CallModeGuards:
    """The questions of one trace.

    Args:
        modes: what is answered.
        with_call_inputs: whether inputs require gradients, and are laid out, as those of the call.

    Attributes:
        asked: what was.
        enables_grad: whether `forward` itself switches gradients on, as under ``torch.enable_grad``.
    """

    def __init__(self, modes: CallModes, *, with_call_inputs: bool = False) -> None:
        self.modes, self.with_call_inputs = modes, with_call_inputs
        self.asked: set[GuardKind] = set()
        self.enables_grad = False
        self._own: frozenset[GuardKind] = frozenset()  # the modes that `forward` has switched, and that are what they are
        self._outside: dict[Any, frozenset[GuardKind]] = {}  # the same outside of a context that it is in

    @property
    def needs_call_inputs(self) -> bool:
        """Whether an answer was one about inputs that are not as those of the call."""
        wants_gradients = "gradients" in self.asked and any(self.modes.inputs)
        return not self.with_call_inputs and (wants_gradients or ("layouts" in self.asked and any(self.modes.channels_last)))

    @contextlib.contextmanager
    def answered(self, model: nn.Module) -> Iterator[None]:
        """While this is on, this thread's questions are answered."""
        self._own, self._outside = frozenset(), {}
        switch_methods = {"__init__": self._on_init, "__enter__": self._on_enter, "__exit__": self._on_exit}
        replacements: dict[str, Callable[[Any], Any]] = {
            name: functools.partial(self._query, guard) for name, guard in _MODE_QUERIES.items()
        }
        replacements |= {name: switch_methods[name.rpartition(".")[2]] for name in MODE_SWITCHES}
        with apply_patches(replacements=replacements, namespaces=_model_namespaces(model)), _TensorQueryRecorder(self):
            yield

    def _query(self, guard: GuardKind, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of a function that returns a mode."""

        def query() -> bool:
            if _is_library_frame(calling_frame()):
                return bool(original())
            self.asked.add(guard)
            return bool(original() if guard in self._own else self.modes.answer(guard))

        return query

    def _on_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        def construct(context: Any, mode: bool) -> None:
            init(context, mode)
            self._switched(context, calling_frame())

        return construct

    def _on_enter(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        def enter_context(context: Any) -> Any:
            self._switched(context, calling_frame())
            return enter(context)

        return enter_context

    def _on_exit(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def exit_context(context: Any, *error: Any) -> Any:
            enables = self.enables_grad
            try:
                return leave(context, *error)  # torch leaves one mode by entering another
            finally:
                self._own, self.enables_grad = self._outside.pop(context, self._own), enables

        return exit_context

    def _switched(self, context: Any, frame: FrameType) -> None:
        self._outside.setdefault(context, self._own)
        is_inference = isinstance(context, torch.inference_mode)
        self._own |= {"grad mode", "inference mode"} if is_inference else {"grad mode"}
        enables = isinstance(context, torch.enable_grad) or getattr(context, "mode", is_inference) != is_inference
        if enables and not _is_library_frame(frame):
            self.enables_grad = True


class _TensorQueryRecorder(TorchFunctionMode):
    """Notes what is asked of tensors."""

    def __init__(self, questions: CallModeGuards) -> None:
        super().__init__()
        self._questions = questions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _TENSOR_QUERIES.get(func)
        if found is None or _is_library_frame(sys._getframe(1)):
            return func(*args, **kwargs)
        question, otherwise = found
        self._questions.asked.add(question)
        if otherwise is not None and not self._questions.modes.grad_enabled and not args[0].is_leaf:
            return otherwise[0]
        return func(*args, **kwargs)


def _is_library_frame(frame: FrameType) -> bool:
    """Whether torch's own code runs there, or ours; where torch enters a context for a function that is decorated, whose that is."""
    name = str(frame.f_globals.get("__name__"))
    if name == MODE_DECORATOR_MODULE:
        name = str(getattr(frame.f_locals.get("func"), "__module__", name))
    return name.partition(".")[0] in ("torch", "sft")


def _model_namespaces(model: nn.Module) -> list[Any]:
    """The modules of Python that the model's classes are in: they may have bound a function of torch long before."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    return [
        sys.modules[name] for name in sorted(names) if name in sys.modules and name.partition(".")[0] not in ("torch", "builtins", "sft")
    ]
