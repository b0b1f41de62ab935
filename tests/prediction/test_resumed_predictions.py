"""Interrupted predictions: the next call continues below the rows of the journal, with the bits of an uninterrupted call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.api.call_signature import signature_of
from sft.api.capture_cache import capture_model
from sft.api.inputs import InputSpec
from sft.api.outputs import OutputDestination
from sft.api.pipeline import search
from sft.api.plan_search import PlanSearch
from sft.api.problem_builder import build_problem
from sft.api.settings import CompileSettings, PlanningRequest
from sft.common.atomic_files import lock_file
from sft.common.module_snapshot import ModuleSnapshot
from sft.planner.measured.allocation_trace import record_step
from sft.planner.measured.allocator_overhead import OverheadEstimator
from sft.planner.measured.reserved_memory import resident_sizes, simulate_reserved_memory
from sft.prediction import NpyWriter, OmeTiffWriter, OmeZarrWriter, PolygonWriter, PredictionResult
from sft.prediction.prediction_head import PredictionHead
from sft.prediction.raster import PredictedRaster, RasterRows
from sft.runtime.caching_allocator import AllocatorSettings
from sft.sources import ArrayImage, ArraySource, Normalized, open_image
from tests.helpers.exactness import relative_error
from tests.sources.test_pixel_types import numbers

HEIGHT, WIDTH = 200, 40


class Block(nn.Module):
    """Two convolutions."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(), nn.Conv2d(num_out, num_out, 5, padding=2), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class SmallUNet(nn.Module):
    """Two levels with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(3, 4), Block(4, 6), Block(6, 6)
        self.up, self.fourth, self.fifth = nn.ConvTranspose2d(6, 6, 2, 2), Block(12, 4), Block(8, 4)
        self.scores = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(nn.functional.max_pool2d(first, 2))
        third = self.third(nn.functional.max_pool2d(second, 2))
        fourth = self.fourth(torch.cat([second, self.up(third)], 1))
        fifth = self.fifth(torch.cat([first, nn.functional.interpolate(fourth, scale_factor=2, mode="bilinear")], 1))
        scores: Tensor = self.scores(fifth)
        return scores


class Gated(nn.Module):
    """Channels are weighted by a mean over the image: the image is swept twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scores = Block(3, 4), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x)
        scores: Tensor = self.scores(features * features.mean((2, 3), keepdim=True).sigmoid())
        return scores


