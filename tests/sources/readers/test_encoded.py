"""PNG, JPEG and JPEG 2000 as images: decoded once, within a host budget."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft import BudgetError, SourceError
from sft.sources import EncodedImage, Normalized, ReadCostWarning, open_image
from tests.sources.test_pixel_types import numbers, rows_of

imagecodecs = pytest.importorskip("imagecodecs")
pytest.importorskip("simplejpeg")
pillow = pytest.importorskip("PIL.Image")


def _png(mode: str, pixels: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    pillow.fromarray(pixels, mode).save(file, "PNG", **options) if mode != "P" else pillow.fromarray(pixels).quantize(7).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("kind", ["png", "jp2"])
def test_lossless_formats_hover_net_211(kind: str, dtype: str, channels: int, tmp_path: Path) -> None:
    """hover_net#211, openslide#283: slides as PNG."""
    pixels = numbers((40, 50, channels), dtype)
    encoded = pixels if channels > 1 else pixels[..., 0]
    data = imagecodecs.png_encode(encoded) if kind == "png" else imagecodecs.jpeg2k_encode(encoded, level=0, reversible=True)
    path = tmp_path / f"slide.{kind}"
    path.write_bytes(data)
    image: Any = open_image(path)
    assert isinstance(image, EncodedImage) and image.dtype == dtype and image.num_channels == channels
    assert f"decoded completely at its first read, into {40 * 50 * channels * image.dtype.itemsize / 1024:.2f} KiB" in image.cost_note
    assert np.array_equal(image.read(3, 5, 40, 30), pixels[5:35, 3:43])
    assert np.array_equal(pickle.loads(pickle.dumps(image)).read(0, 0, 50, 40), pixels)
    assert rows_of(Normalized(image), 5, 9).shape == (1, channels, 4, 50)


def test_jpeg_is_decoded_as_simplejpeg_does(tmp_path: Path) -> None:
    import simplejpeg

    pixels = numbers((40, 50, 3), "uint8")
    data = simplejpeg.encode_jpeg(pixels, quality=95)
    (tmp_path / "a.jpg").write_bytes(data)
    assert np.array_equal(open_image(tmp_path / "a.jpg").read(0, 0, 50, 40), simplejpeg.decode_jpeg(data))
    (tmp_path / "b.jpg").write_bytes(data[:600])
    with pytest.raises(SourceError, match=r"b\.jpg"):
        open_image(tmp_path / "b.jpg").read(0, 0, 50, 40)


def test_palettes_and_transparency(tmp_path: Path) -> None:
    pixels = numbers((40, 50, 4), "uint8")
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(pixels))
    alpha = pixels[..., 3:].astype(float)
    expected = np.floor((pixels[..., :3] * alpha + 255 * (255 - alpha)) / 255 + 0.5)
    image = open_image(tmp_path / "a.png")
    assert image.num_channels == 3 and np.abs(image.read(0, 0, 50, 40) - expected).max() <= 1
    (tmp_path / "p.png").write_bytes(_png("P", pixels[..., :3]))
    with pillow.open(tmp_path / "p.png") as opened:
        assert opened.mode == "P"
        assert np.array_equal(open_image(tmp_path / "p.png").read(0, 0, 50, 40), np.asarray(opened.convert("RGB")))


def test_a_host_budget_limits_decoded_bytes(tmp_path: Path) -> None:
    """Only the header is read before the refusal."""
    header = struct.pack(">IIBBBBB", 60_000, 50_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)))
    with pytest.raises(
        BudgetError, match=r"into 8\.38 GiB; the limit without a host budget is 1\.00 GiB.*host_budget_bytes=\"8584MiB\""
    ) as refused:
        open_image(tmp_path / "a.png")
    assert refused.value.needed_bytes == 60_000 * 50_000 * 3
    with pytest.raises(BudgetError, match=r"the host budget is 2\.00 GiB"):
        open_image(tmp_path / "a.png", host_budget_bytes="2GiB")


def test_large_decodes_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sft.sources.open.COSTLY_BYTES", 1000)
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(numbers((40, 50, 3), "uint8")))
    with pytest.warns(ReadCostWarning, match="a PNG image is decoded completely"):
        open_image(tmp_path / "a.png")


def _exif(orientation: int) -> bytes:
    body = b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("turned.jpg", r"stored turned \(orientation 6 of its EXIF data\)"),
        ("cmyk.jpg", "a JPEG of 4 channels of 8 bits"),
        ("head.jpg", "header is cut short"),
        ("markers.jpg", "JPEG markers are damaged"),
        ("head.jp2", "codestream is missing"),
        ("size.png", r"size\.png"),
        ("data.png", r"data\.png"),
    ],
)
def test_unsupported_files_are_refused(name: str, message: str, tmp_path: Path) -> None:
    import simplejpeg

    pixels = numbers((40, 50, 3), "uint8")
    jpeg, png = simplejpeg.encode_jpeg(pixels), imagecodecs.png_encode(pixels)
    cmyk = io.BytesIO()
    pillow.new("CMYK", (50, 40)).save(cmyk, "JPEG")
    data = {
        "turned.jpg": jpeg[:2] + _exif(6) + jpeg[2:],
        "cmyk.jpg": cmyk.getvalue(),
        "head.jpg": jpeg[:30],
        "markers.jpg": jpeg[:20] + b"\0\0\0\0" + jpeg[24:],
        "head.jp2": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100),
        "size.png": png[:16] + struct.pack(">I", 51) + png[20:],
        "data.png": png[: len(png) // 2],
    }[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SourceError, match=message):
        open_image(tmp_path / name).read(0, 0, 50, 40)
    upright = tmp_path / "upright.jpg"
    upright.write_bytes(jpeg[:2] + _exif(1) + jpeg[2:])
    assert open_image(upright).read(0, 0, 50, 40).shape == (40, 50, 3)
