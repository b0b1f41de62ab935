"""Next values of buffers in untiled segments are computed together, by the norms or from moments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.backends.selector import AlwaysKernel
from sft.common.torch_internals import copy_tensors
from sft.lower.custom_ops.statistics import running_mean, running_var, update_counters, update_running_statistics
from sft.planner.projection import plain_programs
from tests.helpers.exactness import assert_exact
from tests.helpers.problems import problem_of, with_resources

pytestmark = pytest.mark.usefixtures("without_proposals")


class _Norms(nn.Module):
    """Convolutions with norms; the norm ``shared`` runs twice."""

    def __init__(self, *norms: nn.Module, shared: int | None = None) -> None:
        super().__init__()
        self.norms, self.shared = nn.ModuleList(norms), shared
        self.convs = nn.ModuleList([nn.Conv2d(4 if number else 3, 4, 3, padding=1) for number in range(len(norms))])

    def forward(self, x: Tensor) -> Tensor:
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            x = norm(x).relu() if number == self.shared else x.relu()
        return x


def _calls(model: nn.Module, backend: KernelBackend | None) -> Counter[Any]:
    """Functions of the forward program of an untiled step, with their numbers."""
    problem = with_resources(problem_of(model, (2, 3, 16, 12), training=True, passes=run_passes), backend=backend)
    return Counter(instruction.function for instruction in plain_programs(problem)[0].instructions)


def _plain(count: int, **options: Any) -> list[nn.Module]:
    return [nn.BatchNorm2d(4, **options) for _ in range(count)]


@pytest.mark.parametrize(
    ("norms", "shared", "num_grouped", "num_single"),
    [
        pytest.param(_plain(3), None, 1, 0, id="three norms"),
        pytest.param([*_plain(2), *_plain(2, momentum=0.3)], None, 2, 0, id="two momenta"),
        pytest.param([*_plain(3), *_plain(1, momentum=0.3)], None, 1, 2, id="one norm of another momentum"),
        pytest.param([*_plain(3), *_plain(2, momentum=None)], None, 1, 4, id="cumulative averages"),
        pytest.param([*_plain(3), *_plain(2, track_running_stats=False)], None, 1, 0, id="without statistics"),
        pytest.param(_plain(1), None, 0, 2, id="one norm"),
        pytest.param(_plain(4), 1, 1, 4, id="a norm that runs twice"),
    ],
)
def test_statistics_of_one_momentum_are_updated_together(
    norms: list[nn.Module], shared: int | None, num_grouped: int, num_single: int
) -> None:
    decomposed = _calls(_Norms(*norms, shared=shared), KernelBackend(selector=AlwaysKernel()))
    assert decomposed[update_running_statistics] == num_grouped
    assert decomposed[running_mean] + decomposed[running_var] == num_single
    assert decomposed[update_counters] == (1 if len(norms) >= 3 else 0)
    on_cpu = _calls(_Norms(*norms, shared=shared), None)
    assert on_cpu[update_running_statistics] == num_grouped  # in plans in stages, too: they compute the same bits
    assert on_cpu[running_mean] + on_cpu[running_var] == num_single
    on_gpu = _calls(_Norms(*norms, shared=shared), KernelBackend(selector=None, fusion_device=FusionDevice(None)))
    assert on_gpu[update_running_statistics] == 0  # the calls of the norms update them
    num_cumulative = sum(isinstance(norm, nn.BatchNorm2d) and norm.momentum is None for norm in norms)
    assert on_gpu[running_mean] + on_gpu[running_var] == 2 * num_cumulative
    assert on_gpu[copy_tensors] == 1


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"tile": (8, None)}], ids=["untiled", "strips"])
@pytest.mark.parametrize("shared", [None, 1])
def test_buffers_outputs_and_gradients_are_those_of_the_model(options: dict[str, Any], shared: int | None) -> None:
    torch.manual_seed(0)
    norms = [*_plain(3), *_plain(2, momentum=None), *_plain(3, momentum=0.3, affine=False)]
    assert_exact(_Norms(*norms, shared=shared), torch.randn(2, 3, 16, 12), options=sft.Options(**options))


class _Counting(nn.Module):
    """Buffers that a forward pass increments: an integer, a vector, a number, and one with another reader."""

    steps: Tensor
    samples: Tensor
    vector: Tensor
    number: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("samples", torch.tensor(5))
        self.register_buffer("vector", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("number", torch.tensor(0.5))
        self.register_buffer("scale", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.samples += 2
        self.vector += 1
        self.number += 1
        self.scale += 1
        y: Tensor = self.conv(x) * self.scale
        return y


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"tile": (8, None)}], ids=["untiled", "strips"])
def test_counters_of_any_kind_are_exact(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert_exact(_Counting(), torch.randn(2, 3, 16, 12), options=sft.Options(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_update_takes_no_more_memory_than_projected(dtype: torch.dtype) -> None:
    channels = 4096
    moments = [torch.rand(1, channels, 3) + 1 for _ in range(3)]
    running = [torch.rand(channels, dtype=dtype) for _ in range(6)]
    targets = [torch.empty_like(each) for each in running]
    with sft.measure_peak("cpu") as peak:
        update_running_statistics(targets, moments, moments, running, 0.1)
    assert 0 < peak.num_bytes <= 8 * 6 * channels * 4
    for number, (target, before) in enumerate(zip(targets, running, strict=True)):
        alone = (running_mean if number < 3 else running_var)(moments[number % 3], before, 0.1)
        torch.testing.assert_close(target, alone)
