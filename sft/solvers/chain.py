"""Model of a network: a chain of stages, and the link between device and host.

Stage ``i`` of ``1..n`` reads the activation ``x_{i-1}`` and computes ``x_i``; ``x_0`` is the network's input. After the last stage the
loss turns ``x_n`` into its gradient ``y_n``. The backward of stage ``i`` reads ``y_i``, ``x_{i-1}`` and the values ``s_i`` that the
forward saved, and computes ``y_{i-1}``. Some backwards also read the output ``x_i`` (ReLU, softmax).

A stage is *light* if its backward reads only the input: it saves no values and does not read the output (a convolution). Its forward need
not run again before its backward. The models of the literature are special cases: light stages only (Butt's thesis, Figure 3.1); backwards
that read the output (Beaumont, Eyraud-Dubois and Shilova, Euro-Par 2020, section 3.1); stages that save (Beaumont, Herrmann et al.,
RR-9302, 2019).

An *alternative* runs several stages as one, for example a fused-tiled segment with intermediate activations that never exist in full. It
has its own times and bytes, and replaces the stages of its span in both passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sft.common.errors import InputError
from sft.common.legacy_names import restore_fields

__all__ = ["Alternative", "HostLink", "Stage", "StageChain", "stage_classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a chain.

    Attributes:
        forward_seconds: time of the forward.
        backward_seconds: time of the backward, without recomputation.
        output_bytes: |x_i|.
        grad_bytes: |y_i|, the gradient of the output.
        saved_bytes: |s_i|: values that the forward saves for the backward, in addition to ``x_{i-1}`` and ``x_i``.
        reads_output: True if the backward also reads ``x_i``.
        forward_workspace_bytes: temporary bytes of the forward, in addition to input, output and saved values.
        backward_workspace_bytes: temporary bytes of the backward, in addition to the values that it reads and ``y_{i-1}``.
        weight_bytes: the parameters; their gradients take the same again. Both are resident during the whole step, or streamed: then a
            forward reads the parameters through a buffer of that size, and a backward also writes the gradients through one.
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
        """True if the backward reads only the input."""
        return self.saved_bytes == 0 and not self.reads_output


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A second way to run the stages ``first..last``, as one.

    Attributes:
        first: the first stage, from 1.
        last: the last stage.
        mode: its name, for example ``"tile(256)"``; unique among the alternatives of the same stages.
        forward_seconds: time of the forward.
        backward_seconds: time of the backward, including its recomputation and halos.
        saved_bytes: values that the forward saves for the backward, in addition to the input.
        reads_output: True if the backward also reads ``x_last``.
        forward_workspace_bytes: temporary bytes of the forward, such as tile buffers and carried rows.
        backward_workspace_bytes: temporary bytes of the backward.
        streamable: True if it reads its input and writes its output in slices, so that either may stay on the host and never be
            complete on the device. The workspaces then include the slices.
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
        input_grad_bytes: |y_0|; 0 if that gradient is not needed.
        stages: the stages ``1..n``, in order.
        alternatives: other ways to run some of them.
        input_may_stream: True if ``x_0`` may be read from the host in slices (and ``y_0`` be written to the host).
        output_may_stream: True if ``x_n`` may be written to the host in slices (and ``y_n`` be read from the host).
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
        keys: set[tuple[int, int, str]] = set()
        for alternative in self.alternatives:
            key = (alternative.first, alternative.last, alternative.mode)
            if not 1 <= alternative.first <= alternative.last <= len(self.stages):
                raise InputError(
                    f"alternative {alternative.mode!r} spans stages {alternative.first}..{alternative.last} of {len(self.stages)}"
                )
            if key in keys:
                raise InputError(
                    f"two alternatives are called {alternative.mode!r} for stages {alternative.first}..{alternative.last}; "
                    "give them different names"
                )
            keys.add(key)

    @property
    def num_stages(self) -> int:
        """n, the length of the chain."""
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
        """Bytes of all parameters and their gradients."""
        return 2 * sum(stage.weight_bytes for stage in self.stages)

    @property
    def compute_seconds(self) -> float:
        """Time of one forward and one backward of every stage."""
        return math.fsum(stage.forward_seconds + stage.backward_seconds for stage in self.stages)

    def alternative(self, first: int, last: int, mode: str) -> Alternative:
        """Return the alternative of that span and name.

        Raises:
            InputError: the chain has no such alternative.
        """
        for alternative in self.alternatives:
            if (alternative.first, alternative.last, alternative.mode) == (first, last, mode):
                return alternative
        raise InputError(f"the chain has no alternative {mode!r} for stages {first}..{last}")


def stage_classes(chain: StageChain) -> tuple[int, ...]:
    """A number for each stage, equal for equal stages."""
    numbers: dict[Stage, int] = {}
    return tuple(numbers.setdefault(stage, len(numbers)) for stage in chain.stages)


def _check_numbers(item: Any) -> None:
    """Refuse negative or infinite numbers, and bytes that are not integers."""
    problems = []
    for field in fields(item):
        value = getattr(item, field.name)
        if field.name.endswith("_bytes") and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            problems.append(f"{field.name} is {value!r}, not an integer number of bytes")
        if field.name.endswith("_seconds") and not (value >= 0 and math.isfinite(value)):
            problems.append(f"{field.name} is {value!r}, not a time")
    if problems:
        raise InputError("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Bandwidth between device and host.

    Attributes:
        down_bytes_per_second: from the device to the host.
        up_bytes_per_second: from the host to the device.
        full_duplex: True if both directions work at once; otherwise copies take turns, in the order of issue.
        copy_seconds: time that each copy of a strip takes in addition to that of its bytes.
    """

    down_bytes_per_second: float = 12.2e9
    up_bytes_per_second: float = 12.2e9
    full_duplex: bool = True
    copy_seconds: float = 0.0

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore a pickle; one of an older release lacks the last fields."""
        restore_fields(self, state)

    def __post_init__(self) -> None:
        for name in ("down_bytes_per_second", "up_bytes_per_second"):
            rate = getattr(self, name)
            if not (rate > 0 and math.isfinite(rate)):
                raise InputError(f"{name} is {rate}; a link needs a positive, finite rate")

    def down_seconds(self, num_bytes: float) -> float:
        """Time to copy so many bytes to the host."""
        return num_bytes / self.down_bytes_per_second

    def up_seconds(self, num_bytes: float) -> float:
        """Time to copy so many bytes to the device."""
        return num_bytes / self.up_bytes_per_second

    def streamed_seconds(self, down_bytes: float, up_bytes: float, *, num_down: int = 0, num_up: int = 0) -> float:
        """Time to copy bytes in both directions during one operation, with so many copies of strips in each."""
        down = self.down_seconds(down_bytes) + num_down * self.copy_seconds
        up = self.up_seconds(up_bytes) + num_up * self.copy_seconds
        return max(down, up) if self.full_duplex else down + up
