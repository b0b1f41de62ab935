"""Images with more elements than CUDA kernels for channels last can index: 2^31 - 1."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.backends import memory_format
from sft.backends.convolution_relu import FusionDevice
from sft.backends.rewriter import KernelBackend
from sft.lower.custom_ops.windows import RowMajorCall
from sft.lower.program import Instruction, slots_of
from sft.planner.plan import SegmentChoice
from sft.planner.region_builder import build_region
from sft.runtime.whole_segment import WholeSegment
from sft.torch_runtime.profiling import program_hash
from tests.helpers.models import image, seeded
from tests.helpers.problems import problem_of, with_resources

_aten = torch.ops.aten
_BACKEND = KernelBackend(selector=None, fusion_device=FusionDevice(None))
_UPSAMPLINGS: dict[str, dict[str, Any]] = {
    "bilinear": {"scale_factor": 2, "mode": "bilinear"},
    "nearest": {"scale_factor": 2},
    "nearest-exact": {"scale_factor": 2, "mode": "nearest-exact"},
    "to a size": {"size": (37, 29), "mode": "bilinear"},
}


def _network(how: dict[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.Upsample(**how), nn.Conv2d(16, 2, 1))


def _calls(shape: tuple[int, int, int, int], how: dict[str, Any]) -> Iterator[Instruction]:
    """The instructions of a step of a whole image."""
    problem = with_resources(problem_of(_network(how), shape, training=True), backend=_BACKEND)
    nodes = tuple(name for phase in problem.sized.phases.phases for name in (*phase.streamed, *phase.tail))
    (segment,) = build_region(problem, [SegmentChoice(nodes=nodes, mode="whole", strip_rows=0, batch_tile=1)]).segments
    assert isinstance(segment, WholeSegment)
    for program in segment.programs(True):
        assert program is not None and program_hash(program) is not None
        yield from program.instructions


@pytest.mark.parametrize("name", ["bilinear", "nearest", "nearest-exact"])
@pytest.mark.parametrize(
    ("shape", "pools", "upsamplings"),
    [((1, 3, 512, 512), 0, 0), ((1, 3, 8192, 8192), 0, 1), ((1, 3, 12288, 12288), 1, 1)],
    ids=["small", "large upsampled image", "large image"],
)
def test_only_large_images_are_copied(name: str, shape: tuple[int, int, int, int], pools: int, upsamplings: int) -> None:
    """The upsampled image of 8,192 x 8,192 pixels has 2^32 elements in 16 channels, that of 12,288 x 12,288 pixels 2^33.2."""
    calls = list(_calls(shape, _UPSAMPLINGS[name]))
    operators = [call.function.operator for call in calls if isinstance(call.function, RowMajorCall)]
    assert sum(operator.startswith("max_pool2d") for operator in operators) == pools
    assert sum("upsample" in operator and operator.endswith("_backward") for operator in operators) == upsamplings
    assert ("upsample_bilinear2d" in operators) is (name == "bilinear" and upsamplings > 0)
    for call in calls:
        if call.function in memory_format._INDEXED_OPS:
            slots = (call.arguments[0], *call.outputs) if "pool" not in str(call.function) else call.arguments[:1]
            assert all(math.prod(slot.shape) < 2**31 - 1 for slot in slots if slot is not None)


def test_blocks_of_images_and_channels() -> None:
    """Blocks of at most 1,000 elements of 3 x 8 images: whole images if several fit, channels of an image otherwise."""

    def blocks(*shapes: tuple[int, ...]) -> tuple[int, int]:
        call = RowMajorCall.of("upsample_nearest2d_backward", shapes, 1000)
        return call.images_per_call, call.channels_per_call

    assert blocks((3, 8, 2, 2), (3, 8, 4, 4)) == (3, 8)
    assert blocks((3, 8, 4, 4), (3, 8, 8, 7)) == (2, 8)
    assert blocks((3, 8, 8, 8), (3, 8, 16, 16)) == (1, 3)
    assert blocks((3, 8, 32, 32), (3, 8, 64, 64)) == (1, 1)


@pytest.mark.parametrize("limit", [99, 300, 700, 5000])
@pytest.mark.parametrize("align_corners", [False, True])
def test_blocks_of_a_gradient_are_its_whole(limit: int, align_corners: bool) -> None:
    grad = torch.rand(3, 8, 9, 7, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    shape, scales = [3, 8, 4, 5], (None, None)
    expected = _aten.upsample_bilinear2d_backward(grad, [9, 7], shape, align_corners, *scales)
    call = RowMajorCall.of("upsample_bilinear2d_backward", [grad.shape, shape], limit)
    result = call(grad, [9, 7], shape, align_corners, *scales)
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def _step(model: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("options", [sft.Options(strategy="none"), sft.Options(tile=(4, None))], ids=["plain", "strips"])
@pytest.mark.parametrize("name", _UPSAMPLINGS)
@pytest.mark.parametrize("limit", [100, 3000], ids=["blocks of a channel", "blocks of channels"])
def test_copies_are_exact(name: str, limit: int, options: sft.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.api.problem_builder.backend_for", lambda *arguments: _BACKEND)
    monkeypatch.setattr(memory_format, "_MIN_LARGE_ELEMENTS", limit)
    model, x = seeded(lambda: _network(_UPSAMPLINGS[name])), image(2, 3, 21, 17).contiguous(memory_format=torch.channels_last)
    net: Any = sft.compile(copy.deepcopy(model), x.requires_grad_(), budget="1GiB", options=options)
    for mine, other in zip(_step(net, x.detach()), _step(model, x.detach()), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    regions = [prepared.region for prepared in net._sft_engine.plan_cache.prepared.values()]
    programs = [program for region in regions for segment in region.segments for program in getattr(segment, "lowered_programs", ())]
    calls = [call for program in programs for call in program.instructions]
    blocks = [call.function.channels_per_call for call in calls if isinstance(call.function, RowMajorCall)]
    assert blocks
    assert (max(blocks) == 1) is (limit == 100)
    assert min(blocks) < 16
    indexed = [call for call in calls if call.function in memory_format._INDEXED_OPS]
    assert all(math.prod(slots_of(call)[0].shape) < limit for call in indexed)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 70 * 2**30, reason="needs a CUDA device with 70 GiB"
)
def test_an_upsampled_image_of_2_to_the_31_elements() -> None:
    """The last rows and their gradient: those that a kernel with 32-bit indices would leave out."""
    model = nn.Sequential(nn.Conv2d(1, 16, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(16, 1, 1)).cuda().bfloat16()
    x = torch.rand(1, 1, 5800, 5800, device="cuda").bfloat16().requires_grad_()
    net: Any = sft.compile(model, x, budget="60GiB", options=sft.Options(strategy="none"))
    y = net(x)
    y[:, :, -64:].float().sum().backward()
    assert x.grad is not None
    corner = x.detach()[:, :, -64:].float().requires_grad_()
    expected = copy.deepcopy(model).float()(corner)
    expected[:, :, -64:].sum().backward()
    assert corner.grad is not None
    torch.testing.assert_close(y.detach()[:, :, -64:].float(), expected[:, :, -64:], rtol=0.05, atol=0.05)
    torch.testing.assert_close(x.grad[:, :, -30:].float(), corner.grad[:, :, -30:], rtol=0.05, atol=0.05)
