"""A store of weights in a safetensors file, memory-mapped for reading and replaced atomically by each update.

Guarantees, at every moment:

- The file at ``path`` is one complete generation: weights, optimizer state and metadata that belong together. A killed process, an
  exception or a full disk leave the last committed generation; at most the running step is lost.
- With ``durable=True`` the same holds after a loss of power: a generation is on the disk before its name is, and its name before
  :meth:`DiskStore.commit` returns. Without it, a loss of power (only) may lose the last generations.
- An unfinished generation is a file of the same name with the suffix ``.next``. Opening or creating the store removes it.
- The space for a generation is reserved when it begins: a full disk is reported before any computation.
- One store writes to a path, for its life: the file is locked from the moment at which a store that writes opens or creates it until that
  store is closed, collected, or its process dies. A second one is refused when it opens the file, before it has computed anything. Each
  generation is locked before it takes the place of the last one. Other programs can replace the file; it is not replaced in turn then.
- Readers take no lock: a store that only reads keeps the generation that it has opened.

The current generation is mapped privately: pages are read on first access, the system may drop them at no cost, and writes to them never
reach the file. The next generation is written with plain writes at the offsets of its records, then renamed.

The format is that of safetensors (:mod:`sft.weights.safetensors_header`). That library cannot write a single tensor at its offset, so it is
not used for writing.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sft.common.atomic_files import LockedFile, as_path, fsync_folder, lock_file, lock_holder
from sft.common.errors import InputError, SourceError
from sft.weights.record import ALIGNMENT_BYTES, RecordLayout, RecordPart
from sft.weights.safetensors_header import header_bytes, read_header
from sft.weights.store import Store, record_offsets

__all__ = ["DiskStore", "WeightsFile", "check_resume"]

_MAX_HEADER_BYTES = 2**31


class DiskStore:
    """A store of records in a file. Made by :meth:`create` and :meth:`open`."""

    def __init__(self, path: Path, layouts: tuple[RecordLayout, ...], metadata: dict[str, str], data: Tensor, *, durable: bool) -> None:
        self.layouts, self.metadata, self.path, self.durable = layouts, metadata, path, durable
        self.generation = 0
        self._offsets = record_offsets(layouts)
        self._data = data
        self._identity: tuple[int, int] | None = None
        self._file: LockedFile | None = None
        self._lock: LockedFile | None = None  # of the current generation
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
        replaces: Store | None = None,
    ) -> DiskStore:
        """Write a new file; it replaces an old one of that name when it is complete. The file stays locked for the life of the store.

        Args:
            path: the file.
            layouts: layout of each block.
            fill: writes the tensors of a block, given its number and zero-initialised views.
            metadata: text to keep with the weights.
            durable: whether each generation survives a loss of power.
            replaces: the store of the same file that this one replaces, and whose lock it takes over. Default: `None`

        Raises:
            InputError: no blocks are given, or an element type has no name in the format.
            SourceError: the file cannot be written, or another store writes to it; an old one is unchanged.
        """
        if not layouts:
            raise InputError("a store needs at least one block")
        file_path = Path(path)
        store = cls(file_path, tuple(layouts), {}, torch.empty(0, dtype=torch.uint8, device="cpu"), durable=durable)
        if isinstance(replaces, DiskStore):
            store._lock = replaces._lock
        try:
            store.begin(metadata)
            for block, layout in enumerate(layouts):
                record = torch.zeros(layout.record_bytes, dtype=torch.uint8, device="cpu")
                fill(block, layout.views(record))
                store.write(block, record)
            store.commit(metadata)
        except BaseException:
            store.abort()
            store._lock = None  # and not closed: it may be the replaced store's
            raise
        store.generation = 0
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, durable: bool = True) -> DiskStore:
        """Open a file that :meth:`create` made, for reading until :meth:`reserve` or :meth:`begin`.

        Raises:
            SourceError: it cannot be read, is truncated, or is not such a file.
        """
        file_path = Path(path)
        layouts, metadata, data, identity = _map_records(file_path)
        with (
            suppress(OSError),
            lock_file(_next_generation_path(file_path), creates=False),
        ):  # not if another process writes to it, or the folder is read-only
            _next_generation_path(file_path).unlink()
        store = cls(file_path, layouts, metadata, data, durable=durable)
        store._identity = identity
        return store

    def reserve(self) -> None:
        """Lock the file for the life of the store, against all other stores that write.

        Raises:
            SourceError: another store has the lock, or the file was replaced since it was opened.
        """
        if self._lock is None:
            self._lock = _lock_current(self.path)
        self._check_identity()

    @property
    def is_slow(self) -> bool:
        """True: the first read of a page waits for the disk."""
        return True

    def record(self, block: int) -> Tensor:
        """Bytes of a block in the current generation."""
        return self._data[self._offsets[block] : self._offsets[block + 1]]

    def all_records(self) -> Tensor:
        """Bytes of all blocks in the current generation."""
        return self._data

    def begin(self, metadata: Mapping[str, str] | None = None) -> None:
        """Start the next generation: a file in the same folder, with all of its space reserved.

        Args:
            metadata: text at least as long as the metadata of :meth:`commit`.

        Raises:
            InputError: it was started before.
            SourceError: no space, no permission, or another process writes to this file or has replaced it.
        """
        if self._file is not None:
            raise InputError("the next generation of weights was started before; commit it or abort it first")
        path = _next_generation_path(self.path)
        self.reserve()
        try:
            self._file = lock_file(path, creates=True)
            self._file.truncate(0)
            self._start = len(header_bytes(self.layouts, metadata or self.metadata, room_bytes=0)) + _METADATA_SLACK_BYTES
            os.posix_fallocate(self._file.fileno(), 0, self._start + self._offsets[-1])
        except BlockingIOError as error:
            raise _in_use(self.path, path) from error
        except OSError as error:
            self.abort()
            raise _io_error("write", path, error) from error
        except BaseException:  # Ctrl-C
            self.abort()
            raise
        self._written = set()

    def write(self, block: int, data: Tensor, part: RecordPart = "all") -> None:
        """Write a block, or one part of its record, of the next generation.

        Raises:
            InputError: it was not started.
            SourceError: the write fails.
        """
        if self._file is None:
            raise InputError("weights are written to the next generation; begin it first")
        start, stop = self.layouts[block].span(part)
        host_data = data[: stop - start].cpu()
        # Not through NumPy, which forbids resizing a storage that it has exported: storages of streamed weights are emptied.
        buffer = (ctypes.c_ubyte * host_data.numel()).from_address(host_data.data_ptr())
        self._write_at(self._start + self._offsets[block] + start, memoryview(buffer).cast("B"))
        self._written.update((block, half) for half in ("weights", "state") if part in (half, "all"))

    def commit(self, metadata: Mapping[str, str] | None = None) -> None:
        """Rename the next generation onto the current one.

        Raises:
            InputError: it was not started, or the metadata exceeds the reserved space.
            SourceError: the write fails; the current generation stays.
        """
        if self._file is None:
            raise InputError("there is no next generation to commit; begin it first")
        stored_metadata = dict(metadata or {})
        header = header_bytes(self.layouts, stored_metadata, room_bytes=self._start)
        for block, layout in enumerate(self.layouts):
            for half in ("weights", "state"):
                if (block, half) not in self._written and layout.part_bytes("state" if half == "state" else "weights"):
                    part: RecordPart = "state" if half == "state" else "weights"
                    start, stop = layout.span(part)
                    self.write(block, self.record(block)[start:stop], part)
        self._write_at(0, memoryview(header))
        path = _next_generation_path(self.path)
        try:
            if self.durable:
                os.fsync(self._file.fileno())
            layouts, file_metadata, data, identity = _map_records(path)
            assert layouts == self.layouts
            try:
                os.replace(path, self.path)
            finally:  # Ctrl-C may arrive right after the rename
                if _identity_of(self.path) == identity:
                    self._data, self.metadata, self._identity = data, file_metadata, identity
                    self.generation += 1
                    self._lock, self._file = self._file, None
            if self.durable:
                fsync_folder(self.path.parent)
        except OSError as error:
            self.abort()
            raise _io_error("write", self.path, error) from error

    def abort(self) -> None:
        """Discard the next generation."""
        if self._file is None:
            return
        with suppress(OSError):
            _next_generation_path(self.path).unlink(missing_ok=True)
        self._close_next()

    def close(self) -> None:
        """Discard the next generation, and release the mapping and the lock."""
        self.abort()
        if self._lock is not None:
            self._lock.close()
        self._lock = None
        self._data = self._data[:0].clone()

    def _close_next(self) -> None:
        """Close the file of the next generation, which releases its lock."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _check_identity(self) -> None:
        """Check that the file is still the mapped one, or absent."""
        identity = _identity_of(self.path)
        if identity is not None and self._identity not in (None, identity):
            self.abort()
            raise SourceError(
                f"{self.path} was replaced after its weights were read, possibly by another process; it is unchanged. Give each "
                "process its own path, or read the file again with resume=True."
            )

    def _write_at(self, at: int, data: memoryview) -> None:
        assert self._file is not None
        try:
            while len(data):
                count = os.pwrite(self._file.fileno(), data, at)
                if not count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                data, at = data[count:], at + count
        except OSError as error:
            raise _io_error("write", _next_generation_path(self.path), error) from error


