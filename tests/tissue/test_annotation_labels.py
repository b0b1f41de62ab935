"""Annotations as labels: GeoJSON, ASAP XML, shapefile and GeoPackage, painted in strips at any resolution."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sft import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import ArrayImage, Cropped, Georeference, ImageLabels
from sft.tissue import AnnotationLabels, Masked, Regions, TissueMask, read_annotations, read_geojson

shapely = pytest.importorskip("shapely")

#: Outer ring and hole of a tumour, and a necrosis in it.
_TUMOUR, _HOLE, _NECROSIS = (
    [(2, 2), (30, 2), (30, 20), (2, 20)],
    [(20, 5), (26, 5), (26, 11), (20, 11)],
    [(4, 4), (12, 4), (12, 12), (4, 12)],
)
_CLASSES = {"Tumor": 1, "Necrosis": 2}


def _geojson(path: Path) -> Path:
    def feature(rings: Any, classification: Any) -> Any:
        closed = [[*ring, ring[0]] for ring in rings]
        geometry = {"type": "Polygon", "coordinates": closed}
        return {"type": "Feature", "geometry": geometry, "properties": {"classification": classification}}

    features = [feature([_NECROSIS], {"name": "Necrosis"}), feature([_TUMOUR, _HOLE], {"names": ["Tumor", "Positive"]})]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


def _asap(path: Path) -> Path:
    def annotation(ring: Any, group: str, kind: str = "Polygon") -> str:
        corners = "".join(f'<Coordinate Order="{order}" X="{x}" Y="{y}"/>' for order, (x, y) in reversed(list(enumerate(ring))))
        return f'<Annotation Name="a" Type="{kind}" PartOfGroup="{group}"><Coordinates>{corners}</Coordinates></Annotation>'

    bridged = [*_TUMOUR, _TUMOUR[0], *_HOLE, _HOLE[0]]  # the outline of a hole in one ring, as programs write it
    text = annotation(_NECROSIS, "Necrosis") + annotation(bridged, "Tumor", "Spline") + annotation(_TUMOUR[:1], "Tumor", "Dot")
    path.write_text(f'<?xml version="1.0"?><ASAP_Annotations><Annotations>{text}</Annotations></ASAP_Annotations>')
    return path


def _labels(path: Path, classes: dict[str, int], **options: Any) -> Any:
    layers = read_annotations(path, classes, **options)
    return AnnotationLabels(layers, width_px=40, height_px=24).read(0, 0, 40, 24)[..., 0]


def _expected() -> Any:
    labels = np.zeros((24, 40), np.uint8)
    labels[2:20, 2:30] = 1
    labels[5:11, 20:26] = 0
    labels[4:12, 4:12] = 2
    return labels


def test_qupath_with_derived_classes_and_holes_pathology_whole_slide_data_41(tmp_path: Path) -> None:
    path = _geojson(tmp_path / "a.geojson")
    assert np.array_equal(_labels(path, _CLASSES), _expected())
    assert np.array_equal(_labels(path, {"Tumor: Positive": 1, "Necrosis": 2}), _expected())
    covered = _labels(path, {"Necrosis": 2, "Tumor": 1})
    assert (covered[4:12, 4:12] == 1).all(), "the class that is named later counts"


def test_asap_xml_asap_68(tmp_path: Path) -> None:
    """computationalpathologygroup/ASAP#68, #195, #242: annotations of CAMELYON."""
    labels = _labels(_asap(tmp_path / "a.xml"), _CLASSES)
    assert np.array_equal(labels[:, :18], _expected()[:, :18])
    assert labels[15, 28] == 1 and labels[22, 35] == 0


