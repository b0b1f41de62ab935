"""GeoTIFF, COG and VRT: pixels, masks, overviews and georeference as in rasterio."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft import InputError, SourceError
from sft.sources import ChannelSelection, ChannelStack, Cropped, Normalized, open_image, open_labels, percentile_range
from sft.sources.views import RasterView
from tests.sources.test_pixel_types import numbers

rasterio = pytest.importorskip("rasterio")
pytest.importorskip("tifffile")

SENTINEL: dict[str, Any] = {"crs": "EPSG:32632", "transform": rasterio.Affine(10, 0, 600_000, 0, -10, 5_200_000)}


def write(path: Path, pixels: Any, *, masked: Any = None, overviews: tuple[int, ...] = (), alpha: bool = False, **options: Any) -> Path:
    """A GeoTIFF of [height, width, bands]."""
    height, width, bands = pixels.shape
    colours = {"photometric": "RGB", "alpha": "YES"} if alpha else {"photometric": "MINISBLACK", "alpha": "UNSPECIFIED"}
    tiles = {"tiled": True, "blockxsize": 32, "blockysize": 32, "compress": "deflate"}
    profile: dict[str, Any] = {"driver": "GTiff", **tiles, **colours, **SENTINEL}
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(path, "w", height=height, width=width, count=bands, dtype=pixels.dtype.name, **{**profile, **options}) as file,
    ):
        file.write(pixels.transpose(2, 0, 1))
        if masked is not None:
            file.write_mask(masked)
    if overviews:
        with rasterio.open(path, "r+") as file:
            file.build_overviews(overviews, rasterio.enums.Resampling.nearest)
    return path


@pytest.mark.parametrize("reader", ["auto", "geo"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_pixels_overviews_and_georeference_async_geotiff_33(reader: Any, dtype: str, tmp_path: Path) -> None:
    """developmentseed/async-geotiff#33: band-interleaved COG."""
    pixels = numbers((130, 200, 4), dtype)
    path = write(tmp_path / "a.tif", pixels, overviews=(2, 4), interleave="band", nodata=0)
    image: Any = open_image(path, reader=reader)
    assert repr(image).startswith("GeoImage" if reader == "geo" else "TiffImage")
    assert image.level_dimensions == ((200, 130), (100, 65), (50, 33)) and image.dtype == dtype and image.nodata == 0
    assert np.array_equal(image.read(11, 7, 150, 100), pixels[7:107, 11:161])
    with rasterio.open(path, overview_level=1) as file:
        assert np.array_equal(image.read(0, 0, 50, 33, 2), file.read().transpose(1, 2, 0))
    copy = pickle.loads(pickle.dumps(image))
    assert np.array_equal(copy.read(0, 0, 200, 130), pixels)
    scene = image.georeference
    assert scene is not None and scene.transform == (10, 0, 600_000, 0, -10, 5_200_000)
    assert rasterio.crs.CRS.from_wkt(scene.crs_wkt) == rasterio.crs.CRS.from_epsg(32632)
    assert image.mpp == pytest.approx((1e7, 1e7)), "10 m in micrometres"
    coarse: Any = RasterView(open_image(path, reader=reader, mpp=2e7))
    assert (coarse.width_px, coarse.height_px) == (100, 65)
    assert coarse.georeference is not None and coarse.georeference.transform == (20, 0, 600_000, 0, -20, 5_200_000)
    crop: Any = Normalized(Cropped(image, x=3, y=2, w=9, h=8))
    assert crop.georeference is not None and crop.georeference.transform[2::3] == (600_030, 5_199_980)


def test_rotated_transforms_and_scenes_in_degrees(tmp_path: Path) -> None:
    turned = rasterio.Affine(8, -2, 500, -2, -8, 900)
    image: Any = open_image(write(tmp_path / "a.tif", numbers((40, 50, 1), "uint16"), transform=turned))
    assert image.georeference is not None and image.georeference.transform == turned[:6]
    assert image.mpp == pytest.approx((np.hypot(8, 2) * 1e6, np.hypot(8, 2) * 1e6))
    image = open_image(write(tmp_path / "b.tif", numbers((40, 50, 1), "uint16"), crs="EPSG:4326"))
    assert image.georeference is not None and image.mpp is None
    with pytest.raises(InputError, match=r"have no size in metres, such as degrees.*slide_mpp=10e6 for 10 m"):
        open_image(tmp_path / "b.tif", mpp=20e6)
    assert open_image(tmp_path / "b.tif", slide_mpp=10e6, mpp=20e6).width_px == 25


