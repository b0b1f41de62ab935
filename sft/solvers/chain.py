"""The abstract network that solvers work on: a chain of stages.

Stage ``i`` (of ``1..n``) reads the activation ``x_{i-1}`` and makes ``x_i``; ``x_0`` is the network's input. After the last stage the
caller turns ``x_n`` into its gradient ``y_n`` (the loss). The backward of stage ``i`` reads ``y_i``, ``x_{i-1}`` and what the stage saved,
``s_i``, and makes ``y_{i-1}``. Some backwards also read the stage's output ``x_i`` (a ReLU's, a softmax's).

A stage is *light* if its backward needs nothing but the input: nothing saved, no output read (a convolution). Then its forward need not run
again before its backward. This covers the models of the literature: Butt's chains are light (thesis, Figure 3.1); Beaumont, Eyraud-Dubois
and Shilova (Euro-Par 2020, section 3.1) read the output; Beaumont, Herrmann et al. (RR-9302, 2019) save.

Several stages may also run as one: an *alternative*, such as a fused-tiled segment whose interior is never whole. It has times and bytes of
its own and replaces the stages that it spans, forward and backward.

The link between device and host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from sft.common.errors import InputError

__all__ = ["Alternative", "HostLink", "Stage", "StageChain", "stage_classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a chain.

    Attributes:
        forward_seconds: time of the forward.
        backward_seconds: time of the backward alone, without any recomputation.
        output_bytes: |x_i|.
        grad_bytes: |y_i|, the gradient of the output.
        saved_bytes: |s_i|: what the forward leaves for the backward besides ``x_{i-1}`` and ``x_i``.
        reads_output: whether the backward also reads ``x_i``.
        forward_workspace_bytes: what the forward holds only while it runs, besides input, output and saved bytes.
        backward_workspace_bytes: what the backward holds only while it runs, besides what it reads and ``y_{i-1}``.
        weight_bytes: the parameters; their gradients take as much again. Both are resident the whole time, or streamed: a forward then
            reads the parameters through a buffer of that size, a backward also writes the gradients through one.
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    grad_bytes: int
    saved_bytes: int = 0
    reads_output: bool = False
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    weight_bytes: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self)

    @property
    def is_light(self) -> bool:
        """Whether the backward needs the input alone."""
        return self.saved_bytes == 0 and not self.reads_output


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to run the stages ``first..last`` as one.

    Attributes:
        first: the first stage, from 1.
        last: the last stage.
        mode: its name, for example ``"tile(256)"``; unique among the alternatives of the same stages.
        forward_seconds: time of the forward.
        backward_seconds: time of the backward, its own recomputation and halos included.
        saved_bytes: what the forward leaves for the backward besides the input.
        reads_output: whether the backward also reads ``x_last``.
        forward_workspace_bytes: tile buffers, carried rows and the like while the forward runs.
        backward_workspace_bytes: the same for the backward.
        streamable: whether it reads its input and writes its output piece by piece, so that either may lie on the host and never be whole
            on the device. The workspaces must then hold the pieces.
    """

    first: int
    last: int
    mode: str
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int = 0
    reads_output: bool = False
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    streamable: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.mode:
            raise InputError("an alternative needs a name for its mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChain:
    """A network as solvers see it.

    Attributes:
        input_bytes: |x_0|, on the device from the start unless it is streamed.
        input_grad_bytes: |y_0|; 0 if nobody wants it.
        stages: the stages ``1..n``, in order.
        alternatives: other ways to run some of them.
        input_may_stream: whether ``x_0`` may be read from the host piece by piece instead (and ``y_0`` be written there).
        output_may_stream: whether ``x_n`` may be written to the host piece by piece (and ``y_n`` be read from there).
    """

    input_bytes: int
    stages: tuple[Stage, ...]
    input_grad_bytes: int = 0
    alternatives: tuple[Alternative, ...] = ()
    input_may_stream: bool = False
    output_may_stream: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.stages:
            raise InputError("a chain needs at least one stage")
        seen: set[tuple[int, int, str]] = set()
        for other in self.alternatives:
            key = (other.first, other.last, other.mode)
            if not 1 <= other.first <= other.last <= len(self.stages):
                raise InputError(f"alternative {other.mode!r} spans stages {other.first}..{other.last} of {len(self.stages)}")
            if key in seen:
                raise InputError(f"two alternatives are called {other.mode!r} for stages {other.first}..{other.last}; name them apart")
            seen.add(key)

    @property
    def num_stages(self) -> int:
        """n."""
        return len(self.stages)

    def stage(self, i: int) -> Stage:
        """Stage ``i``, from 1."""
        return self.stages[i - 1]

    def activation_bytes(self, i: int) -> int:
        """|x_i|."""
        return self.stages[i - 1].output_bytes if i else self.input_bytes

    def grad_bytes(self, i: int) -> int:
        """|y_i|."""
        return self.stages[i - 1].grad_bytes if i else self.input_grad_bytes

    @property
    def resident_bytes(self) -> int:
        """Parameters and their gradients, all of them."""
        return 2 * sum(stage.weight_bytes for stage in self.stages)

    @property
    def compute_seconds(self) -> float:
        """One forward and one backward of every stage."""
        return math.fsum(stage.forward_seconds + stage.backward_seconds for stage in self.stages)

    def alternative(self, first: int, last: int, mode: str) -> Alternative:
        """The alternative of that name.

        Raises:
            InputError: there is none.
        """
        for other in self.alternatives:
            if (other.first, other.last, other.mode) == (first, last, mode):
                return other
        raise InputError(f"the chain has no alternative {mode!r} for stages {first}..{last}")


def stage_classes(chain: StageChain) -> tuple[int, ...]:
    """A number for each stage, the same for equal stages."""
    numbers: dict[Stage, int] = {}
    return tuple(numbers.setdefault(stage, len(numbers)) for stage in chain.stages)


def _check_numbers(item: Any) -> None:
    """No negative, fractional (bytes) or infinite numbers."""
    problems = []
    for field in fields(item):
        value = getattr(item, field.name)
        if field.name.endswith("_bytes") and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            problems.append(f"{field.name} is {value!r}, not a whole number of bytes")
        if field.name.endswith("_seconds") and not (value >= 0 and math.isfinite(value)):
            problems.append(f"{field.name} is {value!r}, not a time")
    if problems:
        raise InputError("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """How fast bytes leave the device and come back.

    Attributes:
        down_bytes_per_second: from the device to the host.
        up_bytes_per_second: from the host to the device.
        full_duplex: whether both ways work at once; otherwise copies take turns, in the order in which they were issued.
    """

    down_bytes_per_second: float = 12.2e9
    up_bytes_per_second: float = 12.2e9
    full_duplex: bool = True

    def __post_init__(self) -> None:
        for name in ("down_bytes_per_second", "up_bytes_per_second"):
            rate = getattr(self, name)
            if not (rate > 0 and math.isfinite(rate)):
                raise InputError(f"{name} is {rate}; a link needs a positive, finite rate")

    def down_seconds(self, num_bytes: float) -> float:
        """Time to offload so many bytes."""
        return num_bytes / self.down_bytes_per_second

    def up_seconds(self, num_bytes: float) -> float:
        """Time to bring so many bytes back."""
        return num_bytes / self.up_bytes_per_second

    def streamed_seconds(self, down_bytes: float, up_bytes: float) -> float:
        """Time for bytes of both ways that pass while one operation runs."""
        down, up = self.down_seconds(down_bytes), self.up_seconds(up_bytes)
        return max(down, up) if self.full_duplex else down + up
