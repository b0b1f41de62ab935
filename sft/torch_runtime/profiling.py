"""Profiling of single programs: run one alone, hash it, and remember its time.

*Running.* :class:`ProgramBenchmark` runs a program on synthetic inputs, to time it or to measure its memory before any step. Where the
model's weights are given they are bound instead of copies, so that a trial takes no more device memory than the program takes in a step. A
backward program (of an untiled segment) runs on the residuals of its forward program.

*Hashing.* :func:`program_hash` is a digest of a program's instructions that is equal in every process. Programs with equal hashes call the
same functions on tensors of the same shapes and types. Names of values and parameters are excluded, so equal blocks of a network share a
hash. A program that calls a function known only by its address has none.

*Remembering.* :class:`TimingCache` keeps times in memory and in a file. A file belongs to one environment: device, versions, threads, and
the switches of torch that select kernels. It is a list of lines, ``key seconds checksum``, and is only appended to, one line at a time
with a line break on either side. So processes may write at the same time; a line that was torn by a crash or damaged on the disk is
ignored and costs a measurement. No failure of a file is an error: without a file, every time is measured. The folder is that of the
environment variable
``SFT_CACHE_DIR`` (empty: no files); by default ``sft`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, as torch's. A time is never measured again;
delete the folder if the machine was busy when it was.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from sft.common.installation import DISTRIBUTION
from sft.common.interval import Interval
from sft.common.torch_internals import OpOverload
from sft.lower.program import DEVICE, Port, Program, Slot, carried_dim
from sft.runtime.machine import Residuals
from sft.torch_runtime.machine import TorchMachine

__all__ = [
    "CACHE_VARIABLE",
    "ProgramBenchmark",
    "SimulatedResiduals",
    "TimingCache",
    "cache_folder",
    "kernel_settings",
    "open_timing_cache",
    "producer_program",
    "program_hash",
    "run_on_autograd_thread",
    "synchronize_device",
    "table_folders",
    "timing_environment",
    "timing_key",
]

CACHE_VARIABLE = "SFT_CACHE_DIR"
_FORMAT = 2
_LOG = logging.getLogger("sft")
_LINE = re.compile(r"([0-9a-f]{32}) (\d+(?:\.\d+)?(?:e[+-]?\d+)?) ([0-9a-f]{8})")


@dataclass(slots=True)
class ProgramBenchmark:
    """One program with its inputs.

    Attributes:
        program: the program.
        first: its forward program, if it is a backward program.
        device: device of the inputs.
        weights: the model's weights, by value name.
    """

    program: Program
    first: Program | None
    device: torch.device
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _bindings: dict[Port, Any] = field(init=False)
    _saved: dict[int, Any] = field(init=False)

    def __post_init__(self) -> None:
        with torch.no_grad():
            self._saved = {} if self.first is None else self._machine.run(self.first, self._bindings_of(self.first))[1].values
            self._bindings = self._bindings_of(self.program)

    @property
    def _machine(self) -> TorchMachine:
        return TorchMachine(self.device)

    def run(self, *, is_last: bool = False, machine: TorchMachine | None = None) -> None:
        """Run the program and wait for the device; the last run frees the residuals while it reads them, as a step does."""
        residuals = None if not self._saved else Residuals(self._saved) if is_last else Residuals(self._saved).fork()
        with torch.no_grad():
            (machine or self._machine).run(self.program, self._bindings, residuals)
        synchronize_device(self.device)

    def _bindings_of(self, program: Program) -> dict[Port, Any]:
        return {port: self._input_for(program, port, slot) for port, slot in program.ports.items()}

    def _input_for(self, program: Program, port: Port, slot: Slot) -> Any:
        """Value to bind to a port: a weight of the model, or random numbers in 0..1 (integers: zeros)."""
        if port.role == "origin":
            return (0, 0, 0)
        weight = self.weights.get(port.name) if port.role == "side" else None
        if weight is not None and weight.shape == slot.shape and weight.dtype == slot.dtype and weight.device == self.device:
            return weight.detach()
        # Weights and their gradients have the model's layout, images have ours.
        tensor = self._machine.allocate(slot.shape, slot.dtype, zero=True, contiguous=port.role in ("side", "grad_side"))
        if slot.dtype.is_floating_point:
            tensor.uniform_(generator=torch.Generator(self.device).manual_seed(0))  # the caller's random state is unchanged
        dim = carried_dim(program, slot) if port.role == "carry" else None
        return tensor if dim is None else [(0, Interval(0, slot.shape[dim]), tensor)]


@dataclass(slots=True)
class SimulatedResiduals(Residuals):
    """Residuals on a simulated machine: a number of bytes, and the program that saved them, which trials of the backward program run first.

    Attributes:
        first: the forward program.
    """

    first: Program | None = None


def producer_program(saved: Residuals | None) -> Program | None:
    """The forward program that saved these residuals."""
    return saved.first if isinstance(saved, SimulatedResiduals) else None


def synchronize_device(device: torch.device) -> None:
    """Wait for all work queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _WorkInBackward(torch.autograd.Function):
    """Function that calls some work in its backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return grad, None


def run_on_autograd_thread(device: torch.device, work: Callable[[], None]) -> None:
    """Run some work on the thread of a device's backward passes, so that libraries initialise their per-thread state before a step."""
    with torch.enable_grad():
        _WorkInBackward.apply(torch.zeros((), device=device, requires_grad=True), work).backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated


class _UnnamedFunctionError(Exception):
    """A function without a name that is equal in other processes."""


