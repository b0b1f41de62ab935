"""A model while it is traced: without the root's hooks, with what the exporter understands in place of what it does not.

Each of these puts everything back.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from sft.analysis.norms import CUMULATIVE

__all__ = ["NORMS_OF_WEIGHTS", "dropping_channels", "hooks_aside", "on_fake_tensors", "prepared"]

_GLOBAL = tuple(f"_global_{name}_hooks" for name in ("forward", "forward_pre", "backward", "backward_pre"))

#: Hooks that only compute a weight, which the capture follows.
NORMS_OF_WEIGHTS = (WeightNorm, SpectralNorm)


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """A model that the exporter can trace."""
    with _momenta_known(model), _attributes_kept(model), hooks_aside(model), _tensors_replaced(model, _as_parameter, buffers=False):
        yield


@contextlib.contextmanager
def dropping_channels(model: nn.Module, lacking: Sequence[bool]) -> Iterator[None]:
    """Let the model take, for inputs that lack channels, images of one channel: it is taken away before the model sees them.

    So labels ``[N, H, W]`` are images ``[N, 1, H, W]`` to everything else.
    """
    if not any(lacking):
        yield
        return
    with model.register_forward_pre_hook(_Dropping(lacking), prepend=True):
        yield


class _Dropping:
    """A hook of ours."""

    def __init__(self, lacking: Sequence[bool]) -> None:
        self._lacking = lacking

    def __call__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(value.squeeze(1) if lacks else value for value, lacks in zip(inputs, self._lacking, strict=True))


@contextlib.contextmanager
def on_fake_tensors(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """A model whose parameters and buffers are fake. (``functional_call`` loses the originals of modules that have two names.)"""
    with _tensors_replaced(model, mode.from_tensor, buffers=True), _attributes_kept(model):
        yield


@contextlib.contextmanager
def _tensors_replaced(model: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor], *, buffers: bool) -> Iterator[None]:
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
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back tensors that modules hold as plain attributes; hooks that compute a weight leave fake ones there."""
    held = [(module, {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}) for module in model.modules()]
    try:
        yield
    finally:
        for module, tensors in held:
            vars(module).update(tensors)


@contextlib.contextmanager
def hooks_aside(model: nn.Module) -> Iterator[None]:
    """Take the root's own hooks off: they run around each call of the compiled model, as they do in eager PyTorch, and not inside.

    Hooks for all modules (such as a FLOP counter's) would run on fake tensors, and are off as well.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    held = {name: vars(model)[name] for name in names}
    for name, hooks in held.items():
        vars(model)[name] = OrderedDict((key, hook) for key, hook in hooks.items() if isinstance(hook, (*NORMS_OF_WEIGHTS, _Dropping)))
    everywhere = [(hooks, dict(hooks)) for name, hooks in vars(nn.modules.module).items() if name in _GLOBAL]
    for hooks, _ in everywhere:
        hooks.clear()
    try:
        yield
    finally:
        vars(model).update(held)
        for hooks, content in everywhere:
            hooks.update(content)


@contextlib.contextmanager
def _momenta_known(model: nn.Module) -> Iterator[None]:
    """Give BatchNorms that average over all batches so far a number for their momentum, which would depend on a buffer's value."""
    # Out of training the momentum goes nowhere.
    averaging = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None and module.training
    ]
    try:
        for module in averaging:
            module.momentum = CUMULATIVE
        yield
    finally:
        for module in averaging:
            module.momentum = None
