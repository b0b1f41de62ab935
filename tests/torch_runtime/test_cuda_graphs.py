"""Strips that are recorded and replayed. On the CPU a replay runs the work again; the code around a CUDA graph is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.backends.resize import ResizeCall
from sft.common.torch_internals import TorchDispatchMode
from sft.torch_runtime.cuda_graphs import _SEGMENTS_BYTES, GraphCache, buffer_bytes, recordable_programs

_SHAPE = (1, 3, 80, 14)


@dataclass
class Again:
    """Recorder that stores the work and runs it again, and counts replays."""

    num_records: int = 0
    is_replaying: bool = False

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_records += 1
        work()

        def replay() -> None:
            self.is_replaying = True
            work()
            self.is_replaying = False

        return replay


def _model(*, train_norm: bool = False) -> nn.Module:
    norm = nn.BatchNorm2d(6) if train_norm else nn.Identity()
    first = nn.Conv2d(3, 6, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(6, 6, 3, padding=2, dilation=2)
    return nn.Sequential(*first, nn.MaxPool2d(2), nn.Conv2d(6, 4, 3, padding=1)).double()


def _with_recordings(net: Any, spare_bytes: int = 2**40) -> tuple[GraphCache, Again]:
    """Give the last plan of a compiled module recordings, as the engine does on a GPU."""
    engine, recorder = net._sft_engine, Again()
    key = next(reversed(engine.plan_cache.prepared))
    ready = engine.plan_cache.prepared[key]
    programs = recordable_programs(ready.region, training=ready.plan.training)
    graph = ready.captured.phases.graph
    weights = frozenset(node.name for node in graph.nodes if node.kind in ("parameter", "buffer"))
    store = GraphCache.within(programs, spare_bytes, recorder, weights)
    engine.plan_cache.prepared[key] = replace(ready, resources=replace(ready.resources, graphs=store))
    return store, recorder


def _step(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = net(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None), *(b.clone() for b in net.buffers())]


@pytest.mark.parametrize("train_norm", [False, True])
@pytest.mark.parametrize("tile", [(8, None), (8, 9)])
def test_replayed_steps_are_the_same(train_norm: bool, tile: tuple[int, int | None]) -> None:
    torch.manual_seed(0)
    plain: Any = sft.compile(_model(train_norm=train_norm), _SHAPE, options=sft.Options(tile=tile))
    replayed = copy.deepcopy(plain)
    for net in (plain, replayed):
        net.plan_for(torch.zeros(_SHAPE, dtype=torch.float64, requires_grad=True))
    store, recorder = _with_recordings(replayed)
    assert store.programs
    for seed in range(3):
        x = torch.randn(_SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        before = copy.deepcopy(replayed.state_dict())
        ours = _step(replayed, x)
        # A buffer is no slice of a larger image: ATen sums its pixels in another order.
        torch.testing.assert_close(ours, _step(plain, x), rtol=1e-12, atol=1e-12)
        replayed.load_state_dict(before)
        assert all(torch.equal(a, b) for a, b in zip(ours, _step(replayed, x), strict=True))
    assert store.num_replays >= 6 * 4
    assert 0 < recorder.num_records < store.num_replays


def test_the_rest_of_the_budget_determines_recordings() -> None:
    torch.manual_seed(0)
    net = sft.compile(_model(), _SHAPE, options=sft.Options(tile=(8, None)))
    everything, _ = _with_recordings(net)
    weights = everything.weights
    sizes = [buffer_bytes(program, weights) for program in everything.programs]
    pools = [program.peak_bytes + _SEGMENTS_BYTES for program in everything.programs]
    assert everything.num_bytes == sum(sizes) + max(pools)
    some, _ = _with_recordings(net, sizes[0] + pools[0])
    assert some.programs == everything.programs[:1] and some.num_bytes == sizes[0] + pools[0]
    none, _ = _with_recordings(net, min(map(sum, zip(sizes, pools, strict=True))) - 1)
    assert none.programs == () and none.num_bytes == 0
    assert _step(net, torch.zeros(_SHAPE, dtype=torch.float64))
    assert none.num_replays == 0


@pytest.mark.parametrize("train_norm", [False, True])
def test_a_program_is_recorded_once(train_norm: bool) -> None:
    """Although gradients are summed in other tensors than in the step before, as with accumulation over batches."""
    torch.manual_seed(0)
    net: Any = sft.compile(_model(train_norm=train_norm), _SHAPE, options=sft.Options(tile=(8, None)))
    plain = copy.deepcopy(net)
    x = torch.randn(_SHAPE, dtype=torch.float64, requires_grad=True)
    net.plan_for(x)
    store, recorder = _with_recordings(net)
    gradients = []
    for module in (net, plain):
        for _ in range(4):
            module(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert recorder.num_records == len(store.programs) < store.num_replays
    ours, theirs = ([p.grad for p in module.parameters()] for module in (net, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    # Moved weights belong to another program.
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data = parameter.data.clone()
    net(x).square().sum().backward()
    assert recorder.num_records > len(store.programs)


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_programs_that_upload_tables_are_not_recorded(backend: str) -> None:
    """An upload during the recording of a graph would be the same in each replay, and CUDA refuses it."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3, padding=1)).half()
    net: Any = sft.compile(model, (1, 3, 128, 64), options=sft.Options(tile=(8, None), backend=backend))
    (ready,) = net._sft_engine.plan_cache.prepared.values()
    lowered = [program for segment in ready.region.segments for program in segment.lowered_programs]
    uploading = [program for program in lowered if any(_is_resize(each.function) for each in program.instructions)]
    recorded = recordable_programs(ready.region, training=ready.plan.training)
    assert bool(uploading) == (backend == "triton") and bool(recorded) == (backend == "aten")


