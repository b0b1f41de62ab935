"""What `forward` sets of its modules' attributes while it is traced, and what that means for later calls.

A trace runs `forward` once, on tensors that do not exist; whatever it leaves in attributes is no use to anybody and is taken back. A size
that is kept there, or a feature map to look at, changes nothing in what is computed. A counter may, or a submodule that is put into another
mode: then the next call computes something else, which a captured graph cannot. So where numbers or strings have changed the model is
traced again as it would be then. Parameters that `forward` freezes, or thaws, would be differentiated as before; that is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from sft.analysis.leftovers import preserve_model_state, user_attributes
from sft.errors import UnsupportedError

__all__ = [
    "PLAIN_TYPES",
    "AttributeChanges",
    "AttributeChangeHook",
    "preserve_attributes",
    "override_attributes",
    "is_plain",
    "user_attributes",
    "exact_key",
]

#: New values of plain attributes, by the module and the attribute's name.
AttributeChanges = dict[tuple[nn.Module, str], Any]

#: Types of values that are what they are: two of a type that are equal mean the same.
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def exact_key(value: Any) -> Any:
    """What differs between plain values that are equal and not the same: 1, 1.0 and True, 0.0 and -0.0. NaN is the same as NaN.

    >>> exact_key(1) == exact_key(1.0), exact_key(0.0) == exact_key(-0.0), exact_key(float("nan")) == exact_key(float("nan"))
    (False, False, True)
    """
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


@contextlib.contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[AttributeChanges]:
    """Put back what is set meanwhile; the dictionary gets what the first call changes plain attributes to, which were plain before."""
    watching = AttributeChangeHook([(module, {**_mutable_attributes(module), **_container_copies(module)}) for module in model.modules()])
    with preserve_model_state(model), model.register_forward_pre_hook(watching), model.register_forward_hook(watching):
        yield watching.changes


class AttributeChangeHook:
    """A hook that looks at a model when its first call begins, and when it ends: the exporter puts numbers back itself.

    Whoever traces a model has other tensors in the place of its parameters by then.
    """

    def __init__(self, before: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
        self._before, self._is_over, self.changes = before, False, AttributeChanges()
        self._frozen: frozenset[str] = frozenset()

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], *outputs: Any) -> None:
        """Before the call, which has no outputs yet, and behind it."""
        if self._is_over:
            return
        if not outputs:
            self._frozen = _frozen_parameter_names(model)
            return
        self._is_over = True
        changed = sorted(self._frozen ^ _frozen_parameter_names(model))
        if changed:
            raise UnsupportedError(
                [
                    f"{name}: `forward` sets requires_grad of this parameter; set it outside of `forward`, before the call"
                    for name in changed
                ]
            )
        for module, before in self._before:
            for name, value in _mutable_attributes(module).items():
                old = before.get(name, value)
                if value is not old and is_plain(value) and is_plain(old) and value != old:
                    self.changes[module, name] = copy(value)


@contextlib.contextmanager
def override_attributes(changes: AttributeChanges) -> Iterator[None]:
    """Other values of attributes."""
    held = {(module, name): vars(module)[name] for module, name in changes}
    try:
        for (module, name), value in changes.items():
            vars(module)[name] = value
        yield
    finally:
        for (module, name), value in held.items():
            vars(module)[name] = value


def _mutable_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that `forward` may set."""
    return {**dict(user_attributes(module)), "training": module.training}


def _frozen_parameter_names(model: nn.Module) -> frozenset[str]:
    """The parameters without a gradient."""
    return frozenset(name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad)


def _container_copies(module: nn.Module) -> Mapping[str, Any]:
    """What lists and dictionaries hold."""
    return {name: value.copy() for name, value in user_attributes(module) if type(value) in (list, dict)}


def is_plain(value: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether a value is plain, or a container of plain ones that does not contain itself."""
    if isinstance(value, (list, tuple, dict)):
        held = value.values() if isinstance(value, dict) else value
        return not any(value is other for other in around) and all(is_plain(item, (*around, value)) for item in held)
    return type(value) in PLAIN_TYPES
