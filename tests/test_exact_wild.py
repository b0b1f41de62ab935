"""Random networks of every kind of operator, one to three axes, at forced strips and panels: equal to eager PyTorch."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft

from .helpers.exactness import assert_exact
from .helpers.models import image, seeded
from .helpers.wild import WildNet, wild_tilings, wilds


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_random_network_is_exact(data: st.DataObject) -> None:
    wild = data.draw(wilds(), label="network")
    options = data.draw(wild_tilings(wild), label="options")
    assert_exact(WildNet(wild), wild.image(), options=options)


class _ReturnsItsInput(nn.Module):
    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.conv, self.alone = nn.Conv2d(3, 3, 3, padding=1), alone

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return x if self.alone else (x, self.conv(x))


@pytest.mark.parametrize("tile", [None, (4, None), (4, 9)], ids=str)
@pytest.mark.parametrize("alone", [True, False])
def test_an_input_that_is_an_output_too(alone: bool, tile: tuple[int, int | None] | None) -> None:
    """Its gradient is autograd's sum of two, or a copy of one: bytes that no segment makes."""
    assert_exact(seeded(lambda: _ReturnsItsInput(alone=alone)), image(1, 3, 64, 32), options=sft.Options(tile=tile))
