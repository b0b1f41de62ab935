"""Tissue on the real slide, masks and polygons and their files, and slides painted over strip by strip."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sft.common.errors import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import ArrayImage, Cached, Cropped, Normalized, StripReader, TiffImage, open_image, read_strips
from sft.tissue import Masked, Regions, TissueMask, crop_to_tissue, find_tissue, read_geojson, write_geojson
from sft.tissue.find import saturation
from sft.tissue.geojson import mask_outline
from sft.tissue.mask import Box
from tests.helpers.slides import SLIDE, SLIDE_SIZE, tissue_like, write_slide

for _library in ("skimage", "tifffile", "simplejpeg", "openslide"):
    pytest.importorskip(_library)
shapely: Any = pytest.importorskip("shapely")

WIDTH_PX, HEIGHT_PX = SLIDE_SIZE
Bool = npt.NDArray[np.bool_]


@pytest.fixture(scope="module")
def real() -> TissueMask:
    return find_tissue(open_image(SLIDE))


def mask_of(pixels: Any, factor: int = 16) -> TissueMask:
    pixels = np.asarray(pixels, bool)
    return TissueMask(pixels=pixels, width_px=pixels.shape[1] * factor, height_px=pixels.shape[0] * factor)


def blobs(rows: int, columns: int, seed: int, density: float = 0.5) -> Bool:
    mask: Bool = np.random.default_rng(seed).random((rows, columns)) < density
    return mask


# --- finding ---------------------------------------------------------------------------------------------------------


def test_tissue_of_the_real_slide(real: TissueMask) -> None:
    assert (real.width_px, real.height_px) == SLIDE_SIZE and real.pixels.shape == (185, 138)
    assert 0.30 < real.share < 0.42
    # By eye: the epidermis in the middle is tissue, the glass in the upper left corner and on the right is not.
    assert real.region(1000, 2000, 200, 200).all()
    assert not real.region(0, 0, 400, 600).any() and not real.region(2120, 1800, 100, 100).any()
    box = real.bounding_box()
    assert box is not None and box.h > 2500 and 1700 < box.w < 2100


def test_it_does_not_depend_on_the_reader(real: TissueMask) -> None:
    assert np.array_equal(find_tissue(open_image(SLIDE, reader="openslide")).pixels, real.pixels)
    small = find_tissue(open_image(SLIDE, slide_mpp=0.25))
    assert small.pixels.shape == (HEIGHT_PX // 32, WIDTH_PX // 32)
    assert abs(small.share - real.share) < 0.05


def test_a_low_level_is_enough(tmp_path: Path, real: TissueMask) -> None:
    """Of a pyramid the nearest level that is fine enough is read, and nothing else."""
    pixels = TiffImage(SLIDE).read(0, 0, 2176, 2944)
    write_slide(tmp_path / "slide.tif", pixels, num_levels=4, mpp=0.499, compression="deflate")
    tiff = TiffImage(tmp_path / "slide.tif", num_threads=1)
    mask = find_tissue(tiff)
    assert mask.pixels.shape == (184, 136) and tiff.num_tiles_decoded == 6 * 5  # 368 x 272 px in tiles of 64
    agreeing = mask.pixels == real.pixels[:184, :136]
    assert agreeing.mean() > 0.93  # every eighth pixel differs from means of all


def test_a_slide_without_tissue() -> None:
    noise = np.random.default_rng(0).integers(240, 246, (400, 300, 3), dtype=np.uint8)
    for glass in (noise, np.full((400, 300, 3), 255, np.uint8), np.zeros((400, 300, 3), np.uint8)):
        mask = find_tissue(ArrayImage(glass), downsample=4)
        assert mask.share == 0 and mask.bounding_box() is None
        with pytest.raises(InputError, match="none"):
            crop_to_tissue(ArrayImage(glass), mask)
        assert find_tissue(ArrayImage(glass), downsample=50).share == 0, "a mask of 48 px"


def test_tissue_of_a_mask_of_a_few_pixels_is_no_speck() -> None:
    pixels = np.full((320, 320, 3), 255, np.uint8)
    pixels[80:200, 80:240] = (200, 60, 120)
    mask = find_tissue(ArrayImage(pixels), downsample=40, closing_px=0)
    assert mask.pixels.shape == (8, 8) and mask.pixels.sum() == 12


def test_specks_go_and_holes_are_filled() -> None:
    pixels = np.full((80, 100, 3), 255, np.uint8)
    pixels[10:50, 10:60] = (200, 60, 120)
    pixels[20:24, 20:24] = 255  # a hole of 16 px
    pixels[30:45, 30:45] = 255  # one of 225 px
    pixels[70:73, 90:93] = (200, 60, 120)  # a speck of 9 px
    tissue = find_tissue(ArrayImage(pixels), downsample=1, min_object_px=10, max_hole_px=20, closing_px=0).pixels
    expected = np.zeros((80, 100), bool)
    expected[10:50, 10:60] = True
    expected[30:45, 30:45] = False
    assert np.array_equal(tissue, expected)
    everything = find_tissue(ArrayImage(pixels), downsample=1, min_object_px=9, max_hole_px=15, closing_px=0).pixels
    assert everything[71, 91] and not everything[22, 22]


def test_wrong_arguments_for_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    grey = ArrayImage(np.zeros((40, 50), np.uint8))
    with pytest.raises(InputError, match="RGB"):
        find_tissue(grey)
    with pytest.raises(InputError, match="0 or more"):
        find_tissue(grey, closing_px=-1)
    with pytest.raises(InputError, match="at least 1"):
        find_tissue(grey, downsample=0)
    with pytest.raises(InputError, match="must be RGB"):
        saturation(np.zeros((2, 2, 4), np.uint8))
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(SourceError, match=r"pip install .*\[tissue\]"):
        find_tissue(ArrayImage(tissue_like(40, 50)))


# --- masks -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 60), st.integers(0, 60), st.integers(0, 99), st.data())
def test_a_mask_answers_for_every_pixel(rows: int, columns: int, more_x: int, more_y: int, seed: int, data: st.DataObject) -> None:
    mask = TissueMask(pixels=blobs(rows, columns, seed, 0.3), width_px=columns + more_x, height_px=rows + more_y)
    step_x, step_y = mask.step
    whole = np.array(
        [[mask.pixels[int((y + 0.5) / step_y), int((x + 0.5) / step_x)] for x in range(mask.width_px)] for y in range(mask.height_px)]
    )
    x, y = data.draw(st.integers(0, mask.width_px - 1)), data.draw(st.integers(0, mask.height_px - 1))
    w, h = data.draw(st.integers(1, mask.width_px - x)), data.draw(st.integers(1, mask.height_px - y))
    assert np.array_equal(mask.region(x, y, w, h), whole[y : y + h, x : x + w])
    box = mask.bounding_box()
    used_y, used_x = np.nonzero(whole)
    if box is None:
        assert not len(used_x)
    else:
        assert [box.x, box.y, box.w, box.h] == [used_x.min(), used_y.min(), np.ptp(used_x) + 1, np.ptp(used_y) + 1]
        assert mask.bounding_box(margin_px=1000) == Box(x=0, y=0, w=mask.width_px, h=mask.height_px)


def test_a_mask_as_a_png(tmp_path: Path, real: TissueMask) -> None:
    path = tmp_path / "mask.png"
    real.save_png(path)
    copy = TissueMask.load_png(path)
    assert np.array_equal(copy.pixels, real.pixels) and (copy.width_px, copy.height_px) == SLIDE_SIZE
    from PIL import Image

    Image.fromarray(real.pixels.astype(np.uint8) * 255).convert("RGB").save(path)  # by another program
    with pytest.raises(InputError, match="width_px and height_px"):
        TissueMask.load_png(path)
    assert np.array_equal(TissueMask.load_png(path, width_px=WIDTH_PX, height_px=HEIGHT_PX).pixels, real.pixels)
    before = path.read_bytes()
    path.write_bytes(before[:200])
    with pytest.raises(SourceError, match=r"mask\.png"):
        TissueMask.load_png(path)
    with pytest.raises(SourceError, match="folder"):
        real.save_png(tmp_path / "nowhere" / "mask.png")
    assert os.listdir(tmp_path) == ["mask.png"]


def test_wrong_masks() -> None:
    wrong: Any = ((np.zeros((2, 2)), 9), (np.zeros((2, 2, 1), bool), 9), (np.zeros((0, 2), bool), 9), (np.zeros((5, 5), bool), 4))
    for pixels, size in wrong:
        with pytest.raises(InputError, match="cannot use a mask"):
            TissueMask(pixels=pixels, width_px=size, height_px=size)
    with pytest.raises(InputError, match="at least 1"):
        TissueMask.from_regions(Regions([]), width_px=10, height_px=10, downsample=0)


# --- polygons --------------------------------------------------------------------------------------------------------

corners = st.lists(st.tuples(st.floats(-5, 25), st.floats(-5, 25)), min_size=3, max_size=9, unique=True)


@given(st.lists(corners, min_size=1, max_size=3), st.integers(0, 12), st.integers(0, 12), st.integers(1, 12), st.integers(1, 12))
def test_a_rectangle_alone_is_that_part_of_the_whole(rings: Any, x: int, y: int, w: int, h: int) -> None:
    regions = Regions([[ring] for ring in rings])
    whole = regions.region(0, 0, 24, 24)
    assert np.array_equal(regions.region(x, y, w, h), whole[y : y + h, x : x + w])


@given(st.integers(0, 999))
def test_pixels_are_inside_where_their_centres_are(seed: int) -> None:
    """Against shapely, for stars (which do not cross themselves) with a hole each; no centre is on a border."""
    rng = np.random.default_rng(seed)
    polygons = []
    for _ in range(2):
        centre, angles = rng.uniform(5, 20, 2), np.sort(rng.uniform(0, 2 * np.pi, 7))
        star = centre + (rng.uniform(4, 12, (7, 1)) * np.stack([np.cos(angles), np.sin(angles)], axis=1))
        polygons.append([star, centre + (star - centre) * 0.4])
    regions = Regions(polygons)
    y, x = np.mgrid[:26, :26] + 0.5
    expected = np.zeros((26, 26), bool)
    for outer, hole in polygons:
        inside = [shapely.contains_xy(shapely.make_valid(shapely.Polygon(ring)), x, y) for ring in (outer, hole)]
        expected |= inside[0] ^ inside[1]
    assert np.array_equal(regions.region(0, 0, 26, 26), expected)


def test_neighbours_share_no_pixel() -> None:
    left, right = [(0, 0), (6.5, 0), (3.5, 8), (0, 8)], [(6.5, 0), (10, 0), (10, 8), (3.5, 8)]
    first, second = (Regions([[ring]]).region(0, 0, 10, 8) for ring in (left, right))
    assert not (first & second).any() and (first | second).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
def test_a_mask_through_geojson_is_itself(tmp_path: Path, seed: int, density: float) -> None:
    """Also where pixels touch at a corner, and where a step is not an integer."""
    mask = TissueMask(pixels=blobs(17, 23, seed, density), width_px=1000, height_px=777)
    write_geojson(tmp_path / "tissue.geojson", mask, name="Tumour")
    regions = read_geojson(tmp_path / "tissue.geojson", names=["Tumour"])
    assert np.array_equal(regions.region(0, 0, 23, 17, step=mask.step), mask.pixels)
    assert regions.area_px == pytest.approx(mask.share * 1000 * 777)
    assert read_geojson(tmp_path / "tissue.geojson", names=["Other"], required=False).polygons == ()
    downsample = 1000 / 23
    assert regions.scaled(1 / downsample, 1 / downsample).area_px == pytest.approx(regions.area_px / downsample**2)


@pytest.mark.parametrize("corner", ["NaN", "Infinity", "1e999", "9" * 400, "9" * 5000, "[" * 100_000])
def test_corners_that_are_no_numbers(tmp_path: Path, corner: str) -> None:
    (tmp_path / "t.geojson").write_text(f'{{"type": "Polygon", "coordinates": [[[0, 0], [4, 0], [{corner}, 4], [0, 0]]]}}')
    with pytest.raises(SourceError, match="as GeoJSON"):
        read_geojson(tmp_path / "t.geojson")


def test_the_real_mask_through_geojson(tmp_path: Path, real: TissueMask) -> None:
    write_geojson(tmp_path / "tissue.geojson", real)
    regions = read_geojson(tmp_path / "tissue.geojson")
    again = TissueMask.from_regions(regions, width_px=WIDTH_PX, height_px=HEIGHT_PX, downsample=16)
    assert again.pixels.shape == (186, 139) and abs(again.share - real.share) < 0.01
    assert regions.bounding_box() is not None and len(mask_outline(real).polygons) == len(regions.polygons)


SQUARE = [[0, 0], [40, 0], [40, 40], [0, 40], [0, 0]]
HOLE = [[10, 10], [30, 10], [30, 30], [10, 30], [10, 10]]
FAR = [[100, 0], [120, 0], [120, 20], [100, 20], [100, 0]]


def qupath(geometry: Any, name: str | None = None) -> Any:
    properties: Any = {"objectType": "annotation", "classification": {"name": name, "color": [200, 0, 0]}, "isLocked": False}
    return {
        "type": "Feature",
        "id": "PathAnnotationObject",
        "geometry": geometry,
        "properties": properties if name else {"isLocked": False},
    }


@pytest.mark.parametrize(
    ("content", "area"),
    [
        ({"type": "FeatureCollection", "features": [qupath({"type": "Polygon", "coordinates": [SQUARE, HOLE]})]}, 1200),
        ([qupath({"type": "MultiPolygon", "coordinates": [[SQUARE, HOLE], [FAR]]}, "Tissue")], 1600),
        (qupath({"type": "Polygon", "coordinates": [SQUARE]}, "Tissue"), 1600),
        ({"type": "Polygon", "coordinates": [[[*corner, 0.0] for corner in FAR]]}, 400),
        (
            {
                "type": "GeometryCollection",
                "geometries": [{"type": "Point", "coordinates": [1, 2]}, {"type": "Polygon", "coordinates": [FAR]}],
            },
            400,
        ),
        ([qupath({"type": "LineString", "coordinates": SQUARE}), qupath(None)], 0),
        ({"type": "Polygon", "coordinates": [[[0, 0], [10, 10], [10, 0], [0, 10], [0, 0]]]}, 50),  # a bow tie
    ],
)
def test_exports_of_qupath(tmp_path: Path, content: Any, area: float) -> None:
    path = tmp_path / "export.geojson"
    path.write_text(json.dumps(content))
    regions = read_geojson(path)
    assert regions.area_px == pytest.approx(area)
    assert regions.region(0, 0, 130, 50).sum() == pytest.approx(area, abs=10)


def test_no_tissue_is_no_feature(tmp_path: Path) -> None:
    write_geojson(tmp_path / "none.geojson", mask_of([[0, 0], [0, 0]]))
    assert json.loads((tmp_path / "none.geojson").read_text())["features"] == []
    regions = read_geojson(tmp_path / "none.geojson")
    assert regions.bounding_box() is None and not regions.region(0, 0, 9, 9).any() and regions.area_px == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON .*, line 1, column 2"),
        (b"[1, 2]", "a list, a number or null is in the place of a feature or a geometry"),
        (b"null", "null is in the place of"),
        (b"{}", "an object lacks 'type'"),
        (b'{"type": "FeatureCollection"}', "an object lacks 'features'"),
        (b'{"type": "FeatureCollection", "features": null}', "null is in the place of"),
        (b'{"type": "Polygon"}', "an object lacks 'coordinates'"),
        (b'{"type": "Circle", "coordinates": []}', "circle"),
        (b'{"type": "Polygon", "coordinates": [[[0, 0]]]}', "at least 4 coordinates"),
        (b"\x89PNG", "byte 0 is not UTF-8"),
        (b'{"a":' * 100_000, "too many levels"),
    ],
)
def test_files_that_are_no_geojson_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "export.geojson"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=rf"export\.geojson as GeoJSON: .*{reason}.*Export it again") as refused:
        read_geojson(path)
    assert "Error:" not in str(refused.value)
    (tmp_path / "marked.geojson").write_bytes(b'\xef\xbb\xbf{"type": "Polygon", "coordinates": [[[0, 0], [4, 0], [4, 4], [0, 0]]]}')
    assert read_geojson(tmp_path / "marked.geojson").area_px == 8
    with pytest.raises(SourceError, match=r"nowhere\.geojson"):
        read_geojson(tmp_path / "nowhere.geojson")


@pytest.mark.parametrize("ring", [[(0, 0), (1, 1)], [(0, 0), (1, 1), (0, float("nan"))], [1, 2, 3]])
def test_wrong_rings(ring: Any) -> None:
    with pytest.raises(InputError, match="ring"):
        Regions([[ring]])


# --- painted over ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.sampled_from(["mask", "regions"]), st.integers(1, 40))
def test_outside_the_mask_there_is_one_colour(seed: int, kind: str, rows: int) -> None:
    pixels = tissue_like(75, 93, seed)
    mask = TissueMask(pixels=blobs(9, 11, seed), width_px=93, height_px=75)
    image = Masked(ArrayImage(pixels), mask if kind == "mask" else mask_outline(mask), background=(1, 2, 3))
    inside = image.mask.region(0, 0, 93, 75)
    expected = np.where(inside[..., None], pixels, np.array([1, 2, 3], np.uint8))
    assert np.array_equal(np.concatenate(list(read_strips(image, rows))), expected)
    assert np.array_equal(image.read(20, 30, 31, 17), expected[30:47, 20:51])


def test_glass_is_not_decoded(real: TissueMask) -> None:
    tiff = TiffImage(SLIDE, num_threads=1)
    image = Masked(tiff, real)
    whole = TiffImage(SLIDE).read(0, 0, WIDTH_PX, HEIGHT_PX)
    whole[~real.region(0, 0, WIDTH_PX, HEIGHT_PX)] = 255
    strips = [Interval(top - 3, top + 67).clip(HEIGHT_PX) for top in range(0, HEIGHT_PX, 64)]
    with StripReader(Normalized(image, mean=(0, 0, 0), std=(1, 1, 1)), strips) as reader:
        for rows, strip in zip(strips, reader, strict=True):
            assert np.array_equal(strip.mul(255).round().byte()[0].permute(1, 2, 0).numpy(), whole[rows.start : rows.stop])
    with_tissue = sum(
        real.region(x, y, min(240, WIDTH_PX - x), min(240, HEIGHT_PX - y)).any()
        for y in range(0, HEIGHT_PX, 240)
        for x in range(0, WIDTH_PX, 240)
    )
    # Each once; between two tiles with tissue only tiles of complete gaps are left out.
    assert tiff.num_tiles_decoded == with_tissue < 100


def test_cropped_to_tissue_and_kept(real: TissueMask) -> None:
    tiff = TiffImage(SLIDE, num_threads=1)
    image = Cached(crop_to_tissue(tiff, real, margin_px=10), host_budget_bytes="64MiB")
    box = real.bounding_box(margin_px=10)
    assert box is not None and (image.width_px, image.height_px) == (box.w, box.h)
    first = np.concatenate(list(read_strips(image, 100)))
    decoded = tiff.num_tiles_decoded
    assert decoded < 100
    assert np.array_equal(np.concatenate(list(read_strips(image, 130))), first) and tiff.num_tiles_decoded == decoded
    whole = TiffImage(SLIDE).read(box.x, box.y, box.w, box.h)
    whole[~real.region(box.x, box.y, box.w, box.h)] = 255
    assert np.array_equal(first, whole)
    copy = pickle.loads(pickle.dumps(image))
    assert np.array_equal(copy.read(5, 6, 700, 80), first[6:86, 5:705])


def test_a_mask_at_another_resolution(real: TissueMask) -> None:
    small = open_image(SLIDE, mpp=2.0)
    with pytest.raises(InputError, match=r"2220 x 2967 px.*mask\.at"):
        Masked(small, real)
    image = crop_to_tissue(small, real.at(small.width_px, small.height_px))
    assert isinstance(image, Cropped)
    box, full = real.at(small.width_px, small.height_px).bounding_box(), real.bounding_box()
    assert box is not None and full is not None
    assert abs(box.w - full.w * 0.499 / 2) < 2 and abs(box.h - full.h * 0.499 / 2) < 2


def test_wrong_paint() -> None:
    image = ArrayImage(tissue_like(32, 48))
    with pytest.raises(InputError, match="3 numbers"):
        Masked(image, mask_of([[1, 0, 1], [0, 1, 0]]), background=(1,))
    wrong: Any = "mask"
    with pytest.raises(InputError, match="str"):
        Masked(image, wrong)
