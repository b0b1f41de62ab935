"""Random networks on a device against eager PyTorch on the CPU, in float64: outputs, gradients and buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import sft
from tests.helpers.random_networks import assert_wild_exact_on, wild_tilings, wilds

_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
_ROUNDS = [("cpu", 0, 4), *((pytest.param("cuda", number, 12, marks=_GPU)) for number in range(24))]


@pytest.mark.parametrize(("device", "number", "num_networks"), _ROUNDS)
def test_random_networks(device: str, number: int, num_networks: int) -> None:
    """Even rounds have plans without strips, which run the operators on full images."""

    def check(data: st.DataObject) -> None:
        wild = data.draw(wilds(max_wishes=5), label="network")
        options = data.draw(wild_tilings(wild), label="options") if number % 2 else sft.Options(strategy="none")
        assert_wild_exact_on(torch.device(device), wild, options)

    runs = settings(max_examples=num_networks, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    seed(number)(runs(given(st.data())(check)))()
