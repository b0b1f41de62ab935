"""Gates on the compiler's report of a launch, compiled ahead of time for GPUs that need not be present."""

from __future__ import annotations

import importlib.metadata
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.triton_process import compile_kernels

__all__ = ["Gate", "Registers", "check_gates", "in_fp32", "is_swept", "meta_image", "problems_of"]

#: Targets by the number in ``Gate.when``.
_TARGETS = {80: "sm_80", 90: "sm_90", 942: "gfx942"}
#: shared memory of one block
_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
#: Limits of registers by launch and target, for Triton 3.9. ``SFT_RECORD_REGISTERS=1`` raises or adds the compiled numbers, so a change of
#: a kernel shows its effect. Without a record, only spills are limited.
_RECORD = Path(__file__).parents[1] / "kernels" / "kernel_registers.json"
_RECORDED_WITH = "3.9."
#: largest number of bytes of a thread that kernels at the limit of 255 registers spill with earlier compilers
_SPILLS_OF_OLDER = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One launch, and limits of its kernel's code: no spills, at most the shared memory of a block, and at most the recorded registers."""

    #: of ``sft.kernels``
    module: str
    launch: str
    #: tensors may be on the meta device
    arguments: dict[str, Any]
    #: targets that ``make test`` compiles for: 80 and 90 for sm_80 and sm_90, 942 for gfx942; the sweep takes all
    when: tuple[int, ...] = ()
    #: targets that the kernel is for
    only: tuple[int, ...] = (80, 90, 942)
    #: products of matrices, by the instructions for them
    matrix: bool = False
    #: copies of 16 bytes to shared memory
    wide: bool = False
    #: none of those products has an operand that old assemblers for Hopper overwrite
    copied_operands: bool = False
    #: launch as on Hopper with such an old assembler
    affected: bool = False

    @property
    def label(self) -> str:
        """Text of a launch: operands with their types and channels, windows, and options."""
        parts = [self.launch]
        for name, value in sorted(self.arguments.items()):
            if isinstance(value, Tensor):
                parts.append(f"{name}={str(value.dtype).removeprefix('torch.')}:{'x'.join(map(str, value.shape[:2]))}")
            elif hasattr(value, "axes"):
                windows = [(axis.window.kernel, axis.window.stride, axis.window.dilation) for axis in value.axes]
                parts.append(f"{name}={','.join('/'.join(map(str, window)) for window in windows)}")
            elif isinstance(value, (bool, int, float, str)):
                parts.append(f"{name}={value}")
            elif value is not None:
                parts.append(name)
        return " ".join([*parts, *(["affected"] if self.affected else [])])


def meta_image(num_channels: int, dtype: torch.dtype, size: tuple[int, ...] = (256, 4096), num_samples: int = 1) -> Tensor:
    """A channels-last image or volume without memory, of the size of a large tile."""
    memory = torch.empty(num_samples, *size, num_channels, dtype=dtype, device="meta")
    return memory.permute(0, len(size) + 1, *range(1, len(size) + 1))


def in_fp32(gate: Gate, precision: str) -> Gate:
    """The same launch on fp32 in place of bfloat16, for the sweep."""
    wide = {name: value.float() for name, value in gate.arguments.items() if isinstance(value, Tensor) and value.dtype == torch.bfloat16}
    return replace(gate, when=(), arguments=gate.arguments | wide | {"precision": precision}, matrix=precision != "ieee", wide=False)


def is_swept() -> bool:
    """True if all kernels are compiled for all targets."""
    return os.environ.get("SFT_KERNEL_SWEEP") == "1"


def _targets(gate: Gate) -> list[str]:
    if not is_swept():
        return [_TARGETS[number] for number in gate.when]
    if gate.affected:
        return ["sm_90"]
    # AMD's compiler has no products of ten bits in three parts.
    has_tf32x3 = gate.arguments.get("precision") == "tf32x3"
    return [_TARGETS[number] for number in gate.only if number != 942 or not has_tf32x3]


