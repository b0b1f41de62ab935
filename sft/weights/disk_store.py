"""Weights in a file: safetensors, memory-mapped for reading, replaced as a whole by each update.

What is promised, at every moment:

- The file at ``path`` is one whole generation: weights, optimizer state and metadata that belong together. A process that is killed, an
  exception, a full disk leave the last committed generation there; at most the step that was running is lost.
- With ``durable=True`` the same holds when the machine loses its power: a generation is on the disk before its name is, and its name before
  :meth:`DiskStore.commit` returns. Without, the last generations may be lost then, and only then.
- An unfinished generation is a file of the same name with ``.next`` behind it. Opening or creating the store removes it.
- The room for a generation is taken when it begins: a full disk says so before anything was computed.
- One process writes at a time: an unfinished generation is locked, and a file that somebody else has replaced since it was opened is not
  replaced in turn. What two processes train that were given one path does not get mixed.

The current generation is mapped privately: pages come in when they are read, are the system's to drop again at no cost, and never go back
to the file. The next one is written with plain writes at its records' places, and takes the other's name.

The format (:mod:`sft.weights.safetensors_header`) is that of safetensors. What that library does not offer is to write a tensor at a time
at its own place, so that is done here.

A file for streamed weights, as a wish.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sft.common.errors import InputError, SourceError
from sft.weights.record import ALIGNMENT_BYTES, RecordLayout, RecordPart
from sft.weights.safetensors_header import header_bytes, read_header
from sft.weights.store import record_offsets

__all__ = ["DiskStore", "WeightsFile", "check_resume"]

_MAX_HEADER_BYTES = 2**31


class DiskStore:
    """Records in a file. Made by :meth:`create` and :meth:`open`."""

    def __init__(self, path: Path, layouts: tuple[RecordLayout, ...], metadata: dict[str, str], data: Tensor, *, durable: bool) -> None:
        self.layouts, self.metadata, self.path, self.durable = layouts, metadata, path, durable
        self.generation = 0
        self._offsets = record_offsets(layouts)
        self._data = data
        self._identity: tuple[int, int] | None = None
        self._file: _SelfClosingFile | None = None
        self._start = 0
        self._written: set[tuple[int, str]] = set()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        layouts: Sequence[RecordLayout],
        fill: Callable[[int, dict[str, Tensor]], None],
        *,
        metadata: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> DiskStore:
        """Write a new file; an old one of that name is replaced when the new one is whole.

        Args:
            path: the file.
            layouts: of each block.
            fill: writes a block's tensors, given its number and views that hold zeros.
            metadata: text to keep with the weights.
            durable: whether each generation survives a loss of power.

        Raises:
            InputError: there are no blocks, or an element type has no name in the format.
            SourceError: the file cannot be written; an old one is as it was.
        """
        if not layouts:
            raise InputError("a store needs at least one block")
        target = Path(path)
        store = cls(target, tuple(layouts), {}, torch.empty(0, dtype=torch.uint8, device="cpu"), durable=durable)
        try:
            store.begin(metadata)
            for block, layout in enumerate(layouts):
                record = torch.zeros(layout.record_bytes, dtype=torch.uint8, device="cpu")
                fill(block, layout.views(record))
                store.write(block, record)
            store.commit(metadata)
        except BaseException:
            store.abort()
            raise
        store.generation = 0
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, durable: bool = True) -> DiskStore:
        """Open a file that :meth:`create` made.

        Raises:
            SourceError: it cannot be read, is cut short, or is not such a file.
        """
        target = Path(path)
        layouts, metadata, data, identity = _map_records(target)
        with (
            suppress(OSError),
            _open_locked(_next_generation_path(target), creates=False),
        ):  # not where somebody writes, or the folder is not ours
            _next_generation_path(target).unlink()
        store = cls(target, layouts, metadata, data, durable=durable)
        store._identity = identity
        return store

    @property
    def is_slow(self) -> bool:
        """Yes: the first read of a page waits for the disk."""
        return True

    def record(self, block: int) -> Tensor:
        """The bytes of a block in the current generation."""
        return self._data[self._offsets[block] : self._offsets[block + 1]]

    def all_records(self) -> Tensor:
        """The bytes of all blocks in the current generation."""
        return self._data

    def begin(self, metadata: Mapping[str, str] | None = None) -> None:
        """Start the next generation: a file beside this one, with room for all of it.

        Args:
            metadata: text as long as what :meth:`commit` will be given, or longer.

        Raises:
            InputError: it was started before.
            SourceError: there is no room, or no right to write; or another process writes to this file, or has.
        """
        if self._file is not None:
            raise InputError("the next generation of weights was started before; commit it or abort it first")
        path = _next_generation_path(self.path)
        try:
            self._file = _lock_after_gc(path)
            self._check_identity()
            self._file.truncate(0)
            self._start = len(header_bytes(self.layouts, metadata or self.metadata, room_bytes=0)) + _METADATA_ROOM_BYTES
            os.posix_fallocate(self._file.fileno(), 0, self._start + self._offsets[-1])
        except BlockingIOError as error:
            raise SourceError(f"another process, or another model of this one, writes weights to {self.path}; give each its own") from error
        except OSError as error:
            self.abort()
            raise _io_error("write", path, error) from error
        except BaseException:  # Ctrl-C
            self.abort()
            raise
        self._written = set()

    def write(self, block: int, data: Tensor, part: RecordPart = "all") -> None:
        """Write a block, or half of it, of the next generation.

        Raises:
            InputError: it was not started.
            SourceError: the disk refuses.
        """
        if self._file is None:
            raise InputError("weights are written to the next generation; begin it first")
        start, stop = self.layouts[block].span(part)
        held = data[: stop - start].cpu()
        # Not through NumPy, who forbids the storages that it has seen to be resized: those of streamed weights are emptied.
        place = (ctypes.c_ubyte * held.numel()).from_address(held.data_ptr())
        self._put(self._start + self._offsets[block] + start, memoryview(place).cast("B"))
        self._written.update((block, half) for half in ("weights", "state") if part in (half, "all"))

    def commit(self, metadata: Mapping[str, str] | None = None) -> None:
        """Give the next generation the name of the current one.

        Raises:
            InputError: it was not started, or the metadata has no room.
            SourceError: the disk refuses; the current generation stays.
        """
        if self._file is None:
            raise InputError("there is no next generation to commit; begin it first")
        kept = dict(metadata or {})
        header = header_bytes(self.layouts, kept, room_bytes=self._start)
        for block, layout in enumerate(self.layouts):
            for half in ("weights", "state"):
                if (block, half) not in self._written and layout.part_bytes("state" if half == "state" else "weights"):
                    part: RecordPart = "state" if half == "state" else "weights"
                    start, stop = layout.span(part)
                    self.write(block, self.record(block)[start:stop], part)
        self._put(0, memoryview(header))
        path = _next_generation_path(self.path)
        try:
            if self.durable:
                os.fsync(self._file.fileno())
            layouts, metadata_read, data, identity = _map_records(path)
            assert layouts == self.layouts
            try:
                os.replace(path, self.path)
            finally:  # Ctrl-C may come behind it
                if _identity_of(self.path) == identity:
                    self._data, self.metadata, self._identity = data, metadata_read, identity
                    self.generation += 1
                    self._let_go()
            if self.durable:
                _sync_folder(self.path.parent)
        except OSError as error:
            self.abort()
            raise _io_error("write", self.path, error) from error

    def abort(self) -> None:
        """Drop the next generation."""
        if self._file is None:
            return
        with suppress(OSError):
            _next_generation_path(self.path).unlink(missing_ok=True)
        self._let_go()

    def close(self) -> None:
        """Give the mapping back."""
        self.abort()
        self._data = self._data[:0].clone()

    def _let_go(self) -> None:
        """Close the next generation's file, and with it its lock."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _check_identity(self) -> None:
        """The file is the one that is mapped, or gone."""
        found = _identity_of(self.path)
        if found is not None and self._identity not in (None, found):
            self.abort()
            raise SourceError(
                f"{self.path} was replaced since its weights were read, by another process perhaps; it stays as it is. Give each "
                "process its own path, or read the file again with resume=True."
            )

    def _put(self, at: int, data: memoryview) -> None:
        assert self._file is not None
        try:
            while len(data):
                count = os.pwrite(self._file.fileno(), data, at)
                if not count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                data, at = data[count:], at + count
        except OSError as error:
            raise _io_error("write", _next_generation_path(self.path), error) from error