@pytest.mark.parametrize("kind", ["mask", "alpha", "nodata"])
def test_invalid_pixels_have_a_policy_cog_best_practices_8(kind: str, tmp_path: Path) -> None:
    pixels = numbers((70, 90, 3), "uint16", seed=1) // 2 + 7
    valid = np.random.default_rng(0).random((70, 90)) > 0.3
    choices: dict[str, dict[str, Any]] = {"mask": {"masked": valid}, "alpha": {"alpha": True}, "nodata": {"nodata": 5}}
    options = choices[kind]
    stored = np.where(valid[..., None], pixels, 5).astype(np.uint16) if kind == "nodata" else pixels
    bands = np.dstack([stored, np.where(valid, 65535, 0).astype(np.uint16)]) if kind == "alpha" else stored
    path = write(tmp_path / "a.tif", bands, **options)
    if kind == "nodata":
        assert np.array_equal(open_image(path).read(0, 0, 90, 70), stored)
    elif kind == "mask":
        with pytest.raises(SourceError, match=r"an internal mask of valid pixels \(90 x 70 px\)"):
            open_image(path)
    with_mask = open_image(path, mask="channel")
    assert with_mask.num_channels == 4
    read = with_mask.read(10, 5, 70, 60)
    assert np.array_equal(read[..., 3], np.where(valid[5:65, 10:80], 65535, 0)) and np.array_equal(read[..., :3], stored[5:65, 10:80])
    filled = open_image(path, mask="fill", fill_value=42)
    assert np.array_equal(filled.read(0, 0, 90, 70), np.where(valid[..., None], stored, 42))
    assert np.array_equal(open_image(path, mask="ignore").read(0, 0, 90, 70), stored)
    if kind != "nodata":
        with pytest.raises(SourceError, match=r"[Cc]hoose mask=.fill"):
            open_image(path, reader="geo")


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_an_alpha_band_needs_a_choice(dtype: str, tiled: bool, tmp_path: Path) -> None:
    """Rasterio declares near infrared as alpha: the fourth of four bands of 8 bits."""
    pixels = numbers((64, 64, 4), dtype)
    path = write(tmp_path / "a.tif", pixels, alpha=dtype == "uint16", tiled=tiled)
    if dtype == "uint8":
        with rasterio.open(path, "w", driver="GTiff", height=64, width=64, count=4, dtype=dtype, tiled=tiled, **SENTINEL) as file:
            file.write(pixels.transpose(2, 0, 1))
    for reader in ("auto", "tiff", "geo"):
        with pytest.raises(SourceError, match=r'declared as alpha.*mask="fill".*near infrared.*mask="band"'):
            open_image(path, reader=reader)
    assert np.array_equal(open_image(path, mask="ignore").read(0, 0, 64, 64), pixels[..., :3])
    assert np.array_equal(open_image(path, mask="band").read(0, 0, 64, 64), pixels)


def test_jpeg_2000_with_map_coordinates_is_a_raster_of_gdal(tmp_path: Path) -> None:
    """Sentinel-2 is delivered as JPEG 2000: one file a band, at 10 m and 20 m."""
    pixels = numbers((40, 50, 2), "uint16")
    for number, size_m in enumerate((10, 20)):
        band = pixels[:: number + 1, :: number + 1, number]
        place = rasterio.Affine(size_m, 0, 600_000, 0, -size_m, 5_200_000)
        shape = {"height": band.shape[0], "width": band.shape[1], "count": 1, "dtype": "uint16"}
        exact = {"QUALITY": 100, "REVERSIBLE": "YES"}
        path = tmp_path / f"B{number}.jp2"
        with rasterio.open(path, "w", driver="JP2OpenJPEG", crs="EPSG:32632", transform=place, **shape, **exact) as file:
            file.write(band, 1)
    image: Any = open_image(tmp_path / "B0.jp2")
    assert repr(image).startswith("GeoImage") and image.mpp == pytest.approx((1e7, 1e7))
    assert image.georeference is not None and image.georeference.transform == SENTINEL["transform"][:6]
    assert np.array_equal(image.read(3, 5, 40, 30)[..., 0], pixels[5:35, 3:43, 0])
    assert open_image(tmp_path / "B0.jp2", mask="fill").num_channels == 1
    stack: Any = open_image([tmp_path / "B0.jp2", tmp_path / "B1.jp2"], mpp=20e6)
    assert stack.channel_names == ("B0", "B1")
    assert np.array_equal(stack.read(0, 0, 25, 20)[..., 1], pixels[::2, ::2, 1])


