"""Whole-slide files, read through OpenSlide.

OpenSlide knows every scanner's format, but a plain handle has five habits that break training, and this module exists to undo them:

- A handle does not survive ``fork`` and does not pickle, yet data loaders do both.  Only the path is state here; each process opens its
  own handle at its first read (a changed process id is how it notices).
- One corrupt tile latches a handle into error: every later read of good tiles fails too.  The handle is dropped on failure, so the next
  read opens a fresh one and only the bad place stays bad.
- Missing pixels are transparent, and dropping the alpha channel turns them black.  They are composited over the slide's own background
  colour (white where the file names none; in a GeoTIFF the value of `sft.sources.tiff.metadata`).  Sparse formats have such pixels inside
  the slide too.
- Positions are given in pixels of the largest level whatever level is read.  Here they are pixels of the level that is read.
- Errors name neither the file nor the place.  Here every failure is a ``SourceError`` that says path, level and rectangle.

Levels are counted from the one the slide was opened at: ``level=0`` always is what `width_px` and `height_px` describe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sft.common.errors import InputError, SourceError, reason_text
from sft.common.installation import install_command
from sft.common.untrusted.foreign_files import file_format, format_remedy
from sft.sources.georeference import Georeference
from sft.sources.image import LevelledImage, Pixels, StatedResolution, read_strips
from sft.sources.readers.geotiff import read_georeference
from sft.sources.tiff.metadata import read_geo_tags, read_sample_tags

__all__ = ["Slide"]

_WHITE = (255, 255, 255)


class _OpenSlideHandle(Protocol):
    """The part of ``openslide.OpenSlide`` that is used here."""

    @property
    def level_dimensions(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def level_downsamples(self) -> tuple[float, ...]: ...

    @property
    def properties(self) -> Mapping[str, str]: ...

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Any: ...

    def close(self) -> None: ...


#: Handles that a forked process got from its parent.  They are never closed: a thread of the parent may have held one
#: of their locks at the fork, and closing would wait for it forever.
_inherited: list[_OpenSlideHandle] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlideFacts:
    """Metadata of a slide file; all levels are the file's own."""

    level_dimensions: tuple[tuple[int, int], ...]  #: (width, height) of each level, in px
    level_downsamples: tuple[float, ...]  #: px of level 0 per px of each level
    resolution: StatedResolution  #: of level 0
    background: tuple[int, int, int]  #: colour of pixels that are not stored, RGB
    tiles_px: tuple[tuple[int, int] | None, ...]  #: (width, height) of the compressed tiles of each level; None where the file does not say
    nodata: float | None = None  #: value of pixels without data, as the file has it


