"""Programs for a GPU run a convolution and its ReLU as one call; all other convolutions stay, and memory and FLOPs do not increase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.backends.autotune.cases import CaseCollector
from sft.backends.convolution_relu import FusionDevice, convolution_add_relu, convolution_relu
from sft.backends.resolve import backend_for
from sft.backends.rewriter import KernelBackend
from sft.lower.context import Backend
from sft.lower.custom_ops.windows import raise_to_first_pixels
from sft.lower.program import Program
from sft.planner.plan import SegmentChoice
from sft.planner.problem import PlanningProblem
from sft.planner.region_builder import build_region
from sft.runtime.tiled_segment import TiledSegment
from sft.runtime.whole_segment import WholeSegment
from sft.torch_runtime.profiling import program_hash
from tests.helpers.problems import problem_of, with_resources

_aten = torch.ops.aten
_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))


def _block() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def _programs(model: nn.Module, mode: Any, backend: Backend | None, *, training: bool = True) -> list[Program]:
    problem: PlanningProblem = with_resources(problem_of(model, (1, 3, 32, 20), training=training), backend=backend)
    nodes = tuple(name for phase in problem.sized.phases.phases for name in (*phase.streamed, *phase.tail))
    choice = SegmentChoice(nodes=nodes, mode=mode, strip_rows=8 if mode == "tiled" else 0, batch_tile=1)
    (segment,) = build_region(problem, [choice]).segments
    if isinstance(segment, WholeSegment):
        return [program for program in segment.programs(training) if program is not None]
    assert isinstance(segment, TiledSegment)
    kinds: tuple[Any, ...] = ("forward", "restore", "joint") if training else ("forward",)
    return [segment.program(kind, 1, segment.sweeps[0]) for kind in kinds]


def _num_calls(programs: list[Program]) -> Counter[Any]:
    return Counter(instruction.function for program in programs for instruction in program.instructions)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("mode", ["tiled", "whole"])
def test_every_relu_after_a_convolution_is_fused(mode: str, training: bool) -> None:
    fused, plain = (_programs(_block(), mode, backend, training=training) for backend in (_BACKEND, None))
    before, after = _num_calls(plain), _num_calls(fused)
    assert after[convolution_relu] == before[_aten.convolution.default] > 0
    assert not any(
        after[function] for function in (_aten.convolution.default, _aten.relu_.default, _aten.clamp_min.out, _aten.relu.default)
    )
    for ours, theirs in zip(fused, plain, strict=True):
        corrected = sum(call.scratch_bytes for call in ours.instructions if call.function is raise_to_first_pixels)  # of one pool
        assert ours.flops == theirs.flops and ours.peak_bytes <= theirs.peak_bytes + corrected and ours.end_bytes == theirs.end_bytes
        assert program_hash(ours) is not None


class _SharedResult(nn.Module):
    """The result of a convolution, read by a ReLU and by a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.conv(x)
        return torch.relu(value) + value


@pytest.mark.parametrize("mode", ["tiled", "whole"])
@pytest.mark.parametrize(
    ("make", "num_fused"),
    [
        pytest.param(_SharedResult, 0, id="two readers"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.ReLU()), 0, id="groups"),
        pytest.param(lambda: nn.Sequential(nn.ConvTranspose2d(3, 6, 2, stride=2), nn.ReLU()), 0, id="transposed"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.LeakyReLU()), 0, id="leaky"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.InstanceNorm2d(6), nn.ReLU()), 0, id="norm"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Sigmoid()), 0, id="sigmoid"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.ReLU()), 1, id="no bias"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, dilation=2), nn.ReLU()), 1, id="strided and dilated"),
    ],
)
def test_only_convolutions_whose_result_a_relu_reads_are_fused(make: Callable[[], nn.Module], num_fused: int, mode: str) -> None:
    model = make()
    fused, plain = (_programs(model, mode, backend)[0] for backend in (_BACKEND, None))
    calls = [instruction for instruction in fused.instructions if instruction.function is convolution_relu]
    assert len(calls) == num_fused
    assert num_fused or fused.instructions == plain.instructions
    has_bias = any(name.endswith("bias") for name, _ in model.named_parameters())
    assert all(call.scratch_bytes == (0 if has_bias else 6 * 4) for call in calls)


