"""Steps: the instructions of a program, prepared for many runs.

An instruction has slots in nested arguments. To replace them by tensors takes longer than many a call takes on the host. A step has them
resolved as far as possible:

- values are in one dictionary: tensors by the number of their slot, constants by negative numbers;
- arguments without lists are read by one :class:`operator.itemgetter`, which runs in C.

For example ``cat((s3, s5), 1)`` becomes ``cat(*[[values[3], values[5]], values[-2]])`` and ``add(s3, s5)`` becomes ``add(*get(values))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from sft.lower.program import DEVICE, Instruction, Program, Slot

__all__ = ["PreparedProgram", "Step", "prepared_program"]

#: Values by number.
_Values = Mapping[int, Any]
_DEVICE_NUMBER = -1


class Step(NamedTuple):
    """An instruction with functions that read its arguments.

    Attributes:
        function: the callable.
        read: reads the positional arguments from the values.
        read_keywords: reads the keyword arguments; ``None`` if there are none.
        results: numbers of the results; ``None`` for one that is dropped.
        frees: numbers of the values to drop afterwards.
        instruction: the instruction.
    """

    function: Callable[..., Any]
    read: Callable[[_Values], Sequence[Any]]
    read_keywords: Callable[[_Values], dict[str, Any]] | None
    results: tuple[int | None, ...]
    frees: tuple[int, ...]
    instruction: Instruction


class PreparedProgram(NamedTuple):
    """The steps of a program and their constants.

    Attributes:
        steps: one for each instruction.
        constants: constant arguments, by negative numbers.
    """

    steps: tuple[Step, ...]
    constants: dict[int, Any]

    def values(self, device: torch.device) -> dict[int, Any]:
        """The values before a run on a device: constants."""
        return self.constants | {_DEVICE_NUMBER: device}


def prepared_program(program: Program) -> PreparedProgram:
    """The steps of a program, made at the first call and kept with it."""
    prepared = program.prepared
    if prepared is None:
        prepared = _prepare(program.instructions)
        object.__setattr__(program, "prepared", prepared)
    return prepared


def _prepare(instructions: Iterable[Instruction]) -> PreparedProgram:
    constants: dict[int, Any] = {}
    steps = []
    for instruction in instructions:
        read = _reader([_number(value, constants) for value in instruction.arguments])
        numbers = {key: _number(value, constants) for key, value in instruction.keywords.items()}
        read_keywords = _keyword_reader(numbers) if numbers else None
        results = tuple(None if slot is None else slot.number for slot in instruction.outputs)
        steps.append(Step(instruction.function, read, read_keywords, results, instruction.frees, instruction))
    return PreparedProgram(tuple(steps), constants)


#: The number of a value, or those of the items of a list.
_Number = int | list[Any]


def _number(value: Any, constants: dict[int, Any]) -> _Number:
    """The number of an argument; constants are added."""
    if type(value) is Slot:
        return value.number
    if value is DEVICE:
        return _DEVICE_NUMBER
    if type(value) is tuple:
        if _has_values(value):
            return [_number(item, constants) for item in value]
        value = _as_lists(value)
    number = _DEVICE_NUMBER - 1 - len(constants)
    constants[number] = value
    return number


def _has_values(value: tuple[Any, ...]) -> bool:
    """True if a tuple contains tensors or the device."""
    return any(type(item) is Slot or item is DEVICE or (type(item) is tuple and _has_values(item)) for item in value)


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if type(value) is tuple else value


def _reader(numbers: Sequence[_Number]) -> Callable[[_Values], Sequence[Any]]:
    """A function that reads the values of these numbers."""
    keys = [number for number in numbers if isinstance(number, int)]
    if len(keys) < len(numbers):
        readers = [_value_reader(number) for number in numbers]
        return lambda values: [read(values) for read in readers]
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda values: [values[key] for key in keys]


def _value_reader(number: _Number) -> Callable[[_Values], Any]:
    """A function that reads one value, or a list of values."""
    if isinstance(number, int):
        return itemgetter(number)
    read = _reader(number)
    return lambda values: [*read(values)]


def _keyword_reader(numbers: Mapping[str, _Number]) -> Callable[[_Values], dict[str, Any]]:
    readers = [(key, _value_reader(number)) for key, number in numbers.items()]
    return lambda values: {key: read(values) for key, read in readers}
