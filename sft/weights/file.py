"""A file for streamed weights, as a wish."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sft.errors import InputError

__all__ = ["WeightsFile"]


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """Where the weights of a compiled model are to be: ``Options(weights=sft.WeightsFile("vgg.safetensors"))``.

    Attributes:
        path: the file, which each update replaces as a whole; twice its size must have room there.
        resume: take the weights, and the optimizer's state, of an existing file instead of the model's; without it a file that exists is
            refused.
        durable: whether each generation survives a loss of power.

    Raises:
        InputError: there is no such folder.
    """

    path: str | os.PathLike[str]
    resume: bool = False
    durable: bool = True

    def __post_init__(self) -> None:
        folder = os.path.dirname(os.path.abspath(self.path))
        if not os.path.isdir(folder):
            raise InputError(f"weights file {os.fspath(self.path)!r}: there is no folder {folder!r}; make it first")
