"""NIfTI volumes in slabs: the scaled voxels of nibabel in the order of networks, and errors that name file and slices."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.common.errors import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import NiftiVolume
from sft.sources.readers import nifti as volume

nibabel: Any = pytest.importorskip("nibabel")

SHAPE = 7, 9, 11  # width, height, depth


def write_volume(path: Path, *, channels: int = 0, slope: float = 1.0) -> Any:
    """A volume of int16 with voxels of 0.5 x 0.75 x 2 mm; returns the scaled voxels in the order of networks."""
    voxels = np.random.default_rng(0).integers(-900, 1500, SHAPE + ((channels,) if channels else ()), dtype=np.int16)
    image = nibabel.Nifti1Image(voxels, np.diag([-0.5, 0.75, 2.0, 1.0]))
    image.header.set_data_dtype(np.int16)
    image.header.set_slope_inter(slope, 3.0)
    nibabel.save(image, path)
    scaled = np.asarray(nibabel.load(path).dataobj, np.float32)
    return np.moveaxis(scaled.reshape(*SHAPE, max(1, channels)), (0, 1, 2, 3), (3, 2, 1, 0))


@pytest.mark.parametrize("name", ["brain.nii", "brain.nii.gz"])
@pytest.mark.parametrize("channels", [0, 2])
def test_voxels_and_positions(tmp_path: Path, name: str, channels: int) -> None:
    expected = write_volume(tmp_path / name, channels=channels, slope=0.5)
    brain = NiftiVolume(tmp_path / name)
    assert brain.shape == expected.shape == (max(1, channels), 11, 9, 7)
    assert brain.spacing_mm == (2.0, 0.75, 0.5) and brain.orientation == "LAS"
    assert np.array_equal(brain.affine, np.diag([-0.5, 0.75, 2.0, 1.0]))
    for slices in (Interval(0, 11), Interval(3, 4), Interval(9, 11), Interval(0, 2)):
        voxels = brain.read(slices)
        assert voxels.dtype == np.float32 and voxels.flags.c_contiguous
        assert np.array_equal(voxels, expected[:, slices.start : slices.stop])
    tensor = brain.load_tensor()
    assert tensor.shape == (1, *expected.shape) and np.array_equal(tensor[0].numpy(), expected)


def test_a_tensor_is_filled_slab_by_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = write_volume(tmp_path / "brain.nii")
    monkeypatch.setattr(volume, "_SLAB_BYTES", 2 * 4 * 9 * 7)
    brain, asked = NiftiVolume(tmp_path / "brain.nii"), list[Interval]()
    read = brain.read

    def watched(slices: Interval) -> Any:
        asked.append(slices)
        return read(slices)

    monkeypatch.setattr(brain, "read", watched)
    out = torch.empty(1, 1, 11, 9, 7, dtype=torch.float64)
    assert brain.load_tensor(mean=100, std=50, out=out, dtype=torch.float64) is out
    assert [len(slices) for slices in asked] == [2, 2, 2, 2, 2, 1]
    torch.testing.assert_close(out[0], torch.from_numpy((expected.astype(np.float64) - 100) / 50), rtol=1e-12, atol=1e-12)


def test_a_slice_as_an_image(tmp_path: Path) -> None:
    expected = write_volume(tmp_path / "brain.nii")
    image = NiftiVolume(tmp_path / "brain.nii").plane(4, window=(-100, 400))
    assert (image.width_px, image.height_px) == (7, 9) and image.mpp == (500.0, 750.0) and image.background == (0,)
    grey = np.rint(np.clip((expected[0, 4] + 100) / 500, 0, 1) * 255)
    assert np.array_equal(image.read(0, 0, 7, 9)[..., 0], grey)


def _mean_of(brain: NiftiVolume) -> float:
    return float(brain.read(Interval(2, 5)).mean())


def test_processes_and_pickles(tmp_path: Path) -> None:
    write_volume(tmp_path / "brain.nii.gz")
    brain = NiftiVolume(tmp_path / "brain.nii.gz")
    expected = _mean_of(brain)
    assert _mean_of(pickle.loads(pickle.dumps(brain))) == expected
    brain.close()
    assert _mean_of(brain) == expected
    if "fork" in multiprocessing.get_all_start_methods():
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(_mean_of, (brain,)) == expected


def test_errors_name_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "brain.nii"
    with pytest.raises(SourceError, match="no such file"):
        NiftiVolume(path)
    write_volume(path)
    brain = NiftiVolume(path)
    for slices in (Interval(5, 12), Interval(4, 4)):
        with pytest.raises(InputError, match=r"brain\.nii.*it has 11"):
            brain.read(slices)
    for wrong in ({"std": 0.0}, {"dtype": torch.int16}, {"out": torch.empty(1, 2, 3)}):
        with pytest.raises(InputError, match="cannot load"):
            brain.load_tensor(**wrong)
    for window, channel in (((1, 1), 0), ((0, 1), 1)):
        with pytest.raises(InputError, match="window"):
            brain.plane(0, window=window, channel=channel)
    content = path.read_bytes()
    path.write_bytes(content[:-200])
    with pytest.raises(SourceError, match=r"slices \[9, 11\) of .*brain\.nii.*cut short"):
        NiftiVolume(path).read(Interval(9, 11))
    path.write_bytes(b"nothing")
    with pytest.raises(SourceError, match=r"brain\.nii \(7 bytes\)"):
        _ = NiftiVolume(path).shape
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(SourceError, match=r"pip install .*\[volume\]"):
        _ = NiftiVolume(path).shape


def test_voxels_that_are_no_real_numbers_and_numbers_that_are_none(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.ones(SHAPE, np.complex64), np.eye(4)), tmp_path / "complex.nii")
    with pytest.raises(SourceError, match="its voxels are complex64, not real numbers"):
        _ = NiftiVolume(tmp_path / "complex.nii").shape
    write_volume(tmp_path / "brain.nii")
    brain = NiftiVolume(tmp_path / "brain.nii")
    for mean, std in ((float("nan"), 1.0), (0.0, float("inf")), (0.0, 0.0)):
        with pytest.raises(InputError, match="with mean"):
            brain.load_tensor(mean=mean, std=std)
