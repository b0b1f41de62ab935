"""Label maps as sources: every format, channels and colours, other resolutions, and pictures above Pillow's limit."""

from __future__ import annotations

import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft import BudgetError, InputError, SourceError
from sft.common.interval import Interval
from sft.sources import ArrayImage, Cropped, Georeference, ImageLabels, open_image, open_labels

tifffile = pytest.importorskip("tifffile")
pillow = pytest.importorskip("PIL.Image")
pytest.importorskip("imagecodecs")


def labels_of(source: Any, start: int = 0, stop: int | None = None) -> Any:
    height, width = source.shape[2:]
    out = torch.full((1, 1, (stop or height) - start, width), -7, dtype=torch.int64)
    source.rows(Interval(start, stop or height), out)
    return out[0, 0].numpy()


def _map(dtype: str = "uint8", shape: tuple[int, int] = (70, 90)) -> Any:
    return np.random.default_rng(3).integers(0, 6, shape).astype(dtype)


def _write(path: Path, labels: Any) -> Path:
    tiff: dict[str, Any] = {"metadata": None, "photometric": "minisblack"}
    if path.suffix == ".npy":
        np.save(path, labels)
    elif path.suffix == ".zarr":
        pytest.importorskip("zarr").create_array(str(path), data=labels, chunks=(32, 32))
    elif path.suffix in (".png", ".bmp"):
        pillow.fromarray(labels).save(path)
    elif path.stem == "palette":
        colours = np.random.default_rng(0).integers(0, 65536, (3, 256), dtype=np.uint16)
        tifffile.imwrite(path, labels, tile=(32, 32), photometric="palette", colormap=colours, metadata=None, compression="deflate")
    else:
        options = {"tile": (32, 32)} if path.stem == "tiled" else {"rowsperstrip": 11}
        tifffile.imwrite(path, labels, compression="deflate", **options, **tiff)
    return path


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("a.npy", "uint8"),
        ("a.npy", "int64"),
        ("a.npy", "bool"),
        ("a.zarr", "uint8"),
        ("a.zarr", "int32"),
        ("a.png", "uint8"),
        ("a.png", "uint16"),
        ("a.bmp", "uint8"),
        ("tiled.tif", "uint8"),
        ("tiled.tif", "uint32"),
        ("tiled.tif", "int8"),
        ("palette.tif", "uint8"),
        ("strips.tif", "uint16"),
    ],
)
def test_every_format_and_type(name: str, dtype: str, tmp_path: Path) -> None:
    """dlup#232, ASAP#195: label maps of PANDA, CAMELYON and UNICORN are tiled TIFFs."""
    labels = _map(dtype)
    source = open_labels(_write(tmp_path / name, labels))
    assert source.shape == (1, 1, 70, 90) and source.dtype is torch.int64
    assert np.array_equal(labels_of(source), labels) and np.array_equal(labels_of(source, 30, 41), labels[30:41])
    assert np.array_equal(labels_of(pickle.loads(pickle.dumps(source))), labels)
    same = source.repeated_rows(Interval(0, 2))
    assert same.tolist() == [False, *(labels[1:, :2] == labels[:-1, :2]).all(axis=1)]


def test_values_channels_and_colours(tmp_path: Path) -> None:
    labels = _map()
    red = np.dstack([labels, labels * 0, labels * 0])
    tifffile.imwrite(tmp_path / "panda.tif", red, tile=(32, 32), photometric="rgb", compression="deflate", metadata=None)
    pillow.fromarray(red).save(tmp_path / "panda.png")
    for name in ("panda.tif", "panda.png"):
        with pytest.raises(InputError, match=r"it has 3 channels\. Choose channel=0 \(in PANDA the label is in red\)"):
            open_labels(tmp_path / name)
        assert np.array_equal(labels_of(open_labels(tmp_path / name, channel=0)), labels)
        table = {(value, 0, 0): 10 * value for value in range(6)}
        assert np.array_equal(labels_of(open_labels(tmp_path / name, colours=table)), 10 * labels)
        row, column = np.argwhere(labels == 5)[0].tolist()
        with pytest.raises(InputError, match=rf"the colour \(5, 0, 0\) at column {column}, row {row} is not in the table"):
            labels_of(open_labels(tmp_path / name, colours={key: value for key, value in table.items() if value != 50}))
        with pytest.raises(InputError, match="channels 0 to 2"):
            open_labels(tmp_path / name, channel=3)
    mapped = open_labels(tmp_path / "panda.tif", channel=0, values={value: value % 2 for value in range(6)})
    assert np.array_equal(labels_of(mapped), labels % 2)
    with pytest.raises(InputError, match="value 5 has none"):
        labels_of(open_labels(tmp_path / "panda.tif", channel=0, values={value: 0 for value in range(5)}))
    with pytest.raises(InputError, match=r"\{\(r, g, b\): label\}"):
        open_labels(tmp_path / "panda.tif", colours={(300, 0, 0): 1})
    with pytest.raises(InputError, match="Give RGB"):
        open_labels(_write(tmp_path / "tiled.tif", labels), colours={(0, 0, 0): 1})


