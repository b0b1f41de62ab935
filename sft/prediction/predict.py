"""`sft.predict`: a network's prediction for an image of any size, written to files while it is computed."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from sft.api.check import position_grids
from sft.api.compile import compile
from sft.api.compiled_handle import of
from sft.api.engine import Engine
from sft.common.atomic_files import is_text_path
from sft.common.errors import InputError, UnsupportedError, typed
from sft.common.interval import Interval
from sft.planner.plan import Plan
from sft.prediction.cog import CogWriter
from sft.prediction.delivery import Delivery, resolve_dtype
from sft.prediction.identity import prediction_identity
from sft.prediction.image_frame import ImageFrame
from sft.prediction.npy import NpyWriter
from sft.prediction.ome_tiff import OmeTiffWriter
from sft.prediction.ome_zarr import OmeZarrWriter
from sft.prediction.polygon_writer import PolygonWriter
from sft.prediction.prediction_head import KINDS, Kind, PredictionHead
from sft.prediction.raster import PredictedRaster, RasterWriter
from sft.prediction.row_journal import RowJournal, default_journal_path
from sft.sources.open import open_image
from sft.torch_runtime.pass_statistics import Reading

__all__ = ["PredictionResult", "WriterArgument", "predict"]

#: Destination of a prediction: a path, whose suffix names the format, a writer, or several of them.
WriterArgument: TypeAlias = str | os.PathLike[str] | RasterWriter | Sequence[str | os.PathLike[str] | RasterWriter]

#: Writers by suffix.
_WRITERS: dict[str, Callable[[Any], RasterWriter]] = {
    ".ome.tif": OmeTiffWriter,
    ".ome.tiff": OmeTiffWriter,
    ".zarr": OmeZarrWriter,
    ".npy": NpyWriter,
    ".geojson": PolygonWriter,
}
_TIFF = (".tif", ".tiff")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionResult:
    """Result of `sft.predict`.

    Attributes:
        paths: files, in the order of the writers.
        raster: size, type and place of the written raster.
        total_seconds: seconds of the call.
        write_seconds: seconds of each writer, in their order.
        wait_seconds: seconds that the computation waited for the writers.
        plan: plan of the computation.
        reading: statistics of the image; ``None`` for a tensor on the device.
        num_resumed_rows: rows that came from the journal of an interrupted call.
    """

    paths: tuple[Path, ...]
    raster: PredictedRaster
    total_seconds: float
    write_seconds: tuple[float, ...]
    wait_seconds: float
    plan: Plan
    reading: Reading | None = None
    num_resumed_rows: int = 0

    @property
    def hidden_share(self) -> float:
        """Share of the writing that overlapped with the computation."""
        total = sum(self.write_seconds)
        return max(0.0, 1 - self.wait_seconds / total) if total else 1.0


def predict(
    net: nn.Module,
    source: Any,
    writer: WriterArgument,
    *,
    kind: Kind = "classes",
    dtype: str | None = None,
    names: Sequence[str] = (),
    index: int | str | None = None,
    resume: bool | str | os.PathLike[str] = False,
) -> PredictionResult:
    """Predict an image strip by strip, and write the prediction to files in constant memory: without tiles, seams or blending.

    The values are those of the network on the full image. The network runs in evaluation mode, without gradients, inside the budget of
    ``net``. Rows are written by a thread while the next ones are computed. A file appears at its path when the prediction is complete;
    until then, and after an error, a file that was there before stays.

    >>> import sft, numpy as np, tempfile, os
    >>> net = sft.compile(torch.nn.Conv2d(3, 4, 3, padding=1), (1, 3, None, None), budget="4MiB")
    >>> path = os.path.join(tempfile.mkdtemp(), "map.npy")
    >>> sft.predict(net, torch.rand(1, 3, 60, 50), path).raster.height_px
    60
    >>> np.load(path).shape, np.load(path).dtype
    ((60, 50), dtype('uint8'))

    Args:
        net: a compiled network with an image output.
        source: one image, as in a call of ``net``: a tensor, an array, an image, any `sft.sources.Source`. A path, or a list of the paths
            of one image, is opened with `sft.sources.open_image`.
        writer: a path that ends in ``.ome.tif``, ``.tif`` (a cloud-optimized GeoTIFF if the image has map coordinates, otherwise
            OME-TIFF), ``.zarr``, ``.npy`` or ``.geojson``; a writer of `sft.prediction`; or a list of these, for several files from
            one computation.
        kind: ``"classes"`` for the index of the highest score, ``"softmax"`` or ``"sigmoid"`` for probabilities, ``"values"`` for the
            output itself. Default: ``"classes"``
        dtype: element type. Classes: ``"uint8"`` (the default), ``"uint16"``, ``"int16"``. Probabilities: ``"uint8"`` (the default; 255
            stands for 1), ``"uint16"`` (65535), ``"float16"``, ``"float32"``. Values: ``"float32"`` (the default), ``"float16"``,
            ``"float64"``.
        names: names of all classes or channels, for the files; two for classes of a single output channel. Default: none
        index: number, or key, of the output of a network with several outputs. Default: the only one
        resume: True, or the path of a file, to keep computed rows in a journal until the files are complete. A call with the same network,
            source and settings continues below the rows of an interrupted one, and gives them to its writers. True names a hidden file next
            to the first path. Default: `False` (an interrupted call starts from the first row)

    Raises:
        InputError: an argument is wrong, or the output has values that are not finite.
        UnsupportedError: the network was compiled for several ranks, or for streamed weights.
        SourceError: the image cannot be read, or a file cannot be written.
        BudgetError: no plan fits.
    """
    if kind not in KINDS:
        raise InputError(f"kind {kind!r}: choose one of {', '.join(map(repr, KINDS))}")
    element_type = resolve_dtype(kind, dtype)
    begin = time.perf_counter()
    engine = of(net).engine
    if isinstance(names, str):
        raise InputError(f"names {names!r}: give a list of names, one for each class or channel")
    several = source if isinstance(source, (list, tuple)) else [source]
    if several and all(isinstance(each, (str, os.PathLike)) for each in several):
        source = open_image(source)
    frame = ImageFrame.of(source)
    is_single = isinstance(writer, (str, os.PathLike, RasterWriter))
    writers = [_writer_of(each, frame) for each in ([writer] if is_single else writer)]  # type: ignore[union-attr]
    _check_paths(writers)
    journal = None
    if resume is not False:
        path = default_journal_path(writers[0].path) if resume is True else resume
        identity = prediction_identity(engine.model, source, kind=kind, dtype=element_type.str, names=tuple(names), index=index)
        journal = RowJournal(path, identity)
    compiled = _compiled(engine, kind, index, len(names))

    def describe(shape: tuple[int, ...]) -> PredictedRaster:
        grids = position_grids(compiled.net, source)[0]
        return frame.raster(shape, grids, kind=kind, dtype=element_type, names=tuple(names))

    delivery = compiled.slot.delivery = Delivery(kind, element_type, writers, describe, journal)
    try:
        with _evaluation_mode(engine.model), torch.no_grad():
            compiled.net(source)
    finally:
        compiled.slot.delivery = None
        delivery.discard()
    assert delivery.raster is not None
    return PredictionResult(
        paths=tuple(each.path for each in writers),
        raster=delivery.raster,
        total_seconds=time.perf_counter() - begin,
        write_seconds=tuple(delivery.write_seconds),
        wait_seconds=delivery.wait_seconds,
        plan=of(compiled.net).plan,
        reading=of(compiled.net).last_reading,
        num_resumed_rows=delivery.num_known_rows,
    )


class _SinkSlot:
    """Sink of a compiled head: it forwards to the delivery of the current call."""

    def __init__(self) -> None:
        self.delivery: Delivery | None = None

    @property
    def num_known_rows(self) -> int:
        """Rows that need not be computed."""
        return self._current.num_known_rows

    def open(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Begin an output."""
        self._current.open(shape, dtype)

    def write(self, block: torch.Tensor, rows: Interval | None, columns: Interval | None) -> None:
        """Take a block."""
        self._current.write(block, rows, columns)

    def publish(self) -> None:
        """Complete the output."""
        self._current.publish()

    def discard(self) -> None:
        """Drop the output."""
        self._current.discard()

    @property
    def _current(self) -> Delivery:
        if self.delivery is None:
            raise InputError("this network writes predictions; call sft.predict in place of the network")
        return self.delivery


