"""`unfold` and `fold`, whole: exact, and no byte more than planned (ATen leaves their results room that they do not fill)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sft

from .helpers.exactness import assert_exact
from .helpers.models import image, seeded

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "there and back": lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2), x.shape[-2:], 3, padding=1, stride=2),
    "patches far apart": lambda x: F.unfold(x, 2, stride=7),
    "overlapping": lambda x: F.unfold(x, (5, 3), dilation=(1, 2)).mean(2, keepdim=True),
    "a mean of windows": lambda x: F.fold(F.unfold(x, 3), x.shape[-2:], 3) / F.fold(F.unfold(torch.ones_like(x), 3), x.shape[-2:], 3),
    "local attention": lambda x: (F.unfold(x, 3, padding=1).view(x.shape[0], 4, 9, *x.shape[2:]).softmax(2) * x[:, :, None]).sum(2),
}


class _Folded(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_patches_are_exact_and_within_the_budget(name: str) -> None:
    model = seeded(lambda: _Folded(_FUNCTIONS[name]))
    assert_exact(model, image(2, 3, 33, 27))
    assert_exact(model, image(1, 3, 64, 40), options=sft.Options(tile=(16, None)))
