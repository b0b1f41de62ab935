"""Workspaces of cuBLAS and cuBLASLt: detection of their use, and their bytes.

PyTorch allocates a workspace for each handle of cuBLAS on each stream when that first multiplies matrices, and keeps it. On a Hopper GPU it
has 32 MiB. It is allocated before the tensors of the first program that multiplies, in a segment of its own. A training step has two, one
for each thread; recordings of CUDA graphs, on a stream of their own, have a third. Networks of convolutions need none. Products with a bias
are computed by cuBLASLt, with a workspace of 1 MiB for each handle on each stream.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from sft.common.torch_internals import OpOverload, TorchDispatchMode, multiplies_in_convolution
from sft.lower.program import Program
from sft.torch_runtime.device_pool import prepare_cublas

__all__ = ["CublasDetector", "blas_workspace_bytes", "lt_workspace_bytes", "uses_products"]

#: Operators that cuBLAS computes; other matrix products are decomposed into these.
_MATMUL_OPS = frozenset(
    [
        "mm",
        "addmm",
        "_addmm_activation",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "linear",
        "matmul",
        "_scaled_mm",
        "_trilinear",
        "_cdist_forward",
        "_cdist_backward",
    ]
)
_LINEAR_ALGEBRA = re.compile(r"_?linalg_(?!vector_norm)|.*(solve|cholesky|inverse|lstsq|lu_factor)")
_KIB = 2**10
_MIB = 2**20


class CublasDetector(TorchDispatchMode):
    """Mode that detects the use of cuBLAS by the names of operators, and by memory that PyTorch keeps.

    Args:
        device: device of the operators.

    Attributes:
        detected: true once cuBLAS was used.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.device, self.detected = device, False
        self._bytes_before = self._allocated_bytes()

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if not self.detected and (_is_product(name) or multiplies_in_convolution(name, args)):
            self.detected = True
            if self.device.type == "cuda":
                prepare_cublas(self.device)
        return func(*args, **(kwargs or {}))

    def note_growth(self) -> None:
        """Detect a workspace that was allocated since the detector was made; called when all other tensors are freed."""
        if self.device.type == "cuda" and self._allocated_bytes() - self._bytes_before >= blas_workspace_bytes(self.device):
            self.detected = True

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def uses_products(program: Program) -> bool:
    """True if a program calls an operator that cuBLAS computes, by its name."""
    return any(
        isinstance(instruction.function, OpOverload) and _is_product(instruction.function.__name__.partition(".")[0])
        for instruction in program.instructions
    )


def _is_product(name: str) -> bool:
    """True for the name of an operator that cuBLAS computes, without its overload."""
    return name in _MATMUL_OPS or bool(_LINEAR_ALGEBRA.match(name))


def blas_workspace_bytes(device: torch.device) -> int:
    """Workspace bytes that PyTorch gives cuBLAS for each thread on each stream, by PyTorch's own rule."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(size) * int(count) for size, count in sizes) * _KIB
    is_hopper = torch.cuda.get_device_capability(device)[0] >= 9
    return 32 * _MIB if is_hopper else 8 * _MIB + 128 * _KIB


def lt_workspace_bytes() -> int:
    """Workspace bytes that PyTorch gives cuBLASLt for each thread on each stream; 0 if it uses that of cuBLAS."""
    if os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1":
        return 0
    num_kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (int(num_kib) if num_kib.isdecimal() else 1024) * _KIB
