"""Locks on files, one process at a time: released when the file is closed, with its last reference, and when the process dies.

A lock belongs to an open file (``flock``). Children of a fork share the open file, so the lock is released explicitly by the process that
took it; a child that only closes its copy does not release it.
"""

from __future__ import annotations

import fcntl
import gc
import io
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["LockedFile", "lock_file", "lock_holder"]


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
    """Open and lock a file. A file that unreachable objects of this process hold is released first.

    Args:
        path: the file.
        creates: True to create a missing file.

    Raises:
        BlockingIOError: another process, or an object of this one, holds the lock.
        OSError: the file cannot be opened.
    """
    with suppress(BlockingIOError):
        return _lock(path, creates=creates)
    gc.collect()  # reference cycles, such as autograd graphs, keep models alive
    return _lock(path, creates=creates)


def lock_holder(path: Path) -> str:
    """The holder of a file's lock, in words: the process id where the system tells it."""
    pid = None
    with suppress(OSError, ValueError):
        status = os.stat(path)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and place in fields:
                pid = int(fields[4])
    if pid == os.getpid():
        return "this process"
    return f"another process ({pid})" if pid is not None and pid > 0 else "another process"


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
