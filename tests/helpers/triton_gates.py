"""What the assembler must say of a launch, compiled ahead of time for GPUs that need not be there."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .triton_process import compile_kernels

__all__ = ["Gate", "check_gates", "in_fp32", "is_swept", "meta_image"]

#: dynamic shared memory of one block
_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One launch, and what its kernel's code must be like: never spills, never more shared memory than a block may have."""

    #: of ``sft.kernels``
    module: str
    launch: str
    #: tensors may be on the meta device
    arguments: dict[str, Any]
    #: compute capabilities that ``make test`` compiles for; the sweep takes both
    when: tuple[int, ...] = ()
    #: products of matrices, by the instructions for them
    matrix: bool = False
    #: copies of 16 bytes to shared memory
    wide: bool = False
    #: of those products none has an operand that old assemblers for Hopper overwrite
    copied_operands: bool = False


def meta_image(num_channels: int, dtype: torch.dtype, size: tuple[int, ...] = (256, 4096), num_samples: int = 1) -> Tensor:
    """A channels-last image or volume without memory: what a large tile would be."""
    memory = torch.empty(num_samples, *size, num_channels, dtype=dtype, device="meta")
    return memory.permute(0, len(size) + 1, *range(1, len(size) + 1))


def in_fp32(gate: Gate, precision: str) -> Gate:
    """The same launch on fp32 in place of bfloat16, for the sweep."""
    wide = {name: value.float() for name, value in gate.arguments.items() if isinstance(value, Tensor) and value.dtype == torch.bfloat16}
    return replace(gate, when=(), arguments=gate.arguments | wide | {"precision": precision}, matrix=precision != "ieee", wide=False)


def is_swept() -> bool:
    """Whether all is compiled for all targets."""
    return os.environ.get("SFT_KERNEL_SWEEP") == "1"


def check_gates(gates: list[Gate], folder: Path) -> None:
    """Compile the gates' launches, for all targets if ``SFT_KERNEL_SWEEP=1``, and say all that is wrong with the code."""
    cases = [(gate, capability) for gate in gates for capability in ((80, 90) if is_swept() else gate.when)]
    jobs = [
        {"module": f"sft.kernels.{gate.module}", "launch": gate.launch, "arguments": gate.arguments, "capability": capability}
        for gate, capability in cases
    ]
    problems = []
    for (gate, capability), cost in zip(cases, compile_kernels(jobs, folder), strict=True):
        wrong = {
            "no code": cost["cubin_bytes"] == 0,
            "spills": cost["spilled_bytes"] > 0,
            "too much shared memory": cost["shared_bytes"] > _SHARED_BYTES[capability],
            "matrix instructions": (cost["matrix_instructions"] > 0) != gate.matrix,
            "no wide copies": gate.wide and cost["wide_copies"] == 0,
            "computed operands": gate.copied_operands and capability == 90 and cost["computed_operands"] > 0,
        }
        described = {name: str(value.dtype) if isinstance(value, Tensor) else value for name, value in gate.arguments.items()}
        problems += [f"sm_{capability} {gate.launch}: {name}; {cost}; {described}" for name, is_wrong in wrong.items() if is_wrong]
    assert not problems, "\n".join(problems)
