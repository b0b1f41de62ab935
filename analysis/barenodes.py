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

__all__ = ["slim_node_metadata"]

_STACK_TRACE_OPTION = "do_not_emit_stack_traces"
_METADATA_FUNCTION = "_extract_tensor_metadata"


@contextmanager
def slim_node_metadata() -> Iterator[None]:
    """A context in which traces leave that out; all as ever where this torch has other names for it."""
    with ExitStack() as changes:
        if hasattr(config, _STACK_TRACE_OPTION):
            changes.enter_context(mock.patch.object(config, _STACK_TRACE_OPTION, True))
        if hasattr(proxy_tensor, _METADATA_FUNCTION):
            changes.enter_context(mock.patch.object(proxy_tensor, _METADATA_FUNCTION, _no_metadata))
        yield


def _no_metadata(*arguments: Any, **keywords: Any) -> None:
    """In the place of what says how a value lies in memory."""
