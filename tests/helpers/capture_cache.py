"""Captures that are made once: tests that plan one model in many ways would spend their time on it.

A capture serves every size that it holds for, as it does inside a compiled module, so a model that is drawn at many sizes is captured
once, too. What tells two models apart is what they print, their flags, and what the test says of them (``about``): a module that holds a
function prints nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from sft.analysis.frontend.call_mode_guards import CallModes
from sft.analysis.frontend.capture import Capture, capture
from sft.analysis.ir.graph import Graph

__all__ = ["numbered", "one_capture_a_model", "remembered_captures"]

_KNOWN: dict[str, list[Capture]] = {}


@contextmanager
def remembered_captures(about: str = "") -> Iterator[None]:
    """Capture models of one description once, until the block ends and in later blocks about the same."""

    def remembered(model: nn.Module, shapes: Sequence[tuple[int, ...]], *arguments: Any, modes: CallModes, **keywords: Any) -> Capture:
        # A captured graph names parameters and does not hold them.
        flags = [module.training for module in model.modules()], [(name, value.requires_grad) for name, value in model.named_parameters()]
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = repr((about, type(model), model, flags, state, [len(shape) for shape in shapes], arguments, keywords))
        known = _KNOWN.setdefault(key, [])
        found = next((one for one in known if modes.satisfies(one.guard_values) and one.bind(shapes) is not None), None)
        if found is None:
            found = capture(model, shapes, *arguments, modes=modes, **keywords)
            known.append(found)
        return found

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sft.api.capture_cache.capture", remembered)
        yield


def one_capture_a_model(*tilings: str) -> Callable[[pytest.FixtureRequest], Iterator[None]]:
    """A fixture for all tests of a module: captures are remembered for all values of these parameters of the tests.

    Args:
        tilings: names of those that say only how a model runs. Any other says which model it is.
    """

    @pytest.fixture(autouse=True)
    def captures(request: pytest.FixtureRequest) -> Iterator[None]:
        given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        models = sorted((name, repr(value)) for name, value in given.items() if name not in tilings)
        with remembered_captures(repr((request.module.__name__, models or request.node.originalname))):
            yield

    return captures


def numbered(graph: Graph) -> str:
    """Text of a graph with operators renumbered: the exporter's own numbers also count sizes that it drops."""
    numbers = {node.name: f"%{index}" for index, node in enumerate(graph.nodes)}
    said = repr((graph.nodes, graph.outputs, graph.updates))
    return re.sub(r"'(\w+)'", lambda match: numbers.get(match[1], match[0]), said)
