"""Models that were captured: the graph in the terms of the operator table, its phases, and what it was captured for.

A capture holds for many sizes, and those of a model are kept. What is known of all sizes may be less than what is known of each: then the
graph is rewritten anew, in numbers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sft.analysis.frontend.call_mode_guards import CallModes, GuardKind
from sft.analysis.frontend.capture import Capture, capture
from sft.analysis.frontend.fingerprint import Fingerprint
from sft.analysis.frontend.trace_context import squeeze_label_channels
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops import ELEMENTWISE
from sft.analysis.passes.layout_tracker import PERMUTES, RESHAPES
from sft.analysis.passes.pipeline import run_passes
from sft.analysis.tiling.phases import PhasedGraph, find_phases
from sft.common.errors import InputError, UnsupportedError
from sft.planner.problem import specialize_graph

__all__ = ["CaptureCache", "CaptureKey", "CapturedModel", "Shape"]

_LOG = logging.getLogger("sft")

#: Captures that are kept; an attribute that changes at every call must not fill the memory.
_MAX_CAPTURES = 16

Shape = tuple[int, ...]

#: Operators on images of so many axes, which PyTorch also takes without a batch.
_IMAGE_OPS = re.compile(r"aten\.(?:conv|(?:adaptive_)?(?:max|avg)_pool)(\d)d(?:_with_indices)?\.")


@dataclass(frozen=True)
class CaptureKey:
    """What a capture is made for, besides the inputs' shapes."""

    dtypes: tuple[torch.dtype, ...]
    lacking_channels: tuple[bool, ...]
    device: torch.device
    autocast: torch.dtype | None
    default_dtype: torch.dtype
    training_flags: tuple[bool, ...]
    fingerprint: Fingerprint


@dataclass(frozen=True)
class CapturedModel:
    """A model that was captured.

    Attributes:
        capture: with its graph in the terms of the operator table.
        phases: of this graph.
        traced: what it was captured for.
        permutes: whether the model permutes dimensions itself, which may leave an image with its channels last.
        as_captured: the graph as it was captured, where it reshapes or changes images of which their size says whether they are such.
    """

    capture: Capture
    phases: PhasedGraph
    traced: CaptureKey
    permutes: bool
    as_captured: Graph | None = None

    @classmethod
    def of(cls, capture: Capture, traced: CaptureKey) -> CapturedModel:
        """A capture as the exporter wrote it.

        Raises:
            UnsupportedError: it has an operator without a rule.
            TypeError: a rule decides by a size that is a symbol.
        """
        graph = run_passes(capture.graph)
        phases = find_phases(graph)
        is_open = bool(capture.bounds) and any(_changes_whole_image(node, phases) for node in phases.graph.operators)
        permutes = any(node.target in PERMUTES for node in capture.graph.operators)
        return cls(replace(capture, graph=graph), phases, traced, permutes, capture.graph if is_open else None)

    def at(self, symbols: Mapping[Any, int]) -> CapturedModel:
        """What is known at one size, if that is more than at all sizes.

        ``x.view(n, c, h // 2, w // 2)`` of what a convolution with a stride of 2 made: that has ``(h + 1) // 2`` rows.
        """
        if self.as_captured is None:
            return self
        graph = run_passes(specialize_graph(self.as_captured, symbols))
        phases = find_phases(graph)
        better = len(phases.whole_reasons) < len(self.phases.whole_reasons)
        return replace(self, capture=replace(self.capture, graph=graph), phases=phases) if better else self

    def refuse_unbatched(self, shapes: Sequence[Shape]) -> None:
        """PyTorch takes an image without a batch for most of its layers; our axes would be one short.

        Raises:
            InputError: the input lacks the batch.
        """
        for node in self.capture.graph.operators:
            found = _IMAGE_OPS.match(node.target)
            count = 0 if found is None else int(found[1])
            if count and len(node.shape) == count + 1 and ("conv" in node.target or count > 1):
                given = " and ".join("x".join(map(str, shape)) for shape in shapes)
                raise InputError(f"{node.label}: an input of {given} has no batch; expected {count + 2} dimensions, batch it with x[None]")


#: What SymPy says where something must be a number, or compared with one.
_SYMPY_ERRORS = ("truth value of Relational", "Cannot convert symbols to int")


class CaptureCache:
    """The captures of a model, the last one last; each serves all sizes that it holds for.

    Args:
        model: the model.

    Attributes:
        asked: what `forward` has asked of the calls that it was captured for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.asked: frozenset[GuardKind] = frozenset()
        self._known: tuple[CapturedModel, ...] = ()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, traced: CaptureKey, shapes: Sequence[Shape], modes: CallModes) -> tuple[CapturedModel, dict[Any, int]]:
        """A capture that holds for inputs of these shapes in a call of these modes, made where none does, and its symbols' values.

        Raises:
            UnsupportedError, InputError: as :func:`sft.analysis.frontend.capture.capture` and :meth:`CapturedModel.of`.
        """
        for captured in self._known:
            if captured.traced == traced and modes.agree(captured.capture.answers):
                symbols = captured.capture.bind(shapes)
                if symbols is not None:
                    return captured, symbols
        if self._known:
            _LOG.info("capturing %s again for inputs %s", type(self._model).__name__, shapes)
        with squeeze_label_channels(self._model, traced.lacking_channels):
            found = self._new(traced, shapes, modes, any_size=True) or self._new(traced, shapes, modes, any_size=False)
        assert found is not None
        self.asked |= {question for question, _ in found.capture.answers}
        found.refuse_unbatched(shapes)
        symbols = found.capture.bind(shapes)
        if symbols is None:
            sizes = ", ".join("x".join(map(str, shape)) for shape in shapes)
            raise UnsupportedError([f"{type(self._model).__name__}: the capture at {sizes} does not hold for that very size"])
        self._known = (*self._known[1 - _MAX_CAPTURES :], found)
        return found, symbols

    def _new(self, traced: CaptureKey, shapes: Sequence[Shape], modes: CallModes, *, any_size: bool) -> CapturedModel | None:
        """The model in terms of the table; ``None`` where no rule decides for any size what it does, as for a padding by a remainder."""
        found = capture(self._model, shapes, traced.dtypes, traced.device, autocast=traced.autocast, any_size=any_size, modes=modes)
        try:
            return CapturedModel.of(found, traced)
        except TypeError as error:  # SymPy has no type of its own for it
            if not any_size or not any(words in str(error) for words in _SYMPY_ERRORS):
                raise
            return None


def _changes_whole_image(node: Node, phases: PhasedGraph) -> bool:
    """Whether an image is reshaped as a whole, or changed element by element."""
    if not (node.target in RESHAPES or node.target in ELEMENTWISE) or phases.rows[node.name].role != "whole":
        return False
    return any(name in phases.streamed or phases.graph[name].target == "sft.restore_dims" for name in node.operands)