class Slide(LevelledImage):
    """Whole-slide image. It is an `sft.sources.Image`, pickles, and may be read from several threads and processes.

    Args:
        path: a file that OpenSlide can read (SVS, NDPI, MRXS, SCN, DICOM, tiled TIFF, ...).
        level: the file's pyramid level to use, 0 = the largest.  Default: 0

    Raises:
        SourceError: the file does not exist.  Files that are not slides raise at the first use.
    """

    def __init__(self, path: str | os.PathLike[str], *, level: int = 0) -> None:
        self.path = Path(path)
        self.level = level
        self._facts: _SlideFacts | None = None
        # The process that opened the handle, and the handle: one attribute, so that threads see both or neither.
        self._opened: tuple[int, _OpenSlideHandle] | None = None
        if not self.path.exists():
            raise SourceError(f"cannot open slide {self.path}: there is no such file. Check the path.")

    def __repr__(self) -> str:
        return f"Slide({str(self.path)!r}, level={self.level})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "level": self.level, "_facts": self._facts, "_opened": None}

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        pid, handle = opened
        if pid == os.getpid():
            handle.close()
        else:
            _inherited.append(handle)

    @property
    def dimensions(self) -> tuple[int, int]:
        """(width, height) in px."""
        return self._read_facts().level_dimensions[self.level]

    @property
    def num_channels(self) -> int:
        """RGB."""
        return 3

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        """uint8."""
        return np.dtype(np.uint8)

    @property
    def level_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each level, in px."""
        return self._read_facts().level_dimensions[self.level :]

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """Px of this slide per px of each level; the first is 1.  Not powers of two in general."""
        downsamples = self._read_facts().level_downsamples[self.level :]
        return tuple(downsample / downsamples[0] for downsample in downsamples)

    @property
    def exact_levels(self) -> tuple[int, ...]:
        """Levels whose pixels `read` gives as they are: those that are reduced by an integer factor."""
        downsamples = self._read_facts().level_downsamples[self.level :]
        return tuple(level for level, downsample in enumerate(downsamples) if float(downsample).is_integer())

    @property
    def mpp(self) -> tuple[float, float] | None:
        """Micrometres per px, (x, y); None if the file does not state it."""
        facts = self._read_facts()
        mpp, downsample = facts.resolution.mpp, facts.level_downsamples[self.level]
        return None if mpp is None else (mpp[0] * downsample, mpp[1] * downsample)

    @property
    def mpp_note(self) -> str:
        """Reason against a resolution that the file states; empty if it states a credible one, or none."""
        return self._read_facts().resolution.note

    @property
    def level_tiles_px(self) -> tuple[tuple[int, int] | None, ...]:
        """(width, height) of a compressed tile of each level, the smallest unit that is decoded; None if unknown."""
        return self._read_facts().tiles_px[self.level :]

    @property
    def background(self) -> tuple[int, int, int]:
        """RGB colour of pixels that are not stored."""
        return self._read_facts().background

    @property
    def nodata(self) -> float | None:
        """Value of pixels without data, as the file has it (``GDAL_NODATA``); None where it has none."""
        return self._read_facts().nodata

    @property
    def georeference(self) -> Georeference | None:
        """Coordinate system and transform of a GeoTIFF; None for other files, or without rasterio."""
        reference = read_georeference(self.path) if read_geo_tags(self.path).is_geo else None
        downsample = self._read_facts().level_downsamples[self.level]
        return None if reference is None else reference.scaled(downsample, downsample)

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Read the rectangle of `w` x `h` pixels with its top left corner at column `x`, row `y` of `level`.

        OpenSlide places a rectangle by whole pixels of the file's largest level.  So at a level whose downsample is
        not an integer, the rectangle is shifted by at most half such a pixel, and its pixels are interpolated: they
        depend on where it begins.

        Returns:
            uint8 array of shape ``[h, w, 3]``, RGB.

        Raises:
            InputError: the level does not exist or the rectangle is not inside it.
            SourceError: the file cannot be read there.
        """
        rectangle = self._rectangle(x, y, w, h, level)  # of Python integers: those of NumPy are not sizes to OpenSlide
        facts, file_level = self._read_facts(), self.level + rectangle.level
        downsample = facts.level_downsamples[file_level]
        left, top, *_ = rectangle.arguments
        origin = (round(left * downsample), round(top * downsample))
        handle = self._open()
        try:
            rgba = np.asarray(handle.read_region(origin, file_level, rectangle.arguments[2:]))
        except Exception as error:
            # Only forget the handle: another thread may still be reading through it, and the last user's reference
            # closes it.
            self._opened = None
            raise SourceError(
                f"cannot read {rectangle} of slide {self.path}: {reason_text(error)}. A compressed tile there is damaged or the file "
                "changed; copy the file again, or leave this region out. Other regions can still be read."
            ) from error
        return _composite(rgba, facts.background)

    def read_strips(self, rows: int) -> Iterator[Pixels]:
        """Read the slide from top to bottom in full-width strips of `rows` rows; the last strip may be lower."""
        return read_strips(self, rows)

    def _open(self) -> _OpenSlideHandle:
        # No lock: threads that race here open the file twice and one handle is dropped.  A lock could be inherited,
        # held forever, by a process forked at the wrong moment.
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            if opened is not None:
                _inherited.append(opened[1])
            opened = self._opened = os.getpid(), _open_handle(self.path)
        return opened[1]

    def _read_facts(self) -> _SlideFacts:
        if self._facts is None:
            handle = self._open()
            num_levels = len(handle.level_dimensions)
            if not 0 <= self.level < num_levels:
                raise InputError(
                    f"cannot use level {self.level} of slide {self.path}: it has levels 0 to {num_levels - 1}. Choose one of them."
                )
            tags = read_geo_tags(self.path)
            if handle.properties.get("openslide.vendor") == "generic-tiff":
                _check_samples(self.path)
            self._facts = _SlideFacts(
                level_dimensions=tuple(handle.level_dimensions),
                level_downsamples=tuple(handle.level_downsamples),
                resolution=_parse_mpp(handle.properties),
                background=_parse_colour(handle.properties.get("openslide.background-color"), tags.missing_value),
                tiles_px=tuple(_parse_tile(handle.properties, level) for level in range(num_levels)),
                nodata=tags.nodata,
            )
        return self._facts


