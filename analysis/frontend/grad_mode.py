"""What a model's ``forward`` does with autograd besides calling operators: it switches the grad mode, writes past it, replaces it.

A graph has no grad modes. ``torch.export`` keeps them as calls of inner graphs, loses them where autocast is switched around them, and
forgets them altogether when it decomposes; gradients would come out where eager PyTorch has none. So the exporter is not told: while
``forward`` runs for it, the switches take effect, and every tensor that is made under ``torch.no_grad`` is detached where it is made.
That is all that the mode does, with one exception, which is refused: a tensor of the outside that is written to under ``torch.no_grad``,
or through ``x.detach()``, keeps its gradient, that of the value before.

An autograd function with a backward of its own is refused, too, and so are hooks on tensors: a graph has the operators' own derivatives.
Numbers drawn from Python's or NumPy's generators are refused, since the graph would have those of one call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from sft.analysis.frontend.call_mode_guards import CallModeGuards
from sft.analysis.frontend.foreach import decompose_foreach, is_in_place_foreach
from sft.analysis.frontend.module_guards import UnregisteredTensor, check_registrations, forbid_external_rng
from sft.analysis.frontend.replacement_functions import VALUE_FREE_FUNCTIONS
from sft.analysis.frontend.source_location import current_location
from sft.analysis.frontend.torch_patches import apply_patches
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import SET_GRAD_ENABLED, disable_torch_function, pytree, set_grad_enabled_silently, storage_id

__all__ = ["track_grad_modes"]

#: What checkpoints without reentrance keep their inputs by, up to torch 2.12; it computes nothing.
_CHECKPOINT_NOOP = getattr(checkpoint, "_NoopSaveInputs", None)


@contextlib.contextmanager
def track_grad_modes(model: nn.Module, questions: CallModeGuards) -> Iterator[list[UnregisteredTensor]]:
    """While this is on, ``model.forward`` detaches what it makes under ``torch.no_grad``, and does not show the switches to modes around.

    What it asks about the call is answered. The list gets what it reads that requires a gradient and is no parameter. Calls raise
    UnsupportedError where that is not what the mode does.
    """
    inner = model.forward
    foreign: list[UnregisteredTensor] = []

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        around = (
            _restore_grad_mode(),
            forbid_external_rng(model),
            _forbid_autograd_functions(),
            _DetachUnderNoGrad(model, foreign),
        )
        with contextlib.ExitStack() as stack:
            for context in (*around, questions.answered(model), check_registrations(model)):
                stack.enter_context(context)
            return inner(*args, **kwargs)

    own = vars(model).get("forward")
    vars(model)["forward"] = forward
    try:
        yield foreign
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


@contextlib.contextmanager
def _restore_grad_mode() -> Iterator[None]:
    """Put the grad mode back behind the model, unseen: at every switch that it sees the exporter cuts the program in two, and joins it."""
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        if torch.is_grad_enabled() != before:
            set_grad_enabled_silently(before)


@contextlib.contextmanager
def _forbid_autograd_functions() -> Iterator[None]:
    """Refuse autograd functions in this thread; that of ``torch.utils.checkpoint`` computes what it is given, and is stepped into."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *operands = args
            return run(*operands)
        if cls is _CHECKPOINT_NOOP:
            return torch.empty(0)
        raise UnsupportedError(
            [
                f"{cls.__module__}.{cls.__qualname__}: a torch.autograd.Function has a backward of its own, which the capture cannot see; "
                "write it with operators and x.detach(), or leave it out of the compiled model"
            ]
        )

    with apply_patches(replacements={"autograd_function_apply": lambda original: apply}):
        yield