#: What a header's metadata may grow by while a generation is written.
_METADATA_ROOM_BYTES = 16 * ALIGNMENT_BYTES


def _next_generation_path(path: Path) -> Path:
    return path.with_name(path.name + ".next")


class _SelfClosingFile(io.FileIO):
    """A file that is closed when nobody holds it: not even Ctrl-C, which may come as it opens, leaves it locked."""

    def __del__(self) -> None:
        self.close()


def _open_or_create(path: Path, *, creates: bool) -> _SelfClosingFile:
    """A file to read and write; where there is none a new one."""
    while True:
        try:
            return _SelfClosingFile(path, "r+")
        except FileNotFoundError:
            if not creates:
                raise
        with suppress(FileExistsError):
            return _SelfClosingFile(path, "x+")


def _lock_after_gc(path: Path) -> _SelfClosingFile:
    """The same of a file that models may have which nobody uses: what their graphs of gradients hold is found behind them."""
    for _ in range(2):
        with suppress(BlockingIOError):
            return _open_locked(path, creates=True)
        gc.collect()
    return _open_locked(path, creates=True)


def _open_locked(path: Path, *, creates: bool) -> _SelfClosingFile:
    """The file, opened, and locked until it is closed.

    Raises:
        BlockingIOError: somebody else has it.
        OSError: it cannot be opened.
    """
    while True:
        file = _open_or_create(path, creates=creates)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()  # who had it before has given it its name, or removed it, since it was opened here