@pytest.mark.parametrize("size", [(70, 90), (35, 45), (140, 180), (18, 23), (210, 270)])
def test_labels_of_another_resolution(size: tuple[int, int], tmp_path: Path) -> None:
    labels = _map(shape=size)
    image = ArrayImage(np.zeros((70, 90, 3), np.uint8))
    source = open_labels(_write(tmp_path / "tiled.tif", labels), like=image)
    rows = np.minimum(((np.arange(70) + 0.5) / (4 if size[0] == 18 else 70 / size[0])).astype(int), size[0] - 1)
    columns = np.minimum(((np.arange(90) + 0.5) / (4 if size[1] == 23 else 90 / size[1])).astype(int), size[1] - 1)
    assert source.shape == (1, 1, 70, 90) and np.array_equal(labels_of(source), labels[rows][:, columns])
    assert np.array_equal(labels_of(source, 33, 50), labels[rows][33:50, columns])
    with pytest.raises(InputError, match="the sides have another ratio"):
        open_labels(tmp_path / "tiled.tif", like=ArrayImage(np.zeros((70, 190, 3), np.uint8)))
    with pytest.raises(InputError, match=r"1 x 1 px, its slide 90 x 70 px.*one pixel states no resolution"):
        open_labels(_write(tmp_path / "one.npy", labels[:1, :1]), like=image)


