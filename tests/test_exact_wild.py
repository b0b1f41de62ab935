"""Random networks of every kind of operator, one to three axes, at forced strips and panels: equal to eager PyTorch."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .helpers.exactness import assert_exact
from .helpers.wild import WildNet, wild_tilings, wilds


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_random_network_is_exact(data: st.DataObject) -> None:
    wild = data.draw(wilds(), label="network")
    options = data.draw(wild_tilings(wild), label="options")
    assert_exact(WildNet(wild), wild.image(), options=options)
