"""What tells the running time of a program: a digest of its instructions, the same in every process.

Two programs of one digest call the same functions on tensors of the same shapes and types. Names of values and parameters are left out, so
equal blocks of a network share theirs. A program that calls something that can only be told by where it lies in memory has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from sft.lower.program import DEVICE, Program, Slot

__all__ = ["program_hash"]


class _UnnamedFunctionError(Exception):
    """Something has no name that another process would give it."""


def program_hash(program: Program) -> str | None:
    """The digest; ``None`` where there is none."""
    digest = hashlib.sha256()
    # Slots by the order in which they appear: what numbers they have depends on what else was lowered.
    numbers: dict[int, int] = {}
    try:
        for port, slot in program.ports.items():
            digest.update(f"{port.role} {_canonical_text(slot, numbers)}\n".encode())
        for instruction in program.instructions:
            values = (instruction.arguments, tuple(sorted(instruction.keywords.items())), instruction.outputs)
            texts = " ".join((_function_name(instruction.function), *(_canonical_text(value, numbers) for value in values)))
            frees = sorted(numbers.setdefault(number, len(numbers)) for number in instruction.frees)
            digest.update(f"{texts} {frees}\n".encode())
    except _UnnamedFunctionError:
        return None
    return digest.hexdigest()[:32]


def _function_name(function: Callable[..., Any]) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return str(function)
    owner = getattr(function, "__self__", None)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if name is None or "<" in name:  # made inside a function, or a lambda
        raise _UnnamedFunctionError
    bound = "" if owner is None or isinstance(owner, type(torch)) else _canonical_text(owner, {})
    return f"{module or ''}.{name}{bound}"


def _canonical_text(value: Any, numbers: dict[int, int]) -> str:
    if isinstance(value, Slot):
        number, root = (numbers.setdefault(each, len(numbers)) for each in (value.number, value.root))
        return f"%{number}/{root}:{value.shape}:{value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"({','.join(_canonical_text(item, numbers) for item in value)})"
    if value is DEVICE:
        return "device"
    found = repr(value)
    if " at 0x" in found:
        raise _UnnamedFunctionError
    return found