@pytest.mark.parametrize(("name", "world"), [("a.png", "a.pgw"), ("a.png", "a.wld"), ("a.jpg", "a.jgw"), ("a.jpeg", "a.jpegw")])
def test_world_files_are_the_place_of_a_picture(name: str, world: str, tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.fromarray(numbers((40, 50, 3), "uint8")).save(tmp_path / name)
    plain: Any = open_image(tmp_path / name)
    assert plain.georeference is None
    (tmp_path / world).write_text("10\n0\n0\n-10\n600005\n5199995\n")
    image: Any = open_image(tmp_path / name)
    assert image.georeference is not None and image.georeference.transform == SENTINEL["transform"][:6]


def test_the_extra_geo_alone_reads_geotiffs_and_their_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, labels = numbers((40, 50, 4), "uint16"), numbers((40, 50, 1), "uint8")
    path, labels_path = write(tmp_path / "a.tif", scene), write(tmp_path / "b.tif", labels)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    image: Any = open_image(path)
    assert repr(image).startswith("GeoImage") and np.array_equal(image.read(0, 0, 50, 40), scene)
    read = open_labels(labels_path, like=image).image.read(0, 0, 50, 40)
    assert np.array_equal(read, labels)
    monkeypatch.setitem(sys.modules, "rasterio", None)
    for call in (open_image, open_labels):  # OpenSlide, if installed, would return RGB of 8 bits
        with pytest.raises(SourceError, match="tifffile"):
            call(path if call is open_image else labels_path)


@pytest.mark.parametrize(("dtype", "bands"), [("uint16", 1), ("uint16", 4), ("uint8", 5), ("uint8", 2)])
def test_openslide_gets_no_samples_that_it_would_round_or_drop(dtype: str, bands: int, tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    path = write(tmp_path / "a.tif", numbers((40, 50, bands), dtype))
    with pytest.raises(SourceError, match=rf"it has {bands} samples of \d+ bits a pixel, and OpenSlide returns RGB of 8 bits"):
        open_image(path, reader="openslide")


@pytest.mark.parametrize(("nodata", "background"), [(-9999, 0), (70_000, 65_535), (float("nan"), 0), (12.4, 12)])
def test_nodata_outside_of_the_type(nodata: float, background: float, tmp_path: Path) -> None:
    """Policy: no stored pixel has it, and missing tiles have the nearest value, as in GDAL."""
    import tifffile

    text = (42113, "s", 0, str(nodata), True)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, numbers((40, 50), "uint16") | 1, metadata=None, photometric="minisblack", tile=(16, 16), extratags=[text])
    image: Any = open_image(path)
    assert image.background == (background,) and (image.nodata == nodata or nodata != nodata)


def test_a_mosaic_of_files_with_one_grid(tmp_path: Path) -> None:
    pixels = numbers((64, 100, 2), "uint16")
    write(tmp_path / "left.tif", pixels[:, :60])
    write(tmp_path / "right.tif", pixels[:, 60:], transform=rasterio.Affine(10, 0, 600_600, 0, -10, 5_200_000))
    bands = "".join(
        f'<VRTRasterBand dataType="UInt16" band="{band}">'
        + "".join(
            f'<SimpleSource><SourceFilename relativeToVRT="1">{name}.tif</SourceFilename><SourceBand>{band}</SourceBand>'
            f'<SrcRect xOff="0" yOff="0" xSize="{width}" ySize="64"/><DstRect xOff="{left}" yOff="0" xSize="{width}" ySize="64"/>'
            "</SimpleSource>"
            for name, left, width in (("left", 0, 60), ("right", 60, 40))
        )
        + "</VRTRasterBand>"
        for band in (1, 2)
    )
    transform = "<GeoTransform>600000, 10, 0, 5200000, 0, -10</GeoTransform>"
    (tmp_path / "both.vrt").write_text(f'<VRTDataset rasterXSize="100" rasterYSize="64">{transform}{bands}</VRTDataset>')
    image: Any = open_image(tmp_path / "both.vrt")
    assert np.array_equal(image.read(50, 10, 40, 30), pixels[10:40, 50:90])
    (tmp_path / "right.tif").unlink()
    with pytest.raises(SourceError, match=r"both\.vrt"):
        open_image(tmp_path / "both.vrt").read(50, 10, 40, 30)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", numbers((40, 50, 1), "uint8"))
    with rasterio.open(path, "r+") as file:
        file.write_colormap(1, {1: (255, 0, 0, 255)})
    with pytest.raises(SourceError, match=r"indices of a colour table\. Read labels"):
        open_image(path, reader="geo")
    with pytest.raises(SourceError, match="its bands are complex64"):
        open_image(write(tmp_path / "c.tif", numbers((40, 50, 1), "float32").astype(np.complex64)), reader="geo")
    with pytest.raises(InputError, match=r"with -1: its type uint16 has 0 to 65535"):
        open_image(write(tmp_path / "b.tif", numbers((40, 50, 1), "uint16")), mask="fill", fill_value=-1)
    wrong: Any = "paint"
    with pytest.raises(InputError, match="'fill', 'channel', 'ignore'"):
        open_image(tmp_path / "b.tif", mask=wrong)
    with pytest.raises(InputError, match="masks are read by reader='geo'"):
        open_image(tmp_path / "b.tif", mask="fill", reader="tiff")


@pytest.mark.parametrize("change", [lambda data: data[: len(data) // 2], lambda data: data[:3000] + bytes(600) + data[3600:]])
def test_damaged_rasters(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", numbers((130, 200, 2), "uint16"), interleave="band")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SourceError, match=r"a\.tif"):
        open_image(path, reader="geo").read(0, 0, 200, 130)
    filled = open_image(path, reader="geo", on_error="fill", mask="ignore")
    filled.read(0, 0, 200, 130)
    assert RasterView(filled).bad_tiles


def test_without_rasterio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = numbers((40, 50, 2), "uint16")
    path = write(tmp_path / "a.tif", pixels)
    monkeypatch.setitem(sys.modules, "rasterio", None)
    image: Any = open_image(path)
    assert image.georeference is None and np.array_equal(image.read(0, 0, 50, 40), pixels)
    with pytest.raises(SourceError, match=r"pip install .*\[geo\]"):
        open_image(path, mask="fill")


def test_percentiles_do_not_change_a_mask_channel(tmp_path: Path) -> None:
    pixels = numbers((40, 50, 2), "uint16") + 1
    pixels[:10] = 0
    write(tmp_path / "a.tif", pixels, nodata=0)
    image = open_image(tmp_path / "a.tif", mask="channel")
    bands = percentile_range(open_image(tmp_path / "a.tif"), 2, 98)
    assert percentile_range(image, 2, 98) == (*bands, (0.0, 65535.0))
    assert percentile_range(Cropped(ChannelSelection(image, [2, 0]), x=0, y=0, w=50, h=40), 2, 98) == ((0.0, 65535.0), bands[0])
    assert ChannelStack([image, image]).mask_channels == (2, 5)


def test_a_mask_channel_next_to_nan(tmp_path: Path) -> None:
    """Otherwise NaN would reach every result of the network."""
    pixels = np.ones((8, 8, 2), np.float32)
    pixels[:2, :, 0] = np.nan
    write(tmp_path / "a.tif", pixels, nodata=np.nan)
    read = open_image(tmp_path / "a.tif", mask="channel", fill_value=-1).read(0, 0, 8, 8)
    assert (read[:2, :, 0] == -1).all() and (read[..., 1] == 1).all() and (read[..., 2] == ~np.isnan(pixels[..., 0])).all()
