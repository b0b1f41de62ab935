"""TIFFs beyond RGB slides: element types, channels, planes, strips, series and stacks, compared with tifffile."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sft import BudgetError, InputError, SourceError
from sft.sources import ChannelStack, Normalized, ReadCostWarning, Slide, TiffImage, load_tensor, open_image
from sft.sources.views import RasterView
from tests.sources.test_pixel_types import numbers, rows_of

tifffile = pytest.importorskip("tifffile")
pytest.importorskip("imagecodecs")

TYPES = ["uint8", "uint16", "int16", "float32"]
#: Layouts of a file: options of tifffile by the axes of its array.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiles": ("HWC", {"tile": (32, 48), "planarconfig": "contig"}),
    "tiles, planes": ("CHW", {"tile": (32, 48), "planarconfig": "separate"}),
    "strips": ("HWC", {"rowsperstrip": 7, "planarconfig": "contig"}),
    "strips, planes": ("CHW", {"rowsperstrip": 16, "planarconfig": "separate"}),
    "one strip": ("HWC", {"rowsperstrip": 1000, "planarconfig": "contig"}),
}


def write(path: Path, pixels: Any, layout: str = "tiles", **options: Any) -> Path:
    axes, settings = LAYOUTS[layout]
    array = pixels if axes == "HWC" else np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if pixels.shape[2] == 1:
        array, settings = pixels[..., 0], {key: value for key, value in settings.items() if key != "planarconfig"}
    tifffile.imwrite(path, array, metadata=None, photometric="minisblack", **{**settings, **options})
    return path


@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_layout_and_type(dtype: str, layout: str, channels: int, compression: Any, tmp_path: Path) -> None:
    pixels = numbers((70, 100, channels), dtype)
    path = write(tmp_path / "a.tif", pixels, layout, compression=compression, byteorder=">" if channels == 5 else "<")
    image = open_image(path, num_threads=2)
    assert isinstance(image, TiffImage) and image.dtype == dtype and image.num_channels == channels
    assert np.array_equal(image.read(0, 0, 100, 70), pixels)
    rectangle_pixels = image.read(13, 20, 61, 33)
    assert rectangle_pixels.dtype.isnative and np.array_equal(rectangle_pixels, pixels[20:53, 13:74])
    copy = pickle.loads(pickle.dumps(image))
    assert np.array_equal(copy.read(5, 64, 20, 6), pixels[64:, 5:25])
    rows = rows_of(Normalized(image), 10, 40)
    assert rows.shape == (1, channels, 30, 100)


@settings(max_examples=15)
@given(st.integers(1, 60), st.integers(1, 40), st.booleans(), st.data())
def test_uncompressed_strips_are_divided_anywhere(height: int, strip: int, planes: bool, data: st.DataObject) -> None:
    import tempfile

    from sft.sources.tiff import segments

    pixels = numbers((height, 5, 3), "uint16")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_STRIP_BYTES", data.draw(st.integers(1, 200)))
        layout = "strips, planes" if planes else "strips"
        image = TiffImage(write(Path(folder) / "a.tif", pixels, layout, rowsperstrip=strip))
        y = data.draw(st.integers(0, height - 1))
        h = data.draw(st.integers(1, height - y))
        assert np.array_equal(image.read(0, y, 5, h), pixels[y : y + h])
        assert image.facts.tiles_px[0] is not None and image.facts.tiles_px[0][1] <= strip


def test_channels_series_and_stacks_of_ome_tiff_nimbus_51(tmp_path: Path) -> None:
    """Nimbus-Inference#51, cellpose#933: 16 bits and tens of channels."""
    first, second = numbers((2, 35, 70, 100), "uint16"), numbers((50, 64), "float32")
    path = tmp_path / "panel.ome.tif"
    names = [f"marker {number}" for number in range(35)]
    with tifffile.TiffWriter(path, ome=True) as writer:
        options: dict[str, Any] = {"tile": (32, 32), "photometric": "minisblack", "compression": "deflate"}
        sizes = {"PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm"}
        metadata = {"axes": "ZCYX", "Channel": {"Name": names}, **sizes}
        writer.write(first, subifds=1, metadata=metadata, **options)
        writer.write(np.ascontiguousarray(first[..., ::2, ::2]), subfiletype=1, **options)
        writer.write(second, metadata={"axes": "YX", "PhysicalSizeX": 2, "PhysicalSizeY": 2}, **options)
    image = open_image(path, at={"z": 1})
    assert image.num_channels == 35 and RasterView(image).channel_names == tuple(names)
    assert image.level_dimensions == ((100, 70), (50, 35)) and image.mpp == pytest.approx((0.5, 0.5))
    assert np.array_equal(image.read(3, 4, 90, 60), first[1, :, 4:64, 3:93].transpose(1, 2, 0))
    assert np.array_equal(image.read(0, 0, 50, 35, 1), first[1, :, ::2, ::2].transpose(1, 2, 0))
    other = open_image(path, series=1)
    assert other.mpp == pytest.approx((2, 2)) and np.array_equal(other.read(0, 0, 64, 50)[..., 0], second)
    with pytest.raises(InputError, match="it has series 0 to 1"):
        open_image(path, series=2)
    with pytest.raises(InputError, match="axis 'z' has 2 entries"):
        open_image(path)


