"""Slide dataset: from a row of the table to the network's input, and prefetch of the next slide.

An input is a slide, masked, stain-normalised, augmented, cached, and normalised.

The next slide is opened while the current one is trained on. Opening reads the header, finds tissue and stains if the run needs them, and
decodes the rows of the first strip; all of that would otherwise delay the next step. Within a slide the strip reader runs ahead, but a
small network finishes a strip before the next one is decoded. So further rows of the next slide are decoded, as far as its cache
(`data.host_budget`) fits the budget together with all rows of the current slide. The prefetch is bounded: one slide, and of it one block
of rows or the rest of that budget.

One thread at a time prefetches, and :meth:`SlidePrefetcher.take` waits until the slide is open and a started block is decoded. So no two
threads open slides at once, as long as all slides between a :meth:`SlidePrefetcher.start` and the next take come from this module.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from sft.common.errors import SftError
from sft.common.interval import Interval
from sft.sources import BadTile, Cached, Cropped, ImageLabels, Normalized, Raster, Source, Tiles
from sft.sources.image import Image, pixel_dtype
from sft.sources.readers.label_alignment import align_labels
from sft.sources.readers.label_images import open_label_image
from sft.sources.value_range import ValueRange
from sft.sources.views import RasterView
from sft.tissue import AnnotationLabels, Masked, read_annotations
from sft.tissue.annotations import is_annotation_file
from sft.tissue.mask import Box
from sft.wsi.config import Config
from sft.wsi.data.augment import IDENTITY_AUGMENTATION, Augmentation
from sft.wsi.data.cache_budget import cache_budget
from sft.wsi.data.label_maps import IGNORED_LABEL, colour_table, count_values, label_problem
from sft.wsi.data.pixel_values import as_picture, fixed_range, measured_range
from sft.wsi.data.setting_names import naming_settings
from sft.wsi.data.slides import OpenedSlide, make_thumbnail, open_slide
from sft.wsi.data.stain import ColourTransferred, fit_macenko, fit_reinhard
from sft.wsi.data.table import SlideRecord
from sft.wsi.data.tissue import PackedMask, TissueArea, area_bounding_box, find_area, paint_outside, read_area, rescale_area
from sft.wsi.data.transforms import IDENTITY, ColourAffine, Recoloured, Turned

__all__ = ["IGNORED_LABEL", "THREAD_NAME", "Inputs", "SlideDataset", "SlideFrame", "SlidePrefetcher", "decode_ahead", "decode_first_rows"]

_STAIN_PX = 1024
#: Tiles of a slide that are decoded ahead.
_FIRST_TILES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideFrame:
    """Place of a run's image on its slide: the image is a crop of the slide at the run's resolution.

    >>> SlideFrame(scale=(4.0, 4.0), origin_px=(400.0, 80.0)).to_slide(10, 0)
    (440.0, 80.0)

    Attributes:
        scale: px of the slide's largest level per px of the image, (x, y).
        origin_px: (x, y) of the image's upper left corner, in px of the slide's largest level.
    """

    scale: tuple[float, float]
    origin_px: tuple[float, float]

    def to_slide(self, x_px: float, y_px: float) -> tuple[float, float]:
        """A place of the image, in px of the slide's largest level."""
        return self.origin_px[0] + x_px * self.scale[0], self.origin_px[1] + y_px * self.scale[1]


#: Class of QuPath for regions that are ignored.
_IGNORED_CLASS = "Ignore*"


