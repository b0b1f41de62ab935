"""What can go wrong in a training run, beside what `sft.common.errors` already names."""

from __future__ import annotations

from collections.abc import Sequence

from sft.common.errors import InputError, SftError, SourceError

__all__ = ["DatasetError", "RunFolderError", "RunInterrupted", "TrainingError"]


class DatasetError(InputError):
    """The table of slides, or a file that it names, is wrong.

    Args:
        where: the table.
        problems: all that was found, one line each, with what to change.
    """

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) > 1 else "")
        super().__init__(f"{where}: {count}\n" + "\n".join(f"  - {line}" for line in self.problems))

    def __reduce__(self) -> tuple[type[DatasetError], tuple[str, tuple[str, ...]]]:
        return DatasetError, (str(self).split(":", 1)[0], self.problems)


class RunFolderError(SourceError):
    """The folder of a run cannot be used: read-only, full, in use, or of another run."""


class TrainingError(SftError):
    """Training cannot go on, such as when the loss is no number."""


class RunInterrupted(SftError):
    """The run was asked to end (SIGTERM, SIGINT), has saved its state, and goes on when it is started again."""
