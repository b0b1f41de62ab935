"""Files that are whole or not there, whatever happens while they are written.

Everything is written under another name beside its target, flushed to the disk, and renamed. A failure leaves the target as it was and
nothing else; a crash leaves at most a file whose name begins with ``.partial-``.
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
    """Yield a name beside ``path``; what the block writes there takes the place of ``path`` if the block succeeds.

    Args:
        path: the file.
        parents: whether to make its folder where there is none. Default: `False`
        refusal: what to raise; one that the block raises itself passes. Default: `SourceError`
        remedy: what to do about it.

    Raises:
        SourceError: it cannot be written; ``path`` is as it was.
    """
    target = Path(path)
    if not target.name:
        raise refusal(f"cannot write {os.fspath(path)!r}: it names no file. {remedy}")
    # A name of its own, as the target's may be as long as names can be; the suffix stays last, since image writers look at it.
    beside = target.with_name(f"{PARTIAL_MARK}{secrets.token_hex(8)}{target.suffix}")
    try:
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        fsync_file(beside)
        os.replace(beside, target)
        fsync_folder(target.parent)
    except OSError as error:
        if isinstance(error, refusal):
            raise
        raise refusal(f"cannot write {target}: {error.strerror or error}. {remedy}") from error
    finally:
        with suppress(OSError):
            beside.unlink()


def fsync_file(path: Path) -> None:
    """Flush a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
