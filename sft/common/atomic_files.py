"""Files that processes share: atomic writes, and locks.

*Atomic writes.* A file is complete or absent, also when the process fails while writing it.

The data go to a temporary file in the target's folder, are flushed to the disk, and the file is renamed onto the target. A failure leaves
the target unchanged and removes the temporary file; a crash leaves at most a file with a name that begins with ``.partial-``.

*Locks.* One process at a time has the lock of a file (``flock``). It is released when the file is closed, with its last reference, and when
the process dies. Children of a fork share the open file, so the lock is released explicitly by the process that took it; a child that only
closes its copy does not release it.
"""

from __future__ import annotations

import fcntl
import gc
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeGuard

from sft.common.errors import InputError, InputTypeError, SourceError, typed

__all__ = [
    "PARTIAL_MARK",
    "LockedFile",
    "as_path",
    "atomic_write",
    "folder_problem",
    "fsync_file",
    "fsync_folder",
    "is_text_path",
    "lock_file",
    "lock_holder",
]

#: How names of unfinished files begin.
PARTIAL_MARK = ".partial-"


def is_text_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """True for a text or a path object, and not for bytes or a file descriptor."""
    return isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str)


def as_path(value: object, purpose: str) -> Path:
    """The path that a caller gave for a file or folder.

    >>> as_path("plans/step.png", "the plot").name
    'step.png'

    Args:
        value: a text or a path object.
        purpose: what it is the path of, for the error message.

    Raises:
        InputError: it is not a path, empty, or has a zero byte, which no name of a file has.
    """
    if not is_text_path(value):
        raise InputTypeError(f"{purpose}: its path is {value!r}, {typed(value)}; give a text or a pathlib.Path")
    text = os.fspath(value)
    if not text or "\0" in text:
        raise InputError(f"{purpose}: no file can have the path {text!r}; give one that is not empty, without zero bytes")
    return Path(text)


@contextmanager
def atomic_write(
    path: str | os.PathLike[str],
    *,
    parents: bool = False,
    refusal: type[SourceError] = SourceError,
    remedy: str = "Make room, or name a file in a folder that can be written.",
) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; the file that the block writes to it replaces ``path`` if the block succeeds.

    Args:
        path: the file.
        parents: whether to create missing parent folders. Default: `False`
        refusal: class of the error to raise; an error of this class that the block raises passes unchanged. Default: `SourceError`
        remedy: last sentence of the error message.

    Raises:
        InputError: it is not a path.
        SourceError: it cannot be written; ``path`` is unchanged.
    """
    target = as_path(path, "a file to write")
    if not target.name:
        raise refusal(f"cannot write {os.fspath(path)!r}: it names no file. {remedy}")
    # The name does not extend the target's, which may have the maximal length; the suffix stays last, since image writers read it.
    partial = target.with_name(f"{PARTIAL_MARK}{secrets.token_hex(8)}{target.suffix}")
    try:
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        fsync_file(partial)
        os.replace(partial, target)
        fsync_folder(target.parent)
    except OSError as error:
        if isinstance(error, refusal):
            raise
        raise refusal(f"cannot write {target}: {folder_problem(target.parent, error)}. {remedy}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def folder_problem(folder: Path, error: OSError) -> str:
    """Reason of a failure to write into a folder: for a folder that cannot be made, the file in its place."""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
        if file is not None:
            return f"{file} is a file, not a folder"
    return str(error.strerror or error)


def fsync_file(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Make renames inside a folder durable across a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LockedFile(io.FileIO):
    """An open file with an exclusive lock. Not even Ctrl-C while it is opened leaves it locked."""

    def __init__(self, path: Path, mode: str) -> None:
        self._owner_pid = os.getpid()
        super().__init__(path, mode)
        try:
            fcntl.flock(self, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        """Release the lock and close the file."""
        if not self.closed and os.getpid() == self._owner_pid:
            with suppress(OSError):
                fcntl.flock(self, fcntl.LOCK_UN)
        super().close()

    def __del__(self) -> None:
        self.close()


def lock_file(path: Path, *, creates: bool) -> LockedFile:
    """Open and lock a file. Locks of unreachable objects of this process are released first.

    Args:
        path: the file.
        creates: True to create a missing file.

    Raises:
        BlockingIOError: another process, or an object of this one, holds the lock.
        OSError: the file cannot be opened.
    """
    try:
        return _lock(path, creates=creates)
    except BlockingIOError:
        if _holder_pid(path) not in (0, os.getpid()):
            raise
    gc.collect()  # reference cycles, such as autograd graphs, keep models alive
    return _lock(path, creates=creates)


def lock_holder(path: Path) -> str:
    """The holder of a file's lock, as text: the process id where the system provides it."""
    pid = _holder_pid(path)
    if pid == os.getpid():
        return "this process"
    return f"another process ({pid})" if pid else "another process"


def _holder_pid(path: Path) -> int:
    """The process that holds a file's lock; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        status = os.stat(path)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and place in fields:
                return max(int(fields[4]), 0)  # -1: of a process outside of this container
    return 0


def _lock(path: Path, *, creates: bool) -> LockedFile:
    while True:
        file = _open(path, creates=creates)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # the former holder of the lock has renamed or removed it since it was opened here


def _open(path: Path, *, creates: bool) -> LockedFile:
    while True:
        try:
            return LockedFile(path, "r+")
        except FileNotFoundError:
            if not creates:
                raise
        except PermissionError:
            if creates:
                raise
            return LockedFile(path, "r")  # a file that cannot be written can be replaced
        with suppress(FileExistsError):
            return LockedFile(path, "x+")
