"""Shared captures for tests that plan one model in many ways.

All tests of a process share captures of equal calls of equal models (:func:`share_captures`), except those of ``tests/analysis/frontend``,
which test captures. Models are equal if they have the fingerprint that compiled modules compare at each call, the same shapes of inputs and
the same modes.

Inside of :func:`remembered_captures` the key of a model is its ``repr``, its flags, and the test's description (``about``), since a module
with a function as attribute does not print it. A capture serves every size for which its guards hold, as inside compiled modules, so a
model that is drawn at many sizes is captured once.
"""

from __future__ import annotations

import re
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sft.analysis.frontend.call_mode_guards import CallModes
from sft.analysis.frontend.capture import Capture, capture
from sft.analysis.frontend.fingerprint import module_fingerprint
from sft.analysis.frontend.state_snapshot import user_attributes
from sft.analysis.ir.graph import Graph
from sft.api import capture_cache
from sft.common.module_snapshot import PLAIN_TYPES, ModuleSnapshot

__all__ = ["numbered", "one_capture_a_model", "remembered_captures", "separate_captures", "share_captures"]

_KNOWN: dict[str, list[Capture]] = {}

#: Captures by call, the most recent last, and their maximal number: a key keeps the classes of its model alive.
_SHARED: OrderedDict[Hashable, Capture] = OrderedDict()
_MAX_SHARED = 256

_PLAIN = (*PLAIN_TYPES, Enum, type, types.FunctionType, types.BuiltinFunctionType)


def share_captures() -> None:
    """Let all compiled modules of this process share captures of equal calls of equal models."""
    mock.patch.object(capture_cache, "capture", _shared).start()


@contextmanager
def separate_captures() -> Iterator[None]:
    """Capture each model anew until the block ends."""
    with mock.patch.object(capture_cache, "capture", capture):
        yield


def _shared(model: nn.Module, shapes: Sequence[tuple[int, ...]], *arguments: Any, modes: CallModes, **keywords: Any) -> Capture:
    key = _call_key(model, shapes, arguments, modes, keywords)
    known = None if key is None else _SHARED.get(key)
    if known is None:
        known = capture(model, shapes, *arguments, modes=modes, **keywords)
        if key is None or known.reads or known.differentiable_constants:  # values of tensors, which are not in the key
            return known
        _SHARED[key] = known
        if len(_SHARED) > _MAX_SHARED:
            _SHARED.popitem(last=False)
    else:
        _SHARED.move_to_end(key)
    return known


def _call_key(model: nn.Module, shapes: Sequence[tuple[int, ...]], arguments: Any, modes: CallModes, keywords: Any) -> Hashable:
    """Key of a capture; ``None`` for a model with attributes or hooks that a fingerprint omits."""
    is_known = all(_is_plain(value) for module in model.modules() for _, value in user_attributes(module))
    has_hooks = any(value for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks"))
    if not is_known or has_hooks or torch.overrides._get_current_function_mode_stack():
        return None
    snapshot = ModuleSnapshot(model)
    tensors = [
        (name, type(value), value.requires_grad, value.device, value.layout, value.stride()) for name, value in snapshot.tensors.items()
    ]
    flags = [module.training for module in snapshot.modules.values()]
    state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    call = tuple(shapes), tuple(map(repr, arguments)), modes, tuple(sorted(keywords.items()))
    return module_fingerprint(snapshot), tuple(tensors), tuple(flags), state, call


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return isinstance(value, _PLAIN)


@contextmanager
def remembered_captures(about: str = "") -> Iterator[None]:
    """Capture models of one description once, until the block ends and in later blocks about the same."""

    def remembered(model: nn.Module, shapes: Sequence[tuple[int, ...]], *arguments: Any, modes: CallModes, **keywords: Any) -> Capture:
        # A captured graph has names of parameters, not the parameters.
        flags = [module.training for module in model.modules()], [(name, value.requires_grad) for name, value in model.named_parameters()]
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = repr((about, type(model), model, flags, state, [len(shape) for shape in shapes], arguments, keywords))
        known = _KNOWN.setdefault(key, [])
        known_capture = next((each for each in known if modes.satisfies(each.guard_values) and each.bind(shapes) is not None), None)
        if known_capture is None:
            known_capture = _shared(model, shapes, *arguments, modes=modes, **keywords)
            known.append(known_capture)
        return known_capture

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sft.api.capture_cache.capture", remembered)
        yield


def one_capture_a_model(*tilings: str) -> Callable[[pytest.FixtureRequest], Iterator[None]]:
    """A fixture for all tests of a module: captures are remembered for all values of these parameters of the tests.

    Args:
        tilings: names of parameters that change only the execution. All others select the model.
    """

    @pytest.fixture(autouse=True)
    def captures(request: pytest.FixtureRequest) -> Iterator[None]:
        parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        models = sorted((name, repr(value)) for name, value in parameters.items() if name not in tilings)
        with remembered_captures(repr((request.module.__name__, models or request.node.originalname))):
            yield

    return captures


def numbered(graph: Graph) -> str:
    """Text of a graph with operators renumbered: the exporter's own numbers also count sizes that it drops."""
    numbers = {node.name: f"%{index}" for index, node in enumerate(graph.nodes)}
    said = repr((graph.nodes, graph.outputs, graph.updates))
    return re.sub(r"'(\w+)'", lambda match: numbers.get(match[1], match[0]), said)
