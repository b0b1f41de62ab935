"""Measurements of the methods of `harness.peers`: memory and error of a step, and correctness in float64.

- *Process memory*: high-water mark of a warm step above the size of the process with libraries, model and input loaded. On Linux the mark
  is reset before that step, so the memory of a compiler or a planner counts only as far as the process keeps it.
- *Metered memory*: that of `sft.measure_peak`.
- *Error*: largest difference from a step in float64, over the largest value of the same module; of the output and all gradients. The
reference step is PyTorch's with checkpointed blocks. Where that does not fit, it is `sft`'s, which is equal wherever both run.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import importlib
import resource
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import sft
from harness.cases import Built, PlanNumbers
from harness.gradcheck import collect, worst_difference
from harness.memory import peak_rss_bytes, rss_bytes
from harness.peers import METHODS, PeerCase, build_peer, prepare_peer
from harness.workers import Refused, Steps

__all__ = ["EXACT", "REFERENCES", "Outcome", "PeerReading", "Question", "check_outcome", "measure_peer", "save_reference", "start_peer"]

#: Methods of the float64 reference, the second where the first does not fit: PyTorch's convolutions in float64 unfold their input.
REFERENCES = ("checkpoint each block", "sft")
#: Largest error in float64 of a method that is called exact.
EXACT = 1e-10
#: Budget of a correctness check, over the smallest one: less than the untiled step needs.
_CHECK_BUDGET = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A case with the file of its reference."""

    case: PeerCase
    reference: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReading:
    """Memory, error and plan of one step."""

    process_bytes: int
    metered_bytes: int | None
    """None for compiled code: PyTorch does not dispatch its allocations."""
    resident_bytes: int
    """Parameters, buffers and the input: in the process before the step."""
    error: float
    worst_tensor: str
    num_parameters: int
    """Parameters that plain PyTorch trains."""
    num_untrained: int
    """Those without a gradient."""
    prepare_seconds: float
    step_seconds: float
    """One step, for orientation: other processes may run at the same time."""
    plan: PlanNumbers | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one method in one situation, in float64."""

    error: float | None = None
    """None if the method did not run."""
    worst_tensor: str = ""
    reason: str = ""
    """Message of a method that refused or failed."""

    @property
    def text(self) -> str:
        """The cell of a table."""
        if self.error is None:
            return self.reason
        return "exact" if self.error <= EXACT else f"wrong: {self.error:.1e}"


def _begin(case: PeerCase) -> None:
    """Set threads and memory limit of this process, and import what the method needs."""
    warnings.simplefilter("ignore")  # lightstream uses CUDA's autocast
    torch.set_num_threads(case.threads)
    if case.limit_bytes is not None:  # so that a step that does not fit fails alone, and not another process
        resource.setrlimit(resource.RLIMIT_DATA, (case.limit_bytes, case.limit_bytes))
    method = METHODS[case.method]
    for name in method.libraries:
        with contextlib.suppress(ImportError):  # the method itself reports a missing library
            importlib.import_module(name)
    if method.is_budgeted:
        sft.plan(nn.Sequential(nn.Conv2d(3, 4, 3)), (1, 3, 64, 64), budget="1GiB")


def _trim() -> None:
    """Return freed memory to the system, as far as the C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset_high_water_mark() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def save_reference(question: Question) -> None:
    """Take the float64 step of a case and save output and gradients."""
    case = replace(question.case, double=True)
    _begin(case)
    built = build_peer(case)
    output = prepare_peer(case, built).step()
    torch.save(collect(built.body, output), question.reference)


def _compare(reference: dict[str, Tensor], values: dict[str, Tensor]) -> tuple[float, str, int]:
    """Error and tensor of the largest error, over the tensors that both have; and the number that `values` lacks."""
    missing = reference.keys() - values.keys()
    worst, name = worst_difference({key: tensor for key, tensor in reference.items() if key not in missing}, values)
    return worst, name, len(missing)


def measure_peer(question: Question) -> PeerReading:
    """Measure one case in a fresh process: one step under the meter, then a warm one for process memory and error."""
    case = question.case
    _begin(case)
    built = build_peer(case)
    _trim()
    start_bytes = rss_bytes()
    started = time.perf_counter()
    prepared = prepare_peer(case, built)
    prepare_seconds = time.perf_counter() - started
    metered_bytes = None
    if METHODS[case.method].is_metered:
        with sft.measure_peak("cpu") as peak:
            prepared.step()
        metered_bytes = peak.num_bytes
    else:
        prepared.step()
    prepared.reset()
    _trim()
    _reset_high_water_mark()
    started = time.perf_counter()
    output = prepared.step()
    step_seconds = time.perf_counter() - started
    process_bytes = peak_rss_bytes() - start_bytes
    values = {name: tensor.double() for name, tensor in collect(prepared.trained, output).items()}
    reference: dict[str, Tensor] = torch.load(question.reference, weights_only=True)
    error, worst_tensor, num_untrained = _compare(reference, values)
    return PeerReading(
        process_bytes=process_bytes,
        metered_bytes=metered_bytes,
        resident_bytes=built.resident_bytes - built.gradient_bytes,
        error=error,
        worst_tensor=worst_tensor,
        num_parameters=len(reference) - 1,
        num_untrained=num_untrained,
        prepare_seconds=prepare_seconds,
        step_seconds=step_seconds,
        plan=prepared.plan,
    )


def _states(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Output, gradients, and running statistics after a step."""
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return {**collect(model, output), **statistics}


def _tight_budget(built: Built, options: sft.Options) -> int:
    """A budget close to the smallest one."""
    try:
        return sft.plan(built.body, tuple(built.x.shape), budget=1, options=options).total_bytes
    except sft.BudgetError as error:
        return round(_CHECK_BUDGET * error.needed_bytes)


def check_outcome(case: PeerCase) -> Outcome:
    """Compare a step with plain PyTorch in float64: output, gradients and running statistics."""
    _begin(case)
    built = build_peer(replace(case, double=True))
    plain = replace(built, body=copy.deepcopy(built.body))
    reference = _states(plain.body, prepare_peer(replace(case, method="plain"), plain).step())
    strategy = METHODS[case.method].strategy
    if strategy is not None:
        case = replace(case, budget_bytes=_tight_budget(built, sft.Options(strategy=strategy)))
    try:
        prepared = prepare_peer(case, built)
        values = _states(prepared.trained, prepared.step())
    except Refused as error:
        return Outcome(reason=str(error))
    except Exception as error:  # from any library; the table shows it
        lines = str(error).strip().splitlines() or [""]
        return Outcome(reason=f"{type(error).__name__}: {lines[0]}")
    worst, name, num_missing = _compare(reference, values)
    if values["output"].shape != reference["output"].shape:
        return Outcome(error=float("inf"), worst_tensor="shape of the output")
    return Outcome(error=float("inf") if num_missing else worst, worst_tensor="missing gradients" if num_missing else name)


def start_peer(case: PeerCase) -> Steps:
    """Build and prepare a case for timing, and take its first step, which may compile."""
    _begin(case)
    prepared = prepare_peer(case, build_peer(case))
    prepared.step()

    def reset() -> None:
        prepared.reset()
        _trim()

    reset()
    return Steps(step=prepared.step, reset=reset)
