"""Values of label maps: their classes, and masks without a class to train on."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import sft
from sft.common.errors import InputError, SourceError
from sft.common.interval import Interval
from sft.sources import ArrayImage, Cropped, ImageLabels, LabelSource
from sft.sources.readers.label_alignment import align_labels
from sft.tissue import Regions, TissueMask
from sft.wsi.data.label_maps import absent_classes, count_values, label_problem, mixed_codings, values_text
from sft.wsi.data.tissue import area_bounding_box, read_area, read_mask
from sft.wsi.data.transforms import Turned
from tests.helpers.wsi import real_pixels, tissue_places, write_config, write_slide, write_table
from tests.helpers.wsi import run_wsi as main

SLIDE = ArrayImage(np.zeros((101, 75, 3), np.uint8))


def _maps(folder: Path, values: dict[str, tuple[int, ...]], suffix: str = ".png") -> Path:
    """Slides of the splits train, val and test, with label maps of vertical stripes of these values; returns the table."""
    rows = []
    for number, (split, stripes) in enumerate(values.items()):
        top, left = tissue_places(72)[number]
        write_slide(folder / f"s{number}.tif", real_pixels()[top : top + 64, left : left + 64])
        mask = np.repeat(np.array(stripes, np.uint8), 64 // len(stripes))[None].repeat(64, 0)
        if suffix == ".npy":
            np.save(folder / f"m{number}.npy", mask)
        else:
            Image.fromarray(mask).save(folder / f"m{number}{suffix}")
        split_name = split.rstrip("0123456789")
        rows.append({"slide": f"s{number}.tif", "mask": f"m{number}{suffix}", "patient": f"p{number}", "split": split_name})
    return write_table(folder / "t.csv", rows)


def _config(folder: Path, table: Path, classes: list[str], **data: Any) -> Path:
    return write_config(
        folder / "c.yaml",
        table,
        folder / "run",
        data={"csv": str(table), **data},
        task={"kind": "segmentation", "classes": classes},
        model={"head": "segmentation", "budget": "64MiB"},
        train={"epochs": 1},
    )


@pytest.mark.parametrize("suffix", [".png", ".npy", ".tif"])
def test_masks_of_0_and_255_are_refused_with_the_setting_that_uses_them(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = _maps(tmp_path, {"train": (0, 255), "train2": (0, 0), "val": (0, 255)}, suffix)
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"])), "--dry-run"]) == 1
    told = capsys.readouterr().err
    assert (
        "no training slide has a pixel of class tum: the 2 label maps hold 0 (6,144 px) and 255 (2,048 px) (255 counts for nothing)" in told
    )
    assert "If 0 is back, 255 is tum, set data.mask_values to {0: 0, 255: 1}" in told
    assert not (tmp_path / "run").exists()


def test_the_setting_trains_on_both_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 255), "val": (255, 0)})
    config = _config(tmp_path, table, ["back", "tum"], mask_values={0: 0, 255: 1})
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    assert "warning" not in capsys.readouterr().err
    text = (tmp_path / "run" / "val" / "predictions.csv").read_text(encoding="utf-8").splitlines()
    row = dict(zip(text[0].split(","), text[1].split(","), strict=True))
    assert float(row["tum_true_px"]) == float(row["back_true_px"]) == 32 * 64
    # The settings of the run are read back with the mapping, and given on the command line.
    assert main(["evaluate", str(tmp_path / "run"), "--bootstrap", "0"]) == 0
    plain = _config(tmp_path, table, ["back", "tum"])
    assert main(["train", "--config", str(plain), "--dry-run", "--data.mask_values", "{0: 0, 255: 1}"]) == 0


@pytest.mark.parametrize(
    ("stripes", "classes", "words"),
    [
        ((0, 1), ["a", "b", "c"], "no training slide has a pixel of class c: the label map holds 0 (2,048 px) and 1 (2,048 px)"),
        ((1, 2), ["a", "b"], "holds 2; labels are 0 to 1, and 255 for none. Its values are 1 (2,048 px) and 2 (2,048 px)"),
        ((1, 2), ["a", "b"], "set data.mask_values to {1: 0, 2: 1}"),
        ((255, 255), ["a", "b"], "labels nothing of what is read of its slide: 255 (4,096 px)"),
        ((0, 0), ["a", "b"], "no training slide has a pixel of class b: the label map holds 0 (4,096 px)"),
        ((0, 128, 255, 255), ["a", "b", "c"], "set data.mask_values to {0: 0, 128: 1, 255: 2}"),
        ((0, 7, 9, 255), ["a", "b", "c"], "set data.mask_values to {0: 0, 7: 1, 9: 2}"),
        ((1, 255), ["a", "b"], "no training slide has a pixel of class a"),
    ],
)
def test_other_values_are_refused_with_their_pixels(
    stripes: tuple[int, ...], classes: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = _maps(tmp_path, {"train": stripes, "val": stripes})
    assert main(["train", "--config", str(_config(tmp_path, table, classes)), "--dry-run"]) == 1
    assert words in " ".join(capsys.readouterr().err.split())


def test_masks_of_0_and_1_next_to_masks_of_0_and_255_need_a_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 1), "train2": (0, 255), "train3": (0, 0), "val": (0, 1)})
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"])), "--dry-run"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert f"2 label maps hold 1 but no 255, such as {tmp_path / 'm0.png'}, and 1 holds 255 but no 1, such as {tmp_path / 'm1.png'}" in told
    assert "set data.mask_values to {0: 0, 1: 1, 255: 1}; if 255 is to be ignored, to {0: 0, 1: 1, 255: 255}" in told
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"], mask_values={0: 0, 1: 1, 255: 1})), "--dry-run"]) == 0
    counts = {"a": {0: 4, 1: 4}, "b": {0: 4, 255: 4}}
    assert mixed_codings({**counts, "c": {1: 4, 255: 4}}, ["back", "tum"], None) is None, "255 is next to 1: it is ignored"
    assert mixed_codings(counts, ["back", "tum", "edge"], None) is None


def test_colours_of_label_maps_have_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 1), "val": (0, 1)})
    colours = np.array([[0, 0, 0, 255], [255, 0, 0, 255]], np.uint8)
    labels = np.repeat(np.array([0, 1]), 32)[None].repeat(64, 0)
    Image.fromarray(colours[labels][..., :3]).save(tmp_path / "m0.png")
    Image.fromarray(colours[labels]).save(tmp_path / "m1.png")
    for mask_colours, words in (
        ({"#000000": 0, "#fe0000": 1}, "the colour (255, 0, 0) at column 32, row 0 is not in the table"),
        ({"#000000": 0, "red": 1}, "data.mask_colours 'red': give red, green and blue in hexadecimal digits"),
        ({"#000000": 0, "#ff0000": 2}, "no colour is of class tum; give each class a colour"),
    ):
        status = main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"], mask_colours=mask_colours)), "--dry-run"])
        assert status in (1, 2) and words in " ".join(capsys.readouterr().err.split())
    config = _config(tmp_path, table, ["back", "tum"], mask_colours={"#000000": 0, "#ff0000": 1})
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    text = (tmp_path / "run" / "val" / "predictions.csv").read_text(encoding="utf-8").splitlines()
    row = dict(zip(text[0].split(","), text[1].split(","), strict=True))
    assert float(row["tum_true_px"]) == float(row["back_true_px"]) == 32 * 64


def test_label_maps_in_lossy_files_and_of_floats_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 255), "val": (0, 255)}, ".jpg")
    disc = np.hypot(*np.mgrid[-32:32, -32:32]) < 20
    Image.fromarray(np.where(disc, 255, 0).astype(np.uint8)).save(tmp_path / "m0.jpg")
    config = _config(tmp_path, table, ["back", "tum"], mask_values={0: 0, 255: 1})
    assert main(["train", "--config", str(config), "--dry-run"]) == 1
    assert "JPEG changes values at edges: write label maps as PNG" in " ".join(capsys.readouterr().err.split())
    np.save(tmp_path / "m.npy", disc.astype(np.float32))
    with pytest.raises(InputError, match=r"of float32 as a label map: labels are uint8, .* Convert it: numpy.save"):
        sft.sources.open_labels(tmp_path / "m.npy")
    Image.merge("LA", [Image.fromarray(disc.astype(np.uint8))] * 2).save(tmp_path / "m.png")
    with pytest.raises(InputError, match=r"it has 2 channels. Choose channel=0"):
        sft.sources.open_labels(tmp_path / "m.png")
    assert sft.sources.open_labels(tmp_path / "m.png", channel=0).shape == (1, 1, 64, 64)


def test_a_class_that_validation_lacks_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 1), "val": (0, 0), "test": (0, 1)})
    assert main(["train", "--config", str(_config(tmp_path, table, ["a", "b"])), "--dry-run"]) == 0
    said = "".join(capsys.readouterr())
    assert "warning: no val slide has a pixel of class b" in said and "no test slide" not in said


def test_an_evaluation_warns_about_masks_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 1), "val": (0, 1)})
    assert main(["train", "--config", str(_config(tmp_path, table, ["a", "b"])), "--bootstrap", "0"]) == 0
    capsys.readouterr()
    Image.fromarray(np.repeat(np.array([0, 255], np.uint8), 32)[None].repeat(64, 0)).save(tmp_path / "m9.png")
    other = write_table(tmp_path / "other.csv", [{"slide": "s0.tif", "mask": "m9.png"}])
    assert main(["evaluate", str(tmp_path / "run"), "--csv", str(other), "--bootstrap", "0"]) == 0
    said = "".join(capsys.readouterr())
    assert "warning: no slide has a pixel of class b" in said and "255 (2,048 px)" in said
    both = write_table(tmp_path / "both.csv", [{"slide": "s0.tif", "mask": "m9.png"}, {"slide": "s1.tif", "mask": "m1.png"}])
    assert main(["evaluate", str(tmp_path / "run"), "--csv", str(both), "--bootstrap", "0"]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "warning: 1 label map holds 1 but no 255, such as" in said and "Convert the masks to one coding." in said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({0: 0, 255: 2}, "2 is not a class; classes are 0 to 1"),
        ({0: 0, 1: 0}, "no value is of class tum"),
        ({0: 0, 255: -1}, "-1 is not a class"),
    ],
)
def test_a_mapping_must_reach_every_class(values: dict[int, int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 255), "val": (0, 255)})
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"], mask_values=values)), "--dry-run"]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_value_without_a_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 7, 255, 255), "val": (0, 255)})
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"], mask_values={0: 0, 255: 1})), "--dry-run"]) == 1
    assert "holds 7; data.mask_values has 0, 255" in capsys.readouterr().err


def test_values_merge_and_are_ignored_by_the_mapping() -> None:
    labels = np.array([[0, 1, 2, 3]], np.uint16)
    source = LabelSource(labels, values={0: 0, 1: 0, 2: 1, 3: 255})
    out = torch.empty(1, 1, 1, 4, dtype=torch.int64)
    source.samples(Interval(0, 1)).rows(Interval(0, 1), out)
    assert out.flatten().tolist() == [0, 0, 1, 255]
    import pickle

    pickle.loads(pickle.dumps(source)).rows(Interval(0, 1), out.zero_())
    assert out.flatten().tolist() == [0, 0, 1, 255]
    with pytest.raises(sft.InputError, match="value 9 has none"):
        LabelSource(np.array([[9]], np.uint8), values={0: 0, 1: 1}).rows(Interval(0, 1), out[..., :1])


def test_counts_of_all_kinds_of_integers() -> None:
    for dtype in (np.bool_, np.uint8, np.int16, np.int64, np.uint32, np.uint64):
        assert count_values(np.array([[0, 1], [1, 1]], dtype)) == {0: 1, 1: 3}
    assert count_values(np.array([[-1, 70_000]], np.int64)) == {-1: 1, 70_000: 1}
    assert values_text(dict.fromkeys(range(25), 1)).endswith("19 (1 px) and 5 more values")
    assert label_problem({0: 5, 1: 1}, ["a", "b"], None) is None
    assert absent_classes([{0: 1}, {1: 1}], ["a", "b"], None)[0] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m.npy", "it is a PDF document, or it is damaged"),
        ("m.png", "it is a PDF document, or it is damaged"),
        ("none.png", "there is no such file"),
    ],
)
def test_a_file_that_is_no_label_map_is_named(name: str, message: str, tmp_path: Path) -> None:
    if name != "none.png":
        (tmp_path / name).write_bytes(b"%PDF-1.7 {}")
    with pytest.raises(SourceError, match=f"cannot read mask .*{message}"):
        read_mask(tmp_path / name)


def test_polygons_smaller_than_a_pixel_are_no_tissue() -> None:
    """Degrees in place of pixels: otherwise a slide would be background without a message."""
    slide = ArrayImage(np.zeros((60, 80, 3), np.uint8))
    ring = np.array([[10.1, 10.1], [10.4, 10.1], [10.4, 10.4]])
    with pytest.raises(InputError, match="the mask has none there"):
        area_bounding_box(Regions([[ring]]), slide)
    assert area_bounding_box(Regions([[np.array([[11.0, 11.0], [15.0, 11.0], [15.0, 15.0]])]]), slide).w == 4
    with pytest.raises(
        InputError, match=r"all 1 polygons are outside of the image\. They span columns 110\.1 to .*, the image columns 0 to 80"
    ):
        area_bounding_box(Regions([[ring + 100]]), slide)


def _labels_under_centres(values: Any, size: tuple[int, int], scale: float, label_px: tuple[float, float]) -> Any:
    """The rule, pixel by pixel: the label under the centre of a pixel, in px of the slide's largest level."""
    rows, columns = (
        [min(int((index + 0.5) * scale // px), count - 1) for index in range(extent)]
        for extent, px, count in zip(size, label_px, values.shape, strict=True)
    )
    return values[rows][:, columns]


@pytest.mark.parametrize(
    ("shape", "label_px"),
    [
        ((101, 75), (1, 1)),  # the slide's own size, at half of its resolution
        ((50, 37), (2, 2)),  # that of the image
        ((51, 38), (2, 2)),
        ((26, 19), (4, 4)),
        ((25, 18), (4, 4)),
        ((404, 300), (0.25, 0.25)),
        ((34, 25), (101 / 34, 3)),
        ((7, 5), (15, 15)),
    ],
)
def test_label_maps_of_any_resolution_follow_one_rule(shape: tuple[int, int], label_px: tuple[float, float]) -> None:
    values = np.random.default_rng(0).integers(0, 250, shape).astype(np.uint8)
    labels = align_labels(ArrayImage(values), SLIDE, image_size=(37, 50), scale=(2.0, 2.0), name="m")
    expected = _labels_under_centres(values, (50, 37), 2.0, label_px)
    assert np.array_equal(labels.read(0, 0, 37, 50)[..., 0], expected)
    assert count_values(labels) == count_values(expected)
    for mirrored in (False, True):
        for quarters in range(4):
            turned = Turned(Cropped(labels, x=3, y=5, w=21, h=30), mirrored=mirrored, quarters=quarters)
            crop = expected[5:35, 3:24]
            truth = np.rot90(crop[:, ::-1] if mirrored else crop, quarters)
            source = pickle.loads(pickle.dumps(ImageLabels(turned)))
            out = torch.empty(1, 1, 9, truth.shape[1], dtype=torch.int64)
            source.rows(Interval(7, 16), out)
            assert np.array_equal(out[0, 0].numpy(), truth[7:16]) and source.shape[2:] == truth.shape
            same = [False, *(truth[1:] == truth[:-1]).all(1)]
            assert source.repeated_rows(Interval(0, truth.shape[1])).tolist() == same


@pytest.mark.parametrize("shape", [(101, 37), (37, 50), (26, 26), (1, 75), (12, 7), (1, 1)])
def test_label_maps_of_another_ratio_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    problem = "one pixel states no resolution" if shape == (1, 1) else "the sides have another ratio"
    with pytest.raises(InputError, match=rf"{shape[1]} x {shape[0]} px, its slide 75 x 101 px, .*{problem}"):
        align_labels(ArrayImage(np.zeros(shape, np.uint8)), SLIDE, image_size=(37, 50), scale=(2.0, 2.0), name="m")
    np.save(tmp_path / "tissue.npy", np.ones(shape, np.uint8))
    with pytest.raises(InputError, match=rf"{shape[1]} x {shape[0]} px for .* of 75 x 101 px: {problem}"):
        read_area(tmp_path / "tissue.npy", SLIDE)
    Image.fromarray(np.full(shape, 255, np.uint8)).save(tmp_path / "tissue.png")
    with pytest.raises(InputError, match=rf"for a slide of 75 x 101 px: {problem}"):
        TissueMask.load_png(tmp_path / "tissue.png", width_px=75, height_px=101)
    with pytest.raises(InputError, match=rf"of 75 x 101 px for {shape[1]} x {shape[0]} px: {problem}"):
        TissueMask(pixels=np.ones((1, 1), bool), width_px=75, height_px=101).at(shape[1], shape[0])


def test_tissue_of_another_place_on_the_map_is_refused(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    from tests.sources.readers.test_rasters import SENTINEL, write

    scene: Any = sft.sources.open_image(write(tmp_path / "scene.tif", np.zeros((101, 75, 3), np.uint16)))
    mask = np.ones((51, 38, 1), np.uint8)
    half = SENTINEL["transform"] @ rasterio.Affine.scale(2)
    assert read_area(write(tmp_path / "same.tif", mask, transform=half), scene).bounding_box() is not None
    with pytest.raises(InputError, match=r"begins at column 20, row 0 of the image"):
        read_area(write(tmp_path / "right.tif", mask, transform=half @ rasterio.Affine.translation(10, 0)), scene)
    wider = np.ones((61, 48, 1), np.uint8)
    with pytest.raises(InputError, match=r"has 48 x 61 px, of which .* the image has columns 10 to 47.5 and rows 10 to 60.5"):
        read_area(write(tmp_path / "wider.tif", wider, transform=half @ rasterio.Affine.translation(-10, -10)), scene)


def test_a_run_takes_label_maps_of_a_lower_resolution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = _maps(tmp_path, {"train": (0, 1), "val": (0, 1)}, ".npy")
    np.save(tmp_path / "m0.npy", np.array([[0, 0, 1, 1]] * 4, np.uint8))  # 64 px of the slide
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"])), "--dry-run"]) == 0
    np.save(tmp_path / "m0.npy", np.array([[0, 0, 1, 1]] * 8, np.uint8))
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"])), "--dry-run"]) == 1
    assert "4 x 8 px, its slide 64 x 64 px, and 64 x 64 px at this resolution: the sides have another ratio" in capsys.readouterr().err


def _annotated(folder: Path, ring: list[tuple[int, int]], name: str, number: int) -> str:
    """A GeoJSON file of one polygon of a class."""
    geometry = {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}
    feature = {"type": "Feature", "geometry": geometry, "properties": {"classification": {"name": name}}}
    path = folder / f"m{number}.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    return path.name


def test_a_run_takes_annotations_and_panda_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dlup#232: annotations as label maps; PANDA: the label in red, as a tiled TIFF of another resolution."""
    _maps(tmp_path, {"train": (0, 1), "val": (0, 1)})
    square = [(16, 16), (48, 16), (48, 48), (16, 48)]
    rows = [
        {"slide": f"s{number}.tif", "mask": _annotated(tmp_path, square, "tum", number), "patient": f"p{number}", "split": split}
        for number, split in enumerate(("train", "val"))
    ]
    config = _config(tmp_path, write_table(tmp_path / "polygons.csv", rows), ["back", "tum"])
    assert main(["train", "--config", str(config), "--bootstrap", "0"]) == 0
    text = (tmp_path / "run" / "val" / "predictions.csv").read_text(encoding="utf-8").splitlines()
    row = dict(zip(text[0].split(","), text[1].split(","), strict=True))
    assert float(row["tum_true_px"]) == 32 * 32 and float(row["back_true_px"]) == 64 * 64 - 32 * 32
    _annotated(tmp_path, square, "Tumour", 0)
    capsys.readouterr()
    assert main(["train", "--config", str(config), "--dry-run"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "1 annotations are of other classes, such as 'Tumour'. Its 1 annotations are 'Tumour' (1)" in told
    assert "Name each in task.classes; data.ignore_other_classes: true leaves them out" in told
    main(["train", "--config", str(config), "--dry-run", "--data.ignore_other_classes", "true"])
    assert "1 problem - no train" in " ".join(capsys.readouterr().err.split()), "the one map of training has no annotation left"
    for number in range(2):
        annotations = tmp_path / f"m{number}.geojson"
        annotations.write_text(re.sub(r'"classification": {"name": "\w+"}', '"land": "tum"', annotations.read_text()))
    assert main(["train", "--config", str(config), "--dry-run"]) == 1
    assert "their properties land: data.mask_column chooses the one with the class" in " ".join(capsys.readouterr().err.split())
    assert main(["train", "--config", str(config), "--dry-run", "--data.mask_column", "land"]) == 0
    _annotated(tmp_path, [(70, 8), (90, 8), (90, 30)], "tum", 0)
    assert main(["train", "--config", str(config), "--dry-run"]) == 1
    assert "m0.geojson on an image of 64 x 64 px: all 1 polygons are outside of the image" in " ".join(capsys.readouterr().err.split())
    labels = np.zeros((32, 32, 3), np.uint8)
    labels[8:24, 8:24, 0] = 1
    for number, entry in enumerate(rows):
        tifffile.imwrite(tmp_path / f"r{number}.tif", labels, tile=(16, 16), photometric="rgb", metadata=None, compression="deflate")
        entry["mask"] = f"r{number}.tif"
    table = write_table(tmp_path / "panda.csv", rows)
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"])), "--dry-run"]) == 1
    assert "it has 3 channels. Set data.mask_channel: 0" in " ".join(capsys.readouterr().err.split())
    assert main(["train", "--config", str(_config(tmp_path, table, ["back", "tum"], mask_channel=0)), "--dry-run"]) == 0