@pytest.mark.parametrize("write", [_geojson, _asap])
def test_classes_that_are_not_there_are_named(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path / ("a.geojson" if write is _geojson else "a.xml"))
    with pytest.raises(InputError, match=r"no annotation with an area has 'Tumour'\. Its 2 annotations are 'Necrosis' \(1\), 'Tumor"):
        read_annotations(path, {"Tumour": 1, "Necrosis": 2})
    with pytest.raises(InputError, match=r"1 annotations are of other classes, such as 'Necrosis'.*ignore_others=True leaves them out"):
        read_annotations(path, {"Tumor": 1})
    assert set(np.unique(_labels(path, {"Tumor": 7}, ignore_others=True))) == {0, 7}
    assert set(np.unique(_labels(path, {**_CLASSES, "Stroma": 3}, required=False))) == {0, 1, 2}
    for wrong in ({}, {"Tumor": -1}, {"Tumor": 0.5}):
        with pytest.raises(InputError, match="give the label of each class"):
            read_annotations(path, wrong)  # type: ignore[arg-type]


@settings(max_examples=20)
@given(st.data())
def test_any_rectangle_and_resolution_has_the_labels_of_the_full_map(data: st.DataObject) -> None:
    corners = st.lists(st.tuples(st.integers(-5, 70), st.integers(-50, 600).map(lambda y: y / 10)), min_size=3, max_size=6, unique=True)
    layers = [(data.draw(st.integers(0, 300)), Regions([[data.draw(corners)]])) for _ in range(data.draw(st.integers(1, 4)))]
    scale = data.draw(st.sampled_from([(1.0, 1.0), (2.0, 2.0), (0.5, 3.0)]))
    try:
        image = AnnotationLabels(layers, width_px=30, height_px=20, scale=scale)
    except InputError:
        assert not any(regions.region(0, 0, 30, 20, step=scale).any() for _, regions in layers)
        return
    full = image.read(0, 0, 30, 20)
    expected = np.zeros((20, 30), np.int64)
    for label, regions in layers:
        expected[regions.region(0, 0, 30, 20, step=scale)] = label
    assert np.array_equal(full[..., 0], expected)
    y, h = data.draw(st.integers(0, 18)), data.draw(st.integers(1, 2))
    x, w = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 10))
    assert np.array_equal(image.read(x, y, w, h), full[y : y + h, x : x + w])
    source = ImageLabels(Cropped(pickle.loads(pickle.dumps(image)), x=x, y=0, w=w, h=20))
    out = torch.empty(1, 1, h, w, dtype=torch.int64)
    source.rows(Interval(y, y + h), out)
    assert np.array_equal(out[0, 0], expected[y : y + h, x : x + w])


@pytest.mark.parametrize("kind", ["shp", "gpkg"])
def test_shapefiles_and_geopackages(kind: str, tmp_path: Path) -> None:
    pyogrio, rasterio = pytest.importorskip("pyogrio"), pytest.importorskip("rasterio")
    scene = Georeference(crs_wkt=rasterio.crs.CRS.from_epsg(32632).to_wkt(), transform=(10.0, 0.0, 500_000.0, 0.0, -10.0, 5_000_000.0))

    def on_ground(rings: Any) -> Any:
        moved = [[scene.point(x, y) for x, y in ring] for ring in rings]
        return shapely.Polygon(moved[0], moved[1:])

    path = tmp_path / f"a.{kind}"
    geometry = shapely.to_wkb(np.array([on_ground([_NECROSIS]), on_ground([_TUMOUR, _HOLE])]))
    classes = np.array(["Necrosis", "Tumor"], object)
    pyogrio.raw.write(path, geometry, field_data=[classes], fields=["class"], crs="EPSG:32632", geometry_type="Polygon")
    assert np.array_equal(_labels(path, _CLASSES, georeference=scene), _expected())
    with pytest.raises(InputError, match="it has 'class'"):
        read_annotations(path, _CLASSES, georeference=scene, column="land_use")
    with pytest.raises(InputError, match="the image has no georeference"):
        read_annotations(path, _CLASSES)
    path.write_bytes(path.read_bytes()[:90])
    with pytest.raises(SourceError, match=rf"a\.{kind} as a shapefile or GeoPackage"):
        read_annotations(path, _CLASSES, georeference=scene)


