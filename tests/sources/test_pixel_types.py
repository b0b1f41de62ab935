"""Element types and channels of images: exact through every view, normalised by the range of the type, by numbers or by percentiles."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sft
from sft import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import ArrayImage, ArraySource, Cached, Cropped, Image, Normalized, Resampled, Tolerant, percentile_range
from sft.sources.image import pixel_dtype
from sft.tissue import Masked, Regions, find_tissue
from sft.wsi.data.transforms import Turned

TYPES = ["uint8", "uint16", "int16", "float32", "float64", ">u2", ">i2", ">f4"]
_UNITS = {"uint8": 255, "uint16": 65535, "int16": 32767}


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Values over the whole range of a type."""
    random = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return random.normal(size=shape).astype(kind)
    limits = np.iinfo(kind)
    return random.integers(limits.min, limits.max, shape, endpoint=True).astype(kind)


def rows_of(source: Any, start: int = 0, stop: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n, c, h, w = source.shape
    out = torch.full((n, c, (stop or h) - start, w), float("nan"), dtype=dtype)
    source.rows(Interval(start, stop or h), out)
    return out


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_every_type(dtype: str, channels: int) -> None:
    pixels = numbers((9, 7, channels), dtype)
    unit = _UNITS.get(np.dtype(dtype).name, 1)
    expected = torch.from_numpy(pixels.astype(np.float64) / unit).permute(2, 0, 1)[None]
    sources: list[Any] = [
        ArraySource(pixels, layout="HWC"),
        Normalized(ArrayImage(pixels, layout="HWC")),
        ArraySource(np.ascontiguousarray(pixels.transpose(2, 0, 1)), layout="CHW"),
    ]
    for source in sources:
        assert source.shape == (1, channels, 9, 7)
        torch.testing.assert_close(rows_of(source, 2, 8).double(), expected[:, :, 2:8], rtol=1e-6, atol=1e-7)
        copy = pickle.loads(pickle.dumps(source))
        assert torch.equal(rows_of(copy), rows_of(source))
    mean, std = tuple(0.1 * c for c in range(channels)), tuple(1.0 + c for c in range(channels))
    scaled = rows_of(ArraySource(pixels, layout="HWC", mean=mean, std=std)).double()
    exact = (expected - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    torch.testing.assert_close(scaled, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_value_ranges_of_each_channel(dtype: str) -> None:
    pixels = numbers((6, 5, 2), dtype)
    ranges = [(0.0, 50.0), (-1.0, 3.0)]
    expected = torch.from_numpy((pixels.astype(np.float64) - [0, -1]) / [50, 4]).permute(2, 0, 1)[None]
    for make in (lambda **kw: ArraySource(pixels, layout="HWC", **kw), lambda **kw: Normalized(ArrayImage(pixels, layout="HWC"), **kw)):
        source = make(value_range=ranges)
        torch.testing.assert_close(rows_of(source).double(), expected, rtol=1e-5, atol=1e-6)
        clipped = make(value_range=ranges, clip=True, mean=(0.5, 0.5), std=(0.5, 0.5))
        torch.testing.assert_close(rows_of(clipped).double(), expected.clip(0, 1) * 2 - 1, rtol=1e-5, atol=1e-6)
        assert torch.equal(rows_of(pickle.loads(pickle.dumps(clipped))), rows_of(clipped))


@pytest.mark.parametrize("wrong", [(1, 1), (3, 2), (0, float("nan")), [(0, 1)], [(0, 1, 2), (0, 1, 2)], "minmax", 5, [(0, 1), (2, 2)]])
def test_ranges_that_are_none(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"value_range=.*low < high"):
        ArraySource(np.zeros((4, 4, 2), np.uint16), layout="HWC", value_range=wrong)


def test_floats_have_no_range_to_clip_to() -> None:
    with pytest.raises(InputError, match="the type has no range"):
        ArraySource(np.zeros((4, 4, 2), np.float32), layout="HWC", clip=True)


def test_percentiles_are_those_of_numpy_without_nodata_and_nan() -> None:
    pixels = numbers((90, 70, 2), "float32")
    pixels[3, 5, 0] = np.nan
    expected = [tuple(np.nanpercentile(pixels[..., c], (2, 98))) for c in range(2)]
    assert np.allclose(percentile_range(ArrayImage(pixels, layout="HWC"), 2, 98), expected)
    counts = numbers((90, 70, 1), "uint16")
    counts[:40] = 7

    class WithNodata(Cached):
        @property
        def nodata(self) -> float | None:
            return 7.0

    image = WithNodata(ArrayImage(counts), host_budget_bytes=64)
    assert percentile_range(image, 0, 100) == ((float(counts[40:].min()), float(counts[40:].max())),)
    with pytest.raises(InputError, match="both are 3"):
        percentile_range(ArrayImage(np.full((4, 4), 3, np.uint16)))
    with pytest.raises(InputError, match="none has data"):
        percentile_range(ArrayImage(np.full((4, 4), np.nan, np.float32)))
    with pytest.raises(InputError, match="0 <= low < high <= 100"):
        percentile_range(image, 99, 1)


def test_percentiles_of_a_large_image_are_those_of_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.sources.value_range._MAX_PIXELS", 64 * 100)
    pixels = np.repeat(np.arange(1000, dtype=np.uint16), 100).reshape(1000, 100)
    (low, high) = percentile_range(ArrayImage(pixels), 0, 100)[0]
    assert low == 0 and high == 63, "blocks of rows at equal distances: one of 64 rows fits"
    monkeypatch.setattr("sft.sources.value_range._MAX_PIXELS", 64 * 200)
    assert percentile_range(ArrayImage(pixels), 0, 100)[0] == (0, 999)


_VIEWS: dict[str, Callable[[Image], Image]] = {
    "crop": lambda image: Cropped(image, x=1, y=2, w=5, h=6),
    "cache": lambda image: Cached(image, host_budget_bytes=1 << 20),
    "fill": lambda image: Tolerant(image, "fill"),
    "turn": lambda image: Turned(image, quarters=2),
    "mask": lambda image: Masked(image, Regions([[[(0, 0), (9, 0), (9, 9), (0, 9)]]])),
}


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
@pytest.mark.parametrize("view", _VIEWS)
def test_views_keep_types_and_values(view: str, dtype: str) -> None:
    pixels = numbers((9, 8, 4), dtype)
    expected = {"crop": pixels[2:8, 1:6], "turn": pixels[::-1, ::-1]}.get(view, pixels)
    image = _VIEWS[view](ArrayImage(pixels, layout="HWC"))
    read = image.read(0, 0, image.width_px, image.height_px)
    assert read.dtype == dtype == pixel_dtype(image) and np.array_equal(read, expected)


def test_a_mask_paints_values_of_the_type() -> None:
    image = ArrayImage(numbers((4, 4), "int16"))
    outside = Masked(image, Regions([]), background=(-9999,))
    assert (outside.read(0, 0, 4, 4) == -9999).all() and outside.dtype == np.int16
    with pytest.raises(InputError, match="numbers of -32768 to 32767"):
        Masked(image, Regions([]), background=(40_000,))


@pytest.mark.parametrize("scale", [Fraction(2), Fraction(3, 2), Fraction(7, 3)])
@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_reduced_by_area(dtype: str, scale: Fraction) -> None:
    pixels = numbers((21, 14, 2), dtype)
    image = Resampled(ArrayImage(pixels, layout="HWC"), scale, scale)
    edges = [[float(n * scale), float((n + 1) * scale)] for n in range(image.height_px)]
    weights = np.array([[max(0.0, min(high, k + 1) - max(low, k)) for k in range(21)] for low, high in edges]) / float(scale)
    columns = weights[: image.width_px, :14]
    exact = np.einsum("ij,jkc,lk->ilc", weights, pixels.astype(np.float64), columns)
    full = image.read(0, 0, image.width_px, image.height_px)
    tolerance = 1e-5 if dtype == "float32" else 0.5001
    assert full.dtype == dtype and np.abs(full - exact).max() <= tolerance
    for y in range(image.height_px):
        for x in range(image.width_px):
            assert np.array_equal(image.read(x, y, 1, 1)[0, 0], full[y, x]), "any rectangle has the same bits"


class _Sliced:
    """An array that counts the read rows of chunks."""

    def __init__(self, array: Any, rows: int) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.chunks = (rows, *array.shape[1:])
        self.reads: list[tuple[int, int]] = []
        self.fails = False

    def __getitem__(self, index: Any) -> Any:
        if self.fails:
            raise OSError("the bucket is gone")
        self.reads.append((index[0].start, index[0].stop))
        return self.array[index]


def test_chunked_arrays_read_each_chunk_once_a_sweep() -> None:
    pixels = numbers((300, 6, 3), "uint16")
    array = _Sliced(pixels, 64)
    source = ArraySource(array, layout="HWC")  # type: ignore[arg-type]
    strips = [rows_of(source, top, min(top + 20, 300)) for top in range(0, 300, 20)]
    assert torch.equal(torch.cat(strips, dim=2), rows_of(ArraySource(pixels, layout="HWC")))
    assert array.reads == [(top, min(top + 64, 300)) for top in range(0, 300, 64)]
    array.fails = True
    with pytest.raises(SourceError, match=r"rows \[0, 64\) of _Sliced of shape \(300, 6, 3\): OSError: the bucket is gone"):
        rows_of(source, 0, 20)


@pytest.mark.parametrize("kind", ["zarr", "dask"])
def test_arrays_of_zarr_and_dask_are_inputs_of_a_network(kind: str, tmp_path: Path) -> None:
    pixels = numbers((2, 4, 70, 40), "uint16")
    if kind == "zarr":
        zarr = pytest.importorskip("zarr")
        array = zarr.create_array(str(tmp_path / "a.zarr"), data=pixels, chunks=(1, 2, 16, 16))
    else:
        array = pytest.importorskip("dask.array").from_array(pixels, chunks=(1, 4, 32, 40))
    model = nn.Sequential(nn.Conv2d(4, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    expected = model(torch.from_numpy(pixels.astype(np.float32)) / 65535)
    source = ArraySource(array, layout="NCHW", mean=(0,) * 4)
    assert torch.equal(rows_of(pickle.loads(pickle.dumps(source))), rows_of(ArraySource(pixels, layout="NCHW")))
    net = sft.compile(model, source, budget="1GiB")
    torch.testing.assert_close(net(source), expected, rtol=1e-5, atol=1e-6)


def test_compile_accepts_a_zarr_array(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    pixels = numbers((3, 40, 30), "uint16")
    array = zarr.create_array(str(tmp_path / "a.zarr"), data=pixels, chunks=(3, 16, 16))
    model = nn.Conv2d(3, 2, 3)
    net = sft.compile(model, array, budget="1GiB")
    torch.testing.assert_close(net(array), model(torch.from_numpy(pixels.astype(np.float32))[None] / 65535), rtol=1e-5, atol=1e-6)


def test_tissue_is_detected_on_colours_of_uint8() -> None:
    with pytest.raises(InputError, match=r"of uint16: its colour is compared"):
        find_tissue(ArrayImage(numbers((64, 64, 3), "uint16"), layout="HWC"))


@pytest.mark.parametrize("dtype", ["uint32", "int64", "bool", "complex64"])
def test_types_that_are_no_pixels(dtype: str) -> None:
    pixels: Any = np.zeros((4, 4, 3), dtype)
    for make in (ArrayImage, ArraySource):
        with pytest.raises(InputError, match=rf"{dtype}.*uint8, uint16, int16, float16, float32, float64"):
            make(pixels)
