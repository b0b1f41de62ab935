"""Damaged and odd files: each is a typed error that names the file, or follows a policy; `damaged-files.md` lists all of them.

A case builds one small file. The list also has cases of other test modules, and a test compares the list with the tests.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

import sft
from sft.sources import open_image, open_labels, percentile_range
from sft.sources.georeference import Georeference
from sft.tissue import read_annotations, read_geojson
from tests.sources.readers.test_rasters import rasterio, write
from tests.sources.test_pixel_types import numbers

zarr = pytest.importorskip("zarr")
shapely = pytest.importorskip("shapely")
pytest.importorskip("rasterio.shutil")

_PAGE = Path(__file__).with_name("damaged-files.md")
_BOMB = '<!DOCTYPE a [<!ENTITY x "yyyyyyyyyy"><!ENTITY y "&x;&x;&x;&x;&x;&x;&x;&x;"><!ENTITY z "&y;&y;&y;&y;&y;&y;&y;&y;">]>'
_TIFF: dict[str, Any] = {"metadata": None, "photometric": "minisblack", "tile": (16, 16)}


def _read(path: Any, **options: Any) -> Any:
    """All pixels."""
    image = open_image(path, **options)
    return image.read(0, 0, image.width_px, image.height_px)


def _tiff(path: Path, **options: Any) -> Path:
    tifffile.imwrite(path, numbers((40, 50), "uint16"), **{**_TIFF, "compression": "deflate", **options})
    return path


def _cog(path: Path, **options: Any) -> Path:
    """A COG of one band with overviews."""
    base = write(path.with_name("base.tif"), numbers((200, 200, 1), "uint16"))
    rasterio.shutil.copy(str(base), str(path), driver="COG", BLOCKSIZE=128, COMPRESS="DEFLATE", **options)
    base.unlink()
    return path


def _array(path: Path, zarr_format: Any = 2, **options: Any) -> Path:
    settings: dict[str, Any] = {"chunks": (16, 16), **options}
    zarr.create_array(str(path), data=numbers((32, 32), "uint8"), zarr_format=zarr_format, **settings)
    return path


def _edited(path: Path, change: Callable[[Any], None]) -> Path:
    """A JSON file after a change."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def _bytes(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def _text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _tag(data: bytes, number: int, value: int) -> bytes:
    """A little-endian TIFF with another value of a tag of its first page."""
    (directory,) = struct.unpack("<I", data[4:8])
    (count,) = struct.unpack("<H", data[directory : directory + 2])
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind = struct.unpack("<HH", data[entry : entry + 4])
        if tag == number:
            size = {3: "<H", 4: "<I"}[kind]
            return data[: entry + 8] + struct.pack(size, value).ljust(4, b"\0") + data[entry + 12 :]
    raise AssertionError(f"no tag {number}")


