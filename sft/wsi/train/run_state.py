"""State of a run: progress, and identity of the run that a checkpoint belongs to."""

from __future__ import annotations

import importlib.metadata
import platform
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sft.common.installation import DISTRIBUTION
from sft.distributed.mesh import MeshShape
from sft.wsi.config import GROUPS, Config
from sft.wsi.data.table import SlideTable, file_bytes
from sft.wsi.errors import RunFolderError

__all__ = [
    "CHANGEABLE_SETTINGS",
    "RunProgress",
    "changed_settings",
    "check_same_run",
    "complete_settings",
    "config_fingerprint",
    "run_environment",
]

#: Settings that a run may change when it is resumed: none of them changes a number.
_NEUTRAL = {"data": {"csv", "slides", "host_budget"}, "train": {"checkpoint_every"}}

#: Settings that errors of a run advise to change: a resumed run may have others, and its later steps are those of the new ones.
CHANGEABLE_SETTINGS = frozenset({"model.budget", "model.tile", "train.on_error", "train.patience"})

#: Groups with settings that decide the numbers of a run.
_FINGERPRINT_GROUPS = ("data", "task", "model", "augment", "train")

#: Packages that decode slides, if installed.
_PACKAGES = (DISTRIBUTION, "numpy", "tifffile", "imagecodecs", "simplejpeg", "openslide-python", "openslide-bin")

_SINGLE_RANK = MeshShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run.

    Attributes:
        serial: number of checkpoints.
        step: optimizer steps done.
        epoch: passes done.
        position: slides of this epoch that are done.
        loss_sum, loss_weight: of this epoch's groups.
        best: the best value of the monitored metric, and its epoch; None before the first.
        epochs: rows of metrics.csv.
        failed: unreadable slides, with their problems.
        stopped: True if patience has run out.
    """

    serial: int = 0
    step: int = 0
    epoch: int = 0
    position: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0
    best: tuple[float, int] | None = None
    epochs: tuple[dict[str, Any], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    stopped: bool = False


def check_same_run(folder: Path, state: Mapping[str, Any], config: Config, table: SlideTable, shape: MeshShape = _SINGLE_RANK) -> None:
    """Refuse to resume another run; warn about differences that change the bits.

    Args:
        folder: of the run.
        state: of its checkpoint.
        config: current settings.
        table: current slides.
        shape: current ranks. Default: one

    Raises:
        RunFolderError: settings, slides, labels or splits differ.
    """
    before, now = complete_settings(state["settings"]), config_fingerprint(config)
    different = _in_words(changed_settings(before, now))
    refused = [text for name, text in different.items() if name not in CHANGEABLE_SETTINGS]
    if refused:
        listed = ", ".join(refused)
        raise RunFolderError(
            f"the run folder {folder} holds a run with other settings: {listed}. Restore them to resume, or give another folder with --run."
        )
    if state["table"] != table.digest():
        raise RunFolderError(
            f"the run folder {folder} holds a run on other slides, labels or splits. Restore the table to resume, or give "
            "another folder with --run."
        )
    now = run_environment(shape, config.train.device)
    before = {**run_environment(device=config.train.device), **state["surroundings"]}  # checkpoints of earlier versions say less
    different |= _in_words(changed_settings(before, now))
    sizes = _in_words(changed_settings(state.get("file_bytes", {}), file_bytes(table))) if "file_bytes" in state else {}
    if sizes:
        different["slides"] = f"{len(sizes)} slide file(s) of another size, bytes of {next(iter(sizes.values()))}"
    if different:
        listed = ", ".join(different.values())
        warnings.warn(
            f"the run was started under other conditions: {listed}. It continues, but not to the same bits", RuntimeWarning, stacklevel=2
        )


def complete_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a checkpoint, with defaults for those that its version did not have yet."""
    defaults: dict[str, Any] = {}
    for group in _FINGERPRINT_GROUPS:
        for item in fields(GROUPS[group]):
            if item.name in _NEUTRAL.get(group, ()):
                continue
            if item.default is not MISSING:
                defaults[f"{group}.{item.name}"] = item.default
            elif item.default_factory is not MISSING:
                defaults[f"{group}.{item.name}"] = item.default_factory()
    return {**defaults, **settings}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Changed settings, by name, with both values."""
    return {name: (before.get(name), now.get(name)) for name in {**before, **now} if before.get(name) != now.get(name)}


def _in_words(changed: Mapping[str, tuple[Any, Any]]) -> dict[str, str]:
    return {name: f"{name} (was {was!r}, is {now!r})" for name, (was, now) in changed.items()}


def config_fingerprint(config: Config) -> dict[str, Any]:
    """Settings that decide the numbers of a run, as ``group.name``."""
    settings = config.to_dict()
    settings = {
        f"{group}.{name}": value
        for group in _FINGERPRINT_GROUPS
        for name, value in settings[group].items()
        if name not in _NEUTRAL.get(group, ())
    }
    settings["train.device"] = torch.device(config.train.device).type
    return settings


def run_environment(shape: MeshShape = _SINGLE_RANK, device: str = "cpu") -> dict[str, Any]:
    """Environment that decides the bits of a run: decoders of pixels, and order of sums.

    Args:
        shape: its ranks. Default: one
        device: that it trains on. Default: the CPU
    """
    on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "num_replicas": shape.num_replicas,
        "num_bands": shape.num_bands,
        **{name: _version(name) for name in _PACKAGES},
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
