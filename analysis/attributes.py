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

from sft.analysis.leftovers import nothing_left, own_attributes
from sft.errors import UnsupportedError

__all__ = ["PLAIN", "Changes", "Watching", "attributes_kept", "attributes_set", "is_plain", "own_attributes", "told_apart"]

#: New values of plain attributes, by the module and the attribute's name.
Changes = dict[tuple[nn.Module, str], Any]

#: Types of values that are what they are: two of a type that are equal mean the same.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def told_apart(value: Any) -> Any:
    """What differs between plain values that are equal and not the same: 1, 1.0 and True, 0.0 and -0.0. NaN is the same as NaN.

    >>> told_apart(1) == told_apart(1.0), told_apart(0.0) == told_apart(-0.0), told_apart(float("nan")) == told_apart(float("nan"))
    (False, False, True)
    """
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[Changes]:
    """Put back what is set meanwhile; the dictionary gets what the first call changes plain attributes to, which were plain before."""
    watching = Watching([(module, {**_watched(module), **_contents(module)}) for module in model.modules()])
    with nothing_left(model), model.register_forward_pre_hook(watching), model.register_forward_hook(watching):
        yield watching.changes


class Watching:
    """A hook that looks at a model when its first call begins, and when it ends: the exporter puts numbers back itself.

    Whoever traces a model has other tensors in the place of its parameters by then.
    """

    def __init__(self, before: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
        self._before, self._is_over, self.changes = before, False, Changes()
        self._frozen: frozenset[str] = frozenset()

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], *outputs: Any) -> None:
        """Before the call, which has no outputs yet, and behind it."""
        if self._is_over:
            return
        if not outputs:
            self._frozen = _frozen(model)
            return
        self._is_over = True
        changed = sorted(self._frozen ^ _frozen(model))
        if changed:
            raise UnsupportedError(
                [
                    f"{name}: `forward` sets requires_grad of this parameter; set it outside of `forward`, before the call"
                    for name in changed
                ]
            )
        for module, before in self._before:
            for name, value in _watched(module).items():
                old = before.get(name, value)
                if value is not old and is_plain(value) and is_plain(old) and value != old:
                    self.changes[module, name] = copy(value)


@contextlib.contextmanager
def attributes_set(changes: Changes) -> Iterator[None]:
    """Other values of attributes."""
    held = {(module, name): vars(module)[name] for module, name in changes}
    try:
        for (module, name), value in changes.items():
            vars(module)[name] = value
        yield
    finally:
        for (module, name), value in held.items():
            vars(module)[name] = value


def _watched(module: nn.Module) -> dict[str, Any]:
    """The attributes that `forward` may set."""
    return {**dict(own_attributes(module)), "training": module.training}


def _frozen(model: nn.Module) -> frozenset[str]:
    """The parameters without a gradient."""
    return frozenset(name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad)


def _contents(module: nn.Module) -> Mapping[str, Any]:
    """What lists and dictionaries hold."""
    return {name: value.copy() for name, value in own_attributes(module) if type(value) in (list, dict)}


def is_plain(value: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether a value is plain, or a container of plain ones that does not contain itself."""
    if isinstance(value, (list, tuple, dict)):
        held = value.values() if isinstance(value, dict) else value
        return not any(value is other for other in around) and all(is_plain(item, (*around, value)) for item in held)
    return type(value) in PLAIN
