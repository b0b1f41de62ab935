"""A file for streamed weights, as a wish."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sft.errors import InputError

__all__ = ["WeightsFile", "check_resume"]


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """Where the weights of a compiled model are to be: ``Options(weights=sft.WeightsFile("vgg.safetensors"))``.

    Attributes:
        path: the file, which each update replaces as a whole; twice its size must have room there.
        resume: take the weights, and the optimizer's state, of an existing file instead of the model's. Without it a file that exists is
            refused, with it one that does not; `resume=path.exists()` goes on where there is something to go on with.
        durable: whether each generation survives a loss of power.

    Raises:
        InputError: it is no path, or there is no such folder.
    """

    path: str | os.PathLike[str]
    resume: bool = False
    durable: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path) or isinstance(os.fspath(self.path), bytes):
            raise InputError(f"weights file {self.path!r}: give the path of a file")
        folder = os.path.dirname(os.path.abspath(self.path))
        if not os.path.isdir(folder):
            raise InputError(f"weights file {os.fspath(self.path)!r}: there is no folder {folder!r}; make it first")


def check_resume(path: str | os.PathLike[str], *, resume: bool) -> None:
    """Nobody's weights are replaced, and nobody begins anew who wants to go on.

    Raises:
        InputError: the file exists and is not to be gone on with, or the other way round.
    """
    exists = os.path.exists(path)
    if exists and not resume:
        raise InputError(f"{os.fspath(path)} exists; give resume=True to go on with its weights, or another path")
    if resume and not exists:
        raise InputError(
            f"resume=True, but there is no file {os.fspath(path)} to go on with; give its path, or leave resume out to begin one"
        )
