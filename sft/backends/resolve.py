"""Resolution of ``Options.backend`` to the backend of a device.

- ``"aten"``: PyTorch's operators alone. On a GPU a convolution and its ReLU are one call of cuDNN (:mod:`sft.backends.library_fusion`),
  with every choice of backend.
- ``"triton"``: every kernel that computes the same as the operators that it replaces. Without a GPU this is for tests, under Triton's
  interpreter.
- ``"auto"``: the kernels that were measured to be faster, and verified, on this GPU with this Triton (:mod:`sft.backends.autotune.table`),
  in plans that they make faster (:mod:`sft.planner.measured.fitted_plan`). Without measurements it is ``"aten"``. An H200 has some that
  come with the library.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sft.backends.autotune.benchmark import compiler_version
from sft.backends.autotune.table import TableSelector, known_table
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.backends.selector import AlwaysKernel, KernelSelector
from sft.common.errors import InputError
from sft.common.installation import install_command
from sft.kernels.common import has_triton
from sft.lower.context import Backend

__all__ = ["allows_tf32", "backend_for", "check_triton", "computes_operands", "runs_kernels"]

#: Lowest compute capability of the GPUs that the kernels are written for: older GPUs lack the matrix instructions.
_MIN_CAPABILITY = (8, 0)


def backend_for(name: str, device: torch.device, folders: Sequence[Path] = (), device_type: str = "") -> Backend | None:
    """The backend of a device; ``None`` for ATen's operators one by one.

    Args:
        name: ``"auto"``, ``"aten"`` or ``"triton"``.
        device: device of the programs. The meta device runs no program; a GPU is assumed.
        folders: folders of measured tables, searched in this order.
        device_type: kind of device that programs on the meta device are planned for; empty for the kind of ``device``.

    Raises:
        InputError: ``"triton"`` on a device that runs no kernels.
    """
    is_cuda = (device_type or device.type) == "cuda"
    fusion_device = FusionDevice(device if device.type == "cuda" else None) if is_cuda else None
    selector: KernelSelector | None = None
    if name == "triton":
        check_triton(device)
        selector = AlwaysKernel(allows_tf32=allows_tf32(device))
    elif name == "auto" and device.type == "cuda" and has_triton():
        table = known_table(folders, torch.cuda.get_device_name(device), compiler_version(device))
        selector = None if table is None else TableSelector(table=table, allows_tf32=allows_tf32(device))
    if selector is None:
        return None if fusion_device is None else KernelBackend(selector=None, fusion_device=fusion_device)
    return KernelBackend(selector=selector, computes_operands=computes_operands(device), fusion_device=fusion_device)


def runs_kernels(device: torch.device) -> bool:
    """True on devices that run kernels: CUDA devices, and the CPU under Triton's interpreter."""
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return has_triton() and (device.type == "cuda" or is_interpreted)


def check_triton(device: torch.device) -> None:
    """Check that ``backend="triton"`` is possible on a device; warn if it is slow.

    Raises:
        InputError: Triton is not installed, or the device runs no kernels.
    """
    if device.type == "meta":
        return
    if not has_triton():
        raise InputError(f'backend "triton": Triton is not installed; {install_command("triton")}, or choose "aten"')
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError(
            f'backend "triton" on {device}: kernels need a CUDA device; move the model there, choose "aten", or set TRITON_INTERPRET=1 '
            "before Triton is imported to try them slowly"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        warnings.warn(
            f'backend "triton" on {torch.cuda.get_device_name(device)}: kernels are right there, and slow, as they are written for GPUs of '
            'compute capability 8.0 and above; "auto" takes PyTorch\'s operators',
            stacklevel=2,
        )


def allows_tf32(device: torch.device) -> bool:
    """True if convolutions may round fp32 operands to ten bits, as is PyTorch's default on a GPU.

    ``torch.backends.cudnn.allow_tf32`` and ``torch.backends.cudnn.conv.fp32_precision`` switch it. A precision of ``"none"`` is inherited:
    from cuDNN's, and that one from PyTorch's. Kernels are selected when a network is compiled.
    """
    if device.type != "cuda":
        return False
    cudnn: Any = torch.backends.cudnn
    precisions = (cudnn.conv.fp32_precision, cudnn.fp32_precision, torch.backends.fp32_precision)  # type: ignore[attr-defined]
    return next((precision for precision in precisions if precision != "none"), "none") == "tf32"


def computes_operands(device: torch.device) -> bool:
    """True if matrix products of operands that a kernel computes come out right on the device."""
    if device.type != "cuda":
        return True
    from sft.kernels.common_triton import can_compute_operands  # not above: it imports Triton

    return can_compute_operands(device)