def _is_resize(function: object) -> bool:
    return isinstance(getattr(function, "__self__", None), ResizeCall)


def test_programs_that_depend_on_their_place_are_not_recorded() -> None:
    torch.manual_seed(0)
    net = sft.compile(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.5)).double(), _SHAPE, options=sft.Options(tile=(8, None)))
    store, _ = _with_recordings(net)
    assert store.programs == ()


def test_recordings_of_one_plan_are_alive_at_a_time() -> None:
    """Two sizes, with the backward pass of the first after the forward pass of the second: each plan's bytes exclude the other's."""
    torch.manual_seed(0)
    net: Any = sft.compile(_model(), _SHAPE, options=sft.Options(tile=(8, None)))
    small, large = (torch.randn((1, 3, height, 14), dtype=torch.float64) for height in (80, 112))
    plain = copy.deepcopy(net)
    expected = [_step(plain, x)[1] for x in (small, large)]
    stores = []
    for x in (small, large):
        net.plan_for(x.clone().requires_grad_())
        stores.append(_with_recordings(net)[0])
    inputs = [x.clone().requires_grad_() for x in (small, large)]
    losses = []
    for x, alive, other in zip(inputs, stores, stores[::-1], strict=True):
        losses.append(net(x).square().sum())
        assert alive._recordings and not other._recordings
    for loss, alive, other in zip(losses, stores, stores[::-1], strict=True):
        loss.backward()
        assert alive._recordings and not other._recordings
    for x, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-12, atol=1e-12)


@dataclass
class _Failing(Again):
    """Recorder that fails after its warm-up, or before it, or after a few recordings."""

    num_good: int = 0
    warms_up: bool = True

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.num_records >= self.num_good:
            self.num_records += 1
            if self.warms_up:
                work()
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        return super().record(work)


