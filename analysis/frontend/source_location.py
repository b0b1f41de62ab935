"""Where in a model's source something went wrong, for messages."""

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
    """The last line before torch's own of what raised an error, ``net.py:12``, and what it called of ``torch.nn.functional``.

    Empty where none but torch's own modules were under way.
    """
    frames = [(os.path.realpath(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
    last = next((at for at in reversed(range(len(frames))) if _is_user_file(frames[at][0])), None)
    called = next((frame.name for name, frame in frames[0 if last is None else last :] if name == _FUNCTIONAL_FILE), "")
    line = "" if last is None else f"{os.path.basename(frames[last][0])}:{frames[last][1].lineno}"
    return ", ".join(part for part in (line, called) if part)


def current_location() -> str:
    """The line of the model's source that is under way, ``net.py:12``; empty where there is none."""
    frame = next((frame for frame in reversed(traceback.extract_stack()) if _is_user_file(os.path.realpath(frame.filename))), None)
    return "" if frame is None else f"{os.path.basename(frame.filename)}:{frame.lineno}"


def is_distributions_error(error: BaseException) -> bool:
    """Whether ``torch.distributions`` raised it, or what these called."""
    return any(os.path.realpath(frame.filename).startswith(_DISTRIBUTIONS_FOLDER) for frame in traceback.extract_tb(error.__traceback__))


def _is_user_file(name: str) -> bool:
    return not name.startswith((_ANALYSIS_FOLDER, _TORCH_FOLDER)) and os.path.isfile(name)
