"""Files and arguments that are no slides: each is named, with what to do instead."""

from __future__ import annotations

import logging
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

import sft
from sft.common.free_memory import FreeMemory
from sft.sources import ArrayImage, ArraySource, Cropped, LabelSource, NiftiVolume, Slide, TiffImage, ZarrImage, open_image
from sft.tissue import Masked, TissueMask, read_geojson, write_geojson
from sft.tissue.mask import open_picture
from sft.wsi.data.table import read_table
from sft.wsi.data.tissue import read_mask
from tests.helpers.slides import SLIDE, tissue_like, write_slide

_PIXELS = np.zeros((20, 30, 3), np.uint8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.png", "a PNG picture. Convert it to a tiled TIFF"),
        ("a.jpg", "a JPEG picture. Convert it to a tiled TIFF"),
        ("a.jp2", "a JPEG 2000 picture"),
        ("a.gif", "a GIF picture"),
        ("a.bmp", "a BMP picture"),
        ("a.webp", "a WebP picture"),
    ],
)
@pytest.mark.parametrize("reader", ["auto", "openslide"])
def test_pictures_hover_net_211_openslide_283(name: str, words: str, reader: Any, tmp_path: Path) -> None:
    """vqdang/hover_net#211, openslide/openslide#283: slides as PNG."""
    try:
        Image.fromarray(_PIXELS).save(tmp_path / name)
    except OSError:
        pytest.skip("this Pillow does not write the format")
    with pytest.raises(sft.SourceError) as caught:
        open_image(tmp_path / name, reader=reader)
    assert words in str(caught.value) and "cut short" not in str(caught.value) and name in str(caught.value)
    with pytest.raises(sft.SkipSlideError):
        open_image(tmp_path / name, on_error="skip")
    # The remedy works.
    with Image.open(tmp_path / name) as picture:
        image = ArrayImage(np.asarray(picture.convert("RGB")), layout="HWC")
    assert (image.width_px, image.height_px) == (30, 20)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.svs", b"<!DOCTYPE html><html>", "a page of HTML or XML"),
        ("a.svs", b"\n <html>", "a page of HTML or XML"),
        ("a.svs", b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
        ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(600), "an HDF5 file"),
        ("a.pdf", b"%PDF-1.7", "a PDF document"),
        ("a.svs.gz", b"\x1f\x8b\x08" + bytes(20), "compressed with gzip. Unpack it"),
        ("a.jxl", b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL picture"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
        ("a.bin", b"RIFFxxxxAVI ", "Either no format that OpenSlide reads"),
    ],
)
def test_other_files_are_named_by_their_first_bytes(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(sft.SourceError, match=words):
        open_image(tmp_path / name)


def test_a_zipped_zarr_and_a_zip(tmp_path: Path) -> None:
    for name, entry, words in (
        ("a.zarr.zip", "x", "a zipped Zarr"),
        ("a.zip", ".zgroup", "a zipped Zarr"),
        ("b.zip", "x", "a ZIP archive"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(entry, "{}")
        with pytest.raises(sft.SourceError, match=f"{words}.*[Uu]npack it"):
            open_image(tmp_path / name)


@pytest.mark.parametrize("scheme", ["https", "s3", "gs", "file"])
def test_a_url_keeps_its_text(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://example.org/slide.svs"
    for given in (url, Path(url)):
        with pytest.raises(sft.SourceError, match=f"cannot open {url}: it is a URL"):
            open_image(given)
    table = tmp_path / "t.csv"
    table.write_text(f"slide,label\n{url},a\n", encoding="utf-8")
    from sft.wsi.config import TaskConfig

    with pytest.raises(sft.InputError, match=f"slide {url} is a URL; download it"):
        read_table(table, TaskConfig())


def test_a_folder_of_dicom_files_trident_163(tmp_path: Path) -> None:
    """mahmoodlab/TRIDENT#163: a slide is a folder of DICOM files; one of them opens all levels."""
    for name in ("b.dcm", "a.dcm", "c"):
        (tmp_path / name).write_bytes(bytes(128) + b"DICM" + bytes(8))
    (tmp_path / "notes.txt").write_text("no slide")
    with pytest.raises(sft.SourceError, match=r"a folder of 3 DICOM files. Give one of the \.dcm files, such as a\.dcm"):
        open_image(tmp_path)
    with pytest.raises(sft.SourceError, match="folder without Zarr metadata"):
        (tmp_path / "empty").mkdir()
        open_image(tmp_path / "empty")


_BAD_PATHS: tuple[Any, ...] = (None, 5, b"a.svs", "a\0b", "", ["a.svs"], 1.5)


@pytest.mark.parametrize("path", _BAD_PATHS, ids=repr)
def test_what_is_no_path_is_refused(path: Any) -> None:
    for opened in (open_image, TiffImage, Slide, ZarrImage, NiftiVolume):
        with pytest.raises(sft.InputError, match=r"Give (a path|the path)"):
            opened(path)
    with pytest.raises(sft.InputError, match=r"Give (a path|the path)"):
        write_geojson(path, TissueMask(pixels=np.ones((1, 1), bool), width_px=1, height_px=1))
    if isinstance(path, str):
        for source in (ArrayImage, ArraySource, LabelSource):
            with pytest.raises(sft.InputError, match="Give the path"):
                source(path)
    else:
        with pytest.raises((sft.InputError, sft.SourceError)):
            read_geojson(path)


def test_a_name_that_no_file_system_has() -> None:
    for opened in (open_image, TiffImage, Slide, ZarrImage, NiftiVolume, ArrayImage, LabelSource):
        with pytest.raises(sft.SourceError, match=r"no such file|File name too long"):
            opened("a" * 300)


@pytest.mark.parametrize("rectangle", [(0, 0, 5.5, 5), ("a", 0, 5, 5), (0, None, 5, 5), (0, 0, [5], 5), (np.float32(1), 0, 5, 5)])
def test_rectangles_are_whole_numbers(rectangle: Any) -> None:
    image = open_image(SLIDE)
    mask = TissueMask(pixels=np.ones((10, 10), bool), width_px=image.width_px, height_px=image.height_px)
    for each in (image, Slide(SLIDE), ArrayImage(_PIXELS, layout="HWC"), open_image(SLIDE, mpp=2.0), Masked(image, mask)):
        with pytest.raises(sft.InputError, match="Give whole numbers of pixels"):
            each.read(*rectangle)
    with pytest.raises(sft.InputError, match="Give whole numbers of pixels"):
        Cropped(image, **dict(zip("xywh", rectangle, strict=True)))
    with pytest.raises(sft.InputError, match="Give whole numbers of pixels"):
        image.read(0, 0, 5, 5, level=0.5)  # type: ignore[arg-type]  # that is the mistake
    whole: Any = np.int64(3)
    assert image.read(whole, whole, 5, 5).shape == (5, 5, 3)


@pytest.mark.parametrize(
    ("output", "words"),
    [("a\0.npy", "zero byte"), ("a" * 300 + ".npy", "a name of 304 bytes"), ("", "the path is empty"), (b"a.npy", "a path that ends in")],
)
def test_outputs_that_no_file_can_have(output: Any, words: str) -> None:
    for given in (output, [output]):
        with pytest.raises(sft.InputError, match=words):
            sft.compile(nn.Conv2d(3, 3, 1), (1, 3, 8, 8), output=given)


def test_libraries_log_nothing_about_a_damaged_file(tmp_path: Path) -> None:
    path, lines = tmp_path / "a.tif", list[str]()
    write_slide(path, tissue_like(200, 300), num_levels=3)
    data = path.read_bytes()
    logger, handler = logging.getLogger("tifffile"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a list for the records
    logger.addHandler(handler)
    try:
        for size in range(8, len(data), max(1, len(data) // 40)):
            path.write_bytes(data[:size])
            with pytest.raises(sft.SourceError):
                open_image(path, reader="tiff")
        assert lines == []
        logger.warning("the caller's own")
        assert lines == ["the caller's own"]
    finally:
        logger.removeHandler(handler)


def test_label_maps_above_the_limit_of_pillow_monailabel_1230_histolab_297(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Project-MONAI/MONAILabel#1230, histolab/histolab#297, weecology/DeepForest#1324: a map of more than 179 million pixels."""
    labels = np.zeros((14_000, 13_000), np.uint8)
    labels[-1, -1] = 3
    Image.fromarray(labels).save(tmp_path / "labels.png", compress_level=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mask = read_mask(tmp_path / "labels.png")
    assert mask.shape == labels.shape and mask[-1, -1] == 3 and mask[0, 0] == 0
    assert Image.MAX_IMAGE_PIXELS is not None, "the limit of other code stays"
    monkeypatch.setattr("sft.tissue.mask.free_host_memory", lambda: FreeMemory(free_bytes=2**20, total_bytes=2**30))
    with pytest.raises(sft.SourceError, match=r"13000 x 14000 px \(L\) need .* to be decoded, and 1.00 MiB of memory are free"):
        read_mask(tmp_path / "labels.png")
    with pytest.raises(sft.SourceError, match="to be decoded"), open_picture(tmp_path / "labels.png"):
        pass
    with pytest.raises(sft.SourceError, match="to be decoded"):
        TissueMask.load_png(tmp_path / "labels.png", width_px=20_000, height_px=20_000)
