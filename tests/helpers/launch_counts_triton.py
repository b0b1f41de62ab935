"""Counts of launches and operators of kernel calls, on CPU tensors with kernels that do nothing, served by ``serve_triton``.

A job has a kernel ``call``, the name of its ``method`` and its ``arguments``. The result has the names of the kernels that the method
launches, in order, and the names of the operators that it dispatches, among them views.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import triton

from sft.common.torch_internals import TorchDispatchMode


class _Operators(TorchDispatchMode):
    """Recorder of the names of all dispatched operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.sft.kernel_flops.default:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def run(job: dict[str, Any]) -> dict[str, list[str]]:
    """Run one job."""
    launches: list[str] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(self.fn.__name__)

    operators = _Operators()
    with patch.object(triton.runtime.jit.JITFunction, "run", note), operators:
        getattr(job["call"], job["method"])(*job["arguments"])
    return {"launches": launches, "operators": operators.names}
