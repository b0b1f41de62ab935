"""Order of streams and host threads: steps on a fake CUDA device without races, with the CPU's results; removed waits are reported."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.planner.projection import project_step
from sft.runtime.streamed_inputs import row_read_order
from sft.runtime.tiled_segment import TiledSegment
from sft.sources import ArraySource
from sft.sources.sink import ArraySink
from sft.torch_runtime.host.host_memory import HostAllocator, HostSlabPool
from sft.torch_runtime.host.input_streaming import Uploads
from sft.torch_runtime.host.offload import HostOffloader
from sft.torch_runtime.weight_streaming import WeightPass
from sft.weights import HostStore, RecordLayout, TensorSpec, WeightStream
from tests.helpers.bags import AttentionBag, VisionTransformer, take_samples
from tests.helpers.fake_cuda import DEVICE, FakeEvent, FakeGpu, FakeStream, fake_cuda, observed
from tests.helpers.fake_cuda_steps import gpu_steps
from tests.helpers.models import ConvNet, Residual, TinyUNet, image, seeded
from tests.helpers.plans import least_budget
from tests.helpers.streamed_weights import Vgg

_SHAPE = (1, 3, 24, 12)


class Normed(nn.Sequential):
    """Norms in training: each reads the whole image, which waits on the host."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))


class Random(nn.Sequential):
    """Masks in strips and noise: kernels read the seed, no host thread waits for it."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.3), nn.ReLU(), Noise(), nn.Conv2d(4, 2, 3), nn.Dropout2d(0.5))


class Noise(nn.Module):
    """Normal noise added to an image."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Bag(AttentionBag):
    """Tiles that run some at a time."""

    def __init__(self) -> None:
        super().__init__(VisionTransformer(12, 3, 1, patch_px=8, tile_px=16), 12)


_HOST = {"host_budget": "64GiB"}

#: Network, options, and other settings of a step, by what moves between the devices.
_CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "strips": (Residual, {"tile": (8, None), "state_every": 2}, {}),
    "random": (Random, {"tile": (8, None), "state_every": 2}, {}),
    "offload": (TinyUNet, {"strategy": "offload-dp", **_HOST}, {"budget": "least"}),
    "source": (ConvNet, {"tile": (8, None), "state_every": 2}, {"source": True}),
    "source-pixels": (ConvNet, {"tile": (8, None), "state_every": 2}, {"pixels": "uint8"}),
    "source-pixels-16": (ConvNet, {"tile": (8, None)}, {"pixels": "uint16"}),
    "source-pixels-whole": (ConvNet, {"strategy": "none"}, {"pixels": "uint8", "shape": (2, 3, 24, 12)}),
    "source-pixels-one-strip": (ConvNet, {"tile": (24, None)}, {"pixels": "uint16"}),
    "source-pixels-bfloat16": (ConvNet, {"tile": (8, None), "state_every": 2}, {"pixels": "uint8", "dtype": torch.bfloat16}),
    "source-pixels-bfloat16-16": (ConvNet, {"tile": (8, None)}, {"pixels": "int16", "dtype": torch.bfloat16}),
    "source-pixels-whole-bfloat16": (ConvNet, {"strategy": "none"}, {"pixels": "uint8", "dtype": torch.bfloat16}),
    "source-bag": (Bag, {}, {"pixels": "uint8", "dtype": torch.bfloat16, "samples": 2, "shape": (5, 3, 16, 16)}),
    "source-whole": (ConvNet, {"strategy": "none"}, {"source": True}),
    "host-output": (ConvNet, {"tile": (8, None)}, {"output": "host"}),
    "host-output-whole": (ConvNet, {"strategy": "none"}, {"output": "host"}),
    "host-cuts": (Normed, _HOST, {"budget": 180_000, "shape": (2, 3, 64, 12)}),
    "weights": (Vgg, {"weights": "stream"}, {"shape": (2, 3, 20, 16)}),
    "weights-adamw": (Vgg, {"weights": "stream"}, {"shape": (2, 3, 20, 16), "optimizer": "adamw"}),
    "weights-file-adamw": (Vgg, {"weights": "file"}, {"shape": (2, 3, 20, 16), "optimizer": "adamw"}),
}


