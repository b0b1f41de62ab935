"""Locations in the model's source (``monai/losses/utils.py:45``), for messages."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch

__all__ = [
    "ANALYSIS_FOLDER",
    "CodeLine",
    "called_function",
    "current_line",
    "current_location",
    "error_line",
    "error_location",
    "is_distributions_error",
]

#: Folder of the capture's own code.
ANALYSIS_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_TORCH_FOLDER = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_DISTRIBUTIONS_FOLDER = os.path.join(_TORCH_FOLDER, "distributions") + os.sep
_FUNCTIONAL_FILE = os.path.join(_TORCH_FOLDER, "nn", "functional.py")
_PYTHON_FOLDER = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of the user's code.

    Attributes:
        location: file and line number; the file with the folders of its package, or with its own folder.
        text: the code; empty where the file is not readable.
    """

    location: str
    text: str

    @classmethod
    def of(cls, filename: str, number: int) -> CodeLine:
        """The line of a file."""
        return cls(f"{_short_path(filename)}:{number}", linecache.getline(filename, number).strip())

    def __str__(self) -> str:
        return f"{self.location} (`{self.text}`)" if self.text else self.location


def _short_path(filename: str) -> str:
    """A file with the folders of its package, or with its own folder: ``monai/losses/utils.py``, ``project/net.py``."""
    path = Path(os.path.realpath(filename))
    top = path.parent
    while (top / "__init__.py").is_file() and top.parent != top:
        top = top.parent
    return str(path.relative_to(top if top != path.parent else path.parent.parent).as_posix())


def error_location(error: BaseException) -> str:
    """The last line of the user's code in an error's traceback, and the function of ``torch.nn.functional`` that it called.

    For example ``project/net.py:12, interpolate``. Empty where the traceback has only code of torch.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = _last_user_frame(frames)
    function = next((frame.name for frame in frames[0 if last is None else last :] if _real_name(frame) == _FUNCTIONAL_FILE), "")
    line = "" if last is None else _line_of(frames[last]).location
    return ", ".join(text for text in (line, function) if text)


def error_line(error: BaseException) -> CodeLine | None:
    """The last line of the user's code in an error's traceback; ``None`` where it has only code of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    last = _last_user_frame(frames)
    return None if last is None else _line_of(frames[last])


def called_function(error: BaseException) -> str:
    """Name of the function of torch that the last line of the user's code called when the error was raised; empty without one."""
    frames = traceback.extract_tb(error.__traceback__)
    last = _last_user_frame(frames)
    return "" if last is None or last + 1 >= len(frames) else frames[last + 1].name


def current_line() -> CodeLine | None:
    """The line of the user's code that is running; ``None`` outside of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else CodeLine.of(frame.f_code.co_filename, frame.f_lineno)


def current_location() -> str:
    """File and number of the line of the user's code that is running; empty outside of it."""
    line = current_line()
    return "" if line is None else line.location


def is_distributions_error(error: BaseException) -> bool:
    """Return true for an error out of ``torch.distributions``, or out of a function that it called."""
    return any(_real_name(frame).startswith(_DISTRIBUTIONS_FOLDER) for frame in traceback.extract_tb(error.__traceback__))


@lru_cache(maxsize=2**12)
def _is_user_code(filename: str) -> bool:
    """Return true for code that belongs neither to torch, nor to Python, nor to the capture. Cells of notebooks have no file, but lines."""
    name = os.path.realpath(filename)
    is_python = name.startswith(_PYTHON_FOLDER) and "site-packages" not in name
    if is_python or name.startswith((ANALYSIS_FOLDER, _TORCH_FOLDER)):
        return False
    return os.path.isfile(name) or bool(linecache.getlines(filename))


def _line_of(frame: traceback.FrameSummary) -> CodeLine:
    return CodeLine.of(frame.filename, frame.lineno or 0)


def _last_user_frame(frames: Sequence[traceback.FrameSummary]) -> int | None:
    return next((index for index in reversed(range(len(frames))) if _is_user_code(frames[index].filename)), None)


def _real_name(frame: traceback.FrameSummary) -> str:
    return os.path.realpath(frame.filename)
