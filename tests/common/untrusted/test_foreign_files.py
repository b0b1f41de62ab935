"""Checks of files and texts of unknown origin."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sft.common.errors import SourceError
from sft.common.untrusted.foreign_files import escape_control_characters, file_format, require_regular_file
from sft.common.untrusted.tensor_files import load_tensor_file


def test_pipes_devices_and_folders_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null"), tmp_path / "none"):
        with pytest.raises(OSError, match=r"pipe or a device|directory"):
            require_regular_file(path)
    (tmp_path / "file").write_text("")
    require_regular_file(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "WebP"),
        (b"<HTML>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
        (b"RIFF\0\0\0\0WAVEfmt ", "WAV"),
        (b"NRRD0004\n", "NRRD"),
        (b"ObjectType = Image\n", "MetaImage"),
        (b"0       X X X", "EDF"),
        (bytes(128) + b"DICM", "DICOM"),
        (b"II*\0", ""),
        (b"", ""),
    ],
)
def test_formats_are_detected_by_the_first_bytes(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert name in file_format(tmp_path / "file") and bool(name) == bool(file_format(tmp_path / "file"))


def test_control_characters_are_escaped() -> None:
    assert escape_control_characters("ä \x1b[2J\u202e\r\n\t\ud800") == "ä \\x1b[2J\\u202e\\r\n\t\\ud800"


def test_a_missing_tensor_file_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none.pt cannot be read: No such file or directory") as refused:
        load_tensor_file(tmp_path / "none.pt")
    assert "damaged" not in str(refused.value)
