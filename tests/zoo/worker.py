"""One case, in a process of its own: build the model, let eager PyTorch run it, and compare.

The comparison and its rule are those of :func:`tests.helpers.exactness.assert_exact`. Third-party models need some additions:

* **Initialisations that hide errors.** Zero gammas and layer scales of 1e-6 switch branches off, and hide errors inside. A parameter with
equal elements is moved by random numbers from [-1/2, 1/2]; running statistics start at random values. * **Conditioning.** Some models
amplify every rounding error at this size: norms over two values, gradients that cancel. If an error is above the tolerance, eager PyTorch
is compared with itself, on an input that differs in its last bit only and in channels-last layout. The tolerance is then ten times that
difference, and at most 1e-6. * **Precision.** Some models compute a part in float32 for all inputs (``x.float()``), which has float32's
rounding errors. That call is float64 here, in eager PyTorch and in the compiled model. * **Eager first.** A model that fails in eager
PyTorch, or has infinite results, is no test of the compiled model.
"""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import sft
from sft.common.torch_internals import pytree
from tests.helpers.exactness import ExactReport, InexactError, assert_exact, rounding_of_eager
from tests.helpers.models import image

from .case import Case
from .models import case_named
from .outcome import KINDS, Outcome, TilingOutcome

__all__ = ["Question", "check"]

_BUDGET = "8GiB"

_TOLERANCE = 1e-10
#: Factor of eager PyTorch's own rounding error where that is above the tolerance, and the largest tolerance.
_ROUNDINGS, _LARGEST_ERROR = 10, 1e-6