@pytest.mark.parametrize("kind", ["shp", "gpkg", "geojson"])
@pytest.mark.parametrize("epsg", [4326, 3857, 32633])
def test_polygons_of_another_coordinate_system(kind: str, epsg: int, tmp_path: Path) -> None:
    """The corners of the image's system, in another one, are those of the image again; edges within a sixty-fourth of a pixel."""
    pyogrio, rasterio = pytest.importorskip("pyogrio"), pytest.importorskip("rasterio")
    from rasterio.warp import transform

    wkt = rasterio.crs.CRS.from_epsg(32632).to_wkt()
    scene = Georeference(crs_wkt=wkt, transform=(100.0, 0.0, 500_000.0, 0.0, -100.0, 5_000_000.0))

    def elsewhere(ring: Any) -> Any:
        x, y = zip(*(scene.point(*corner) for corner in ring), strict=True)
        return list(zip(*transform("EPSG:32632", f"EPSG:{epsg}", list(x), list(y)), strict=True))

    rings = [elsewhere(ring) for ring in (_NECROSIS, _TUMOUR, _HOLE)]
    path = tmp_path / f"a.{kind}"
    geometries = [shapely.Polygon(rings[0]), shapely.Polygon(rings[1], rings[2:])]
    classes = np.array(["Necrosis", "Tumor"], object)
    if kind == "geojson":
        features = [
            {"type": "Feature", "geometry": shapely.geometry.mapping(shape), "properties": {"classification": name}}
            for shape, name in zip(geometries, classes, strict=True)
        ]
        system = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:EPSG::{epsg}"}}
        path.write_text(json.dumps({"type": "FeatureCollection", "crs": system, "features": features}))
    else:
        options: Any = {"fields": ["class"], "crs": f"EPSG:{epsg}", "geometry_type": "Polygon"}
        pyogrio.raw.write(path, shapely.to_wkb(np.array(geometries)), field_data=[classes], **options)
    layers = read_annotations(path, _CLASSES, georeference=scene)
    assert np.array_equal(AnnotationLabels(layers, width_px=40, height_px=24).read(0, 0, 40, 24)[..., 0], _expected())
    for label, exact in ((1, shapely.Polygon(_TUMOUR, [_HOLE])), (2, shapely.Polygon(_NECROSIS))):
        ((_, regions),) = [layer for layer in layers if layer[0] == label]
        (polygon,) = regions.polygons
        area = shapely.Polygon(polygon[0], polygon[1:])
        # Straight edges of the other system are curves here; the corners agree.
        assert shapely.hausdorff_distance(area, exact) < 0.05 and shapely.symmetric_difference(area, exact).area < 0.5
    with pytest.raises(InputError, match=r"map coordinates.*the image has no georeference"):
        read_annotations(path, _CLASSES)
    unrelated = Georeference(crs_wkt=rasterio.crs.CRS.from_epsg(2193).to_wkt(), transform=scene.transform)
    try:
        far = read_annotations(path, _CLASSES, georeference=unrelated)
    except InputError as error:
        assert "have no place in" in str(error) or "no smooth image" in str(error)
    else:
        with pytest.raises(InputError, match="are outside of the image"):
            AnnotationLabels(far, width_px=40, height_px=24)


def test_long_edges_are_divided_where_they_are_curves() -> None:
    """A meridian and parallels over ten degrees, in a projection in which parallels are arcs."""
    rasterio = pytest.importorskip("rasterio")
    from rasterio.warp import transform

    from sft.tissue.map_polygons import EDGE_TOLERANCE_PX, MapToPixels

    crs = rasterio.crs.CRS.from_epsg(3035)
    scene = Georeference(crs_wkt=crs.to_wkt(), transform=(500.0, 0.0, 4_000_000.0, 0.0, -500.0, 3_500_000.0))
    ring = np.array([(5.0, 45.0), (15.0, 45.0), (15.0, 50.0), (5.0, 50.0)])
    (pixels,) = MapToPixels("a.gpkg", "EPSG:4326", scene).polygon((ring,))
    along = np.stack([np.linspace(5, 15, 1001), np.full(1001, 45.0)], axis=1)
    x, y = transform("EPSG:4326", crs, along[:, 0].tolist(), along[:, 1].tolist())
    truth = shapely.LineString(np.stack([(np.array(x) - 4_000_000) / 500, (3_500_000 - np.array(y)) / 500], axis=1))
    outline = shapely.LinearRing(pixels)
    assert len(pixels) > 50 and max(outline.distance(shapely.Point(point)) for point in truth.coords) <= EDGE_TOLERANCE_PX
    with pytest.raises(InputError, match="its coordinate system 'EPSG:1' is unknown"):
        MapToPixels("a.gpkg", "EPSG:1", scene)


