"""Input streaming on torch devices: strips of a `sft.sources.Source`, read ahead of the sweep."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from sft.common.interval import Interval
from sft.sources.source import Source, select_samples
from sft.sources.strip_reader import StripReader, source_error
from sft.torch_runtime.host_outputs import copy_in_order
from sft.torch_runtime.pass_statistics import PassReading

__all__ = ["SourceStripLoader", "load_source"]

#: An image is read in chunks of about this size, so that the memory of its decoder, or of its file's pages, stays small.
_CHUNK_BYTES = 8 * 2**20


class SourceStripLoader:
    """Loader of strips of a source, which a thread on the host reads ahead.

    Args:
        source: source of the full batch.
        batch: batch elements to read.
        order: rows of each strip, in the order in which they are taken.
        device: device of the strips; on the CPU they are views of the reader's buffers.
        statistics: updated when the loader is closed.
    """

    def __init__(self, source: Source, batch: Interval, order: Sequence[Interval], device: torch.device, statistics: PassReading) -> None:
        self._device, self._statistics, self._num_batch = device, statistics, len(batch)
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
        """Stop the thread, free the buffers and update the statistics."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        reader.close()
        self._statistics.read_seconds += reader.read_seconds
        self._statistics.waited_seconds += reader.waited_seconds
        self._statistics.num_rows_read += reader.num_rows_read * self._num_batch
        self._statistics.read_bytes += reader.read_bytes


def load_source(source: Source, out: torch.Tensor, statistics: PassReading) -> None:
    """Fill a tensor on any device with all rows of a source.

    Raises:
        SourceError: the rows cannot be read.
    """
    num, channels, height, width = source.shape
    chunk_rows = max(1, _CHUNK_BYTES // (num * channels * width * source.dtype.itemsize))
    chunks = [Interval(top, min(top + chunk_rows, height)) for top in range(0, height, chunk_rows)]
    if out.device.type != "cpu":
        loader = SourceStripLoader(source, Interval(0, num), chunks, torch.device("cpu"), statistics)
        try:
            for rows in chunks:
                strip = loader.take(rows)
                for sample in range(num):  # rows of several samples are not dense on the device: CUDA would copy them via a buffer there
                    host_rows = strip[sample : sample + 1]
                    copy_in_order(out[sample : sample + 1, :, rows.start : rows.stop], host_rows, host_rows)
        finally:
            loader.close()
        return
    # The source writes into the tensor itself: no copy and no computation that a thread could overlap with.
    started = time.perf_counter()
    with torch.no_grad():
        for rows in chunks:
            try:
                source.rows(rows, out[:, :, rows.start : rows.stop])
            except Exception as error:
                raise source_error(source, rows, error) from error
            statistics.num_rows_read += num * len(rows)
    seconds = time.perf_counter() - started
    statistics.read_seconds += seconds
    statistics.waited_seconds += seconds
    statistics.read_bytes += out.numel() * out.element_size()
