"""One call that opens any image by its content, including arrays and OME-Zarr."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sft.common.errors import InputError, SkipSlideError, SourceError
from sft.sources import ArrayImage, Normalized, Slide, TiffImage, ZarrImage, at_mpp, open_image
from tests.helpers.fork_server import fork_context
from tests.helpers.slides import SLIDE, open_files, tissue_like
from tests.helpers.sources import walk

for _library in ("tifffile", "simplejpeg", "openslide"):
    pytest.importorskip(_library)


# --- opening ---------------------------------------------------------------------------------------------------------


def test_the_reader_follows_the_contents(tmp_path: Path) -> None:
    renamed = tmp_path / "slide.png"
    renamed.write_bytes(SLIDE.read_bytes())
    assert isinstance(open_image(renamed), TiffImage)
    np.save(tmp_path / "scan.npy", tissue_like(20, 30))
    (tmp_path / "scan.npy").rename(tmp_path / "scan.svs")
    assert isinstance(open_image(tmp_path / "scan.svs"), ArrayImage)
    assert isinstance(open_image(SLIDE, reader="openslide"), Slide)


@pytest.mark.parametrize("module", ["tifffile", "simplejpeg"])
def test_without_the_fast_libraries_openslide_reads(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert isinstance(open_image(SLIDE), Slide)
    with pytest.raises(SourceError, match=r"pip install .*\[fast\]"):
        open_image(SLIDE, reader="tiff")


def test_tiles_are_read_without_openslide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openslide", None)
    assert isinstance(open_image(SLIDE), TiffImage)


@pytest.mark.parametrize("policy", ["raise", "skip", "fill"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.svs", b"", "0 bytes"),
        ("note.svs", b"this is no slide", r"note\.svs \(16 bytes\).*copy it again"),
        ("head.tif", b"II*\0" + bytes(12), r"head\.tif"),
        ("photo.svs", b"\x89PNG\r\n\x1a\n" + bytes(20), "its PNG header is damaged"),
        ("page.svs", b"<html>404", "it is an HTML page"),
        ("pointer.svs", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("cut.svs", SLIDE.read_bytes()[: 1 << 20], r"cut\.svs.*cut short"),
        ("renamed.npy", SLIDE.read_bytes()[:3000], r"renamed\.npy"),
        ("cut.npy", b"\x93NUMPY\x01\x00", r"cut\.npy \(8 bytes\)"),
        ("brain.nii.gz", b"\x1f\x8b", r"brain\.nii\.gz.*NiftiVolume"),
    ],
)
def test_files_that_are_no_images_are_named(tmp_path: Path, name: str, content: bytes, message: str, policy: Any) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SkipSlideError if policy == "skip" else SourceError, match=message):
        open_image(path, on_error=policy)
    assert open_files(path) == 0


def _error_and_stderr(path: Path) -> tuple[str, str]:
    with contextlib.redirect_stderr(io.StringIO()) as written, pytest.raises(SourceError) as caught:
        open_image(path)
    return str(caught.value), written.getvalue()


def test_a_damaged_tiff_is_reported_once(tmp_path: Path) -> None:
    """tifffile logs the problem that is in the error; a log without a handler goes to stderr."""
    (tmp_path / "cut.tif").write_bytes(SLIDE.read_bytes()[: 1 << 20])
    with fork_context().Pool(1) as pool:
        message, errors = pool.apply(_error_and_stderr, (tmp_path / "cut.tif",))
    assert "cut.tif" in message and errors == ""


def test_folders_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="folder without Zarr metadata"):
        open_image(tmp_path)
    with pytest.raises(SourceError, match=r"nowhere\.svs.*no such file"):
        open_image(tmp_path / "nowhere.svs")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.svs")
        with pytest.raises(SourceError, match="neither a file nor a folder"):
            open_image(tmp_path / "pipe.svs")
    wrong: Any = "magic"
    with pytest.raises(InputError, match="'auto', 'openslide', 'tiff', 'zarr', 'npy'"):
        open_image(SLIDE, reader=wrong)


# --- arrays and zarr -------------------------------------------------------------------------------------------------


def test_arrays_are_images(tmp_path: Path) -> None:
    pixels = tissue_like(20, 30)
    np.save(tmp_path / "scan.npy", pixels.transpose(2, 0, 1))
    image = open_image(tmp_path / "scan.npy", slide_mpp=0.5, mpp=1.0)
    assert (image.width_px, image.height_px) == (15, 10)
    plain = ArrayImage(tmp_path / "scan.npy", background=(1, 2, 3))
    assert np.array_equal(pickle.loads(pickle.dumps(plain)).read(2, 3, 9, 8), pixels[3:11, 2:11])
    assert ArrayImage(pixels[..., 0]).read(2, 3, 9, 8).shape == (8, 9, 1)
    for wrong, message in (
        ({"array": pixels.astype(np.int64)}, "uint8"),
        ({"array": np.zeros((3, 9, 3), np.uint8)}, "layout="),
        ({"array": pixels[None]}, "batch"),
        ({"array": pixels, "background": (1,)}, "3 numbers"),
    ):
        with pytest.raises(InputError, match=message):
            ArrayImage(**wrong)


def write_ome_zarr(path: Path, pixels: Any, *, version: int = 2, chunk: int = 32) -> None:
    """Two levels ``[t, c, z, y, x]``, in millimetres."""
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    datasets = []
    for level in range(2):
        planes = pixels[:: 2**level, :: 2**level].transpose(2, 0, 1)[None, :, None]
        array = group.create_array(str(level), shape=planes.shape, chunks=(1, 1, 1, chunk, chunk), dtype="uint8")
        array[:] = planes
        scale = [1.0, 1.0, 1.0, 0.0005 * 2**level, 0.0005 * 2**level]
        datasets.append({"path": str(level), "coordinateTransformations": [{"type": "scale", "scale": scale}]})
    axes = [{"name": name, "type": "space", "unit": "millimeter"} if name in "zyx" else {"name": name} for name in "tczyx"]
    described = [{"axes": axes, "datasets": datasets}]
    group.attrs.update({"multiscales": described} if version == 2 else {"ome": {"version": "0.5", "multiscales": described}})


@pytest.mark.parametrize("version", [2, 3])
def test_ome_zarr(tmp_path: Path, version: int) -> None:
    pixels = tissue_like(100, 130)
    write_ome_zarr(tmp_path / "slide.zarr", pixels, version=version)
    image = open_image(tmp_path / "slide.zarr")
    assert isinstance(image, ZarrImage) and image.level_dimensions == ((130, 100), (65, 50)) and image.tile_height_px == 32
    assert image.mpp == pytest.approx((0.5, 0.5)) and image.num_channels == 3
    assert np.array_equal(image.read(7, 9, 101, 80), pixels[9:89, 7:108])
    assert np.array_equal(pickle.loads(pickle.dumps(image)).read(0, 0, 65, 50, 1), pixels[::2, ::2])
    for rows, strip in walk(image, 24, 3, backwards=True):
        assert np.array_equal(strip, pixels[rows.start : rows.stop])


def _sum_of(image: ZarrImage) -> int:
    return int(image.read(7, 9, 101, 80).sum())


class _Touch:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def _write_foreign_zarr(path: Path, chunk: bytes, *, version: int, codec: str) -> None:
    """Write an array of one chunk with a codec in its metadata."""
    path.mkdir()
    if version == 2:
        layout = {"zarr_format": 2, "shape": [4, 4, 3], "chunks": [4, 4, 3], "dtype": "|u1", "fill_value": 0, "order": "C", "filters": None}
        (path / ".zarray").write_text(json.dumps({**layout, "compressor": {"id": codec}}))
        (path / "0.0.0").write_bytes(chunk)
        return
    layout = {"zarr_format": 3, "node_type": "array", "shape": [4, 4, 3], "data_type": "uint8", "fill_value": 0}
    grid = {"name": "regular", "configuration": {"chunk_shape": [4, 4, 3]}}
    codecs = [{"name": "bytes"}, {"name": codec, "configuration": {}}]
    (path / "zarr.json").write_text(json.dumps({**layout, "chunk_grid": grid, "chunk_key_encoding": {"name": "default"}, "codecs": codecs}))
    (path / "c" / "0" / "0").mkdir(parents=True)
    (path / "c" / "0" / "0" / "0").write_bytes(chunk)


@pytest.mark.parametrize(
    ("version", "codec"), [(2, "pickle"), (2, "base64"), (2, "msgpack2"), (2, "sft_test_codec"), (3, "numcodecs.pickle"), (3, "vlen-utf8")]
)
def test_codecs_that_are_none_of_pixels_are_refused(tmp_path: Path, version: int, codec: str) -> None:
    pytest.importorskip("zarr")
    touched = tmp_path / "touched"
    _write_foreign_zarr(tmp_path / "slide.zarr", pickle.dumps(_Touch(touched)), version=version, codec=codec)
    with pytest.raises(SourceError, match=r"slide\.zarr"):
        open_image(tmp_path / "slide.zarr").read(0, 0, 4, 4)
    assert not touched.exists()


def test_a_codec_of_zarr_is_refused_before_a_chunk_is_read(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    _write_foreign_zarr(tmp_path / "slide.zarr", b"", version=2, codec="base64")
    with pytest.raises(SourceError, match="its codecs base64 do not encode pixels, and may run code"):
        open_image(tmp_path / "slide.zarr")


@pytest.mark.parametrize("version", [2, 3])
def test_codecs_of_pixels_are_read(tmp_path: Path, version: int) -> None:
    zarr, numcodecs = pytest.importorskip("zarr"), pytest.importorskip("numcodecs")
    pixels = tissue_like(64, 64)
    options: list[dict[str, Any]] = [{}]
    if version == 2:
        options += [{"compressors": numcodecs.Zlib(), "filters": [numcodecs.Delta("u1")]}, {"compressors": numcodecs.Blosc()}]
    else:
        options += [{"shards": (64, 64, 3)}, {"compressors": [zarr.codecs.GzipCodec()]}]
    for number, option in enumerate(options):
        path = tmp_path / f"{number}.zarr"
        zarr.create_array(str(path), shape=pixels.shape, dtype="u1", chunks=(32, 32, 3), zarr_format=version, **option)[:] = pixels
        assert np.array_equal(open_image(path).read(0, 0, 64, 64), pixels)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_zarr(tmp_path: Path, method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    write_ome_zarr(tmp_path / "slide.zarr", tissue_like(100, 130))
    image = ZarrImage(tmp_path / "slide.zarr")
    expected = _sum_of(image)
    context: Any = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.apply_async(_sum_of, (image,)).get(timeout=120) == expected
    assert _sum_of(image) == expected


@pytest.mark.parametrize("kind", ["plain", "group of format 2", "group of format 3"])
def test_a_zarr_store_that_goes_away_while_it_is_open(kind: str, tmp_path: Path) -> None:
    """Regression: all of it was read as the fill value, black, without an error."""
    zarr, pixels = pytest.importorskip("zarr"), tissue_like(100, 130)
    path = tmp_path / "slide.zarr"
    if kind == "plain":
        zarr.create_array(str(path), data=pixels, chunks=(32, 32, 3))
    else:
        write_ome_zarr(path, pixels, version=int(kind[-1]))
    image = open_image(path)
    before = image.read(0, 0, 20, 10)
    path.rename(tmp_path / "elsewhere.zarr")
    with pytest.raises(SourceError, match=r"is missing, and its pixels would be the fill value"):
        image.read(0, 0, 20, 10)
    (tmp_path / "elsewhere.zarr").rename(path)
    assert np.array_equal(image.read(0, 0, 20, 10), before)


def test_plain_zarr_arrays(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    pixels = tissue_like(60, 70)
    zarr.create_array(str(tmp_path / "a.zarr"), data=pixels, chunks=(32, 32, 3))
    assert np.array_equal(open_image(tmp_path / "a.zarr").read(3, 4, 50, 40), pixels[4:44, 3:53])
    zarr.create_array(str(tmp_path / "grey.zarr"), data=pixels[..., 0], chunks=(32, 32))
    assert np.array_equal(open_image(tmp_path / "grey.zarr").read(3, 4, 50, 40)[..., 0], pixels[4:44, 3:53, 0])
    zarr.create_array(str(tmp_path / "f.zarr"), data=pixels.astype(np.int64))
    with pytest.raises(SourceError, match=r"f\.zarr.*it holds int64; pixels are one of uint8, uint16"):
        open_image(tmp_path / "f.zarr")
    zarr.open_group(str(tmp_path / "g.zarr"), mode="w").create_array("only", data=pixels)
    with pytest.raises(SourceError, match=r"g\.zarr.*only"):
        open_image(tmp_path / "g.zarr")


def test_a_plane_of_a_stack_must_be_chosen(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w", zarr_format=2)
    group.create_array("0", data=np.arange(4 * 5 * 6, dtype=np.uint8).reshape(4, 5, 6))
    group.attrs["multiscales"] = [{"axes": ["z", "y", "x"], "datasets": [{"path": "0"}]}]
    with pytest.raises(InputError, match="axis 'z' has 4 entries"):
        open_image(tmp_path / "s.zarr")
    image = ZarrImage(tmp_path / "s.zarr", at={"z": 2})
    assert image.mpp is None and image.read(1, 2, 1, 1).item() == 2 * 30 + 2 * 6 + 1


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    write_ome_zarr(tmp_path / "slide.zarr", tissue_like(100, 130), version=3)
    chunk = sorted((tmp_path / "slide.zarr" / "0" / "c").rglob("0"))[-1]
    assert chunk.is_file()
    chunk.write_bytes(chunk.read_bytes()[:20])
    image: Any = open_image(tmp_path / "slide.zarr")
    with pytest.raises(SourceError, match=r"columns \[0, 130\).*slide\.zarr"):
        image.read(0, 0, 130, 100)
    filled: Any = open_image(tmp_path / "slide.zarr", on_error="fill")
    filled.read(0, 0, 130, 100)
    assert len(filled.bad_tiles) == 1


def test_levels_that_merge_planes_are_left_out(tmp_path: Path) -> None:
    """An index along another axis means another plane there."""
    import zarr

    planes = np.stack([np.full((64, 96), 40 * number, np.uint8) for number in range(4)])
    group = zarr.open_group(str(tmp_path / "stack.zarr"), mode="w", zarr_format=2)
    for name, pixels in (("0", planes), ("1", planes[:, ::2, ::2]), ("2", planes[::2, ::4, ::4])):
        group.create_array(name, shape=pixels.shape, chunks=(1, 32, 32), dtype=np.uint8)[:] = pixels
    axes: Any = [{"name": "z", "type": "space"}, *({"name": axis, "type": "space", "unit": "micrometer"} for axis in "yx")]
    scales = {"0": [1, 0.25, 0.25], "1": [1, 0.5, 0.5], "2": [2, 1, 1]}
    datasets: Any = [{"path": name, "coordinateTransformations": [{"type": "scale", "scale": scale}]} for name, scale in scales.items()]
    group.attrs.update({"multiscales": [{"version": "0.4", "axes": axes, "datasets": datasets}]})
    image = ZarrImage(tmp_path / "stack.zarr", at={"z": 3})
    assert image.level_dimensions == ((96, 64), (48, 32))
    for mpp in (0.25, 0.5, 1.0):
        assert int(at_mpp(image, mpp).read(0, 0, 1, 1)[0, 0, 0]) == 120


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: open_image(path, mpp=cast(Any, (0.5, 0.5))), "give one number"),
        (lambda path: open_image(path, mpp=cast(Any, "0.5")), "give one number"),
        (lambda path: open_image(path, num_threads=cast(Any, "2")), "in '2' threads"),
        (lambda path: Normalized(open_image(path), mean=cast(Any, 0.5), std=(1.0, 1.0, 1.0)), "mean 0.5: give a number for every channel"),
        (lambda path: open_image(path.with_name("a" * 300)), "File name too long"),
        (lambda path: open_image(path.with_name("b.npy")), "there is no such file"),
    ],
)
def test_arguments_of_another_kind(call: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    import tifffile

    tifffile.imwrite(tmp_path / "a.tif", tissue_like(64, 64), tile=(32, 32), photometric="rgb", metadata=None)
    with pytest.raises((InputError, SourceError), match=message):
        call(tmp_path / "a.tif")