class SlideDataset:
    """Opens the slides of a run. Keeps each slide's size, stains and, packed, the tissue that it found.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._cache_bytes, _ = cache_budget(config)
        #: (width, height) in px of the network's input, of the slides that were checked and found good
        self.sizes: dict[str, tuple[int, int]] = {}
        #: of the label maps that were checked: pixels of each value
        self.label_values: dict[str, dict[int, int]] = {}
        self._stains: dict[str, ColourAffine] = {}
        self._ranges: dict[str, ValueRange] = {}
        self._masks: dict[str, PackedMask] = {}
        # Tiles that were filled, and the images that may still fill some: those of the slide at hand and of the one opened ahead of
        # its use, so that few files are open. The lock is for the thread that opens ahead.
        self._lock = threading.Lock()
        self._bad_tiles: dict[str, set[BadTile]] = {}
        self._watched: list[tuple[str, Raster]] = []

    def image(self, record: SlideRecord) -> Raster:
        """Slide at the run's resolution, masked and cropped as configured.

        Raises:
            InputError: its resolution is unknown or too coarse, its mask does not fit, or it has no tissue.
            SourceError: it cannot be read.
        """
        image, box = self._view(record)
        return image if box is None else Cropped(image, x=box.x, y=box.y, w=box.w, h=box.h)

    def frame(self, record: SlideRecord) -> SlideFrame:
        """Place of :meth:`image` on its slide.

        Raises:
            InputError, SourceError: as :meth:`image`.
        """
        slide = self._open(record)
        _, box = self._view_of(record, slide)
        left, top = (0, 0) if box is None else (box.x, box.y)
        return SlideFrame(scale=slide.scale, origin_px=(left * slide.scale[0], top * slide.scale[1]))

    def source(self, record: SlideRecord, augmentation: Augmentation = IDENTITY_AUGMENTATION) -> Source:
        """Input of the network. Its decoded rows stay in host memory, up to ``data.host_budget``, as long as it is used.

        Raises:
            InputError, SourceError: as :meth:`image`.
        """
        normalised, stain = self._normalised(record)
        image = augmentation.apply(normalised, stain=stain)
        if self._cache_bytes is not None:
            image = Cached(image, host_budget_bytes=self._cache_bytes)
        return Normalized(image, **self.normalisation(record))

    def normalisation(self, record: SlideRecord) -> dict[str, Any]:
        """Arguments of `sft.sources.Normalized` for a slide: mean, std, type, and the range of values.

        Raises:
            InputError: a channel has one value, and its percentiles no range.
            SourceError: the slide cannot be read.
        """
        data, settings = self._config.data, self._config.model
        if data.percentiles is None:
            value_range = fixed_range(data, self._config.num_channels)
        else:
            if record.name not in self._ranges:
                self._ranges[record.name] = measured_range(data, self._open(record).pyramid)
            value_range = self._ranges[record.name]
        dtype = torch.get_default_dtype()
        return {"mean": settings.mean, "std": settings.std, "dtype": dtype, "value_range": value_range, "clip": data.clip}

    def picture(self, record: SlideRecord) -> Image:
        """The slide as RGB of 8 bits, to look at.

        Raises:
            InputError, SourceError: as :meth:`image`.
        """
        return as_picture(self.coloured(record))

    def coloured(self, record: SlideRecord) -> Image:
        """The slide as the network sees it, before its pixels are normalised.

        Raises:
            InputError, SourceError: as :meth:`image`.
        """
        image, stain = self._normalised(record)
        return image if stain == IDENTITY else Recoloured(image, density=stain)

    def labels(self, record: SlideRecord, augmentation: Augmentation = IDENTITY_AUGMENTATION) -> ImageLabels:
        """The label map of a slide, cropped and turned with it; of any resolution (`sft.wsi.data.label_maps`).

        Raises:
            InputError: its sides have another ratio than the slide's, or its annotations have classes that the task lacks.
            SourceError: it cannot be read.
        """
        labels = self._label_map(record)
        if augmentation.quarters or augmentation.mirrored:
            labels = Turned(labels, quarters=augmentation.quarters, mirrored=augmentation.mirrored)
        is_annotated = record.mask is not None and is_annotation_file(record.mask)
        return ImageLabels(labels, values=None if is_annotated else self._config.data.mask_values)

    @naming_settings()
    def _label_map(self, record: SlideRecord) -> Image:
        assert record.mask is not None  # the table was read for segmentation
        slide, data = self._open(record), self._config.data
        image, box = self._view_of(record, slide)
        labels: Image
        if is_annotation_file(record.mask):
            classes = {name: index for index, name in enumerate(self._config.task.classes or ())} | {_IGNORED_CLASS: IGNORED_LABEL}
            layers = read_annotations(
                record.mask,
                classes,
                required=False,
                ignore_others=data.ignore_other_classes,
                georeference=RasterView(slide.pyramid).georeference,
                column=data.mask_column,
                crs=data.mask_crs,
            )
            size = {"width_px": image.width_px, "height_px": image.height_px}
            labels = AnnotationLabels(layers, **size, scale=slide.scale, name=str(record.mask))
        else:
            label_map = open_label_image(record.mask, channel=data.mask_channel, colours=colour_table(data.mask_colours))
            place: dict[str, Any] = {"image_size": (image.width_px, image.height_px), "scale": slide.scale, "outside": data.mask_outside}
            labels = align_labels(label_map, slide.pyramid, name=str(record.mask), **place)
        return labels if box is None else Cropped(labels, x=box.x, y=box.y, w=box.w, h=box.h)

    @property
    def bad_tiles(self) -> dict[str, tuple[BadTile, ...]]:
        """The tiles that were filled so far (``train.on_error: fill``), by slide, in the order of level, row and column."""
        with self._lock:
            self._note_bad_tiles()
            by_name = sorted(self._bad_tiles.items())
            return {name: tuple(sorted(tiles, key=lambda t: (t.level, t.y, t.x))) for name, tiles in by_name if tiles}

    def check(self, record: SlideRecord) -> str | None:
        """Problem of a slide by its header, its mask and its stains; None for a usable slide."""
        try:
            image = self.image(record)
            self._stain(record)
            Normalized(image, **self.normalisation(record))  # channels without a range, types that have none
            if self._config.task.kind == "segmentation" and record.mask is not None:
                self.labels(record)  # integers, of the slide's size
                with naming_settings():
                    counts = count_values(self._label_map(record))
                mask_values = None if is_annotation_file(record.mask) else self._config.data.mask_values
                problem = label_problem(counts, self._config.task.classes or (), mask_values, record.mask)
                if problem is not None:
                    return f"label map {record.mask} {problem}"
                self.label_values[record.name] = counts
            self.sizes[record.name] = self._input_size(record, image)
        except SftError as error:
            return " ".join(str(error).split())
        return None

    def _input_size(self, record: SlideRecord, image: Raster) -> tuple[int, int]:
        """(width, height) in px of the network's input."""
        return image.width_px, image.height_px

    def _normalised(self, record: SlideRecord) -> tuple[Image, ColourAffine]:
        """The slide, and the map of its optical densities that is still to be applied."""
        image, stain = self.image(record), self._stain(record)
        return (ColourTransferred(image, stain), IDENTITY) if self._config.augment.stain == "reinhard" else (image, stain)

    def _stain(self, record: SlideRecord) -> ColourAffine:
        if self._config.augment.stain == "none":
            return IDENTITY
        if record.name not in self._stains:
            # Of the file's own levels: the image at the run's resolution would have to be read whole.
            slide = self._open(record)
            small, factor = make_thumbnail(slide.pyramid, _STAIN_PX)
            area = self._area(record, slide)
            if area is not None and self._paints(record):
                small = paint_outside(small, area, factor, self._background or slide.pyramid.background)
            fitted_to = fit_reinhard if self._config.augment.stain == "reinhard" else fit_macenko
            self._stains[record.name] = fitted_to(small, record.name)
        return self._stains[record.name]

    def _open(self, record: SlideRecord) -> OpenedSlide:
        policy = self._config.train.on_error
        data = self._config.data
        slide = open_slide(record.paths, mpp=data.mpp, slide_mpp=record.mpp, on_error=policy, data=data)
        if policy == "fill":
            with self._lock:
                self._note_bad_tiles()
                other_names = [name for name, _ in self._watched if name != record.name]
                watched_names = {record.name, *other_names[-1:]}
                self._watched = [(name, image) for name, image in self._watched if name in watched_names]
                self._watched.append((record.name, slide.pyramid))
        return slide

    def _view(self, record: SlideRecord) -> tuple[Raster, Box | None]:
        """Slide at the run's resolution, and its crop box."""
        return self._view_of(record, self._open(record))

    def _view_of(self, record: SlideRecord, slide: OpenedSlide) -> tuple[Raster, Box | None]:
        area = self._area(record, slide)
        if area is None:
            return slide.image, None
        area = rescale_area(area, slide.image, slide.scale)
        box = area_bounding_box(area, slide.image)  # a mask without tissue would paint the whole slide
        image = Masked(slide.image, area, background=self._background) if self._paints(record) else slide.image
        return image, None if self._config.data.tissue == "none" else box

    def _area(self, record: SlideRecord, slide: OpenedSlide) -> TissueArea | None:
        """Tissue area in px of the largest level; None for a run without masks."""
        if self._has_tissue_mask(record) and record.mask is not None:
            with naming_settings():
                return read_area(record.mask, slide.pyramid, crs=self._config.data.mask_crs)
        if self._config.data.tissue == "none":
            return None
        if record.name not in self._masks:
            self._masks[record.name] = PackedMask.of(find_area(slide.pyramid, mpp=self._config.data.mpp))
        return self._masks[record.name].mask()

    def _has_tissue_mask(self, record: SlideRecord) -> bool:
        return record.mask is not None and self._config.task.kind != "segmentation"

    @property
    def _background(self) -> tuple[int, ...] | None:
        colour = self._config.data.background
        return None if colour is None else tuple(colour)

    def _paints(self, record: SlideRecord) -> bool:
        return self._config.data.tissue == "mask" or self._has_tissue_mask(record)

    def _note_bad_tiles(self) -> None:
        for name, image in self._watched:
            self._bad_tiles.setdefault(name, set()).update(RasterView(image).bad_tiles)


