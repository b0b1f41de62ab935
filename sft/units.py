"""Byte sizes as people write them."""

from __future__ import annotations

import re

from sft.errors import InputError

__all__ = ["format_bytes", "parse_bytes", "parse_rate"]

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(size: int | str) -> int:
    """Read a byte count such as ``11811160064`` or ``"11GiB"``.

    >>> parse_bytes("1.5 GiB"), parse_bytes("3MB"), parse_bytes(17)
    (1610612736, 3000000, 17)

    Raises:
        InputError: the text is not a positive size.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise InputError(f"a byte size is an integer or text such as '11GiB', got {size!r}")
    if isinstance(size, int):
        num_bytes = size
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNIT_BYTES:
            raise InputError(f"cannot read {size!r} as a byte size; write for example '11GiB', '800MB' or 1073741824")
        num_bytes = round(float(match[1]) * _UNIT_BYTES[match[2].lower()])
    if num_bytes <= 0:
        raise InputError(f"a byte size must be positive, got {size!r}")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Write a byte count for people.

    >>> format_bytes(1610612736), format_bytes(2048), format_bytes(5)
    ('1.50 GiB', '2.00 KiB', '5 B')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def parse_rate(rate: str) -> float:
    """Read bytes a second, such as ``"400Gbit"`` or ``"50GB"``.

    >>> parse_rate("400Gbit"), parse_rate("50GB")
    (50000000000.0, 50000000000.0)

    Raises:
        InputError: the text is not a positive rate.
    """
    text = rate.strip().lower().removesuffix("/s")
    if text.endswith("bit"):
        return parse_bytes(f"{text.removesuffix('it')}") / 8
    return float(parse_bytes(text))