def _grey_png(path: Path, width: int, height: int, value: int = 0, bits: int = 8) -> Path:
    """A PNG of one byte, written without its pixels in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    compressor = zlib.compressobj(1)
    row = bytes([0]) + bytes([value]) * (width * bits // 8)
    body = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b""))
    return path


def test_pictures_above_pillows_limit_monailabel_1230(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MONAILabel#1230, histolab#297, DeepForest#1324: the limit is the host budget."""
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 1000)
    path = _grey_png(tmp_path / "a.png", 300, 200, value=4)
    assert (labels_of(open_labels(path), 190) == 4).all()
    assert pillow.MAX_IMAGE_PIXELS == 1000
    with pytest.raises(BudgetError, match=r"the picture is decoded at once, into 58\.59 KiB; the host budget is 32\.00 KiB"):
        open_labels(path, host_budget_bytes="32KiB")


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("name", ["tiled.tif", "strips.tif", "white.tif", "grey.png"])
def test_stored_values_of_a_few_bits(name: str, bits: int, tmp_path: Path) -> None:
    """Pillow scales them to 255, which counts as ignored, and inverts those with white as 0."""
    path, labels = tmp_path / name, _map(shape=(40, 48)) % 2**bits
    if name == "grey.png":
        _grey_png(path, 48, 40, value=0b01100011, bits=bits)
        labels = np.tile(
            np.unpackbits(np.array([0b01100011], np.uint8)).reshape(-1, bits) @ (1 << np.arange(bits)[::-1]), (40, 48 * bits // 8)
        )
    else:
        rasterio = pytest.importorskip("rasterio")
        options: dict[str, Any] = {"tiled": True, "blockxsize": 16, "blockysize": 16} if name == "tiled.tif" else {}
        photometric = "MINISWHITE" if name == "white.tif" else "MINISBLACK"
        profile = {
            "driver": "GTiff",
            "width": 48,
            "height": 40,
            "count": 1,
            "dtype": "uint8",
            "transform": rasterio.Affine(2, 0, 9, 0, -2, 9),
        }
        with rasterio.open(path, "w", **profile, nbits=bits, photometric=photometric, **options) as file:
            file.write(labels, 1)
        word = "bit" if bits == 1 else "bits"
        with pytest.raises(SourceError, match=rf"it has {bits} {word} a sample, pixels have 8\. Convert it \(gdal_translate -co NBITS=8\)"):
            open_image(path)
    assert np.array_equal(labels_of(open_labels(path)), labels)


def test_boolean_arrays_and_inverted_grey(tmp_path: Path) -> None:
    labels = _map()
    tifffile.imwrite(tmp_path / "bool.tif", labels > 2)
    tifffile.imwrite(tmp_path / "white.tif", labels, photometric="miniswhite")
    assert np.array_equal(labels_of(open_labels(tmp_path / "bool.tif")), labels > 2)
    assert np.array_equal(labels_of(open_labels(tmp_path / "white.tif")), labels)
    with pytest.raises(SourceError, match="it has 1 bit a sample"):
        open_image(tmp_path / "bool.tif")
    with pytest.raises(SourceError, match=r"its colours are miniswhite\. Convert it to grey"):
        open_image(tmp_path / "white.tif")


@pytest.mark.parametrize("kind", ["tag", "ramp", "geo palette", "aux.xml"])
def test_grey_values_with_a_colour_table(kind: str, tmp_path: Path) -> None:
    """Indices of colours are no grey values; a linear grey table changes nothing."""
    path, labels = tmp_path / "a.tif", _map()
    colours = np.tile(np.linspace(0, 65535, 256).astype(np.uint16), (3, 1))
    if kind != "ramp":
        colours[1:, 5] = 0
    photometric = "palette" if kind == "geo palette" else "minisblack"
    tags: list[Any] = [] if kind in ("aux.xml", "geo palette") else [(320, "H", 768, colours.reshape(-1).tolist(), True)]
    if kind == "geo palette":
        tags.append((33550, "d", 3, (1.0, 1.0, 0.0), True))
    options = {"colormap": colours} if kind == "geo palette" else {}
    tifffile.imwrite(path, labels, tile=(32, 32), photometric=photometric, metadata=None, extratags=tags, **options)
    if kind == "aux.xml":
        text = '<PAMDataset><PAMRasterBand band="1"><ColorTable><Entry c1="9" c2="0" c3="0"/></ColorTable></PAMRasterBand></PAMDataset>'
        (tmp_path / "a.tif.aux.xml").write_text(text)
    assert np.array_equal(labels_of(open_labels(path)), labels)
    if kind == "ramp":
        assert np.array_equal(open_image(path).read(0, 0, 90, 70)[..., 0], labels)
    else:
        with pytest.raises(SourceError, match=r"a\.tif.*its values are indices of .* colour table"):
            open_image(path)
    (tmp_path / "a.tif.aux.xml").write_text("<PAMDataset>")
    if kind == "aux.xml":
        assert np.array_equal(open_image(path).read(0, 0, 90, 70)[..., 0], labels), "statistics of a GIS, or no XML"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.png", "there is no such file"),
        ("folder", "a folder without Zarr metadata"),
        ("note.png", "it is a PDF document, or it is damaged"),
        ("cut.png", r"cut\.png"),
        ("cmyk.tif", "Save one channel"),
        ("cut.tif", "cut short"),
        ("cut.npy", r"cut\.npy"),
        ("float.npy", r"labels are uint8.*bool"),
        ("float.tif", "it holds float32, labels are integers"),
        ("two.tif", "2 images of 40 x 30 px"),
        ("two.gif", "2 images of 90 x 70 px"),
    ],
)
def test_files_that_are_no_label_maps(name: str, message: str, tmp_path: Path) -> None:
    path, labels = tmp_path / name, _map()
    if name == "folder":
        path.mkdir()
    elif name == "note.png":
        path.write_bytes(b"%PDF-1.7")
    elif name.startswith("cut"):
        whole = _write(tmp_path / f"tiled{path.suffix}", labels).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif name == "cmyk.tif":
        pillow.new("CMYK", (9, 9)).save(path)
    elif name.startswith("float"):
        _write(path.with_stem("tiled"), labels.astype(np.float32)).rename(path)
    elif name == "two.tif":
        tifffile.imwrite(path, np.zeros((2, 30, 40), np.uint8), metadata=None, photometric="minisblack")
    elif name == "two.gif":
        frames = [pillow.fromarray(labels + number) for number in range(2)]
        frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.raises((InputError, SourceError), match=message):
        labels_of(open_labels(path))


def test_images_that_are_no_labels() -> None:
    with pytest.raises(InputError, match=r"3 channels of uint8\. Give one channel of integers"):
        ImageLabels(ArrayImage(np.zeros((40, 50, 3), np.uint8)))


