"""Cases of the benchmarks: one body, one size, one method.

The *body* of a network (its convolutional layers, the `features` of the models in `examples/models.py`) has the large activations, so only
the body is timed. Every method computes the same training step: `loss = sum(body(x) * weights)` with fixed random weights, then
`loss.backward()`. Model, input and weights come from one seed, so all methods see the same numbers; the statistics of norms are frozen, as
is usual for batches of one image.

- `plain`: PyTorch as it is.
- `checkpoint_sequential`: `torch.utils.checkpoint` over the body's list of stages, in the square root of their number
  of segments.
- `ours`: `sft.compile` under a byte budget, or with a forced strip height.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import sft

#: Strip heights that a table's cell lists.
_MOST_LISTED = 3
#: Most segments of a plan that is described in words.
_MOST_EXPLAINED = 24

__all__ = [
    "METHODS",
    "MODELS",
    "Built",
    "Case",
    "PlanNumbers",
    "build",
    "build_body",
    "checkpointed",
    "describe_plan",
    "load_models",
    "make_body",
    "prepare",
]

MODELS = ("vgg16", "darknet19", "resnet18")
METHODS = ("plain", "checkpoint_sequential", "ours")

#: A budget above every need, for cases with a forced strip height.
UNLIMITED_BYTES = 2**50


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement, small enough to send to a worker process."""

    model: str
    """Name of a function in `examples/models.py`."""
    height: int
    """Rows of the input, pixels."""
    width: int
    """Columns of the input, pixels."""
    method: str
    """One of `METHODS`."""
    threads: int
    """Threads that torch may use."""
    fraction: float = 0.2
    """Share of plain's activation peak that `ours` may use."""
    budget_bytes: int | None = None
    """Budget of `ours`; None: unlimited, for a forced strip height."""
    strip_rows: int | None = None
    """Strip height to force on `ours`; None: the planner's choice."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is one of {', '.join(METHODS)}, got {self.method!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A body with its input, before any method is applied to it."""

    body: nn.Sequential
    x: Tensor
    """Shape `[1, 3, height, width]`."""
    weights: Tensor
    """Factors of the output in the loss, of the output's shape."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the parameters' gradients."""
        return sum(p.nbytes for p in self.body.parameters() if p.requires_grad)

    @property
    def resident_bytes(self) -> int:
        """Bytes that are resident with every method: parameters, their gradients, buffers, the input."""
        num_bytes = sum(p.nbytes for p in self.body.parameters()) + sum(b.nbytes for b in self.body.buffers())
        return num_bytes + self.gradient_bytes + self.x.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentNumbers:
    """Decisions of a plan for one segment."""

    mode: str
    num_steps: int
    strip_rows: int
    state_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNumbers:
    """A plan in numbers, for the record."""

    projected_peak_bytes: int
    total_bytes: int
    flops: int
    plain_flops: int
    segments: tuple[SegmentNumbers, ...]
    explained: str
    """The text of `plan.explain()`; empty for plans of many segments, which take a dozen lines each."""

    @property
    def strips(self) -> str:
        """Strip heights and how often a state is kept, for a table's cell: `64 rows, k=2`; of many segments the lowest and the highest."""
        tiled = sorted({(s.strip_rows, s.state_every) for s in self.segments if s.num_steps > 1})
        if len(tiled) > _MOST_LISTED:
            intervals = sorted({every for _, every in tiled})
            return f"{tiled[0][0]} to {tiled[-1][0]} rows, k={', '.join(map(str, intervals))}"
        return "; ".join(f"{rows} rows, k={every}" for rows, every in tiled) or "whole"