def _truncated_cog(folder: Path) -> None:
    _read(_bytes(_cog(folder / "a.tif"), lambda data: data[: len(data) // 2]))


def _truncated_cog_by_gdal(folder: Path) -> None:
    _read(_bytes(_cog(folder / "a.tif"), lambda data: data[: len(data) // 2]), reader="geo")


def _other_byte_order(folder: Path) -> None:
    _read(_bytes(_tiff(folder / "a.tif"), lambda data: b"MM\0*" + data[4:]))


def _loop_of_pages(folder: Path) -> None:
    def looped(data: bytes) -> bytes:
        (directory,) = struct.unpack("<I", data[4:8])
        (count,) = struct.unpack("<H", data[directory : directory + 2])
        end = directory + 2 + 12 * count
        return data[:end] + data[4:8] + data[end + 4 :]

    _read(_bytes(_tiff(folder / "a.tif"), looped))


def _unknown_compression(folder: Path) -> None:
    _read(_bytes(_tiff(folder / "a.tif"), lambda data: _tag(data, 259, 60_000)))


def _huge_size(folder: Path) -> None:
    _read(_bytes(_bytes(_tiff(folder / "a.tif"), lambda data: _tag(data, 256, 60_000)), lambda data: _tag(data, 257, 60_000)))


def _huge_tile(folder: Path) -> None:
    _read(_bytes(_bytes(_tiff(folder / "a.tif"), lambda data: _tag(data, 322, 60_000)), lambda data: _tag(data, 323, 60_000)))


def _zero_width(folder: Path) -> None:
    _read(_bytes(_tiff(folder / "a.tif"), lambda data: _tag(data, 256, 0)))


def _tiles_in_the_header(folder: Path) -> None:
    tifffile.imwrite(folder / "a.tif", numbers((16, 16), "uint16"), **_TIFF)
    _read(_bytes(folder / "a.tif", lambda data: _tag(data, 324, 2)))


def _ome_with_a_bomb(folder: Path) -> None:
    text = f'<?xml version="1.0"?>{_BOMB}<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">&z;</OME>'
    image = open_image(_tiff(folder / "a.ome.tif", description=text))
    assert image.read(0, 0, 50, 40).shape == (40, 50, 1) and image.mpp is None


def _gdal_metadata_with_a_bomb(folder: Path) -> None:
    tag = (42112, "s", 0, f'{_BOMB}<GDALMetadata><Item name="DESCRIPTION" sample="0" role="description">&z;</Item></GDALMetadata>', True)
    image: Any = open_image(_tiff(folder / "a.tif", extratags=[tag]))
    assert image.channel_names == () and image.read(0, 0, 50, 40).shape == (40, 50, 1)


def _ome_of_another_size(folder: Path) -> None:
    path = folder / "a.ome.tif"
    tifffile.imwrite(path, numbers((3, 40, 50), "uint16"), ome=True, metadata={"axes": "CYX"}, photometric="minisblack", tile=(16, 16))
    open_image(_bytes(path, lambda data: data.replace(b'SizeC="3"', b'SizeC="9"').replace(b'SizeX="50"', b'SizeX="70"')))


def _nodata_without_a_number(folder: Path) -> None:
    image: Any = open_image(_tiff(folder / "a.tif", extratags=[(42113, "s", 0, "none", True)]))
    assert image.nodata is None


def _without_overviews(folder: Path) -> None:
    pixels = numbers((200, 200, 1), "uint16")
    path = write(folder / "a.tif", pixels)
    coarse = open_image(path, mpp=2e7)
    assert open_image(path).level_dimensions == ((200, 200),)
    means = pixels.astype(float).reshape(100, 2, 100, 2).mean((1, 3))
    assert np.array_equal(coarse.read(0, 0, 100, 100)[..., 0], np.floor(means + 0.5))


def _external_mask(folder: Path) -> None:
    path = write(folder / "a.tif", numbers((40, 50, 1), "uint16"))
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(path, "r+") as file:
        file.write_mask(numbers((40, 50), "uint8") > 100)
    assert (folder / "a.tif.msk").exists() and open_image(path, mask="channel").num_channels == 2
    _read(path)


def _without_a_system(folder: Path) -> None:
    image: Any = open_image(write(folder / "a.tif", numbers((40, 50, 1), "uint16"), crs=None))
    assert image.georeference.crs_wkt == "" and image.mpp is None


def _ground_control_points(folder: Path) -> None:
    point = rasterio.control.GroundControlPoint
    points = [point(0, 0, 500, 900), point(0, 50, 700, 900), point(40, 0, 500, 500)]
    path = write(folder / "a.tif", numbers((40, 50, 1), "uint16"), transform=None, gcps=points)
    assert open_image(path).georeference is None  # type: ignore[attr-defined]


def _singular_transform(folder: Path) -> None:
    flat = Georeference(crs_wkt="", transform=(0.0, 0.0, 5.0, 0.0, 0.0, 9.0))
    (folder / "a.geojson").write_text(json.dumps({"type": "Polygon", "coordinates": [], "crs": {"properties": {"name": "EPSG:4326"}}}))
    read_geojson(folder / "a.geojson", georeference=flat)


def _bands_of_two_types(folder: Path) -> None:
    for name, dtype in (("a", "uint8"), ("b", "uint16")):
        write(folder / f"{name}.tif", numbers((40, 50, 1), dtype))
    bands = "".join(
        f'<VRTRasterBand dataType="{kind}" band="{band}"><SimpleSource><SourceFilename relativeToVRT="1">{name}.tif</SourceFilename>'
        "<SourceBand>1</SourceBand></SimpleSource></VRTRasterBand>"
        for band, (name, kind) in enumerate((("a", "Byte"), ("b", "UInt16")), 1)
    )
    _read(_text(folder / "a.vrt", f'<VRTDataset rasterXSize="50" rasterYSize="40">{bands}</VRTDataset>'))


def _vrt_of_itself(folder: Path) -> None:
    source = '<SimpleSource><SourceFilename relativeToVRT="1">a.vrt</SourceFilename><SourceBand>1</SourceBand></SimpleSource>'
    band = f'<VRTRasterBand dataType="Byte" band="1">{source}</VRTRasterBand>'
    _read(_text(folder / "a.vrt", f'<VRTDataset rasterXSize="50" rasterYSize="40">{band}</VRTDataset>'))


def _vrt_with_code(folder: Path) -> None:
    write(folder / "b.tif", numbers((40, 50, 1), "uint8"))
    code = "import os\ndef f(*a):\n    os.mkdir('ran')\n"
    source = '<SimpleSource><SourceFilename relativeToVRT="1">b.tif</SourceFilename><SourceBand>1</SourceBand></SimpleSource>'
    described = {"Type": "f", "Language": "Python", "Code": f"<![CDATA[{code}]]>"}
    function = "".join(f"<PixelFunction{name}>{text}</PixelFunction{name}>" for name, text in described.items())
    band = f'<VRTRasterBand dataType="Byte" band="1" subClass="VRTDerivedRasterBand">{function}{source}</VRTRasterBand>'
    try:
        _read(_text(folder / "a.vrt", f'<VRTDataset rasterXSize="50" rasterYSize="40">{band}</VRTDataset>'))
    finally:
        assert not os.path.exists("ran")


def _vrt_cut_short(folder: Path) -> None:
    _read(_text(folder / "a.vrt", '<VRTDataset rasterXSize="50" rasterYSize="40"><VRTRasterBand'))


def _empty_chunk(folder: Path) -> None:
    path = _array(folder / "a.zarr")
    _bytes(path / "0.1", lambda data: b"")
    _read(path)


def _chunk_cut_short(folder: Path) -> None:
    path = _array(folder / "a.zarr")
    _bytes(path / "0.1", lambda data: data[: len(data) // 2])
    _read(path)


def _raw_chunk_cut_short(folder: Path) -> None:
    path = _array(folder / "a.zarr", compressors=None)
    _bytes(path / "0.1", lambda data: data[:100])
    _read(path)


def _missing_chunk(folder: Path) -> None:
    path = _array(folder / "a.zarr", fill_value=7)
    (path / "0.1").unlink()
    assert (_read(path)[:16, 16:] == 7).all()


def _shard_cut_short(folder: Path) -> None:
    path = _array(folder / "a.zarr", 3, chunks=(8, 8), shards=(16, 16))
    _bytes(path / "c" / "0" / "1", lambda data: data[:-9])
    _read(path)


def _no_json(folder: Path) -> None:
    path = _array(folder / "a.zarr")
    _text(path / ".zarray", '{"shape": [32')
    _read(path)


def _negative_shape(folder: Path) -> None:
    path = _array(folder / "a.zarr")
    _edited(path / ".zarray", lambda content: content.update(shape=[-32, 32]))
    _read(path)


def _ome_without_levels(folder: Path) -> None:
    group = zarr.open_group(str(folder / "a.zarr"), mode="w", zarr_format=2)
    group.attrs.update({"multiscales": [{"version": "0.4", "axes": [{"name": "y"}, {"name": "x"}], "datasets": []}]})
    _read(folder / "a.zarr")


def _ome_of_a_missing_array(folder: Path) -> None:
    group = zarr.open_group(str(folder / "a.zarr"), mode="w", zarr_format=2)
    group.attrs.update({"multiscales": [{"version": "0.4", "axes": [{"name": "y"}, {"name": "x"}], "datasets": [{"path": "0"}]}]})
    _read(folder / "a.zarr")


def _zip_cut_short(folder: Path) -> None:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr(".zarray", "{}" * 500)
    _read(_bytes(folder / "a.zip", lambda data: data[: len(data) // 2]))


def _npy_of_objects(folder: Path) -> None:
    np.save(folder / "a.npy", np.array([[None, {}]], object), allow_pickle=True)
    _read(folder / "a.npy")


def _npy_cut_short(folder: Path) -> None:
    np.save(folder / "a.npy", numbers((40, 50, 3), "uint8"))
    _read(_bytes(folder / "a.npy", lambda data: data[:-100]))


def _empty_file(folder: Path) -> None:
    _read(_bytes(_tiff(folder / "a.tif"), lambda data: b""))


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "a.tif")
    _read(folder / "a.tif")


def _loop_of_links(folder: Path) -> None:
    (folder / "a.tif").symlink_to(folder / "b.tif")
    (folder / "b.tif").symlink_to(folder / "a.tif")
    _read(folder / "a.tif")


def _other_suffix(folder: Path) -> None:
    imagecodecs = pytest.importorskip("imagecodecs")
    pixels = numbers((20, 30, 3), "uint8")
    (folder / "a.tif").write_bytes(imagecodecs.png_encode(pixels))
    assert np.array_equal(_read(folder / "a.tif"), pixels)


def _complex_pixels(folder: Path) -> None:
    _read(write(folder / "a.tif", numbers((40, 50, 1), "float32").astype(np.complex64)))


def _only_nodata(folder: Path) -> None:
    path = write(folder / "a.tif", np.zeros((40, 50, 1), np.uint16), nodata=0)
    percentile_range(open_image(path), 1, 99)


def _shapefile_without_its_table(folder: Path) -> None:
    pyogrio = pytest.importorskip("pyogrio")
    square = shapely.to_wkb(np.array([shapely.box(0, 0, 9, 9)]))
    path, options = folder / "a.shp", {"crs": "EPSG:32632", "geometry_type": "Polygon"}
    pyogrio.raw.write(path, square, field_data=[np.array(["a"], object)], fields=["class"], **options)
    path.with_suffix(".dbf").unlink()
    read_annotations(path, {"a": 1}, georeference=_place())


def _database_without_layers(folder: Path) -> None:
    pytest.importorskip("pyogrio")
    (folder / "a.gpkg").write_bytes(b"SQLite format 3\0" + bytes(84))
    read_annotations(folder / "a.gpkg", {"a": 1}, georeference=_place())


def _place() -> Georeference:
    return Georeference(crs_wkt=rasterio.crs.CRS.from_epsg(32632).to_wkt(), transform=(1.0, 0.0, 0.0, 0.0, -1.0, 9.0))


def _geojson(folder: Path, **members: Any) -> Path:
    square = {"type": "Polygon", "coordinates": [[[1, 1], [5, 1], [5, 5], [1, 1]]]}
    return _text(folder / "a.geojson", json.dumps({"type": "Feature", "geometry": square, "properties": {}, **members}))


def _geojson_without_names(folder: Path) -> None:
    read_annotations(_geojson(folder), {"a": 1})


def _geojson_of_an_unknown_system(folder: Path) -> None:
    read_geojson(_geojson(folder, crs={"type": "name", "properties": {"name": "EPSG:1"}}), georeference=_place())


def _geojson_on_the_map(folder: Path) -> None:
    read_geojson(_geojson(folder, crs={"type": "name", "properties": {"name": "EPSG:32632"}}))


def _geojson_with_a_wrong_crs(folder: Path) -> None:
    read_geojson(_geojson(folder, crs={"type": "link"}), georeference=_place())


def _xml_bomb(folder: Path) -> None:
    text = f'<?xml version="1.0"?>{_BOMB}<ASAP_Annotations>&z;</ASAP_Annotations>'
    read_annotations(_text(folder / "a.xml", text), {"a": 1})


def _labels_of_fractions(folder: Path) -> None:
    open_labels(write(folder / "a.tif", numbers((40, 50, 1), "float32")))


#: The refusal of each file, or ``None`` for a policy that the case asserts.
CASES: dict[Callable[[Path], None], tuple[type[Exception], str] | None] = {
    _truncated_cog: (sft.SourceError, r"a\.tif .*tiles of level 0 are outside its data.*cut short"),
    _truncated_cog_by_gdal: (sft.SourceError, r"cannot read columns .* of .*a\.tif"),
    _other_byte_order: (sft.SourceError, r"cannot open .*a\.tif"),
    _loop_of_pages: (sft.SourceError, r"its list of images \(so far 1\) continues at byte 8"),
    _unknown_compression: (sft.SourceError, r"a\.tif"),
    _huge_size: (sft.SftError, r"a\.tif"),
    _huge_tile: (sft.SftError, r"a\.tif"),
    _zero_width: (sft.SourceError, r"a\.tif"),
    _tiles_in_the_header: (sft.SourceError, r"a\.tif .*tiles of level 0 are outside its data"),
    _ome_with_a_bomb: None,
    _gdal_metadata_with_a_bomb: None,
    _ome_of_another_size: (sft.InputError, r"a\.ome\.tif of IYX = \(3, 40, 50\): axis 'i' has 3 entries"),
    _nodata_without_a_number: None,
    _without_overviews: None,
    _external_mask: (sft.SourceError, r"a\.tif\.msk next to it is a mask of valid pixels.*Choose mask=.fill"),
    _without_a_system: None,
    _ground_control_points: None,
    _singular_transform: (sft.InputError, r"a\.geojson: the transform of the image, .*, has no inverse"),
    _bands_of_two_types: (sft.SourceError, r"a\.vrt as an image: its bands are uint16, uint8"),
    _vrt_of_itself: (sft.SourceError, r"a\.vrt"),
    _vrt_with_code: (sft.SourceError, r"a\.vrt"),
    _vrt_cut_short: (sft.SourceError, r"cannot open .*a\.vrt"),
    _empty_chunk: (sft.SourceError, r"a\.zarr"),
    _chunk_cut_short: (sft.SourceError, r"a\.zarr"),
    _raw_chunk_cut_short: (sft.SourceError, r"a\.zarr"),
    _missing_chunk: None,
    _shard_cut_short: (sft.SourceError, r"a\.zarr"),
    _no_json: (sft.SourceError, r"a\.zarr"),
    _negative_shape: (sft.SourceError, r"a\.zarr"),
    _ome_without_levels: (sft.SourceError, r"a\.zarr"),
    _ome_of_a_missing_array: (sft.SourceError, r"a\.zarr"),
    _zip_cut_short: (sft.SourceError, r"a\.zip: .*cut short"),
    _npy_of_objects: (sft.SftError, r"a\.npy"),
    _npy_cut_short: (sft.SourceError, r"a\.npy"),
    _empty_file: (sft.SourceError, r"a\.tif: it has 0 bytes"),
    _pipe: (sft.SourceError, r"a\.tif: it is neither a file nor a folder"),
    _loop_of_links: (sft.SourceError, r"cannot open .*a\.tif"),
    _other_suffix: None,
    _complex_pixels: (sft.SourceError, r"a\.tif"),
    _only_nodata: (sft.InputError, "none has data"),
    _shapefile_without_its_table: (sft.SftError, r"a\.shp"),
    _database_without_layers: (sft.SourceError, r"a\.gpkg as a shapefile or GeoPackage"),
    _geojson_without_names: (sft.InputError, r"annotations are '\(no class\)' \(1\)"),
    _geojson_of_an_unknown_system: (sft.InputError, r"its coordinate system 'EPSG:1' is unknown"),
    _geojson_on_the_map: (sft.InputError, r"map coordinates \(EPSG:32632\), and the image has no georeference"),
    _geojson_with_a_wrong_crs: (sft.SourceError, r"an object lacks 'properties'"),
    _xml_bomb: (sft.SourceError, "it has a document type"),
    _labels_of_fractions: (sft.InputError, "it holds float32, labels are integers"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_damaged_and_odd_files(case: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refusal = CASES[case]
    if refusal is None:
        case(tmp_path)
        return
    with pytest.raises(refusal[0], match=refusal[1]) as raised:
        case(tmp_path)
    assert isinstance(raised.value, sft.SftError) and str(raised.value).strip().endswith((".", ")", '"'))


def test_the_list_names_every_test() -> None:
    """Rows of this module are its cases; other rows name tests that exist."""
    rows = re.findall(r"^\| .* \| `([^`]+)` \|$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    ours = {row.partition("[")[2].strip("]") for row in rows if row.startswith("test_damaged_files.py::")}
    assert ours == {case.__name__.strip("_") for case in CASES}
    for row in set(rows) - {row for row in rows if row.startswith("test_damaged_files.py::")}:
        file, _, name = row.partition("::")
        assert f"def {name.partition('[')[0]}(" in (_PAGE.parent / file).read_text(encoding="utf-8"), row
    assert len(rows) >= 40
