"""Direct cuts: strips copied between the device and page-locked memory without a thread, recorded in CUDA graphs, with the same bits."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.planner.projection import project_step
from sft.planner.streamed_cuts import host_traffic, stream_seconds
from sft.solvers.chain import HostLink
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.host.streamed_cuts import DirectCut, DirectGradient
from sft.torch_runtime.pass_graphs import PassGraphs, can_record_passes
from tests.helpers.fake_cuda import FakeStream
from tests.helpers.fake_cuda_steps import gpu_steps
from tests.helpers.flops import StepMeter
from tests.helpers.host_cuts import Normed, compile_with_cuts, copy_directly
from tests.helpers.models import image, seeded
from tests.helpers.pass_recorders import CaptureRecorder, LogRecorder

_SHAPE = (2, 3, 26, 18)


class Strided(Normed):
    """Two segments read one cut, with strides that leave rows of it out."""

    def __init__(self, axes: int = 2) -> None:
        super().__init__(axes)
        conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[axes - 1]
        self.down = nn.Sequential(conv(4, 5, 1, stride=3), norm(5), nn.ReLU())


def _step(net: Any, x: Tensor, *, retains: bool = False) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = net(x)
    if retains:
        y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None), *(b.clone() for b in net.buffers())]


def _pair(shape: tuple[int, ...] = _SHAPE, options: sft.Options | None = None) -> tuple[Any, Any, Any]:
    """Two compiled modules with equal weights, one with direct and one with staged cuts, and the first one's projection."""
    model = seeded(lambda: Strided(axes=len(shape) - 2))
    net, problem = compile_with_cuts(model, image(*shape).requires_grad_(), options or sft.Options(tile=(4, None)))
    other = compile_with_cuts(copy.deepcopy(model), image(*shape).requires_grad_(), options or sft.Options(tile=(4, None)))[0]
    return net, other, copy_directly(net, problem)


def _assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) and all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


_TILINGS = [
    (_SHAPE, sft.Options(tile=(4, None), batch_tile=2)),
    (_SHAPE, sft.Options(tile=(7, None), batch_tile=1, state_every=2)),
    ((1, *_SHAPE[1:]), sft.Options(tile=(5, None), halo="recompute")),
    ((2, 3, 10, 8, 6), sft.Options(tile=(3, None))),
]


@pytest.mark.parametrize(("shape", "options"), _TILINGS, ids=["strips", "samples", "recompute", "volume"])
def test_direct_cuts_have_the_bits_of_staged_ones(shape: tuple[int, ...], options: sft.Options) -> None:
    """On the CPU, and on the fake GPU, where staged cuts pass through a thread."""
    net, staged, projection = _pair(shape, options)
    assert projection.slab_bytes > 0 and projection.staging_bytes == 0
    expected = [_step(staged, image(*shape, seed=seed), retains=seed == 1) for seed in range(2)]
    for seed in range(2):
        _assert_equal(_step(net, image(*shape, seed=seed), retains=seed == 1), expected[seed])
    net, staged, _ = _pair(shape, options)
    with gpu_steps() as gpu:
        results = [_step(net, image(*shape, seed=seed), retains=seed == 1) for seed in range(2)]
        assert not gpu.blocking_copies and not gpu.num_synchronizations
        del net
    assert not gpu.checker.races, "\n".join(gpu.checker.races[:5])
    for ours, theirs in zip(results, expected, strict=True):
        _assert_equal(ours, theirs)


@pytest.mark.parametrize(("shape", "options"), _TILINGS, ids=["strips", "samples", "recompute", "volume"])
def test_the_bytes_of_direct_cuts_are_projected(shape: tuple[int, ...], options: sft.Options) -> None:
    """The sum over sweeps is that of a run of all strips, and that of a step; the slab has the plan's layout."""
    model = seeded(lambda: Strided(axes=len(shape) - 2))
    net, problem = compile_with_cuts(model, image(*shape).requires_grad_(), options)
    projection = copy_directly(net, problem)
    ready = next(reversed(net._sft_engine.plan_cache.prepared.values()))
    on_gpu = replace(problem, resources=replace(problem.resources, on_host=False))
    assert project_step(on_gpu, ready.region, exactly=True) == projection
    meter, starts = StepMeter(), set[int]()
    reserve = HostOffloader._allocate
    with pytest.MonkeyPatch.context() as patches, meter:

        def noting(offloader: HostOffloader, num_bytes: int) -> int:
            start = reserve(offloader, num_bytes)
            starts.add(start + num_bytes)
            return start

        patches.setattr(HostOffloader, "_allocate", noting)
        x = image(*shape).clone().requires_grad_()
        net(x).square().sum().backward()
    assert max(starts) <= projection.slab_bytes < max(starts) + 256
    assert projection.peak_bytes - 4096 <= meter.peak.num_bytes <= projection.peak_bytes


