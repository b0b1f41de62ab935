"""Passes that are recorded and replayed. On the CPU a recording is a list of operators, which a replay runs again on the same tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.pass_graphs import PassGraphs, can_record_passes
from sft.torch_runtime.pass_statistics import report_flops
from tests.helpers.fake_cuda_steps import gpu_steps
from tests.helpers.models import ConvNet, Residual, TinyUNet, seeded
from tests.helpers.pass_recorders import CaptureRecorder, LogRecorder
from tests.helpers.plans import least_budget

_SHAPE = (2, 3, 48, 40)


def _recorded(
    net: Any, x: Any, *, grad: bool = True, fails_at: int | None = None, recorder: LogRecorder | None = None
) -> tuple[PassGraphs, LogRecorder]:
    """Record the passes of a compiled module's plan, as the engine does on a GPU."""
    with torch.set_grad_enabled(grad):
        net.plan_for(*(x if isinstance(x, list) else [x]))
    engine, recorder = net._sft_engine, recorder or LogRecorder(fails_at=fails_at)
    key = next(reversed(engine.plan_cache.prepared))
    ready = engine.plan_cache.prepared[key]
    assert can_record_passes(ready.region)
    graph = ready.captured.phases.graph
    graphs = PassGraphs(fixed=frozenset(node.name for node in graph.nodes) - graph.call_leaves, recorder=recorder)
    engine.plan_cache.prepared[key] = replace(ready, resources=replace(ready.resources, pass_graphs=graphs))
    return graphs, recorder


def _input(seed: int, *, requires_grad: bool = True) -> Tensor:
    x = torch.randn(_SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_(requires_grad)


def _results(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None), *(b.clone() for b in net.buffers())]


