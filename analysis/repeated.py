"""Repeated blocks in a capture: one operator that stands for all of them.

A module that runs one block many times by a schedule of its own cannot be stepped into: its blocks are not in its ``forward``. While a
model is captured such a module calls ``sft::repeat`` instead. The exporter writes that down as it does any operator: what it reads (the
input, weights, buffers), what it makes (the output, and the next values of buffers that change), and a number. Behind the number is what
the lowering asks for everything else, a :class:`Repetition`, which the graph's node holds in the number's place.

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

from sft.analysis.graph import Node, Ref

__all__ = ["NEXT", "REPEAT", "Capturing", "Repetition", "capturing", "drawing", "repetitions_followed"]

#: The operator, and a buffer's next value.
REPEAT, NEXT = "sft.repeat.default", "sft.repeat_next"

_LIBRARY = torch.library.Library("sft", "FRAGMENT")
_LIBRARY.define("repeat(Tensor x, Tensor[] params, Tensor[] fixed, Tensor[] shared, Tensor[] updated, int which) -> Tensor[]")


def _results(
    x: Tensor, params: Sequence[Tensor], fixed: Sequence[Tensor], shared: Sequence[Tensor], updated: Sequence[Tensor], which: int
) -> list[Tensor]:
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value in (x, *updated)]


torch.library.register_fake("sft::repeat", _results, lib=_LIBRARY)


class Repetition(Protocol):
    """What a node knows of the blocks that it stands for; the rest is for whoever lowers it."""

    @property
    def is_random(self) -> bool:
        """Whether masks are drawn in the blocks."""
        ...


@dataclass(slots=True)
class Capturing:
    """A capture that is going on.

    Attributes:
        paths: the qualified names of the model's modules, by identity.
        repetitions: those that were called so far.
    """

    paths: dict[int, str]
    repetitions: list[Repetition] = field(default_factory=list)

    def path_of(self, module: nn.Module) -> str:
        """The qualified name of a module, for messages."""
        return self.paths.get(id(module)) or "(the model itself)"

    def call(
        self,
        repetition: Repetition,
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


_CURRENT: ContextVar[Capturing | None] = ContextVar("sft_capturing", default=None)


def capturing() -> Capturing | None:
    """The capture that is going on here; ``None`` where there is none."""
    return _CURRENT.get()


@contextlib.contextmanager
def repetitions_followed(model: nn.Module) -> Iterator[Capturing]:
    """While this is on, repeated blocks of ``model`` are written down instead of run."""
    found = Capturing({id(module): path for path, module in model.named_modules()})
    token = _CURRENT.set(found)
    try:
        yield found
    finally:
        _CURRENT.reset(token)


def drawing(node: Node, seed: Ref, site: int) -> Node | None:
    """A repetition with what its masks follow, the seed and its own number among the random operators; ``None`` if it draws none."""
    if node.target != REPEAT or not node.argument("which").is_random:
        return None
    arguments: tuple[tuple[str, Any], ...] = (("seed", seed), ("site", site))
    return replace(node, arguments=(*node.arguments, *arguments))
