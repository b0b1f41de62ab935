"""Atomic writes: a file is complete or absent, also when the process fails while writing it.

The data go to a temporary file in the target's folder, are flushed to the disk, and the file is renamed onto the target. A failure leaves
the target unchanged and removes the temporary file; a crash leaves at most a file with a name that begins with ``.partial-``.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sft.common.errors import SourceError

__all__ = ["PARTIAL_MARK", "atomic_write", "fsync_file", "fsync_folder"]

#: How names of unfinished files begin.
PARTIAL_MARK = ".partial-"


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
        SourceError: it cannot be written; ``path`` is unchanged.
    """
    target = Path(path)
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
        raise refusal(f"cannot write {target}: {error.strerror or error}. {remedy}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


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
