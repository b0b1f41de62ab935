"""Checkpoints from which a run resumes with the same bits.

A checkpoint is a folder: the weights (safetensors, usable on their own) and the rest of the state (a file that
``sft.common.untrusted.tensor_files`` reads without running code from it). It is written under another name, flushed to the disk and
renamed; only then are older ones removed. If a process dies at any moment, the newest folder with a final name is complete. The state
holds a hash of the weights, so a damaged file is detected and the previous checkpoint is used.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sft.common.atomic_files import PARTIAL_MARK, fsync_folder
from sft.common.errors import SftError
from sft.common.untrusted.tensor_files import load_tensor_file
from sft.wsi.errors import RunFolderError
from sft.wsi.run.files import clear_partial, sync_tree
from sft.wsi.train.optim import counter_seed

__all__ = ["Checkpoint", "CheckpointFolder", "WeightsId", "get_random_state", "restore_weights", "seed_everything", "set_random_state"]

_WEIGHTS, _STATE = "weights.safetensors", "state.pt"
_FORMAT = 1
#: Types of the entries of a state that other modules read.
_STATE_TYPES: dict[str, type] = {"weights_sha256": str, "settings": dict, "task": dict, "table": str, "feature_shapes": list}
#: A run that saves while its folder is read removes old checkpoints; the reader then looks again.
_MAX_READS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsId:
    """Identity of trained weights: the checkpoint that they were read from, and a hash of their file.

    Attributes:
        checkpoint: kind, "best" or "last".
        epoch: number of complete epochs of training.
        step: number of optimizer steps; None for a checkpoint of an earlier version.
        sha256: of the weights file, in hexadecimal digits.
    """

    checkpoint: str
    epoch: int
    step: int | None
    sha256: str

    @property
    def text(self) -> str:
        """Text of the epoch and the short hash.

        >>> WeightsId(checkpoint="best", epoch=3, step=12, sha256="0123456789abcdef").text
        'epoch 3, weights 0123456789ab'
        """
        return f"epoch {self.epoch}, weights {self.short_hash}"

    @property
    def short_hash(self) -> str:
        """Beginning of the hash, long enough to distinguish weights."""
        return self.sha256[:12]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"checkpoint": self.checkpoint, "epoch": self.epoch, "step": self.step, "sha256": self.sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Checkpoint read from a folder.

    Attributes:
        path: of the folder.
        weights: parameters and buffers by name.
        state: remaining state: numbers, texts, tensors, and lists and dictionaries of these.
    """

    path: Path
    weights: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def weights_id(self) -> WeightsId:
        """Identity of the weights."""
        return _weights_id(self.path, self.state)