@dataclass(frozen=True, slots=True)
class _CompiledHead:
    """A compiled head and its sink."""

    net: nn.Module
    slot: _SinkSlot


#: Heads of compiled networks: captures and plans are shared by the images of one network.
_HEADS: weakref.WeakKeyDictionary[Engine, dict[tuple[Kind, int | str | None, int], _CompiledHead]] = weakref.WeakKeyDictionary()


def _compiled(engine: Engine, kind: Kind, index: int | str | None, num_names: int) -> _CompiledHead:
    """The compiled head of a network, with the network's budget and options."""
    settings = engine.settings
    if settings.mesh is not None or settings.sharding is not None:
        raise UnsupportedError(["(the model itself): predict is for one device; compile the network without mesh and fully_shard"])
    if settings.options.streams_weights or engine.streamed_weights is not None:
        raise UnsupportedError(["(the model itself): predict is for resident weights; compile with Options(weights='resident')"])
    heads = _HEADS.setdefault(engine, {})
    if (kind, index, num_names) not in heads:
        slot = _SinkSlot()
        head = PredictionHead(engine.model, kind, index, num_names)
        net = compile(head, (1, None, None, None), budget=settings.budget_bytes, options=settings.options, output=slot)
        heads[kind, index, num_names] = _CompiledHead(net, slot)
    return heads[kind, index, num_names]


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """All modules in evaluation mode; their flags come back at the end."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _check_paths(writers: Sequence[RasterWriter]) -> None:
    """Refuse writers of one file.

    Raises:
        InputError: no writer, or two with one path.
    """
    paths = [os.path.realpath(writer.path) for writer in writers]
    if not paths:
        raise InputError("writer is empty: give a path, a writer, or a list of them")
    if len(set(paths)) != len(paths):
        raise InputError(f"two writers have the same path: {', '.join(sorted(paths))}; give each its own")


def _writer_of(value: Any, frame: ImageFrame) -> RasterWriter:
    """A writer as it is, or the writer of a path's format.

    Args:
        value: a writer, or a path.
        frame: of the image: a ``.tif`` of an image with map coordinates is a COG.

    Raises:
        InputError: neither a writer nor a path with a known suffix.
    """
    if isinstance(value, RasterWriter):
        return value
    suffixes = f"{', '.join((*_WRITERS, _TIFF[0]))}"
    if not is_text_path(value):
        raise InputError(f"writer {value!r} is {typed(value)}: give a path that ends in {suffixes}, or a writer of sft.prediction")
    name = os.path.basename(os.fspath(value)).lower()
    for suffix, make in _WRITERS.items():
        if name.endswith(suffix):
            return make(value)
    if name.endswith(_TIFF):
        return OmeTiffWriter(value) if frame.georeference is None else CogWriter(value)
    raise InputError(
        f"writer {os.fspath(value)!r}: its suffix names no format; give a path that ends in {suffixes}, or a writer of sft.prediction"
    )