def load_models(place: str = "examples/models.py") -> ModuleType:
    """Import a module with models by its place in the repository."""
    path = Path(__file__).resolve().parents[2] / place
    spec = importlib.util.spec_from_file_location("example_models", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"no models at {path.name}; run the benchmarks from a full checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_body(name: str, *, frozen: bool = True, **options: Any) -> nn.Sequential:
    """Build the body of a network of `examples/models.py`.

    Args:
        name: function of that module.
        frozen: freeze the statistics of its norms.
        options: further arguments of the function.
    """
    models = load_models()
    model = getattr(models, name)(num_classes=10, **options)
    if frozen:
        models.freeze_norm(model)
    body = model.features
    if not isinstance(body, nn.Sequential):
        raise TypeError(f"{name}.features is a {type(body).__name__}; the benchmark wants an nn.Sequential of stages")
    return body


def build(case: Case, dtype: torch.dtype = torch.float32) -> Built:
    """Build body, input and loss weights of a case from a fixed seed."""
    return build_body(partial(make_body, case.model), case.height, case.width, dtype)


def build_body(make: Callable[[], nn.Sequential], height: int, width: int, dtype: torch.dtype) -> Built:
    """Build the body that `make` returns, an input and loss weights from a fixed seed."""
    torch.manual_seed(0)
    body = make().to(dtype)
    with torch.device("meta"), torch.no_grad():
        output_shape = make()(torch.empty(1, 3, height, width)).shape
    x, weights = torch.randn(1, 3, height, width), torch.randn(output_shape)  # the same numbers in every type
    return Built(body=body, x=x.to(dtype), weights=weights.to(dtype))


def _layers(body: nn.Sequential) -> Iterator[nn.Module]:
    """The body's layers in order, nested Sequentials opened."""
    for child in body:
        if isinstance(child, nn.Sequential):
            yield from _layers(child)
        else:
            yield child


def _stages(body: nn.Sequential) -> list[nn.Sequential]:
    """The body as the finest list of stages that may be cut anywhere.

    An in-place layer stays with the layer before it: at the start of a segment it would overwrite a tensor that the segment before saved.
    """
    groups: list[list[nn.Module]] = []
    for layer in _layers(body):
        if groups and getattr(layer, "inplace", False):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return [nn.Sequential(*group) for group in groups]


def checkpointed(body: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """Apply `checkpoint_sequential` over the body's stages, in the square root of their number of segments."""
    stages = _stages(body)
    num_segments = max(1, round(math.sqrt(len(stages))))
    run: Callable[..., Tensor] = checkpoint_sequential

    def forward(x: Tensor) -> Tensor:
        return run(stages, num_segments, x, use_reentrant=False)

    return forward


def describe_plan(plan: sft.Plan) -> PlanNumbers:
    """Copy a plan's numbers out of it."""
    return PlanNumbers(
        projected_peak_bytes=plan.projected_peak_bytes,
        total_bytes=plan.total_bytes,
        flops=plan.flops,
        plain_flops=plan.plain_flops,
        segments=tuple(
            SegmentNumbers(mode=str(s.mode), num_steps=s.num_steps, strip_rows=s.strip_rows, state_every=s.state_every)
            for s in plan.segments
        ),
        explained=str(plan.explain()) if len(plan.segments) <= _MOST_EXPLAINED else "",
    )


def prepare(case: Case, built: Built) -> tuple[Callable[[], Tensor], PlanNumbers | None]:
    """Apply the case's method.

    Returns:
        A function that runs one step (gradients dropped first, left in `.grad`) and returns the output, and the plan
        if there is one.
    """
    body, x = built.body, built.x
    net: Callable[[Tensor], Tensor] = body
    plan = None
    if case.method == "checkpoint_sequential":
        net = checkpointed(body)
    elif case.method == "ours":
        options = None if case.strip_rows is None else sft.Options(tile=(case.strip_rows, case.width))
        budget = UNLIMITED_BYTES if case.budget_bytes is None else case.budget_bytes
        compiled: Any = sft.compile(body, tuple(x.shape), budget=budget, options=options)
        net, plan = compiled, describe_plan(compiled.plan)

    def step() -> Tensor:
        body.zero_grad(set_to_none=True)
        output = net(x)
        torch.autograd.backward(torch.sum(output * built.weights))
        return output.detach()

    return step, plan
