"""Passes that may fail: machines and copies are stopped in order, and an error keeps no tensors of its pass alive."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.machine import TorchMachine

__all__ = ["quiesced_on_error", "refuse_after_failure", "running"]


@contextlib.contextmanager
def running(machine: TorchMachine) -> Iterator[TorchMachine]:
    """A machine that is closed at the end; after a failure, errors of its copies under way are not raised as well."""
    try:
        yield machine
    except BaseException as error:
        with contextlib.suppress(Exception):
            machine.close()
        _clear_frames(error)
        raise
    machine.close()


@contextlib.contextmanager
def quiesced_on_error(offloader: HostOffloader | None) -> Iterator[None]:
    """Wait for copies under way after a failed pass, before their buffers are freed."""
    try:
        yield
    except BaseException:
        if offloader is not None:
            offloader.quiesce()
        raise


def refuse_after_failure(residuals: Any) -> None:
    """Refuse a second backward pass after one that failed. After one that succeeded, autograd has freed its residuals and raises itself.

    Args:
        residuals: values that the backward pass needs of the forward pass; ``None`` once a failed pass has released them.

    Raises:
        RuntimeError: they are released.
    """
    if residuals is None:
        raise RuntimeError("an earlier backward pass of this call failed and freed the residuals of the forward pass; call the model again")


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables of this library and of torch from the tracebacks of an error.

    They refer to the tensors of the pass, and an error lives as long as its handler, or until the next garbage collection. The caller may
    need their memory for another try. Frames of the caller's own code stay as they are, for debuggers.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]
        for frame, _ in traceback.walk_tb(current.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] in ("sft", "torch"):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
