"""A local HTTP server of a folder, with ranges of bytes, listings, and injected faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

__all__ = ["FileServer", "serve_folder"]


class FileServer(ThreadingHTTPServer):
    """Server of a folder.

    Attributes:
        folder: the folder.
        dies_at: byte of a file from which on answers break off; ``None`` for never.
        status: status of every answer; ``None`` for the true one.
        sends_ranges: False to send the full file for a range.
        sends_length: False to leave the length out.
    """

    folder: Path
    dies_at: int | None = None
    status: int | None = None
    sends_ranges = True
    sends_length = True

    def url(self, name: str) -> str:
        """URL of a file."""
        return f"http://127.0.0.1:{self.server_port}/{name}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        server, self.close_connection = self.server, True
        path = server.folder / unquote(self.path).strip("/")
        if server.status is not None or not path.exists():
            self.send_error(server.status or 404)
            return
        if path.is_dir():
            links = "".join(f'<a href="{entry.name}{"/" if entry.is_dir() else ""}">x</a>' for entry in sorted(path.iterdir()))
            content = f"<html><body>{links}</body></html>".encode()
        else:
            content = path.read_bytes()
        wanted = self.headers.get("Range") if server.sends_ranges and path.is_file() else None
        first, last = 0, len(content) - 1
        if wanted:
            start, _, stop = wanted.removeprefix("bytes=").partition("-")
            first, last = (int(start), min(int(stop), last) if stop else last) if start else (len(content) - int(stop), last)
        if first > last and content:
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        if server.sends_ranges:
            self.send_header("Accept-Ranges", "bytes")
        body = content[first : last + 1]
        if server.sends_length:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "text/html" if path.is_dir() else "application/octet-stream")
        self.end_headers()
        dies_at = server.dies_at
        if with_body:
            self.wfile.write(body if dies_at is None or last < dies_at else body[: max(0, dies_at - first)])

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve_folder(folder: Path) -> Iterator[FileServer]:
    """A running server of a folder."""
    server = FileServer(("127.0.0.1", 0), _Handler)
    server.folder = folder
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
