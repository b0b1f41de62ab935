"""Base class of image files: metadata, handles of each process, and errors that name the file and the place.

`FileImage` keeps the promises that are easy to break:

- *Only the path is state.* A reader pickles, survives ``fork`` (each process opens its own handle at its first read), and may be read from
  several threads: a read holds a reference to its handle, and closing the reader only drops another one.
- *Every failure is a* ``SourceError`` *that names the file and the place.*

Some files are decoded in large units: full images (PNG, JPEG), compressed strips, large tiles. `check_decode_bytes` limits their memory.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from sft.common.byte_units import format_bytes, parse_bytes
from sft.common.errors import BudgetError, SftError, SourceError, reason_text
from sft.sources.georeference import Georeference
from sft.sources.image import ImageFacts, LevelledImage, Pixels, Rectangle, Size
from sft.sources.readers.remote import source_path

__all__ = ["COSTLY_BYTES", "DEFAULT_DECODE_BYTES", "DecodedFile", "FileImage", "ReadCostWarning", "check_decode_bytes"]

#: Units of more bytes than this are warned of.
COSTLY_BYTES = 64 << 20
#: Limit of a unit without a budget of the caller.
DEFAULT_DECODE_BYTES = 1 << 30
Handle = TypeVar("Handle")
Result = TypeVar("Result")


class FileImage(LevelledImage, Generic[Handle]):
    """A file as a `Raster`. A reader implements opening, metadata, and reads of rectangles.

    Args:
        path: of the file (of some formats: the folder), or a URL, for readers that take one.

    Raises:
        SourceError: the file does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = source_path(path)
        self._facts: ImageFacts | None = None
        # The process that opened the handle, and the handle: one attribute, so that threads see both or neither. No lock: it could be
        # inherited, held forever, by a process forked at the wrong moment.
        self._opened: tuple[int, Handle] | None = None
        if not self.path.exists():
            raise SourceError(f"cannot open {self.path}: there is no such file. Check the path.")

    @abstractmethod
    def _open(self) -> Handle:
        """A new handle, closed with its last reference."""

    @abstractmethod
    def _describe(self, handle: Handle) -> ImageFacts:
        """Read the metadata of the file."""

    @abstractmethod
    def _read(self, handle: Handle, rectangle: Rectangle) -> Pixels:
        """A rectangle inside the level, into a new array."""

    def _read_channels(self, handle: Handle, rectangle: Rectangle, channels: Sequence[int]) -> Pixels:
        """Some channels of a rectangle inside the level; readers whose channels are stored apart read only these."""
        return np.ascontiguousarray(self._read(handle, rectangle)[..., list(channels)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def close(self) -> None:
        """Let go of the file; a later read opens it again."""
        self._opened = None

    @property
    def facts(self) -> ImageFacts:
        """Metadata of the file.

        Raises:
            SourceError: it cannot be opened.
        """
        if self._facts is None:
            facts = self._guarded(lambda: self._describe(self._handle()), f"open {self.path}")
            if min(map(min, facts.level_dimensions)) < 1:
                width, height = facts.level_dimensions[0]
                raise SourceError(f"cannot use {self.path} as an image: it has {width} x {height} px. Give an image with pixels.")
            self._facts = facts
        return self._facts

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of each level, in px."""
        return self.facts.level_dimensions

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """Px of level 0 per px of each level. Not powers of two in general."""
        return self.facts.level_downsamples

    @property
    def num_channels(self) -> int:
        """Numbers of a pixel."""
        return self.facts.num_channels

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px, (x, y); None if the file does not state it."""
        return self.facts.mpp

    @property
    def mpp_note(self) -> str:
        """Reason against a resolution that the file states; empty if it states a credible one, or none."""
        return self.facts.mpp_note

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the pixels."""
        return np.dtype(self.facts.dtype)

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the channels; empty where the file has none."""
        return self.facts.channel_names

    @property
    def cost_note(self) -> str:
        """Cost of a read, where a file is decoded in larger units than its pixels; empty otherwise."""
        return self.facts.cost_note

    @property
    def background(self) -> tuple[Any, ...]:
        """Colour of pixels that are not stored: missing tiles of a TIFF, missing chunks of a Zarr array."""
        return self.facts.background

    @property
    def nodata(self) -> float | None:
        """Value of pixels without data, as the file has it (``GDAL_NODATA``); None where it has none."""
        return self.facts.nodata

    @property
    def georeference(self) -> Georeference | None:
        """Coordinate system and transform of level 0; None where the file has none."""
        return self.facts.georeference

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """(width, height) of a compressed tile of each level."""
        return self.facts.tiles_px

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Read the rectangle of `w` x `h` pixels with its top left corner at column `x`, row `y` of `level`.

        Returns:
            Array of shape ``[h, w, num_channels]`` and type `dtype`.

        Raises:
            InputError: the level does not exist or the rectangle is not inside it.
            SourceError: the file cannot be read there.
        """
        return self._read_guarded(self._read, self._rectangle(x, y, w, h, level))

    def read_channels(self, x: int, y: int, w: int, h: int, level: int, channels: Sequence[int]) -> Pixels:
        """Read a rectangle of some channels, by their numbers.

        Raises:
            InputError: the level does not exist or the rectangle is not inside it.
            SourceError: the file cannot be read there.
        """
        return self._read_guarded(partial(self._read_channels, channels=channels), self._rectangle(x, y, w, h, level))

    def _read_guarded(self, read: Callable[[Handle, Rectangle], Pixels], rectangle: Rectangle) -> Pixels:
        return self._guarded(lambda: read(self._handle(), rectangle), f"read {rectangle} of {self.path}")

    def _handle(self) -> Handle:
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            if not self.path.exists():
                raise SourceError(f"cannot open {self.path}: there is no such file. Check the path.")
            opened = self._opened = os.getpid(), self._open()
        return opened[1]

    def _guarded(self, work: Callable[[], Result], purpose: str) -> Result:
        try:
            return work()
        except SftError:
            raise
        except Exception as error:  # libraries raise almost anything for a damaged file
            self._opened = None
            raise SourceError(
                f"cannot {purpose}: {type(error).__name__}: {reason_text(error)}. The file is damaged or no such format; "
                f"copy it again, or leave it out."
            ) from error


class DecodedFile(FileImage[Handle]):
    """A file that is decoded completely, within a host budget.

    Args:
        path: of the file, or its URL, for readers that take one.
        host_budget_bytes: limit of the decoded image. Default: `None` (1 GiB)

    Raises:
        SourceError: the file does not exist. Other errors are raised at the first use.
    """

    def __init__(self, path: str | os.PathLike[str], *, host_budget_bytes: int | str | None = None) -> None:
        super().__init__(path)
        self.host_budget_bytes = host_budget_bytes

    def _check_bytes(self, unit: str, num_bytes: int) -> None:
        """Refuse an image beyond the budget.

        Raises:
            BudgetError: it is.
        """
        check_decode_bytes(self.path, unit, num_bytes, self.host_budget_bytes)


class ReadCostWarning(UserWarning):
    """A file is decoded in units that are much larger than the rows of a strip."""


def check_decode_bytes(path: object, unit: str, num_bytes: int, host_budget_bytes: int | str | None) -> None:
    """Refuse a file if its unit of decoding exceeds the host budget.

    >>> check_decode_bytes("a.png", "the image", 6 << 30, "4GiB")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    sft.common.errors.BudgetError: cannot read a.png: the image is decoded at once, into 6.00 GiB; the host budget is 4.00 GiB. ...

    Args:
        path: of the file, for the message.
        unit: what is decoded at once, such as ``"the image"``.
        num_bytes: of the decoded unit.
        host_budget_bytes: limit of the caller. None: 1 GiB.

    Raises:
        BudgetError: it does.
    """
    limit = DEFAULT_DECODE_BYTES if host_budget_bytes is None else parse_bytes(host_budget_bytes)
    if num_bytes > limit:
        limit_name = "the limit without a host budget" if host_budget_bytes is None else "the host budget"
        raise BudgetError(
            f"cannot read {path}: {unit} is decoded at once, into {format_bytes(num_bytes)}; {limit_name} is {format_bytes(limit)}. Give "
            f'host_budget_bytes="{-(-num_bytes >> 20)}MiB" if the host has it, or write the image as a tiled TIFF or OME-Zarr.',
            needed_bytes=num_bytes,
        )
