"""Random networks of every kind of operator, one to three axes, at forced strips and panels: equal to eager PyTorch."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from tests.helpers.exactness import InexactError, assert_exact, rounding_of_eager
from tests.helpers.examples import at_most
from tests.helpers.models import image, seeded
from tests.helpers.random_networks import Wild, WildNet, Wish, assert_wild_exact, wild_budget, wild_plannings, wild_tilings, wilds


@settings(at_most(6, one_in=15), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_random_network_is_exact(data: st.DataObject) -> None:
    wild = data.draw(wilds(), label="network")
    options = data.draw(wild_tilings(wild), label="options")
    assume(assert_wild_exact(wild, options) is not None)


@settings(max_examples=max(3, settings().max_examples // 30), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_random_network_is_exact_at_any_budget(data: st.DataObject) -> None:
    wild = data.draw(wilds(), label="network")
    options, share = data.draw(wild_plannings(), label="options and share of plain PyTorch's budget")
    assume(assert_wild_exact(wild, options, budget=wild_budget(wild, options, share)) is not None)


class _ReturnsItsInput(nn.Module):
    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.conv, self.alone = nn.Conv2d(3, 3, 3, padding=1), alone

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return x if self.alone else (x, self.conv(x))


@pytest.mark.parametrize("tile", [None, (4, None), (4, 9)], ids=str)
@pytest.mark.parametrize("alone", [True, False])
def test_an_input_that_is_an_output_too(alone: bool, tile: tuple[int, int | None] | None) -> None:
    """Its gradient is autograd's sum of two, or a copy of one: bytes outside of all segments."""
    assert_exact(seeded(lambda: _ReturnsItsInput(alone=alone)), image(1, 3, 64, 32), options=sft.Options(tile=tile))


#: A norm over an image that is constant by chance: a mean of one column, interpolated from one pixel of it.
_CONSTANT = Wild(
    shape=(1, 1, 19, 10),
    wishes=(
        Wish("conv", 0, (2, 5, 1, 3, 0, 0)),
        Wish("gate", 0, (44, 37, 0, 0, 0, 0)),
        Wish("conv", 0, (32, 0, 0, 23, 0, 0)),
        Wish("conv", 0, (0, 0, 0, 0, 0, 0)),
        Wish("interpolate", 0, (0, 0, 0, 0, 0, 0)),
        Wish("adaptive", 0, (5, 55, 0, 0, 0, 0)),
        Wish("conv", 0, (0, 0, 0, 0, 0, 0)),
        Wish("norm", 1, (59, 0, 0, 0, 0, 0)),
    ),
    extra_output=0,
    head=False,
    seed=0,
)


def test_pure_rounding_errors_are_detected() -> None:
    """Eager PyTorch's own result is 1e-14 there, and changes when a bias changes by its last bit."""
    x, options = _CONSTANT.image(), sft.Options(halo="carry", tile=(1, 10), batch_tile=1)
    with pytest.raises(InexactError):
        assert_exact(WildNet(_CONSTANT), x, options=options)
    assert rounding_of_eager(WildNet(_CONSTANT), x, weights=True) > 1e-3
    assert assert_wild_exact(_CONSTANT, options) is None


#: A pool of the input that runs whole, and a convolution in strips: the pool is the first with a gradient of the input.
_TWO_READERS = Wild(
    shape=(3, 4, 18, 15),
    wishes=(
        Wish("conv", 0, (2, 5, 1, 3, 0, 0)),
        Wish("channels", 0, (51, 40, 30, 12, 33, 18)),
        Wish("adaptive", 2, (34, 52, 3, 12, 53, 37)),
    ),
    extra_output=1,
    seed=163,
)


def test_the_gradient_of_an_input_is_not_copied_beyond_the_projected_peak() -> None:
    """Regression: it was channels last, and autograd copied it when all other gradients were allocated."""
    assert assert_wild_exact(_TWO_READERS, sft.Options(), budget=wild_budget(_TWO_READERS, sft.Options(), 0.0)) is not None
