"""Locations in the model's source (``net.py:12``), for messages."""

from __future__ import annotations

import os
import traceback

import torch

__all__ = ["current_location", "error_location", "is_distributions_error"]

_ANALYSIS_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_TORCH_FOLDER = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_DISTRIBUTIONS_FOLDER = os.path.join(_TORCH_FOLDER, "distributions") + os.sep
_FUNCTIONAL_FILE = os.path.join(_TORCH_FOLDER, "nn", "functional.py")


def error_location(error: BaseException) -> str:
    """The last line of the user's code in an error's traceback, and the function of ``torch.nn.functional`` that it called.

    For example ``net.py:12, interpolate``. Empty where the traceback has only code of torch.
    """
    frames = [(os.path.realpath(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    last = next((index for index in reversed(range(len(frames))) if _is_user_file(frames[index][0])), None)
    function = next((frame.name for name, frame in frames[0 if last is None else last :] if name == _FUNCTIONAL_FILE), "")
    line = "" if last is None else f"{os.path.basename(frames[last][0])}:{frames[last][1].lineno}"
    return ", ".join(text for text in (line, function) if text)


def current_location() -> str:
    """The line of the user's code that is running; empty outside of it."""
    frame = next((frame for frame in reversed(traceback.extract_stack()) if _is_user_file(os.path.realpath(frame.filename))), None)
    return "" if frame is None else f"{os.path.basename(frame.filename)}:{frame.lineno}"


def is_distributions_error(error: BaseException) -> bool:
    """Return true for an error out of ``torch.distributions``, or out of a function that it called."""
    return any(os.path.realpath(frame.filename).startswith(_DISTRIBUTIONS_FOLDER) for frame in traceback.extract_tb(error.__traceback__))


def _is_user_file(name: str) -> bool:
    return not name.startswith((_ANALYSIS_FOLDER, _TORCH_FOLDER)) and os.path.isfile(name)
