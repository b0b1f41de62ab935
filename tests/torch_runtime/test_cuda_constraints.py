"""Constraints of CUDA operators on programs, checked without a GPU."""

from __future__ import annotations

import gc
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import sft
from sft.analysis.passes import fold_norms
from sft.backends.resolve import check_triton
from sft.distributed import process_transport
from sft.distributed.process_transport import _batched_p2p
from sft.distributed.transport import TOPICS
from sft.lower import joint_traces as traces
from sft.lower.op_recorder import ArgumentSpec
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.search.tiled import CandidateGrid
from sft.sources.arrays import ArraySource
from sft.torch_runtime.host.input_streaming import load_source
from sft.torch_runtime.pass_statistics import PassReading
from sft.weights.record import ALIGNMENT_BYTES
from sft.weights.store import allocate_host_bytes
from tests.helpers.fake_cuda import FakeGpu, fake_cuda, observed
from tests.helpers.models import seeded
from tests.helpers.problems import problem_of

_SHAPE = (1, 3, 24, 20)


class _Network(nn.Sequential):
    def __init__(self, factor: int = 2) -> None:
        upsample = nn.Upsample(scale_factor=factor, mode="bilinear", align_corners=False)
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), upsample, nn.Conv2d(4, 2, 3))


def _calls(model: nn.Module, name: str, **options: Any) -> list[tuple[Any, ...]]:
    """The arguments of all calls of an operator in the programs of a step."""
    net: Any = sft.compile(model, _SHAPE, options=sft.Options(**options))
    net(torch.randn(_SHAPE, dtype=torch.float64)).sum().backward()
    calls = []
    for segment in next(iter(net._sft_engine.plan_cache.prepared.values())).region.segments:
        for program in segment.lowered_programs:
            calls += [each.arguments for each in program.instructions if name in str(each.function)]
    return calls


def test_statistics_that_were_not_saved_are_empty_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's derivative of a norm with running statistics asserts that these are tensors; the CPU takes None for them."""
    monkeypatch.setattr(fold_norms, "MAX_FOLDED_ELEMENTS", 0)
    calls = _calls(seeded(_Network).eval(), "native_batch_norm_backward", tile=(8, None))
    assert calls
    for arguments in calls:
        assert all(arguments[place].shape == (0,) for place in (5, 6))


def test_interpolation_gets_no_scale_of_gathered_axes() -> None:
    """Rows are gathered first; with a scale for rows, CUDA would apply it again, and read row r of the result at r / 2.

    If ATen interpolates both axes of a strip, it has both scales.
    """
    for name, factor, scales in (
        ("upsample_bilinear2d.", 2, (2.0, 2.0)),
        ("upsample_bilinear2d.", 3, (None, 3.0)),
        ("upsample_bilinear2d_backward.", 2, (2.0, 2.0)),
        ("upsample_bilinear2d_backward.", 3, (None, 3.0)),
    ):
        network = seeded(partial(_Network, factor))
        calls = _calls(network, name, tile=(4 * factor, None))
        assert calls and all(arguments[-2:] == scales for arguments in calls)


def test_messages_of_one_group_are_posted_together() -> None:
    """NCCL groups, as constructed here, accept no device."""

    class Group:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def _start_coalescing(self) -> None:
            self.calls.append("start")

        def _end_coalescing(self) -> str:
            self.calls.append("end")
            return "work"

    group = Group()
    with _batched_p2p(group, torch.device("cuda")) as batch:
        assert group.calls == ["start"]
    assert group.calls == ["start", "end"]
    assert batch.work == "work"


def test_attention_is_traced_into_calls_that_gpus_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces run on fake tensors of the CPU, where attention is a call that other devices lack."""
    monkeypatch.setattr(traces, "_has_gpu", lambda: True)
    trace = traces.trace_joint(functional.scaled_dot_product_attention, [ArgumentSpec((1, 2, 5, 4), torch.float32, True)] * 3)
    names = [str(call.function) for call in (*trace.forward, *trace.backward)]
    assert any("bmm" in name for name in names)
    assert not any("cpu" in name or "attention" in name for name in names)


def test_lstms_are_traced_into_calls_that_gpus_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision, for which the CPU has one call for a layer."""
    monkeypatch.setattr(traces, "_has_gpu", lambda: True)
    model = nn.LSTM(3, 5, batch_first=True)
    reader = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.AdaptiveAvgPool2d((1, None)), _Steps(model))
    traces.trace_whole.cache_clear()
    try:
        net: Any = sft.compile(reader, (2, 1, 16, 4))
        net(torch.randn(2, 1, 16, 4)).sum().backward()
    finally:
        traces.trace_whole.cache_clear()
    (ready,) = net._sft_engine.plan_cache.prepared.values()
    programs = [program for segment in ready.region.segments for program in segment.lowered_programs]
    names = {str(each.function) for program in programs for each in program.instructions}
    assert any("sigmoid" in name for name in names)
    assert not any("mkldnn" in name or "lstm" in name for name in names)


