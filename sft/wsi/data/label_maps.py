"""Label maps of a run: the classes of their values, and checks of the values before training.

A label map has one value for each pixel. By default the value is the index of the class, and `IGNORED_LABEL` counts for nothing.
``data.mask_values`` maps other values: ``{0: 0, 255: 1}`` for masks of 0 and 255, ``{0: 0, 1: 0, 2: 1, 3: 255}`` to merge two values and to
ignore a third; ``data.mask_colours`` gives colours theirs. Binary masks of 0 and 1 next to masks of 0 and 255 need that mapping. A class
that no training slide has a pixel of is a mistake in the masks nearly always: the most common binary mask, of 0 and 255, would otherwise be
read as background and ignored pixels, and train on nothing.

Label maps are aligned with their slides by `sft.sources.readers.label_alignment`. Annotations (GeoJSON, ASAP XML) are label maps,
too: a class has the polygons of its name, and the first class also the pixels outside of all polygons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sft.sources.image import Image, read_strips
from sft.wsi.run.files import counted

__all__ = [
    "IGNORED_LABEL",
    "absent_classes",
    "colour_table",
    "count_values",
    "label_problem",
    "mixed_codings",
    "remedy_of_codings",
    "values_text",
]

#: Value of pixels that count for nothing.
IGNORED_LABEL = 255
#: Pixels counted at a time; NumPy needs eight bytes for each.
_PIXELS_COUNTED = 1 << 22
#: Values below this are counted in a table.
_MAX_COUNTED = 1 << 16
#: Values that a message lists.
_MAX_LISTED = 20
_JPEG_REMEDY = "write label maps as PNG, such as PIL.Image.open(path).point(lambda value: 255 * (value > 127)) for two classes."
#: Distinct values of a label map at most; more are not labels.
_MAX_VALUES = 4096


def count_values(labels: npt.NDArray[Any] | Image) -> dict[int, int]:
    """Pixels of each value of a label map, which may be larger than the memory: an array, or an image of one channel.

    >>> count_values(np.array([[0, 255], [255, 255]], np.uint8))
    {0: 1, 255: 3}
    """
    counts: Counter[int] = Counter()
    for strip in _strips(labels):
        rows = np.ravel(strip)
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


def _strips(labels: npt.NDArray[Any] | Image) -> Iterator[npt.NDArray[Any]]:
    """Labels in strips of some million pixels."""
    if isinstance(labels, np.ndarray):
        step = max(1, _PIXELS_COUNTED // max(1, labels.shape[1]))
        yield from (labels[top : top + step] for top in range(0, len(labels), step))
    else:
        yield from read_strips(labels, max(1, _PIXELS_COUNTED // labels.width_px))


def label_problem(
    counts: Mapping[int, int], classes: Sequence[str], mask_values: Mapping[int, int] | None, path: Path | None = None
) -> str | None:
    """Problem of a label map by its values; None for a usable one.

    Args:
        counts: pixels of each value.
        classes: names of the classes.
        mask_values: class index of each value; None for values that are class indices.
        path: of the label map. Default: `None`
    """
    class_of = _class_of(classes, mask_values)
    unknown = [value for value in counts if value not in class_of]
    if unknown:
        allowed = (
            f"labels are 0 to {len(classes) - 1}, and {IGNORED_LABEL} for none"
            if mask_values is None
            else f"data.mask_values has {', '.join(map(str, class_of))}"
        )
        is_jpeg = path is not None and path.suffix.lower() in (".jpg", ".jpeg")
        remedy = f"JPEG changes values at edges: {_JPEG_REMEDY}" if is_jpeg else _remedy(counts, classes)
        return f"holds {unknown[0]}; {allowed}. Its values are {values_text(counts)}. {remedy}"
    if all(class_of[value] == IGNORED_LABEL for value in counts):
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
    class_of = _class_of(classes, mask_values)
    present = {class_of[value] for value in total if value in class_of}
    absent = [name for index, name in enumerate(classes) if index not in present]
    where = "label map holds" if num_maps == 1 else f"{num_maps} label maps hold"
    ignored = [value for value in total if class_of.get(value) == IGNORED_LABEL]
    note = f" ({', '.join(map(str, sorted(ignored)))} counts for nothing)" if ignored else ""
    return absent, f"the {where} {values_text(total)}{note}. {_remedy(total, classes)}"


def mixed_codings(maps: Mapping[str, Mapping[int, int]], classes: Sequence[str], mask_values: Mapping[int, int] | None) -> str | None:
    """Problem of binary masks of which some say 1 and others 255 for the second class; None without one.

    255 counts for nothing, so masks of 0 and 255 among masks of 0 and 1 would be background and ignored pixels. Masks that do ignore pixels
    have 255 next to 1 in one of them; ``data.mask_values`` states either meaning.

    >>> print(mixed_codings({"a.png": {0: 9, 1: 4}, "b.png": {0: 3, 255: 2}}, ["back", "tumour"], None))
    1 label map holds 1 but no 255, such as a.png, and 1 holds 255 but no 1, such as b.png: 255 counts for nothing
    >>> mixed_codings({"a.png": {0: 9, 1: 4, 255: 1}, "b.png": {0: 3, 255: 2}}, ["back", "tumour"], None)

    Args:
        maps: pixels of each value, for each label map by its name.
        classes: names of the classes.
        mask_values: class index of each value; None for values that are class indices.
    """
    if mask_values is not None or len(classes) != 2:
        return None
    labelled = [name for name, counts in maps.items() if 1 in counts]
    ignoring = [name for name, counts in maps.items() if IGNORED_LABEL in counts]
    if not labelled or not ignoring or set(labelled) & set(ignoring):
        return None
    kinds = [
        f"{counted(len(names), 'label map', 'label maps') if value == 1 else len(names)} {'holds' if len(names) == 1 else 'hold'} {value} "
        f"but no {other}, such as {names[0]}"
        for names, value, other in ((labelled, 1, IGNORED_LABEL), (ignoring, IGNORED_LABEL, 1))
    ]
    return f"{kinds[0]}, and {kinds[1]}: {IGNORED_LABEL} counts for nothing"


def remedy_of_codings(classes: Sequence[str]) -> str:
    """Text: the settings of a configuration for masks of two codings."""
    return (
        f"If both are {classes[1]}, set data.mask_values to {{0: 0, 1: 1, {IGNORED_LABEL}: 1}}; if {IGNORED_LABEL} is to be ignored, to "
        f"{{0: 0, 1: 1, {IGNORED_LABEL}: {IGNORED_LABEL}}}."
    )


def colour_table(colours: Mapping[str, int] | None) -> dict[tuple[int, int, int], int] | None:
    """Labels of colours for `sft.sources.open_labels`, from ``data.mask_colours``.

    >>> colour_table({"#ff0080": 1})
    {(255, 0, 128): 1}
    """
    if colours is None:
        return None
    return {(int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)): label for text, label in colours.items()}


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
            "classes that no mask has out of task.classes, or correct the masks."
        )
    mapping = ", ".join(f"{value}: {index}" for index, value in enumerate(chosen))
    meaning = ", ".join(f"{value} is {name}" for value, name in zip(chosen, classes, strict=True))
    return f"If {meaning}, set data.mask_values to {{{mapping}}}; otherwise correct the masks."
