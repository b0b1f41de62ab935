"""Errors that a model raises itself, as eager PyTorch would raise them.

An error of the user's own code (``1 / 0``, ``raise ValueError``, a missing key, endless recursion) is raised as it is, with a note. An
error of torch's operators about the inputs (channels that do not match) becomes an :class:`InputError` of the same class as well.
"""

from __future__ import annotations

import dis
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.class_labels import ClassLabelMode
from sft.analysis.frontend.constants.tracking import ConstantTracker, model_tensors
from sft.analysis.frontend.source_location import ANALYSIS_FOLDER, error_line
from sft.analysis.frontend.trace_context import suppress_output, use_fake_tensors
from sft.common.errors import SftError, input_error_of
from sft.common.torch_internals import FakeTensorMode

__all__ = ["eager_error", "is_own_error", "model_error", "noted_error_text", "raised_error"]

_TORCH_FOLDER = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
#: Files of torch whose lookups (`__getattr__`, `__getitem__`) fail for attributes and layers that the user's code names.
_LOOKUP_FILES = tuple(os.path.join(_TORCH_FOLDER, "nn", "modules", name) for name in ("module.py", "container.py"))
#: Functions in these files that fail for other reasons: they call other modules, or swap parameters with fake ones (``module.double()``).
_CALL_FUNCTIONS = frozenset({"_call_impl", "_wrapped_call_impl", "inner", "forward", "_apply"})

#: Words of errors about fake tensors.
_FAKE_WORDS = ("Fake", "fake", "tensor subclasses", "meta tensor", "Meta", "_share_f", "Couldn't swap", "pickle")


#: Words of errors about operands that must be integers or booleans.
_INDEX_WORDS = re.compile(r"(?i)\bbool(ean|tensor)?\b|\blong(tensor)?\b|\bint(32|64)\b|\bindices must be\b|\bbitwise_")

#: First words of the note on an error of the user's code.
_NOTE_START = "Raised by `forward`"


def noted_error_text(error: BaseException) -> str | None:
    """Class, message and line of an error of the user's code that a capture raised; ``None`` for any other error."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE_START)]
    if not notes:
        return None
    line = error_line(error)
    return f"{type(error).__name__}: {error}{f' (at {line})' if line else ''}. {notes[0]}"


def eager_error(
    model: nn.Module, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device
) -> Exception | None:
    """The error of the eager model on fake inputs of these shapes; ``None`` where it accepts them or does not run on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = ConstantTracker(model, model_tensors(model), is_any_size=False)

    def call() -> None:
        model(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)))

    # Gradients are on, since models that differentiate inside need them.
    with suppress_output(), torch.enable_grad(), mode, use_fake_tensors(model, mode), tracker.watch(), ClassLabelMode():
        return raised_error(call)


def raised_error(call: Callable[[], Any]) -> Exception | None:
    """The error that eager PyTorch raises for a call on fake tensors; ``None`` without one, and for errors about fake tensors."""
    try:
        call()
    except Exception as error:
        return None if _is_about_fake_tensors(error) else error
    return None


def _is_about_fake_tensors(error: Exception) -> bool:
    """Return true for an error that eager PyTorch would not raise: a decision on values, or an operator without a fake implementation."""
    if type(error).__module__.partition(".")[0] == "torch":
        return True
    if is_own_error(error) and (_is_raised_by_statement(error) or not (isinstance(error, RuntimeError) or "pickle" in str(error))):
        return False  # the error of a function in C may name the type of a fake tensor: a wrong argument, an unknown attribute
    return any(word in str(error) for word in _FAKE_WORDS)


def _is_raised_by_statement(error: BaseException) -> bool:
    """Return true for an error of a ``raise`` statement, and not of a function in C."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def is_own_error(error: BaseException) -> bool:
    """Return true for an error raised by the user's code, and not by an operator or function of torch."""
    if isinstance(error, (RecursionError, SftError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    name = os.path.realpath(frames[-1].filename)
    if name in _LOOKUP_FILES:
        return frames[-1].name not in _CALL_FUNCTIONS
    return not name.startswith((_TORCH_FOLDER, ANALYSIS_FOLDER))  # function modes of the capture call torch's functions


def model_error(error: Exception, model: nn.Module, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> Exception:
    """The exception to raise for an error of the model: the error itself with a note, or an input error of its class."""
    sizes = ", ".join("x".join(map(str, shape)) for shape in shapes)
    if isinstance(error, SftError):
        return error
    if is_own_error(error):
        error.add_note(f"{_NOTE_START} of {type(model).__name__}, which sft traced for an input of shape {sizes}. Nothing was computed.")
        return error
    first_line = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    line = error_line(error)
    cause = RuntimeError if isinstance(error, AssertionError) else type(error)  # operators assert in traces only
    hint = _detector_hint(model, first_line) or _dtype_hint(first_line, shapes, dtypes)
    hint = hint or _layout_hint(model, shapes) or _integer_hint(first_line)
    reason = first_line + hint + (f" (at {line})" if line else "")
    return input_error_of(cause, f"the model refuses an input of shape {sizes}: {reason}")


def _detector_hint(model: nn.Module, reason: str) -> str:
    """Remedy for torchvision's detectors, which in training take lists of boxes."""
    if "targets" not in reason or not isinstance(getattr(model, "backbone", None), nn.Module):
        return ""
    return "; of a detector compile the backbone alone: model.backbone = sft.compile(model.backbone, input_shape)"


def _dtype_hint(reason: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> str:
    """Remedy for floating-point inputs in the place of indices, labels or masks: a shape alone stands for floating-point numbers."""
    if not all(dtype.is_floating_point for dtype in dtypes) or not re.search(_INDEX_WORDS, reason):
        return ""
    dtype = "bool" if "bool" in reason.lower() and "long" not in reason.lower() else "long"
    return (
        f"; every input is {dtypes[0]} here. Convert an index, a label or a mask with .{dtype}(), and give sft.compile a tensor instead of "
        f"its shape, such as torch.empty({tuple(shapes[-1])}, dtype=torch.{dtype}, device='meta')"
    )


def _layout_hint(model: nn.Module, shapes: Sequence[tuple[int, ...]]) -> str:
    """Remedy for an image without a batch or channels, or with channels last, by the first convolution of the model."""
    first = next((module for module in model.modules() if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    if first is None or len(shapes) != 1:
        return ""
    (shape,), num_axes = shapes, len(first.kernel_size)
    is_channels_last = len(shape) == num_axes + 2 and shape[1] != first.in_channels == shape[-1]
    if len(shape) == num_axes + 2 and not is_channels_last:
        return ""
    lacks_batch = len(shape) == num_axes + 1 and shape[0] != first.in_channels == shape[-1]  # with channels last
    batch, extents = (shape[0], shape[1:-1]) if is_channels_last else (1, shape[:-1] if lacks_batch else shape[-num_axes:])
    if len(extents) < num_axes:
        return ""
    order = f"; write batch, channels and extents in this order: {'x'.join(map(str, (batch, first.in_channels, *extents)))}"
    is_image = num_axes != 2 and len(shape) == 4  # an array becomes one
    return order + (" (arrays are read as images; give a signal or volume as a tensor: torch.from_numpy(array))" if is_image else "")


def _integer_hint(reason: str) -> str:
    """Remedy for pixels that are integers."""
    if not re.search(r"Input type \((unsigned char|char|short|int|long)", reason):
        return ""
    return "; convert pixels to floating point (x.float() / 255), or give a NumPy array, of which integers become 0..1"
