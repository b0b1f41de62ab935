"""FLOP counter with the formulas of ``torch.utils.flop_counter``, without its sums by module; optionally with a byte meter.

Most operators have no formula. The rule of an operator is looked up once, not at each of the hundreds of thousands of calls of strips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import sft
from sft.common.memory import _DispatchMeter

__all__ = ["FlopMeter", "StepMeter"]


class FlopMeter(TorchDispatchMode):
    """FLOP counter, as a context.

    Attributes:
        flops: counted so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.flops = 0
        self._rules: dict[Any, tuple[Callable[..., int] | None, bool]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and disabling dynamo would take as long as counting

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = _rule_of(func)
        formula, is_composite = rule
        if is_composite:  # its decomposition has formulas
            with self:
                return func.decompose(*args, **kwargs)
        out = self._call(func, args, kwargs)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class StepMeter(FlopMeter):
    """Counter of FLOPs, and of bytes on the CPU with the meter of ``sft.measure_peak``, in one dispatch mode.

    Attributes:
        peak: the bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes = _DispatchMeter("cpu")
        self.peak = sft.Peak(device=torch.device("cpu"), _meter=self._bytes)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._bytes.call(func, args, kwargs)


def _rule_of(func: Any) -> tuple[Callable[..., int] | None, bool]:
    """An operator's formula, and True if it is decomposed instead, as torch does for operators without a kernel."""
    formula = flop_registry.get(getattr(func, "overloadpacket", None))
    if formula is not None or not isinstance(func, torch._ops.OpOverload):
        return formula, False
    keys = torch._C.DispatchKey
    has_kernel = func.has_kernel_for_dispatch_key
    return None, has_kernel(keys.CompositeImplicitAutograd) and not has_kernel(keys.CPU)