@pytest.mark.parametrize(("x", "y"), [(40, 3), (-31, 3), (3, 24), (3, -24), (-400, 5_000_000)])
def test_polygons_outside_of_the_image(x: float, y: float) -> None:
    """Otherwise labels would be background without an error, and a masked image would have one colour; a partial overlap is accepted."""
    far = Regions([[np.array(_TUMOUR, float) - 2 + (x, y)]])
    near = Regions([[np.array(_TUMOUR, float) - 2 + (10, 10)]])
    span = rf"all 1 polygons are outside of the image\. They span columns {x:,} to {x + 28:,} and rows {y:,} to {y + 18:,}"
    image = ArrayImage(np.zeros((24, 40, 3), np.uint8))
    for refused in (
        lambda: AnnotationLabels([(1, far)], width_px=40, height_px=24, name="a.xml"),
        lambda: AnnotationLabels([(1, far)], width_px=20, height_px=12, scale=(2.0, 2.0), name="a.xml"),
        lambda: Masked(image, far),
        lambda: TissueMask.from_regions(far, width_px=40, height_px=24, downsample=4),
    ):
        with pytest.raises(InputError, match=rf"{span}, the image columns 0 to 40 and rows 0 to 24 \(px of level 0\)"):
            refused()
    both = AnnotationLabels([(1, far), (2, near)], width_px=40, height_px=24)
    assert (both.read(0, 0, 40, 24)[10:24, 10:38] == 2).all()
    assert Masked(image, Regions([*far.polygons, *near.polygons])).mask is not None
    assert not AnnotationLabels([], width_px=4, height_px=3).read(0, 0, 4, 3).any(), "no polygons: an image without annotations"


def _properties(path: Path, *properties: Any, **members: Any) -> Path:
    """Features of GeoJSON with these properties: squares of 4 px side by side."""
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [[[x, 2], [x + 4, 2], [x + 4, 6], [x, 6], [x, 2]]]},
            "properties": its,
        }
        for x, its in zip(range(2, 90, 6), properties, strict=False)
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features, **members}))
    return path


def test_geojson_of_a_gis_has_its_class_in_a_property(tmp_path: Path) -> None:
    path = _properties(tmp_path / "a.geojson", {"class": "Tumor", "fid": 1}, {"class": "Necrosis", "name": "n", "fid": 2})
    labels = _labels(path, _CLASSES)
    assert labels[3, 3] == 1 and labels[3, 9] == 2 and labels[3, 15] == 0
    assert np.array_equal(_labels(path, {"1": 1, "2": 2}, column="fid"), labels), "numbers are names of classes, too"
    both = _properties(tmp_path / "b.geojson", {"class": "x", "classification": {"name": "Tumor"}}, {"classification": "Necrosis"})
    assert np.array_equal(_labels(both, _CLASSES), labels), "the class of QuPath counts"
    other = _properties(tmp_path / "c.geojson", {"fid": 1, "land": "Tumor"}, {"fid": 2, "land": None})
    with pytest.raises(InputError, match=r"'\(no class\)' \(2\), their properties fid, land: column= chooses the one with the class"):
        read_annotations(other, _CLASSES)
    assert _labels(other, {"Tumor": 1}, column="land", ignore_others=True)[3, 3] == 1


