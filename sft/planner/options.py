"""What a user may ask of the planner."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real

from sft.common.byte_units import is_integer, parse_bytes
from sft.common.errors import InputError
from sft.weights.disk_store import WeightsFile

__all__ = ["BACKENDS", "OFFLOAD_STRATEGIES", "STRATEGIES", "WEIGHT_MODES", "Options"]

#: The strategies by name.
STRATEGIES = ("auto", "none", "sft", "sqrt", "revolve", "bisect", "optimal", "acg", "offload-greedy", "offload-dp", "vdnn")

#: Those that copy to the host and back.
OFFLOAD_STRATEGIES = ("offload-greedy", "offload-dp", "vdnn")
#: Those that walk in strips, or in tiles; the others run whole stages.
_STREAMING_STRATEGIES = ("auto", "sft")

#: Thirty years, in seconds: the longest that anybody waits.
_MAX_SECONDS = 10**9

#: What may run the operators.
BACKENDS = ("auto", "aten", "triton")

#: Where weights may be; or in a file.
WEIGHT_MODES = ("resident", "stream", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Wishes about the plan; ``None`` and ``"auto"`` leave the choice to the planner.

    Attributes:
        strategy: ``"auto"``; ``"none"`` to run everything whole, as plain PyTorch does; ``"sft"`` for the plan of the SFT paper
            (independent tiles between values that fit); or a published way to run whole stages again instead of keeping what they made:
            ``"sqrt"``, ``"revolve"``, ``"bisect"``, ``"optimal"``, ``"acg"``; or to copy it to the host and back:
            ``"offload-greedy"``, ``"offload-dp"``, ``"vdnn"`` (``sft.solvers.registry``).
        halo: how neighbouring strips get the rows between them: ``"carry"`` from strip to strip (``"auto"`` means the same), or
            ``"recompute"``: independent tiles that each compute their halo.
        backend: what runs the operators: ``"aten"`` for PyTorch's own; ``"triton"`` for our kernels wherever one computes the same
            (on the CPU only under Triton's interpreter, ``TRITON_INTERPRET=1``); ``"auto"`` for the kernels that were measured to be
            faster on this GPU (``python -m sft tune``), and PyTorch's own operators everywhere else.
        tile: strip height and panel width in pixels of the input, ``(rows, cols)``; forces streaming also where all would fit.
            A ``cols`` of ``None`` is the full width.
        state_every: keep the walk's state every so many strips.
        state_slots: hold so many states of a walk at most, and restore the others (Revolve).
        batch_tile: batch elements that walk together.
        host_budget: most bytes of the host for what leaves the device during a step, a number or as ``"64GiB"``; 0 forbids that. By default
            there is no limit; but on the CPU, whose memory is the host's, nothing leaves unless this, ``host_folder`` or the strategy
            says so.
        link_bandwidth: bytes a second between device and host, each way, a number or as ``"24GB"``: what copies are planned by. The
            default is the nearest power of ten, 1e10.
        host_folder: a folder for what leaves the device during a step, in place of the host's memory: in files without a name, which are
            gone when the process is.
        profile: ``"measure"`` to time the step that is planned, on the device, by running each distinct program of it for a moment
            (``Plan.projected_seconds``), and likewise some other plans that fit (strips of other heights, published schedules, the tiles
            of strategy ``"sft"``): the fastest is taken. ``"auto"`` leaves that out: plans are compared by FLOPs. Times are kept in
            files, so that programs that were timed before are not run again (``sft.torch_runtime.profiling``).
        mesh_timeout_seconds: how long a rank of a mesh waits for another before it gives up the step, thirty years at most.
        cuda_graphs: on a CUDA device, record strips that repeat and replay them, as far as the budget has room for that when everything
            else is planned; ``Plan.projected_peak_bytes`` counts it. Of use where strips are so small that starting their kernels takes
            longer than running them.
        skip_repeats: leave out strips that would make, bit for bit, what the strip beside them made, as on background of one colour that is
            higher than the receptive field. What they would have added to sums is multiplied instead. Rows of inputs, cuts and gradients
            are compared for that (a slide that is masked says so itself), and `last_skipping` of the compiled module says what was left
            out. Positional dropout, the place of a maximum, and whatever else varies with the place within the image are never left out.
            Not on a mesh, and not in plans that copy values to the host and back: there all strips run.
        weights: where parameters are: ``"resident"``, on the device; ``"stream"``, in the host's memory, from where a step brings those of
            a segment while it runs, and of the next one; a `sft.WeightsFile` for the same from a file; or ``"auto"``: resident where a
            plan fits so, else streamed. Gradients then leave one by one, to the host or to a `sft.StreamedOptimizer`. Parameters with two
            names stay resident. Not on a mesh, not with ``fully_shard``, and not with ``cuda_graphs``.
        progress: whether planning shows a bar on the terminal where it takes long: while programs are timed.
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
    cuda_graphs: bool = False
    skip_repeats: bool = False
    weights: str | WeightsFile = "resident"
    progress: bool = False
    mesh_timeout_seconds: float = 1800.0

    @property
    def mesh_timeout(self) -> timedelta:
        """How long a rank of a mesh waits for another."""
        return timedelta(seconds=self.mesh_timeout_seconds)

    def __post_init__(self) -> None:
        problems = []
        if self.strategy not in STRATEGIES:
            problems.append(f"strategy {self.strategy!r}: choose one of {', '.join(STRATEGIES)}")
        if self.halo not in ("auto", "carry", "recompute"):
            problems.append(f"halo {self.halo!r}: choose 'auto', 'carry' or 'recompute'")
        if self.strategy == "sft" and self.halo == "carry":
            problems.append("strategy 'sft' computes halos again, halo 'carry' forbids it: drop one")
        if self.backend not in BACKENDS:
            problems.append(f"backend {self.backend!r}: choose one of {', '.join(BACKENDS)}")
        if self.profile not in ("auto", "measure"):
            problems.append(f"profile {self.profile!r}: choose 'auto' or 'measure'")
        if not isinstance(self.weights, WeightsFile) and self.weights not in WEIGHT_MODES:
            problems.append(f"weights {self.weights!r}: choose one of {', '.join(WEIGHT_MODES)}, or give a sft.WeightsFile")
        elif self.cuda_graphs and self.weights != "resident":
            problems.append("cuda_graphs replays strips on weights that stay where they are, streamed ones do not: drop one")
        if self.tile is not None:
            if not _is_pair(self.tile):  # from untyped callers
                problems.append(f"tile {self.tile!r}: give (rows, cols)")
            else:
                problems += [
                    f"tile {self.tile!r}: {name} must be a positive integer"
                    for name, value in zip(("rows", "cols"), self.tile, strict=True)
                    if not (_is_count(value) or (name == "cols" and value is None))
                ]
        for name in ("state_every", "state_slots", "batch_tile"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                problems.append(f"{name} {value!r}: give a positive integer")
        problems += [
            f"{name} is about strips, strategy {self.strategy!r} makes none: drop one"
            for name in ("tile", "halo", "state_every", "state_slots", "batch_tile")
            if self.strategy in STRATEGIES and self.strategy not in _STREAMING_STRATEGIES and getattr(self, name) not in (None, "auto")
        ]
        if self.state_every is not None and self.state_slots is not None:
            problems.append("state_every and state_slots are two policies for the same states: drop one")
        for name, read in (("host_budget", lambda: self.host_budget_bytes), ("link_bandwidth", lambda: self.link_bytes_per_second)):
            try:
                read()
            except InputError as error:
                problems.append(f"{name}: {error}")
        if self.host_folder is not None and not os.path.isdir(self.host_folder):
            problems.append(f"host_folder {self.host_folder!r}: give a folder that exists")
        if self.strategy in OFFLOAD_STRATEGIES and _is_zero(self.host_budget):
            problems.append(f"strategy {self.strategy!r} copies to the host, host_budget 0 forbids it: drop one")
        if not _is_number(self.mesh_timeout_seconds) or not 0 < self.mesh_timeout_seconds <= _MAX_SECONDS:
            problems.append(f"mesh_timeout_seconds {self.mesh_timeout_seconds!r}: give a positive number, {_MAX_SECONDS} at most")
        for name in ("cuda_graphs", "skip_repeats", "progress"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} {getattr(self, name)!r}: give True or False")
        if problems:
            raise InputError("; ".join(problems))

    @property
    def streams_weights(self) -> bool:
        """Whether weights are to be streamed whatever the budget."""
        return self.weights not in ("resident", "auto")

    @property
    def weights_file(self) -> WeightsFile | None:
        """The file that weights are to be streamed from, if there is one."""
        return self.weights if isinstance(self.weights, WeightsFile) else None

    @property
    def host_budget_bytes(self) -> int | None:
        """The budget on the host in bytes; ``None`` is no limit, 0 forbids that anything leaves."""
        if self.host_budget is None:
            return None
        return 0 if _is_zero(self.host_budget) else parse_bytes(self.host_budget)

    @property
    def link_bytes_per_second(self) -> float | None:
        """The bandwidth as a number; ``None`` where it is not said."""
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