class _Steps(nn.Module):
    """A recurrent layer over the columns of an image."""

    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x.flatten(1, 2).transpose(1, 2))[0]
        return output


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("tile", [None, (8, None), (8, 16)])
def test_interpolations_to_a_size_have_kernels(mode: str, tile: tuple[int, int | None] | None) -> None:
    """Their calls give no scale."""

    class To(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.interpolate(x, size=(2 * x.shape[2], 2 * x.shape[3]), mode=mode)

    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), To(), nn.Conv2d(4, 4, 3, padding=1))
    chosen: dict[str, Any] = {"strategy": "none"} if tile is None else {"tile": tile}
    net: Any = sft.compile(model, (1, 3, 32, 32), options=sft.Options(backend="triton", **chosen))
    net.plan_for(torch.empty(1, 3, 32, 32, device="meta", requires_grad=True))
    for ready in net._sft_engine.plan_cache.prepared.values():
        programs = [program for segment in ready.region.segments for program in segment.lowered_programs]
        names = [str(each.function) for program in programs for each in program.instructions]
        assert any("Resize" in name for name in names) and not any("upsample" in name for name in names)


@pytest.mark.usefixtures("frozen_objects")
def test_pages_are_locked_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the requested bytes are locked, once, and unlocked with the memory."""
    locked: dict[int, int] = {}
    waited: list[int] = []  # locked arrays at each wait for the device

    class Runtime:
        status = 0

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # CUDA's names
            if self.status == 0:
                locked[address] = num_bytes
            return self.status

        def cudaHostUnregister(self, address: int) -> None:
            assert waited == [1], "copies may still be under way"
            del locked[address]

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(len(locked)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    data = allocate_host_bytes(5000, pin=True)
    assert sum(locked.values()) == 5000 + ALIGNMENT_BYTES and data.numel() == 5000
    assert data.data_ptr() % ALIGNMENT_BYTES == 0
    view = data[100:]
    del data
    assert locked
    del view
    gc.collect()
    assert not locked
    runtime.status = 2
    reported = []

    def report(*_: object, **__: object) -> None:
        reported.append(2)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", report)
    with pytest.warns(RuntimeWarning, match=r"streamed weights take 4\.\d+ KiB of page-locked.*CUDA error 2.*computes the same"):
        pinned = allocate_host_bytes(4096, pin=True)
    assert pinned.fill_(7).eq(7).all() and not locked and reported


def test_connections_are_made_by_all_ranks_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL opens each connection at its first message, which only some ranks may send."""
    connected = []

    class Group:
        class Options:
            pass

        def __init__(self, store: object, place: int, count: int, options: object) -> None:
            self.store = store

        def eager_connect_single_device(self, device: torch.device) -> None:
            connected.append((self.store, device))

    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr("torch.distributed.distributed_c10d.PrefixStore", lambda topic, _: topic)
    device = torch.device("cuda", 1)
    groups = process_transport._new_groups(None, 0, 2, timedelta(seconds=1), device)
    assert connected == [(topic, device) for topic in TOPICS if topic != "control"]
    assert groups["control"] is groups["globals"]


def test_strips_have_no_more_elements_than_gpus_index() -> None:
    """Programs stay within 32-bit element counts of some of a GPU's operators, even if the budget allows more."""
    shape = (1, 3, 65_536, 16_384)
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 1, 3, padding=1), nn.AdaptiveAvgPool2d(1))
    problem, options = problem_of(model, shape, training=True), sft.Options()
    heights = {kind: list(CandidateGrid(problem, options, DeviceRates(kind)).axes.strip_rows) for kind in ("cpu", "cuda")}
    assert heights["cuda"] == [rows for rows in heights["cpu"] if rows * 256 * shape[3] < 0.9 * 2**31]
    assert len(heights["cuda"]) < len(heights["cpu"])


def test_whole_inputs_are_copied_sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several samples are not dense; CUDA allocates a buffer for such a copy, which is in no plan."""
    targets = []
    copy = FakeGpu.copy

    def note(gpu: FakeGpu, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        targets.append((target.is_contiguous(), source.is_contiguous(), non_blocking))
        copy(gpu, target, source, non_blocking=non_blocking)

    monkeypatch.setattr(FakeGpu, "copy", note)
    monkeypatch.setattr("sft.sources.strip_reader.FULL_READ_BYTES", 4096)
    numbers = torch.rand(3, 2, 40, 16)
    with fake_cuda() as gpu:
        out = gpu.adopt(torch.empty(numbers.shape).to(memory_format=torch.channels_last))
        with observed(gpu):
            load_source(ArraySource(numbers.numpy(), layout="NCHW"), out, PassReading())
        assert not gpu.checker.races and not gpu.blocking_copies
    assert torch.equal(out, numbers) and len(targets) > 3
    assert all(all(each) for each in targets)


def test_kernels_for_older_gpus_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.backends.resolve.has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old")
    for capability, count in (((7, 5), 1), ((8, 0), 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, version=capability: version)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_triton(torch.device("cuda"))
        assert len(caught) == count
