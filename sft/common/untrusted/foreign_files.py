"""Files and texts of unknown origin: checks of a file before it is read, and control characters in messages.

A path in a command line, a configuration or a table may name a pipe or a device. Reading a pipe waits for a writer that may never come,
and some devices never end. The first bytes of a file tell common formats apart, so that a message can say what a file is in place of
what it is not. A name from a file may have control characters, which a terminal would obey: they can move the cursor, change colours and
reverse the direction of text.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from pathlib import Path

__all__ = ["escape_control_characters", "file_format", "format_remedy", "require_regular_file", "shortened"]

#: Formats by the first bytes of a file.
_FORMATS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS (fetch the file with git lfs pull)"),
    (b"<!doctype html", "an HTML page, such as an answer of a server"),
    (b"<html", "an HTML page, such as an answer of a server"),
    (b"<?xml", "an XML file"),
    (b"NRRD000", "an NRRD file"),
    (b"ObjectType =", "a MetaImage file"),
    (b"NDims =", "a MetaImage file"),
    (b"fLaC", "a FLAC sound"),
    (b"0       ", "an EDF recording"),
    (b"\xffBIOSEMI", "a BDF recording"),
    (b"MATLAB 5.0", "a MATLAB file"),
)
#: Formats by four bytes at a later place.
_LATER_FORMATS = ((8, b"WEBP", "a WebP image"), (8, b"WAVE", "a WAV sound"), (128, b"DICM", "a DICOM file"))
_MAX_HEAD_BYTES = 132
_SIGNAL_REMEDY = "Signals are given as tensors: torch.from_numpy(samples)[None], of shape [1, channels, length]"
_VOLUME_REMEDY = "A volume is given as a tensor: torch.from_numpy(voxels)[None, None], with voxels"
_REMEDIES = {
    "a DICOM file": "Give a slice as an array: sft.sources.ArraySource(pydicom.dcmread(path).pixel_array); a volume as a tensor.",
    "an NRRD file": f"{_VOLUME_REMEDY} of nrrd.read(path, index_order='C')[0].",
    "a MetaImage file": f"{_VOLUME_REMEDY} of SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(path)).",
    "a WAV sound": f"{_SIGNAL_REMEDY}, with samples of scipy.io.wavfile.read(path)[1].T.",
    "a FLAC sound": f"{_SIGNAL_REMEDY}, with samples of soundfile.read(path)[0].T.",
    "an EDF recording": f"{_SIGNAL_REMEDY}, with samples of mne.io.read_raw_edf(path).get_data().",
    "a BDF recording": f"{_SIGNAL_REMEDY}, with samples of mne.io.read_raw_bdf(path).get_data().",
    "a MATLAB file": "Give an array of it: sft.sources.ArraySource(scipy.io.loadmat(path)[name]).",
    "an HDF5 file": "Give an array of it: sft.sources.ArraySource(h5py.File(path)[name]).",
    "a ZIP archive": "Give an array of an .npz file: sft.sources.ArraySource(numpy.load(path)[name]).",
}
#: Invisible characters that are not control characters of Unicode: separators of lines and paragraphs.
_CONTROL_CATEGORIES = frozenset(("Cc", "Cf", "Zl", "Zp", "Cs"))


def require_regular_file(path: str | os.PathLike[str]) -> None:
    """Refuse a path that names no regular file, before it is opened.

    Raises:
        OSError: it is a folder, a pipe, a socket or a device, or does not exist.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))


def format_remedy(name: str) -> str:
    """Replacement for a file of a format that `file_format` names; empty where none is known.

    >>> format_remedy("a ZIP archive")
    'Give an array of an .npz file: sft.sources.ArraySource(numpy.load(path)[name]).'
    """
    return _REMEDIES.get(name, "")


def file_format(path: Path) -> str:
    """The format of a file by its first bytes, with its article; empty for an unknown one.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_MAX_HEAD_BYTES)
    later = (name for offset, magic, name in _LATER_FORMATS if head[offset : offset + 4] == magic)
    return next((name for magic, name in _FORMATS if head.lower().startswith(magic.lower())), "") or next(later, "")


def escape_control_characters(text: str) -> str:
    r"""Text with its control characters escaped; line breaks and tabs stay.

    >>> escape_control_characters("a\x1b[31mb\u202e")
    'a\\x1b[31mb\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if unicodedata.category(character) in _CONTROL_CATEGORIES and character not in "\n\t"
        else character
        for character in text
    )


def shortened(text: str, max_characters: int = 200) -> str:
    """Text with its middle left out if it is long.

    >>> shortened("a" * 5000 + ".svs", 20)
    'aaaaaaaaa...aaaa.svs'
    """
    if len(text) <= max_characters:
        return text
    tail = (max_characters - 3) // 2
    return f"{text[: max_characters - 3 - tail]}...{text[-tail:]}"
