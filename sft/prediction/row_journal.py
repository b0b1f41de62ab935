"""Journal of a prediction: the rows that are complete, in a file that an interrupted call leaves and the next call replays.

The format of a prediction decides in which order its file is written: a COG needs all rows before its overviews, a TIFF all tiles of a
level before the next. A half-written file can therefore not be continued in general. The rows can: they go to a journal before they go to
the writers. The next call gives the rows of the journal to new writers, of any format, and computes only the rows below them.

A journal is a header and records. The header names the identity of the prediction: network, weights, source and settings
(`sft.prediction.identity`). Each record has some rows, compressed, and a checksum. A process that is killed while it writes leaves an
incomplete last record, which is dropped. One process at a time has the journal.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sft.common.atomic_files import PARTIAL_MARK, LockedFile, as_path, folder_problem, lock_file, lock_holder
from sft.common.errors import InputError, SourceError
from sft.prediction.identity import sha256_of_text
from sft.prediction.raster import PredictedRaster, RasterRows

__all__ = ["RowJournal", "default_journal_path"]

_MAGIC = b"sft journal 1\n"
#: Rows, bytes of the compressed rows, and the checksum of both numbers and these bytes.
_RECORD = struct.Struct("<QQI")
_COMPRESSION_LEVEL = 1


class RowJournal:
    """Journal of one prediction.

    Args:
        path: of the journal; its folder exists.
        identity: of the prediction; a journal of another one is replaced.

    Attributes:
        num_rows: rows that it has.

    Raises:
        InputError: no file can have this path.
    """

    def __init__(self, path: str | os.PathLike[str], identity: str) -> None:
        purpose = "the journal of a prediction"
        self.path = as_path(path, purpose)
        if not self.path.parent.is_dir():
            raise InputError(f"{purpose}: {os.fspath(self.path.parent)!r} is not a folder; make it first")
        self._identity = identity
        self._file: LockedFile | None = None
        self.num_rows = 0

    def __repr__(self) -> str:
        return f"RowJournal({os.fspath(self.path)!r})"

    def open(self, raster: PredictedRaster) -> None:
        """Lock the journal, and drop what is not of this prediction or incomplete.

        Raises:
            SourceError: another process has it, or it cannot be written.
        """
        header = _header(self._identity, raster)
        try:
            self._file = lock_file(self.path, creates=True)
            self._offset = len(header)
            stored = self._file.read(len(header))
            self._shape = (raster.num_channels, raster.width_px)
            self._dtype, self._height_px = raster.dtype, raster.height_px
            if stored != header:
                self._file.seek(0)
                self._file.truncate()
                self._write(header)
            else:
                self.num_rows, end = self._complete_records()
                self._file.truncate(end)
                self._file.seek(end)
        except BlockingIOError as error:
            raise SourceError(
                f"cannot resume from {self.path}: {lock_holder(self.path)} writes this prediction. Wait for it, or name another journal."
            ) from error
        except OSError as error:
            raise self._refusal(error) from error

    def rows(self) -> Iterator[RasterRows]:
        """The rows of the earlier call, from the top; before the first `add`.

        Raises:
            SourceError: they cannot be read.
        """
        assert self._file is not None
        descriptor, offset, top = self._file.fileno(), self._offset, 0
        while top < self.num_rows:
            try:
                num_rows, num_bytes, _ = _RECORD.unpack(os.pread(descriptor, _RECORD.size, offset))
                data = zlib.decompress(os.pread(descriptor, num_bytes, offset + _RECORD.size))
            except (OSError, zlib.error, struct.error) as error:
                raise SourceError(f"cannot read {self.path}: {error}. Remove it to start from the first row.") from error
            yield self._unpacked(data, num_rows)
            offset += _RECORD.size + num_bytes
            top += num_rows

    def add(self, rows: RasterRows) -> None:
        """Append the next rows.

        Raises:
            SourceError: they cannot be written.
        """
        data = zlib.compress(np.ascontiguousarray(rows).tobytes(), _COMPRESSION_LEVEL)
        try:
            self._write(_RECORD.pack(rows.shape[1], len(data), _checksum(rows.shape[1], data)) + data)
        except OSError as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        """Release the journal for the next call; a journal without rows is removed."""
        file, self._file = self._file, None
        if file is not None:
            if file.tell() <= self._offset:
                self._unlink()
            file.close()

    def remove(self) -> None:
        """Remove the journal: the prediction is complete."""
        file, self._file = self._file, None
        if file is not None:
            self._unlink()
            file.close()

    def _unlink(self) -> None:
        with suppress(OSError):
            self.path.unlink()

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _complete_records(self) -> tuple[int, int]:
        """Rows of the complete records, and the end of the last one."""
        assert self._file is not None
        descriptor, offset, num_rows = self._file.fileno(), self._offset, 0
        size = os.fstat(descriptor).st_size
        while offset + _RECORD.size <= size:
            count, num_bytes, checksum = _RECORD.unpack(os.pread(descriptor, _RECORD.size, offset))
            end = offset + _RECORD.size + num_bytes
            if not count or end > size or num_rows + count > self._height_px:
                break
            if _checksum(count, os.pread(descriptor, num_bytes, offset + _RECORD.size)) != checksum:
                break
            offset, num_rows = end, num_rows + count
        return num_rows, offset

    def _unpacked(self, data: bytes, num_rows: int) -> RasterRows:
        channels, width_px = self._shape
        rows: RasterRows = np.frombuffer(data, self._dtype).reshape(channels, num_rows, width_px)
        return rows

    def _refusal(self, error: OSError) -> SourceError:
        reason = folder_problem(self.path.parent, error)
        return SourceError(
            error.errno, f"cannot write {self.path}: {reason}. Make room, name another journal with resume=, or leave resume out."
        )


def default_journal_path(path: Path) -> Path:
    """Path of the journal of a prediction whose first file has this path: next to it, and of any length of its name."""
    return path.with_name(f"{PARTIAL_MARK}{sha256_of_text(path.name)[:16]}.rows")


def _header(identity: str, raster: PredictedRaster) -> bytes:
    facts: dict[str, Any] = {
        "identity": identity,
        "shape": [raster.num_channels, raster.height_px, raster.width_px],
        "dtype": raster.dtype.str,
    }
    return _MAGIC + json.dumps(facts, sort_keys=True).encode() + b"\n"


def _checksum(num_rows: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(num_rows.to_bytes(8, "little") + len(data).to_bytes(8, "little")))
