"""Random networks on a device against eager PyTorch on the CPU, in float64: outputs, gradients and buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import sft
from tests.helpers import random_networks
from tests.helpers.exactness import InexactError
from tests.helpers.random_networks import Wild, Wish, assert_wild_exact_on, wild_tilings, wilds

_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
_ROUNDS = [("cpu", 0, 4), *((pytest.param("cuda", number, 12, marks=_GPU)) for number in range(24))]


@pytest.mark.parametrize(("device", "number", "num_networks"), _ROUNDS)
def test_random_networks(device: str, number: int, num_networks: int) -> None:
    """Even rounds have plans without strips, which run the operators on full images. All networks of a round run, none is made smaller."""
    inexact: list[InexactError] = []

    def check(data: st.DataObject) -> None:
        wild = data.draw(wilds(max_wishes=5), label="network")
        options = data.draw(wild_tilings(wild), label="options") if number % 2 else sft.Options(strategy="none")
        try:
            assert_wild_exact_on(torch.device(device), wild, options)
        except InexactError as error:
            inexact.append(error)

    runs = settings(
        max_examples=num_networks, deadline=None, suppress_health_check=list(HealthCheck), database=None, phases=(Phase.generate,)
    )
    seed(number)(runs(given(st.data())(check)))()
    assert not inexact, "\n".join(map(str, inexact))


_CONVOLUTION = Wild(shape=(1, 2, 9, 7), wishes=(Wish("conv", 0, (2, 5, 1, 3, 0, 0)),))


def test_results_of_eager_pytorch_on_the_device_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter((1e-8, 1e-14))  # to eager PyTorch on the CPU, and on the device
    monkeypatch.setattr(random_networks, "_largest_error", lambda *_: next(errors))
    assert assert_wild_exact_on(torch.device("cpu"), _CONVOLUTION, sft.Options(tile=(4, None))) == 1e-14


def test_results_of_neither_device_are_inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_networks, "_largest_error", lambda *_: 1e-8)
    with pytest.raises(InexactError, match=r"error 1\.0e-08 on cpu.*kind='conv'.*tile=\(4, None\)"):
        assert_wild_exact_on(torch.device("cpu"), _CONVOLUTION, sft.Options(tile=(4, None)))


def test_networks_without_parameters_have_only_the_gradient_of_the_image() -> None:
    pool = Wild(shape=(1, 2, 9, 7), wishes=(Wish("pool", 0, (2, 5, 1, 3, 0, 0)),))
    error = assert_wild_exact_on(torch.device("cpu"), pool, sft.Options(tile=(4, None)))
    assert error is not None and error <= 1e-10