class _Residual(nn.Module):
    """Residual blocks: shortcuts that exist before the last convolution, and one that is computed after it."""

    def __init__(self, *, is_first: bool = True) -> None:
        super().__init__()
        self.enter, self.is_first = nn.Conv2d(3, 8, 3, padding=1), is_first
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.short = nn.Identity() if is_first else nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.enter(x))
        x = torch.relu(self.convs[0](x) + x)
        x = torch.relu(x + self.convs[1](x)) if self.is_first else torch.relu(self.convs[1](x) + self.short(x))
        return torch.relu(self.convs[2](x).add(x, alpha=2))


@pytest.mark.parametrize(
    ("mode", "is_first", "num_fused"), [("tiled", True, 2), ("whole", True, 2), ("tiled", False, 1), ("whole", False, 2)]
)
def test_shortcuts_are_added_by_the_fused_call(mode: str, is_first: bool, num_fused: int) -> None:
    fused, plain = (_programs(_Residual(is_first=is_first), mode, backend) for backend in (_BACKEND, None))
    assert _num_calls(fused[:1])[convolution_add_relu] == num_fused
    assert _num_calls(fused[:1])[_aten.convolution.default] == (3 if is_first else 4) - num_fused
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours.flops == theirs.flops and ours.peak_bytes <= theirs.peak_bytes and ours.end_bytes == theirs.end_bytes


@pytest.mark.parametrize("make", [_block, _Residual], ids=["sequence", "residual"])
@pytest.mark.parametrize("options", [{"tile": (8, None)}, {"tile": (8, 8)}, {"strategy": "none"}], ids=["strips", "tiles", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_are_those_of_the_model(
    options: dict[str, Any], dtype: torch.dtype, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    torch.manual_seed(0)
    model = make().to(dtype)
    x = torch.randn(2, 3, 32, 20, dtype=dtype, requires_grad=True)
    y = model(x)
    weights = torch.randn_like(y)
    expected = torch.autograd.grad((y * weights).sum(), [x, *model.parameters()])
    compiled = sft.compile(model, (2, 3, 32, 20), budget="1GiB", options=sft.Options(**options))
    out = compiled(x)
    gradients = torch.autograd.grad((out * weights).sum(), [x, *model.parameters()])
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for ours, theirs in zip((out.detach(), *gradients), (y.detach(), *expected), strict=True):
        assert float((ours - theirs).norm()) <= tolerance * float(theirs.norm())


@pytest.mark.parametrize("mode", ["tiled", "whole"])
def test_kernels_are_compared_with_fused_calls(mode: str) -> None:
    """The tuner times a kernel against the calls that run in its place; these equal ATen's operators one by one."""
    fused, plain = CaseCollector(fusion_device=FusionDevice(None)), CaseCollector()
    for collector in (fused, plain):
        _programs(_block(), mode, collector)
    assert fused.cases.keys() == plain.cases.keys()
    forward = [case for case in fused.cases.values() if case.shape_class.operator == "conv2d"]
    assert forward and all(convolution_relu in {call.function for call in case.aten} for case in forward)
    for case in forward:
        separate = plain.cases[case.shape_class]
        assert len(case.aten) <= len(separate.aten)
        results = [each.run_aten(each.draw(torch.device("cpu"))) for each in (case, separate)]
        assert len(results[0]) == len(results[1]) > 0
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_backends_of_gpus_fuse(tmp_path: Path) -> None:
    """Every choice of backend on a GPU, and a plan for a GPU of another machine; none on the CPU."""
    meta = torch.device("meta")
    for name in ("aten", "auto", "triton"):
        backend = backend_for(name, meta, [tmp_path], "cuda")
        assert isinstance(backend, KernelBackend) and backend.fusion_device == FusionDevice(None)
        assert backend.decomposes_norms == (name == "triton")
    assert backend_for("aten", meta, [tmp_path]) is None
    gpu = backend_for("aten", torch.device("cuda", 0), [tmp_path])
    assert isinstance(gpu, KernelBackend) and gpu.fusion_device == FusionDevice(torch.device("cuda", 0))


@pytest.mark.parametrize("options", [{}, {"tile": (8, None)}], ids=["auto", "strips"])
def test_plans_for_a_gpu_of_another_machine_take_no_more_memory(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = _block().to(torch.bfloat16)
    plans = []
    for is_fused in (True, False):
        monkeypatch.setattr(FusionDevice, "fuses", lambda *arguments, result=is_fused: result)
        plans.append(sft.plan(model, (1, 3, 256, 64), budget="8MiB", device="cuda", options=sft.Options(**options)))
    fused, plain = plans
    assert fused.projected_peak_bytes <= plain.projected_peak_bytes and fused.flops == plain.flops
    assert all(segment.kernels == () for segment in fused.segments)
