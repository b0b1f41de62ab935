"""Autograd habits of ``forward``: switches of the grad mode, writes past autograd, autograd functions, hooks on tensors.

A graph has no grad modes. ``torch.export`` keeps them as calls of inner graphs, loses them where autocast is switched around them, and
forgets them when it decomposes; gradients would appear where eager PyTorch has none. So the exporter does not see the switches. They take
effect while ``forward`` runs, and each tensor that is computed under ``torch.no_grad`` is detached at once.

This is all that the mode does, with one exception, which is refused: a tensor from outside of ``torch.no_grad`` that is written to under
it, or through ``x.detach()``, keeps the gradient of its value before the write.

Autograd functions are refused, since their backward is not that of the operators in their forward; so are hooks on tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from sft.analysis.frontend.call_mode_guards import CallModeGuards
from sft.analysis.frontend.class_labels import check_label_dtype
from sft.analysis.frontend.constants.tracking import ConstantTracker
from sft.analysis.frontend.foreach import decompose_foreach, is_in_place_foreach
from sft.analysis.frontend.module_state import override_attributes
from sft.analysis.frontend.replacement_functions import OTHER_FORMS
from sft.analysis.frontend.side_effect_checks import UnregisteredTensor, check_registrations, forbid_external_rng
from sft.analysis.frontend.source_location import current_location
from sft.analysis.frontend.submodule_hooks import watch_submodule_hooks
from sft.analysis.frontend.torch_patches import apply_patches
from sft.common.errors import UnsupportedError
from sft.common.torch_internals import (
    CHECKPOINT_NOOP,
    SET_GRAD_ENABLED,
    batching_or_differentiating_transform,
    disable_torch_function,
    pytree,
    set_grad_enabled_silently,
    storage_id,
)

__all__ = ["track_grad_modes"]


@contextlib.contextmanager
def track_grad_modes(model: nn.Module, guards: CallModeGuards, tracker: ConstantTracker) -> Iterator[list[UnregisteredTensor]]:
    """A context in which ``model.forward`` can be exported: results under ``torch.no_grad`` are detached, and queries become guards.

    Reads of constant values are recorded by ``tracker``. Yields the list of tensors that `forward` reads and that require a gradient
    without being parameters; calls fill it. Calls raise UnsupportedError for habits that a graph cannot express.
    """
    inner = model.forward
    unregistered: list[UnregisteredTensor] = []
    is_running = False

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_running
        if is_running:  # `forward` calls itself
            return inner(*args, **kwargs)
        is_running = True
        contexts = (
            _restore_grad_mode(),
            forbid_external_rng(model),
            _forbid_autograd_functions(),
            _DetachUnderNoGrad(model, unregistered),
        )
        with contextlib.ExitStack() as stack:
            stack.callback(finish)
            watches = (tracker.watch(), guards.watch(model), check_registrations(model), watch_submodule_hooks(model))
            for context in (*contexts, *watches):
                stack.enter_context(context)
            return inner(*args, **kwargs)

    def finish() -> None:
        nonlocal is_running
        is_running = False

    with override_attributes({(model, "forward"): forward}):
        yield unregistered


@contextlib.contextmanager
def _restore_grad_mode() -> Iterator[None]:
    """Restore the grad mode without a call that the exporter sees: at each such call it splits the program in two."""
    before = torch.is_grad_enabled()
    try:
        yield
    finally:
        if torch.is_grad_enabled() != before:
            set_grad_enabled_silently(before)


@contextlib.contextmanager
def _forbid_autograd_functions() -> Iterator[None]:
    """Refuse autograd functions of this thread, but for that of ``torch.utils.checkpoint``, which runs the function that it is given."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *operands = args
            return run(*operands)
        if cls is CHECKPOINT_NOOP:
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
    """A function mode that detaches results of calls under ``torch.no_grad`` and refuses writes that autograd does not see."""

    def __init__(self, model: nn.Module, unregistered: list[UnregisteredTensor]) -> None:
        super().__init__()
        self._unregistered = unregistered
        self._model_name = type(model).__name__
        self._buffers = {storage_id(buffer) for buffer in model.buffers()}
        self._parameters = {storage_id(parameter): path for path, parameter in model.named_parameters()}
        self._untracked: set[int] = set()  # storages without a gradient: factory results, and results under torch.no_grad
        self._detached: set[int] = set()  # ids of detached tensors that share the memory of a tracked one
        self._alive: list[Tensor] = []  # keeps storages and ids from being reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SET_GRAD_ENABLED:
            with disable_torch_function():
                return func(*args)
        kwargs = kwargs or {}
        if is_in_place_foreach(_function_name(func)):
            return self._decompose_foreach(func, types, args, kwargs)
        self._refuse_calls(func, args)
        check_label_dtype(func, args, kwargs)
        func = OTHER_FORMS.get(func, func)
        if func == _DATA:
            func = Tensor.detach  # the exporter takes x.data for a constant
        operands = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self._note_unregistered(operands)
        if _function_name(func) == "set_" and torch.is_grad_enabled():
            self._refuse_set(operands)
        destinations = _written_tensors(func, args, kwargs)
        if any(type(value) in (Tensor, nn.Parameter) for value in destinations):  # parameters and buffers are fake by now
            self._refuse(
                f"writes in place ({_function_name(func)}) into a tensor that is not a parameter or buffer, and a compiled model has "
                "its value of now; register it with register_buffer"
            )
        if destinations and not torch.is_grad_enabled():  # the written values must not bring their gradients along
            args, kwargs = pytree.tree_map(
                lambda value: value if _contains_tensor(value, destinations) else _detach_results(value), (args, kwargs)
            )
        versions = _version_counters(operands)
        result = func(*args, **kwargs)
        changes = zip(operands, versions, _version_counters(operands), strict=True)
        written = [value for value, before, after in changes if after != before]
        # Views share a version counter: of x.add_(x.detach()) both operands have changed, and x was written to.
        self._check_written([value for value in written if _contains_tensor(value, destinations)] or written, func)
        if torch.is_grad_enabled():
            self._note_result(func, result, operands)
            return result
        storages = {storage_id(value) for value in operands}
        return pytree.tree_map(lambda value: value if _contains_tensor(value, operands) else self._detach(value, storages), result)

    def _note_unregistered(self, operands: list[Tensor]) -> None:
        """Note real tensors that require a gradient: parameters are fake by now, and the exporter takes the real ones for constants."""
        for value in operands:
            is_real = type(value) in (Tensor, nn.Parameter)
            if is_real and value.requires_grad and not any(value is known.tensor for known in self._unregistered):
                self._unregistered.append(UnregisteredTensor(value, current_location()))

    def _decompose_foreach(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        calls = decompose_foreach(_function_name(func), args, kwargs)
        if calls is None:
            self._refuse(
                f"calls {_function_name(func)}, which is not the same as one call for each tensor here; write to one tensor after the other"
            )
        for function, single_args, single_kwargs in calls:
            self.__torch_function__(function, types, single_args, single_kwargs)
        return args[0]

    def _refuse_calls(self, func: Any, args: Any) -> None:
        name = _function_name(func)
        if name in _TENSOR_HOOKS:
            self._refuse(f"calls {name} on a tensor: hooks inside a compiled model do not run; register it on an output or a parameter")
        if func in _AUTOGRAD_CALLS:
            self._refuse(f"differentiates inside ({name}), which the capture cannot follow; do it outside, with the plain model")
        # The end of a transform must run.
        transform = None if name.endswith("_nesting") else batching_or_differentiating_transform()
        if transform == "grad":
            self._refuse("differentiates inside (torch.func), which the capture cannot follow; do it outside, with the plain model")
        if transform == "vmap":
            self._refuse(
                "calls torch.func.vmap, of which the capture sees no operators; write the function for a batch, or call it in a loop and "
                "torch.stack the results"
            )
        if func == _SET_DATA or name == "detach_":
            action = "detaches in place (detach_)" if name == "detach_" else "sets x.data of"
            self._refuse(f"{action} a tensor of shape {tuple(args[0].shape)}, which the exporter does not see; write x = x.detach()")

    def _refuse_set(self, operands: list[Tensor]) -> None:
        """Refuse ``set_``, which has no derivative; the exporter replaces it by its source, which has one."""
        for value in operands:
            is_tracked = storage_id(value) not in self._untracked and id(value) not in self._detached
            if is_tracked and (value.is_floating_point() or value.is_complex()):
                self._refuse(
                    f"calls set_ with a tensor of shape {tuple(value.shape)} that may require a gradient, and PyTorch has no derivative of "
                    "it (eager raises an error in backward); assign the tensor (y = x), or give it x.detach()"
                )

    def _check_written(self, written: list[Tensor], func: Any) -> None:
        for value in written:
            storage, shape = storage_id(value), tuple(value.shape)
            if id(value) in self._detached:
                self._refuse(
                    f"writes in place ({_function_name(func)}) through x.detach() or x.data, which autograd does not notice; "
                    f"{_IN_PLACE_REMEDY}"
                )
            if torch.is_grad_enabled():
                self._untracked.discard(storage)
            elif storage in self._parameters:
                self._refuse(
                    f"writes in place ({_function_name(func)}), under torch.no_grad, into the parameter {self._parameters[storage]}, whose "
                    "gradient would be that of the value before; change it after the optimizer's step, or make it a buffer "
                    "(register_buffer) if it is not trained"
                )
            elif storage not in self._buffers and storage not in self._untracked:
                self._refuse(
                    f"writes in place ({_function_name(func)}), under torch.no_grad, into a tensor of shape {shape} made outside of it, "
                    f"whose gradient would be that of the value before; {_IN_PLACE_REMEDY}"
                )

    def _detach(self, value: Any, storages: set[int]) -> Any:
        """A result under ``torch.no_grad``, detached; it is untracked where it shares no memory with the operands."""
        if isinstance(value, Tensor) and storage_id(value) not in storages:
            self._add_untracked(value)
        return _detach_results(value)

    def _add_untracked(self, value: Tensor) -> None:
        self._untracked.add(storage_id(value))
        self._alive.append(value)

    def _note_result(self, func: Any, result: Any, operands: list[Tensor]) -> None:
        """Note new memory without a gradient, and detached tensors that share tracked memory."""
        is_factory = not operands or _function_name(func).endswith("_like") or _function_name(func).startswith("new_")
        is_detached = func is Tensor.detach or any(id(value) in self._detached for value in operands)
        for value in pytree.tree_leaves(result) if is_factory or is_detached else ():
            if not isinstance(value, Tensor):
                continue
            if is_factory:
                self._add_untracked(value)
            elif storage_id(value) not in self._untracked | self._buffers and any(
                storage_id(value) == storage_id(operand) for operand in operands
            ):
                self._detached.add(id(value))
                self._alive.append(value)

    def _refuse(self, action: str) -> NoReturn:
        raise UnsupportedError([f"{self._model_name}: `forward` {action}"])


_AUTOGRAD_CALLS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_TENSOR_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]  # a getset descriptor
_IN_PLACE_REMEDY = "return a new tensor, or write to a clone made under torch.no_grad"


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes to, by its name."""
    name = _function_name(func)
    destinations = list(pytree.tree_leaves(kwargs.get("out")))
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__":
        destinations += args[:1]
    return [value for value in destinations if isinstance(value, Tensor)]


def _function_name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).partition(".")[0]  # of an operator, without its overload


def _detach_results(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) else value


def _contains_tensor(value: Any, tensors: list[Tensor]) -> bool:
    return any(value is tensor for tensor in tensors)


def _version_counters(values: Sequence[Tensor]) -> list[int]:
    """Number of writes to each tensor. Inference tensors have no counter, and no gradient either."""
    with disable_torch_function():  # every function mode would see the reads
        return [0 if value.is_inference() else value._version for value in values]
