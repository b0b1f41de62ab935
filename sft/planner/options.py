"""Planner options: the user's constraints on the plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import TYPE_CHECKING, Any

from sft.common.atomic_files import is_text_path
from sft.common.byte_units import is_integer, parse_bytes
from sft.common.errors import InputError
from sft.common.legacy_names import restore_fields

if TYPE_CHECKING:
    from sft.weights.disk_store import WeightsFile

__all__ = ["BACKENDS", "OFFLOAD_STRATEGIES", "STRATEGIES", "WEIGHT_MODES", "Options"]

#: Names of all strategies.
STRATEGIES = ("auto", "none", "sft", "sqrt", "revolve", "bisect", "optimal", "acg", "offload-greedy", "offload-dp", "vdnn")

#: Strategies that copy values to the host and back.
OFFLOAD_STRATEGIES = ("offload-greedy", "offload-dp", "vdnn")
#: Strategies that run in strips or in tiles; the remaining ones run untiled stages.
_STREAMING_STRATEGIES = ("auto", "sft")

#: Longest accepted timeout in seconds (thirty years).
_MAX_SECONDS = 10**9

#: Choices of `Options.backend`.
BACKENDS = ("auto", "aten", "triton")

#: Named choices of `Options.weights`; a `sft.WeightsFile` is accepted as well.
WEIGHT_MODES = ("resident", "stream", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Constraints on the plan; ``None`` and ``"auto"`` leave the choice to the planner.

    Attributes:
        strategy: ``"auto"``; ``"none"`` to run untiled, as plain PyTorch does; ``"sft"`` for the plan of the SFT paper
            (independent tiles between values that fit); a published recomputation schedule over untiled stages: ``"sqrt"``, ``"revolve"``,
            ``"bisect"``, ``"optimal"``, ``"acg"``; or a published offload schedule: ``"offload-greedy"``, ``"offload-dp"``, ``"vdnn"``
            (``sft.solvers.registry``).
        halo: source of the rows between neighbouring strips: ``"carry"`` from strip to strip (``"auto"`` means the same), or
            ``"recompute"``: independent tiles that each compute their halo.
        backend: implementation of the operators: ``"aten"`` for PyTorch's own; ``"triton"`` for our kernels wherever one computes the same
            (on the CPU only under Triton's interpreter, ``TRITON_INTERPRET=1``); ``"auto"`` for the kernels that were measured to be
            faster on this GPU (``python -m sft tune``; an H200 has measurements that come with the library), and PyTorch's own operators
            otherwise. On a GPU, a convolution that a ReLU follows is one call of cuDNN with every backend (``docs/exactness.md``).
        tile: strip height and panel width in pixels of the input, ``(rows, cols)``; forces tiling even if the untiled model would fit.
            A ``cols`` of ``None`` is the full width.
        state_every: keep the state of the sweep every so many strips.
        state_slots: keep at most so many states of a sweep, and restore the remaining ones (Revolve).
        batch_tile: batch elements per sweep.
        host_budget: most bytes of host memory for values that leave the device during a step, a number or as ``"64GiB"``; 0 forbids
            offloading. The default is what the host has free when the model is compiled, less a margin (without a limit for a model on the
            meta device that is planned for a GPU elsewhere); but on the CPU, where device and host share memory, values leave only if
            this, ``host_folder`` or the strategy allows it. A plan that takes more than the host has free is refused.
        link_bandwidth: bytes per second between device and host in each direction, a number or as ``"24GB"``; copies are planned with it.
            The default is the nearest power of ten, 1e10.
        host_folder: a folder for values that leave the device during a step, in place of host memory: in unnamed files, which the system
            deletes when the process ends.
        profile: ``"measure"`` to time the planned step on the device, by running each distinct program of it for a moment
            (``Plan.projected_seconds``), and likewise some alternative plans that fit (strips of other heights, published schedules, the
            tiles of strategy ``"sft"``): the fastest is taken. ``"auto"`` skips timing: plans are compared by FLOPs. Times are cached in
            files, so that a program is timed once (``sft.torch_runtime.profiling``).
        mesh_timeout_seconds: seconds that a rank of a mesh waits for another before it aborts the step, thirty years at most.
        cuda_graphs: on a CUDA device, record the forward and the backward pass as CUDA graphs and replay them, so that the device does not
            wait for the host where strips are small. Copies of inputs, outputs and gradients belong to the projected peak. ``"auto"``: if
            both passes can be recorded (no sources, outputs, cuts or weights on the host, no files), and if the plan with the copies
            takes less time by estimate. True: if both passes can be recorded and the copies fit; otherwise the strips that repeat are
            recorded, as far as the budget has room. A second call before the backward pass of the first ends the recording.
        skip_repeats: skip constant strips: strips with the same results, bit for bit, as the strip before, as on background of one
            colour that is higher than the receptive field. Their contributions to sums are multiplied instead. Rows of inputs, segment
            boundary tensors and gradients are compared for that (a masked slide reports its background itself), and `last_skipping` of
            the compiled module reports the skipped strips. Positional dropout, the index of a maximum, and all operators that
            depend on the position within the image are never skipped. Not on a mesh, and not in plans that copy values to the host and
            back: these run all strips.
        weights: location of the parameters: ``"resident"``, on the device; ``"stream"``, in host memory, loaded for the segment that runs
            and for the next one; a `sft.WeightsFile` for the same from a file; or ``"auto"``: resident if such a plan fits, otherwise
            streamed. Gradients then leave one by one, to the host or to a `sft.StreamedOptimizer`. Parameters with two names stay resident.
            Not on a mesh, not with ``fully_shard``, and not with ``cuda_graphs``.
        progress: show a progress bar on the terminal while programs are timed.
        cudnn_benchmark: leave ``torch.backends.cudnn.benchmark`` as it is while strips run. By default it is off then: strips have many
            shapes, a search for each takes seconds, and its choice may need a workspace of gibibytes.
    """

    strategy: str = "auto"
    halo: str = "auto"
    backend: str = "auto"
    tile: tuple[int, int | None] | None = None
    state_every: int | None = None
    state_slots: int | None = None
    batch_tile: int | None = None
    host_budget: float | str | None = None
    link_bandwidth: float | str | None = None
    host_folder: str | None = None
    profile: str = "auto"
    cuda_graphs: bool | str = "auto"
    skip_repeats: bool = False
    weights: str | WeightsFile = "resident"
    progress: bool = False
    mesh_timeout_seconds: float = 1800.0
    cudnn_benchmark: bool = False

    @property
    def mesh_timeout(self) -> timedelta:
        """Timeout of a rank that waits for another."""
        return timedelta(seconds=self.mesh_timeout_seconds)

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    def __post_init__(self) -> None:
        errors: list[str] = []
        if self.strategy not in STRATEGIES:
            errors.append(f"strategy {self.strategy!r}: choose one of {', '.join(STRATEGIES)}")
        if self.halo not in ("auto", "carry", "recompute"):
            errors.append(f"halo {self.halo!r}: choose 'auto', 'carry' or 'recompute'")
        if self.strategy == "sft" and self.halo == "carry":
            errors.append("strategy 'sft' computes halos again, halo 'carry' forbids it: drop one")
        if self.backend not in BACKENDS:
            errors.append(f"backend {self.backend!r}: choose one of {', '.join(BACKENDS)}")
        if self.profile not in ("auto", "measure"):
            errors.append(f"profile {self.profile!r}: choose 'auto' or 'measure'")
        if self.weights_file is None and self.weights not in WEIGHT_MODES:
            errors.append(f"weights {self.weights!r}: choose one of {', '.join(WEIGHT_MODES)}, or give a sft.WeightsFile")
        elif self.cuda_graphs is True and self.weights != "resident":
            errors.append("cuda_graphs replays strips on weights that stay where they are, streamed ones do not: drop one")
        if self.tile is not None:
            if not _is_pair(self.tile):  # from untyped callers
                errors.append(f"tile {self.tile!r}: give (rows, cols)")
            else:
                errors += [
                    f"tile {self.tile!r}: {name} must be a positive integer"
                    for name, value in zip(("rows", "cols"), self.tile, strict=True)
                    if not (_is_count(value) or (name == "cols" and value is None))
                ]
        for name in ("state_every", "state_slots", "batch_tile"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                errors.append(f"{name} {value!r}: give a positive integer")
        errors += [
            f"{name} is about strips, strategy {self.strategy!r} makes none: drop one"
            for name in ("tile", "halo", "state_every", "state_slots", "batch_tile")
            if self.strategy in STRATEGIES and self.strategy not in _STREAMING_STRATEGIES and getattr(self, name) not in (None, "auto")
        ]
        if self.state_every is not None and self.state_slots is not None:
            errors.append("state_every and state_slots are two policies for the same states: drop one")
        for name, read in (("host_budget", lambda: self.host_budget_bytes), ("link_bandwidth", lambda: self.link_bytes_per_second)):
            try:
                read()
            except InputError as error:
                errors.append(f"{name}: {error}")
        if self.host_folder is not None and not (is_text_path(self.host_folder) and os.path.isdir(self.host_folder)):
            errors.append(f"host_folder {self.host_folder!r}: give a folder that exists")
        if self.uses_host and _is_zero(self.host_budget):
            errors.append(f"strategy {self.strategy!r} copies to the host, host_budget 0 forbids it: drop one")
        if not _is_number(self.mesh_timeout_seconds) or not 0 < self.mesh_timeout_seconds <= _MAX_SECONDS:
            errors.append(f"mesh_timeout_seconds {self.mesh_timeout_seconds!r}: give a positive number, {_MAX_SECONDS} at most")
        if not isinstance(self.cuda_graphs, bool) and self.cuda_graphs != "auto":
            errors.append(f"cuda_graphs {self.cuda_graphs!r}: give True, False or 'auto'")
        for name in ("skip_repeats", "progress", "cudnn_benchmark"):
            if not isinstance(getattr(self, name), bool):
                errors.append(f"{name} {getattr(self, name)!r}: give True or False")
        if errors:
            raise InputError("; ".join(errors))

    @property
    def is_automatic(self) -> bool:
        """True if the strategy compares all kinds of plans."""
        return self.strategy == "auto"

    @property
    def uses_host(self) -> bool:
        """True if the strategy copies values to the host."""
        return self.strategy in OFFLOAD_STRATEGIES

    @property
    def streams_weights(self) -> bool:
        """True if weights are streamed for every budget."""
        return self.weights not in ("resident", "auto")

    @property
    def weights_file(self) -> WeightsFile | None:
        """The file that weights are streamed from, or ``None``."""
        if isinstance(self.weights, str):
            return None
        from sft.weights.disk_store import WeightsFile  # imports torch

        return self.weights if isinstance(self.weights, WeightsFile) else None

    @property
    def host_budget_bytes(self) -> int | None:
        """Host budget in bytes; ``None`` is no limit, 0 forbids offloading."""
        if self.host_budget is None:
            return None
        return 0 if _is_zero(self.host_budget) else parse_bytes(self.host_budget)

    @property
    def link_bytes_per_second(self) -> float | None:
        """Bandwidth in bytes per second; ``None`` if unset."""
        rate = self.link_bandwidth
        if rate is None or isinstance(rate, str):
            return None if rate is None else float(parse_bytes(rate))
        if not _is_number(rate) or not 0 < rate < float("inf"):
            raise InputError(f"a bandwidth is a positive number of bytes a second or text such as '24GB', got {rate!r}")
        return float(rate)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_zero(value: object) -> bool:
    return is_integer(value) and value == 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
