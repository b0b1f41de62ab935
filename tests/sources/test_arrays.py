"""Arrays and images as sources: the exact bits for all layouts, and messages for wrong input."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sft
from sft import InputError, SourceError
from sft.common.interval import Interval
from sft.common.torch_internals import TorchDispatchMode
from sft.sources import ArraySource, Layout, Normalized, Source, load_tensor, select_samples
from sft.sources.host_arrays import axis_order
from sft.sources.image import Pixels

MEAN, STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS: list[Layout] = ["CHW", "HWC", "NCHW", "NHWC"]


class Picture:
    """An array as an image without tiles."""

    def __init__(self, pixels: Pixels) -> None:
        self.pixels = pixels
        self.height_px, self.width_px = pixels.shape[:2]

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        return self.pixels[y : y + h, x : x + w]


def destination(shape: tuple[int, ...], dtype: torch.dtype, memory_format: torch.memory_format = torch.channels_last) -> Tensor:
    """A tensor of numbers that must be overwritten."""
    return torch.full(shape, float("nan"), dtype=dtype).contiguous(memory_format=memory_format)


def random_pixels(shape: tuple[int, ...], seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def reference(nchw: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """The arithmetic of load_tensor, and its variant for floats, in torch on the full image."""
    unit = 255 if nchw.dtype is torch.uint8 else 1
    work = torch.promote_types(dtype, torch.float32)
    work = torch.promote_types(work, nchw.dtype) if nchw.dtype.is_floating_point else work
    shift, scale = (torch.tensor(values, dtype=work).mul(unit).view(-1, 1, 1) for values in (mean, std))
    return nchw.to(work).sub(shift).div(scale).to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Tensor, Layout, torch.dtype, Interval]:
    """An array (NumPy or torch), the same as NCHW, its layout, the result's type, and rows."""
    layout = draw(st.sampled_from(LAYOUTS))
    extents = {axis: draw(st.integers(1, most)) for axis, most in (("N", 3), ("C", 5), ("H", 17), ("W", 9))}
    if len(layout) == 3:
        extents["N"] = 1
    dtype = draw(st.sampled_from([torch.uint8, *FLOATS]))
    shape = tuple(extents[axis] for axis in layout)
    tensor = torch.from_numpy(random_pixels(shape, draw(st.integers(0, 9))))
    tensor = tensor if dtype is torch.uint8 else (tensor.double() / 50 - 2).to(dtype)
    nchw = (tensor if len(layout) == 4 else tensor[None]).permute(axis_order(layout, "NCHW"))
    array: Any = tensor
    if dtype is not torch.bfloat16:
        form = draw(st.sampled_from(["tensor", "array", "flipped", "swapped bytes"]))
        if form == "array":
            array = tensor.numpy()
        elif form == "flipped":
            array = tensor.numpy()[::-1, :, ::-1].copy()[::-1, :, ::-1]
        elif form == "swapped bytes":
            array = tensor.numpy().astype(tensor.numpy().dtype.newbyteorder())
    start = draw(st.integers(0, extents["H"]))
    return array, nchw, layout, draw(st.sampled_from(FLOATS)), Interval(start, draw(st.integers(start, extents["H"])))


@given(cases(), st.sampled_from([torch.channels_last, torch.contiguous_format]), st.sampled_from([1, 200, 2**23]))
def test_rows_of_every_layout_and_type(
    case: tuple[Any, Tensor, Layout, torch.dtype, Interval], memory_format: Any, group_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sft.sources.arrays._GROUP_BYTES", group_bytes)
        _check_rows(case, memory_format)


def _check_rows(case: tuple[Any, Tensor, Layout, torch.dtype, Interval], memory_format: Any) -> None:
    array, nchw, layout, dtype, rows = case
    channels = nchw.shape[1]
    mean, std = tuple(0.1 * c - 0.1 for c in range(channels)), tuple(0.3 + c for c in range(channels))
    source = ArraySource(array, layout=layout, mean=mean, std=std, dtype=dtype)
    assert isinstance(source, Source) and source.shape == tuple(nchw.shape) and source.dtype is dtype
    out = destination((*nchw.shape[:2], len(rows), nchw.shape[3]), dtype, memory_format)
    source.rows(rows, out)
    expected = reference(nchw, mean, std, dtype)
    assert torch.equal(out, expected[:, :, rows.start : rows.stop])
    last = Interval(nchw.shape[0] - 1, nchw.shape[0])
    last_sample = destination((1, *out.shape[1:]), dtype)
    select_samples(source, last).rows(rows, last_sample)
    assert torch.equal(last_sample, out[-1:])


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_same_bits_as_load_tensor(dtype: torch.dtype) -> None:
    values = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)  # every byte in every channel
    wide = np.concatenate([values, random_pixels((16, 7001, 3))], axis=1)  # several pieces
    expected = load_tensor(Picture(wide), mean=MEAN, std=STD, dtype=dtype)
    for source in (ArraySource(wide, mean=MEAN, std=STD, dtype=dtype), Normalized(Picture(wide), mean=MEAN, std=STD, dtype=dtype)):
        out = destination((1, 3, 16, 7017), dtype)
        source.rows(Interval(0, 16), out)
        assert torch.equal(out, expected)
        assert torch.equal(load_tensor(source, rows=5), expected)


