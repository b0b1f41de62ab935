"""Helpers of tests: errors that they must detect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import sft
from examples.models import resnet18, unet
from sft.common.torch_internals import pytree
from tests.helpers.dag_nets import Activation, AvgPool, Conv, Dag, DagNet, Head, Join, MaxPool, Norm, Upsample
from tests.helpers.dags import dags, tilings
from tests.helpers.exactness import gradient_errors, relative_error, rounding_of_eager
from tests.helpers.flops import FlopMeter
from tests.helpers.poison import poisoned


def test_poison_fills_every_kind_of_allocation() -> None:
    like = torch.zeros(3)
    with poisoned():
        floats = [
            torch.empty(2),
            torch.empty_like(like),
            torch.empty_strided((2, 2), (2, 1)),
            like.new_empty(3),
            like.new_empty_strided((3,), (1,)),
            torch.ops.aten.empty.memory_format([2], device="cpu"),
            torch.empty(2, dtype=torch.bfloat16),
        ]
        integers = [torch.empty(2, dtype=torch.int64), torch.empty(2, dtype=torch.uint8)]
        flags = torch.empty(2, dtype=torch.bool)
        zeros = torch.zeros(4)
    assert all(bool(buffer.isnan().all()) for buffer in floats)
    assert all(bool((buffer == torch.iinfo(buffer.dtype).max).all()) for buffer in integers)
    assert bool(flags.all()) and not bool(zeros.any())


def test_poison_ends() -> None:
    def settings() -> tuple[bool, bool, bool]:
        flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        return *flags, torch._C._get_deterministic_fill_uninitialized_memory()

    before = settings()
    with pytest.raises(ZeroDivisionError), poisoned():
        assert settings() != before
        raise ZeroDivisionError
    assert settings() == before


def test_poison_writes_nothing_into_a_traced_program() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape).copy_(x)

    with poisoned():
        traced = make_fx(program, tracing_mode="fake")(torch.zeros(2))
    assert "fill" not in traced.code


@pytest.mark.parametrize("build", [resnet18, unet])
def test_flops_are_torchs(build: Callable[[int], nn.Module]) -> None:
    model = build(4)
    counts = []
    for counter in (FlopMeter(), FlopCounterMode(display=False)):
        with counter:
            model(torch.ones(1, 3, 64, 48)).sum().backward()
        counts.append(counter.flops if isinstance(counter, FlopMeter) else counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_relative_error() -> None:
    reference = torch.tensor([4.0, 0.0])
    assert relative_error(torch.tensor([4.0, 1.0]), reference) == 0.25
    assert relative_error(reference, reference) == 0.0
    assert relative_error(torch.tensor([4.0, float("nan")]), reference) == float("inf")
    assert relative_error(torch.tensor([1e-30]), torch.tensor([0.0])) == float("inf")
    with pytest.raises(AssertionError, match="shape"):
        relative_error(torch.zeros(1, 2), reference)
    with pytest.raises(AssertionError, match="dtype"):
        relative_error(reference.double(), reference)


def test_a_gradient_is_scaled_by_the_largest_of_its_module() -> None:
    reference = {
        "conv.weight": torch.tensor([10.0]),
        "conv.bias": torch.tensor([0.0]),
        "other.bias": torch.tensor([0.0]),
    }
    ours = {**reference, "conv.bias": torch.tensor([1.0])}
    assert gradient_errors(ours, reference)["conv.bias"] == 0.1
    ours = {**reference, "other.bias": torch.tensor([1.0])}
    assert gradient_errors(ours, reference)["other.bias"] == pytest.approx(100.0)  # on a thousandth of the model's largest
    with pytest.raises(AssertionError, match=r"other\.bias"):
        gradient_errors({**reference, "other.bias": None}, reference)


@settings(max_examples=30)
@given(data=st.data())
def test_a_dag_prints_as_an_expression_that_rebuilds_it(data: st.DataObject) -> None:
    dag = data.draw(dags())
    names = (Activation, AvgPool, Conv, Dag, Head, Join, MaxPool, Norm, Upsample)
    rebuilt = eval(repr(dag), {cls.__name__: cls for cls in names})
    assert rebuilt == dag
    first, second = (pytree.tree_leaves(DagNet(d)(d.image())) for d in (dag, rebuilt))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    options = data.draw(tilings(dag))
    assert isinstance(options, sft.Options)


def test_rounding_of_eager_detects_an_ill_conditioned_model() -> None:
    """A norm of nearly equal values divides by their differences; a convolution only adds."""
    x = torch.rand(1, 3, 6, 5, dtype=torch.float64)
    assert 0 < rounding_of_eager(nn.Conv2d(3, 3, 3), x, steps=1) < 1e-14
    assert rounding_of_eager(nn.BatchNorm2d(3, eps=1e-20), 1 + 1e-6 * x, steps=1) > 1e-11