#: Bytes by which a header's metadata may grow while a generation is written.
_METADATA_SLACK_BYTES = 16 * ALIGNMENT_BYTES


def _next_generation_path(path: Path) -> Path:
    return path.with_name(path.name + ".next")


def _lock_current(path: Path) -> LockedFile | None:
    """The lock of the current generation; ``None`` without a file.

    Raises:
        SourceError: another store that writes to it has the lock.
    """
    try:
        return lock_file(path, creates=False)
    except FileNotFoundError:
        return None
    except BlockingIOError as error:
        raise _in_use(path, path) from error
    except OSError as error:
        raise _io_error("read", path, error) from error


def _in_use(path: Path, locked: Path) -> SourceError:
    holder = lock_holder(locked)
    owner = "another model of this process" if holder == "this process" else holder
    return SourceError(f"the weights file {path} is in use: {owner} writes to it. Wait for it or close it, or give each its own path.")


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file, which distinguish it from a successor of the same name; ``None`` without a file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _io_error(verb: str, path: Path, error: OSError) -> SourceError:
    remedy = "Make room, or give a path that can be written." if verb == "write" else "Give the path of a file that can be read."
    return SourceError(f"cannot {verb} weights at {path}: {error.strerror or error}. {remedy}")


def _map_records(path: Path) -> tuple[tuple[RecordLayout, ...], dict[str, str], Tensor, tuple[int, int]]:
    """The layouts, metadata and mapped records of a file, with its device and inode.

    Raises:
        SourceError: it cannot be read, is truncated, or is not such a file.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            num_bytes = status.st_size
            num_header_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or not 2 <= num_header_bytes <= min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise SourceError(f"{path} is not a file of weights, or was cut short: {num_bytes} bytes, a header of {num_header_bytes}.")
            text = file.read(num_header_bytes)
        layouts, metadata = read_header(path, text)
        expected = 8 + num_header_bytes + record_offsets(layouts)[-1]
        if num_bytes != expected:
            raise SourceError(f"{path} has {num_bytes} bytes, and its header states {expected}: it was cut short, or is another file.")
        # A private mapping: writes to its pages stay in this process and cannot damage the file.
        data = np.memmap(path, dtype=np.uint8, mode="c", offset=8 + num_header_bytes)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise _io_error("read", path, error) from error
    return layouts, metadata, torch.from_numpy(data), (status.st_dev, status.st_ino)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file for the streamed weights of a compiled model: ``Options(weights=sft.WeightsFile("vgg.safetensors"))``.

    Attributes:
        path: the file, which each update replaces atomically; the disk needs space for two of them.
        resume: load the weights and the optimizer's state of an existing file instead of the model's. Without it an existing file is
            refused, with it a missing one; `resume=path.exists()` resumes if possible.
        durable: whether each generation survives a loss of power.

    Raises:
        InputError: it is not a path, or its folder does not exist.
    """

    path: str | os.PathLike[str]
    resume: bool = False
    durable: bool = True

    def __post_init__(self) -> None:
        folder = os.path.dirname(os.path.abspath(as_path(self.path, "the weights file")))
        if not os.path.isdir(folder):
            raise InputError(f"weights file {os.fspath(self.path)!r}: there is no folder {folder!r}; make it first")


def check_resume(path: str | os.PathLike[str], *, resume: bool) -> None:
    """Check that no file is overwritten by accident, and that no run starts from new weights by accident.

    Raises:
        InputError: the file exists without ``resume``, or is missing with it.
    """
    exists = os.path.exists(path)
    if exists and not resume:
        raise InputError(f"{os.fspath(path)} exists; give resume=True to load its weights, or another path")
    if resume and not exists:
        raise InputError(
            f"resume=True, but there is no file {os.fspath(path)} to resume from; give its path, or leave resume out to create one"
        )
