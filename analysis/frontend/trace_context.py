"""A model while it is traced: without the root's hooks, with what the exporter understands in place of what it does not.

Each of these puts everything back.

Tracing without what torch says meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.weak import WeakTensorKeyDictionary

from sft.analysis.frontend.module_state import (
    AttributeChangeHook,
    AttributeChanges,
    ObjectChangeHook,
    preserve_attributes,
    preserve_objects,
)
from sft.analysis.frontend.torch_patches import apply_patches
from sft.analysis.ir.targets import CUMULATIVE_MOMENTUM
from sft.common.torch_internals import FSDP_HOOK_MODULE, FakeTensorMode

__all__ = [
    "COMPUTE_DEVICES",
    "REPARAMETRIZATION_HOOKS",
    "disable_root_hooks",
    "is_fsdp_hook",
    "is_sharded",
    "prepare_for_tracing",
    "squeeze_label_channels",
    "suppress_output",
    "use_fake_tensors",
    "use_unsharded_parameters",
    "without_autograd_debugging",
]

#: Hooks that only compute a weight, which the capture follows.
REPARAMETRIZATION_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)

#: Parameters that are elsewhere than on the device that the model runs on, and this device: those that are streamed.
COMPUTE_DEVICES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@contextlib.contextmanager
def prepare_for_tracing(model: nn.Module) -> Iterator[AttributeChanges]:
    """A model that the exporter can trace; behind it, what `forward` has changed of its plain attributes."""
    with (
        _fix_cumulative_momentum(model),
        preserve_attributes(model) as changes,
        disable_root_hooks(model),
        _swap_tensors(model, _as_parameter, buffers=False),
    ):
        yield changes


@contextlib.contextmanager
def squeeze_label_channels(model: nn.Module, lacking: Sequence[bool]) -> Iterator[None]:
    """Let the model take, for inputs that lack channels, images of one channel: it is taken away before the model sees them.

    So labels ``[N, H, W]`` are images ``[N, 1, H, W]`` to everything else.
    """
    if not any(lacking):
        yield
        return
    with model.register_forward_pre_hook(_SqueezeChannelHook(lacking), prepend=True):
        yield


class _SqueezeChannelHook:
    """A hook of ours."""

    def __init__(self, lacking: Sequence[bool]) -> None:
        self._lacks_channels = lacking

    def __call__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(value.squeeze(1) if lacks else value for value, lacks in zip(inputs, self._lacks_channels, strict=True))


@contextlib.contextmanager
def use_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """A model whose parameters and buffers are fake. (``functional_call`` loses the originals of modules that have two names.)"""
    replaced = _swap_tensors(model, mode.from_tensor, buffers=True)
    with use_unsharded_parameters(model, mode), replaced, preserve_attributes(model), preserve_objects(model):
        yield


@contextlib.contextmanager
def use_unsharded_parameters(model: nn.Module, mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """A model whose sharded parameters are whole, and whose streamed ones are on the device, without their content: made in this mode,
    which makes them fake."""

    def is_elsewhere(value: torch.Tensor) -> bool:
        return is_sharded(value) or COMPUTE_DEVICES.get(value, value.device) != value.device

    def whole(value: torch.Tensor) -> torch.Tensor:
        if not is_elsewhere(value):
            return value
        with mode:
            device = COMPUTE_DEVICES.get(value, value.device)
            return nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device=device), requires_grad=value.requires_grad)

    if any(map(is_elsewhere, model.parameters())):
        with _swap_tensors(model, whole, buffers=False):
            yield
    else:
        yield


def is_sharded(value: torch.Tensor) -> bool:
    """Whether a tensor is one of several ranks (a ``DTensor``)."""
    return hasattr(value, "device_mesh")


def is_fsdp_hook(hook: Any) -> bool:
    """Whether a hook is one by which ``fully_shard`` gathers and frees weights."""
    return str(getattr(hook, "__module__", "")).startswith(FSDP_HOOK_MODULE)


@contextlib.contextmanager
def _swap_tensors(model: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor], *, buffers: bool) -> Iterator[None]:
    """Other tensors in the place of parameters, and of buffers; those that are shared stay shared."""
    dictionaries: list[dict[str, Any]] = [module._parameters for module in model.modules()]
    dictionaries += [module._buffers for module in model.modules()] if buffers else []
    held = [(found, dict(found)) for found in dictionaries]
    made: dict[int, torch.Tensor] = {}
    try:
        for found, values in held:
            for name, value in values.items():
                if value is not None:
                    if id(value) not in made:
                        made[id(value)] = replacement(value)
                    found[name] = made[id(value)]
        yield
    finally:
        for found, values in held:
            found.update(values)


def _as_parameter(value: torch.Tensor) -> torch.Tensor:
    """A parameter where ``torch.func.functional_call`` has put a tensor, which the exporter would take for something else."""
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach(), requires_grad=value.requires_grad)


@contextlib.contextmanager
def disable_root_hooks(model: nn.Module) -> Iterator[None]:
    """Take the root's own hooks off: they run around each call of the compiled model, as they do in eager PyTorch, and not inside.

    Hooks for all modules (such as a FLOP counter's) would run on fake tensors, and are off as well; so are those that gather weights.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    held = [(module, name, vars(module)[name]) for module in model.modules() for name in names if vars(module)[name]]
    for module, name, hooks in held:
        stay = {
            key: hook
            for key, hook in hooks.items()
            if isinstance(hook, (*REPARAMETRIZATION_HOOKS, _SqueezeChannelHook, AttributeChangeHook, ObjectChangeHook))
            or (module is not model and not is_fsdp_hook(hook))
        }
        vars(module)[name] = OrderedDict(stay)
    try:
        with apply_patches("global_module_hooks"):
            yield
    finally:
        for module, name, hooks in held:
            vars(module)[name] = hooks


@contextlib.contextmanager
def _fix_cumulative_momentum(model: nn.Module) -> Iterator[None]:
    """Give BatchNorms that average over all batches so far a number for their momentum, which would depend on a buffer's value."""
    # Out of training the momentum goes nowhere.
    averaging = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None and module.training
    ]
    try:
        for module in averaging:
            module.momentum = CUMULATIVE_MOMENTUM
        yield
    finally:
        for module in averaging:
            module.momentum = None


def suppress_output() -> contextlib.AbstractContextManager[None]:
    """Return a context without warnings, logs and prints of this thread; failures are raised and not logged."""
    return apply_patches("loggers", "output")


def without_autograd_debugging() -> contextlib.AbstractContextManager[None]:
    """Return a context without the caller's anomaly detection and without hooks on tensors that autograd saves."""
    return apply_patches("saved_tensor_hooks", "anomaly_mode")
