"""Traces whose nodes carry what is asked of them, and no more.

With every node the exporter writes down the Python stack that made it, and in which memory formats its value is contiguous, which takes
proofs about symbolic strides. Both are for people and for compilers behind it, and take long in a deep network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.fx import config
from torch.fx.experimental import proxy_tensor

__all__ = ["bare_nodes"]

_STACKS = "do_not_emit_stack_traces"
_LAYOUTS = "_extract_tensor_metadata"


@contextmanager
def bare_nodes() -> Iterator[None]:
    """A context in which traces leave that out; all as ever where this torch has other names for it."""
    with ExitStack() as changes:
        if hasattr(config, _STACKS):
            changes.enter_context(mock.patch.object(config, _STACKS, True))
        if hasattr(proxy_tensor, _LAYOUTS):
            changes.enter_context(mock.patch.object(proxy_tensor, _LAYOUTS, _nothing))
        yield


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """In the place of what says how a value lies in memory."""