class CheckpointFolder:
    """The checkpoints of a run: ``<kind>-<number>``, the highest number being the newest.

    Args:
        path: of the folder that holds them; made at the first save.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, kind: str, number: int, model: nn.Module, state: Mapping[str, Any], *, keep: int) -> Path:
        """Write a checkpoint, and remove all of its kind but the newest ``keep``.

        Raises:
            RunFolderError: it cannot be written; the ones before are as they were.
        """
        target = self.path / f"{kind}-{number:08d}"
        temporary = self.path / f"{PARTIAL_MARK}{os.getpid()}-{target.name}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            # Clones: safetensors refuses tensors that share memory.
            save_file(
                {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}, temporary / _WEIGHTS
            )
            digest = _sha256(temporary / _WEIGHTS)
            torch.save({**state, "format": _FORMAT, "weights_sha256": digest}, temporary / _STATE)
            sync_tree(temporary)
            if target.exists():  # the same step again, after a crash that followed its save: the same bits
                shutil.rmtree(target)
            os.rename(temporary, target)
            fsync_folder(self.path)
        except Exception as error:  # safetensors and torch.save have errors of their own for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            before = "The checkpoint before is complete" if self._numbers(kind) else "It is the first one"
            raise RunFolderError(
                f"cannot write checkpoint {target}, as on a full disk: {error}. {before}: make room and start the same command again."
            ) from error
        for old in self._numbers(kind)[:-keep]:
            shutil.rmtree(self.path / f"{kind}-{old:08d}", ignore_errors=True)
        return target

    def load(self, kind: str) -> Checkpoint | None:
        """Newest undamaged checkpoint of a kind; None without any.

        Raises:
            RunFolderError: all checkpoints are damaged.
        """
        for _ in range(_MAX_READS):
            numbers = self._numbers(kind)
            damage: list[str] = []
            for number in reversed(numbers):
                path = self.path / f"{kind}-{number:08d}"
                try:
                    checkpoint = _read(path)
                except Exception as error:  # a damaged file raises almost anything
                    damage.append(f"checkpoint {path} is damaged ({_reason(error)}); the one before is used, if there is one")
                    continue
                for message in damage:
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
                return checkpoint
            if self._numbers(kind) == numbers:
                break
        for message in damage:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        if numbers:
            raise RunFolderError(
                f"all {len(numbers)} checkpoints of kind {kind!r} in {self.path} are damaged. Copy them again, or start again in another "
                "folder."
            )
        return None

    def newest_state(self, kind: str) -> tuple[WeightsId, dict[str, Any]] | None:
        """State of the newest checkpoint of a kind, without its weights; None without a readable one."""
        for _ in range(_MAX_READS):
            numbers = self._numbers(kind)
            for number in reversed(numbers):
                path = self.path / f"{kind}-{number:08d}"
                with suppress(Exception):  # a damaged file raises almost anything; a load of its weights reports it
                    state = _read_state(path)
                    return _weights_id(path, state), state
            if self._numbers(kind) == numbers:
                break
        return None

    def best_id(self) -> WeightsId | None:
        """Identity of the best weights, without reading them; None without a readable checkpoint."""
        newest = self.newest_state("best")
        return None if newest is None else newest[0]

    def clear_partial(self) -> None:
        """Remove partial files of a process that died."""
        clear_partial(self.path)

    def _numbers(self, kind: str) -> list[int]:
        try:
            entries = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise RunFolderError(
                f"cannot read {self.path}: {error.strerror or error}. Change its permissions, or copy it again."
            ) from error
        names = [entry.removeprefix(f"{kind}-") for entry in entries if entry.startswith(f"{kind}-")]
        return sorted(int(name) for name in names if name.isdigit())


def restore_weights(model: nn.Module, weights: Mapping[str, Tensor], run: Path) -> None:
    """Put a checkpoint's weights into the model that its run describes.

    Raises:
        RunFolderError: they are of another model; it was changed in the configuration, or in its code.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunFolderError(
            f"{run}: its weights are not those of the model that its config.yaml describes, which was changed since, or its code: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error


def _weights_id(path: Path, state: Mapping[str, Any]) -> WeightsId:
    progress = state.get("progress", state)
    return WeightsId(
        checkpoint=path.name.rpartition("-")[0], epoch=progress["epoch"], step=progress.get("step"), sha256=state["weights_sha256"]
    )


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = load_tensor_file(path / _STATE)
    if type(state) is not dict:
        raise ValueError(f"{_STATE} holds an object of type {type(state).__name__}, not a state by names")
    if state.get("format") != _FORMAT:
        raise ValueError(f"format {state.get('format')}, expected {_FORMAT}")
    progress = state.get("progress", state)
    is_whole = isinstance(progress, dict) and isinstance(progress.get("epoch"), int) and isinstance(progress.get("step"), int | None)
    wrong = [name for name, kind in _STATE_TYPES.items() if name in state and not isinstance(state[name], kind)]
    if not is_whole or wrong or "weights_sha256" not in state:
        raise ValueError(f"{_STATE} lacks {', '.join(wrong or ['the epoch, the step, or the hash of the weights'])}")
    return state


def _reason(error: Exception) -> str:
    """Reason of a failure to read a checkpoint, in words."""
    if isinstance(error, SftError):
        return str(error).rstrip(".")
    if isinstance(error, OSError) and error.strerror:
        return f"{Path(error.filename).name}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _read(path: Path) -> Checkpoint:
    state = _read_state(path)
    if _sha256(path / _WEIGHTS) != state["weights_sha256"]:
        raise ValueError(f"{_WEIGHTS} is not what was written")
    return Checkpoint(path=path, weights=load_file(path / _WEIGHTS), state=state)


def seed_everything(seed: int) -> None:
    """Seed every global generator at the start of a run: only a network may draw from them."""
    torch.manual_seed(counter_seed(seed, "torch"))
    np.random.seed(counter_seed(seed, "numpy") % 2**32)
    random.seed(counter_seed(seed, "python"))


def get_random_state() -> dict[str, Any]:
    """The state of every global generator, of plain numbers and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(numbers), next_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put every global generator where it was."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