def _identity_of(path: Path) -> tuple[int, int] | None:
    """What tells a file from another of its name; none where there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _io_error(verb: str, path: Path, error: OSError) -> SourceError:
    remedy = "Make room, or give a path that can be written." if verb == "write" else "Give the path of a file that can be read."
    return SourceError(f"cannot {verb} weights at {path}: {error.strerror or error}. {remedy}")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _map_records(path: Path) -> tuple[tuple[RecordLayout, ...], dict[str, str], Tensor, tuple[int, int]]:
    """The layouts, the metadata and the mapped records of a file, and which one it is: its device and inode.

    Raises:
        SourceError: it cannot be read, is cut short, or is not such a file.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            num_bytes = found.st_size
            num_header_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or not 2 <= num_header_bytes <= min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise SourceError(f"{path} is no file of weights, or was cut short: {num_bytes} bytes, a header of {num_header_bytes}.")
            text = file.read(num_header_bytes)
        layouts, metadata = read_header(path, text)
        expected = 8 + num_header_bytes + record_offsets(layouts)[-1]
        if num_bytes != expected:
            raise SourceError(f"{path} has {num_bytes} bytes, and its header speaks of {expected}: it was cut short, or is another's.")
        # Private: what is written to these pages stays with this process. So nothing here can damage the file.
        data = np.memmap(path, dtype=np.uint8, mode="c", offset=8 + num_header_bytes)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise _io_error("read", path, error) from error
    return layouts, metadata, torch.from_numpy(data), (found.st_dev, found.st_ino)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """Where the weights of a compiled model are to be: ``Options(weights=sft.WeightsFile("vgg.safetensors"))``.

    Attributes:
        path: the file, which each update replaces as a whole; twice its size must have room there.
        resume: take the weights, and the optimizer's state, of an existing file instead of the model's. Without it a file that exists is
            refused, with it one that does not; `resume=path.exists()` goes on where there is something to go on with.
        durable: whether each generation survives a loss of power.

    Raises:
        InputError: it is no path, or there is no such folder.
    """

    path: str | os.PathLike[str]
    resume: bool = False
    durable: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path) or isinstance(os.fspath(self.path), bytes):
            raise InputError(f"weights file {self.path!r}: give the path of a file")
        folder = os.path.dirname(os.path.abspath(self.path))
        if not os.path.isdir(folder):
            raise InputError(f"weights file {os.fspath(self.path)!r}: there is no folder {folder!r}; make it first")


def check_resume(path: str | os.PathLike[str], *, resume: bool) -> None:
    """Nobody's weights are replaced, and nobody begins anew who wants to go on.

    Raises:
        InputError: the file exists and is not to be gone on with, or the other way round.
    """
    exists = os.path.exists(path)
    if exists and not resume:
        raise InputError(f"{os.fspath(path)} exists; give resume=True to go on with its weights, or another path")
    if resume and not exists:
        raise InputError(
            f"resume=True, but there is no file {os.fspath(path)} to go on with; give its path, or leave resume out to begin one"
        )
