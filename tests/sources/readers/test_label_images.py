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
from sft.sources import ArrayImage, ImageLabels, open_labels

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


def _grey_png(path: Path, width: int, height: int, value: int = 0) -> Path:
    """A PNG of one value, written without its pixels in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    compressor = zlib.compressobj(1)
    row = bytes([0]) + bytes([value]) * width
    body = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
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
        ("float.npy", r"pixels are uint8.*bool"),
        ("float.tif", "it holds float32, labels are integers"),
        ("two.tif", "2 images of 40 x 30 px"),
        ("two.gif", "2 images of 90 x 70 px"),
    ],
)
def test_what_is_no_label_map(name: str, message: str, tmp_path: Path) -> None:
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
