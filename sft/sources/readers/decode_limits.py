"""Memory limits of files that are decoded in large units: full images (PNG, JPEG, JPEG 2000), strips, and large tiles."""

from __future__ import annotations

from sft.common.byte_units import format_bytes, parse_bytes
from sft.common.errors import BudgetError

__all__ = ["COSTLY_BYTES", "DEFAULT_DECODE_BYTES", "ReadCostWarning", "check_decode_bytes"]

#: Units of more bytes than this are warned of.
COSTLY_BYTES = 64 << 20
#: Limit of a unit without a budget of the caller.
DEFAULT_DECODE_BYTES = 1 << 30


class ReadCostWarning(UserWarning):
    """A file is decoded in units that are much larger than the rows of a strip."""


def check_decode_bytes(path: object, unit: str, num_bytes: int, host_budget_bytes: int | str | None) -> None:
    """Refuse a file whose unit of decoding exceeds the host budget.

    >>> check_decode_bytes("a.png", "the image", 6 << 30, "4GiB")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    sft.common.errors.BudgetError: cannot read a.png: the image is decoded at once, into 6.00 GiB; the host budget is 4.00 GiB. ...

    Args:
        path: of the file, for the message.
        unit: what is decoded at once, such as ``"the image"``.
        num_bytes: of the decoded unit.
        host_budget_bytes: limit of the caller. None: 1 GiB.

    Raises:
        BudgetError: it does.
    """
    limit = DEFAULT_DECODE_BYTES if host_budget_bytes is None else parse_bytes(host_budget_bytes)
    if num_bytes > limit:
        whose = "the limit without a host budget" if host_budget_bytes is None else "the host budget"
        raise BudgetError(
            f"cannot read {path}: {unit} is decoded at once, into {format_bytes(num_bytes)}; {whose} is {format_bytes(limit)}. Give "
            f'host_budget_bytes="{-(-num_bytes >> 20)}MiB" if the host has it, or write the image as a tiled TIFF or OME-Zarr.',
            needed_bytes=num_bytes,
        )
