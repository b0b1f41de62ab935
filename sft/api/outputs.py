"""Outputs of a compiled model: the argument ``sft.compile(..., output=...)``, and host memory or files for the outputs of a call.

==============================  ==============================================================================================
output                          each output of a call
==============================  ==============================================================================================
``"device"``                    a tensor on the model's device
``"host"``                      a CPU tensor in host memory
``"band"``                      with a mesh: this rank's rows of it, on its device (an output that is not an image is complete
                                on every rank)
a path that ends in ``.npy``    a CPU tensor that maps the file; the model must have one output
a sequence of these paths       the same, a path for each output; ``"host"`` in place of a path for one without a file
an ``OutputSink``               an expanded number; the sink takes the strips, and the model must have one output
==============================  ==============================================================================================

The bytes of outputs off the device are neither in the budget, nor in the count of ``sft.measure_peak``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from sft.common.errors import InputError, typed
from sft.common.legacy_names import restore_fields
from sft.runtime.region import Region
from sft.sources.sink import NpyFile, numpy_dtype
from sft.torch_runtime.host.host_outputs import HostOutput, OutputSink, allocate_host_output, copy_to_host

__all__ = ["HostOutputs", "OutputArgument", "OutputDestination", "resolve_output"]

_MAX_NAME_BYTES = 255
OutputArgument: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | OutputSink


@dataclass(frozen=True, slots=True)
class OutputDestination:
    """Destination of the outputs of a compiled model.

    Attributes:
        on_host: whether they leave the device.
        paths: the file of each output, None for one without a file; empty if no output has one.
        in_bands: whether each rank of a mesh keeps its own rows of outputs that are images.
        sink: consumer of the model's one output, in place of a tensor.
    """

    on_host: bool = False
    paths: tuple[Path | None, ...] = ()
    in_bands: bool = False
    sink: OutputSink | None = None

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    def check(self, dtypes: Sequence[torch.dtype]) -> None:
        """Refuse outputs of element types that the destination cannot hold.

        Raises:
            InputError: the number of paths differs from that of outputs, or NumPy lacks a type.
        """
        if self.sink is not None and len(dtypes) != 1:
            raise InputError(f"output is a sink, which takes one output, and the model has {len(dtypes)}; return one tensor from the model")
        if not self.paths:
            return
        if len(self.paths) != len(dtypes):
            raise InputError(
                f"output has {len(self.paths)} path(s) for the model's {len(dtypes)} output(s); give output=[path, ...] with one for each, "
                "or output='host'"
            )
        problems = [
            f"output {position} is {dtype}, which .npy files cannot hold ({path}): give 'host' in place of the path and save the tensor "
            "with torch.save, return output.float() from the model, or leave out autocast"
            for position, (dtype, path) in enumerate(zip(dtypes, self.paths, strict=True))
            if path is not None and numpy_dtype(dtype) is None
        ]
        if problems:
            raise InputError("; ".join(problems))

    def path_of(self, position: int) -> Path | None:
        """The file of an output, if any."""
        return self.paths[position] if self.paths else None


def resolve_output(output: object) -> OutputDestination:
    """Parse the argument ``output``.

    Raises:
        InputError: neither a known word nor paths of files that can be made.
    """
    if isinstance(output, str) and output in ("device", "host", "band"):
        return OutputDestination(output == "host", in_bands=output == "band")
    if isinstance(output, OutputSink):
        return OutputDestination(True, sink=output)
    if isinstance(output, (str, os.PathLike)):
        paths: tuple[Path | None, ...] = (_path(output),)
    elif isinstance(output, (list, tuple)) and output:
        paths = tuple(None if entry == "host" else _path(entry) for entry in output)
    else:
        raise InputError(f"output {output!r}: choose 'device', 'host', a path that ends in .npy, or a list with one for each output")
    files = [os.path.realpath(path) for path in paths if path is not None]
    if len(set(files)) != len(files):
        raise InputError(f"output names a file twice: {', '.join(files)}; give each output a file of its own")
    return OutputDestination(True, paths)


def _path(entry: object) -> Path:
    if not isinstance(entry, (str, os.PathLike)) or isinstance(os.fspath(entry), bytes):
        raise InputError(f"output {entry!r} is {typed(entry)}; give a path that ends in .npy, or 'host'")
    path = Path(entry)
    if path.suffix != ".npy":
        ending = f", not in {path.suffix!r}" if path.suffix else ""
        raise InputError(f"output {os.fspath(entry)!r}: choose 'device', 'host', or a path that ends in .npy{ending}")
    if "\0" in os.fspath(entry) or len(os.fsencode(path.name)) > _MAX_NAME_BYTES:
        raise InputError(f"output {os.fspath(entry)[:40]!r}...: no file can have this name; give a shorter one, without zero bytes")
    if path.is_dir():
        raise InputError(f"output {os.fspath(entry)!r} is a directory; give the path of a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"output {os.fspath(entry)!r}: {os.fspath(folder)!r} is not a directory; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"output {os.fspath(entry)!r}: no permission to write into {os.fspath(folder)!r}; choose another folder")
    return path


@dataclass(slots=True)
class HostOutputs:
    """Host outputs of one call, from allocation to publication.

    Attributes:
        by_name: destination of each output, by value name.
        duplicates: destination of a copy, by position, for an output that is also an input of the model or an earlier output.
    """

    by_name: dict[str, HostOutput] = field(default_factory=dict)
    duplicates: dict[int, HostOutput] = field(default_factory=dict)

    @classmethod
    def open(cls, destination: OutputDestination, names: Sequence[str], region: Region, device: torch.device) -> HostOutputs:
        """Allocate the outputs of one call.

        Args:
            destination: where they go.
            names: their values in order; a value that the model returns twice occurs twice.
            region: the computation.
            device: its device.

        Raises:
            InputError: a file cannot be made, or host memory is short; no file was changed.
            SourceError: the disk has no space for a file; no file was changed.
        """
        outputs = cls()
        if not destination.on_host:
            return outputs
        if device.type == "meta" and (any(destination.paths) or destination.sink is not None):
            raise InputError(
                "output names a file or a sink, but a model on the meta device computes no values to write; give output='host' for a "
                "dry run"
            )
        try:
            for position, name in enumerate(names):
                path = destination.path_of(position)
                is_new = name in region.host_outputs and name not in outputs.by_name
                needs_no_copy = name in outputs.by_name or (name not in region.host_outputs and device.type == "cpu")
                if path is None and destination.sink is None and needs_no_copy:
                    continue
                shape, dtype = region.shapes[name], region.dtypes[name]
                if destination.sink is not None:
                    host = HostOutput.in_sink(destination.sink, shape, dtype)
                elif path is not None:
                    host = HostOutput.in_file(NpyFile(path, shape, dtype))
                else:
                    host = allocate_host_output(shape, dtype, channels_last=name not in region.contiguous, is_dry=device.type == "meta")
                if is_new:
                    outputs.by_name[name] = host
                else:
                    outputs.duplicates[position] = host
        except BaseException:
            outputs.discard()
            raise
        return outputs

    def in_order(self, names: Sequence[str], outputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The outputs in order, given those of the region by value name."""
        return [
            copy_to_host(self.duplicates[position], outputs[name]) if position in self.duplicates else outputs[name]
            for position, name in enumerate(names)
        ]

    def publish(self) -> None:
        """Move all files to their final names, in order.

        Raises:
            SourceError: a file cannot be moved; the earlier ones are.
        """
        for host in (*self.by_name.values(), *self.duplicates.values()):
            host.publish()

    def discard(self) -> None:
        """Remove the unpublished files."""
        for host in (*self.by_name.values(), *self.duplicates.values()):
            host.discard()
