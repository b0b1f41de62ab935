"""OME-Zarr beyond one image in a folder: series of bioformats2raw, ZIP files, and label maps in both."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft import InputError, SourceError
from sft.sources import ZarrImage, open_image, open_labels
from sft.sources.views import RasterView
from tests.sources.readers.test_label_images import labels_of
from tests.sources.test_pixel_types import numbers

zarr = pytest.importorskip("zarr")


def _describe(group: Any, described: dict[str, Any], zarr_format: int) -> None:
    group.attrs.update({"ome": {"version": "0.5", **described}} if zarr_format == 3 else described)


def _write_image(group: Any, planes: Any, zarr_format: int) -> None:
    """An image [c, y, x] of two levels."""
    for level, pixels in enumerate((planes, planes[:, ::2, ::2])):
        group.create_array(str(level), data=np.ascontiguousarray(pixels), chunks=(1, 16, 16))
    axes = [
        {"name": name, "type": "channel" if name == "c" else "space", **({} if name == "c" else {"unit": "micrometer"})} for name in "cyx"
    ]
    datasets = [
        {"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": [1.0, 0.5 * 2**level, 0.5 * 2**level]}]}
        for level in range(2)
    ]
    _describe(group, {"multiscales": [{"version": "0.4", "axes": axes, "datasets": datasets}]}, zarr_format)


def write_series(path: Path, images: Any, zarr_format: int) -> Path:
    """A group of several images, as bioformats2raw writes it."""
    root = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
    _describe(root, {"bioformats2raw.layout": 3}, zarr_format)
    for number, planes in enumerate(images):
        _write_image(root.create_group(str(number)), planes, zarr_format)
    root.create_group("OME").attrs.update({"series": [str(number) for number in range(len(images))]})
    return path


def zip_folder(folder: Path, path: Path, *, prefix: str = "") -> Path:
    """A ZIP file of a folder, without compression, as OME recommends."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, f"{prefix}{file.relative_to(folder)}")
    shutil.rmtree(folder)
    return path


@pytest.mark.parametrize("place", ["folder", "zip", "zip of a folder"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_series_in_folders_and_zip_files(zarr_format: int, place: str, tmp_path: Path) -> None:
    images = [numbers((count, 40, 50), "uint16", seed=count) for count in (2, 3)]
    path = write_series(tmp_path / "a.zarr", images, zarr_format)
    if place != "folder":
        path = zip_folder(path, tmp_path / "a.zip", prefix="a.zarr/" if place == "zip of a folder" else "")
    for series, planes in enumerate(images):
        image = open_image(path, series=series)
        assert isinstance(image, ZarrImage) and image.level_dimensions == ((50, 40), (25, 20)) and image.mpp == (0.5, 0.5)
        assert np.array_equal(image.read(3, 4, 40, 30), planes[:, 4:34, 3:43].transpose(1, 2, 0))
        assert np.array_equal(image.read(0, 0, 25, 20, 1), planes[:, ::2, ::2].transpose(1, 2, 0))
        assert np.array_equal(pickle.loads(pickle.dumps(image)).read(0, 0, 50, 40), planes.transpose(1, 2, 0))
        selected = RasterView(open_image(path, series=series, channels=[1]))
        assert np.array_equal(selected.read(5, 6, 20, 10)[..., 0], planes[1, 6:16, 5:25])
    with pytest.raises(InputError, match=r"no series is chosen, and it holds series 0, 1\. Give series=0"):
        open_image(path)
    with pytest.raises(InputError, match="it has no series 2, and it holds series 0, 1"):
        open_image(path, series=2)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_one_series_needs_no_choice(zarr_format: int, tmp_path: Path) -> None:
    planes = numbers((2, 40, 50), "uint16")
    path = zip_folder(write_series(tmp_path / "a.zarr", [planes], zarr_format), tmp_path / "a.zip")
    assert np.array_equal(open_image(path).read(0, 0, 50, 40), planes.transpose(1, 2, 0))


def test_arrays_and_labels_in_zip_files(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 5, (40, 50)).astype(np.uint8)
    zarr.create_array(str(tmp_path / "a.zarr"), data=labels, chunks=(16, 16))
    path = zip_folder(tmp_path / "a.zarr", tmp_path / "labels.zip")
    assert np.array_equal(labels_of(open_labels(path)), labels)
    assert np.array_equal(open_image(path).read(0, 0, 50, 40)[..., 0], labels)


def test_a_zip_file_that_is_none(tmp_path: Path) -> None:
    path = zip_folder(write_series(tmp_path / "a.zarr", [numbers((1, 20, 20), "uint8")], 2), tmp_path / "a.zip")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"a\.zip: .*not a ZIP archive, or it is cut short"):
        open_image(path)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(SourceError, match=r"b\.zip"):
        open_image(tmp_path / "b.zip")


def test_axes_by_their_names(tmp_path: Path) -> None:
    """Ambiguous shapes; names of format 3, and of xarray in format 2."""
    pixels = np.arange(2 * 12 * 10, dtype=np.uint16).reshape(2, 12, 10)
    for names in (("c", "y", "x"), ("band", "latitude", "longitude")):
        zarr.create_array(str(tmp_path / names[0]), data=pixels, chunks=(1, 4, 4), dimension_names=names)
        image = open_image(tmp_path / names[0])
        assert (image.num_channels, image.height_px, image.width_px) == (2, 12, 10)
        assert (image.read(0, 0, 10, 12) == pixels.transpose(1, 2, 0)).all()
    old = zarr.create_array(str(tmp_path / "old"), data=pixels, chunks=(1, 4, 4), zarr_format=2)
    old.attrs["_ARRAY_DIMENSIONS"] = ["time", "y", "x"]
    assert (open_image(tmp_path / "old", at={"t": 1}).read(0, 0, 10, 12)[..., 0] == pixels[1]).all()
    zarr.create_array(str(tmp_path / "plain"), data=pixels, chunks=(1, 4, 4))
    with pytest.raises(InputError, match=r"ZarrImage\(path, layout=...\), or write its dimension_names"):
        _ = open_image(tmp_path / "plain").num_channels


def test_labels_that_are_false_or_true_and_images_without_pixels(tmp_path: Path) -> None:
    labels = np.eye(12, dtype=bool)
    zarr.create_array(str(tmp_path / "labels"), data=labels, chunks=(4, 4))
    assert (labels_of(open_labels(tmp_path / "labels")) == labels).all()
    zarr.create_array(str(tmp_path / "empty"), shape=(0, 12), chunks=(4, 4), dtype="uint8")
    with pytest.raises(SourceError, match="it has 12 x 0 px"):
        open_image(tmp_path / "empty")