def _steps(net: Any, x: Any, *, optimizer: Any = None) -> list[Tensor]:
    """Results of two steps."""
    update = None if optimizer is None else sft.StreamedOptimizer(net, optimizer, lr=0.1)
    source, shape = not isinstance(x, Tensor), x.shape
    results: list[Tensor] = []
    torch.manual_seed(0)
    for seed in range(2):
        sink = np.zeros(shape, np.float64)
        y = net(x, input_grad=sink) if source else net(x)
        y.backward(torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(seed)))
        if update is not None:
            update.step()
        results += [y.detach().clone(), *([torch.from_numpy(sink)] if source else [])]
    return results + [each.detach().clone() for p in net.parameters() for each in (p, p.grad) if each is not None]


def _compiled(name: str, folder: Path) -> tuple[list[Any], Any]:
    """Two equally compiled models, and their input."""
    make, options, setting = _CASES[name]
    model, shape = seeded(make).to(setting.get("dtype", torch.float64)), setting.get("shape", _SHAPE)
    x: Any = image(*shape)
    if setting.get("pixels"):
        x = _pixels(shape, setting["pixels"], setting.get("dtype", torch.float64))
    elif setting.get("source"):
        x = x.numpy()
    budget = setting.get("budget", "4GiB")
    if budget == "least":
        budget = least_budget(model, shape, sft.Options(strategy=options["strategy"]))
    nets = []
    for number in range(2):
        chosen = dict(options)
        if chosen.get("weights") == "file":
            chosen["weights"] = sft.WeightsFile(folder / f"{number}.safetensors", durable=False)
        output = {"output": setting["output"]} if "output" in setting else {}
        inputs = [x] if setting.get("pixels") else shape
        nets.append(sft.compile(copy.deepcopy(model), inputs, budget=budget, options=sft.Options(**chosen), **output))
    return nets, x


def _pixels(shape: tuple[int, ...], pixel_type: str, dtype: torch.dtype) -> ArraySource:
    """Pixels with a normalisation of each channel."""
    array = np.random.default_rng(0).integers(0, 256, shape).astype(pixel_type)
    return ArraySource(array, layout="NCHW", mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), dtype=dtype, value_range=(3, 200), clip=True)


#: Modules with copies between the devices that make the host wait, by case.
_BLOCKING: dict[str, set[str]] = {
    "weights": {"gradient_sinks.py"},
    "weights-file-adamw": {"weight_streaming.py", "disk_store.py", "unbuffered_stream.py"},
}


