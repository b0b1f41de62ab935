"""Sparse GeoTIFFs: all readers give missing tiles the values of GDAL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

import sft
from sft.sources import Cropped, Raster, Slide, TiffImage, ZarrImage, open_image
from sft.sources.tiff import GeoTags, read_geo_tags
from sft.sources.views import RasterView
from sft.wsi.cli import main

_GEO_KEYS = (34735, "H", 4, (1, 1, 0, 0), True)


def _nodata(text: str) -> Any:
    return (42113, "s", 0, text, True)


def _sparse(path: Path, *tags: Any, channels: int = 3, **options: Any) -> Path:
    """A TIFF of 4 x 3 tiles of which every second one is not stored; a stored one has its number."""

    def tiles() -> Any:
        for number in range(12):
            yield None if number % 2 else np.full((16, 16, channels) if channels > 1 else (16, 16), number + 1, np.uint8)

    shape = (48, 64, channels) if channels > 1 else (48, 64)
    kind: dict[str, Any] = {"photometric": "rgb" if channels > 1 else "minisblack", "metadata": None, "extratags": tags}
    with tifffile.TiffWriter(path, **options) as writer:
        writer.write(tiles(), shape=shape, dtype=np.uint8, tile=(16, 16), compression="deflate", **kind)
    return path


_READERS: dict[str, Callable[[Path], Raster]] = {
    "auto": open_image,
    "tiff": lambda path: open_image(path, reader="tiff"),
    "openslide": lambda path: open_image(path, reader="openslide"),
    "fill": lambda path: open_image(path, on_error="fill"),
    "direct": TiffImage,
    "slide": Slide,
}


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize(
    ("tags", "value", "nodata"),
    [
        ((_GEO_KEYS, _nodata("0")), 0, 0.0),
        ((_GEO_KEYS, _nodata("255")), 255, 255.0),
        ((_GEO_KEYS, _nodata("7")), 7, 7.0),
        ((_nodata("42 "),), 42, 42.0),
        ((_GEO_KEYS, _nodata("-9999")), 0, -9999.0),
        ((_GEO_KEYS, _nodata("1e9")), 255, 1e9),
        ((_GEO_KEYS,), 0, None),
        ((), 255, None),  # a scanner's glass
    ],
)
def test_missing_tiles_xarray_spatial_1036_deck_gl_raster_168(
    reader: str, tags: Any, value: int, nodata: float | None, tmp_path: Path
) -> None:
    """makepath/xarray-spatial#1036, developmentseed/deck.gl-raster#168, cog-best-practices#8."""
    image = _READERS[reader](_sparse(tmp_path / "a.tif", *tags))
    pixels = image.read(0, 0, 64, 48)
    assert (pixels[:16, 16:32] == value).all() and (pixels[:16, 32:48] == 3).all()
    assert image.background == (value,) * 3 and RasterView(image).nodata == nodata


@pytest.mark.parametrize("options", [{"bigtiff": True}, {"byteorder": ">"}, {"bigtiff": True, "byteorder": ">"}])
@pytest.mark.parametrize("text", ["9", "123.0000000000", "nan"])
def test_tags_of_every_kind_of_tiff(options: Any, text: str, tmp_path: Path) -> None:
    path = _sparse(tmp_path / "a.tif", _GEO_KEYS, _nodata(text), channels=1, **options)
    tags = read_geo_tags(path)
    assert tags.is_geo and (tags.nodata == float(text) or text == "nan")
    value = 0 if text == "nan" else int(float(text))
    for image in (TiffImage(path), open_image(path, reader="tiff")):
        assert image.background == (value,) and (image.read(16, 0, 16, 16) == value).all()
    if options != {"byteorder": ">"}:  # OpenSlide reads no such file
        assert (Slide(path).read(16, 0, 16, 16) == value).all()


def test_other_files_have_no_tags(tmp_path: Path) -> None:
    for content in (b"", b"II", b"II*\0", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff", b"PK\3\4", b"MM\0+" + bytes(40)):
        (tmp_path / "x").write_bytes(content)
        assert read_geo_tags(tmp_path / "x") == GeoTags()
    assert read_geo_tags(tmp_path / "nowhere") == GeoTags()
    assert read_geo_tags(_sparse(tmp_path / "a.tif", _nodata("none"))) == GeoTags()


def test_wrappers_pass_nodata_on(tmp_path: Path) -> None:
    path = _sparse(tmp_path / "a.tif", _GEO_KEYS, _nodata("7"))
    image = Cropped(open_image(path, slide_mpp=1.0, mpp=2.0), x=0, y=0, w=16, h=8)
    assert image.nodata == 7.0 and image.background == (7, 7, 7)


def test_slide_info_has_nodata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(_sparse(tmp_path / f"{text}.tif", _GEO_KEYS, _nodata(text))) for text in ("7", "nan")]
    assert main(["slide-info", *paths, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["nodata"], first["background"]) == (7.0, [7, 7, 7]) and (second["nodata"], second["background"]) == ("nan", [0, 0, 0])


def test_an_internal_mask_is_named_cog_best_practices_8(tmp_path: Path) -> None:
    path = tmp_path / "masked.tif"
    options: Any = {"tile": (16, 16), "metadata": None, "compression": "deflate"}
    with tifffile.TiffWriter(path) as writer:
        writer.write(np.zeros((48, 64, 3), np.uint8), photometric="rgb", extratags=(_GEO_KEYS,), **options)
        writer.write(np.ones((48, 64), np.bool_), photometric=4, subfiletype=4, tile=(16, 16), metadata=None)
    with pytest.raises(sft.SourceError, match=r"an internal mask of valid pixels \(64 x 48 px\).*-mask none"):
        open_image(path)


@pytest.mark.parametrize("value", [0, 7, 255])
def test_missing_chunks_of_zarr_are_the_background(value: int, tmp_path: Path) -> None:
    array = zarr.create_array(str(tmp_path / "a.zarr"), shape=(32, 32, 3), chunks=(16, 16, 3), dtype="uint8", fill_value=value)
    array[:16, :16] = 9
    image = ZarrImage(tmp_path / "a.zarr", layout="HWC")
    assert (image.read(16, 0, 16, 16) == value).all() and image.background == (value,) * 3
