"""Names of settings in errors: readers name their arguments in Python, a run names the settings that have their effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sft.common.errors import InputError, SkipSlideError, SourceError

__all__ = ["naming_settings"]

#: Remedies of readers as patterns, and those of a run.
_SETTINGS = tuple(
    (re.compile(pattern), setting)
    for pattern, setting in (
        (
            re.escape("Name each class; ignore_others=True leaves them out"),
            "Name each in task.classes; data.ignore_other_classes: true leaves them out",
        ),
        (re.escape("column= chooses the one with the class"), "data.mask_column chooses the one with the class"),
        (re.escape("Choose one: column=."), "Choose one: data.mask_column."),
        (re.escape('Choose crs="OGC:CRS84" or crs="pixels"'), "Set data.mask_crs to OGC:CRS84 or to pixels"),
        (
            re.escape("Choose channel=0 (in PANDA the label is in red), or give colours={(r, g, b): label}; or save one channel of it"),
            'Set data.mask_channel: 0 (in PANDA the label is in red), or data.mask_colours: {"#rrggbb": class}; or save one channel of it',
        ),
        (r"Add it to colours\.", "Add it to data.mask_colours."),
        (r"choose a value for them \(outside=255\)", "choose a value for them (data.mask_outside: 255)"),
        (r'\bmask="(\w+)"', r"data.invalid_pixels: \1"),
        (r"\bopen_image\(path, mask=\.\.\.\)", "data.invalid_pixels"),
        (r"\bget fill_value\b", "get data.fill_value"),
        (r"\bat=\{'(\w+)': (\d+)\}", r"data.at: {\1: \2}"),
        (r'on_error="(\w+)"', r"train.on_error: \1"),
    )
)


@contextmanager
def naming_settings() -> Iterator[None]:
    """Context in which errors of readers of slides, label maps and annotations name settings of a run in place of arguments."""
    try:
        yield
    except (InputError, SourceError) as error:
        text = str(error)
        for argument, setting in _SETTINGS:
            text = argument.sub(setting, text)
        if text == str(error) or type(error) not in (InputError, SourceError, SkipSlideError):
            raise
        raise type(error)(text) from error