#: Strips of full width, and strips of panels. A stale buffer shows in the second step only, of whichever tiling; one of them takes it.
_TILINGS: dict[str, tuple[sft.Options, int]] = {
    "strips": (sft.Options(tile=(32, None)), 2),
    "panels": (sft.Options(tile=(32, 40)), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Request to a process."""

    label: str
    """Of the case."""
    memory_bytes: int
    """Memory limit of the process, so that a model that is too large fails alone."""
    processor_seconds: int
    """Limit of processor seconds, which a busy machine does not change."""
    threads: int
    """Threads that torch may use."""


def check(question: Question) -> Outcome:
    """Run the case; every failure is an outcome. Call it in a process of its own."""
    _fall_silent()
    resource.setrlimit(resource.RLIMIT_DATA, (question.memory_bytes, question.memory_bytes))
    used = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used + question.processor_seconds, used + question.processor_seconds))
    torch.set_num_threads(question.threads)
    started = time.perf_counter()
    case = case_named(question.label)
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        outcome = _check(case)
    return _outcome(case, *outcome, seconds=time.perf_counter() - started)


def _outcome(case: Case, kind: Any, message: str, num_parameters: int, tilings: tuple[TilingOutcome, ...], *, seconds: float) -> Outcome:
    return Outcome(
        package=case.package,
        name=case.name,
        shape=case.shape,
        kind=kind,
        message=message,
        num_parameters=num_parameters,
        seconds=seconds,
        tilings=tilings,
    )


def _check(case: Case) -> tuple[str, str, int, tuple[TilingOutcome, ...]]:
    try:
        torch.manual_seed(0)
        model = _awake(case.make()).train()
        x = image(*case.shape)
        reason = _eager_refusal(model, x)
    except Exception as error:
        return "crash", f"building: {_describe(error)}", 0, ()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if reason is not None:
        return "eager cannot", reason, num_parameters, ()
    tilings: list[TilingOutcome] = []
    for name in _TILINGS:
        tilings.append(_tiled(model, x, name))
        if tilings[-1].kind == "refused":
            break  # an operator without a rule has none in panels, either
    worst = max(tilings, key=lambda tiling: KINDS.index(tiling.kind))
    return worst.kind, worst.message, num_parameters, tuple(tilings)


def _tiled(model: nn.Module, x: torch.Tensor, tiling: str) -> TilingOutcome:
    options, steps = _TILINGS[tiling]
    made = _Made()
    started = time.perf_counter()

    def outcome(kind: Any, message: str = "", problems: tuple[str, ...] = (), **numbers: Any) -> TilingOutcome:
        return TilingOutcome(
            tiling=tiling,
            kind=kind,
            message=message,
            problems=problems,
            seconds=time.perf_counter() - started,
            compile_seconds=made.seconds,
            left_strips=made.left_strips(),
            **numbers,
        )

    own = 0.0
    try:
        with made.listening():
            try:
                report = assert_exact(model, x, budget=_BUDGET, options=options, steps=steps, tolerance=_TOLERANCE)
            except InexactError:
                own = rounding_of_eager(model, x, steps=steps)
                allowed = min(_ROUNDINGS * own, _LARGEST_ERROR)
                if allowed <= _TOLERANCE:
                    raise
                try:
                    report = assert_exact(model, x, budget=_BUDGET, options=options, steps=steps, tolerance=allowed)
                except InexactError as error:
                    raise InexactError(f"{error}; eager's own answer moves by {own:.0e}") from error
    except sft.UnsupportedError as error:
        return outcome("refused", str(error), error.problems)
    except (sft.InputError, sft.BudgetError) as error:
        return outcome("refused", str(error), (str(error),))
    except AssertionError as error:
        return outcome("wrong", str(error) or _describe(error), **(_shares(made.net.plan) if made.net is not None else {}))
    except Exception as error:
        return outcome("crash", _describe(error))
    shares = _shares(report.plan)
    return outcome("exact" if shares["num_tiled_segments"] else "exact, whole", error=_error(report), rounding_of_eager=own, **shares)


class _Made:
    """Result of ``sft.compile``, and its time."""

    def __init__(self) -> None:
        self.net: Any = None
        self.seconds = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record compiled models until the block ends."""
        compile = sft.compile

        def listen(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                self.net = compile(*arguments, **keywords)
            finally:
                self.seconds = time.perf_counter() - started
            return self.net

        with patch.object(sft, "compile", listen):
            yield

    def left_strips(self) -> dict[str, int]:
        """Operators that run whole on values that could come in strips."""
        if self.net is None:
            return {}
        phases = self.net._sft_engine.phases()
        left = Counter(
            node.label.rpartition(": ")[2]
            for node in phases.graph.operators
            if phases.rows[node.name].role == "whole" and any(name in phases.streamed for name in node.operands)
        )
        return dict(left)


def _shares(plan: sft.Plan) -> dict[str, Any]:
    tiled = [segment for segment in plan.segments if segment.mode == "tiled" and (segment.num_steps > 1 or segment.num_panels > 1)]
    num_operators = sum(len(segment.nodes) for segment in plan.segments)
    return {
        "num_segments": len(plan.segments),
        "num_tiled_segments": len(tiled),
        "operators_share": sum(len(segment.nodes) for segment in tiled) / max(1, num_operators),
        "flops_share": sum(segment.flops for segment in tiled) / max(1, plan.flops),
    }


def _error(report: ExactReport) -> float:
    return max(report.output_error, report.input_grad_error, report.param_grad_error, report.buffer_error, report.param_error)


def _awake(model: nn.Module) -> nn.Module:
    """Perturb parameters with a constant initialisation."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.rand(parameter.shape, generator=generator) - 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model


def _eager_refusal(model: nn.Module, x: torch.Tensor) -> str | None:
    """Reason for which eager PyTorch cannot train the model on ``x``; ``None`` if it can."""
    eager = copy.deepcopy(model).double()
    try:
        outputs = [y for y in pytree.tree_leaves(eager(x.clone().requires_grad_())) if isinstance(y, torch.Tensor)]
        torch.autograd.backward([y for y in outputs if y.requires_grad], [torch.ones_like(y) for y in outputs if y.requires_grad])
    except Exception as error:
        return _describe(error)
    gradients = [parameter.grad for parameter in eager.parameters() if parameter.grad is not None]
    if not all(bool(value.isfinite().all()) for value in (*outputs, *gradients)):
        return "outputs or gradients are not finite"
    return None


def _describe(error: Exception) -> str:
    """Type, message, and the last line of our code or the model's in the traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    last = f" at {'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno}" if frames else ""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}{last}"


def _fall_silent() -> None:
    """Silence output and warnings of imported packages."""
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