@pytest.mark.parametrize("options", [sft.Options(tile=(4, None)), sft.Options(tile=(9, None), batch_tile=1)], ids=["strips", "samples"])
def test_copies_of_strips_are_counted(options: sft.Options) -> None:
    """Each takes some time in addition to its bytes."""
    net, problem = compile_with_cuts(seeded(Strided), image(*_SHAPE).requires_grad_(), options)
    copy_directly(net, problem)
    choices = [segment.choice for segment in net.plan.segments]
    on_gpu = replace(problem, resources=replace(problem.resources, on_host=False))
    traffic = host_traffic(on_gpu, choices)
    counts: Counter[str] = Counter()
    begin_copy = HostOffloader.begin_copy
    with pytest.MonkeyPatch.context() as patches:

        def counting(offloader: HostOffloader, direction: str, *arguments: Any, **keywords: Any) -> Any:
            counts[direction] += 1
            return begin_copy(offloader, direction, *arguments, **keywords)

        patches.setattr(HostOffloader, "begin_copy", counting)
        _step(net, image(*_SHAPE))
    projected = {
        "down": sum(each.num_down + each.num_backward_down for each in traffic),
        "up": sum(each.num_up + each.num_backward_up for each in traffic),
    }
    assert counts == projected
    link = HostLink(copy_seconds=1.0)
    added = stream_seconds(replace(on_gpu, resources=replace(on_gpu.resources, link=link)), choices) - stream_seconds(
        replace(on_gpu, resources=replace(on_gpu.resources, link=HostLink())), choices
    )
    passes = [(each.num_down, each.num_up) for each in traffic] + [(each.num_backward_down, each.num_backward_up) for each in traffic]
    assert added == pytest.approx(sum(map(max, passes)))


def _recorded(net: Any, recorder: LogRecorder) -> PassGraphs:
    """Record the passes of the latest plan of a compiled module, as the engine does on a GPU."""
    prepared = net._sft_engine.plan_cache.prepared
    key = next(reversed(prepared))
    ready = prepared[key]
    assert can_record_passes(ready.region) and not can_record_passes(replace(ready.region, direct=frozenset()))
    graph = ready.captured.phases.graph
    graphs = PassGraphs(fixed=frozenset(node.name for node in graph.nodes) - graph.call_leaves, recorder=recorder)
    prepared[key] = replace(ready, resources=replace(ready.resources, pass_graphs=graphs))
    return graphs


def test_passes_with_direct_cuts_are_recorded() -> None:
    net, staged, _ = _pair()
    graphs = _recorded(net, LogRecorder())
    for seed in range(4):
        _assert_equal(_step(net, image(*_SHAPE, seed=seed), retains=seed == 2), _step(staged, image(*_SHAPE, seed=seed), retains=seed == 2))
    assert graphs.is_enabled and graphs.num_replays == 3


def test_recorded_passes_with_direct_cuts_have_no_races() -> None:
    """Recordings obey the rules of stream captures, and no thread of the host takes part in a replay."""
    shape = (1, 3, 14, 10)
    net, staged, _ = _pair(shape)
    with gpu_steps() as gpu:
        graphs = _recorded(net, CaptureRecorder(gpu=gpu))
        ours = [_step(net, image(*shape, seed=seed)) for seed in range(3)]
        assert graphs.is_enabled and graphs.num_replays == 2
        assert not gpu.blocking_copies and not gpu.num_synchronizations
        gpu.synchronize()
        del net, graphs
    assert not gpu.checker.races, "\n".join(gpu.checker.races[:5])
    for seed, results in enumerate(ours):
        _assert_equal(results, _step(staged, image(*shape, seed=seed)))


