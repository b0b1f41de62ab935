"""Contexts in which a model is traced: without hooks of its root, with fake or unsharded tensors for its own, without output.

All contexts restore the model and the process.
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

#: Hooks that compute a weight from parameters; the capture follows them.
REPARAMETRIZATION_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)

#: The device that the model runs on, for parameters on another device (streamed parameters).
COMPUTE_DEVICES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@contextlib.contextmanager
def prepare_for_tracing(model: nn.Module) -> Iterator[AttributeChanges]:
    """A context in which the exporter can trace a model. Yields the plain attributes that `forward` changes; they are restored."""
    with (
        _fix_cumulative_momentum(model),
        preserve_attributes(model) as changes,
        disable_root_hooks(model),
        _swap_tensors(model, _as_parameter, buffers=False),
    ):
        yield changes


@contextlib.contextmanager
def squeeze_label_channels(model: nn.Module, lacking: Sequence[bool]) -> Iterator[None]:
    """A context in which the model takes ``[N, 1, H, W]`` for inputs without channels: a hook squeezes the channel before `forward`.

    Label maps ``[N, H, W]`` are thus images ``[N, 1, H, W]`` in all other code.
    """
    if not any(lacking):
        yield
        return
    with model.register_forward_pre_hook(_SqueezeChannelHook(lacking), prepend=True):
        yield


class _SqueezeChannelHook:
    """A forward pre-hook that squeezes the channel of label maps."""

    def __init__(self, lacking: Sequence[bool]) -> None:
        self._lacks_channels = lacking

    def __call__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(value.squeeze(1) if lacks else value for value, lacks in zip(inputs, self._lacks_channels, strict=True))


@contextlib.contextmanager
def use_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """A context in which parameters and buffers are fake. (``functional_call`` loses the originals of modules that have two names.)"""
    replaced = _swap_tensors(model, mode.from_tensor, buffers=True)
    with use_unsharded_parameters(model, mode), replaced, preserve_attributes(model), preserve_objects(model):
        yield


@contextlib.contextmanager
def use_unsharded_parameters(model: nn.Module, mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """A context in which sharded parameters have their full shape, and streamed ones are on the compute device; their values are undefined.

    ``mode`` is on while they are created: a fake tensor mode makes them fake.
    """

    def is_remote(value: torch.Tensor) -> bool:
        return is_sharded(value) or COMPUTE_DEVICES.get(value, value.device) != value.device

    def unsharded(value: torch.Tensor) -> torch.Tensor:
        if not is_remote(value):
            return value
        with mode:
            device = COMPUTE_DEVICES.get(value, value.device)
            return nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device=device), requires_grad=value.requires_grad)

    if any(map(is_remote, model.parameters())):
        with _swap_tensors(model, unsharded, buffers=False):
            yield
    else:
        yield


def is_sharded(value: torch.Tensor) -> bool:
    """Return true for a tensor that is sharded over ranks (a ``DTensor``)."""
    return hasattr(value, "device_mesh")


def is_fsdp_hook(hook: Any) -> bool:
    """Return true for a hook by which ``fully_shard`` gathers and frees weights."""
    return str(getattr(hook, "__module__", "")).startswith(FSDP_HOOK_MODULE)


@contextlib.contextmanager
def _swap_tensors(model: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor], *, buffers: bool) -> Iterator[None]:
    """A context in which parameters (and buffers) are replaced; shared tensors stay shared."""
    registries: list[dict[str, Any]] = [module._parameters for module in model.modules()]
    registries += [module._buffers for module in model.modules()] if buffers else []
    originals = [(registry, dict(registry)) for registry in registries]
    replacements: dict[int, torch.Tensor] = {}
    try:
        for registry, values in originals:
            for name, value in values.items():
                if value is not None:
                    if id(value) not in replacements:
                        replacements[id(value)] = replacement(value)
                    registry[name] = replacements[id(value)]
        yield
    finally:
        for registry, values in originals:
            registry.update(values)


def _as_parameter(value: torch.Tensor) -> torch.Tensor:
    """A parameter for a plain tensor of ``torch.func.functional_call``, which the exporter would take for a constant."""
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach(), requires_grad=value.requires_grad)


@contextlib.contextmanager
def disable_root_hooks(model: nn.Module) -> Iterator[None]:
    """A context without hooks of the root: they run around each call of the compiled model, as in eager PyTorch, and not inside of it.

    Hooks of all modules (of a FLOP counter) would run on fake tensors and are off as well; so are those that gather sharded weights.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    originals = [(module, name, vars(module)[name]) for module in model.modules() for name in names if vars(module)[name]]
    for module, name, hooks in originals:
        kept = {
            key: hook
            for key, hook in hooks.items()
            if isinstance(hook, (*REPARAMETRIZATION_HOOKS, _SqueezeChannelHook, AttributeChangeHook, ObjectChangeHook))
            or (module is not model and not is_fsdp_hook(hook))
        }
        vars(module)[name] = OrderedDict(kept)
    try:
        with apply_patches("global_module_hooks"):
            yield
    finally:
        for module, name, hooks in originals:
            vars(module)[name] = hooks


@contextlib.contextmanager
def _fix_cumulative_momentum(model: nn.Module) -> Iterator[None]:
    """A context in which BatchNorms with a cumulative average have a constant momentum; theirs would depend on a buffer's value."""
    # Only training uses the momentum.
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