def test_a_stack_of_imagej(tmp_path: Path) -> None:
    planes = numbers((3, 40, 50), "uint16")
    tifffile.imwrite(tmp_path / "a.tif", planes, imagej=True, metadata={"axes": "CYX"})
    assert np.array_equal(open_image(tmp_path / "a.tif").read(0, 0, 50, 40), planes.transpose(1, 2, 0))


def test_pages_without_a_description(tmp_path: Path) -> None:
    planes = numbers((3, 40, 50), "uint16")
    tifffile.imwrite(tmp_path / "a.tif", planes, metadata=None, photometric="minisblack", tile=(16, 16))
    with pytest.raises(SourceError, match=r"3 images of 50 x 40 px, of which one is read\. Choose one with at=\{'page': 0\}"):
        open_image(tmp_path / "a.tif")
    assert np.array_equal(open_image(tmp_path / "a.tif", at={"page": 2}).read(0, 0, 50, 40)[..., 0], planes[2])
    stack = ChannelStack([open_image(tmp_path / "a.tif", at={"page": page}) for page in range(3)])
    assert np.array_equal(stack.read(0, 0, 50, 40), planes.transpose(1, 2, 0))
    assert torch.equal(load_tensor(stack), torch.from_numpy(planes / np.float32(65535))[None])
    with pytest.raises(InputError, match="3 channels"):
        Normalized(stack, mean=(0.5, 0.5), std=(1.0, 1.0))
    with pytest.raises(InputError, match="it has one image and no further axis"):
        open_image(write(tmp_path / "b.tif", numbers((40, 50, 1), "uint16")), at={"z": 0})
    with pytest.raises(InputError, match="it describes no series"):
        open_image(tmp_path / "b.tif", series=3)


def test_levels_of_16_bits(tmp_path: Path) -> None:
    pixels = numbers((128, 96, 4), "uint16")
    options: dict[str, Any] = {"tile": (32, 32), "photometric": "minisblack", "metadata": None, "planarconfig": "contig"}
    with tifffile.TiffWriter(tmp_path / "a.tif") as writer:
        writer.write(pixels, **options)
        writer.write(pixels[::2, ::2], subfiletype=1, **options)
    image = open_image(tmp_path / "a.tif", slide_mpp=0.5, mpp=1.0)
    assert (image.width_px, image.height_px) == (48, 64) and np.array_equal(image.read(0, 0, 48, 64), pixels[::2, ::2])


def test_costly_strips_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """openslide/openslide#656, openslide-python#153: striped files."""
    monkeypatch.setattr("sft.sources.open.COSTLY_BYTES", 10_000)
    monkeypatch.setattr("sft.sources.tiff.reader.COSTLY_BYTES", 10_000)
    pixels = numbers((70, 100, 3), "uint8")
    path = write(tmp_path / "a.tif", pixels, "one strip", compression="deflate")
    with pytest.warns(ReadCostWarning, match=r"compressed strips of 100 x 70 px are decoded completely, into 20.51 KiB each"):
        image = open_image(path)
    assert np.array_equal(image.read(0, 5, 100, 5), pixels[5:10])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(open_image(write(tmp_path / "b.tif", pixels, "one strip")).read(0, 5, 100, 5), pixels[5:10])
    with pytest.raises(BudgetError, match=r"a strip is decoded at once, into 20.51 KiB; the host budget is 10.00 KiB"):
        open_image(path, host_budget_bytes="10KiB")


def _write_sparse(path: Path, value: float, dtype: str, channels: int) -> None:
    """A row of two tiles, of which the first is stored."""

    def tiles() -> Any:
        yield np.full((16, 16, channels), value, dtype)
        yield None

    options: dict[str, Any] = {"compression": "deflate", "metadata": None, "photometric": "rgb", "tile": (16, 16)}
    tifffile.imwrite(path, tiles(), shape=(16, 32, channels), dtype=dtype, **options)


@pytest.mark.parametrize(("dtype", "value"), [("uint16", 0), ("float32", 0), ("uint8", 255)])
def test_missing_tiles_of_every_type(dtype: str, value: float, tmp_path: Path) -> None:
    _write_sparse(tmp_path / "a.tif", 3, dtype, 3)
    image = TiffImage(tmp_path / "a.tif")
    assert image.background == (value,) * 3 and (image.read(16, 0, 16, 16) == value).all() and (image.read(0, 0, 16, 16) == 3).all()


def test_openslide_never_reads_files_that_it_would_convert(tmp_path: Path) -> None:
    """A sparse TIFF of 16 bits: OpenSlide opens it, with half of the bits."""
    _write_sparse(tmp_path / "a.tif", 3000, "uint16", 3)
    image = open_image(tmp_path / "a.tif")
    assert not isinstance(image, Slide) and (image.read(0, 0, 16, 16) == 3000).all()
