"""BatchNorm in training in an untiled segment is one call of torch, unless a node of the decomposed norm has another reader."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import sft
from sft.analysis.passes.pipeline import run_passes
from sft.cli.tune import STANDARD_NETWORKS
from sft.lower.custom_ops.statistics import update_running_statistics
from sft.lower.untiled.whole_norms import BATCH_NORM_FUNCTIONS
from sft.planner.projection import plain_programs
from tests.helpers.exactness import assert_exact
from tests.helpers.models import chain, image, seeded
from tests.helpers.problems import problem_of
from tests.helpers.stage_chains import assert_same_bits_in_stages

pytestmark = pytest.mark.usefixtures("without_proposals")

aten = torch.ops.aten
_SHAPE = (2, 3, 20, 16)


def _net(*norms: nn.Module) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 4, 3, padding=1)]
    for norm in norms:
        layers += [norm, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]
    return chain(*layers)


def _calls(model: nn.Module, *, training: bool = True) -> list[Any]:
    """The functions that the programs of an untiled model call."""
    problem = problem_of(model.train(), (2, 3, 20, 16), training=training, passes=run_passes)
    return [instruction.function for program in plain_programs(problem) for instruction in program.instructions]


def _num_norms(model: nn.Module) -> tuple[int, int]:
    """Number of BatchNorm calls forward and backward."""
    calls = _calls(model)
    return sum(call in BATCH_NORM_FUNCTIONS for call in calls), calls.count(aten.native_batch_norm_backward.default)


class _Twice(nn.Module):
    """One module called twice: the second call updates the statistics of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        both: Tensor = self.norm(y) + self.norm(torch.relu(y))
        return both


class _MadeWeight(nn.Module):
    """A norm with a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.raw = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(self.conv(x), None, None, torch.exp(self.raw), None, training=True)


class _Gated(nn.Module):
    """A norm with two readers, one of them after a barrier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y * torch.sigmoid(self.last(y.mean((2, 3), keepdim=True)))


_WHOLE: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: _net(nn.BatchNorm2d(4)),
    "without affine": lambda: _net(nn.BatchNorm2d(4, affine=False)),
    "without statistics": lambda: _net(nn.BatchNorm2d(4, track_running_stats=False)),
    "another momentum": lambda: _net(nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)),
    "made weight": _MadeWeight,
    "gated": _Gated,
    "cumulative": lambda: _net(nn.BatchNorm2d(4, momentum=None)),
    "called twice": _Twice,
}
_APART: dict[str, Callable[[], nn.Module]] = {
    "of samples": lambda: _net(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "of groups": lambda: _net(nn.GroupNorm(2, 4)),
}


@pytest.mark.parametrize("name", _WHOLE)
def test_norms_are_one_call(name: str) -> None:
    num_norms = 2 if name == "called twice" else 1
    assert _num_norms(seeded(_WHOLE[name]).float()) == (num_norms, num_norms)


@pytest.mark.parametrize("name", _APART)
def test_other_norms_stay_in_parts(name: str) -> None:
    assert _num_norms(seeded(_APART[name]).float()) == (0, 0)


@pytest.mark.parametrize("name", [*_WHOLE, *_APART])
def test_norms_of_whole_images_are_exact(name: str) -> None:
    """Outputs, gradients and statistics, within the projection."""
    report = assert_exact(seeded((_WHOLE | _APART)[name]), image(*_SHAPE), budget="1GiB")
    assert [segment.mode for segment in report.plan.segments] == ["whole"]


@pytest.mark.parametrize("dims", [1, 3])
def test_norms_of_other_ranks(dims: int) -> None:
    conv, norm = {1: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv3d, nn.BatchNorm3d)}[dims]
    shape = (2, 3, *(20, 6, 5)[:dims])
    assert_exact(seeded(partial(lambda: chain(conv(3, 4, 3, padding=1), norm(4), nn.ReLU()))), image(*shape), budget="1GiB")


def test_norms_of_half_precision_models_stay_in_parts() -> None:
    """With parameters in half precision the decomposed norm computes in fp32."""
    model = seeded(lambda: _net(nn.BatchNorm2d(4))).bfloat16()
    net = sft.compile(model, (2, 3, 20, 16), budget="1GiB")
    y = net(torch.randn(2, 3, 20, 16).bfloat16())
    assert y.dtype == torch.bfloat16 and y.isfinite().all()


class _Mixed(nn.Module):
    """A model in half precision with norms in fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model.to(dtype), dtype
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x.to(self.dtype))
        return y


def _step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradients and running statistics of a step, in double precision."""
    y = module(x)
    y.double().square().sum().backward()
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    statistics = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    return [value.detach().double() for value in (y, *grads, *statistics)]


