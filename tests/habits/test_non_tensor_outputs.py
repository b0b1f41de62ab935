"""Non-tensor outputs of a model: numbers, texts, None, in any structure that torch.export supports."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.torch_internals import pytree
from tests.helpers.models import image, seeded

_Function = Callable[[Tensor, Tensor], Any]


@dataclass
class _Output:
    mask: Tensor
    loss: Tensor | None = None


torch.export.register_dataclass(_Output, serialized_type_name="sft.tests._Output")

#: Of a value and the image.
_FUNCTIONS: dict[str, _Function] = {
    "none behind": lambda y, x: (y, None),
    "none in front": lambda y, x: [None, None, y, y * 2, None],
    "constants": lambda y, x: (3, y, "logits", True, 2.5),
    "a shape": lambda y, x: (y, tuple(x.shape)),  # a torch.Size would become a tuple
    "numbers of sizes": lambda y, x: OrderedDict(mask=y, ratio=x.shape[-1] / x.shape[-2], columns=x.shape[-1]),
    "nested": lambda y, x: (y, (list(x.shape[2:]), {"aux": None, "mean": y.mean((2, 3))})),
    "a dataclass": lambda y, x: _Output(mask=y),
}


class _Returning(nn.Module):
    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv(x), x)


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_the_structure_is_that_of_eager(name: str) -> None:
    model = seeded(lambda: _Returning(_FUNCTIONS[name]))
    net = sft.compile(model, (1, 3, None, None), options=sft.Options(tile=(5, None)))
    for size in ((16, 20), (30, 18)):  # of one capture
        x = image(1, 3, *size)
        (leaves_of_net, spec), (expected, wanted) = pytree.tree_flatten(net(x)), pytree.tree_flatten(model(x))
        assert spec == wanted
        for ours, theirs in zip(leaves_of_net, expected, strict=True):
            if isinstance(theirs, Tensor):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            else:
                assert type(ours) is type(theirs)
                assert ours == theirs
        grads = [
            torch.autograd.grad([leaf.sum() for leaf in leaves if isinstance(leaf, Tensor)], list(model.parameters()))
            for leaves in (leaves_of_net, expected)
        ]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


def test_outputs_in_files_and_on_the_host_are_counted_without_the_others(tmp_path: Any) -> None:
    model = seeded(lambda: _Returning(_FUNCTIONS["none in front"]))
    x = image(1, 3, 16, 20)
    outputs = sft.compile(model, x.shape, output=[tmp_path / "a.npy", "host"])(x)
    assert [value is None for value in outputs] == [True, True, False, False, True]
    torch.testing.assert_close(outputs[3], model(x)[3])
    with pytest.raises(sft.InputError, match="2 output"):
        sft.compile(model, x.shape, output=tmp_path / "a.npy")(x)


def test_a_number_that_changes_with_each_call_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.calls = nn.Conv2d(3, 4, 3), 0

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            self.calls += 1
            return self.conv(x), self.calls

    with pytest.raises(sft.UnsupportedError, match="sets calls"):
        sft.compile(Counting(), (1, 3, 16, 16))


class _Unregistered:
    def __init__(self, mask: Tensor) -> None:
        self.mask = mask


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y, x: _Unregistered(y), r"returns a \S+_Unregistered, .* register the class"),
        (lambda y, x: None, "returns no tensor"),
        (lambda y, x: (x.shape[-1], "a"), "returns no tensor"),
    ],
)
def test_unsupported_outputs_are_named(function: _Function, message: str) -> None:
    with pytest.raises(sft.UnsupportedError, match=message):
        sft.compile(_Returning(function), (1, 3, 16, 16))
