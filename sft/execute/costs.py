"""How long programs take, remembered: in memory while a plan is timed, and in a file for the next time.

A file holds the times of one environment: device, versions, threads, and the switches of torch that change which kernels run. It is a list
of lines, ``key seconds checksum``, and is only ever added to, a line at a time and each with a line break on either side. So processes may
write at the same time; a line that was torn by a crash or spoilt on the disk is not read, and costs a measurement. Nothing here fails:
where there is no place for a file, every time is measured.

The folder is that of the environment variable ``SFT_CACHE_DIR`` (empty: no files), else ``sft`` in ``$XDG_CACHE_HOME`` or ``~/.cache``,
where torch has its own. A time is never measured again; delete the folder if the machine was busy when it was.
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
from pathlib import Path

import torch

__all__ = ["CACHE_VARIABLE", "TimingCache", "cache_folder", "timing_environment", "open_timing_cache", "table_folders"]

CACHE_VARIABLE = "SFT_CACHE_DIR"
_FORMAT = 2
_LOG = logging.getLogger("sft")
_LINE = re.compile(r"([0-9a-f]{32}) (\d+(?:\.\d+)?(?:e[+-]?\d+)?) ([0-9a-f]{8})")


class TimingCache:
    """Seconds by key.

    Args:
        path: the file that they are read from and added to; ``None`` keeps them in memory.
        environment: what the file's first line says, for people.
    """

    def __init__(self, path: Path | None = None, environment: str = "") -> None:
        self._path, self._environment = path, environment
        self._known: dict[str, float] = {} if path is None else _read_timings(path)

    def get(self, key: str) -> float | None:
        """Seconds, where they are known."""
        return self._known.get(_digest(key))

    def add(self, key: str, seconds: float, *, lasting: bool = True) -> None:
        """Remember a time; one that is not ``lasting`` only as long as this object lives."""
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
    """The times that are known of a device in this environment."""
    folder = cache_folder()
    if folder is None:
        return TimingCache()
    environment = json.dumps(timing_environment(device))
    return TimingCache(folder / "costs" / f"{_digest(environment)}.txt", environment)


def cache_folder() -> Path | None:
    """Where files that may be deleted are kept; ``None`` for nowhere."""
    own = os.environ.get(CACHE_VARIABLE)
    if own is not None:
        return Path(own) if own else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sft"
    except RuntimeError:  # there is no home
        return None


def table_folders() -> tuple[Path, ...]:
    """Where tables of measured kernels are looked for, and kept (``python -m sft tune``)."""
    folder = cache_folder()
    return () if folder is None else (folder / "kernels",)


def timing_environment(device: torch.device) -> dict[str, str | int | bool]:
    """What a time depends on besides the program."""
    return {
        "format": _FORMAT,
        "device": _device_name(device),
        "torch": torch.__version__,
        "sft": _sft_version(),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.backends.cuda.matmul.fp32_precision,
        "convolution_precision": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]  # it makes itself an object
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
    }


def _sft_version() -> str:
    """Programs may change with it."""
    try:
        return importlib.metadata.version("sft-engine")
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
    """The lines that are whole; of several about one thing the first, so that a time does not change under a plan."""
    try:
        text = path.read_bytes().decode(errors="replace")
    except OSError:
        return {}
    found: dict[str, float] = {}
    for match in map(_LINE.fullmatch, text.splitlines()):
        if match is None or _checksum(f"{match[1]} {match[2]}") != match[3]:
            continue
        seconds = float(match[2])
        if math.isfinite(seconds):
            found.setdefault(match[1], seconds)
    return found
