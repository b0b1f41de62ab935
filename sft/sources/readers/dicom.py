"""Folders of DICOM slides: one file for each level, of one series, read through OpenSlide.

OpenSlide opens a series by any of its files and looks for the others in the same folder. A folder may hold several series (a label, a
second slide), so the series of each file is read with pydicom (extra ``dicom``).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from sft.common.errors import InputError, SourceError, reason_text, some_names
from sft.common.untrusted.foreign_files import format_remedy
from sft.sources.image import missing_extra

__all__ = ["find_dicom_file", "is_dicom"]

_MAGIC, _MAGIC_OFFSET = b"DICM", 128
#: Class of whole-slide microscopy images.
_SLIDE_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6"


def is_dicom(path: Path) -> bool:
    """True for a DICOM file by its first bytes."""
    with path.open("rb") as file:
        return file.read(_MAGIC_OFFSET + len(_MAGIC))[_MAGIC_OFFSET:] == _MAGIC


def find_dicom_file(folder: Path, *, series: int | None = None) -> Path | None:
    """File by which OpenSlide opens the slide in a folder; None for a folder without DICOM files.

    Args:
        folder: with the files of the slide.
        series: number of the slide in a folder of several, in the order of their unique identifiers. Default: `None` (the only one)

    Raises:
        InputError: the folder holds several slides, and none is chosen.
        SourceError: it holds no slide, or pydicom is not installed.
    """
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and is_dicom(path)]
    if not files:
        return None
    try:
        import pydicom
    except ImportError as error:
        raise missing_extra(f"open the DICOM folder {folder}", "dicom", error) from error
    slides: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        try:
            header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=["SOPClassUID", "SeriesInstanceUID"])
        except Exception as error:  # a damaged header raises almost any error
            raise SourceError(
                f"cannot open {path}: {type(error).__name__}: {reason_text(error)}. Its DICOM header is damaged; copy it again."
            ) from error
        if str(header.get("SOPClassUID", "")) == _SLIDE_CLASS:
            slides[str(header.get("SeriesInstanceUID", ""))].append(path)
    identifiers = sorted(slides)
    if not identifiers:
        raise SourceError(f"cannot open {folder}: its {len(files)} DICOM files are not whole-slide images. {format_remedy('a DICOM file')}")
    if series is None and len(identifiers) > 1:
        raise InputError(
            f"cannot open {folder}: it holds {len(identifiers)} slides, of series {some_names(identifiers)}. Choose one with series=0, or "
            "give one of its files."
        )
    number = series or 0
    if not 0 <= number < len(identifiers):
        raise InputError(f"cannot open series {number} of {folder}: it holds {len(identifiers)} slide(s). Choose one of them.")
    return slides[identifiers[number]][0]