def _total_error(values: list[Tensor], truth: list[Tensor]) -> float:
    """Sum of relative errors, since those of single tensors vary."""
    return sum(float((value - true).norm() / true.norm().clamp_min(1e-6)) for value, true in zip(values, truth, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_of_half_precision_images_are_one_call(dtype: torch.dtype) -> None:
    """Parameters and statistics in fp32: outputs, gradients and running statistics are as near to fp64 as eager PyTorch's."""
    model = _Mixed(seeded(lambda: _net(nn.BatchNorm2d(4), nn.BatchNorm2d(4))), dtype).train()
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact.dtype = torch.float64
    assert _num_norms(copy.deepcopy(model)) == (2, 2)
    net = sft.compile(model, _SHAPE, budget="1GiB")
    x = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)

    truth, ours, theirs = _step(exact, x), _step(net, x), _step(eager, x)
    assert len(ours) == len(theirs) == len(truth)
    assert _total_error(ours, truth) <= 1.1 * _total_error(theirs, truth)


def test_a_half_precision_resnet_has_few_more_instructions_than_eager() -> None:
    """ResNet-18 in training, untiled, in bfloat16 with norms in fp32: instructions next to the operators that eager PyTorch dispatches."""
    model, shape = _Mixed(STANDARD_NETWORKS["resnet18 in training"](), torch.bfloat16), (1, 3, 64, 64)
    parameters = dict(model.named_parameters())
    programs = plain_programs(problem_of(model, shape, training=True, passes=run_passes))
    num_instructions = sum(len(program.instructions) for program in programs if program is not None)

    def step(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        y = torch.func.functional_call(model, dict(zip(parameters, values, strict=True)), (x,))
        return torch.autograd.grad(y.sum(), values)

    traced = make_fx(step)(torch.randn(shape), *parameters.values())
    eager = [node for node in traced.graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)]
    assert num_instructions <= 1.45 * len(eager)


@pytest.mark.parametrize(
    ("parameters", "statistics", "casts", "updates"),
    [
        pytest.param(torch.bfloat16, torch.bfloat16, False, True, id="all in half precision"),
        pytest.param(torch.bfloat16, torch.float32, False, True, id="statistics in fp32"),
        pytest.param(torch.float32, torch.float32, False, True, id="norms in fp32"),
        pytest.param(None, torch.bfloat16, True, True, id="biases in fp32"),
    ],
)
def test_parameters_of_any_type_are_arguments_on_a_gpu(
    parameters: torch.dtype | None, statistics: torch.dtype, casts: bool, updates: bool
) -> None:
    """ATen's kernels for a GPU compute in fp32; they take parameters of one type."""
    import gpu_plans

    with torch.device("meta"):
        model = _net(nn.BatchNorm2d(4), nn.BatchNorm2d(4)).to(torch.bfloat16)
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.to(statistics)
            norm.weight.data, norm.bias.data = norm.weight.to(parameters or torch.bfloat16), norm.bias.to(parameters or torch.float32)
    _, fitted = gpu_plans.fitted_plan(model, _SHAPE, "1GiB")
    segments: Any = fitted.projected.region.segments
    programs = [program for segment in segments for program in segment.lowered_programs]
    instructions = [instruction for program in programs for instruction in program.instructions]
    calls = [instruction.function for instruction in instructions]
    assert sum(call in BATCH_NORM_FUNCTIONS for call in calls) == calls.count(aten.native_batch_norm_backward.default) == 2
    assert aten.var_mean.correction not in calls
    assert any(i.function is aten._to_copy.default and "conv" not in i.owner for i in instructions) == casts
    assert (update_running_statistics not in calls) == updates


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_norms_on_a_gpu_are_as_near_to_fp64_as_eager(dtype: torch.dtype, is_mixed: bool) -> None:
    """Outputs, gradients, and running statistics in half precision or fp32."""
    plain = seeded(lambda: _net(nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3)))
    model: Any = (_Mixed(plain, dtype) if is_mixed else plain.to(dtype)).cuda().train()
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact.dtype = torch.float64
    x = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)).to("cuda", dtype)
    net: Any = sft.compile(model, x, budget="1GiB")
    truth, ours, theirs = _step(exact, x.double()), _step(net, x), _step(eager, x)
    own_error, eager_error = (_total_error(values, truth) for values in (ours, theirs))
    assert own_error <= 1.1 * eager_error


def test_frozen_weights_have_no_gradient() -> None:
    def make() -> nn.Module:
        model = _net(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
        model[1].weight.requires_grad_(False)  # type: ignore[index]
        return model

    assert_exact(seeded(make), image(*_SHAPE), budget="1GiB")


@given(
    shape=st.tuples(st.integers(1, 3), st.just(3), st.integers(3, 24), st.integers(3, 24)),
    kinds=st.lists(st.sampled_from(["plain", "no affine", "no statistics"]), min_size=1, max_size=3),
    tile=st.sampled_from([None, None, (4, None), (5, 7)]),
)
def test_any_mixture_is_exact(shape: tuple[int, int, int, int], kinds: list[str], tile: tuple[int, int | None] | None) -> None:
    """Also if only some nodes of a norm are tiled."""
    made = {"plain": {}, "no affine": {"affine": False}, "no statistics": {"track_running_stats": False}}
    norms = [nn.BatchNorm2d(4, **made[kind]) for kind in kinds]
    options = sft.Options() if tile is None else sft.Options(tile=tile)
    assert_exact(seeded(lambda: _net(*norms)), image(*shape), budget="1GiB", options=options)


class _Block(nn.Module):
    """A residual block with a norm in its shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.short = nn.Conv2d(3, 4, 1, 2)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.norms[2](self.short(x)))


@pytest.mark.parametrize("strategy", ["sqrt", "revolve", "optimal", "acg"])
def test_plans_in_stages_compute_the_same_bits(strategy: str) -> None:
    """A stage that runs twice updates running statistics once, and every norm is one call, as in the untiled model."""
    original = seeded(lambda: chain(*(layer for _ in range(3) for layer in (_Block(), nn.Conv2d(4, 3, 1))))).float().train()
    assert_same_bits_in_stages(original, (2, 3, 64, 48), strategy)
