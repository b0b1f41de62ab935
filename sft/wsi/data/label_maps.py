"""Label maps of a run: the classes of their values, and checks of the values before training.

A label map has one value for each pixel. By default the value is the index of the class, and `IGNORED_LABEL` counts for nothing.
``data.mask_values`` maps other values: ``{0: 0, 255: 1}`` for masks of 0 and 255, ``{0: 0, 1: 0, 2: 1, 3: 255}`` to merge two values and
to ignore a third. A class that no training slide has a pixel of is a mistake in the masks nearly always: the most common binary mask, of
0 and 255, would otherwise be read as background and ignored pixels, and train on nothing.

A label map of another resolution shows the same field: its first pixel begins where the slide does. One of floor(size / n) or
ceil(size / n) px, as a level of a pyramid, is reduced by exactly n (`sft.sources.resample.level_scale`), any other by the quotient of the
sizes. A pixel of the image has the label under its centre. With ``s`` px of the slide's largest level for a pixel of the image, and ``d``
for a label, pixel ``i`` has label ``floor((i + 1/2) s / d)``, at most the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.common.errors import InputError
from sft.sources.image import Size
from sft.sources.labels import IndexArray, gather_cells
from sft.sources.resample import level_scale
from sft.tissue.mask import Box

__all__ = ["IGNORED_LABEL", "LabelMap", "absent_classes", "align_labels", "count_values", "label_problem", "values_text"]

#: Value of pixels that count for nothing.
IGNORED_LABEL = 255
#: Pixels counted at a time; NumPy needs eight bytes for each.
_PIXELS_COUNTED = 1 << 22
#: Values below this are counted in a table.
_MAX_COUNTED = 1 << 16
#: Values that a message lists.
_MAX_LISTED = 20
#: Distinct values of a label map at most; more are no labels.
_MAX_VALUES = 4096
#: Denominators of the scale between two resolutions, as of `sft.sources.resample`.
_MAX_DENOMINATOR = 1000
#: Px of a slide for a label; more than any slide has.
_MAX_SCALE = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelMap:
    """Label map of the image of a run.

    Attributes:
        values: ``[height, width]``, of any resolution.
        cells: row and column of ``values`` for each row and column of the image; None for one value a pixel.
    """

    values: npt.NDArray[Any]
    cells: tuple[IndexArray, IndexArray] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the image."""
        return (self.values.shape[0], self.values.shape[1]) if self.cells is None else (len(self.cells[0]), len(self.cells[1]))

    def cropped(self, box: Box) -> LabelMap:
        """The label map of a part of the image."""
        rows, columns = slice(box.y, box.y + box.h), slice(box.x, box.x + box.w)
        if self.cells is None:
            return LabelMap(values=self.values[rows, columns])
        return LabelMap(values=self.values, cells=(self.cells[0][rows], self.cells[1][columns]))

    def turned(self, *, mirrored: bool, quarters: int) -> LabelMap:
        """The label map of the image that is mirrored and then turned by quarters, anticlockwise."""
        if self.cells is None:
            return LabelMap(values=np.rot90(self.values[:, ::-1] if mirrored else self.values, quarters))
        values, (rows, columns) = self.values, self.cells
        columns = columns[::-1] if mirrored else columns
        for _ in range(quarters % 4):
            values, rows, columns = values.T, columns[::-1], rows
        return LabelMap(values=values, cells=(rows, columns))

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Values of some rows of the image."""
        if self.cells is None:
            return self.values[start:stop]
        return gather_cells(self.values, self.cells[0][start:stop], self.cells[1])


def align_labels(values: npt.NDArray[Any], *, slide_size: Size, image_size: Size, scale: tuple[float, float], name: str) -> LabelMap:
    """The label map of an image, from values of any resolution; the rule is that of the module.

    Args:
        values: of the whole slide, ``[height, width]``.
        slide_size: (width, height) of the slide's largest level, in px.
        image_size: (width, height) of the image, in px.
        scale: px of the largest level for a pixel of the image, (x, y).
        name: of the label map, for messages.

    Raises:
        InputError: its sides have another ratio than the slide's, by more than a pixel of the label map.
    """
    size = (values.shape[1], values.shape[0])
    if size == image_size:
        return LabelMap(values=values)
    # Sizes are rounded, up or down: each leaves its scale open within a range.
    pairs = list(zip(slide_size, size, strict=True))
    lowest = max(Fraction(px, count + 1) for px, count in pairs)
    highest = min(Fraction(px, count - 1) if count > 1 else Fraction(_MAX_SCALE) for px, count in pairs)
    if lowest >= highest:
        raise InputError(
            f"label map {name} has {size[0]} x {size[1]} px, its slide {slide_size[0]} x {slide_size[1]} px, and {image_size[0]} x "
            f"{image_size[1]} px at this resolution: the sides have another ratio. Give the label map of this slide."
        )
    columns, rows = (
        _cells(image_px, Fraction(step).limit_denominator(_MAX_DENOMINATOR), label_px, count)
        for image_px, step, label_px, count in zip(image_size, scale, level_scale(slide_size, size), size, strict=True)
    )
    return LabelMap(values=values, cells=(rows, columns))


def _cells(image_px: int, scale: Fraction, label_px: Fraction, num_labels: int) -> IndexArray:
    """Label of each pixel along an axis: the one under its centre."""
    centres = (2 * np.arange(image_px) + 1) * (scale.numerator * label_px.denominator)
    cells: IndexArray = np.minimum(centres // (2 * scale.denominator * label_px.numerator), num_labels - 1)
    return cells


def count_values(labels: npt.NDArray[Any] | LabelMap) -> dict[int, int]:
    """Pixels of each value of a label map, which may be a mapped file larger than the memory.

    >>> count_values(np.array([[0, 255], [255, 255]], np.uint8))
    {0: 1, 255: 3}
    """
    counts: Counter[int] = Counter()
    labels = labels if isinstance(labels, LabelMap) else LabelMap(values=labels)
    height_px, width_px = labels.shape
    step = max(1, _PIXELS_COUNTED // max(1, width_px))
    for start in range(0, height_px, step):
        rows = np.ravel(labels.rows(start, start + step))
        if rows.dtype == np.bool_:
            rows = rows.view(np.uint8)
        if rows.min() >= 0 and rows.max() < _MAX_COUNTED:  # without sorting
            frequencies = np.bincount(rows.astype(np.intp, copy=False))
            values = np.flatnonzero(frequencies)
            frequencies = frequencies[values]
        else:
            values, frequencies = np.unique(rows, return_counts=True)
        counts.update(dict(zip(values.tolist(), frequencies.tolist(), strict=True)))
        if len(counts) > _MAX_VALUES:
            break
    return dict(sorted(counts.items()))


def label_problem(counts: Mapping[int, int], classes: Sequence[str], mask_values: Mapping[int, int] | None) -> str | None:
    """Problem of a label map by its values; None for a usable one.

    Args:
        counts: pixels of each value.
        classes: names of the classes.
        mask_values: class index of each value; None for values that are class indices.
    """
    known = _class_of(classes, mask_values)
    unknown = [value for value in counts if value not in known]
    if unknown:
        allowed = (
            f"labels are 0 to {len(classes) - 1}, and {IGNORED_LABEL} for none"
            if mask_values is None
            else f"data.mask_values has {', '.join(map(str, known))}"
        )
        return f"holds {unknown[0]}; {allowed}. Its values are {values_text(counts)}. {_remedy(counts, classes)}"
    if all(known[value] == IGNORED_LABEL for value in counts):
        return f"labels nothing of what is read of its slide: {values_text(counts)}, for none, everywhere"
    return None


def absent_classes(
    maps: Iterable[Mapping[int, int]], classes: Sequence[str], mask_values: Mapping[int, int] | None
) -> tuple[list[str], str]:
    """The classes without a pixel in any of these label maps, and a text that lists the values there are.

    Args:
        maps: pixels of each value, for each label map.
        classes: names of the classes.
        mask_values: class index of each value; None for values that are class indices.
    """
    total: Counter[int] = Counter()
    num_maps = 0
    for counts in maps:
        total.update(counts)
        num_maps += 1
    known = _class_of(classes, mask_values)
    present = {known[value] for value in total if value in known}
    absent = [name for index, name in enumerate(classes) if index not in present]
    where = "label map holds" if num_maps == 1 else f"{num_maps} label maps hold"
    ignored = [value for value in total if known.get(value) == IGNORED_LABEL]
    note = f" ({', '.join(map(str, sorted(ignored)))} counts for nothing)" if ignored else ""
    return absent, f"the {where} {values_text(total)}{note}. {_remedy(total, classes)}"


def values_text(counts: Mapping[int, int]) -> str:
    """Values with their pixels, the first 20.

    >>> values_text({0: 1500, 255: 1})
    '0 (1,500 px) and 255 (1 px)'
    """
    listed = [f"{value} ({count:,} px)" for value, count in sorted(counts.items())[:_MAX_LISTED]]
    if len(counts) > _MAX_LISTED:
        listed.append(f"{len(counts) - _MAX_LISTED} more values")
    return " and ".join([", ".join(listed[:-1]), listed[-1]]) if len(listed) > 1 else "".join(listed) or "no pixel"


def _class_of(classes: Sequence[str], mask_values: Mapping[int, int] | None) -> dict[int, int]:
    """Class index of each allowed value."""
    if mask_values is not None:
        return dict(mask_values)
    return {**{index: index for index in range(len(classes))}, IGNORED_LABEL: IGNORED_LABEL}


def _remedy(counts: Mapping[int, int], classes: Sequence[str]) -> str:
    """The change that would use these values."""
    values = sorted(counts)
    inner = [value for value in values if value != IGNORED_LABEL]
    if len(values) == len(classes):  # 0 and 255 for two classes: 255 is the second
        chosen = values
    elif len(inner) == len(classes):
        chosen = inner
    else:
        return (
            f"Give each class of task.classes ({', '.join(classes)}) its value with data.mask_values, such as {{0: 0, 255: 1}}, leave "
            "classes that no mask has out of task.classes, or mend the masks."
        )
    mapping = ", ".join(f"{value}: {index}" for index, value in enumerate(chosen))
    meaning = ", ".join(f"{value} is {name}" for value, name in zip(chosen, classes, strict=True))
    return f"If {meaning}, set data.mask_values to {{{mapping}}}; otherwise mend the masks."
