"""URLs: TIFF, Zarr and encoded images through fsspec, and servers that fail."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import Normalized, StripReader, TiffImage, ZarrImage, open_image
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


class _Server(ThreadingHTTPServer):
    """A server of one file, which closes connections half way from some byte on."""

    content: bytes = b""
    dies_at: int | None = None


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        content, wanted = self.server.content, self.headers.get("Range")
        first, last = 0, len(content) - 1
        if wanted:
            first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
            last = min(last, len(content) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        else:
            self.send_response(200)
        body = content[first : last + 1]
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        dies_at = self.server.dies_at
        if with_body:
            self.wfile.write(body if dies_at is None or last < dies_at else body[: max(0, dies_at - first)])
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_that_dies_half_way(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    pixels = numbers((200, 150, 3), "uint8")
    server = _Server(("127.0.0.1", 0), _Handler)
    server.content = write(tmp_path / "a.tif", pixels).read_bytes()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/a.tif"
        image = open_image(url)
        assert np.array_equal(image.read(0, 0, 150, 64), pixels[:64])
        server.dies_at = len(server.content) // 2
        with pytest.raises(SourceError, match=r"cannot read columns \[0, 150\) and rows \[0, 200\) of level 0 of http://127\.0\.0\.1"):
            image.read(0, 0, 150, 200)
        server.dies_at = None
        assert np.array_equal(image.read(0, 0, 150, 200), pixels), "a later read works again"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