class Registers:
    """Limits of registers by label and target: those of a file, raised to the compiled ones with ``SFT_RECORD_REGISTERS=1``.

    Args:
        path: the file.
        has_spills: True if the file also has limits of spilled bytes of a thread; otherwise the limit is 0.
    """

    def __init__(self, path: Path = _RECORD, *, has_spills: bool = False) -> None:
        self._path, self._has_spills = path, has_spills
        self._known: dict[str, dict[str, int]] = json.loads(path.read_text()) if path.exists() else {}
        self._is_newest = importlib.metadata.version("triton").startswith(_RECORDED_WITH)

    def limit(self, label: str, target: str, compiled: int) -> int:
        """Largest number of registers; that of the hardware without a record, or with another Triton."""
        known = self._raised(label, target, compiled)
        return known if self._is_newest and known is not None else 512

    def spills_limit(self, label: str, target: str, compiled: int) -> int:
        """Largest number of bytes that a thread may spill."""
        known = self._raised(label, f"{target} spilled bytes", compiled) if self._has_spills and compiled else None
        return max(known or 0, 0 if self._is_newest else _SPILLS_OF_OLDER)

    def _raised(self, label: str, name: str, compiled: int) -> int | None:
        if os.environ.get("SFT_RECORD_REGISTERS") == "1":
            own = self._known.setdefault(label, {})
            own[name] = max(own.get(name, 0), compiled)
        return self._known.get(label, {}).get(name)

    def save(self) -> None:
        """Write the new limits, if recording is on."""
        if os.environ.get("SFT_RECORD_REGISTERS") == "1":
            self._path.write_text(json.dumps(dict(sorted(self._known.items())), indent=1) + "\n")


def problems_of(
    label: str,
    target: str,
    cost: dict[str, int],
    registers: Registers,
    *,
    matrix: bool,
    wide: bool = False,
    copied_operands: bool = False,
    fills_warp_groups: bool = True,
) -> list[str]:
    """Violations of a gate by a kernel's code; the flags as of a `Gate`.

    Args:
        fills_warp_groups: True if products have the 64 rows of those of warp groups.
    """
    is_nvidia = target.startswith("sm_")
    bound = registers.limit(label, target, cost["registers"])
    wrong = {
        "no code": cost["binary_bytes"] == 0,
        "spills": cost["spilled_bytes"] > registers.spills_limit(label, target, cost["spilled_bytes"]),
        "too much shared memory": cost["shared_bytes"] > _SHARED_BYTES[target],
        "matrix instructions": is_nvidia and (cost["matrix_instructions"] > 0) != matrix,
        "no wgmma": target == "sm_90" and fills_warp_groups and cost["matrix_instructions"] != cost["warp_group_instructions"],
        "no wide copies": is_nvidia and wide and cost["wide_copies"] == 0,
        "computed operands": target == "sm_90" and copied_operands and cost["computed_operands"] > 0,
        f"more registers than the {bound} that were recorded": cost["registers"] > bound,
    }
    return [f"{target} {label}: {name}; {cost}" for name, is_wrong in wrong.items() if is_wrong]


def check_gates(gates: list[Gate], folder: Path) -> None:
    """Compile the gates' launches, for all targets if ``SFT_KERNEL_SWEEP=1``, and report all violations.

    The sweep also compiles each product for Hopper with an assembler that overwrites computed operands: it has none then.
    """
    old = [gate for gate in gates if gate.matrix and not gate.affected and "variant" not in gate.arguments] if is_swept() else []
    affected = [replace(gate, affected=True, wide=False) for gate in old]
    cases = [(gate, target) for gate in [*gates, *affected] for target in _targets(gate)]
    jobs = [
        {"module": f"sft.kernels.{gate.module}", "launch": gate.launch, "arguments": gate.arguments}
        | {"target": target, "affected": gate.affected}
        for gate, target in cases
    ]
    problems, registers = [], Registers()
    for (gate, target), cost in zip(cases, compile_kernels(jobs, folder), strict=True):
        facts = {"matrix": gate.matrix and not _is_exact(gate), "wide": gate.wide, "copied_operands": gate.copied_operands or gate.affected}
        problems += problems_of(gate.label, target, cost, registers, **facts)
    registers.save()
    assert not problems, "\n".join(problems)


def _is_exact(gate: Gate) -> bool:
    """True if products in three parts have become exact ones, by other instructions."""
    return gate.affected and gate.arguments.get("precision") in ("tf32x3", "bf16x3")