def test_degrees_without_a_coordinate_system(tmp_path: Path) -> None:
    """RFC 7946 means longitude and latitude, QuPath pixels: polygons of degrees would label some pixels of the upper left corner."""
    rasterio = pytest.importorskip("rasterio")
    scene = Georeference(crs_wkt=rasterio.crs.CRS.from_epsg(4326).to_wkt(), transform=(1e-4, 0.0, 9.0, 0.0, -1e-4, 47.0))
    corners = [[9.0001, 46.99991], [9.0021, 46.99991], [9.0021, 46.9988], [9.0001, 46.9988], [9.0001, 46.99991]]
    feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [corners]}, "properties": {"class": "Tumor"}}
    path = tmp_path / "a.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    for read in (lambda **options: read_annotations(path, {"Tumor": 1}, **options), lambda **options: read_geojson(path, **options)):
        with pytest.raises(
            InputError, match=r'9\.0001 to 9\.0021 and 46\.9988 to 46\.9999, may be .* Choose crs="OGC:CRS84" or crs="pixels"'
        ):
            read(georeference=scene)
        with pytest.raises(InputError, match="the image has no georeference"):
            read(crs="OGC:CRS84")
        assert read(georeference=scene, crs="pixels") and read(), "an image without map coordinates has pixels"
    ((_, regions),) = read_annotations(path, {"Tumor": 1}, georeference=scene, crs="OGC:CRS84")
    assert regions.bounding_box() == pytest.approx((1, 0.9, 21, 12), abs=1e-6)
    plain = _properties(tmp_path / "b.geojson", {"class": "Tumor"})
    assert read_annotations(plain, {"Tumor": 1}, georeference=scene)[0][1].bounding_box() == (2, 2, 6, 6)


_BOMB = (
    '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x "' + "y" * 100 + '"><!ENTITY z "&x;&x;&x;&x;">]><ASAP_Annotations>&z;</ASAP_Annotations>'
)
_EXTERNAL = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><ASAP_Annotations>&x;</ASAP_Annotations>'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bomb.xml", _BOMB, "it has a document type, and its entities may expand to any size"),
        ("external.xml", _EXTERNAL, "it has a document type"),
        ("deep.xml", "<a>" * 500 + "</a>" * 500, "more than 200 levels"),
        ("cut.xml", "<ASAP_Annotations><Annotations>", "it is not XML"),
        ("other.xml", "<html></html>", "its root is 'html', not 'ASAP_Annotations'"),
        ("nan.xml", '<Annotation Type="Polygon">' + '<Coordinate X="nan" Y="1"/>' * 3 + "</Annotation>", "not a finite number"),
        ("text.xml", '<Annotation Type="Polygon"><Coordinate X="a" Y="1"/></Annotation>', "could not convert"),
        ("corner.xml", '<Annotation Type="Polygon"><Coordinate X="1"/></Annotation>', "a corner lacks 'Y'"),
        ("bytes.xml", "\x00\x01", "it is not XML"),
        ("names.geojson", '{"type": "FeatureCollection", "features": [{"type": "Feature", "geometry": null}]}', "It has no polygons"),
        ("nan.geojson", '{"type": "Point", "coordinates": [NaN, 1]}', "NaN is not a JSON number"),
        ("list.geojson", '{"type": "FeatureCollection", "features": [3]}', "cannot read"),
        ("a.txt", "", r"give \.geojson"),
    ],
)
def test_damaged_annotations(name: str, content: str, message: str, tmp_path: Path) -> None:
    if "<Annotation " in content:
        content = f"<ASAP_Annotations><Annotations>{content}</Annotations></ASAP_Annotations>"
    (tmp_path / name).write_text(content)
    with pytest.raises((InputError, SourceError), match=message):
        read_annotations(tmp_path / name, _CLASSES)


def test_annotations_without_a_name(tmp_path: Path) -> None:
    """QuPath writes annotations without a class."""
    polygon = {"type": "Polygon", "coordinates": [[*_TUMOUR, _TUMOUR[0]]]}
    (tmp_path / "a.geojson").write_text(json.dumps({"type": "Feature", "geometry": polygon, "properties": {}}))
    with pytest.raises(InputError, match=r"has 'Tumor', 'Necrosis'\. Its 1 annotations are '\(no class\)' \(1\)"):
        read_annotations(tmp_path / "a.geojson", _CLASSES)
    with pytest.raises(SourceError, match="cannot read"):
        read_annotations(tmp_path / "none.xml", _CLASSES)
