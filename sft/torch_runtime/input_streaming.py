"""Reading inputs while sweeps run: from a `sft.sources.Source` to strips on the device, and an account of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sft.common.interval import Interval
from sft.sources.source import Source, select_samples
from sft.sources.strip_reader import StripReader, source_error
from sft.torch_runtime.host_outputs import copy_in_order

__all__ = ["PassReading", "Reading", "SourceStripLoader", "load_source"]

#: A whole image is read in pieces of about so many bytes: what lies behind it (a decoder, pages of a file) is then never whole.
_PIECE_BYTES = 8 * 2**20


@dataclass(slots=True, kw_only=True)
class PassReading:
    """What one pass, forward or backward, read of all inputs that are not resident.

    Attributes:
        read_seconds: time that the readers spent reading and normalising, in threads of their own.
        waited_seconds: time that the pass stood still for want of a strip.
        num_rows_read: rows asked of the sources; a row of two batch elements counts twice, overlapping strips ask for it once.
        read_bytes: bytes that the sources delivered, as numbers for the network.
    """

    read_seconds: float = 0.0
    waited_seconds: float = 0.0
    num_rows_read: int = 0
    read_bytes: int = 0

    @property
    def hidden_fraction(self) -> float:
        """The share of the reading time that the pass did not notice, in 0..1; 1 if nothing was read."""
        return 1.0 if self.read_seconds <= 0 else min(1.0, max(0.0, 1 - self.waited_seconds / self.read_seconds))

    def __str__(self) -> str:
        return (
            f"{self.num_rows_read:,} rows in {self.read_seconds:.2f} s, waited {self.waited_seconds:.2f} s "
            f"({100 * self.hidden_fraction:.0f} % hidden)"
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What a call read of its inputs; the backward pass adds its part when it runs.

    >>> print(Reading())
    forward: 0 rows in 0.00 s, waited 0.00 s (100 % hidden)
    backward: 0 rows in 0.00 s, waited 0.00 s (100 % hidden)

    Attributes:
        forward: of the forward pass.
        backward: of the backward passes so far.
    """

    forward: PassReading = field(default_factory=PassReading)
    backward: PassReading = field(default_factory=PassReading)

    def __str__(self) -> str:
        return f"forward: {self.forward}\nbackward: {self.backward}"


class SourceStripLoader:
    """Strips of a source on a device, read ahead on the host.

    Args:
        source: of the whole batch.
        batch: the elements wanted.
        order: their rows, in the order in which they will be taken.
        device: where strips go; on the host they stay in the reader's buffers.
        account: gains what was read when the strips are closed.
    """

    def __init__(self, source: Source, batch: Interval, order: Sequence[Interval], device: torch.device, account: PassReading) -> None:
        self._device, self._account, self._num_batch = device, account, len(batch)
        self._reader: StripReader | None = StripReader(select_samples(source, batch), order)

    def take(self, rows: Interval) -> torch.Tensor:
        """The next strip, channels last.

        Raises:
            SourceError: it cannot be read.
        """
        assert self._reader is not None
        strip = self._reader.take(rows)
        if self._device.type == "cpu":
            return strip
        copy = torch.empty(strip.shape, dtype=strip.dtype, device=self._device, memory_format=torch.channels_last)
        return copy.copy_(strip)

    def close(self) -> None:
        """End the thread and let go of the buffers."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        reader.close()
        self._account.read_seconds += reader.read_seconds
        self._account.waited_seconds += reader.waited_seconds
        self._account.num_rows_read += reader.num_rows_read * self._num_batch
        self._account.read_bytes += reader.read_bytes


def load_source(source: Source, out: torch.Tensor, account: PassReading) -> None:
    """Fill a tensor on any device with all rows of a source.

    Raises:
        SourceError: the rows cannot be read.
    """
    num, channels, height, width = source.shape
    piece_rows = max(1, _PIECE_BYTES // (num * channels * width * source.dtype.itemsize))
    pieces = [Interval(top, min(top + piece_rows, height)) for top in range(0, height, piece_rows)]
    if out.device.type != "cpu":
        strips = SourceStripLoader(source, Interval(0, num), pieces, torch.device("cpu"), account)
        try:
            for rows in pieces:
                piece = strips.take(rows)
                for sample in range(num):  # rows of several samples are not dense on the device: CUDA would copy to a buffer there first
                    own = piece[sample : sample + 1]
                    copy_in_order(out[sample : sample + 1, :, rows.start : rows.stop], own, own)
        finally:
            strips.close()
        return
    # The tensor is where the numbers belong: nothing to copy, and nothing to do meanwhile that a thread could hide behind.
    started = time.perf_counter()
    with torch.no_grad():
        for rows in pieces:
            try:
                source.rows(rows, out[:, :, rows.start : rows.stop])
            except Exception as error:
                raise source_error(source, rows, error) from error
            account.num_rows_read += num * len(rows)
    seconds = time.perf_counter() - started
    account.read_seconds += seconds
    account.waited_seconds += seconds
    account.read_bytes += out.numel() * out.element_size()
