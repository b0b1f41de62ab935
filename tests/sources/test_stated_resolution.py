"""Stated resolutions of files: those of slides, defaults of programs, and invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

import sft
from sft.sources import Raster, Slide, TiffImage, open_image
from sft.sources.views import RasterView
from sft.wsi.cli import main
from sft.wsi.data.slides import open_slide

_PIXELS = np.zeros((64, 96, 3), np.uint8)


def _file(path: Path, resolution: Any = None, unit: str | None = "INCH", **options: Any) -> Path:
    stated = {} if resolution is None else {"resolution": resolution, "resolutionunit": unit}
    settings: dict[str, Any] = {"tile": (32, 32), "photometric": "rgb", "metadata": None, **stated, **options}
    tifffile.imwrite(path, _PIXELS, **settings)
    return path


def _images(path: Path) -> list[Raster]:
    return [open_image(path), TiffImage(path), Slide(path), open_image(path, on_error="fill")]


@pytest.mark.parametrize(
    ("resolution", "unit", "words"),
    [
        ((72, 72), "INCH", "352.778 µm/px (72 dpi)"),
        ((96, 96), "INCH", "264.583 µm/px (96 dpi)"),
        ((300, 300), "INCH", "84.6667 µm/px (300 dpi)"),
        ((1, 1), "INCH", "25400 µm/px (1 dpi)"),
        ((28, 28), "CENTIMETER", "357.143 µm/px"),
        ((50_800, 72), "INCH", "0.5 x 352.778 µm/px (72 dpi)"),
        ((1200, 1200), "INCH", "21.1667 µm/px (1200 dpi)"),
    ],
)
def test_a_default_of_a_program_is_no_resolution(resolution: Any, unit: str, words: str, tmp_path: Path) -> None:
    path = _file(tmp_path / "a.tif", resolution, unit)
    for image in _images(path):
        assert image.mpp is None and words in RasterView(image).mpp_note
    with pytest.raises(sft.InputError, match=r"slide_mpp=0\.25") as caught:
        open_image(path, mpp=0.5)
    assert f"the file states {words}" in str(caught.value)
    with pytest.raises(sft.InputError, match=r"the file has no resolution .*column mpp") as caught:
        open_slide(path, mpp=0.5)
    assert words in str(caught.value)
    # Any value of the caller is used.
    assert open_image(path, slide_mpp=0.25, mpp=0.5).width_px == 48
    assert open_image(path, slide_mpp=352.0).mpp == (352.0, 352.0)


@pytest.mark.parametrize(("resolution", "unit"), [(None, None), ((72, 72), "NONE"), ((0, 0), "INCH"), ((20_000, 0), "CENTIMETER")])
def test_a_resolution_without_a_unit_or_a_number_is_none(resolution: Any, unit: str | None, tmp_path: Path) -> None:
    path = _file(tmp_path / "a.tif", resolution, unit)
    for image in _images(path)[:2]:
        assert image.mpp is None and RasterView(image).mpp_note == ""
    assert Slide(path).mpp is None
    with pytest.raises(sft.InputError, match="does not say its resolution"):
        open_image(path, mpp=0.5)


@pytest.mark.parametrize("fraction", [(1, 0), (0, 1), (0, 0)])
def test_an_infinite_resolution_is_none(fraction: tuple[int, int], tmp_path: Path) -> None:
    path = _file(tmp_path / "a.tif", (20_000, 20_000), "CENTIMETER")
    with tifffile.TiffFile(path, mode="r+") as file:
        page: Any = file.pages[0]
        page.tags[282].overwrite(fraction)
    assert [image.mpp for image in _images(path)] == [None] * 4


@pytest.mark.parametrize(
    ("resolution", "unit", "mpp"),
    [
        ((20_000, 20_000), "CENTIMETER", (0.5, 0.5)),
        ((101_600, 50_800), "INCH", (0.25, 0.5)),
        ((2540, 2540), "INCH", (10.0, 10.0)),
        ((500, 500), "CENTIMETER", (20.0, 20.0)),
    ],
)
def test_resolutions_of_slides_are_believed(resolution: Any, unit: str, mpp: Any, tmp_path: Path) -> None:
    for image in _images(_file(tmp_path / "a.tif", resolution, unit)):
        assert image.mpp == pytest.approx(mpp) and RasterView(image).mpp_note == ""


def test_a_vendor_may_be_wrong_too(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.svs", description="Aperio Image Library v1\n96x64 |AppMag = 20|MPP = 352.78")
    for image in (TiffImage(path), Slide(path)):
        assert image.mpp is None and "352.78 µm/px" in RasterView(image).mpp_note


def test_sizes_that_ome_states_are_believed(tmp_path: Path) -> None:
    metadata = {"axes": "YXS", "PhysicalSizeX": 0.05, "PhysicalSizeXUnit": "mm", "PhysicalSizeY": 0.05, "PhysicalSizeYUnit": "mm"}
    tifffile.imwrite(tmp_path / "a.ome.tif", _PIXELS, tile=(32, 32), photometric="rgb", metadata=metadata)
    assert TiffImage(tmp_path / "a.ome.tif").mpp == pytest.approx((50.0, 50.0))


def test_slide_info_has_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slide-info", str(_file(tmp_path / "a.tif", (72, 72)))]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "resolution unknown (the file states 352.778 µm/px (72 dpi)" in told and "column mpp" in told
