"""Error classes of sft, grouped by the party that has to act: the caller, the model's author, or sft.

Each message has three parts: the request, the numbers, and the change that helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sft.common.problem_lists import first_problems

__all__ = ["BudgetError", "InputError", "InternalError", "RankError", "SftError", "SkipSlideError", "SourceError", "UnsupportedError"]


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


class BudgetError(SftError, MemoryError):
    """No plan fits the byte budget.

    Args:
        message: the budget, the bytes needed, the segment that needs them, and a remedy.
        needed_bytes: bytes of the smallest plan that was tried.
    """

    def __init__(self, message: str, *, needed_bytes: int = 0) -> None:  # the default serves unpickling, which sets it afterwards
        self.needed_bytes = needed_bytes
        super().__init__(message)


class InputError(SftError, ValueError):
    """An argument of the caller is invalid: rank, dtype, device, size, option."""


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