def test_float64_pixels_are_rounded_once() -> None:
    pixels = torch.linspace(-3, 3, 3 * 8 * 9, dtype=torch.float64).view(3, 8, 9) + 1e6
    out = destination((1, 3, 8, 9), torch.float32)
    ArraySource(pixels, mean=(1e6, 1e6, 1e6), std=STD).rows(Interval(0, 8), out)
    assert torch.equal(out, reference(pixels[None], (1e6, 1e6, 1e6), STD, torch.float32))
    assert not torch.equal(out, reference(pixels[None].float(), (1e6, 1e6, 1e6), STD, torch.float32))


def test_without_mean_and_std() -> None:
    floats = torch.tensor([-0.0, float("inf"), 3.7, float("nan")]).view(1, 2, 2)
    out = destination((1, 1, 2, 2), torch.float32)
    ArraySource(floats).rows(Interval(0, 2), out)
    assert torch.equal(out.view(torch.int32).flatten(), floats.view(torch.int32).flatten())
    ArraySource(np.array([[[0, 51], [102, 255]]], np.uint8)).rows(Interval(0, 2), out)
    assert out.flatten().tolist() == pytest.approx([0, 0.2, 0.4, 1])


@pytest.mark.parametrize(
    ("array", "arguments", "message"),
    [
        ([[1.0]], {}, "list"),
        (np.zeros((4, 5)), {}, "2 axes"),
        (np.zeros((1, 1, 3, 4, 5)), {}, "5 axes"),
        (np.zeros((3, 4, 5)), {"layout": "NCHW"}, "3 axes"),
        (np.zeros((3, 4, 5)), {"layout": "WHC"}, "choose one of"),
        (np.zeros((3, 9, 3)), {}, "CHW or HWC"),
        (np.zeros((1, 3, 9, 4)), {}, "NCHW or NHWC"),
        (np.zeros((7, 8, 9)), {}, "CHW or HWC"),
        (np.zeros((3, 0, 5)), {}, "at least 1"),
        (np.zeros((0, 3, 5, 5)), {"layout": "NCHW"}, "at least 1"),
        (np.zeros((3, 5, 5), np.int32), {}, "int32"),
        (np.zeros((3, 5, 5), np.uint32), {}, "uint32"),
        (np.zeros((3, 5, 5), np.bool_), {}, "bool"),
        (np.zeros((3, 5, 5), np.complex128), {}, "complex128"),
        (np.zeros((3, 5, 5), object), {}, "object"),
        (np.zeros((3, 5, 5), [("r", "u1")]), {}, "supported are"),
        (torch.zeros(3, 5, 5, dtype=torch.int64), {}, "int64"),
        (np.ma.masked_array(np.zeros((3, 5, 5)), False), {}, "mask"),
        (torch.zeros(3, 5, 5, device="meta"), {}, "meta"),
        (torch.zeros(3, 5, 5).to_sparse(), {}, "sparse"),
        (torch.zeros(3, 5, 5, requires_grad=True), {}, "input_grad"),
        (np.zeros((3, 5, 5)), {"dtype": torch.uint8}, "fractions"),
        (np.zeros((3, 5, 5)), {"mean": (0, 0)}, "2 values for 3 channels"),
        (np.zeros((3, 5, 5)), {"mean": 0.5}, "expected 3 numbers"),
        (np.zeros((3, 5, 5)), {"mean": (0, float("nan"), 0)}, "nan"),
        (np.zeros((3, 5, 5)), {"mean": (0, float("inf"), 0)}, "inf"),
        (np.zeros((3, 5, 5)), {"mean": (0, 1e39, 0)}, r"1e\+39"),
        (np.zeros((3, 5, 5)), {"std": (1, 0, 1)}, "above 0"),
        (np.zeros((3, 5, 5)), {"std": (1, -1, 1)}, "above 0"),
        (np.zeros((3, 5, 5)), {"std": (1, float("nan"), 1)}, "above 0"),
        (np.zeros((3, 5, 5)), {"std": (1, 1e-50, 1)}, "above 0, as float32"),
        (np.zeros((3, 5, 5)), {"std": ("a", "b", "c")}, "expected 3 numbers"),
    ],
)
def test_wrong_arrays_are_refused(array: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ArraySource(array, **arguments)


def test_wrong_rows_are_refused_and_nothing_is_written() -> None:
    source = ArraySource(np.zeros((3, 6, 5), np.float32))
    for rows, out, message in [
        (Interval(-1, 2), destination((1, 3, 3, 5), torch.float32), "6 rows"),
        (Interval(4, 7), destination((1, 3, 3, 5), torch.float32), "6 rows"),
        (Interval(2, 4), destination((1, 3, 3, 5), torch.float32), r"shape \(1, 3, 2, 5\)"),
        (Interval(2, 4), torch.ones(3, 2, 5), r"shape \(1, 3, 2, 5\)"),
        (Interval(2, 4), torch.full((1, 3, 2, 5), 7), "int64"),
        (Interval(2, 4), torch.empty((1, 3, 2, 5), device="meta"), "meta"),
    ]:
        with pytest.raises(InputError, match=message):
            source.rows(rows, out)
        assert out.device.type == "meta" or not (out == 0).any()
    for batch in (Interval(0, 2), Interval(1, 1), Interval(-1, 1)):
        with pytest.raises(InputError, match="it has 1"):
            select_samples(source, batch)
        with pytest.raises(InputError, match="it has 1"):
            source.samples(batch)
    source.rows(Interval(9, 9), torch.empty(1, 3, 0, 5))  # missing rows have no condition


def test_a_source_that_cannot_be_split_is_refused() -> None:
    class Pair:
        shape = (2, 1, 4, 4)
        dtype = torch.float32

        def rows(self, interval: Interval, out: Tensor) -> None:
            out.zero_()

    pair = Pair()
    assert select_samples(pair, Interval(0, 2)) is pair
    with pytest.raises(InputError, match="samples"):
        select_samples(pair, Interval(0, 1))


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "scan.npy"
    np.save(path, random_pixels((300, 50, 3)))
    return path


def test_a_file_is_mapped(saved: Path) -> None:
    source = ArraySource(saved, mean=MEAN, std=STD)
    assert source.shape == (1, 3, 300, 50)
    out, again = destination((1, 3, 7, 50), torch.float32), destination((1, 3, 7, 50), torch.float32)
    source.rows(Interval(100, 107), out)
    assert torch.equal(out, reference(torch.from_numpy(np.load(saved)).permute(2, 0, 1)[None], MEAN, STD, torch.float32)[:, :, 100:107])
    content = pickle.dumps(source)
    assert len(content) < 2000, "the pixels were pickled"
    pickle.loads(content).rows(Interval(100, 107), again)
    assert torch.equal(out, again)


def test_damaged_files_are_named(saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    archive = tmp_path / "archive.npz"
    np.savez(archive, content)
    for damaged in (b"", b"no array", content[:40], content[:-1], b"\x93NUMPY\x09\x00" + content[8:], archive.read_bytes()):
        saved.write_bytes(damaged)
        with pytest.raises(SourceError, match=rf"scan\.npy \({len(damaged)} bytes\).*copy it"):
            ArraySource(saved)
    flipped = bytearray(content)
    flipped[12:20] = b"}}((\xff\x00'x"
    saved.write_bytes(flipped)
    with pytest.raises(SourceError, match=r"scan\.npy"):
        ArraySource(saved)
    np.save(saved, np.array([[["pickled", None]]], object), allow_pickle=True)
    with pytest.raises(SourceError, match=r"scan\.npy"):
        ArraySource(saved)
    with pytest.raises(SourceError, match=r"nowhere\.npy: there is no such file"):
        ArraySource(tmp_path / "nowhere.npy")
    with pytest.raises(SourceError, match="cannot map"):
        ArraySource(str(tmp_path))  # a folder


@pytest.mark.parametrize("by", ["path", "memmap", "view"])
def test_a_file_cut_short_while_open_raises_instead_of_killing(saved: Path, by: str) -> None:
    mapped = np.load(saved, mmap_mode="r")
    array: Any = {"path": saved, "memmap": mapped, "view": np.asarray(mapped)[20:]}[by]
    source = ArraySource(array)
    os.truncate(saved, 5000)
    with pytest.raises(SourceError, match=r"5000 bytes.*cut short"):
        source.rows(Interval(200, 210), torch.empty(1, 3, 10, 50))


def test_reading_a_large_file_allocates_one_strip(tmp_path: Path) -> None:
    path = tmp_path / "large.npy"
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(8192, 4096, 3)).flush()  # sparse: 96 MiB of holes
    source = ArraySource(path, mean=MEAN, std=STD)
    out = torch.empty((1, 3, 64, 4096), memory_format=torch.channels_last)
    with sft.measure_peak() as peak:
        source.rows(Interval(0, 64), out)  # makes the tables
    tracemalloc.start()
    try:
        for top in range(0, 8192, 1024):
            source.rows(Interval(top, top + 64), out)
        numpy_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak.num_bytes == 0 and numpy_bytes < 64 * 1024  # the strip itself has 3 MiB, and was allocated before


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the mappings of Linux")
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("rows", [Interval(0, 256), Interval(40, 200)])
def test_pages_of_tiles_are_released(layout: Layout, rows: Interval, tmp_path: Path) -> None:
    """Several tiles are read at once, and their pages do not remain in the process."""
    path, shape = tmp_path / "tiles.npy", [{"N": 128, "C": 3, "H": 256, "W": 256}[axis] for axis in layout]
    np.save(path, random_pixels(tuple(shape)))
    source = ArraySource(path, layout=layout, dtype=torch.bfloat16)
    out = torch.empty((128, 3, len(rows), 256), dtype=torch.uint8, memory_format=torch.channels_last)
    source.pixel_rows(rows, out)
    pixels = np.load(path, mmap_mode="r").transpose(axis_order(layout, "NCHW"))
    assert np.array_equal(out[-1].numpy(), pixels[-1, :, rows.start : rows.stop])
    del pixels
    assert _mapped_bytes(path) <= 2**22  # of 24 MiB


def _mapped_bytes(path: Path) -> int:
    """Resident bytes of a process's mappings of a file."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_file = line.endswith(str(path))
        elif is_file and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_that_are_the_pixels_keep_their_bits(dtype: torch.dtype) -> None:
    """Including payloads of NaNs, since they are copied as bytes."""
    bits = torch.from_numpy(random_pixels((2, 3, 5, 4 * dtype.itemsize))).view(dtype)
    source = ArraySource(bits if dtype is torch.bfloat16 else bits.numpy(), layout="NCHW", dtype=dtype)
    assert not source.normalizer.changes(dtype)
    out = destination(source.shape, dtype)
    source.rows(Interval(0, 5), out)
    assert torch.equal(out.contiguous().view(torch.uint8), bits.view(torch.uint8))


class _LargestOperand(TorchDispatchMode):
    """Recorder of the size of the largest operand of torch's operators, without views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.num_numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self.num_numbers = max([self.num_numbers, *(each.numel() for each in args if isinstance(each, Tensor))])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("pixel_type", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_starts_no_threads_in_a_reader(dtype: torch.dtype, pixel_type: torch.dtype, memory_format: torch.memory_format) -> None:
    """Its operators run in the calling thread up to 32,768 numbers; a row here has more."""
    array = torch.from_numpy(random_pixels((2, 3, 5, 12_000))).to(pixel_type)
    source = ArraySource(array if pixel_type is torch.bfloat16 else array.numpy(), layout="NCHW", mean=MEAN, std=STD, dtype=dtype)
    out, expected = (destination(source.shape, dtype, each) for each in (memory_format, torch.contiguous_format))
    with torch.no_grad(), _LargestOperand() as largest:
        source.rows(Interval(0, 5), out)
    assert largest.num_numbers <= 32_768
    for sample in range(2):
        select_samples(source, Interval(sample, sample + 1)).rows(Interval(0, 5), expected[sample : sample + 1])
    assert torch.equal(out, expected)


def test_few_channels_tell_the_axes() -> None:
    """An extent many times as large as another is no number of channels; otherwise the caller states the axis."""
    for shape, layout in (((5, 90, 80), "CHW"), ((90, 80, 2), "HWC"), ((2, 5, 90, 80), "NCHW"), ((1, 90, 80, 5), "NHWC")):
        assert ArraySource(np.zeros(shape, np.float32)).layout == layout
    with pytest.raises(InputError, match=r"may be CHW or HWC.*ArraySource\(array, layout='CHW'\)"):
        ArraySource(np.zeros((7, 90, 80), np.float32))


def test_files_of_other_formats_name_their_reader(tmp_path: Path) -> None:
    for head, text in (
        (b"\x89HDF\r\n\x1a\n", r"h5py\.File\(path\)\[name\]"),
        (b"PK\x03\x04", r"numpy\.load\(path\)\[name\]"),
        (b"II*", "open_image"),
    ):
        (tmp_path / "a").write_bytes(head + bytes(40))
        with pytest.raises(SourceError, match=text):
            ArraySource(tmp_path / "a")
