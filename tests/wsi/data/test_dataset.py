"""From a row of the table to the network's input: all kinds of masks, crops, aligned label maps, and numbers of decodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage

import sft
from sft.common.errors import InputError, SkipSlideError
from sft.common.interval import Interval
from sft.sources import Cached, open_image
from sft.sources.image import Image, Pixels
from sft.tissue import Regions, TissueMask, find_tissue, write_geojson
from sft.wsi.cli import read_config
from sft.wsi.config import DataConfig
from sft.wsi.data.augment import Augmentation
from sft.wsi.data.dataset import SlideDataset
from sft.wsi.data.table import SlideRecord
from sft.wsi.data.tissue import PackedMask
from tests.helpers.slides import SLIDE
from tests.helpers.wsi import TinyNet, damage_tile, real_pixels, tissue_places, write_config, write_slide, write_table


def _feed(folder: Path, *, task: dict[str, Any] | None = None, **data: Any) -> SlideDataset:
    table = folder / "t.csv"
    if not table.exists():
        write_table(table, [{"slide": "s.tif", "label": "a"}])
    train = {"on_error": data.pop("on_error", "raise"), "monitor": "loss"}
    model = {"head": "segmentation"} if task else {}
    groups = {"data": {"csv": str(table), **data}, "task": task or {}, "model": model, "train": train}
    return SlideDataset(read_config(write_config(folder / "c.yaml", table, folder / "run", **groups)))


def _record(path: Path, mask: Path | None = None) -> SlideRecord:
    return SlideRecord(name=path.stem, path=path, target=(0.0,), patient="p", split="train", mpp=None, mask=mask, row=2)


def _whole(image: Image) -> Pixels:
    return image.read(0, 0, image.width_px, image.height_px)


@pytest.fixture
def slide(tmp_path: Path) -> tuple[SlideRecord, Pixels]:
    top, left = tissue_places(168)[0]
    pixels = real_pixels()[top : top + 160, left : left + 144]
    write_slide(tmp_path / "s.tif", pixels)
    return _record(tmp_path / "s.tif"), pixels


def test_masks_of_the_table_paint_and_crop(slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    record, pixels = slide
    labels = np.zeros((20, 18), np.uint8)
    labels[5:12, 3:10] = labels[14, 12] = 7  # eight px of the slide each
    PillowImage.fromarray(labels).save(tmp_path / "m.png")
    np.save(tmp_path / "m.npy", np.repeat(np.repeat(labels, 16, 0), 16, 1))  # finer than the slide
    write_geojson(tmp_path / "m.geojson", TissueMask(pixels=labels > 0, width_px=144, height_px=160))
    inside = np.repeat(np.repeat(labels > 0, 8, 0), 8, 1)
    expected = np.where(inside[..., None], pixels, np.uint8(255))
    for name in ("m.png", "m.npy", "m.geojson"):
        masked = replace(record, mask=tmp_path / name)
        assert np.array_equal(_whole(_feed(tmp_path).image(masked)), expected), name
        for tissue in ("crop", "mask"):
            assert np.array_equal(_whole(_feed(tmp_path, tissue=tissue).image(masked)), expected[40:120, 24:104]), name
        # At 3 px of the slide for each, a px is kept if its centre is: 26.66 is the fourteenth of the first.
        small = _feed(tmp_path, mpp=1.5).image(masked)
        everything = _whole(_feed(tmp_path, mpp=1.5).image(record))
        assert np.array_equal(_whole(small), np.where(inside[1:159:3, 1::3][..., None], everything, np.uint8(255))), name
    np.save(tmp_path / "wide.npy", np.ones((10, 100), np.uint8))
    with pytest.raises(InputError, match="another ratio"):
        _feed(tmp_path).image(replace(record, mask=tmp_path / "wide.npy"))
    write_geojson(tmp_path / "beside.geojson", Regions([[np.array([[500, 0], [600, 0], [600, 50]], float)]]))
    problem = _feed(tmp_path, tissue="crop").check(replace(record, mask=tmp_path / "beside.geojson"))
    assert problem is not None and "the mask has none there" in problem


def test_tissue_is_detected_once_and_cropped_at_any_resolution(tmp_path: Path) -> None:
    record, tissue = _record(SLIDE), find_tissue(open_image(SLIDE))
    box = tissue.bounding_box()
    assert box is not None
    feed = _feed(tmp_path, tissue="mask")
    image = feed.image(record)
    assert (image.width_px, image.height_px) == (box.w, box.h)
    pixels = image.read(400, 300, 200, 100)
    inside = tissue.region(box.x + 400, box.y + 300, 200, 100)
    assert np.array_equal(pixels, np.where(inside[..., None], open_image(SLIDE).read(box.x + 400, box.y + 300, 200, 100), np.uint8(255)))
    packed = feed._masks[record.name]
    assert (
        isinstance(packed, PackedMask) and np.array_equal(packed.mask().pixels, tissue.pixels) and len(packed.data) < tissue.pixels.size / 8
    )
    assert feed.image(record).height_px == box.h and list(feed._masks) == [record.name]
    small = _feed(tmp_path, tissue="crop", mpp=2.0).image(record)
    assert abs(small.width_px - box.w / 4) <= 1 and abs(small.height_px - box.h / 4) <= 1
    write_slide(tmp_path / "glass.tif", np.full((300, 300, 3), 240, np.uint8))
    assert "no tissue is found" in str(feed.check(_record(tmp_path / "glass.tif")))


def test_label_maps_without_labels_are_refused_before_training(slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    record, pixels = slide
    labels = np.full(pixels.shape[:2], 255, np.uint8)
    feed = _feed(tmp_path, task={"kind": "segmentation", "classes": ["light", "dark"]})
    for places, words in (((), "labels nothing of what is read"), ((1,), None), ((2,), "holds 2; labels are 0 to 1")):
        labels[-1, -1] = places[0] if places else 255
        np.save(tmp_path / "labels.npy", labels)
        problem = feed.check(replace(record, mask=tmp_path / "labels.npy"))
        assert words in str(problem) if words else problem is None
    np.save(tmp_path / "labels.npy", np.zeros(pixels.shape[:2], np.float32))
    assert "float32" in str(feed.check(replace(record, mask=tmp_path / "labels.npy")))


def test_label_maps_are_cropped_and_turned_with_their_slide(slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    record, pixels = slide
    framed = np.full((320, 320, 3), 250, np.uint8)
    framed[96:256, 80:224] = pixels
    write_slide(tmp_path / "framed.tif", framed)
    np.save(tmp_path / "labels.npy", (framed[..., 0] < 200).astype(np.uint8))
    record = replace(record, path=tmp_path / "framed.tif", mask=tmp_path / "labels.npy")
    feed = _feed(tmp_path, task={"kind": "segmentation", "classes": ["light", "dark"]}, tissue="crop")
    assert feed.check(record) is None and feed.sizes[record.name] != (320, 320)
    augmentation = Augmentation(quarters=1, mirrored=True)
    image, labels = augmentation.apply(feed.image(record)), feed.labels(record, augmentation)
    out = torch.empty(labels.shape, dtype=torch.int64)
    labels.rows(Interval(0, labels.shape[2]), out)
    assert labels.shape[2:] == (image.height_px, image.width_px)
    assert np.array_equal(out[0, 0].numpy(), _whole(image)[..., 0] < 200)


@pytest.mark.parametrize("content", ["empty", "elsewhere", "lines", "black"])
@pytest.mark.parametrize("tissue", ["none", "crop", "mask"])
def test_a_mask_without_tissue_is_refused(content: str, tissue: str, slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    """Otherwise the full slide would be painted over, and train as pure background."""
    record, pixels = slide
    mask = tmp_path / ("mask.png" if content == "black" else "mask.geojson")
    far = [[[9000, 0], [9100, 0], [9100, 90], [9000, 0]]]
    if content == "black":
        PillowImage.fromarray(np.zeros(pixels.shape[:2], np.uint8)).save(mask)
    else:
        geometry = {"type": "Polygon", "coordinates": far} if content == "elsewhere" else {"type": "LineString", "coordinates": far[0]}
        features = [] if content == "empty" else [{"type": "Feature", "geometry": geometry, "properties": {}}]
        mask.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    assert "the mask has none there" in str(_feed(tmp_path, tissue=tissue).check(replace(record, mask=mask)))


def test_the_background_of_masked_slides_may_be_chosen(slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    record, pixels = slide
    mask = np.zeros(pixels.shape[:2], np.uint8)
    mask[40:, 40:] = 1
    PillowImage.fromarray(mask).save(tmp_path / "mask.png")
    record = replace(record, mask=tmp_path / "mask.png")
    image = _feed(tmp_path, background=[9, 8, 7]).image(record)
    assert (image.read(0, 0, 8, 8) == (9, 8, 7)).all() and np.array_equal(image.read(60, 60, 8, 8), pixels[60:68, 60:68])
    with pytest.raises(InputError, match=r"data\.background .*: give three numbers of 0 to 255"):
        DataConfig(csv=Path("t.csv"), background=[0, 256, 0])


def test_negative_labels_are_refused_before_training(slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    record, pixels = slide
    labels = np.zeros(pixels.shape[:2], np.int64)
    labels[3, 4] = -1
    np.save(tmp_path / "labels.npy", labels)
    feed = _feed(tmp_path, task={"kind": "segmentation", "classes": ["light", "dark"]})
    assert "holds -1; labels are 0 to 1" in str(feed.check(replace(record, mask=tmp_path / "labels.npy")))


def test_the_backward_pass_decodes_nothing_again_within_the_budget(slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    record, pixels = slide
    model = TinyNet()
    gradients = []
    for budget in (None, "1MiB"):
        source: Any = _feed(tmp_path, host_budget=budget).source(record, Augmentation(quarters=1))
        net: Any = sft.compile(model.eval(), source, budget="8MiB", options=sft.Options(tile=(16, None)))
        model.zero_grad()
        net(source).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        if budget is not None:
            assert isinstance(source.image, Cached)
            # 144 rows in blocks of 128 (the side of a tile): each once, for any number of strips and either direction.
            assert max(segment.num_steps for segment in net.plan_for(source).segments) > 4 and source.image.num_blocks_read == 2
            assert source.image.kept_bytes == pixels.nbytes
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)) and len(gradients[0]) == len(list(model.parameters()))


def test_damage_is_raised_skipped_or_filled_and_listed(slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    record, pixels = slide
    damage_tile(record.path)
    with pytest.raises(SkipSlideError):
        _whole(_feed(tmp_path, on_error="skip").image(record))
    feed = _feed(tmp_path, on_error="fill")
    assert feed.bad_tiles == {}
    expected = pixels.copy()
    expected[128:, 128:] = 255
    assert np.array_equal(_whole(feed.image(record)), expected)
    (tile,) = feed.bad_tiles[record.name]
    assert (tile.level, tile.x, tile.y, tile.width_px, tile.height_px) == (0, 128, 128, 16, 32) and str(record.path) in tile.reason
    first, second = feed.image(record), feed.image(record)  # a slide may be open twice: pixels and labels
    write_slide(tmp_path / "good.tif", pixels)
    write_slide(tmp_path / "next.tif", pixels)
    feed.image(_record(tmp_path / "good.tif"))  # ahead of its use: the current one is still watched
    _whole(second), _whole(first), feed.image(_record(tmp_path / "next.tif"))
    assert list(feed.bad_tiles) == [record.name] and [name for name, _ in feed._watched] == ["good", "next"]


def test_arrays_are_slides_too(slide: tuple[SlideRecord, Pixels], tmp_path: Path) -> None:
    zarr: Any = pytest.importorskip("zarr")
    record, pixels = slide
    np.save(tmp_path / "a.npy", pixels)
    array = zarr.create_array(str(tmp_path / "a.zarr"), shape=pixels.shape, chunks=(64, 64, 3), dtype="uint8")
    array[:] = pixels
    for name in ("a.npy", "a.zarr"):
        assert np.array_equal(_whole(_feed(tmp_path).image(replace(record, path=tmp_path / name))), pixels)
        half = _feed(tmp_path, mpp=1.0).image(replace(record, path=tmp_path / name, mpp=0.5))
        assert (half.width_px, half.height_px) == (72, 80)
    np.save(tmp_path / "grey.npy", pixels[..., 0])
    assert "1 channels" in str(_feed(tmp_path).check(replace(record, path=tmp_path / "grey.npy")))