#: Input of a network's call.
Inputs = tuple[Any, ...]

THREAD_NAME = "sft-next-slide"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PrefetchTask:
    """Prefetch of one slide: its key, its future result, and the end of the decoding after it."""

    key: Hashable
    result: Future[Inputs]
    enough: threading.Event
    thread: threading.Thread

    def end(self) -> None:
        """Wait until the slide is opened and the thread is idle."""
        self.enough.set()
        self.thread.join()


class SlidePrefetcher:
    """Opens one slide ahead of its use.

    >>> ahead = SlidePrefetcher()
    >>> ahead.start("b", lambda: ("the slide b",))
    >>> ahead.take("a", lambda: ("the slide a",)), ahead.take("b", lambda: ("b, opened again",))
    (('the slide a',), ('b, opened again',))
    >>> ahead.start("b", lambda: ("the slide b",))
    >>> ahead.take("b", lambda: ("b, opened again",))
    ('the slide b',)

    Attributes:
        waited_seconds: how long takers stood still, for slides that were opened ahead and for those that were not.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0
        self._started: _PrefetchTask | None = None

    def start(self, key: Hashable, opened: Callable[[], Inputs], further: Callable[[Inputs], Iterable[None]] | None = None) -> None:
        """Start to open a slide; an earlier slide that was not taken is dropped.

        Args:
            key: of the slide.
            opened: opens it; :meth:`take` raises its errors.
            further: prepares the slide step by step, one element at a time, until it is taken. Default: `None`
        """
        self.drop()
        result: Future[Inputs] = Future()
        enough = threading.Event()
        thread = threading.Thread(target=_open_inputs, args=(opened, further, result, enough), name=THREAD_NAME, daemon=True)
        self._started = _PrefetchTask(key=key, result=result, enough=enough, thread=thread)
        thread.start()

    def take(self, key: Hashable, opened: Callable[[], Inputs]) -> Inputs:
        """Opened slide: the prefetched one if the key matches, otherwise one that is opened now.

        Raises:
            Exception: the error of ``opened``.
        """
        since = time.perf_counter()
        try:
            started, self._started = self._started, None
            if started is not None:
                started.end()
                if started.key == key:
                    return started.result.result()
            return opened()
        finally:
            self.waited_seconds += time.perf_counter() - since

    def drop(self) -> None:
        """Wait for the prefetch, and discard it with any error of it."""
        started, self._started = self._started, None
        if started is not None:
            started.end()


def _open_inputs(
    opened: Callable[[], Inputs], further: Callable[[Inputs], Iterable[None]] | None, result: Future[Inputs], enough: threading.Event
) -> None:
    try:
        inputs = opened()
    except BaseException as error:  # raised again by the reader of the slide
        result.set_exception(error)
        return
    result.set_result(inputs)
    if further is not None:
        # A region that cannot be read now raises again at its use.
        with contextlib.suppress(Exception):
            for _ in further(inputs):
                if enough.is_set():
                    return


def decode_first_rows(source: Source) -> None:
    """Have a source decode the rows that its first strip begins with, as far as it keeps them: a block of `sft.sources.Normalized`.

    Raises:
        SourceError: they cannot be read.
    """
    if isinstance(source, Tiles):  # of the first tiles alone, of which all rows are read at once
        source = source.take(range(min(_FIRST_TILES, len(source))))
        source.rows(Interval(0, source.shape[2]), torch.empty(source.shape, dtype=source.dtype, device="cpu"))
        return
    batch, channels, _, *rest = source.shape
    source.rows(Interval(0, 1), torch.empty((batch, channels, 1, *rest), dtype=source.dtype, device="cpu"))


def decode_ahead(inputs: Inputs, current: Inputs, num_bands: int = 1) -> Iterator[None]:
    """Decode rows of a slide that its cache keeps, block by block, from the top.

    Args:
        inputs: of the slide; those whose image is `sft.sources.Cached` are decoded.
        current: inputs of the slide in use. Its caches may grow to all of its rows, and the two slides share the budget.
        num_bands: ranks that share a slide. Each reads only its own rows, which are unknown at this point, so several ranks decode no
            rows.

    Raises:
        SourceError: rows cannot be read.
    """
    if num_bands > 1:
        return
    caches = [(source, _normalized_cache(source)) for source in current]
    used_bytes = sum(math.prod(source.shape) * pixel_dtype(cache).itemsize for source, cache in caches if cache is not None)
    for source in inputs:
        cache = _normalized_cache(source)
        if cache is not None:
            yield from cache.decode(max(0, cache.host_budget_bytes - used_bytes))
            used_bytes += cache.kept_bytes


def _normalized_cache(source: Source) -> Cached | None:
    image = getattr(source, "image", None)
    return image if isinstance(image, Cached) else None
