"""Tiles decoded directly equal OpenSlide's pixels, are decoded once a pass in any thread and process, and damage is an error."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.common.errors import InputError, SkipSlideError, SourceError
from sft.common.interval import Interval
from sft.sources import Normalized, NotTiledError, Raster, Slide, StripReader, TiffImage, load_tensor, open_image, read_strips
from sft.sources.open import Reader
from sft.sources.readers.thread_pool import for_each, resolve_threads
from tests.helpers.slides import SLIDE, SLIDE_SIZE, decode_threads, open_files, overwrite_tile, tissue_like, write_slide

pytest.importorskip("tifffile")
pytest.importorskip("openslide")

MEAN, STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)
WIDTH_PX, HEIGHT_PX = SLIDE_SIZE

#: Codecs that OpenSlide reads, too: as a plain TIFF and as an SVS.
BOTH: dict[str, dict[str, Any]] = {
    "none": {},
    "deflate": {"compression": "deflate"},
    "deflate, predictor": {"compression": "deflate", "predictor": True},
    "lzw": {"compression": "lzw"},
    "zstd": {"compression": "zstd"},
    "jpeg 4:2:0": {"compression": "jpeg", "compressionargs": {"level": 80}, "subsampling": (2, 2)},
    "jpeg 4:2:2": {"compression": "jpeg", "compressionargs": {"level": 80}, "subsampling": (2, 1)},
    "jpeg 4:4:4": {"compression": "jpeg", "compressionargs": {"level": 80}, "subsampling": (1, 1)},
    "jpeg rgb": {"compression": "jpeg", "compressionargs": {"level": 80, "outcolorspace": "rgb"}},
}


@pytest.fixture(scope="module")
def fast() -> TiffImage:
    return TiffImage(SLIDE, num_threads=2)


@pytest.fixture(scope="module")
def openslide() -> Slide:
    return Slide(SLIDE)


def assert_same_image(ours: Raster, theirs: Raster) -> None:
    assert ours.level_dimensions == theirs.level_dimensions and ours.level_downsamples == theirs.level_downsamples
    assert ours.mpp == theirs.mpp and ours.background == theirs.background and ours.num_channels == theirs.num_channels
    assert ours.level_tiles_px == theirs.level_tiles_px and ours.tile_height_px == theirs.tile_height_px
    for level, (width, height) in enumerate(ours.level_dimensions):
        assert np.array_equal(ours.read(0, 0, width, height, level), theirs.read(0, 0, width, height, level))


def test_the_real_slide_is_the_same_image(fast: TiffImage, openslide: Slide) -> None:
    assert isinstance(fast, Raster) and isinstance(openslide, Raster)
    assert_same_image(fast, openslide)


@settings(max_examples=25)
@given(st.data())
def test_any_rectangle_of_the_real_slide(fast: TiffImage, openslide: Slide, data: st.DataObject) -> None:
    x, y = data.draw(st.integers(0, WIDTH_PX - 1)), data.draw(st.integers(0, HEIGHT_PX - 1))
    w, h = data.draw(st.integers(1, min(700, WIDTH_PX - x))), data.draw(st.integers(1, min(500, HEIGHT_PX - y)))
    pixels = fast.read(x, y, w, h)
    assert pixels.flags.c_contiguous and np.array_equal(pixels, openslide.read(x, y, w, h))


@pytest.fixture(scope="module")
def pyramids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TiffImage, Slide]]:
    """JPEG at three levels, each reduced by an integer factor, which OpenSlide does not interpolate."""
    path = tmp_path_factory.mktemp("pyramid") / "slide.svs"
    write_slide(path, tissue_like(512, 704), num_levels=3, aperio=True, **BOTH["jpeg 4:2:0"])
    with TiffImage(path, num_threads=2) as ours, Slide(path) as theirs:
        yield ours, theirs


@given(st.data())
def test_any_rectangle_of_any_level(pyramids: tuple[TiffImage, Slide], data: st.DataObject) -> None:
    ours, theirs = pyramids
    level = data.draw(st.integers(0, 2))
    width, height = ours.level_dimensions[level]
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    w, h = data.draw(st.integers(1, width - x)), data.draw(st.integers(1, height - y))
    assert np.array_equal(ours.read(x, y, w, h, level), theirs.read(x, y, w, h, level))


@pytest.mark.parametrize("aperio", [False, True])
@pytest.mark.parametrize("codec", BOTH)
def test_every_codec_and_level_is_openslides(tmp_path: Path, codec: str, aperio: bool) -> None:
    path = tmp_path / "slide.tif"
    levels = write_slide(path, tissue_like(200, 264), num_levels=3, aperio=aperio, **BOTH[codec])
    image = open_image(path, num_threads=2)
    assert isinstance(image, TiffImage) and image.mpp == (0.5, 0.5)
    with Slide(path) as theirs:
        assert_same_image(image, theirs)
    if "jpeg" not in codec:
        assert all(np.array_equal(image.read(0, 0, *image.level_dimensions[n], n), level) for n, level in enumerate(levels))


def test_jpeg_2000_of_aperio_is_openslides(tmp_path: Path) -> None:
    path = tmp_path / "slide.svs"
    write_slide(path, tissue_like(200, 264), num_levels=3, aperio=True, compression="APERIO_JP2000_RGB", compressionargs={"level": 40})
    with Slide(path) as theirs:
        assert_same_image(TiffImage(path), theirs)


@pytest.mark.parametrize("codec", ["jpeg2000", "webp"])
def test_files_that_openslide_cannot_read(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "slide.tif"
    lossless: dict[str, Any] = {"compressionargs": {"lossless": True}} if codec == "webp" else {}
    (pixels,) = write_slide(path, tissue_like(130, 200), compression=codec, **lossless)
    assert np.array_equal(open_image(path).read(0, 0, 200, 130), pixels)


def test_grey_tiles(tmp_path: Path) -> None:
    path = tmp_path / "grey.tif"
    (pixels,) = write_slide(path, tissue_like(100, 130)[..., 0], compression="deflate")
    image = open_image(path, reader="tiff")
    assert image.num_channels == 1 and image.background == (255,)
    assert np.array_equal(image.read(3, 5, 100, 90)[..., 0], pixels[5:95, 3:103])
    write_slide(path, tissue_like(100, 130)[..., 0], compression="jpeg")
    assert open_image(path, reader="tiff").read(0, 0, 130, 100).shape == (100, 130, 1)


@pytest.mark.parametrize(("unit", "mpp"), [("in", 25_400.0), ("Å", 1e-4), ("thou", 25.4), ("pixel", None), ("reference frame", None)])
def test_sizes_of_an_ome_tiff_in_other_units(tmp_path: Path, unit: str, mpp: float | None) -> None:
    """Regression: tags, which always state 96 dpi, replaced sizes in unknown units."""
    import tifffile

    path, metadata = tmp_path / "slide.ome.tif", {"axes": "YXS", "PhysicalSizeX": 2, "PhysicalSizeY": 2}
    metadata |= {"PhysicalSizeXUnit": unit, "PhysicalSizeYUnit": unit}
    pixels = tissue_like(100, 130)
    tifffile.imwrite(path, pixels, ome=True, metadata=metadata, tile=(64, 64), resolution=(96, 96), resolutionunit="inch")
    assert TiffImage(path).mpp == (None if mpp is None else pytest.approx((2 * mpp, 2 * mpp)))


@pytest.mark.parametrize(("size", "unit"), [(0.25, "µm"), (250.0, "nm"), (0.00025, "mm")])
def test_ome_tiff_with_a_pyramid(tmp_path: Path, size: float, unit: str) -> None:
    import tifffile

    path, pixels = tmp_path / "slide.ome.tif", tissue_like(200, 264)
    metadata = {"axes": "YXS", "PhysicalSizeX": size, "PhysicalSizeXUnit": unit, "PhysicalSizeY": size, "PhysicalSizeYUnit": unit}
    with tifffile.TiffWriter(path, ome=True) as writer:
        options: dict[str, Any] = {"tile": (64, 64), "photometric": "rgb", "compression": "deflate"}
        writer.write(pixels, subifds=1, metadata=metadata, **options)
        writer.write(np.ascontiguousarray(pixels[::2, ::2]), subfiletype=1, **options)
    image = open_image(path)
    assert isinstance(image, TiffImage)
    assert image.level_dimensions == ((264, 200), (132, 100)) and image.mpp == pytest.approx((0.25, 0.25))
    assert np.array_equal(image.read(0, 0, 264, 200), pixels) and np.array_equal(image.read(0, 0, 132, 100, 1), pixels[::2, ::2])


def test_a_plane_of_an_ome_tiff_must_be_chosen(tmp_path: Path) -> None:
    import tifffile

    path, planes = tmp_path / "stack.ome.tif", np.arange(5, dtype=np.uint8)[:, None, None] * np.ones((64, 64), np.uint8)
    tifffile.imwrite(path, planes, tile=(32, 32), photometric="minisblack", metadata={"axes": "ZYX"})
    with pytest.raises(InputError, match=r"stack\.ome\.tif of ZYX = \(5, 64, 64\): axis 'z' has 5 entries"):
        _ = TiffImage(path).facts
    with pytest.raises(InputError, match="axis 'z' has 5 entries"):  # OpenSlide would return the first plane for all
        open_image(path)
    assert (open_image(path, at={"z": 3}).read(0, 0, 64, 64) == 3).all()
    for wrong in ({"z": 5}, {"z": 1, "t": 0}, {"c": 0}):
        with pytest.raises(InputError, match="axis"):
            open_image(path, at=wrong)


@pytest.mark.parametrize(
    ("pixels", "options", "message"),
    [
        (np.zeros((64, 64, 4), np.uint8), {"tile": (32, 32), "photometric": "rgb", "extrasamples": ["unassalpha"]}, "4 samples"),
        (np.zeros((64, 64), np.uint8), {"tile": (32, 32), "photometric": "miniswhite"}, "colours"),
    ],
)
def test_other_kinds_of_tiff_are_refused(tmp_path: Path, pixels: Any, options: dict[str, Any], message: str) -> None:
    import tifffile

    path = tmp_path / "other.tif"
    tifffile.imwrite(path, pixels, metadata=None, **{"photometric": "rgb" if pixels.ndim == 3 else "minisblack", **options})
    with pytest.raises(NotTiledError, match=rf"other\.tif.*{message}"):
        _ = TiffImage(path).facts


@pytest.mark.parametrize("reader", ["auto", "tiff"])
@pytest.mark.parametrize(
    ("pixels", "options", "message"),
    [
        (np.zeros((64, 64), np.int8), {"tile": (32, 32)}, "samples are int8"),
        (np.zeros((64, 64), np.uint32), {"tile": (32, 32)}, "samples are uint32"),
        (np.zeros((64, 64), np.uint16), {"tile": (32, 32), "photometric": "miniswhite"}, "samples are uint16 with colours miniswhite"),
        (np.zeros((3, 64, 64), np.uint8), {"tile": (32, 32)}, "3 images of 64 x 64 px"),
    ],
)
def test_nothing_of_an_image_is_dropped_or_scaled(
    tmp_path: Path, pixels: Any, options: dict[str, Any], message: str, reader: Reader
) -> None:
    """OpenSlide opens some of these, as their first image or with half of their bits."""
    import tifffile

    path = tmp_path / "other.tif"
    tifffile.imwrite(path, pixels, metadata=None, **{"photometric": "minisblack", **options})
    with pytest.raises(SourceError, match=rf"other\.tif.*{message}") as refused:
        open_image(path, reader=reader)
    assert not isinstance(refused.value, NotTiledError)


def test_an_ome_tiff_whose_pixels_are_in_another_file(tmp_path: Path) -> None:
    """Its offsets are those of the other file: in this file they are noise, or the wrong slide."""
    import tifffile

    pixels, number = tissue_like(96, 128), "00000000-0000-0000-0000-00000000000"
    for own in "12":
        described = (
            f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{number}{own}"><Image ID="Image:0">'
            '<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="128" SizeY="96" SizeC="3" SizeZ="1" SizeT="1">'
            '<Channel ID="Channel:0:0" SamplesPerPixel="3"/><TiffData IFD="0" PlaneCount="1"><UUID FileName="2.ome.tif">'
            f"urn:uuid:{number}2</UUID></TiffData></Pixels></Image></OME>"
        )
        named = tmp_path / f"{own}.ome.tif"
        tifffile.imwrite(
            named, pixels if own == "2" else 255 - pixels, photometric="rgb", tile=(32, 32), description=described, metadata=None
        )
    with pytest.raises(SourceError, match=r"1\.ome\.tif: its pixels are in 2\.ome\.tif"):
        open_image(tmp_path / "1.ome.tif")
    assert np.array_equal(open_image(tmp_path / "2.ome.tif").read(0, 0, 128, 96), pixels)


def test_a_tile_whose_place_is_the_header(tmp_path: Path) -> None:
    """Otherwise the header of an uncompressed file would be pixels."""
    import tifffile

    path, pixels = tmp_path / "slide.tif", tissue_like(64, 96)
    tifffile.imwrite(path, pixels, tile=(32, 32), photometric="rgb", metadata=None)
    with tifffile.TiffFile(path, mode="r+") as tiff:
        offsets = list(tiff.pages[0].dataoffsets)
        offsets[1] = 0
        tiff.pages[0].tags["TileOffsets"].overwrite(offsets)  # type: ignore[union-attr]
    with pytest.raises(SourceError, match="1 of 6 tiles of level 0 are outside its data, the first at column 32, row 0"):
        open_image(path)
    with pytest.raises(SourceError, match="its place in the file is given as 0, in the header"):
        TiffImage(path).read(0, 0, 96, 64)
    filled = open_image(path, on_error="fill").read(0, 0, 96, 64)
    assert np.array_equal(filled[:, 64:], pixels[:, 64:])


def test_openslide_reads_refused_files(tmp_path: Path) -> None:
    path = tmp_path / "alpha.tif"
    import tifffile

    pixels = np.dstack([tissue_like(64, 64), np.full((64, 64), 255, np.uint8)])
    tifffile.imwrite(path, pixels, tile=(32, 32), photometric="rgb", extrasamples=["unassalpha"], metadata=None)
    image = open_image(path)
    assert isinstance(image, Slide) and np.array_equal(image.read(0, 0, 64, 64), pixels[..., :3])
    with pytest.raises(NotTiledError, match="4 samples"):
        open_image(path, reader="tiff")


def test_no_reader_gets_turned_images_and_unlisted_tiles(tmp_path: Path) -> None:
    """OpenSlide turns each tile separately, and reads missing tiles as white."""
    import tifffile

    options: dict[str, Any] = {"tile": (32, 32), "photometric": "rgb", "metadata": None}
    cases = []
    # In planes, OpenSlide would read them, so it must not open them, either.
    for name, order, planes, listed in (
        ("together", None, "contig", "4 tiles of 3750"),
        ("apart", (2, 0, 1), "separate", "12 tiles of 11250"),
    ):
        turned, wide = tmp_path / f"{name} turned.tif", tmp_path / f"{name} wide.tif"
        pixels = tissue_like(64, 64) if order is None else tissue_like(64, 64).transpose(order)
        tifffile.imwrite(turned, pixels, extratags=[(274, "H", 1, 3, True)], planarconfig=planes, **options)
        tifffile.imwrite(wide, pixels, planarconfig=planes, **options)
        with tifffile.TiffFile(wide, mode="r+") as file:
            cast(Any, file.pages[0]).tags["ImageWidth"].overwrite(60_000)
        cases += [(turned, "it is stored turned .orientation 3."), (wide, f"it lists {listed}")]
    for path, message in cases:
        with pytest.raises(SourceError, match=message):
            open_image(path)
        with pytest.raises(SourceError, match=message):
            _ = TiffImage(path).facts


@pytest.mark.parametrize("bigtiff", [False, True])
@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("subifds", [0, 2])
def test_files_cut_between_their_levels(tmp_path: Path, bigtiff: bool, byteorder: Literal["<", ">"], subifds: int) -> None:
    """The remaining file has fewer levels, and is complete otherwise."""
    import tifffile

    path, pixels = tmp_path / "whole.tif", tissue_like(128, 128)
    options: dict[str, Any] = {"tile": (32, 32), "photometric": "rgb", "metadata": None, "compression": "deflate"}
    with tifffile.TiffWriter(path, bigtiff=bigtiff, byteorder=byteorder) as writer:
        writer.write(pixels, subifds=subifds, **options)
        writer.write(pixels[::2, ::2], subfiletype=1, **options)
        writer.write(pixels[::4, ::4], subfiletype=1, **options)
    with tifffile.TiffFile(path) as file:
        first = cast(Any, file.pages[0])
        offsets = [page.offset for page in (first.pages if subifds else file.pages)]
    image = TiffImage(path)
    image.check_complete()
    assert image.level_dimensions == ((128, 128), (64, 64), (32, 32))
    data = path.read_bytes()
    assert len(offsets) == (2 if subifds else 3)
    for offset in offsets[-2:]:
        for end in (offset, offset + 7):
            path.write_bytes(data[:end])
            for policy in ("raise", "fill"):
                with pytest.raises(SourceError, match=r"It is cut short or damaged|Either no TIFF, or cut short"):
                    open_image(path, on_error=policy).read(0, 0, 16, 16)
            with pytest.raises(SkipSlideError):
                open_image(path, on_error="skip")


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [False, True])
def test_a_walk_decodes_each_tile_once(backwards: bool) -> None:
    expected = load_tensor(Slide(SLIDE), mean=MEAN, std=STD)
    image = TiffImage(SLIDE, num_threads=2)
    strips = [Interval(top - 3, top + 67).clip(HEIGHT_PX) for top in range(0, HEIGHT_PX, 64)][:: -1 if backwards else 1]
    with StripReader(Normalized(image, mean=MEAN, std=STD), strips) as reader:
        for rows in strips:
            assert (reader.take(rows) == expected[:, :, rows.start : rows.stop]).all()
    assert image.num_tiles_decoded == 10 * 13 and decode_threads() == []


@pytest.mark.parametrize("num_threads", [1, 3])
def test_tiles_that_were_not_recorded_are_background(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "sparse.tif"
    import tifffile

    def tiles() -> Any:
        for number in range(4 * 3):
            yield None if number % 2 else np.full((16, 16, 3), number, np.uint8)

    tifffile.imwrite(
        path, tiles(), shape=(40, 60, 3), dtype=np.uint8, tile=(16, 16), photometric="rgb", compression="deflate", metadata=None
    )
    image = TiffImage(path, num_threads=num_threads)
    assert image.has_missing_tiles
    pixels = image.read(0, 0, 60, 40)
    assert (pixels[:16, 16:32] == 255).all() and (pixels[:16, 32:48] == 2).all()
    with Slide(path) as theirs:
        assert np.array_equal(pixels, theirs.read(0, 0, 60, 40))
    assert isinstance(open_image(path), Slide), "OpenSlide knows what stands for missing tiles of reduced levels"


def test_threads_read_the_same_pixels(fast: TiffImage) -> None:
    expected = fast.read(0, 0, WIDTH_PX, HEIGHT_PX)
    places = [(37 * n % 1900, 91 * n % 2500) for n in range(24)]
    with ThreadPoolExecutor(4) as pool:
        regions = list(pool.map(lambda place: fast.read(place[0], place[1], 301, 203), places))
    assert all(np.array_equal(pixels, expected[y : y + 203, x : x + 301]) for (x, y), pixels in zip(places, regions, strict=True))
    assert decode_threads() == []


def _sum_of(image: TiffImage) -> int:
    return int(image.read(100, 200, 300, 400).sum())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_open_their_own_handles(fast: TiffImage, method: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    expected = _sum_of(fast)  # the parent's handle is open
    context: Any = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.apply(_sum_of, (fast,)) == expected
    assert _sum_of(fast) == expected


def test_pickling_carries_no_handle(fast: TiffImage) -> None:
    copy: TiffImage = pickle.loads(pickle.dumps(fast))
    assert copy._opened is None and _sum_of(copy) == _sum_of(fast)


@pytest.mark.usefixtures("frozen_objects")
def test_closed_and_forgotten_files_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "slide.tif"
    write_slide(path, tissue_like(100, 130))
    with TiffImage(path) as image:
        expected = image.read(0, 0, 9, 9)
        assert open_files(path) == 1 or not Path("/proc/self/fd").exists()
    gc.collect()
    assert open_files(path) == 0
    assert np.array_equal(image.read(0, 0, 9, 9), expected)
    del image
    gc.collect()
    assert open_files(path) == 0


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_damaged_jpeg_is_never_passed_on(tmp_path: Path, share: float) -> None:
    """Including a position that OpenSlide ignores (0.9), where libjpeg decodes noise without an error."""
    path = overwrite_tile(SLIDE, tmp_path / "damaged.svs", 25, share=share, num_bytes=20)
    image = TiffImage(path, num_threads=2)
    with pytest.raises(SourceError, match=r"column 1200, row 480 \(240 x 240 px\) of level 0 of .*damaged\.svs"):
        image.read(0, 400, WIDTH_PX, 200)
    good = TiffImage(SLIDE)
    assert np.array_equal(image.read(0, 0, WIDTH_PX, 480), good.read(0, 0, WIDTH_PX, 480)), "the rest stays readable"
    assert decode_threads() == []


@pytest.mark.parametrize("codec", ["deflate", "zstd", "lzw"])
def test_other_damaged_tiles_are_named(tmp_path: Path, codec: str) -> None:
    write_slide(tmp_path / "good.tif", tissue_like(200, 264), compression=codec)
    path = overwrite_tile(tmp_path / "good.tif", tmp_path / "damaged.tif", 7, share=0.0, num_bytes=200)
    with pytest.raises(SourceError, match=r"column 128, row 64 .*damaged\.tif"):
        TiffImage(path).read(0, 0, 264, 200)


@pytest.mark.parametrize("num_bytes", [100, 5_000, 30_000])
def test_a_file_that_was_cut_short_is_named_when_it_is_opened(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "slide.tif"
    write_slide(path, tissue_like(200, 264), compression="deflate")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - num_bytes])
    with pytest.raises(SourceError, match=rf"slide\.tif \({len(content) - num_bytes} bytes\).*cut short"):
        open_image(path)
    with pytest.raises(SourceError, match=r"column \d+, row \d+ .*slide\.tif.*ends after \d+ of \d+ bytes"):
        TiffImage(path).read(0, 0, 264, 200)


def test_wrong_requests(fast: TiffImage) -> None:
    with pytest.raises(InputError, match=r"columns \[2215, 2225\).*2220 px wide"):
        fast.read(2215, 0, 10, 10)
    with pytest.raises(InputError, match="levels 0 to 0"):
        fast.read(0, 0, 10, 10, 1)
    with pytest.raises(InputError, match="0 threads"):
        TiffImage(SLIDE, num_threads=0)
    with pytest.raises(SourceError, match="no such file"):
        TiffImage(SLIDE.with_name("nowhere.svs"))


def test_strips_join_to_the_whole(fast: TiffImage) -> None:
    assert np.array_equal(np.concatenate(list(read_strips(fast, 97))), fast.read(0, 0, WIDTH_PX, HEIGHT_PX))


# --- threads for a call ----------------------------------------------------------------------------------------------


def test_work_is_shared_and_over_when_the_call_returns() -> None:
    names, gate = set[str](), threading.Barrier(3)

    def work(item: int) -> None:
        if item < 3:
            gate.wait(timeout=60)  # three items at once, or a deadlock
        names.add(threading.current_thread().name)

    for_each(work, range(20), 3)
    assert len(names) == 2 and decode_threads() == []  # the caller's thread, and that of the others


def test_the_first_failure_is_raised_and_ends_the_work() -> None:
    done = list[int]()

    def work(item: int) -> None:
        if item in (4, 5):
            raise KeyError(item)
        done.append(item)

    for num_threads in (1, 3):
        done.clear()
        with pytest.raises(KeyError):
            for_each(work, range(1000), num_threads)
        assert len(done) < 999 and decode_threads() == []
    assert resolve_threads(None) in (1, 2, 3, 4)
