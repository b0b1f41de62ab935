"""Fingerprints change with a model's structure, attributes, tensors and hooks, also with a known earlier structure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from sft.analysis.frontend.fingerprint import module_fingerprint
from sft.common.module_snapshot import ModuleSnapshot
from tests.helpers.models import chain


class _Block(nn.Module):
    """Attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.again = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.scale, self.flag, self.zero, self.sizes = 2, True, 0.0, (1, 2)
        self.act, self.options, self.table = torch.relu, {"stride": [1, 2]}, np.arange(3)
        self.loose, self.tail, self.note = torch.zeros(2), [nn.Linear(2, 2)], SimpleNamespace(depth=1)
        self.register_buffer("counts", torch.zeros(3))
        self.register_parameter("missing", None)


def _model() -> Any:
    return chain(nn.Conv2d(3, 4, 1), _Block(), nn.ReLU())


def _parametrize(model: Any) -> None:
    parametrize.register_parametrization(model[0], "weight", nn.Identity())


def _rename(model: Any) -> None:
    model[1].renamed = vars(model[1]).pop("note")


def _share_module(model: Any) -> None:
    model[1].again = model[1].conv


def _share_weight(model: Any) -> None:
    model[1].again.weight = model[1].conv.weight


def _exchange(model: Any) -> None:
    model[1].conv.weight, model[1].again.weight = model[1].again.weight, model[1].conv.weight
    model[1].again.weight = model[1].conv.weight


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model[1], name, value)


#: Changes of the function that a model computes.
_CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": _set("scale", 3),
    "type of a number": _set("scale", 2.0),
    "flag as a number": _set("flag", 1),
    "sign of zero": _set("zero", -0.0),
    "tuple": _set("sizes", (1, True)),
    "function": _set("act", torch.sigmoid),
    "constant for a container": _set("options", 1),
    "container for a constant": _set("scale", [2]),
    "new attribute": _set("added", None),
    "removed attribute": lambda model: delattr(model[1], "scale"),
    "renamed attribute": _rename,
    "item of a list in a dictionary": lambda model: model[1].options["stride"].append(3),
    "item of an array": lambda model: model[1].table.__setitem__(0, 7),
    "attribute of a namespace": lambda model: setattr(model[1].note, "depth", 2),
    "shape of a loose tensor": _set("loose", torch.zeros(3)),
    "attribute of a loose module": lambda model: setattr(model[1].tail[0], "mode", 1),
    "submodule": lambda model: model.__setitem__(2, nn.Sigmoid()),
    "new submodule": lambda model: model.append(nn.ReLU()),
    "removed submodule": lambda model: model.__delitem__(2),
    "submodule set to None": lambda model: setattr(model[1], "norm", None),
    "order of submodules": lambda model: model[1]._modules.__setitem__("conv", model[1]._modules.pop("conv")),
    "shared submodule": _share_module,
    "class": lambda model: setattr(model[2], "__class__", nn.Tanh),
    "parameter for None": lambda model: setattr(model[1], "missing", nn.Parameter(torch.zeros(1))),
    "parameter set to None": lambda model: setattr(model[0], "bias", None),
    "new buffer": lambda model: model[1].register_buffer("extra", torch.zeros(1)),
    "shared weight": _share_weight,
    "exchanged weights": _exchange,
    "shape of a parameter": lambda model: setattr(model[0].weight, "data", torch.zeros(4, 3, 3, 3)),
    "dtype of a buffer": lambda model: setattr(model[1], "counts", torch.zeros(3, dtype=torch.int64)),
    "dtype of all": lambda model: model.double(),
    "parametrization": _parametrize,
    "hook": lambda model: model[0].register_forward_hook(lambda module, inputs, output: output),
    "pre-hook": lambda model: model[2].register_forward_pre_hook(lambda module, inputs: None),
    "attribute of an inner module": lambda model: setattr(model[1].norm, "momentum", 0.5),
}

#: Changes that do not change the fingerprint.
_NEUTRAL_CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "training": lambda model: model.eval(),
    "gradient": lambda model: model[0].weight.requires_grad_(False),
    "values": lambda model: model[0].bias.data.add_(1),
    "other tensor": lambda model: setattr(model[0], "bias", nn.Parameter(model[0].bias.detach().clone())),
    "equal constant": _set("sizes", tuple([1, 2])),  # another object
    "equal container": _set("options", {"stride": [1, 2]}),
    "hook on the root": lambda model: model.register_forward_hook(lambda module, inputs, output: output),
    "unknown object": _set("anything", object()),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_shows_with_a_known_structure(name: str) -> None:
    model = _model()
    first = ModuleSnapshot(model)
    before = module_fingerprint(first)
    assert module_fingerprint(ModuleSnapshot(model, first.structure)) == before
    _CHANGES[name](model)
    changed = ModuleSnapshot(model, first.structure)
    assert module_fingerprint(changed) == module_fingerprint(ModuleSnapshot(model)) != before


@pytest.mark.parametrize("name", _NEUTRAL_CHANGES)
def test_other_changes_do_not_change_the_fingerprint(name: str) -> None:
    model = _model()
    if name == "unknown object":
        model[1].anything = object()
    first = ModuleSnapshot(model)
    before = module_fingerprint(first)
    _NEUTRAL_CHANGES[name](model)
    assert module_fingerprint(ModuleSnapshot(model, first.structure)) == module_fingerprint(ModuleSnapshot(model)) == before


@given(st.lists(st.sampled_from([*_CHANGES, *_NEUTRAL_CHANGES]), min_size=1, max_size=5, unique=True))
def test_a_known_structure_gives_the_snapshot_of_a_new_one(names: list[str]) -> None:
    model, known = _model(), None
    for name in names:
        with_known = ModuleSnapshot(model, known)
        known = with_known.structure
        try:
            {**_CHANGES, **_NEUTRAL_CHANGES}[name](model)
        except (AttributeError, TypeError, RuntimeError, IndexError, KeyError, ValueError):  # after another change that it contradicts
            continue
    ours, fresh = ModuleSnapshot(model, known), ModuleSnapshot(model)
    assert module_fingerprint(ours) == module_fingerprint(fresh)
    for attribute in ("modules", "hooked", "tensors"):
        named = [{name: id(value) for name, value in getattr(snapshot, attribute).items()} for snapshot in (ours, fresh)]
        assert named[0] == named[1] and [*named[0]] == [*named[1]]
    for attribute in ("parameters", "buffers", "open_values"):
        assert [*map(id, getattr(ours, attribute))] == [*map(id, getattr(fresh, attribute))]
    assert (ours.dtype, ours.device) == (fresh.dtype, fresh.device)


def test_an_attribute_that_is_set_back_gives_the_earlier_fingerprint() -> None:
    model, known = _model(), None
    seen = []
    for scale in (2, 3, 2):
        model[1].scale = scale
        snapshot = ModuleSnapshot(model, known)
        known = snapshot.structure
        seen.append(module_fingerprint(snapshot))
    assert seen[0] == seen[2] != seen[1] and hash(seen[0]) == hash(seen[2])


def test_equal_models_have_equal_fingerprints() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.sizes, self.make = nn.Conv2d(3, 4, 1), [1, 2], functools.partial

    assert module_fingerprint(ModuleSnapshot(Plain())) == module_fingerprint(ModuleSnapshot(Plain()))