@pytest.mark.parametrize("name", ["a.geojson", "a.xml", "a.shp", "a.gpkg"])
def test_polygons_are_no_label_map(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("polygons of some format")
    with pytest.raises(SourceError, match=r"it has polygons, no pixels.*AnnotationLabels\(sft\.tissue\.read_annotations"):
        open_labels(tmp_path / name)


@pytest.mark.parametrize(
    ("first", "step", "size"),
    [
        ((-7, -4), 1, (120, 100)),  # a map of a larger field
        ((-3.25, -1.5), 1, (120, 100)),  # pixels that do not coincide
        ((0, 0), 0.3, (300, 234)),  # finer pixels
        ((-2, -6), 2, (50, 40)),  # coarser ones
        ((0, 0), 2, (45, 35)),  # a level: without the incomplete pixels at the border
    ],
)
def test_georeferenced_labels_are_at_their_map_coordinates(
    first: tuple[float, float], step: float, size: tuple[int, int], tmp_path: Path
) -> None:
    rasterio = pytest.importorskip("rasterio")
    from tests.sources.readers.test_rasters import SENTINEL, write

    transform = SENTINEL["transform"]
    width, height = (91, 71) if size == (45, 35) else (90, 70)
    scene = open_image(write(tmp_path / "scene.tif", np.zeros((height, width, 2), np.uint16)))
    values = _map(shape=size[::-1])
    placed = transform @ rasterio.Affine.translation(*first) @ rasterio.Affine.scale(step)
    path = write(tmp_path / "labels.tif", values[..., None], transform=placed)
    columns, rows = (
        np.minimum(np.floor((np.arange(count) + 0.5 - corner) / step + 1e-9), labels - 1).astype(int)
        for count, corner, labels in zip((width, height), first, size, strict=True)
    )
    expected = values[rows][:, columns]
    assert np.array_equal(labels_of(open_labels(path, like=scene)), expected)
    crop = Cropped(scene, x=11, y=5, w=40, h=30)
    assert np.array_equal(labels_of(pickle.loads(pickle.dumps(open_labels(path, like=crop)))), expected[5:35, 11:51])


def test_georeferenced_labels_of_another_place_are_refused(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    from tests.sources.readers.test_rasters import SENTINEL, write

    transform = SENTINEL["transform"]
    scene = open_image(write(tmp_path / "scene.tif", np.zeros((70, 90, 2), np.uint16)))
    values = _map()[..., None]
    moved = write(tmp_path / "moved.tif", values, transform=transform @ rasterio.Affine.translation(10, -3))
    with pytest.raises(InputError, match=r"begins at column 10, row -3 of the image.*so 10 columns and 3 rows have no label"):
        open_labels(moved, like=scene)
    moved_labels = open_labels(moved, like=scene, outside=255)
    expected = np.full((70, 90), 255)
    expected[:67, 10:] = values[3:, :80, 0]
    assert np.array_equal(labels_of(pickle.loads(pickle.dumps(moved_labels))), expected)
    assert np.array_equal(labels_of(moved_labels, 67, 70), expected[67:]), "rows that are outside altogether"
    with pytest.raises(InputError, match="the value 256: its uint8 has 0 to 255"):
        open_labels(moved, like=scene, outside=256)
    far = write(tmp_path / "far.tif", values, transform=transform @ rasterio.Affine.translation(500, 0))
    with pytest.raises(InputError, match="so 90 columns and 0 rows have no label"):
        open_labels(far, like=scene, outside=255)
    zone = write(tmp_path / "zone.tif", values, crs="EPSG:32633")
    with pytest.raises(InputError, match="their coordinate systems differ"):
        open_labels(zone, like=scene)
    turned = write(tmp_path / "turned.tif", values, transform=transform @ rasterio.Affine.rotation(1))
    with pytest.raises(InputError, match="its rows are not parallel to those of the image"):
        open_labels(turned, like=scene)
    flat = Georeference(crs_wkt="", transform=(10.0, 10.0, 0.0, 10.0, 10.0, 0.0))
    with pytest.raises(InputError, match="has no inverse"):
        flat.pixels_of(flat)
    np.save(tmp_path / "plain.npy", values[..., 0])
    plain = open_labels(tmp_path / "plain.npy", like=scene)
    assert np.array_equal(labels_of(plain), values[..., 0]), "without map coordinates the sizes count"


def test_labels_of_several_files_are_a_mosaic(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    from tests.sources.readers.test_rasters import SENTINEL, write

    values = _map()
    right = SENTINEL["transform"] @ rasterio.Affine.translation(40, 0)
    paths = [write(tmp_path / "left.tif", values[:, :40, None]), write(tmp_path / "right.tif", values[:, 40:, None], transform=right)]
    scene = open_image(write(tmp_path / "scene.tif", np.zeros((70, 90, 2), np.uint16)))
    assert np.array_equal(labels_of(open_labels(paths, like=scene)), values)
    with pytest.raises(InputError, match="an empty list"):
        open_labels([])
