"""URLs: TIFF, Zarr and encoded images through fsspec, and servers that fail."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import Normalized, StripReader, TiffImage, ZarrImage, open_image
from tests.helpers.http_files import FileServer, serve_folder
from tests.sources.readers.test_tiff_content import write
from tests.sources.test_pixel_types import numbers

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_tiff(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = numbers((200, 150, 4), "uint16")
    memory.pipe("/a.tif", write(tmp_path / "a.tif", pixels, compression="deflate").read_bytes())
    calls: list[int] = []
    cat_ranges = type(memory).cat_ranges

    def counted(self: Any, paths: list[str], *rest: Any, **options: Any) -> Any:
        calls.append(len(paths))
        return cat_ranges(self, paths, *rest, **options)

    monkeypatch.setattr(type(memory), "cat_ranges", counted)
    image = open_image("memory://a.tif")
    assert isinstance(image, TiffImage) and image.dtype == np.uint16
    assert np.array_equal(image.read(0, 0, 150, 200), pixels)
    assert calls == [1], "the tiles of a rectangle in one request, as they are neighbours"
    copy = pickle.loads(pickle.dumps(image))
    assert str(copy.path) == "memory://a.tif" and np.array_equal(copy.read(3, 4, 50, 60), pixels[4:64, 3:53])
    strips = [Interval(top, top + 50) for top in range(0, 200, 50)]
    with StripReader(Normalized(image), strips) as reader:
        for rows in strips:
            assert np.allclose(reader.take(rows)[0].permute(1, 2, 0), pixels[rows.start : rows.stop] / 65535)


def test_zarr_and_png(memory: Any) -> None:
    zarr, imagecodecs = pytest.importorskip("zarr"), pytest.importorskip("imagecodecs")
    pixels = numbers((40, 50, 3), "uint8")
    memory.pipe("/a.png", imagecodecs.png_encode(pixels))
    assert np.array_equal(open_image("memory://a.png").read(0, 0, 50, 40), pixels)
    zarr.create_array(zarr.storage.FsspecStore.from_url("memory://b.zarr"), data=pixels, chunks=(16, 16, 3))
    image = open_image("memory://b.zarr")
    assert isinstance(image, ZarrImage) and np.array_equal(image.read(3, 4, 40, 30), pixels[4:34, 3:43])
    memory.rm("/b.zarr", recursive=True)
    with pytest.raises(SourceError, match=r"memory://b\.zarr"):
        image.read(3, 4, 40, 30)


def test_urls_that_are_none(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe("/a.mrxs", b"no slide")
    with pytest.raises(SourceError, match=r"cannot open memory://nowhere\.tif: there is no such file"):
        open_image("memory://nowhere.tif")
    with pytest.raises(SourceError, match="of remote files, TIFF, Zarr, PNG, JPEG and JPEG 2000 are read"):
        open_image("memory://a.mrxs")
    with pytest.raises(InputError, match="Give a URL that fsspec knows"):
        open_image("nothing://a.tif")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(SourceError, match=r"pip install .*\[remote\]"):
        open_image("memory://a.tif")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp")
    with serve_folder(tmp_path) as server:
        yield server


def test_a_server_that_fails_half_way(server: FileServer, tmp_path: Path) -> None:
    pixels = numbers((200, 150, 3), "uint8")
    num_bytes = write(tmp_path / "a.tif", pixels).stat().st_size
    image = open_image(server.url("a.tif"))
    assert np.array_equal(image.read(0, 0, 150, 64), pixels[:64])
    server.dies_at = num_bytes // 2
    with pytest.raises(SourceError, match=r"cannot read columns \[0, 150\) and rows \[0, 200\) of level 0 of http://127\.0\.0\.1"):
        image.read(0, 0, 150, 200)
    server.dies_at = None
    assert np.array_equal(image.read(0, 0, 150, 200), pixels), "a later read works again"


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_server_that_refuses(status: int, server: FileServer, tmp_path: Path) -> None:
    write(tmp_path / "a.tif", numbers((40, 50, 3), "uint8"))
    server.status = status
    with pytest.raises(SourceError, match=r"cannot open http://127\.0\.0\.1.*a\.tif"):
        open_image(server.url("a.tif"))


@pytest.mark.parametrize("fault", ["sends_ranges", "sends_length"])
def test_a_server_without_ranges_or_lengths(fault: str, server: FileServer, tmp_path: Path) -> None:
    """An error that names the file, or the right pixels; never bytes of another offset."""
    pixels = numbers((200, 150, 3), "uint8")
    write(tmp_path / "a.tif", pixels, compression="deflate")
    setattr(server, fault, False)
    try:
        image = open_image(server.url("a.tif"))
        read = image.read(0, 100, 150, 100)
    except SourceError as error:
        assert "a.tif" in str(error)
    else:
        assert np.array_equal(read, pixels[100:])


@pytest.mark.parametrize("kind", ["mask", "alpha", "nodata"])
def test_masks_of_remote_rasters(kind: str, server: FileServer, tmp_path: Path) -> None:
    pytest.importorskip("rasterio")
    from tests.sources.readers.test_rasters import write as write_raster

    pixels = numbers((70, 90, 3), "uint16") // 2 + 7
    valid = np.random.default_rng(0).random((70, 90)) > 0.3
    stored = np.where(valid[..., None], pixels, 5).astype(np.uint16) if kind == "nodata" else pixels
    bands = np.dstack([stored, np.where(valid, 65535, 0).astype(np.uint16)]) if kind == "alpha" else stored
    options: dict[str, dict[str, Any]] = {"mask": {"masked": valid}, "alpha": {"alpha": True}, "nodata": {"nodata": 5}}
    write_raster(tmp_path / "a.tif", bands, overviews=(2,), **options[kind])
    image: Any = open_image(server.url("a.tif"), mask="channel")
    read = image.read(10, 5, 70, 60)
    assert np.array_equal(read[..., :3], stored[5:65, 10:80]) and np.array_equal(read[..., 3], np.where(valid[5:65, 10:80], 65535, 0))
    assert image.level_dimensions == ((90, 70), (45, 35)) and image.georeference.transform[:1] == (10,)
    filled = open_image(server.url("a.tif"), mask="fill", fill_value=42)
    assert np.array_equal(pickle.loads(pickle.dumps(filled)).read(0, 0, 90, 70), np.where(valid[..., None], stored, 42))
    plain: Any = open_image(server.url("a.tif"), mask="ignore")
    assert np.array_equal(plain.read(0, 0, 45, 35, 1), open_image(tmp_path / "a.tif", mask="ignore").read(0, 0, 45, 35, 1))
    server.dies_at = 100
    with pytest.raises(SourceError, match=r"127\.0\.0\.1.*a\.tif"):
        open_image(server.url("a.tif"), mask="fill").read(0, 0, 90, 70)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_remote_zarr_of_several_series(zarr_format: Any, zipped: bool, server: FileServer, tmp_path: Path) -> None:
    from tests.sources.readers.test_zarr_content import write_series, zip_folder

    images = [numbers((2, 40, 50), "uint16", seed=seed) for seed in range(2)]
    path = write_series(tmp_path / "a.zarr", images, zarr_format)
    if zipped:
        path = zip_folder(path, tmp_path / "a.zarr.zip")
    image = open_image(server.url(path.name), series=1)
    assert isinstance(image, ZarrImage) and np.array_equal(image.read(3, 4, 40, 30), images[1][:, 4:34, 3:43].transpose(1, 2, 0))
    assert np.array_equal(pickle.loads(pickle.dumps(image)).read(0, 0, 50, 40), images[1].transpose(1, 2, 0))
    with pytest.raises(InputError, match="holds series 0, 1"):
        open_image(server.url(path.name))
