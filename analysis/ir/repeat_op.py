"""Repeated blocks in a capture: one operator that stands for all of them.

A module that runs one block many times by a schedule of its own cannot be stepped into: its blocks are not in its ``forward``. While a
model is captured such a module calls ``sft::repeat`` instead. The exporter writes that down as it does any operator: what it reads (the
input, weights, buffers), what it makes (the output, and the next values of buffers that change), and a number. Behind the number is what
the lowering asks for everything else, a :class:`RepeatHandle`, which the graph's node holds in the number's place.

The next values are nodes of their own, made where the repetition runs; a module writes them to its buffers as any other would.
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

#: The operator, and a buffer's next value.
REPEAT, REPEAT_NEXT = "sft.repeat.default", "sft.repeat_next"

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_LIBRARY.define("repeat(Tensor x, Tensor[] params, Tensor[] fixed, Tensor[] shared, Tensor[] updated, int which) -> Tensor[]")


def _fake_results(
    x: Tensor, params: Sequence[Tensor], fixed: Sequence[Tensor], shared: Sequence[Tensor], updated: Sequence[Tensor], which: int
) -> list[Tensor]:
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in (x, *updated)]


torch.library.register_fake("sft::repeat", _fake_results, lib=_LIBRARY)


class RepeatHandle(Protocol):
    """What a node knows of the blocks that it stands for; the rest is for whoever lowers it."""

    @property
    def is_random(self) -> bool:
        """Whether masks are drawn in the blocks."""
        ...


@dataclass(slots=True)
class RepeatCapture:
    """A capture that is going on.

    Attributes:
        paths: the qualified names of the model's modules, by identity.
        repetitions: those that were called so far.
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
        """Write down a call: the output, and the next values of the buffers that change.

        Args:
            repetition: what it stands for.
            x: the input of the first block.
            params: the parameters of all blocks.
            fixed: the buffers of all blocks that do not change.
            shared: the buffers that all blocks share.
            updated: the buffers of all blocks that change.
        """
        self.repetitions.append(repetition)
        found: list[Tensor] = torch.ops.sft.repeat(x, [*params], [*fixed], [*shared], [*updated], len(self.repetitions) - 1)
        return found


_CURRENT_CAPTURE: ContextVar[RepeatCapture | None] = ContextVar("sft_capturing", default=None)


def current_repeat_capture() -> RepeatCapture | None:
    """The capture that is going on here; ``None`` where there is none."""
    return _CURRENT_CAPTURE.get()


@contextlib.contextmanager
def capture_repeats(model: nn.Module) -> Iterator[RepeatCapture]:
    """While this is on, repeated blocks of ``model`` are written down instead of run."""
    found = RepeatCapture({id(module): path for path, module in model.named_modules()})
    token = _CURRENT_CAPTURE.set(found)
    try:
        yield found
    finally:
        _CURRENT_CAPTURE.reset(token)


def with_rng_arguments(node: Node, seed: Ref, site: int) -> Node | None:
    """A repetition with what its masks follow, the seed and its own number among the random operators; ``None`` if it draws none."""
    if node.target != REPEAT or not node.argument("which").is_random:
        return None
    arguments: tuple[tuple[str, Any], ...] = (("seed", seed), ("site", site))
    return replace(node, arguments=(*node.arguments, *arguments))
