"""Remote files: URLs as paths, read in ranges of bytes through fsspec (extra ``remote``).

`sft.sources.open_image` takes URLs of http(s), s3, gs and the other file systems of fsspec, for TIFF, Zarr and encoded images. The
compressed tiles of a rectangle are fetched in one call, concurrently where the file system can; neighbours in the file are joined. Rows are
read ahead of the computation by `sft.sources.StripReader`, as from a disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft.common.errors import InputError, SftError, SourceError, reason_text
from sft.sources.image import missing_extra

__all__ = ["RemotePath", "joined_ranges", "naming_remote_errors", "remote_path", "source_path"]

#: Ranges of bytes with a gap up to this are fetched as one.
_MAX_GAP_BYTES = 1 << 16
_MAX_REQUEST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Size:
    st_size: int


class RemotePath:
    """URL with those methods of ``pathlib.Path`` that readers use. It pickles; each process opens its own file system.

    Args:
        url: such as ``"https://host/slide.tif"`` or ``"s3://bucket/image.zarr"``.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}" if name else self.url)

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Extension of the last component, with its dot."""
        return Path(self.name).suffix

    def _system(self) -> tuple[Any, str]:
        """File system and the path in it. fsspec keeps one instance for each process."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise missing_extra(f"open {self}", "remote", error) from error
        try:
            system, path = url_to_fs(self.url)
        except ImportError as error:
            raise SourceError(f"cannot open {self}: fsspec lacks a package for it ({error}). Install that package.") from error
        except ValueError as error:
            raise InputError(f"cannot open {self}: {reason_text(error)}. Give a URL that fsspec knows, or a path.") from error
        return system, path

    def exists(self) -> bool:
        """True if the file or folder exists."""
        system, path = self._system()
        return bool(system.exists(path))

    def is_file(self) -> bool:
        """True for a file."""
        system, path = self._system()
        return bool(system.isfile(path))

    def is_dir(self) -> bool:
        """True for a folder, as far as the file system has folders."""
        system, path = self._system()
        return bool(system.isdir(path))

    def stat(self) -> _Size:
        """Size of the file.

        Raises:
            OSError: it does not exist, or the server states no size.
        """
        system, path = self._system()
        size = system.info(path).get("size")
        if size is None:
            raise OSError(f"the server of {self} states no size")
        return _Size(int(size))

    def open(self, mode: str = "rb") -> Any:
        """Open the file for reading, with random access."""
        system, path = self._system()
        return system.open(path, mode)

    def read_range(self, offset: int, num_bytes: int) -> bytes:
        """Bytes of the file."""
        system, path = self._system()
        return bytes(system.cat_file(path, start=offset, end=offset + num_bytes))

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of several ranges, each (offset, number of bytes), sorted by their offsets, in one call.

        Raises:
            OSError: one of them cannot be read.
        """
        system, path = self._system()
        groups = joined_ranges(ranges)
        starts, ends = [first for first, _, _ in groups], [stop for _, stop, _ in groups]
        pieces = system.cat_ranges([path] * len(groups), starts, ends, on_error="raise")
        results: list[bytes] = []
        for (first, _, count), data in zip(groups, pieces, strict=True):
            for offset, size in ranges[len(results) : len(results) + count]:
                results.append(bytes(data[offset - first : offset - first + size]))
        return results


def joined_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Requests for sorted ranges (offset, number of bytes), neighbours joined: (start, stop, number of ranges).

    >>> joined_ranges([(0, 10), (20, 5), (900_000, 7)])
    [(0, 25, 2), (900000, 900007, 1)]
    """
    groups: list[tuple[int, int, int]] = []
    for offset, size in ranges:
        if groups and offset - groups[-1][1] <= _MAX_GAP_BYTES and offset + size - groups[-1][0] <= _MAX_REQUEST_BYTES:
            first, stop, count = groups[-1]
            groups[-1] = first, max(stop, offset + size), count + 1
        else:
            groups.append((offset, offset + size, 1))
    return groups


@contextmanager
def naming_remote_errors(path: object) -> Iterator[None]:
    """Context in which errors of a file system, of any class, become source errors that name the URL; a local path has its own errors.

    Raises:
        SourceError: the server fails.
    """
    try:
        yield
    except SftError:
        raise
    except Exception as error:  # of aiohttp, botocore and others, without a common base
        if not isinstance(path, RemotePath):
            raise
        raise SourceError(
            f"cannot open {path}: {type(error).__name__}: {reason_text(error)}. Try again, check the server and the URL, or "
            f"copy the file to a disk."
        ) from error


def remote_path(path: object) -> RemotePath | None:
    """The path if it is remote, otherwise None."""
    return path if isinstance(path, RemotePath) else None


def source_path(path: Any) -> Any:
    """Path of a file, or a `RemotePath` for a URL."""
    return RemotePath(path) if isinstance(path, str) and "://" in path else path if isinstance(path, RemotePath) else Path(path)
