"""Snapshots of a model agree with PyTorch's own traversals."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sft.common.module_snapshot import ModuleSnapshot
from tests.helpers.models import chain, seeded


class _Tied(nn.Module):
    """A module at two paths, a weight at two, a buffer at two, and entries that are None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.nothing = None
        self.register_parameter("missing", None)
        counts = torch.zeros(3)
        self.register_buffer("counts", counts)
        self.inner = chain(nn.BatchNorm2d(4), nn.Dropout())
        self.inner.register_buffer("counts", counts)


def test_the_snapshot_has_the_modules_and_tensors_of_torch() -> None:
    model = seeded(_Tied).float()
    contents = ModuleSnapshot(model)
    modules = [*contents.modules.values()]
    named_modules = [(path, modules[position]) for path, position in contents.structure.named_modules]
    assert named_modules == list(model.named_modules(remove_duplicate=False))
    assert list(contents.modules.items()) == list(model.named_modules())
    for tensors, wanted in ((contents.parameters, model.parameters()), (contents.buffers, model.buffers())):
        assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in wanted]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert {name: id(tensor) for name, tensor in contents.tensors.items()} == {name: id(tensor) for name, tensor in named}
    assert contents.dtype == torch.float32 and contents.device.type == "cpu"


def test_numbers_are_those_of_the_first_tensor_that_has_any() -> None:
    model = nn.Module()
    assert ModuleSnapshot(model).dtype is None and ModuleSnapshot(model).device == torch.device("cpu")
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int64, device="meta"))
    assert ModuleSnapshot(model).dtype is None and ModuleSnapshot(model).device == torch.device("cpu")
    model.register_buffer("mean", torch.zeros(3, dtype=torch.bfloat16, device="meta"))
    assert ModuleSnapshot(model).dtype == torch.bfloat16 and ModuleSnapshot(model).device.type == "meta"


def test_a_module_that_contains_itself_is_visited_once() -> None:
    model = chain(nn.Conv2d(3, 4, 1), nn.ReLU())
    model[1].around = model
    assert [name for name, _ in ModuleSnapshot(model).structure.named_modules] == ["", "0", "1"]


def test_a_structure_is_taken_over_and_keeps_no_module_and_no_tensor_alive() -> None:
    model = chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    first = ModuleSnapshot(model)
    structure = first.structure
    model.eval()
    model[0].weight.requires_grad_(False)
    assert ModuleSnapshot(model, structure).structure is structure
    replaced = weakref.ref(model[0].weight), weakref.ref(model[1])
    model[0].weight = nn.Parameter(torch.zeros(4, 3, 1, 1))
    again = ModuleSnapshot(model, structure)
    assert again.structure is structure and again.tensors["0.weight"] is model[0].weight
    model[1] = nn.BatchNorm2d(4)
    del first, again
    assert [reference() for reference in replaced] == [None, None]
    assert ModuleSnapshot(model, structure).structure is not structure


def _untie(model: Any) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach().clone())


def _reorder(model: Any) -> None:
    model._modules["first"] = model._modules.pop("first")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.inner[1], "p", 0.25),
        lambda model: setattr(model.inner[0], "affine", 1),  # equal to True
        lambda model: setattr(model, "nothing", 0),
        lambda model: setattr(model, "added", 0),
        lambda model: delattr(model, "nothing"),
        lambda model: setattr(model, "nothing", []),  # its content may change in place
        lambda model: setattr(model, "first", nn.Linear(4, 4)),
        lambda model: setattr(model, "again", None),
        lambda model: setattr(model.inner, "counts", None),
        lambda model: setattr(model, "counts", None),
        lambda model: setattr(model, "missing", nn.Parameter(torch.zeros(2))),
        lambda model: model.register_buffer("more", None),
        lambda model: setattr(model.inner[0], "running_var", model.inner[0].running_mean),
        _untie,
        _reorder,
        lambda model: setattr(model.inner[1], "__class__", nn.Dropout2d),
    ],
)
def test_a_structure_that_has_changed_is_not_taken_over(change: Callable[[Any], None]) -> None:
    model: Any = seeded(_Tied)
    structure = ModuleSnapshot(model).structure
    model.inner[0].register_forward_hook(lambda *_: None)
    model.counts.add_(1)
    assert ModuleSnapshot(model, structure).structure is structure
    change(model)
    changed = ModuleSnapshot(model, structure).structure
    assert changed is not structure and changed.key != structure.key
    assert ModuleSnapshot(model, changed).structure is changed and changed.key == ModuleSnapshot(model).structure.key


def test_submodules_with_hooks_and_values_of_open_attributes() -> None:
    model: Any = seeded(_Tied)
    model.first.scales, model.inner.sizes, model.inner.names = [1, 2], [3], {"a": 1}
    model.register_forward_hook(lambda *_: None)
    model.inner[0].register_full_backward_hook(lambda *_: None)
    model.inner.register_forward_pre_hook(lambda *_: None)
    contents = ModuleSnapshot(model, ModuleSnapshot(model).structure)
    assert contents.open_values == [[1, 2], [3], {"a": 1}]
    assert contents.hooked == {"inner": model.inner, "inner.0": model.inner[0]}