class _DetachUnderNoGrad(TorchFunctionMode):
    """Detaches the results of calls under ``torch.no_grad``."""

    def __init__(self, model: nn.Module, foreign: list[UnregisteredTensor]) -> None:
        super().__init__()
        self._foreign = foreign
        self._model_name = type(model).__name__
        self._buffers = {storage_id(buffer) for buffer in model.buffers()}
        self._unwatched: set[int] = set()  # other memory that autograd does not know of: what is made of nothing, or under torch.no_grad
        self._aliases: set[int] = set()  # identities of detached tensors whose memory autograd knows of
        self._kept: list[Tensor] = []  # so that neither their memory nor their identity gets a second owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SET_GRAD_ENABLED:
            with disable_torch_function():
                return func(*args)
        kwargs = kwargs or {}
        if is_in_place_foreach(_function_name(func)):
            return self._write_lists(func, types, args, kwargs)
        self._refuse_calls(func, args)
        func = VALUE_FREE_FUNCTIONS.get(func, func)
        if func == _DATA:
            func = Tensor.detach  # the exporter takes x.data for a constant
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self._note_foreign(given)
        targets = [] if torch.is_grad_enabled() else _written_tensors(func, args, kwargs)
        if targets:  # what is written must not bring its gradient along
            args, kwargs = pytree.tree_map(
                lambda value: value if _contains_tensor(value, targets) else _detach_results(value), (args, kwargs)
            )
        versions = [_version_counter(value) for value in given]
        made = func(*args, **kwargs)
        self._check_written([value for value, version in zip(given, versions, strict=True) if _version_counter(value) != version], func)
        if torch.is_grad_enabled():
            self._note(func, made, given)
            return made
        memories = {storage_id(value) for value in given}
        return pytree.tree_map(lambda value: value if _contains_tensor(value, given) else self._result(value, memories), made)

    def _note_foreign(self, given: list[Tensor]) -> None:
        """Parameters and what is made of them are fake by now; what is not is the exporter's constant, which has no gradient."""
        for value in given:
            is_real = type(value) in (Tensor, nn.Parameter)
            if is_real and value.requires_grad and not any(value is known.tensor for known in self._foreign):
                self._foreign.append(UnregisteredTensor(value, current_location()))

    def _write_lists(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        calls = decompose_foreach(_function_name(func), args, kwargs)
        if calls is None:
            self._refuse(
                f"calls {_function_name(func)}, which is not the same as one call for each tensor here; write to one tensor after the other"
            )
        for one, own, named in calls:
            self.__torch_function__(one, types, own, named)
        return args[0]

    def _refuse_calls(self, func: Any, args: Any) -> None:
        name = _function_name(func)
        if name in _TENSOR_HOOKS:
            self._refuse(f"calls {name} on a tensor: hooks inside a compiled model do not run; register it on an output or a parameter")
        if func in _AUTOGRAD_CALLS:
            self._refuse(f"differentiates inside ({name}), which the capture cannot follow; do it outside, with the plain model")
        if func == _SET_DATA or name == "detach_":
            what = "detaches in place (detach_)" if name == "detach_" else "sets x.data of"
            self._refuse(f"{what} a tensor of shape {tuple(args[0].shape)}, which the exporter does not see; write x = x.detach()")

    def _check_written(self, written: list[Tensor], func: Any) -> None:
        for value in written:
            memory, shape = storage_id(value), tuple(value.shape)
            if id(value) in self._aliases:
                self._refuse(
                    f"writes in place ({_function_name(func)}) through x.detach() or x.data, which autograd does not notice; "
                    f"{_IN_PLACE_REMEDY}"
                )
            if torch.is_grad_enabled():
                self._unwatched.discard(memory)
            elif memory not in self._buffers and memory not in self._unwatched:
                self._refuse(
                    f"writes in place ({_function_name(func)}), under torch.no_grad, into a tensor of shape {shape} made outside of it, "
                    f"whose gradient would be that of the value before; {_IN_PLACE_REMEDY}"
                )

    def _result(self, value: Any, memories: set[int]) -> Any:
        if isinstance(value, Tensor) and storage_id(value) not in memories:
            self._own(value)
        return _detach_results(value)

    def _own(self, value: Tensor) -> None:
        self._unwatched.add(storage_id(value))
        self._kept.append(value)

    def _note(self, func: Any, made: Any, given: list[Tensor]) -> None:
        """Remember memory that is nobody's, and detached tensors whose memory is somebody's."""
        is_fresh = not given or _function_name(func).endswith("_like") or _function_name(func).startswith("new_")
        is_cut_off = func is Tensor.detach or any(id(value) in self._aliases for value in given)
        for value in pytree.tree_leaves(made) if is_fresh or is_cut_off else ():
            if not isinstance(value, Tensor):
                continue
            if is_fresh:
                self._own(value)
            elif storage_id(value) not in self._unwatched | self._buffers and any(
                storage_id(value) == storage_id(operand) for operand in given
            ):
                self._aliases.add(id(value))
                self._kept.append(value)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError([f"{self._model_name}: `forward` {what}"])


_AUTOGRAD_CALLS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_TENSOR_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]  # a getset descriptor
_IN_PLACE_REMEDY = "return a new tensor, or write to a clone made under torch.no_grad"


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call by its name writes to."""
    name = _function_name(func)
    found = list(pytree.tree_leaves(kwargs.get("out")))
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__":
        found += args[:1]
    return [value for value in found if isinstance(value, Tensor)]


def _function_name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).partition(".")[0]  # of an operator, without its overload


def _detach_results(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) else value


def _contains_tensor(value: Any, tensors: list[Tensor]) -> bool:
    return any(value is tensor for tensor in tensors)


def _version_counter(value: Tensor) -> int:
    """How often a tensor was written to; nobody counts for inference tensors, which have no gradient either."""
    return 0 if value.is_inference() else value._version