def test_recorded_inference_with_direct_cuts() -> None:
    model = seeded(Strided).eval()
    with torch.no_grad():
        net, problem = compile_with_cuts(model, image(*_SHAPE), sft.Options(tile=(4, None)))
        staged = copy.deepcopy(net)
        copy_directly(net, problem)
        graphs = _recorded(net, LogRecorder())
        for seed in range(3):
            assert torch.equal(net(image(*_SHAPE, seed=seed)), staged(image(*_SHAPE, seed=seed)))
    assert graphs.num_replays == 2


@pytest.mark.parametrize(("owner", "method"), [(FakeStream, "wait_event"), (FakeStream, "wait_stream")])
def test_direct_copies_without_a_wait_are_reported(owner: type, method: str) -> None:
    net, _, _ = _pair()
    with gpu_steps() as gpu, pytest.MonkeyPatch.context() as patches:
        patches.setattr(owner, method, lambda stream, other: None)
        _step(net, image(*_SHAPE))
        del net
    assert any("offload.py" in report for report in gpu.checker.races)


def test_a_cut_that_is_written_with_a_stride_blocks_on_the_fake_device() -> None:
    """As in PyTorch, which copies views with gaps through a temporary of the host."""
    net, _, _ = _pair(options=_TILINGS[0][1])
    with gpu_steps() as gpu, pytest.MonkeyPatch.context() as patches:
        patches.setattr(DirectCut, "_blocks", _all_samples_at_once)
        patches.setattr(DirectGradient, "_blocks", _all_samples_at_once)
        _step(net, image(*_SHAPE))
        del net
    assert any("offload.py" in line for line in gpu.blocking_copies)


def _all_samples_at_once(cut: Any, strip: Tensor, batch: Any, rows: Any) -> Any:
    by_rows = strip.movedim(1, -1).reshape(strip.shape[0], strip.shape[2], -1)
    return [(by_rows, cut._data[batch.start : batch.stop, rows.start : rows.stop])]


@pytest.mark.parametrize(
    ("shape", "options", "changes", "expected"),
    [
        (_SHAPE, {"tile": (4, None)}, {}, True),
        (_SHAPE, {"tile": (4, None)}, {"on_host": True}, False),
        (_SHAPE, {"tile": (4, None)}, {"host_is_files": True}, False),
        (_SHAPE, {"tile": (4, None)}, {"skips_repeats": True}, False),
        (_SHAPE, {"tile": (4, 6)}, {}, False),
        (_SHAPE[:3], {"tile": (4, None)}, {}, False),
    ],
    ids=["images", "CPU", "files", "skipped strips", "panels", "signals"],
)
def test_cuts_in_blocks_of_locked_memory_are_direct(
    shape: tuple[int, ...], options: dict[str, Any], changes: dict[str, Any], expected: bool
) -> None:
    net, problem = compile_with_cuts(seeded(lambda: Strided(axes=len(shape) - 2)), image(*shape), sft.Options(**options))
    choices = [segment.choice for segment in net.plan.segments]
    resources = replace(problem.resources, **{"on_host": False, **changes})
    streamed = {name for choice in choices for name in choice.streamed}
    assert streamed and resources.direct_cuts(choices) == (streamed if expected else set())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_direct_cuts_on_a_gpu() -> None:
    eager = seeded(Strided).cuda()
    net, _ = compile_with_cuts(copy.deepcopy(eager), image(*_SHAPE).cuda().requires_grad_(), sft.Options(tile=(4, None)))
    ready = next(reversed(net._sft_engine.plan_cache.prepared.values()))
    assert ready.region.direct == ready.region.streamed and ready.region.streamed
    for seed in range(4):
        x = image(*_SHAPE, seed=seed).cuda()
        torch.testing.assert_close(_step(net, x, retains=seed == 2), _step(eager, x, retains=seed == 2), rtol=1e-10, atol=1e-10)
    graphs = ready.resources.pass_graphs
    assert graphs is not None and graphs.is_enabled and graphs.num_replays == 3
