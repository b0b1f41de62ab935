"""Byte sizes, rates and durations as text."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Integral, Real
from typing import Any, SupportsInt

from sft.common.errors import InputError, InputTypeError, typed

__all__ = ["format_bytes", "format_seconds", "is_integer", "parse_bytes", "parse_rate", "size_at_least"]

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
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,4})?)\s*([a-zA-Z]*)\s*")

#: The largest byte count that PyTorch can write.
_MAX_BYTES = 2**63 - 1


def is_integer(value: Any) -> bool:
    """True if a value is an integer (Python's, NumPy's or of another ``numbers.Integral`` type) and not a bool.

    >>> is_integer(3), is_integer(3.0), is_integer(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def parse_bytes(size: float | str | SupportsInt) -> int:
    """Parse a byte count such as ``11811160064``, ``11e9`` or ``"11GiB"``.

    >>> parse_bytes("1.5 GiB"), parse_bytes("3MB"), parse_bytes(17), parse_bytes("1e9")
    (1610612736, 3000000, 17, 1000000000)

    Raises:
        InputError: it is not a positive size, or more than any memory has.
    """
    if isinstance(size, str):
        num_bytes = _parse_byte_text(size)
    elif is_integer(size) or (isinstance(size, float) and size.is_integer()):
        num_bytes = int(size)
    else:
        raise InputError(f"a byte size is an integer or text such as '11GiB', got {size!r}")
    if num_bytes <= 0:
        raise InputError(f"a byte size must be positive, got {size!r}")
    if num_bytes > _MAX_BYTES:
        raise InputError(f"a byte size may be {_MAX_BYTES} at most, got {str(size)[:40]!r}; write '1024TiB' for no limit")
    return num_bytes


def _parse_byte_text(text: str) -> int:
    """Parse a byte size; a size above the limit becomes the limit plus one."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNIT_BYTES:
        raise InputError(f"cannot read {text!r} as a byte size; write for example '11GiB', '800MB' or 1073741824")
    number = Decimal(match[1])
    return _MAX_BYTES + 1 if number > _MAX_BYTES else round(number * _UNIT_BYTES[match[2].lower()])


def format_bytes(num_bytes: int) -> str:
    """Format a byte count with a binary unit.

    >>> format_bytes(1610612736), format_bytes(2048), format_bytes(5)
    ('1.50 GiB', '2.00 KiB', '5 B')
    """
    _check_number(num_bytes)
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def _check_number(value: object) -> None:
    if not isinstance(value, Real):
        raise InputTypeError(f"a number of bytes is {value!r}, {typed(value)}; give a number")


def size_at_least(num_bytes: int) -> str:
    """The shortest size of two decimals that is not smaller; :func:`parse_bytes` reads it.

    >>> size_at_least(85899610048), size_at_least(2**31), size_at_least(1000)
    ('80.01 GiB', '2.00 GiB', '1000 B')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{Decimal(-(-100 * num_bytes // size)) / 100:.2f} {unit}"
    return f"{num_bytes} B"


def format_seconds(seconds: float) -> str:
    """Format a duration in its largest units.

    >>> [format_seconds(value) for value in (0.0, 0.0913, 0.000042, 1.5, 41, 200, 41440, 4e5)]
    ['0 s', '0.091 s', '4.2e-05 s', '1.5 s', '41 s', '3 min 20 s', '11.5 h', '4.6 days']
    """
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    if seconds < 3599.5:
        minutes, seconds_left = divmod(round(seconds), 60)
        return f"{minutes} min {seconds_left} s"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 47.95 else f"{hours / 24:.1f} days"


def parse_rate(rate: str) -> float:
    """Parse bytes per second, such as ``"400Gbit"`` or ``"50GB"``.

    >>> parse_rate("400Gbit"), parse_rate("50GB")
    (50000000000.0, 50000000000.0)

    Raises:
        InputError: the text is not a positive rate.
    """
    text = rate.strip().lower().removesuffix("/s")
    if text.endswith("bit"):
        return parse_bytes(f"{text.removesuffix('it')}") / 8
    return float(parse_bytes(text))