def _step(net: nn.Module, x: Tensor, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    net.zero_grad(set_to_none=True)
    y = net(x)
    y.square().sum().backward()
    return _results(net, x, y)


#: Options of plans that copy values to the host and back.
_OFFLOAD = {"tile": None, "strategy": "offload-dp", "host_budget": "64GiB"}


def _settings(model: nn.Module, **options: Any) -> dict[str, Any]:
    """Arguments of `sft.compile`."""
    settings: dict[str, Any] = {"options": sft.Options(**{"tile": (8, None), **options})}
    if "host_budget" in options:  # the plan of the least budget, and room for passes that retain the graph
        plan = sft.plan(model, _SHAPE, budget=least_budget(model, _SHAPE, **settings), **settings)
        order = [op for op in plan.order if op != "~3+"]  # a copy under way at the end of the forward pass
        order.insert(order.index("L") + 1, "~3+")
        settings.update(budget="4GiB", plan=replace(plan, order=tuple(order)))
    return settings


def _pair(make: Callable[[], nn.Module] = ConvNet, **options: Any) -> tuple[Any, Any]:
    """Two compiled modules with equal weights."""
    model = seeded(make)
    net: Any = sft.compile(model, _SHAPE, **_settings(model, **options))
    return net, copy.deepcopy(net)


def _assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class _Upsampled(nn.Module):
    """Network with strips that depend on their position, a training BatchNorm and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.last(nn.functional.interpolate(y, scale_factor=2, mode="bilinear"))  # type: ignore[no-any-return]


class _Resized(nn.Module):
    """Network that interpolates with tables of rows and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.interpolate(self.first(x).relu(), scale_factor=1.7, mode="bilinear")
        return self.last(y)  # type: ignore[no-any-return]


class _Random(nn.Module):
    """Masks of elements, channels and samples, noise, and a mask of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.elements, self.channels, self.classes = nn.Dropout(0.3), nn.Dropout2d(0.4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.channels(self.last(self.elements(self.first(x).relu())))
        y = y + torch.randn_like(y) * 0.1
        return self.classes(self.elements(y.mean((2, 3))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ConvNet, {}),
        (Residual, {}),
        (_Upsampled, {}),
        (_Resized, {}),
        (_Random, {}),
        (ConvNet, {"tile": None, "strategy": "none"}),
        (TinyUNet, _OFFLOAD),
    ],
)
def test_replayed_steps_are_the_same(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    net, plain = _pair(make, **options)
    graphs, recorder = _recorded(net, _input(0))
    for seed in range(4):
        _assert_close(_step(net, _input(seed), seed), _step(plain, _input(seed), seed))
        with torch.no_grad():  # an optimizer's step in place
            for module in (net, plain):
                for parameter in module.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3)
    assert recorder.num_records == 2 and graphs.num_replays == 3


def test_tables_live_as_long_as_their_recording() -> None:
    """A replay copies from the memory of the recording again."""
    net, _ = _pair(_Resized)
    graphs, _ = _recorded(net, _input(0))
    for seed in range(2):
        _step(net, _input(seed))
    step = graphs._step
    assert step is not None and step.backward is not None and step.forward.tables and step.backward.tables
    assert not step.forward.tables[0].is_cuda


def test_results_outlive_the_next_replay() -> None:
    net, plain = _pair()
    _recorded(net, _input(0))
    ours = [_step(net, _input(seed)) for seed in range(3)]
    _assert_close([each for step in ours for each in step], [each for seed in range(3) for each in _step(plain, _input(seed))])


def test_gradients_accumulate() -> None:
    net, plain = _pair()
    graphs, _ = _recorded(net, _input(0))
    for module in (net, plain):
        for seed in range(3):
            module(_input(seed)).square().sum().backward()
    _assert_close([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    assert graphs.num_replays == 2


@pytest.mark.parametrize(("make", "options"), [(_Upsampled, {}), (_Random, {}), (TinyUNet, _OFFLOAD)])
def test_a_repeated_backward_pass(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    net, plain = _pair(make, **options)
    graphs, _ = _recorded(net, _input(0))
    for module in (net, plain):
        for _ in range(2):
            _step(module, _input(0))
    results = []
    for module in (net, plain):
        module.zero_grad(set_to_none=True)
        x = _input(1)
        y = module(x)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        results.append(_results(module, x, y))
        _assert_close(results[-1], results[0])
        _step(module, _input(2))
    assert graphs.is_enabled and graphs.num_replays == 3


def test_a_second_call_before_the_backward_pass_runs_without_graphs() -> None:
    net, plain = _pair()
    graphs, recorder = _recorded(net, _input(0))
    for _ in range(2):
        _step(net, _input(0))
    results = []
    for module in (net, plain):
        module.zero_grad(set_to_none=True)
        x, other = _input(1), _input(2)
        first, second = module(x), module(other)
        (first.square().sum() + second.square().sum()).backward()
        assert x.grad is not None and other.grad is not None
        results.append([first.detach(), second.detach(), x.grad, other.grad, *(p.grad for p in module.parameters())])
    _assert_close(*results)
    assert not graphs.is_enabled and recorder.num_closed
    _assert_close(_step(net, _input(3)), _step(plain, _input(3)))
    assert graphs.num_replays == 2


def test_a_dropped_call_is_not_pending() -> None:
    net, plain = _pair()
    graphs, _ = _recorded(net, _input(0))
    for seed in range(3):
        net(_input(seed))  # its graph is dropped at once
    _assert_close(_step(net, _input(3)), _step(plain, _input(3)))
    assert graphs.is_enabled and graphs.num_replays == 3


def test_an_inference_between_forward_and_backward() -> None:
    net, plain = _pair()
    _recorded(net, _input(0))
    for _ in range(2):
        _step(net, _input(0))
    results = []
    for module in (net, plain):
        module.zero_grad(set_to_none=True)
        x = _input(1)
        y = module(x)
        with torch.no_grad():
            other = module(_input(2))
        y.square().sum().backward()
        results.append([*_results(module, x, y), other])
    _assert_close(*results)


def test_replayed_inference() -> None:
    net, plain = _pair()
    graphs, recorder = _recorded(net, _input(0, requires_grad=False), grad=False)
    with torch.no_grad():
        outputs = [net(_input(seed, requires_grad=False)) for seed in range(4)]
        _assert_close(outputs, [plain(_input(seed, requires_grad=False)) for seed in range(4)])
    assert graphs.num_replays == 3 and recorder.num_records == 1


def test_inference_mode_and_later_calls_share_a_recording() -> None:
    net, plain = _pair()
    graphs, recorder = _recorded(net, _input(0, requires_grad=False), grad=False)
    for number, mode in enumerate([torch.inference_mode, torch.inference_mode, torch.no_grad, torch.inference_mode]):
        with mode():
            x = _input(number, requires_grad=False)
            _assert_close([net(x)], [plain(x)])
    assert graphs.num_replays == 3 and recorder.num_records == 1


@pytest.mark.parametrize(("make", "options"), [(_Upsampled, {}), (_Random, {}), (TinyUNet, _OFFLOAD)])
def test_a_repeated_backward_pass_without_a_recording(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """The recording of the backward pass fails in a pass that retains the graph."""
    net, plain = _pair(make, **options)
    _recorded(net, _input(0), fails_at=2)
    results = []
    for module in (net, plain):
        _step(module, _input(0))
        module.zero_grad(set_to_none=True)
        x = _input(1)
        y = module(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        results.append(_results(module, x, y))
    _assert_close(*results)


def test_moved_weights_are_recorded_again() -> None:
    net, plain = _pair()
    graphs, recorder = _recorded(net, _input(0))
    for number in range(6):
        _assert_close(_step(net, _input(number)), _step(plain, _input(number)))
        with torch.no_grad():
            for module in (net, plain):
                for parameter in module.parameters():
                    parameter.data = parameter.data * 1.01
    assert recorder.num_records == 2 * 4 and not graphs.is_enabled  # weights that move in every step


def test_settings_that_select_kernels_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, plain = _pair()
    _, recorder = _recorded(net, _input(0))
    for seed in range(3):
        _step(net, _input(seed))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32)
    _assert_close(_step(net, _input(3)), _step(plain, _input(3)))
    assert recorder.num_records == 4


def test_a_graph_of_the_caller_contains_the_instructions() -> None:
    net, plain = _pair()
    graphs, recorder = _recorded(net, _input(0))
    recorder.is_recorded = True
    for seed in range(3):
        _assert_close(_step(net, _input(seed)), _step(plain, _input(seed)))
    assert graphs.num_replays == 0 and recorder.num_records == 0


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_failed_recording_is_one_warning(fails_at: int) -> None:
    """The first recording is that of a forward pass, the second that of its backward pass, which has consumed the tape."""
    net, plain = _pair(_Upsampled)
    graphs, _ = _recorded(net, _input(0), fails_at=fails_at)
    _assert_close(_step(net, _input(0)), _step(plain, _input(0)))
    with pytest.warns(RuntimeWarning, match="could not be recorded as a CUDA graph .*not permitted"):
        ours = _step(net, _input(1))
    _assert_close(ours, _step(plain, _input(1)))
    _assert_close(_step(net, _input(2)), _step(plain, _input(2)))
    assert not graphs.is_enabled


def test_flops_of_replays_are_reported() -> None:
    net, _ = _pair()
    _recorded(net, _input(0))
    counts = []
    for seed in range(4):
        flops: list[int] = []
        with report_flops(flops.append):
            _step(net, _input(seed))
        counts.append(sum(flops))
    assert counts == [net.plan.flops] * 4


def test_recorded_copies_to_the_host_have_no_races() -> None:
    """Recordings obey the rules of stream captures; each replay uses the slab that it leased."""
    net, plain = _pair(TinyUNet, **_OFFLOAD)
    with gpu_steps() as gpu:
        graphs, recorder = _recorded(net, _input(0), recorder=CaptureRecorder(gpu=gpu))
        ours = [_step(net, _input(seed)) for seed in range(4)]
        assert graphs.is_enabled and graphs.num_replays == 3 and recorder.num_records == 2
        del net, graphs
    assert not gpu.checker.races, "\n".join(gpu.checker.races[:5])
    assert not gpu.blocking_copies
    _assert_close([each for step in ours for each in step], [each for seed in range(4) for each in _step(plain, _input(seed))])


def test_a_recording_that_does_not_wait_for_its_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostOffloader, "finish", lambda offloader, copies: None)
    net, plain = _pair(TinyUNet, **_OFFLOAD)
    with gpu_steps() as gpu:
        graphs, _ = _recorded(net, _input(0), recorder=CaptureRecorder(gpu=gpu))
        _step(net, _input(0))
        with pytest.warns(RuntimeWarning, match="could not be recorded as a CUDA graph .*(unjoined|capturing)"):
            ours = _step(net, _input(1))
        assert not graphs.is_enabled
        del net, graphs
    _step(plain, _input(0))
    _assert_close(ours, _step(plain, _input(1)))


def test_copies_to_files_are_not_recorded(tmp_path: Path) -> None:
    net, _ = _pair(TinyUNet, **_OFFLOAD, host_folder=str(tmp_path))
    (ready,) = net._sft_engine.plan_cache.prepared.values()
    assert can_record_passes(ready.region) and not can_record_passes(ready.region, copies_to_files=True)


def test_plans_that_use_the_host_are_not_recorded() -> None:
    x = sft.sources.ArraySource(_input(0, requires_grad=False)[0].numpy(), layout="CHW", dtype=torch.float64)
    cases: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (seeded(ConvNet), x, {}),
        (seeded(ConvNet), _SHAPE, {"weights": "stream"}),
    ]
    for model, shape, options in cases:
        net: Any = sft.compile(model, shape, options=sft.Options(tile=(8, None), **options))
        (ready,) = net._sft_engine.plan_cache.prepared.values()
        assert not can_record_passes(ready.region)


def test_the_budget_has_room_for_recordings() -> None:
    """A plan for a GPU counts copies of inputs and results; where they do not fit, strips are recorded within the rest of the budget."""
    shape = (1, 3, 1536, 1280)
    with torch.device("meta"):
        model = ConvNet()

    def plan(budget: int, *, graphs: bool, strategy: str = "none") -> sft.Plan:
        options = sft.Options(cuda_graphs=graphs, strategy=strategy)
        return sft.plan(copy.deepcopy(model), shape, budget=budget, device="cuda", options=options)

    without, recorded = plan(2**28, graphs=False), plan(2**28, graphs=True)
    input_bytes = 3 * 1536 * 1280 * next(model.parameters()).element_size()
    assert recorded.total_bytes <= 2**28 and recorded.overhead_bytes >= without.overhead_bytes + input_bytes
    assert plan(without.total_bytes, graphs=True, strategy="auto").total_bytes <= without.total_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("make", "options"), [(ConvNet, {}), (Residual, {}), (_Upsampled, {}), (_Resized, {}), (_Random, {}), (TinyUNet, _OFFLOAD)]
)
def test_recorded_steps_on_a_gpu(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    model = seeded(make)
    settings = _settings(model, **options)  # on the CPU: a plan for a GPU offloads nothing of a few kilobytes
    model.cuda()
    plain: Any = sft.compile(copy.deepcopy(model), _SHAPE, **settings)
    net: Any = sft.compile(model, _SHAPE, **{**settings, "options": replace(settings["options"], cuda_graphs=True)})

    def step(module: nn.Module, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        module.zero_grad(set_to_none=True)
        x = _input(seed).detach().cuda().requires_grad_()
        y = module(x)
        y.square().sum().backward()
        return _results(module, x, y)

    for seed in range(4):
        torch.testing.assert_close(step(net, seed), step(plain, seed), rtol=1e-10, atol=1e-10)
    resources = [each.resources for each in net._sft_engine.plan_cache.prepared.values()]
    recorded = [each.pass_graphs for each in resources if each.pass_graphs is not None]
    assert sorted(graphs.num_replays for graphs in recorded)[-1] == 3 and all(graphs.is_enabled for graphs in recorded)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    step(net, 4)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
