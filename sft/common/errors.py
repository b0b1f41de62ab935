"""Every error that sft raises on purpose, sorted by whose move it is.

Each message has three parts: what was asked, the numbers, and what to change.
"""

from __future__ import annotations

__all__ = ["BudgetError", "InputError", "InternalError", "RankError", "SftError", "SkipSlideError", "SourceError", "UnsupportedError"]


class SftError(Exception):
    """Base class of every error that sft raises on purpose."""


class UnsupportedError(SftError):
    """The model holds an operator, or a form of one, that has no exact rule.

    Args:
        problems: one line for each offending operator: module path, operator, and what to do.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("this model cannot be compiled exactly:\n" + "\n".join(f"  - {line}" for line in problems))


class BudgetError(SftError, MemoryError):
    """No plan fits the byte budget.

    Args:
        message: what was asked, what is needed, the segment that needs it, and what to change.
        needed_bytes: what the smallest plan found needs.
    """

    def __init__(self, message: str, *, needed_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        super().__init__(message)


class InputError(SftError, ValueError):
    """The caller's argument is wrong: rank, dtype, device, size, option."""


class SourceError(SftError, OSError):
    """A file behind an image, a gradient or an output cannot be read or written."""


class SkipSlideError(SourceError):
    """A slide cannot be read, and was opened with ``on_error="skip"``: a training loop catches this and leaves the slide out."""


class RankError(SftError, RuntimeError):
    """Another rank of the mesh failed, or does not answer: the step is given up on all of them.

    Args:
        message: which rank, why, what was kept, and what to do.
        cause: the rank and why alone, as all ranks are told it. Default: the message
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        self.cause = message if cause is None else cause
        super().__init__(message)


class InternalError(SftError):
    """A promise that sft makes to itself is broken; please report it."""
