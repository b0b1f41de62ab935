"""What ``sft.compile(..., output=...)`` may be given, and where the outputs of a call go.

==============================  ==============================================================================================
output                          each output of a call is
==============================  ==============================================================================================
``"device"``                    a tensor on the model's device
``"host"``                      a CPU tensor in host memory
``"band"``                      with a mesh: this rank's rows of it, on its device (what is no image is whole on every rank)
a path that ends in ``.npy``    a CPU tensor that is the mapped file; the model must have one output
a sequence of these paths       the same, a path for each output; ``"host"`` in place of a path for one that needs no file
==============================  ==============================================================================================

The bytes of outputs that are not on the device are not in the budget, nor in what ``sft.measure_peak`` counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch

from sft.common.errors import InputError
from sft.runtime.region import Region
from sft.sources.sink import NpyFile, numpy_dtype
from sft.torch_runtime.host_outputs import HostOutput, allocate_host_output, copy_to_host

__all__ = ["HostOutputs", "OutputArgument", "OutputDestination", "resolve_output"]

OutputArgument: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class OutputDestination:
    """Where the outputs of a compiled model go.

    Attributes:
        on_host: whether they leave the device.
        paths: the file of each output, None for one that has none; empty where no output has one.
        in_bands: whether each rank of a mesh keeps its own rows of outputs that are images.
    """

    on_host: bool = False
    paths: tuple[Path | None, ...] = ()
    in_bands: bool = False

    def check(self, dtypes: Sequence[torch.dtype]) -> None:
        """Refuse outputs that cannot go there, given their element types.

        Raises:
            InputError: not as many paths as outputs, or a type that NumPy lacks.
        """
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
        """The file of an output."""
        return self.paths[position] if self.paths else None


def resolve_output(output: object) -> OutputDestination:
    """The destination that an argument ``output`` stands for.

    Raises:
        InputError: neither a known word nor paths of files that can be made.
    """
    if isinstance(output, str) and output in ("device", "host", "band"):
        return OutputDestination(output == "host", in_bands=output == "band")
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
        raise InputError(f"output {entry!r} is a {type(entry).__name__}; give a path that ends in .npy, or 'host'")
    path = Path(entry)
    if path.suffix != ".npy":
        raise InputError(f"output {os.fspath(entry)!r}: choose 'device', 'host', or a path that ends in .npy, not in {path.suffix!r}")
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
    """The outputs of one call on the host, from before it runs until it is known to have worked.

    Attributes:
        by_name: what takes each output, by value name.
        again: what takes a copy, by position, of an output that is an input of the model, or that an earlier output is, too.
    """

    by_name: dict[str, HostOutput] = field(default_factory=dict)
    again: dict[int, HostOutput] = field(default_factory=dict)

    @classmethod
    def open(cls, destination: OutputDestination, names: Sequence[str], region: Region, device: torch.device) -> HostOutputs:
        """Room for the outputs of one call.

        Args:
            destination: where they go.
            names: of their values, in order, the same value twice where the model returns it twice.
            region: what computes them.
            device: where it runs.

        Raises:
            InputError: a file cannot be made, or there is not so much host memory; nothing was changed.
            SourceError: there is no room for a file; nothing was changed.
        """
        found = cls()
        if not destination.on_host:
            return found
        if device.type == "meta" and any(destination.paths):
            raise InputError(
                "output names a file, but a model on the meta device computes no values to write; give output='host' for a dry run"
            )
        try:
            for position, name in enumerate(names):
                path = destination.path_of(position)
                is_new = name in region.host_outputs and name not in found.by_name
                is_here = name in found.by_name or (name not in region.host_outputs and device.type == "cpu")
                if path is None and is_here:
                    continue
                shape, dtype = region.shapes[name], region.dtypes[name]
                if path is not None:
                    host = HostOutput.in_file(NpyFile(path, shape, dtype))
                else:
                    host = allocate_host_output(shape, dtype, channels_last=name not in region.contiguous, is_dry=device.type == "meta")
                if is_new:
                    found.by_name[name] = host
                else:
                    found.again[position] = host
        except BaseException:
            found.discard()
            raise
        return found

    def arranged(self, names: Sequence[str], outputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The outputs in order, given those of the region by value name."""
        return [
            copy_to_host(self.again[position], outputs[name]) if position in self.again else outputs[name]
            for position, name in enumerate(names)
        ]

    def publish(self) -> None:
        """Put all files where the caller wants them, in order.

        Raises:
            SourceError: a file cannot be put there; those before it are.
        """
        for host in (*self.by_name.values(), *self.again.values()):
            host.publish()

    def discard(self) -> None:
        """Remove the files that are not published."""
        for host in (*self.by_name.values(), *self.again.values()):
            host.discard()
