"""Several files as one image, and channels by name: pixels equal those of one array, for all formats."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sft
from sft import InputError, SkipSlideError
from sft.sources import ArrayImage, ChannelSelection, ChannelStack, Mosaic, Normalized, open_image
from tests.sources.readers.test_rasters import SENTINEL, rasterio, write
from tests.sources.test_pixel_types import numbers, rows_of

tifffile = pytest.importorskip("tifffile")


def moved(columns: float, rows: float, size: float = 10) -> Any:
    """A transform on the grid of `SENTINEL`, from another corner."""
    return rasterio.Affine(size, 0, 600_000 + 10 * columns, 0, -size, 5_200_000 - 10 * rows)


@pytest.mark.parametrize("reader", ["auto", "geo"])
def test_a_mosaic_has_the_pixels_of_the_scene(reader: Any, tmp_path: Path) -> None:
    scene = numbers((90, 120, 3), "uint16") | 1
    paths = [
        write(tmp_path / "west.tif", scene[:, :70], nodata=0),
        write(tmp_path / "east.tif", scene[20:, 60:], transform=moved(60, 20), nodata=0),
    ]
    image: Any = open_image(paths, reader=reader)
    expected = scene.copy()
    expected[:20, 70:] = 0  # between the files: nodata
    assert isinstance(image, Mosaic) and (image.width_px, image.height_px, image.nodata) == (120, 90, 0)
    assert np.array_equal(image.read(0, 0, 120, 90), expected) and np.array_equal(image.read(65, 15, 30, 40), expected[15:55, 65:95])
    assert np.array_equal(pickle.loads(pickle.dumps(image)).read(50, 0, 70, 90), expected[:, 50:])
    assert image.georeference.transform == SENTINEL["transform"][:6] and image.mpp == pytest.approx((1e7, 1e7))
    first_below: Any = open_image(paths[::-1], reader=reader)  # another order, another first corner
    assert first_below.georeference == image.georeference and np.array_equal(first_below.read(0, 0, 120, 90), expected)
    assert rows_of(Normalized(image), 3, 9).shape == (1, 3, 6, 120)


def test_nodata_of_the_file_on_top_is_transparent(tmp_path: Path) -> None:
    below, top = numbers((40, 40, 1), "int16") & ~1, numbers((40, 40, 1), "int16", seed=1) & ~1  # none is -9999
    top[10:20] = -9999
    paths = [write(tmp_path / "a.tif", below, nodata=-9999), write(tmp_path / "b.tif", top, transform=moved(5, 0), nodata=-9999)]
    pixels = open_image(paths).read(0, 0, 45, 40)
    assert np.array_equal(pixels[10:20, 5:40], below[10:20, 5:]) and np.array_equal(pixels[20:, 5:], top[20:])
    assert (pixels[10:20, 40:] == -9999).all()
    top = top.astype(np.float32)
    top[top == -9999] = np.nan
    paths = [
        write(tmp_path / "c.tif", below.astype(np.float32), nodata=float("nan")),
        write(tmp_path / "d.tif", top, transform=moved(5, 0), nodata=float("nan")),
    ]
    assert np.array_equal(open_image(paths).read(5, 10, 35, 10), below[10:20, 5:])


def test_bands_in_files_are_channels(tmp_path: Path) -> None:
    """As the bands of Sentinel-2 are distributed."""
    fine, coarse = numbers((80, 100, 2), "uint16"), numbers((40, 50, 1), "uint16")
    paths = [write(tmp_path / f"B0{band + 2}.tif", fine[..., band : band + 1]) for band in range(2)]
    image: Any = open_image(paths)
    assert isinstance(image, ChannelStack) and image.channel_names == ("B02", "B03")
    assert image.georeference is not None and np.array_equal(image.read(5, 6, 70, 60), fine[6:66, 5:75])
    assert image.georeference.transform == SENTINEL["transform"][:6]
    assert np.array_equal(open_image(paths, channels=["B03"]).read(0, 0, 100, 80), fine[..., 1:])
    assert np.array_equal(pickle.loads(pickle.dumps(image)).read(0, 0, 100, 80), fine)
    paths.append(write(tmp_path / "B11.tif", coarse, transform=moved(0, 0, 20)))
    with pytest.raises(InputError, match=r"it has 50 x 40 px, and .*B02\.tif 100 x 80 px\. Give mpp=2e\+07, the coarsest"):
        open_image(paths)
    at_20_m: Any = open_image(paths, mpp=2e7)
    assert at_20_m.num_channels == 3 and np.array_equal(at_20_m.read(0, 0, 50, 40)[..., 2], coarse[..., 0])
    assert at_20_m.georeference.transform[0] == 20
    net = sft.compile(nn.Conv2d(3, 2, 3, padding=1), (1, 3, None, None), budget="8MiB")
    sft.predict(net, at_20_m, tmp_path / "map.tif")
    with rasterio.open(tmp_path / "map.tif") as file:
        assert (file.width, file.height, file.transform[0]) == (50, 40, 20)


def test_pictures_without_a_place_are_a_stack(tmp_path: Path) -> None:
    imagecodecs = pytest.importorskip("imagecodecs")
    planes = numbers((30, 40, 2), "uint8")
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(imagecodecs.png_encode(np.ascontiguousarray(planes[..., number])))
    image = open_image([tmp_path / "0.png", str(tmp_path / "1.png")])
    assert np.array_equal(image.read(0, 0, 40, 30), planes)
    assert np.array_equal(open_image([tmp_path / "0.png"]).read(0, 0, 40, 30)[..., 0], planes[..., 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": moved(50, 0, 20)}, r"a pixel is \(20, 0\) along a row and \(0, -20\) along a column, and in .* \(10, 0\)"),
        ({"transform": moved(50.3, 7)}, r"its corner is 50\.3 columns and 7 rows from that of .*a\.tif, which are not integers"),
        ({"transform": moved(50, 0), "crs": "EPSG:32633"}, r"their coordinate systems differ\. Convert one of them"),
        ({"transform": moved(50, 0), "nodata": 3}, r"its nodata value is 3\.0, and that of .*a\.tif None"),
        ({"transform": rasterio.Affine(10, 1, 600_500, 1, -10, 5_200_000)}, r"a pixel is \(10, 1\)"),
    ],
)
def test_other_grids_are_refused(options: Any, message: str, tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.tif", numbers((40, 50, 1), "uint8")), write(tmp_path / "b.tif", numbers((40, 50, 1), "uint8"), **options)]
    with pytest.raises(InputError, match=rf"cannot join .*b\.tif and .*a\.tif: {message}"):
        open_image(paths)


def test_other_files_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.tif", numbers((40, 50, 1), "uint8"))
    with pytest.raises(InputError, match=r"its pixels are uint16, and those of .* uint8"):
        open_image([first, write(tmp_path / "b.tif", numbers((40, 50, 1), "uint16"))])
    with pytest.raises(InputError, match=r"it has 2 channels, and .* 1"):
        open_image([first, write(tmp_path / "c.tif", numbers((40, 50, 2), "uint8"), transform=moved(9, 9))])
    nothing: Any = []
    with pytest.raises(InputError, match=r"cannot open \[\]: give a path"):
        open_image(nothing)
    with pytest.raises(SkipSlideError, match=r"missing\.tif"):
        open_image([first, tmp_path / "missing.tif"], on_error="skip")


def _named(kind: str, path: Path, pixels: Any, names: list[str]) -> Path:
    """A file with names of channels."""
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    if kind == "ome":
        metadata = {"axes": "CYX", "Channel": {"Name": names}}
        tifffile.imwrite(path, planes, ome=True, tile=(32, 32), photometric="minisblack", metadata=metadata, compression="deflate")
    elif kind == "geo":
        write(path, pixels, interleave="band")
        with rasterio.open(path, "r+") as file:
            file.descriptions = names
    else:
        group = pytest.importorskip("zarr").open_group(str(path), mode="w", zarr_format=2)
        group.create_array("0", data=planes, chunks=(1, 32, 32))
        axes = [{"name": "c", "type": "channel"}, {"name": "y", "type": "space"}, {"name": "x", "type": "space"}]
        multiscales = [{"version": "0.4", "axes": axes, "datasets": [{"path": "0"}]}]
        group.attrs.update({"multiscales": multiscales, "omero": {"channels": [{"label": name} for name in names]}})
    return path


@pytest.mark.parametrize("reader", ["auto", "geo"])
@pytest.mark.parametrize("kind", ["ome", "geo", "zarr"])
def test_channels_by_name_are_read_alone(kind: str, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reader == "geo" and kind != "geo":
        pytest.skip("one reader")
    names = ["DAPI", "CD3", "CD8", "Ki67"]
    pixels = numbers((70, 100, 4), "uint16")
    path = _named(kind, tmp_path / {"ome": "a.ome.tif", "geo": "a.tif", "zarr": "a.zarr"}[kind], pixels, names)
    image: Any = open_image(path, channels=["Ki67", "DAPI"], reader=reader)
    assert image.channel_names == ("Ki67", "DAPI") and image.num_channels == 2 and len(image.background) == 2
    assert np.array_equal(image.read(3, 4, 90, 60), pixels[4:64, 3:93, [3, 0]])
    assert np.array_equal(open_image(path, channels=[1, -0, 1], reader=reader).read(0, 0, 100, 70), pixels[..., [1, 0, 1]])
    assert np.array_equal(pickle.loads(pickle.dumps(image)).read(0, 0, 100, 70), pixels[..., [3, 0]])
    if reader == "auto" and kind != "zarr":
        decoded = image.image.num_tiles_decoded
        image.read(0, 0, 32, 32)
        assert image.image.num_tiles_decoded - decoded == 2, "one tile of each plane"
    with pytest.raises(InputError, match=r"channel 'CD4' of .*: it has channels 0 to 3, called 'DAPI', 'CD3', 'CD8', 'Ki67'; choose"):
        open_image(path, channels=["CD4"], reader=reader)
    with pytest.raises(InputError, match="cannot select channel 4 of"):
        open_image(path, channels=[4], reader=reader)


def test_wrong_selections() -> None:
    image = ArrayImage(numbers((5, 6, 3), "uint8"))
    with pytest.raises(InputError, match=r"it has channels 0 to 2, without names; give numbers"):
        ChannelSelection(image, ["red"])
    wrong: list[Any] = ["DAPI", [], 3, [True], [1.5], [-1]]
    for channels in wrong:
        with pytest.raises(InputError, match="cannot select channel"):
            ChannelSelection(image, channels)


def test_a_network_takes_selected_channels(tmp_path: Path) -> None:
    pixels = numbers((60, 50, 4), "uint16")
    image = open_image(_named("geo", tmp_path / "a.tif", pixels, list("abcd")), channels=["c", "a"])
    net = sft.compile(nn.Conv2d(2, 1, 1), Normalized(image), budget="8MiB")
    expected = net(torch.from_numpy(pixels[..., [2, 0]].astype(np.float32) / 65535).permute(2, 0, 1)[None])
    torch.testing.assert_close(net(Normalized(image)), expected)
