"""Tracing without what torch says meanwhile."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["without_autograd_debugging", "suppress_output"]

#: Loggers that report what is raised as well.
_NOISY_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch._subclasses.fake_tensor")


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Keep export's warnings and logs off the user's terminal; a failure is raised, not logged."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(None), contextlib.redirect_stderr(_NullStream()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _NullStream:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def without_autograd_debugging() -> Iterator[None]:
    """Trace without the caller's anomaly detection, which looks at numbers that a trace has not, and hooks on what autograd saves."""
    hooks: list[Any] = []
    while True:
        found: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if found is None:
            break
        hooks.append(found)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
