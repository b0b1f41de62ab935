"""Input streaming: rows that are read, number of reads, and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.interval import Interval
from sft.planner.problem import PlanningProblem
from sft.planner.projection import Projection, project_step
from sft.runtime.region import Region
from sft.sources import ArraySource, StripReader
from sft.sources.strip_reader import reader_bytes
from tests.helpers.models import ConvNet, Residual, chain, image, seeded
from tests.helpers.problems import with_resources
from tests.helpers.sources import Watched, mapped_bytes, reader_threads
from tests.torch_runtime.test_input_streaming import SkipFromInput, check_budget, random_pixels

_SHAPE = (1, 3, 30, 20)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert reader_threads() == []


def _net(model: nn.Module | None = None, rows: int = 4, **options: Any) -> Any:
    return sft.compile(seeded(Residual) if model is None else model, _SHAPE, options=sft.Options(tile=(rows, None), **options))


# --- rows that are read ---------------------------------------------------------------------------------------------


def _readers(net: Any) -> int:
    """Segments that read the input."""
    graph = net._sft_engine.phases().graph
    return sum(any(graph.inputs[0] in graph[name].operands for name in segment.nodes) for segment in net.plan.segments)


class _CatFromInput(SkipFromInput):
    """The last segment reads the input for a concatenation alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.first(x)))
        z = self.norm2(self.second(torch.cat([y, x], 1)))
        return torch.cat([torch.relu(z), x], 1)


_READING: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "one segment": (Residual, 1, 1),
    # The shortcut of the input waits for the segment that adds it, which therefore reads for its weight's gradient, too.
    "three segments": (SkipFromInput, 3, 3),
    # A concatenation needs no values to be differentiated, so its segment does not read.
    "three segments, one of which concatenates": (_CatFromInput, 3, 2),
}


@pytest.mark.parametrize("name", _READING)
@pytest.mark.parametrize("batch_tile", [1, 2])
def test_each_row_is_read_once_a_pass(name: str, batch_tile: int) -> None:
    """Every segment that reads a row does so once forward and once backward."""
    make, forwards, backwards = _READING[name]
    model = seeded(make).train()
    source = Watched(image(2, *_SHAPE[1:]))
    net: Any = sft.compile(model, source, options=sft.Options(tile=(4, None), state_every=1, batch_tile=batch_tile))
    y = net(source)
    times = _readers(net)
    assert times == forwards
    every_row = {(sample, row) for sample in range(2) for row in range(30)}
    assert source.counts == dict.fromkeys(every_row, times)
    reading = net.last_reading
    assert reading.forward.num_rows_read == times * 60 and reading.backward.num_rows_read == 0
    assert reading.forward.read_bytes == times * 60 * 3 * 20 * 8
    source.counts.clear()
    y.sum().backward()
    assert source.counts == dict.fromkeys(every_row, backwards)
    assert reading.backward.num_rows_read == backwards * 60
    assert 0 <= reading.backward.hidden_fraction <= 1 and reading.forward.read_seconds > 0
    assert "rows" in str(reading)


def test_restored_strips_read_their_rows_again() -> None:
    source = Watched(image(*_SHAPE))
    net = sft.compile(seeded(Residual), source, options=sft.Options(tile=(2, None), state_every=3))
    y = net(source)
    assert set(source.counts.values()) == {1}
    y.sum().backward()
    assert 1 < max(source.counts.values()) <= 4
    net(image(*_SHAPE))
    assert net.last_reading is None, "a tensor is not read"


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_clones")
@pytest.mark.parametrize(("rows", "every"), [(1, 1), (2, 3), (8, 2), (8, 50), (64, 1)])
@pytest.mark.parametrize("wants_gradient", [True, False])
@pytest.mark.parametrize("make", [ConvNet, SkipFromInput])
def test_the_analytic_profile_equals_the_simulated_sweep(
    make: Callable[[], nn.Module], rows: int, every: int, wants_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, where the reader's buffers count, and on a device, where copies of strips do."""
    seen = []

    def both(problem: PlanningProblem, region: Region, **keywords: Any) -> Projection:
        for on_host in (True, False):
            asked = with_resources(problem, on_host=on_host)
            summed, walked = project_step(asked, region), project_step(asked, region, exactly=True)
            assert summed == walked
            seen.append(summed.peak_bytes)
        return project_step(problem, region)

    # `sft.plan` is the function; the package of that name is reached by import alone.
    monkeypatch.setattr(import_module("sft.planner.materialize"), "project_step", both)
    pixels = random_pixels(3, 44, 10, 3)
    net: Any = sft.compile(
        seeded(make).train(), (3, 3, None, None), options=sft.Options(tile=(rows, None), state_every=every, batch_tile=2)
    )
    net.plan_for(pixels, input_grad=np.zeros((3, 44, 10, 3)) if wants_gradient else None)
    with torch.no_grad():
        net.plan_for(pixels)
    assert len(seen) == 4 and seen[0] >= seen[1] and seen[2] >= seen[3]


def test_a_reader_allocates_the_projected_bytes() -> None:
    source = Watched(image(2, 3, 40, 7))
    order = [Interval(0, 5), Interval(4, 11), Interval(0, 0), Interval(9, 20)]
    with sft.measure_peak("cpu") as peak, StripReader(source, order) as reader:
        count, strip, carry = reader_bytes(order, 2 * 3 * 7 * 8)
        assert reader.buffer_bytes == count * strip + carry == peak.num_bytes == (2 * 11 + 2) * 2 * 3 * 7 * 8
        for rows in order:
            reader.take(rows)


def _thin() -> nn.Module:
    return seeded(lambda: chain(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1)))