@pytest.mark.parametrize("name", _CASES)
def test_steps_have_no_races(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "samples" in _CASES[name][2]:
        take_samples(monkeypatch, _CASES[name][2]["samples"])
    optimizer = _CASES[name][2].get("optimizer")
    (on_cpu, on_gpu), x = _compiled(name, tmp_path)
    expected = _steps(on_cpu, x, optimizer=optimizer)
    if not isinstance(x, Tensor):
        on_gpu.plan_for(x, input_grad=np.zeros(x.shape))
    with gpu_steps() as gpu:
        results = _steps(on_gpu, x, optimizer=optimizer)
        has_host_values = sft.of(on_gpu).plan.host_bytes > 0
        del on_gpu
    assert not gpu.checker.races, "\n".join(gpu.checker.races[:5])
    blocking = {each.split(":")[0].rsplit("/", 1)[-1] for each in gpu.blocking_copies}
    assert blocking <= _BLOCKING.get(name, set()), gpu.blocking_copies[:5]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
    assert not gpu.scalar_reads
    assert has_host_values or name not in ("offload", "host-cuts")


# Seeded races: each test removes one wait, and the report names both accesses.


def _offload_round_trip(gpu: FakeGpu, *, wait: bool = True) -> None:
    """Two values leave in turn; the second takes the slab's range of the first."""
    pool = HostSlabPool(1024, DEVICE, HostAllocator())
    offloader = HostOffloader(DEVICE, pool.lease())
    for _ in range(2):
        with observed(gpu):
            value = torch.ones(128, device=DEVICE).mul_(2)
            copied = offloader.offload("value", [value])
            offloader.release(copied)
            offloader.prefetch(copied)
            if wait:
                offloader.wait_prefetch(copied)
            value.add_(1)
            offloader.free_offload(copied)
        assert value.eq(3).all()
        del value, copied


def _without_event_waits(*streams: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Mutation: these streams do not wait for events."""

    def mutate(patches: pytest.MonkeyPatch) -> None:
        wait_event = FakeStream.wait_event
        patches.setattr(
            FakeStream,
            "wait_event",
            lambda stream, event: None if any(name in stream.timeline.name for name in streams) else wait_event(stream, event),
        )

    return mutate


def _without_stream_waits(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(FakeStream, "wait_stream", lambda stream, other: None)


def _without_wait_before_release(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(HostOffloader, "_wait_copies", lambda offloader, copied: None)


@pytest.mark.parametrize(
    ("mutate", "first", "second"),
    [
        (_without_stream_waits, "copy at sft/torch_runtime/host/offload.py", "aten.mul_"),  # the copy begins before the value is computed
        (_without_wait_before_release, "free", "copy at sft/torch_runtime/host/offload.py"),  # the bytes are freed before they are copied
        (_without_event_waits("computation"), "aten.add_", "copy at sft/torch_runtime/host/offload.py"),  # read before it is back
    ],
)
def test_offload_without_a_wait_is_reported(mutate: Callable[[pytest.MonkeyPatch], None], first: str, second: str) -> None:
    with fake_cuda() as gpu:
        _offload_round_trip(gpu)
        assert not gpu.checker.races
    with fake_cuda() as gpu, pytest.MonkeyPatch.context() as patches:
        mutate(patches)
        _offload_round_trip(gpu)
        reports = gpu.checker.races
    assert any(
        first in report.split(" is not ordered after ")[0] and second in report.split(" is not ordered after ")[1] for report in reports
    )
    assert all("stream" in report for report in reports)


def _reuse_slab_early() -> None:
    """Mutation: a range of the slab is freed while the copy back reads it."""
    offloader = HostOffloader(DEVICE, HostSlabPool(1024, DEVICE, HostAllocator()).lease())
    first, second = (torch.ones(128, device=DEVICE) for _ in range(2))
    copied = offloader.offload("first", [first])
    offloader.release(copied)
    offloader.prefetch(copied)
    offloader._arena.free(copied.start)
    offloader.offload("second", [second])


def test_a_slab_range_that_is_reused_early_is_reported() -> None:
    with fake_cuda() as gpu, observed(gpu):
        _reuse_slab_early()
        assert any("host memory" in report and report.count("offload.py") == 2 for report in gpu.checker.races)


def test_a_slab_that_is_freed_early_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping a model right after its step frees page-locked memory that copies read."""
    monkeypatch.setattr("sft.common.pinned_memory._unlock_pages", lambda runtime, synchronize, address: None)
    with fake_cuda() as gpu:
        _offload_round_trip(gpu)
    assert any("(free) is not ordered after the read" in report for report in gpu.checker.races)


def _store() -> HostStore:
    store = HostStore([RecordLayout.of([TensorSpec(name="w", shape=(16,), dtype=torch.float32)]) for _ in range(5)], pin=True)
    store.all_records().view(torch.float32).copy_(torch.arange(80.0))
    return store


def _read_window(gpu: FakeGpu, *, prefetch: bool) -> None:
    store = _store()
    order = [0, 1, 2, 3, 4, 3, 2, 1, 0]
    stream = WeightStream(store, DEVICE, window_bytes=2 * store.layouts[0].part_bytes("weights"), prefetch=prefetch)
    total = torch.zeros(16)
    with observed(gpu):
        gpu.adopt(total)
        with stream.open_pass(order) as weights:
            for block in order:
                total.add_(weights.acquire(block)["w"])
                weights.release(block)
    assert total.tolist() == [2 * sum(16.0 * block + i for block in range(4)) + 64 + i for i in range(16)]


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_window_over_weights_has_no_races(prefetch: bool) -> None:
    with fake_cuda() as gpu:
        _read_window(gpu, prefetch=prefetch)
        assert not gpu.checker.races, gpu.checker.races[:3]
    for streams in ("computation", "stream 2"):  # the wait for the copy into a slot; the wait for the last reader of a slot
        with fake_cuda() as gpu, pytest.MonkeyPatch.context() as patches:
            _without_event_waits(streams)(patches)
            _read_window(gpu, prefetch=prefetch)
        assert any("weights/stream.py" in report for report in gpu.checker.races), streams


def test_streamed_weights_without_a_wait_are_reported(tmp_path: Path) -> None:
    (_, net), x = _compiled("weights", tmp_path)
    with gpu_steps() as gpu, pytest.MonkeyPatch.context() as patches:
        patches.setattr(WeightPass, "_wait_copy", lambda weights, name: None)
        _steps(net, x)
    assert any("weight_streaming.py" in report and "is not ordered after the write" in report for report in gpu.checker.races)


def test_a_reader_that_does_not_wait_for_its_copies_is_reported(tmp_path: Path) -> None:
    """It would read the next strip into a buffer during its copy."""
    (_, net), x = _compiled("source", tmp_path)
    net.plan_for(x, input_grad=np.zeros(x.shape))
    with gpu_steps() as gpu, pytest.MonkeyPatch.context() as patches:
        patches.setattr(FakeEvent, "synchronize", lambda event: None)
        _steps(net, x)
    assert any("read of a strip" in report and "input_streaming.py" in report for report in gpu.checker.races)


@pytest.mark.parametrize("stream", ["stream ", "computation"])
def test_pixels_without_a_wait_are_reported(stream: str, tmp_path: Path) -> None:
    """They would be overwritten with those of the next strip, or normalised before they arrive."""
    (_, net), x = _compiled("source-pixels", tmp_path)
    net.plan_for(x, input_grad=np.zeros(x.shape))
    with gpu_steps() as gpu, pytest.MonkeyPatch.context() as patches:
        _without_event_waits(stream)(patches)
        _steps(net, x)
    assert any("input_streaming.py" in report for report in gpu.checker.races)


@pytest.mark.parametrize("name", [name for name, (_, _, setting) in _CASES.items() if "pixels" in setting])
def test_pixels_are_copied_in_their_own_type(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every type of the network's numbers: strip by strip, in a single strip, in chunks of a bag and in untiled segments."""
    if "samples" in _CASES[name][2]:
        take_samples(monkeypatch, _CASES[name][2]["samples"])
    (_, net), x = _compiled(name, tmp_path)
    plan = net.plan_for(x, input_grad=np.zeros(x.shape))
    assert any(segment.takes_samples for segment in plan.segments) == (name == "source-bag")
    copied = set()
    with gpu_steps(), pytest.MonkeyPatch.context() as patches:
        copy_strip = Uploads.copy

        def noting(uploads: Uploads, target: Tensor, strip: Tensor, allocated: Any) -> Any:
            copied.add(strip.dtype)
            return copy_strip(uploads, target, strip, allocated)

        patches.setattr(Uploads, "copy", noting)
        _steps(net, x)
    assert copied == {x.normalizer.pixel_dtype}


@pytest.mark.parametrize("strip_rows", [8, 48])
def test_strips_of_a_source_are_in_the_projected_bytes(strip_rows: int) -> None:
    """On a GPU: two strips on the device, and three page-locked ones on the host; a sweep by strips and its profile agree."""
    model, shape, source = seeded(ConvNet), (1, 3, 48, 12), np.zeros((1, 3, 48, 12))
    plans: list[Any] = []
    search = import_module("sft.api.plan_search")
    plan_segments = search.plan_segments
    with pytest.MonkeyPatch.context() as patches:

        def noting(problem: Any, *arguments: Any) -> Any:
            plans.append((problem, plan_segments(problem, *arguments)))
            return plans[-1][1]

        patches.setattr(search, "plan_segments", noting)
        net: Any = sft.compile(model, shape, budget="4GiB", options=sft.Options(tile=(strip_rows, None), state_every=3))
        net.plan_for(source, input_grad=np.zeros(shape))
    problem, planned = plans[-1]
    assert planned.projection.staging_bytes == 0
    on_gpu = replace(problem, resources=replace(problem.resources, on_host=False))
    summed, walked = (project_step(on_gpu, planned.region, exactly=exactly) for exactly in (False, True))
    assert summed == walked
    if strip_rows == shape[2]:
        return
    orders = [
        row_read_order(segment, direction, sweep)
        for segment in planned.region.segments
        if isinstance(segment, TiledSegment)
        for sweep in segment.sweeps
        for direction in ("forward", "backward")
    ]
    (name,) = problem.sized.graph.inputs
    tallest = max(len(rows) for order in orders for rows in order.get(name, ()))
    # The reader has three strips and rows for the next one; the gradient has two strips in each direction.
    assert 7 * tallest * 3 * 12 * 8 <= summed.staging_bytes <= 8 * tallest * 3 * 12 * 8 + 1024


@pytest.mark.parametrize("name", ["source", "host-output"])
@pytest.mark.parametrize(("mutate", "first"), [(_without_event_waits("computation"), "sft/"), (None, "aten.copy_")])
def test_a_download_without_a_wait_is_reported(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None] | None, first: str, tmp_path: Path
) -> None:
    """The memory of a strip is used again during its copy to the host; or the thread scatters it before the copy is complete."""
    (_, net), x = _compiled(name, tmp_path)
    if isinstance(x, np.ndarray):
        net.plan_for(x, input_grad=np.zeros(x.shape))
    with gpu_steps() as gpu, pytest.MonkeyPatch.context() as patches:
        if mutate is not None:
            mutate(patches)
        else:
            patches.setattr(FakeEvent, "synchronize", lambda event: None)
        _steps(net, x)
    assert any("host_transfers.py" in report.split(" is not ordered after ")[1] for report in gpu.checker.races)


def test_errors_of_the_writing_thread_are_raised_once(tmp_path: Path) -> None:
    """By the backward pass, with the sink's own message; the next step works."""
    (_, net), x = _compiled("source", tmp_path)
    net.plan_for(x, input_grad=np.zeros(x.shape))
    with gpu_steps() as gpu:
        add, calls = ArraySink.add, []

        def failing(sink: ArraySink, rows: Any, gradient: Tensor) -> None:
            calls.append(rows)
            if len(calls) == 2:
                raise sft.SourceError("the disk is full")
            add(sink, rows, gradient)

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(ArraySink, "add", failing)
            with pytest.raises(sft.SourceError, match="the disk is full"):
                _steps(net, x)
        assert not any(thread.name.startswith("sft-") for thread in threading.enumerate())
        results = _steps(net, x)
    assert not gpu.checker.races
    assert torch.isfinite(results[0]).all()


def test_updated_weights_that_are_read_early_are_reported(tmp_path: Path) -> None:
    """Updates are copied to the host during the backward pass; the commit waits for them."""
    (_, net), x = _compiled("weights-adamw", tmp_path)
    with gpu_steps() as gpu, pytest.MonkeyPatch.context() as patches:
        patches.setattr(HostStore, "_wait_writes", lambda store: None)
        _steps(net, x, optimizer="adamw")
    assert any("read on host thread" in report and "pinned_memory.py" in report for report in gpu.checker.races)


def test_threads_are_ordered_by_their_queue_alone() -> None:
    """Two threads that write one array: a race, unless one waits for the other."""
    for waits in (False, True):
        with fake_cuda() as gpu:
            data = np.empty(64, np.uint8)
            done: Any = queue.SimpleQueue()

            def fill(data: Any = data, done: Any = done) -> None:
                np.copyto(data, np.ones(64, np.uint8))
                done.put(None)

            thread = threading.Thread(target=fill)
            thread.start()
            while done.empty():
                pass
            if waits:
                done.get()
            np.copyto(data, np.zeros(64, np.uint8))
            assert bool(gpu.checker.races) != waits
            thread.join()
