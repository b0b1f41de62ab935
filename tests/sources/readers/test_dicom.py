"""Folders of DICOM slides: the file with which OpenSlide opens a series."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft import InputError, SourceError
from sft.sources import NiftiVolume, Slide, open_image
from sft.sources.readers.dicom import find_dicom_file
from tests.sources.test_pixel_types import numbers

pydicom = pytest.importorskip("pydicom")
pytest.importorskip("openslide")
pytest.importorskip("nibabel")

_SLIDE_CLASS, _OTHER_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.6", "1.2.840.10008.5.1.4.1.1.7"


def _write(path: Path, pixels: Any, series: str, number: int, *, kind: str = _SLIDE_CLASS, tile: int = 32) -> Path:
    """One level of a slide in full tiles, uncompressed."""
    height, width, _ = pixels.shape
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = kind
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = f"{series}.{number + 1}"
    data.SeriesInstanceUID, data.StudyInstanceUID, data.FrameOfReferenceUID = series, "1.2.3", f"{series}.9"
    data.ImageType = ["ORIGINAL" if number == 0 else "DERIVED", "PRIMARY", "VOLUME", "NONE" if number == 0 else "RESAMPLED"]
    data.Modality, data.DimensionOrganizationType = "SM", "TILED_FULL"
    data.Rows = data.Columns = tile
    data.TotalPixelMatrixRows, data.TotalPixelMatrixColumns = height, width
    data.SamplesPerPixel, data.PhotometricInterpretation, data.PlanarConfiguration = 3, "RGB", 0
    data.BitsAllocated = data.BitsStored = 8
    data.HighBit, data.PixelRepresentation, data.TotalPixelMatrixFocalPlanes, data.NumberOfOpticalPaths = 7, 0, 1, 1
    measures, functional = pydicom.Dataset(), pydicom.Dataset()
    measures.PixelSpacing, measures.SliceThickness = [0.0005 * 2**number] * 2, 0.001
    functional.PixelMeasuresSequence = [measures]
    data.SharedFunctionalGroupsSequence = [functional]
    optical = pydicom.Dataset()
    optical.ObjectiveLensPower = 20
    data.OpticalPathSequence = [optical]
    padded = np.pad(pixels, ((0, -height % tile), (0, -width % tile), (0, 0)))
    down, across = padded.shape[0] // tile, padded.shape[1] // tile
    tiles = padded.reshape(down, tile, across, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
    data.NumberOfFrames, data.PixelData = len(tiles), tiles.tobytes()
    data["PixelData"].VR = "OB"
    data.save_as(path, enforce_file_format=True)
    return path


def test_a_folder_of_one_slide_trident_163(tmp_path: Path) -> None:
    """mahmoodlab/TRIDENT#163, #50."""
    pixels = numbers((70, 100, 3), "uint8")
    _write(tmp_path / "level1.dcm", np.ascontiguousarray(pixels[::2, ::2]), "1.2.3.4", 1)
    _write(tmp_path / "level0.dcm", pixels, "1.2.3.4", 0)
    _write(tmp_path / "capture.dcm", pixels, "1.2.3.5", 0, kind=_OTHER_CLASS)
    (tmp_path / "DICOMDIR").write_bytes(b"no slide")
    image = open_image(tmp_path)
    assert isinstance(image, Slide) and image.level_dimensions[0] == (100, 70)
    assert np.array_equal(image.read(3, 4, 90, 60), pixels[4:64, 3:93])
    with pytest.raises(InputError, match="it is a DICOM slide"):
        open_image(tmp_path, mask="fill")


def test_folders_that_need_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_dicom_file(tmp_path) is None
    pixels = numbers((40, 40, 3), "uint8")
    first, second = (_write(tmp_path / f"{number}.dcm", pixels, f"1.2.3.{number}", 0) for number in (4, 5))
    with pytest.raises(InputError, match=r"it holds 2 slides, of series 1\.2\.3\.4, 1\.2\.3\.5\. Choose one with series=0"):
        open_image(tmp_path)
    assert find_dicom_file(tmp_path, series=0) == first and find_dicom_file(tmp_path, series=1) == second
    with pytest.raises(InputError, match="cannot open series 2"):
        open_image(tmp_path, series=2)
    for path in (first, second):
        _write(path, pixels, "1.2.3.4", 0, kind=_OTHER_CLASS)
    with pytest.raises(SourceError, match="its 2 DICOM files are not whole-slide images"):
        open_image(tmp_path)
    first.write_bytes(first.read_bytes()[:140] + b"\xff" * 40)
    with pytest.raises(SourceError, match=r"4\.dcm: .*DICOM header is damaged|no whole-slide images"):
        open_image(tmp_path)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(SourceError, match=r"pip install .*\[dicom\]"):
        open_image(tmp_path)


def test_files_of_volumes_and_signals_are_named_with_a_line_that_reads_them(tmp_path: Path) -> None:
    pixels = numbers((32, 32, 3), "uint8")
    (tmp_path / "ct").mkdir()
    slices = _write(tmp_path / "ct" / "0.dcm", pixels, "1.2.3.5", 0, kind=_OTHER_CLASS)
    for path in (slices, slices.parent):
        with pytest.raises(SourceError, match=r"as an array: sft.sources.ArraySource\(pydicom.dcmread\(path\).pixel_array\)"):
            open_image(path)
    (tmp_path / "a.nrrd").write_bytes(b"NRRD0004\ntype: short\n")
    (tmp_path / "a.mha").write_bytes(b"ObjectType = Image\nNDims = 3\n")
    (tmp_path / "a.wav").write_bytes(b"RIFF\x24\0\0\0WAVEfmt ")
    for name, words in (
        ("a.nrrd", "it is an NRRD file, .*nrrd.read"),
        ("a.mha", "it is a MetaImage file, .*SimpleITK.ReadImage"),
        ("a.wav", "it is a WAV sound, .*given as tensors"),
    ):
        with pytest.raises(SourceError, match=words):
            open_image(tmp_path / name)
    with pytest.raises(SourceError, match=r"A volume is given as a tensor: .*SimpleITK.ReadImage"):
        _ = NiftiVolume(tmp_path / "a.mha").shape