def program_hash(program: Program) -> str | None:
    """Hash of a program, equal in every process; ``None`` for a program with an unnamed function."""
    digest = hashlib.sha256()
    # Slots are numbered in order of appearance: their own numbers depend on the programs lowered before.
    numbers: dict[int, int] = {}
    try:
        for port, slot in program.ports.items():
            digest.update(f"{port.role} {_canonical_text(slot, numbers)}\n".encode())
        for instruction in program.instructions:
            values = (instruction.arguments, tuple(sorted(instruction.keywords.items())), instruction.outputs)
            texts = " ".join((_function_name(instruction.function), *(_canonical_text(value, numbers) for value in values)))
            frees = sorted(numbers.setdefault(number, len(numbers)) for number in instruction.frees)
            digest.update(f"{texts} {frees}\n".encode())
    except _UnnamedFunctionError:
        return None
    return digest.hexdigest()[:32]


def _function_name(function: Callable[..., Any]) -> str:
    if isinstance(function, OpOverload):
        return str(function)
    value: Any = function
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass_text(value)
    owner = getattr(function, "__self__", None)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if name is None or "<" in name:  # a local function, or a lambda
        raise _UnnamedFunctionError
    bound = "" if owner is None or isinstance(owner, type(torch)) else _canonical_text(owner, {})
    return f"{module or ''}.{name}{bound}"


def _dataclass_text(value: Any) -> str:
    """Class and fields of a dataclass of numbers, strings and such dataclasses."""
    texts = []
    for each in fields(value):
        content = getattr(value, each.name)
        if is_dataclass(content) and not isinstance(content, type):
            texts.append(_dataclass_text(content))
        elif content is None or isinstance(content, (bool, int, float, str)):
            texts.append(repr(content))
        else:
            raise _UnnamedFunctionError
    return f"{type(value).__module__}.{type(value).__qualname__}({','.join(texts)})"


def _canonical_text(value: Any, numbers: dict[int, int]) -> str:
    if isinstance(value, Slot):
        number, root = (numbers.setdefault(each, len(numbers)) for each in (value.number, value.root))
        return f"%{number}/{root}:{value.shape}:{value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"({','.join(_canonical_text(item, numbers) for item in value)})"
    if value is DEVICE:
        return "device"
    text = repr(value)
    if " at 0x" in text:
        raise _UnnamedFunctionError
    return text


def timing_key(program: Program, first: Program | None) -> tuple[str, bool]:
    """Key of the measurements of a program, and True if the key is valid in other processes."""
    names = [program_hash(each) for each in (program, first) if each is not None]
    return (f"program {id(program)}", False) if None in names else (" ".join(map(str, names)), True)


class TimingCache:
    """Times in seconds by key.

    Args:
        path: file to read from and append to; ``None`` for memory alone.
        environment: comment in the file's first line.
    """

    def __init__(self, path: Path | None = None, environment: str = "") -> None:
        self._path, self._environment = path, environment
        self._known: dict[str, float] = {} if path is None else _read_timings(path)

    def get(self, key: str) -> float | None:
        """Seconds of a key; ``None`` if unknown."""
        return self._known.get(_digest(key))

    def add(self, key: str, seconds: float, *, lasting: bool = True) -> None:
        """Remember a time; without ``lasting`` only in memory."""
        digest = _digest(key)
        self._known[digest] = seconds
        if self._path is None or not lasting:
            return
        line = f"{digest} {seconds!r}"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            heading = "" if self._path.exists() else f"# {self._environment}\n"
            with self._path.open("ab", buffering=0) as file:  # one write, at the end of the file wherever that is then
                file.write(f"{heading}\n{line} {_checksum(line)}\n".encode())
        except OSError as error:
            _LOG.info("measured times are not kept in %s: %s", self._path, error)
            self._path = None


def open_timing_cache(device: torch.device) -> TimingCache:
    """Cache of the times of a device in this environment."""
    folder = cache_folder()
    if folder is None:
        return TimingCache()
    environment = json.dumps(timing_environment(device))
    return TimingCache(folder / "costs" / f"{_digest(environment)}.txt", environment)


def cache_folder() -> Path | None:
    """Folder of files that may be deleted at any time; ``None`` for no files."""
    configured = os.environ.get(CACHE_VARIABLE)
    if configured is not None:
        return Path(configured) if configured else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sft"
    except RuntimeError:  # no home folder
        return None


def table_folders() -> tuple[Path, ...]:
    """Folders of tables of measured kernels (``python -m sft tune``)."""
    folder = cache_folder()
    return () if folder is None else (folder / "kernels",)


def timing_environment(device: torch.device) -> dict[str, str | int | bool]:
    """Settings, in addition to the program, that a time depends on."""
    return {
        "format": _FORMAT,
        "device": _device_name(device),
        "torch": torch.__version__,
        "sft": _sft_version(),
        "threads": torch.get_num_threads(),
        **kernel_settings(),
    }


def kernel_settings() -> dict[str, str | bool]:
    """Settings of torch by which operators of cuDNN and cuBLAS choose their kernels."""
    return {
        "matmul_precision": torch.backends.cuda.matmul.fp32_precision,
        "convolution_precision": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]  # it makes itself an object
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
    }


def _sft_version() -> str:
    """Version of this package: programs may change with it."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return ""


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu {names[0] if names else platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _checksum(line: str) -> str:
    return f"{zlib.crc32(line.encode()):08x}"


def _read_timings(path: Path) -> dict[str, float]:
    """Times of all intact lines; of several with one key the first, so that a time never changes under a plan."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError:
        return {}
    timings: dict[str, float] = {}
    for match in map(_LINE.fullmatch, text.splitlines()):
        if match is None or _checksum(f"{match[1]} {match[2]}") != match[3]:
            continue
        seconds = float(match[2])
        if math.isfinite(seconds):
            timings.setdefault(match[1], seconds)
    return timings
