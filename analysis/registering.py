"""What `forward` does to the parameters, buffers and submodules that modules have registered.

The exporter sees that a buffer is another one where it is set as an attribute, or registered again, and its value is written at the end of
a call. It does not see what is put into ``_buffers``; that is set as an attribute here, behind the model. What `forward` makes, removes or
replaces otherwise would be gone after a call of the compiled model, with the numbers that it was made with; it is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sft.analysis.leftovers import REGISTRIES
from sft.errors import UnsupportedError

__all__ = ["check_registrations"]

_REGISTRY_KINDS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


@contextlib.contextmanager
def check_registrations(model: nn.Module) -> Iterator[None]:
    """While this is on, `forward` runs for the exporter.

    Raises:
        UnsupportedError: behind it, a parameter, buffer or submodule with such is new, gone, or another one.
    """
    modules = list(model.named_modules())
    before = {(path, registry): (module, dict(vars(module)[registry])) for path, module in modules for registry in REGISTRIES}
    yield
    problems = []
    for (path, registry), (module, known) in before.items():
        now: dict[str, Any] = vars(module)[registry]
        for name in dict.fromkeys((*known, *now)):
            old, new = known.get(name), now.get(name)
            if old is new:
                continue
            place = f"{path}.{name}" if path else name
            if registry == "_buffers" and _same_dtype_and_shape(old, new):
                setattr(module, name, new)
            elif _has_tensors(old) or _has_tensors(new):
                problems.append(_registration_problem(place, _REGISTRY_KINDS[registry], old, new))
    if problems:
        raise UnsupportedError(problems)


def _same_dtype_and_shape(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return old.dtype == new.dtype and old.dim() == new.dim() and all(a == b for a, b in zip(old.shape, new.shape, strict=True))


def _has_tensors(value: Any) -> bool:
    """Whether something is a tensor, or a module that has one."""
    if isinstance(value, nn.Module):
        return any(True for _ in (*value.parameters(), *value.buffers()))
    return value is not None


def _registration_problem(place: str, kind: str, old: Any, new: Any) -> str:
    if old is None:
        return (
            f"{place}: `forward` makes this {kind} when it first runs, and a compiled model would make it again at each call; make it in "
            "`__init__`, or call the model once before it is compiled"
        )
    if new is None:
        return f"{place}: `forward` removes this {kind}, and a compiled model has it at each call; remove it before it is compiled"
    if kind == "buffer":
        return (
            f"{place}: `forward` puts a buffer of another shape or dtype in the place of this one; keep it in an attribute, or make it anew"
        )
    return (
        f"{place}: `forward` puts another {kind} in the place of this one, which a compiled model would forget; do it outside of `forward`"
    )
