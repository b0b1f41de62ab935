"""Programs as plain data, independent of the names of slots."""

from __future__ import annotations

from typing import Any

from sft.lower.program import Instruction, Program, Slot

__all__ = ["described"]


def described(program: Program) -> Any:
    """A program with slots numbered by first appearance."""
    numbers: dict[int, int] = {}

    def number(slot_number: int) -> int:
        return numbers.setdefault(slot_number, len(numbers))

    def value(item: Any) -> Any:
        if isinstance(item, Slot):
            return ("slot", number(item.number), number(item.root), item.shape, item.dtype)
        if isinstance(item, (tuple, list)):
            return (type(item), *map(value, item))
        if isinstance(item, dict):
            return tuple((key, value(content)) for key, content in item.items())
        return item

    def line(i: Instruction) -> Any:
        called = (getattr(i.function, "__self__", None), getattr(i.function, "__func__", i.function))
        slots = tuple(map(value, (i.arguments, i.keywords, i.outputs, i.writes)))
        return (*called, *slots, i.flops, i.num_bytes, i.scratch_bytes, i.owner, sorted(map(number, i.frees)), i.freed_bytes)

    ports = value(program.ports)
    lines = [line(instruction) for instruction in program.instructions]
    sums = (
        list(program.result_bytes.items()),
        sorted(map(number, program.residuals)),
        program.peak_bytes,
        program.end_bytes,
        program.flops,
    )
    return ports, lines, value(program.results), sums
