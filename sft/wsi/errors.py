"""Errors of a training run, in addition to those of `sft.common.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from sft.common.errors import InputError, SftError, SourceError, first_problems

__all__ = ["DatasetError", "RunFolderError", "RunInterrupted", "TrainingError"]


class DatasetError(InputError):
    """Invalid slide table, or invalid file that it names.

    Args:
        where: path of the table.
        problems: one line each, with the remedy; the message has the first twenty.
    """

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems):,} problem" + ("s" if len(self.problems) > 1 else "")
        super().__init__(f"{where}: {count}\n" + "\n".join(f"  - {line}" for line in first_problems(self.problems)))

    def __reduce__(self) -> tuple[type[DatasetError], tuple[str, tuple[str, ...]]]:
        return DatasetError, (str(self).split(":", 1)[0], self.problems)


class RunFolderError(SourceError):
    """The folder of a run cannot be used: read-only, full, in use, or of another run."""


class TrainingError(SftError):
    """Training cannot continue, such as when the loss is not a number."""


class RunInterrupted(SftError):
    """The run was stopped by a signal (SIGTERM, SIGINT), has saved its state, and resumes when it is started again."""