def strided() -> nn.Module:
    return nn.Sequential(Block(3, 4), nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.AvgPool2d(3, 2, 1), nn.Conv2d(4, 3, 7, padding=3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"strided": strided, "skips": SmallUNet, "gated": Gated}


def compiled(name: str, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = NETWORKS[name]()
    return sft.compile(model, (1, 3, None, None), budget="24MiB", options=sft.Options(**{"tile": (8, None), **options}))


@pytest.fixture(scope="module")
def pixels() -> npt.NDArray[np.uint8]:
    scene: npt.NDArray[np.uint8] = numbers((HEIGHT, WIDTH, 3), "uint8")
    return scene


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return compiled("strided")


class Ending(NpyWriter):
    """Writer that fails after some rows, as a full disk; the journal has the rows before."""

    def __init__(self, path: Path, num_rows: int) -> None:
        super().__init__(path)
        self.left = num_rows

    def write(self, rows: RasterRows) -> None:
        super().write(rows)
        self.left -= rows.shape[1]
        if self.left <= 0:
            raise sft.SourceError(28, "no space left")


def interrupt(net: nn.Module, source: Any, folder: Path, num_rows: int, **arguments: Any) -> Path:
    """Predict some rows; the journal."""
    journal = folder / "rows"
    with pytest.raises(sft.SourceError, match="no space left"):
        sft.predict(net, source, Ending(folder / "ended.npy", num_rows), resume=journal, **arguments)
    assert [path.name for path in folder.glob("*ended*")] == []
    return journal


@pytest.mark.parametrize("name", NETWORKS)
def test_a_resumed_prediction_has_the_bits_of_a_full_one(name: str, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    net = compiled(name)
    full = sft.predict(net, ArrayImage(pixels), tmp_path / "full.npy", kind="values")
    height = full.raster.height_px
    assert full.reading is not None and full.num_resumed_rows == 0
    for share in (0.1, 0.9):
        journal = interrupt(net, ArrayImage(pixels), tmp_path, int(share * height), kind="values")
        resumed = sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", kind="values", resume=journal)
        assert share * height <= resumed.num_resumed_rows < height
        assert (tmp_path / "map.npy").read_bytes() == (tmp_path / "full.npy").read_bytes() and not journal.exists()
    # Rows above the interruption are read as far as the halo reaches. A network that pools over the image reads it before.
    assert resumed.reading is not None
    saved = full.reading.forward.num_rows_read - resumed.reading.forward.num_rows_read
    assert saved >= resumed.num_resumed_rows * (HEIGHT // height) - 80 > 0 or name == "gated"


@pytest.mark.parametrize("options", [{"tile": (32, 24)}, {"strategy": "sft"}, {"tile": (8, None), "skip_repeats": True}])
def test_plans_of_every_kind_are_resumed(options: dict[str, Any], pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    """Panels and independent tiles; constant strips that are left out, below and above the interruption."""
    scene = pixels.copy()
    scene[20:90], scene[100:190] = 7, 200
    net = compiled("strided", **options)
    source = Normalized(ArrayImage(scene))
    sft.predict(net, source, tmp_path / "full.npy", kind="values")
    for num_rows in (8, 20, 40):
        journal = interrupt(net, source, tmp_path, num_rows, kind="values")
        resumed = sft.predict(net, source, tmp_path / "map.npy", kind="values", resume=journal)
        assert resumed.num_resumed_rows >= num_rows
        assert (tmp_path / "map.npy").read_bytes() == (tmp_path / "full.npy").read_bytes()


def test_every_format_is_resumed_within_the_budget(net: nn.Module, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    tifffile, zarr = (pytest.importorskip(name) for name in ("tifffile", "zarr"))
    sft.predict(net, ArrayImage(pixels), [tmp_path / "full.npy", tmp_path / "full.geojson"])
    journal = interrupt(net, ArrayImage(pixels), tmp_path, 30)
    paths = [tmp_path / name for name in ("map.ome.tif", "map.zarr", "map.npy", "map.geojson")]
    writers = [OmeTiffWriter(paths[0], tile_px=32), OmeZarrWriter(paths[1], chunk_px=32), NpyWriter(paths[2]), PolygonWriter(paths[3])]
    with sft.measure_peak("cpu") as peak:
        result = sft.predict(net, ArrayImage(pixels), writers, resume=journal)
    assert result.num_resumed_rows >= 30 and peak.num_bytes <= result.plan.projected_peak_bytes
    classes = np.load(tmp_path / "full.npy")
    assert np.array_equal(np.load(paths[2]), classes) and np.array_equal(tifffile.imread(paths[0]), classes)
    assert np.array_equal(zarr.open_group(str(paths[1]), mode="r")["0"][:], classes)
    assert paths[3].read_text() == (tmp_path / "full.geojson").read_text()
    assert paths[3].with_suffix(".csv").read_text() == (tmp_path / "full.csv").read_text()


def test_a_journal_of_another_prediction_is_replaced(net: nn.Module, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    journal = interrupt(net, ArrayImage(pixels), tmp_path, 20)
    stored = journal.read_bytes()
    other = compiled("strided")
    with torch.no_grad():
        next(iter(other.parameters())).mul_(1.001)
    changed = pixels.copy()
    changed[190, 3] ^= 1
    calls: list[tuple[nn.Module, Any, dict[str, Any]]] = [
        (net, ArrayImage(changed), {}),
        (net, Normalized(ArrayImage(pixels), mean=[0.5] * 3, std=[0.2] * 3), {}),
        (net, ArrayImage(pixels), {"names": ["a", "b", "c"]}),
        (net, ArrayImage(pixels), {"dtype": "uint16"}),
        (other, ArrayImage(pixels), {}),
    ]
    for which, source, arguments in calls:
        journal.write_bytes(stored)
        assert sft.predict(which, source, tmp_path / "map.npy", resume=journal, **arguments).num_resumed_rows == 0
    journal.write_bytes(stored)
    assert sft.predict(net, ArrayImage(pixels.copy()), tmp_path / "map.npy", resume=journal).num_resumed_rows >= 20


def test_files_are_recognised_by_size_and_time(net: nn.Module, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", pixels)
    sources: list[Any] = [tmp_path / "image.npy", ArraySource(tmp_path / "image.npy"), open_image(tmp_path / "image.npy")]
    for source in sources:
        journal = interrupt(net, source, tmp_path, 20)
        assert sft.predict(net, source, tmp_path / "map.npy", resume=journal).num_resumed_rows >= 20
    journal = interrupt(net, tmp_path / "image.npy", tmp_path, 20)
    os.utime(tmp_path / "image.npy", (1, 1))
    assert sft.predict(net, tmp_path / "image.npy", tmp_path / "map.npy", resume=journal).num_resumed_rows == 0


@pytest.mark.parametrize(
    ("damage", "keeps"),
    [
        (lambda data: data[:-1], True),  # a process that was killed while it wrote
        (lambda data: data + b"\0" * 30, True),
        (lambda data: data[:-200] + bytes([data[-200] ^ 1]) + data[-199:], True),
        (lambda data: data[:10], False),
        (lambda data: b"", False),
        (lambda data: b"x" * len(data), False),
    ],
)
def test_damaged_records_are_dropped(
    damage: Callable[[bytes], bytes], keeps: bool, net: nn.Module, pixels: npt.NDArray[np.uint8], tmp_path: Path
) -> None:
    sft.predict(net, ArrayImage(pixels), tmp_path / "full.npy", kind="values")
    journal = interrupt(net, ArrayImage(pixels), tmp_path, 20, kind="values")
    journal.write_bytes(damage(journal.read_bytes()))
    resumed = sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", kind="values", resume=journal)
    assert (resumed.num_resumed_rows > 0) == keeps
    assert np.array_equal(np.load(tmp_path / "map.npy"), np.load(tmp_path / "full.npy"))


def test_a_complete_journal_needs_no_computation(net: nn.Module, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    """For a process that is killed while its files are completed, or moved."""
    journal = interrupt(net, ArrayImage(pixels), tmp_path, HEIGHT // 4)
    resumed = sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", resume=journal)
    assert resumed.num_resumed_rows == HEIGHT // 4 and (resumed.reading is None or resumed.reading.forward.num_rows_read == 0)
    sft.predict(net, ArrayImage(pixels), tmp_path / "full.npy")
    assert np.array_equal(np.load(tmp_path / "map.npy"), np.load(tmp_path / "full.npy"))


def test_the_journal_lies_next_to_the_first_file(net: nn.Module, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    with pytest.raises(sft.SourceError, match="no space left"):
        sft.predict(net, ArrayImage(pixels), [tmp_path / "map.npy", Ending(tmp_path / "b.npy", 20)], resume=True)
    (journal,) = tmp_path.iterdir()
    assert journal.name.startswith(".partial-") and journal.name.endswith(".rows")
    assert sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", resume=True).num_resumed_rows >= 20
    assert [path.name for path in tmp_path.iterdir()] == ["map.npy"]
    with pytest.raises(sft.InputError, match="float16"):  # nothing was computed, so no file remains
        sft.predict(net, ArrayImage(pixels), tmp_path / "map.ome.tif", kind="values", dtype="float16", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["map.npy"]


@pytest.mark.usefixtures("frozen_objects")
def test_one_process_at_a_time_and_sources_with_an_identity(net: nn.Module, pixels: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    journal = interrupt(net, ArrayImage(pixels), tmp_path, 20)
    with lock_file(journal, creates=False), pytest.raises(sft.SourceError, match="this process writes this prediction"):
        sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", resume=journal)
    assert sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", resume=journal).num_resumed_rows >= 20

    class Local(ArrayImage):
        """A class that another process cannot import."""

    with pytest.raises(sft.InputError, match=r"resume: .* cannot be recognised in another process"):
        sft.predict(net, Local(pixels), tmp_path / "map.npy", resume=journal)
    with pytest.raises(sft.InputError, match="is not a folder; make it first"):
        sft.predict(net, ArrayImage(pixels), tmp_path / "map.npy", resume=tmp_path / "missing" / "rows")


_KILLED = """
import sys, time
import numpy as np
import torch
from torch import nn
import sft
from sft.prediction import NpyWriter

class Slow(NpyWriter):
    def write(self, rows):
        super().write(rows)
        print("written", flush=True)
        time.sleep(60 if "slow" in sys.argv else 0)

torch.manual_seed(0)
net = sft.compile(nn.Conv2d(3, 2, 3, padding=1), (1, 3, None, None), budget="8MiB", options=sft.Options(tile=(16, None)))
x = torch.rand(1, 3, 128, 64, generator=torch.Generator().manual_seed(1))
result = sft.predict(net, x, [Slow("map.npy"), "map.geojson"], resume="rows")
sft.predict(net, x, "full.npy")
print(result.num_resumed_rows, np.array_equal(np.load("map.npy"), np.load("full.npy")))
"""


@pytest.mark.parametrize(
    ("name", "make"),
    [("map.npy", NpyWriter), ("map.ome.tif", OmeTiffWriter), ("map.zarr", OmeZarrWriter), ("map.geojson", PolygonWriter)],
)
def test_temporary_files_of_a_killed_call_are_removed_by_the_next(name: str, make: Callable[[Path], Any], tmp_path: Path) -> None:
    """Those of other owners and of other targets stay."""
    raster = PredictedRaster(height_px=40, width_px=30, num_channels=1, dtype=np.dtype(np.uint8), is_classes=True)
    rows = np.ones((1, 40, 30), np.uint8)

    def begun(name: str, owner: str | None) -> Any:
        writer = make(tmp_path / name)
        writer.mark_temporary_files(owner)
        writer.begin(raster)
        return writer

    others = [begun(name, "b"), begun(f"2{name}", "a"), begun(name, None)]
    other_files = set(tmp_path.glob(".partial-*"))
    killed = begun(name, "a")
    killed.write(rows)
    assert set(tmp_path.glob(".partial-*")) > other_files
    second = begun(name, "a")
    second.write(rows)
    second.finish()
    second.publish()
    assert (tmp_path / name).exists() and set(tmp_path.glob(".partial-*")) == other_files
    for other in (*others, killed):
        other.discard()
    assert not list(tmp_path.glob(".partial-*"))


@pytest.mark.slow
def test_a_killed_process_is_resumed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED]
    with subprocess.Popen([*command, "slow"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        process.kill()
    assert not (tmp_path / "map.npy").exists() and (tmp_path / "rows").exists()
    result = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    rows, is_equal = result.stdout.splitlines()[-1].split()
    assert int(rows) >= 14 and is_equal == "True" and not (tmp_path / "rows").exists()
    assert not list(tmp_path.glob(".partial-*")), "temporary files of the killed process"


@pytest.mark.parametrize("from_source", [False, True], ids=["tensor", "source"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_resumed_prediction_reserves_no_more_on_a_simulated_device(name: str, from_source: bool) -> None:
    """From any row, within the projection of the plan. The U-Net reserves 2 MiB more from its last rows than from the first."""
    model, shape = PredictionHead(NETWORKS[name]().eval(), "classes", None), (1, 3, 640, 300)
    with torch.no_grad():
        spec = InputSpec(shape=shape, dtype=torch.float32, from_source=from_source)
        signature = signature_of(ModuleSnapshot(model), [spec], (False,), torch.device("cpu"))
        settings = CompileSettings(
            budget_bytes=2**28, options=sft.Options(tile=(48, None)), destination=OutputDestination(on_host=True), proposes=False
        )
        specialized = capture_model(model, signature).specialize(signature.shapes)
        assert specialized is not None
        request = PlanningRequest(model=model, signature=signature, settings=settings)
        fitted = search(PlanSearch(request=request), build_problem(request, specialized))

    problem, allocator = fitted.problem, AllocatorSettings()
    projected = OverheadEstimator(device=None, allocator=allocator).with_overhead(problem, fitted.projected)
    projection, segments = projected.projection, projected.projection.segments
    projected_bytes = projection.peak_bytes + projection.overhead_bytes + problem.resources.resident_bytes
    full = record_step(problem, projected.region)
    num_rows = problem.sized.shapes[next(iter(problem.sized.graph.outputs))][2]
    traces = [record_step(problem, projected.region, num_known_rows=count) for count in range(1, num_rows, num_rows // 9)]
    assert len(traces[7].events) < 0.8 * len(full.events) or name == "skips", "strips are left out, of short images few"
    traces += [record_step(problem, projected.region, num_known_rows=count) for count in (num_rows - 1, num_rows)]
    for trace in (full, *traces):
        simulated = simulate_reserved_memory(trace, allocator, segments=segments, resident=resident_sizes(problem))
        assert simulated.reserved_bytes <= projected_bytes and trace.peak_bytes <= full.peak_bytes


def _reserved(result: PredictionResult) -> tuple[int, int]:
    """Reserved bytes of the device since its peak was reset, and the plan's projection."""
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved(), result.plan.projected_reserved_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_cuda_device(name: str, tmp_path: Path) -> None:
    """Full and resumed predictions have the values of eager PyTorch, and reserve no more than projected."""
    torch.cuda.empty_cache()
    torch.manual_seed(5)
    model = NETWORKS[name]().double()
    scene = numbers((1600, 700, 3), "uint8")
    expected = model(torch.from_numpy(scene).permute(2, 0, 1)[None].double() / 255).detach()
    reserved_before = torch.cuda.memory_reserved()
    net = sft.compile(model.cuda(), (1, 3, None, None), budget="400MiB", options=sft.Options(tile=(128, None)))
    source = ArraySource(scene, dtype=torch.float64)
    sft.predict(net, source, tmp_path / "first.npy", kind="values", dtype="float64")  # it plans
    torch.cuda.reset_peak_memory_stats()
    full = sft.predict(net, source, tmp_path / "full.npy", kind="values", dtype="float64")
    peak_bytes, projected_bytes = _reserved(full)
    assert peak_bytes - reserved_before <= projected_bytes
    values = torch.from_numpy(np.load(tmp_path / "full.npy")).reshape(expected.shape)
    assert relative_error(values, expected) <= 1e-12
    journal = interrupt(net, source, tmp_path, expected.shape[2] // 2, kind="values", dtype="float64")
    torch.cuda.reset_peak_memory_stats()
    resumed = sft.predict(net, source, tmp_path / "map.npy", kind="values", dtype="float64", resume=journal)
    assert resumed.num_resumed_rows >= expected.shape[2] // 2
    peak_bytes, projected_bytes = _reserved(resumed)
    assert peak_bytes - reserved_before <= projected_bytes
    again = torch.from_numpy(np.load(tmp_path / "map.npy")).reshape(expected.shape)
    assert relative_error(again, values) <= 1e-14