@pytest.mark.parametrize(("num_good", "warms_up"), [(0, True), (0, False), (1, True)])
def test_a_recording_that_fails_is_replaced_by_plain_execution(num_good: int, warms_up: bool) -> None:
    """The same bits as without recordings of these programs, each tried once, and one warning."""
    torch.manual_seed(0)
    net: Any = sft.compile(_model(train_norm=True), _SHAPE, options=sft.Options(tile=(8, None)))
    x = torch.randn(_SHAPE, dtype=torch.float64)
    net.plan_for(x.clone().requires_grad_())
    plain = copy.deepcopy(net)
    store, _ = _with_recordings(net)
    recorder = store.recorder = _Failing(num_good=num_good, warms_up=warms_up)
    with pytest.warns(
        RuntimeWarning, match=r"could not be recorded.*RuntimeError: CUDA error: operation not permitted.*same results"
    ) as seen:
        results = [_step(net, x) for _ in range(2)]
    assert len([each for each in seen if "recorded" in str(each.message)]) == 1
    torch.testing.assert_close(results, [_step(plain, x) for _ in range(2)], rtol=1e-12, atol=1e-12)
    assert store.num_failures == recorder.num_records - num_good == len(store.programs) - num_good
    assert (store.num_replays > 0) == (num_good > 0)


class _Copies(TorchDispatchMode):
    """Counter of copies outside of replays."""

    def __init__(self, recorder: Again) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.recorder, self.num_copies = recorder, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default) and not self.recorder.is_replaying
        return func(*args, **(kwargs or {}))


def test_copies_of_a_replay_are_counted() -> None:
    """One copy for each port that moves, one more for those that are written, and one for each result; the weights are not copied."""
    torch.manual_seed(0)
    net: Any = sft.compile(_model(), _SHAPE, options=sft.Options(tile=(8, None)))
    x = torch.randn(_SHAPE, dtype=torch.float64, requires_grad=True)
    net.plan_for(x)
    _, recorder = _with_recordings(net)
    net(x).sum().backward()
    run, counted = GraphCache.run, []

    def counting(cache: GraphCache, program: Any, bindings: Any, work: Any) -> Any:
        with _Copies(recorder) as copies:
            results = run(cache, program, bindings, work)
        if results is not None:
            moving = [port for port in program.ports if port in bindings and not (port.role == "side" and port.name in cache.weights)]
            blocks = sum(max(0, len(bindings[port]) - 1) for port in moving if port.role == "carry")
            written = [port for port in moving if port.role in ("out", "grad_source", "partial", "grad_side")]
            loaded = [port for port in moving if port.role != "out"]
            counted.append((copies.num_copies, len(loaded) + blocks + len(written) + len(results)))
        return results

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(GraphCache, "run", counting)
        net(x).sum().backward()
    assert len(counted) >= 8 and all(number <= most for number, most in counted), counted
    assert max(number for number, _ in counted) <= 40


def test_on_the_cpu_nothing_is_recorded() -> None:
    net: Any = sft.compile(_model(), _SHAPE, options=sft.Options(tile=(8, None), cuda_graphs=True))
    assert [ready.resources.graphs for ready in net._sft_engine.plan_cache.prepared.values()] == [None]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_on_a_gpu() -> None:
    """Passes that read their input strip by strip are not recorded, so their strips are."""
    torch.manual_seed(0)
    model = _model(train_norm=True).cuda()
    pixels = [torch.randn(_SHAPE[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    sources = [sft.sources.ArraySource(each.numpy(), layout="CHW", dtype=torch.float64) for each in pixels]
    nets: list[Any] = [
        sft.compile(copy.deepcopy(model), sources[0], options=sft.Options(tile=(8, None), cuda_graphs=on)) for on in (False, True)
    ]

    def step(net: Any, source: Any) -> list[Tensor]:
        net.zero_grad(set_to_none=True)
        y = net(source)
        y.square().sum().backward()
        return [y.detach(), *(p.grad for p in net.parameters() if p.grad is not None), *(b.clone() for b in net.buffers())]

    for source in sources:
        torch.testing.assert_close(step(nets[1], source), step(nets[0], source), rtol=1e-10, atol=1e-10)
    store = list(nets[1]._sft_engine.plan_cache.prepared.values())[-1].resources.graphs
    assert store is not None and store.num_replays > 0
    with sft.measure_peak("cuda") as peak:
        step(nets[1], sources[0])
    assert peak.num_bytes <= nets[1].plan.projected_peak_bytes
