"""The capture stage: ``nn.Module -> ExportedProgram -> Graph -> Phases``, and the cache of captures.

:func:`capture_model` traces a model with ``torch.export``, imports the exported program as a graph, rewrites it in the terms of the
operator table, and splits it into phases. The result, a :class:`CapturedModel`, holds for many sizes.

:meth:`CapturedModel.specialize` fixes the sizes. If fewer facts hold at all sizes than at one, the passes
run again on the graph with numbers.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy as sp
import torch
from torch import nn

from sft.analysis.frontend.call_mode_guards import GuardKind
from sft.analysis.frontend.capture import Capture, capture
from sft.analysis.frontend.constants.guards import ConstantGuards
from sft.analysis.frontend.trace_context import squeeze_label_channels
from sft.analysis.ir.graph import Node
from sft.analysis.ir.isomorphism import isomorphism, renamed, without_full_slices
from sft.analysis.ir.ops import ELEMENTWISE
from sft.analysis.passes.fold_norms import has_folded_norms
from sft.analysis.passes.layout_tracker import PERMUTES, RESHAPES
from sft.analysis.passes.pipeline import run_passes
from sft.analysis.tiling.phases import PhasedGraph, find_phases
from sft.analysis.tiling.rematerialization import rematerialize
from sft.api.call_arguments import use_structure
from sft.api.call_signature import CallSignature, CaptureKey, Shape
from sft.common.errors import InputError, UnsupportedError
from sft.planner.sized_graph import specialize_graph, specialize_phases

__all__ = ["CaptureCache", "CapturedModel", "SpecializedModel", "capture_model"]

_LOG = logging.getLogger("sft")

#: Maximal number of captures per model; an attribute that changes at every call must not exhaust host memory.
_MAX_CAPTURES = 16

#: Operators on images of a number of axes that PyTorch also applies to inputs without a batch.
_IMAGE_OPS = re.compile(r"aten\.(?:conv|(?:adaptive_)?(?:max|avg)_pool)(\d)d(?:_with_indices)?\.")

#: Errors of SymPy where a symbolic size is used as a number, or compared with one.
_SYMPY_ERRORS = ("truth value of Relational", "Cannot convert symbols to int")


@dataclass(frozen=True)
class CapturedModel:
    """A captured model.

    Attributes:
        capture: the capture, with its graph in the terms of the operator table.
        phases: phases of this graph.
        key: properties of the call for which it was captured.
        permutes: whether the model permutes dimensions itself, which may leave an image in channels-last layout.
        raw: the capture before all passes.
        depends_on_size: whether it reshapes or changes values of which only the size tells whether they are images.
        folds_norms: whether frozen norms were folded into convolutions where that is possible.
        is_rematerialized: whether images of the first phase are computed again after its barrier.
    """

    capture: Capture
    phases: PhasedGraph
    key: CaptureKey
    permutes: bool
    raw: Capture
    depends_on_size: bool = False
    folds_norms: bool = True
    is_rematerialized: bool = False

    @classmethod
    def of(cls, capture: Capture, key: CaptureKey, *, folds_norms: bool = True) -> CapturedModel:
        """Run the passes on a capture and find its phases.

        Raises:
            UnsupportedError: it has an operator without a rule.
            TypeError: a rule depends on the value of a symbolic size.
        """
        graph = run_passes(capture.graph, folds_norms=folds_norms)
        phases = find_phases(graph)
        depends_on_size = bool(capture.bounds) and any(_changes_whole_image(node, phases) for node in phases.graph.operators)
        permutes = any(node.target in PERMUTES for node in capture.graph.operators)
        return cls(replace(capture, graph=graph), phases, key, permutes, capture, depends_on_size, folds_norms)

    @cached_property
    def unfolded(self) -> CapturedModel | None:
        """The model with every frozen norm as an operator, which takes less memory for weights; ``None`` if no norm is folded."""
        return CapturedModel.of(self.raw, self.key, folds_norms=False) if has_folded_norms(self.capture.graph) else None

    @cached_property
    def rematerialized(self) -> CapturedModel | None:
        """The model with images of the first phase computed again after its barrier; ``None`` if no image crosses that barrier."""
        phases = rematerialize(self.phases)
        if phases is None:
            return None
        return replace(self, capture=replace(self.capture, graph=phases.graph), phases=phases, is_rematerialized=True)

    def specialize(self, shapes: Sequence[Shape]) -> SpecializedModel | None:
        """The model with all sizes as numbers; ``None`` if the capture does not hold for inputs of these shapes.

        Raises:
            InputError: labels do not fit the prediction.
            InputError, UnsupportedError: as :func:`sft.planner.sized_graph.specialize_phases`.
        """
        symbols = self.capture.bind(shapes)
        if symbols is None:
            return None
        for labels in self.capture.labels:
            labels.check(symbols)
        captured = self._at_size(symbols)
        extents = dict(zip(captured.phases.graph.inputs, shapes, strict=True))
        return SpecializedModel(captured, specialize_phases(captured.phases, symbols, extents))

    def _at_size(self, symbols: Mapping[Any, int]) -> CapturedModel:
        """The model after passes on numbers, if these keep fewer operators from running in strips.

        Example: ``x.view(n, c, h // 2, w // 2)`` on the result of a convolution with a stride of 2, which has ``(h + 1) // 2`` rows.
        """
        if not self.depends_on_size:
            return self
        graph = run_passes(specialize_graph(self.raw.graph, symbols), folds_norms=self.folds_norms)
        phases = find_phases(graph)
        if len(phases.whole_reasons) >= len(self.phases.whole_reasons):
            return self
        phases = (rematerialize(phases) if self.is_rematerialized else None) or phases
        return replace(self, capture=replace(self.capture, graph=phases.graph), phases=phases)

    def refuse_unbatched(self, shapes: Sequence[Shape]) -> None:
        """Refuse images without a batch dimension, which most layers of PyTorch accept.

        Raises:
            InputError: the input lacks the batch.
        """
        for node in self.capture.graph.operators:
            match = _IMAGE_OPS.match(node.target)
            num_axes = 0 if match is None else int(match[1])
            if num_axes and len(node.shape) == num_axes + 1 and ("conv" in node.target or num_axes > 1):
                sizes = " and ".join("x".join(map(str, shape)) for shape in shapes)
                raise InputError(
                    f"{node.label}: an input of {sizes} has no batch; expected {num_axes + 2} dimensions, batch it with x[None]"
                )


@dataclass(frozen=True)
class SpecializedModel:
    """A captured model at one size.

    Attributes:
        captured: the capture, after passes at this size.
        phases: its phases with all sizes as numbers.
    """

    captured: CapturedModel
    phases: PhasedGraph


@dataclass(frozen=True)
class SampleCapture:
    """A capture for any number of samples: bags of tiles differ in it from call to call, and a trace takes seconds.

    The passes need the number. So the capture is only traced with a symbol, which is replaced by a number before all passes. It is used if
    it is the capture that was made at another number, up to names of nodes; then it has the names of that one, too.

    Attributes:
        raw: the capture before all passes, with symbols.
        key: properties of the call for which it was captured.
    """

    raw: Capture
    key: CaptureKey

    @classmethod
    def of(cls, model: nn.Module, signature: CallSignature, reference: CapturedModel) -> SampleCapture | None:
        """Capture a model for any number of samples; ``None`` if it computes another graph than a reference, or has no such capture.

        Args:
            model: the model.
            signature: the kind of call.
            reference: the model captured for another number of samples.
        """
        key, names = signature.capture_key, reference.raw.graph.inputs
        any_size = any(isinstance(extent, sp.Basic) for name in names for extent in reference.raw.graph[name].shape)
        try:
            with use_structure(model, key.structure), squeeze_label_channels(model, key.lacking_channels):
                raw = _trace(model, signature, any_size=any_size, any_batch=True)
        except (UnsupportedError, TypeError):
            return None
        if not raw.sample_symbols:
            return None
        raw = replace(raw, graph=without_full_slices(raw.graph)).with_symbols_of(reference.raw)
        at_reference = raw.with_samples(reference.raw.shapes)
        if at_reference is None or not _has_same_constants(at_reference, reference.raw):
            return None
        same_names = isomorphism(at_reference.graph, reference.raw.graph)
        return None if same_names is None else cls(replace(raw, graph=renamed(raw.graph, same_names)), key)

    def at(self, shapes: Sequence[Shape]) -> CapturedModel | None:
        """The captured model at the number of samples of these input shapes; ``None`` if the capture does not hold for it.

        Raises:
            UnsupportedError, TypeError: as :meth:`CapturedModel.of`.
        """
        capture = self.raw.with_samples(shapes)
        return None if capture is None else CapturedModel.of(capture, self.key)


def _has_same_constants(first: Capture, second: Capture) -> bool:
    """True if two captures have equal constants, in the order of their nodes, and the same conditions on their calls."""
    values = [
        [capture.constants.get(node.target) for node in capture.graph.nodes if node.kind == "constant"] for capture in (first, second)
    ]
    pairs = list(itertools.zip_longest(*values))
    is_equal = all(a is b or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)
    return is_equal and first.guard_values == second.guard_values and first.out_spec == second.out_spec


def capture_model(model: nn.Module, signature: CallSignature) -> CapturedModel:
    """Capture a model for calls of a signature, for any size if possible.

    Raises:
        UnsupportedError, InputError: as :func:`sft.analysis.frontend.capture.capture` and :meth:`CapturedModel.of`.
    """
    key = signature.capture_key
    with use_structure(model, key.structure), squeeze_label_channels(model, key.lacking_channels):
        captured = _capture(model, signature, any_size=True) or _capture(model, signature, any_size=False)
    assert captured is not None
    return captured


def _capture(model: nn.Module, signature: CallSignature, *, any_size: bool) -> CapturedModel | None:
    """Capture a model; ``None`` if ``any_size`` and a rule depends on the value of a size, such as padding by a remainder."""
    raw = _trace(model, signature, any_size=any_size)
    try:
        return CapturedModel.of(raw, signature.capture_key)
    except TypeError as error:  # SymPy has no specific error class for it
        if not any_size or not any(text in str(error) for text in _SYMPY_ERRORS):
            raise
        return None


def _trace(model: nn.Module, signature: CallSignature, *, any_size: bool, any_batch: bool = False) -> Capture:
    """Trace a model for calls of a signature."""
    key = signature.capture_key
    return capture(
        model,
        signature.shapes,
        key.dtypes,
        key.device,
        autocast=key.autocast,
        any_size=any_size,
        any_batch=any_batch,
        modes=signature.modes,
    )


class CaptureCache:
    """The captures of a model, the most recent last; each serves all sizes for which it holds.

    Args:
        model: the model.

    Attributes:
        guard_kinds: kinds of questions that ``forward`` has asked in any capture.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.guard_kinds: frozenset[GuardKind] = frozenset()
        self._captures: tuple[CapturedModel, ...] = ()
        self._of_samples: dict[Any, list[SampleCapture]] = {}
        self._without_samples: set[Any] = set()
        self._constants = ConstantGuards(model)

    def __len__(self) -> int:
        return len(self._captures)

    def with_guards(self, signature: CallSignature) -> CallSignature:
        """The signature with the guards of all captures: modes that ``forward`` queries, and values that it reads from tensors."""
        reads = [read for captured in self._captures for read in captured.raw.reads]
        return signature.with_guards(self.guard_kinds, self._constants.keys(reads) if reads else ())

    def get_or_capture(self, signature: CallSignature) -> SpecializedModel:
        """The model at the sizes of a call, of a capture that holds for it; captured on a miss.

        Raises:
            UnsupportedError, InputError: as :func:`capture_model`.
        """
        for captured in self._captures:
            is_same_call = captured.key == signature.capture_key and signature.modes.satisfies(captured.capture.guard_values)
            if is_same_call and self._constants.hold(captured.capture.reads):
                specialized = captured.specialize(signature.shapes)
                if specialized is not None:
                    return specialized
        at_samples = self._at_samples(signature)
        specialized = None if at_samples is None else at_samples.specialize(signature.shapes)
        if at_samples is not None and specialized is not None:
            self._add(at_samples)
            return specialized
        name = type(self._model).__name__
        if self._captures:
            _LOG.info("capturing %s again for inputs %s", name, signature.shapes)
        captured = capture_model(self._model, signature)
        self.guard_kinds |= {kind for kind, _ in captured.capture.guard_values}
        captured.refuse_unbatched(signature.shapes)
        if captured.capture.bind(signature.shapes) is not None:
            self._add(captured)
        specialized = captured.specialize(signature.shapes)
        if specialized is None:
            sizes = ", ".join("x".join(map(str, shape)) for shape in signature.shapes)
            raise UnsupportedError([f"{name}: the capture at {sizes} does not hold for that very size"])
        return specialized

    def _add(self, captured: CapturedModel) -> None:
        self._captures = (*self._captures[1 - _MAX_CAPTURES :], captured)

    def _at_samples(self, signature: CallSignature) -> CapturedModel | None:
        """The model at the number of samples of a call, from a capture for any number; ``None`` if there is none that holds.

        It is made at the second number of samples of calls that are equal otherwise, and compared with that of the first.
        """
        key = (signature.shapes_of_any_samples, signature.capture_key, signature.guards, signature.constants)
        if signature.shapes_of_any_samples is None:
            return None
        captures = self._of_samples.setdefault(key, [])
        for each in captures:
            if signature.modes.satisfies(each.raw.guard_values) and self._constants.hold(each.raw.reads):
                captured = each.at(signature.shapes)
                if captured is not None:
                    return captured
        others = (each for each in self._captures if self._is_reference(each, signature))
        # Where `forward` branches on the number of samples, each branch has a capture.
        reference = next((other for other in others if all(each.raw.bind(other.raw.shapes) is None for each in captures)), None)
        if reference is None or key in self._without_samples:
            return None
        new = SampleCapture.of(self._model, signature, reference)
        if new is None:
            self._without_samples.add(key)
            return None
        captures.append(new)
        while len(self._of_samples) > _MAX_CAPTURES:
            del self._of_samples[next(iter(self._of_samples))]
        return new.at(signature.shapes)

    def _is_reference(self, captured: CapturedModel, signature: CallSignature) -> bool:
        """True if a capture is for calls that differ from this one in the number of samples alone."""
        other = replace(signature, shapes=captured.raw.shapes)
        any_samples = signature.shapes_of_any_samples
        if captured.key != signature.capture_key or any_samples is None or other.shapes_of_any_samples != any_samples:
            return False
        return signature.modes.satisfies(captured.raw.guard_values) and self._constants.hold(captured.raw.reads)


def _changes_whole_image(node: Node, phases: PhasedGraph) -> bool:
    """True if a full image is reshaped, or changed element by element."""
    if not (node.target in RESHAPES or node.target in ELEMENTWISE) or phases.rows[node.name].role != "whole":
        return False
    return any(name in phases.streamed or phases.graph[name].target == "sft.restore_dims" for name in node.operands)
