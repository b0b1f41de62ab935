"""Error classes of sft, grouped by the party that has to act: the caller, the model's author, or sft.

Each message has three parts: the request, the numbers, and the change that helps. Of a list of problems
a message has the first twenty, and how many follow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

__all__ = [
    "BudgetError",
    "InputError",
    "InputIndexError",
    "InputRuntimeError",
    "InputTypeError",
    "InternalError",
    "MissingValuesError",
    "RankError",
    "SftError",
    "SkipSlideError",
    "SourceError",
    "UnsupportedError",
    "first_problems",
    "input_error_of",
    "reason_text",
    "refusal_of_values",
    "some_names",
    "typed",
]

_NUM_SHOWN = 20


class SftError(Exception):
    """Base class of every error that sft raises on purpose."""


class UnsupportedError(SftError):
    """The model contains an operator, or a variant of one, without an exact rule.

    Args:
        problems: one line per operator: module path, operator, and remedy; the message has the first twenty.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        # Pickles of version 0.1.0 pass the finished message.
        is_message = isinstance(problems, str)
        super().__init__(
            problems if is_message else "this model cannot be compiled exactly:\n" + "\n".join(f"  - {p}" for p in first_problems(problems))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class MissingValuesError(UnsupportedError):
    """``forward`` reads values of a tensor on the meta device, which has none."""


class BudgetError(SftError, MemoryError):
    """No plan fits the byte budget.

    Args:
        message: the budget, the bytes needed, the segment that needs them, and remedies.
        needed_bytes: bytes of the smallest plan that was tried.
        problem: the message without remedies; empty if ``remedies`` is.
        remedies: changes that may help (`sft.planner.remedies`), from which a command line writes its own message.
    """

    # The defaults serve unpickling, which sets the attributes afterwards.
    def __init__(self, message: str, *, needed_bytes: int = 0, problem: str = "", remedies: tuple[Any, ...] = ()) -> None:
        self.needed_bytes, self.problem, self.remedies = needed_bytes, problem, remedies
        super().__init__(message)


class InputError(SftError, ValueError):
    """An argument of the caller is invalid: rank, dtype, device, size, option."""


class InputRuntimeError(InputError, RuntimeError):
    """An operator of the model raises a RuntimeError for inputs of these shapes or dtypes."""


class InputTypeError(InputError, TypeError):
    """An operator of the model raises a TypeError for inputs of these shapes or dtypes."""


class InputIndexError(InputError, IndexError):
    """An operator of the model raises an IndexError for inputs of these shapes or dtypes."""


def input_error_of(cause: type[BaseException], message: str) -> InputError:
    """An input error that is an instance of the class of its cause as well."""
    for error_class in (InputRuntimeError, InputTypeError, InputIndexError):
        if issubclass(cause, error_class.__bases__[1]):
            return error_class(message)
    return InputError(message)


#: Words of torch's errors about values that an operator does not take.
_VALUE_WORDS = ("out of bounds", "out of range", "out of DATA bounds", "Class values must be", "between 0 and 1")


def refusal_of_values(error: Exception, operator: str) -> InputError | None:
    """The error of an operator about the values of its operands (a label that is not a class) as an input error; else ``None``."""
    message = str(error).strip().rstrip(".")
    if not any(word in message for word in _VALUE_WORDS):
        return None
    hint = "check the labels, indices or probabilities that the inputs hold; labels and indices count from 0"
    return input_error_of(type(error), f"{operator}: {message}; {hint}")


class SourceError(SftError, OSError):
    """The file of an image, a gradient or an output cannot be read or written."""


class SkipSlideError(SourceError):
    """A slide cannot be read and was opened with ``on_error="skip"``: training loops catch this error and leave the slide out."""


class RankError(SftError, RuntimeError):
    """Another rank of the mesh failed or does not respond: the step is abandoned on all ranks.

    Args:
        message: the rank, the reason, the state that is kept, and a remedy.
        cause: the rank and the reason only, as sent to all ranks. Default: the message
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        self.cause = message if cause is None else cause
        super().__init__(message)


class InternalError(SftError):
    """An internal invariant of sft is violated; please report it."""


def reason_text(error: BaseException) -> str:
    """Text of an error of another library as part of a sentence, without its full stop.

    >>> reason_text(ValueError("Bad magic number."))
    'Bad magic number'
    """
    return str(error).rstrip(". \n")


def first_problems(problems: Sequence[str]) -> list[str]:
    """The first problems, and a line that counts the others.

    >>> first_problems([f"line {number}" for number in range(2500)])[19:]
    ['line 19', 'and 2,480 more']
    """
    num_omitted = len(problems) - _NUM_SHOWN
    return [*problems[:_NUM_SHOWN], *([f"and {num_omitted:,} more"] if num_omitted > 0 else [])]


def some_names(names: Collection[object]) -> str:
    """Names with commas between them, the first twenty and a count.

    >>> some_names(["a", 1]), some_names(range(25))[-14:]
    ('a, 1', '19, and 5 more')
    """
    return ", ".join(first_problems([*map(str, islice(names, _NUM_SHOWN)), *([""] * (len(names) - _NUM_SHOWN))]))


def typed(value: object) -> str:
    """The type of a value with its article.

    >>> typed(3), typed([])
    ('an int', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"