def _check_samples(path: Path) -> None:
    """Refuse a TIFF of which OpenSlide would round or drop samples.

    Raises:
        SourceError: it is one.
    """
    samples = read_sample_tags(path)
    if not samples.fit_openslide:
        bits, num_samples = max(samples.bits), len(samples.bits)
        raise SourceError(
            f"cannot read {path} through OpenSlide: it has {num_samples} samples of {bits} bits a pixel, and OpenSlide returns RGB of 8 "
            f"bits. Leave reader out, and install what reads it: {install_command('fast')}"
        )


def _open_handle(path: Path) -> _OpenSlideHandle:
    try:
        import openslide  # the only user; everything else in sft works without it
    except (ImportError, OSError) as error:
        raise SourceError(
            f"cannot open slide {path}: OpenSlide is missing ({error}). Install it with: {install_command('slide')}"
        ) from error
    if not path.exists():
        raise SourceError(f"cannot open slide {path}: there is no such file. Check the path.")
    try:
        handle: _OpenSlideHandle = openslide.OpenSlide(path)
    except Exception as error:
        num_bytes = path.stat().st_size
        name = ""
        with suppress(OSError):
            name = file_format(path)
        if name:
            raise SourceError(
                f"cannot open slide {path} ({num_bytes} bytes): it is {name}, no slide that OpenSlide reads. "
                + (format_remedy(name) or "Give the slide, or convert images to tiled TIFF.")
            ) from error
        raise SourceError(
            f"cannot open slide {path} ({num_bytes} bytes): {reason_text(error)}. Either no format that OpenSlide reads, or cut "
            "short; compare its size with the original and copy it again, or convert it to a tiled TIFF."
        ) from error
    return handle


def _parse_mpp(properties: Mapping[str, str]) -> StatedResolution:
    try:
        return StatedResolution.of(float(properties["openslide.mpp-x"]), float(properties["openslide.mpp-y"]))
    except (KeyError, ValueError):
        return StatedResolution()


def _parse_tile(properties: Mapping[str, str], level: int) -> tuple[int, int] | None:
    try:
        width, height = (int(properties[f"openslide.level[{level}].tile-{side}"]) for side in ("width", "height"))
    except (KeyError, ValueError):
        return None
    return (width, height) if min(width, height) > 0 else None


def _parse_colour(text: str | None, missing: int | None) -> tuple[int, int, int]:
    if text is None:
        return _WHITE if missing is None else (missing, missing, missing)
    red, green, blue = bytes.fromhex(text)
    return red, green, blue


def _composite(rgba: Pixels, background: tuple[int, int, int]) -> Pixels:
    """Lay RGBA pixels over an opaque colour."""
    alpha = rgba[..., 3:]
    if alpha.min() == 255:  # nearly always: then this is a plain copy
        return np.ascontiguousarray(rgba[..., :3])
    weight = alpha.astype(np.uint16)
    # Rounded to nearest: 255 * 255 + 127 still fits 16 bits.
    mixed = (rgba[..., :3] * weight + np.array(background, np.uint16) * (255 - weight) + 127) // 255
    return mixed.astype(np.uint8)