@pytest.mark.parametrize("wants_gradient", [False, True])
def test_a_budget_below_the_image(wants_gradient: bool) -> None:
    """The image does not fit; the smallest budget that the error names works, and a step keeps it."""
    pixels = random_pixels(1, 512, 40, 3)
    target = np.zeros((512, 40, 3)) if wants_gradient else None
    image_bytes = pixels.size * 8
    with pytest.raises(sft.BudgetError) as refused:
        sft.of(sft.compile(_thin(), (1, 3, None, None), budget="10KiB")).plan_for(pixels, input_grad=target)
    needed = refused.value.needed_bytes
    assert needed < image_bytes / 4
    net: Any = sft.compile(_thin(), (1, 3, None, None), budget=needed)
    plan = check_budget(net, pixels, target)
    assert plan.total_bytes <= needed and "read in strips" in " ".join(plan.explain().split())
    assert sft.Plan.from_json(plan.to_json()) == plan
    with pytest.raises(sft.BudgetError):
        net.plan_for((1, 3, 512, 40))


def test_a_plan_for_a_tensor_is_not_one_for_a_source() -> None:
    model, x = _thin(), random_pixels(256, 32, 3)
    net: Any = sft.compile(model, (1, 3, 256, 32))
    assert net.plan.input_placements == ("device",)
    assert net.plan_for(x).input_placements == ("source",)
    assert sft.plan(model, x).input_placements == ("source",)
    plan = sft.plan(model, x, options=sft.Options(tile=(8, None)))
    net = sft.compile(model, x, plan=plan)
    assert net.plan == plan
    assert len(net.plan_for((1, 3, 256, 32)).segments) == 1 != plan.segments[0].num_steps


# --- pages of mapped files ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_pages_that_were_read_are_released(tmp_path: Path, layout: Any) -> None:
    shape = (8192, 1024, 3) if layout == "HWC" else (3, 8192, 1024)
    pixels = random_pixels(*shape)
    np.save(tmp_path / "image.npy", pixels)
    source = ArraySource(tmp_path / "image.npy", layout=layout)
    most = 0
    for number, _ in enumerate(StripReader(source, [Interval(top, top + 128) for top in range(0, 8192, 128)])):
        if number % 4 == 3:  # the list of all mappings of this process takes long
            most = max(most, mapped_bytes(tmp_path / "image.npy"))
    # In each plane, a huge page of the kernel's cache on either side may be mapped with the accessed ones.
    assert most < pixels.nbytes / 2 and mapped_bytes(tmp_path / "image.npy") < pixels.nbytes / 8


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_changes_to_a_mapping_survive(tmp_path: Path, mode: Any) -> None:
    """Changes of a copy-on-write mapping exist only in its pages."""
    np.save(tmp_path / "image.npy", np.zeros((64, 512, 3), np.uint8))
    mapped = np.lib.format.open_memmap(tmp_path / "image.npy", mode=mode)
    mapped[:] = random_pixels(64, 512, 3)
    source = ArraySource(mapped)
    for _ in range(2):
        out = torch.empty(1, 3, 64, 512)
        source.rows(Interval(0, 64), out)
        expected = torch.from_numpy(random_pixels(64, 512, 3)).permute(2, 0, 1)[None].float() / 255
        assert torch.equal(out, expected)
