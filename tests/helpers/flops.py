"""Counting FLOPs as ``torch.utils.flop_counter`` does, by its formulas, without its sums by module.

Most operators have no formula; what to do with one is decided once, not at every call. Our strips call hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["FlopMeter"]


class FlopMeter(TorchDispatchMode):
    """Counts while it is on.

    Attributes:
        flops: counted so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.flops = 0
        self._rules: dict[Any, tuple[Callable[..., int] | None, bool]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = _rule_of(func)
        formula, is_composite = rule
        if is_composite:  # its parts have formulas
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


def _rule_of(func: Any) -> tuple[Callable[..., int] | None, bool]:
    """An operator's formula, and whether it is taken apart instead."""
    formula = flop_registry.get(getattr(func, "overloadpacket", None))
    if formula is not None or not isinstance(func, torch._ops.OpOverload):
        return formula, False
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return None, bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
