"""The ``sft::repeat`` operator: a sequence of repeated blocks as one node of the graph.

A module that runs one block many times by a schedule of its own (:mod:`sft.repeat`) cannot be exported block by block. During capture it
calls ``sft::repeat`` instead, and the exporter records that call like any operator:

* tensor operands: the input, parameters and buffers of all blocks;
* results: the output, and the next values of buffers that change, each a node of its own;
* an integer, the index of a :class:`RepeatHandle`. The graph's node holds the handle itself in its place; lowering needs it.

The module writes the next values to its buffers like any other module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sft.analysis.ir.graph import Node, Ref

__all__ = ["REPEAT", "REPEAT_NEXT", "RepeatCapture", "RepeatHandle", "capture_repeats", "current_repeat_capture", "with_rng_arguments"]

#: Targets of the operator itself, and of a buffer's next value.
REPEAT, REPEAT_NEXT = "sft.repeat.default", "sft.repeat_next"

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_LIBRARY.define("repeat(Tensor x, Tensor[] params, Tensor[] fixed, Tensor[] shared, Tensor[] updated, int which) -> Tensor[]")


def _fake_results(
    x: Tensor, params: Sequence[Tensor], fixed: Sequence[Tensor], shared: Sequence[Tensor], updated: Sequence[Tensor], which: int
) -> list[Tensor]:
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in (x, *updated)]


torch.library.register_fake("sft::repeat", _fake_results, lib=_LIBRARY)


class RepeatHandle(Protocol):
    """Description of the blocks that a repeat node represents. Lowering adds further attributes."""

    @property
    def is_random(self) -> bool:
        """True if the blocks draw random masks."""
        ...


@dataclass(slots=True)
class RepeatCapture:
    """State of a running capture.

    Attributes:
        paths: the qualified names of the model's modules, by identity.
        repetitions: handles of the repeated blocks called so far.
    """

    paths: dict[int, str]
    repetitions: list[RepeatHandle] = field(default_factory=list)

    def path_of(self, module: nn.Module) -> str:
        """The qualified name of a module, for messages."""
        return self.paths.get(id(module)) or "(the model itself)"

    def call(
        self,
        repetition: RepeatHandle,
        x: Tensor,
        *,
        params: Sequence[Tensor],
        fixed: Sequence[Tensor],
        shared: Sequence[Tensor],
        updated: Sequence[Tensor],
    ) -> list[Tensor]:
        """Record a call: returns the output, and the next values of the buffers that change.

        Args:
            repetition: the handle of the blocks.
            x: the input of the first block.
            params: the parameters of all blocks.
            fixed: the buffers of all blocks that do not change.
            shared: the buffers that all blocks share.
            updated: the buffers of all blocks that change.
        """
        self.repetitions.append(repetition)
        results: list[Tensor] = torch.ops.sft.repeat(x, [*params], [*fixed], [*shared], [*updated], len(self.repetitions) - 1)
        return results


_CURRENT_CAPTURE: ContextVar[RepeatCapture | None] = ContextVar("sft_capturing", default=None)


def current_repeat_capture() -> RepeatCapture | None:
    """The capture running in this context, or ``None``."""
    return _CURRENT_CAPTURE.get()


@contextlib.contextmanager
def capture_repeats(model: nn.Module) -> Iterator[RepeatCapture]:
    """Context in which repeated blocks of ``model`` are recorded instead of run."""
    capture = RepeatCapture({id(module): path for path, module in model.named_modules()})
    token = _CURRENT_CAPTURE.set(capture)
    try:
        yield capture
    finally:
        _CURRENT_CAPTURE.reset(token)


def with_rng_arguments(node: Node, seed: Ref, site: int) -> Node | None:
    """A random repeat node with the seed and its site number as arguments; ``None`` for any other node."""
    if node.target != REPEAT or not node.argument("which").is_random:
        return None
    arguments: tuple[tuple[str, Any], ...] = (("seed", seed), ("site", site))
    return replace(node, arguments=(*node.arguments, *arguments))
