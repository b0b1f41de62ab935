"""The definition of "exact", and its assertion.

**The error rule.** Everything is compared with eager PyTorch in float64. The error of a tensor is its largest absolute
difference, divided by a scale:

* an output, a buffer, the input's gradient: the tensor's own largest absolute value (of the input's gradient, too, not below the
  smallest scale of parameters' gradients).
  Its elements are sums of terms of about that size, so rounding is in proportion to it; an element near zero has no relative accuracy of
  its own.
* a parameter's gradient, and a parameter after the update: the largest absolute value of its kind in the same module.
  A bias before a norm has the true gradient 0. Its computed gradient is the rounding error of a sum of large terms, and the module's weight
  gradient is a sum of the same terms. Relative to the bias gradient itself, the error would be arbitrary. With two norms in a row, all
  gradients of a module have the true value 0; with a norm before a mean, all but its own. So the scale is never below a thousandth of the
  largest gradient in the model. Errors above 1e-13 of that are still detected.

If gradients differ, finite differences decide between the two (:mod:`tests.helpers.finite_differences`). In the reference,
gradients that enter a batch norm are made contiguous: eager PyTorch misreads some that are not.

A scale of zero requires an error of zero; NaN and infinity are never within tolerance. Which gradients are None, and
which outputs require grad, must agree as well.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.byte_units import format_bytes, parse_bytes
from sft.common.torch_internals import pytree
from sft.runtime.moves import ScheduleOp
from sft.torch_runtime.machine import TorchMachine
from tests.helpers.finite_differences import Verdict, judge_gradients, with_contiguous_norm_gradients
from tests.helpers.flops import StepMeter
from tests.helpers.poison import poisoned
from tests.helpers.positional_rng import reseed, seed_of, with_positional_dropout

__all__ = [
    "ExactReport",
    "InexactError",
    "assert_exact",
    "assert_within_budget",
    "gradient_errors",
    "param_grads",
    "plan_of",
    "relative_error",
    "rounding_of_eager",
]

_SMALLEST_SHARE = 1e-3
"""Of the model's largest gradient: no gradient is compared on a smaller scale."""

_LEARNING_RATE = 1e-2
"""Relative to the largest gradient: the parameters move visibly, and never so far that the next step overflows."""


class InexactError(AssertionError):
    """A number differs by more than the tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactReport:
    """Measurements of :func:`assert_exact`; errors follow the module's rule and are the worst over all steps."""

    output_error: float
    """Over all outputs."""
    input_grad_error: float
    """0 where the input's gradient was not asked for."""
    param_grad_error: float
    """Over all parameters."""
    buffer_error: float
    """Over all buffers."""
    param_error: float
    """Over all parameters after the updates."""
    measured_peak_bytes: int
    """Of one training step, input, outputs and output gradients included."""
    projected_peak_bytes: int
    """Of the same step, by the plan."""
    flops: int
    """Counted in one training step."""
    plan: sft.Plan
    """The plan of that step."""


def relative_error(ours: Tensor, reference: Tensor, *, scale: float | None = None) -> float:
    """Largest absolute difference over ``scale`` (the largest absolute reference value); infinite for NaN.

    Raises:
        AssertionError: the two differ in shape or dtype.
    """
    assert ours.shape == reference.shape, f"shape {tuple(ours.shape)} instead of {tuple(reference.shape)}"
    assert ours.dtype == reference.dtype, f"dtype {ours.dtype} instead of {reference.dtype}"
    if reference.numel() == 0:
        return 0.0
    difference = float((ours.detach().double() - reference.detach().double()).abs().max())
    if difference == 0.0:
        return 0.0
    scale = float(reference.detach().double().abs().max()) if scale is None else scale
    error = difference / scale if scale > 0.0 else float("inf")
    return float("inf") if math.isnan(error) else error


def gradient_errors(ours: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Error of each parameter's gradient (or value), by the module's rule.

    Args:
        ours: gradients by parameter name (``"body.0.weight"``), None for absent ones.
        reference: the same of eager PyTorch.

    Raises:
        AssertionError: the names differ, or a gradient is present on one side only.
    """
    assert ours.keys() == reference.keys(), f"parameters {sorted(ours)} instead of {sorted(reference)}"
    module_scale: dict[str, float] = {}
    for name, gradient in reference.items():
        if gradient is not None and gradient.numel():
            module = name.rpartition(".")[0]
            module_scale[module] = max(module_scale.get(module, 0.0), float(gradient.detach().abs().max()))
    floor = _SMALLEST_SHARE * max(module_scale.values(), default=0.0)
    errors = {}
    for name, gradient in reference.items():
        mine = ours[name]
        assert (mine is None) == (gradient is None), (
            f"{name} has {'no' if mine is None else 'a'} gradient, in eager {'none' if gradient is None else 'one'}"
        )
        if mine is not None and gradient is not None:
            errors[name] = relative_error(mine, gradient, scale=max(floor, module_scale.get(name.rpartition(".")[0], 0.0)))
    return errors


def _leaves(tree: object) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    assert all(isinstance(leaf, Tensor) for leaf in leaves), f"outputs are {[type(leaf) for leaf in leaves]}"
    return leaves


def _backward(outputs: list[Tensor], gradients: list[Tensor]) -> None:
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def param_grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Gradients of a module's parameters, by name."""
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def _sgd_step(module: nn.Module, rate: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)


def _worst(errors: Mapping[str, float], tolerance: float, what: str) -> float:
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    if bad:
        raise InexactError(f"{what}: relative error above {tolerance:g}: " + ", ".join(f"{n} {e:.3g}" for n, e in bad.items()))
    return max(errors.values(), default=0.0)


def plan_of(net: nn.Module, *inputs: Tensor) -> sft.Plan:
    """The plan of the compiled model ``net`` for these inputs."""
    plan: sft.Plan = cast(Any, net).plan_for(*inputs)
    return plan


@dataclass(slots=True)
class _Reading:
    """Readings of a training step.

    Attributes:
        counter: its bytes and FLOPs.
        begun: the moves that machines of tensors began, and the allocated bytes at each.
    """

    counter: StepMeter = field(default_factory=StepMeter)
    begun: list[tuple[str, int]] = field(default_factory=list)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context that is measured; a step may have several."""

        def record_op(machine: TorchMachine, move: ScheduleOp) -> None:
            self.begun.append((str(move), self.counter.peak.current_bytes))

        with pytest.MonkeyPatch.context() as patches, self.counter:
            patches.setattr(TorchMachine, "start_op", record_op)
            yield

    def check(self, plan: sft.Plan, budget: int | str, *, to_the_byte: bool) -> tuple[int, int, sft.Plan]:
        """Check as :func:`assert_within_budget`, with the same result."""
        measured, projected = self.counter.peak.num_bytes, plan.projected_peak_bytes - plan.overhead_bytes
        assert measured > 0, "the meter saw nothing"
        assert measured <= projected, f"measured {format_bytes(measured)}, projected only {format_bytes(projected)}"
        if to_the_byte:
            expected = [(entry.move, entry.begin_bytes) for entry in plan.timeline.entries]
            assert self.begun == expected, "moves, or allocated bytes at their begin"
            assert not plan.order or plan.order == tuple(move for move, _ in self.begun)
            assert measured == projected, f"measured {measured} bytes, projected {projected}"
        slack = max(measured // 100, 64 * 1024)
        assert projected <= measured + slack, f"projected {format_bytes(projected)}, measured only {format_bytes(measured)}"
        assert plan.total_bytes <= parse_bytes(budget), f"plan needs {format_bytes(plan.total_bytes)}, budget is {budget}"
        flops = self.counter.flops
        assert flops == plan.flops, f"counted {flops} FLOPs, planned {plan.flops}"
        return measured, flops, plan


def assert_within_budget(
    net: nn.Module, x: Tensor, *others: Tensor, budget: int | str, input_grad: bool = True, to_the_byte: bool = False
) -> tuple[int, int, sft.Plan]:
    """Assert measured peak <= projected peak, projected tight, total <= budget, FLOPs as planned.

    The step's inputs, outputs and output gradients are counted, as in a plan's peak. The parameters' ``.grad`` are None before
    it, so that accumulators and ``.grad`` are measured too.

    Args:
        net: the compiled model.
        x: the input.
        others: further inputs without a gradient.
        budget: the model's budget.
        input_grad: True if the input requires grad.
        to_the_byte: True if the step must also begin exactly the moves of the plan's timeline, have its bytes at the begin of each
            (so that all memory is freed where the plan frees it), and reach the projected peak.

    Returns:
        Measured peak in bytes, counted FLOPs, and the plan.
    """
    plan = plan_of(net, x.detach().clone().requires_grad_(input_grad), *others)
    net.zero_grad(set_to_none=True)
    reading = _Reading()
    with reading.on():
        inputs = _own(x, others, input_grad=input_grad)
        # A tensor that the model returns twice gets one gradient: a plan counts values.
        wanted = [y for y in {id(y): y for y in _leaves(net(*inputs))}.values() if y.requires_grad]
        _backward(wanted, [torch.ones_like(y) for y in wanted])
    net.zero_grad(set_to_none=True)
    return reading.check(plan, budget, to_the_byte=to_the_byte)


def _own(x: Tensor, others: Sequence[Tensor], *, input_grad: bool) -> list[Tensor]:
    """Inputs of a step without further references."""
    return [x.clone().requires_grad_(input_grad), *(other.clone() for other in others)]


def assert_exact(
    model: nn.Module,
    x: Tensor,
    *others: Tensor,
    budget: int | str = "4GiB",
    options: sft.Options | None = None,
    tolerance: float = 1e-10,
    steps: int = 2,
    input_grad: bool = True,
    seed: int = 0,
    to_the_byte: bool = False,
) -> ExactReport:
    """Assert that the compiled model equals eager PyTorch in float64, inside its budget, at the FLOPs it planned.

    The model is copied, never changed. Both copies take ``steps`` training steps on the same data with the same random
    output gradients and the same plain SGD update between (a stale buffer shows in the second step only). Our first step runs in poisoned
    memory, and so with PyTorch's deterministic operators; the others run as usual. The last is also the one whose bytes and FLOPs are
    counted. Dropout in the reference is positional, with the seed that the compiled model draws.

    Args:
        model: any module whose outputs are tensors in nested tuples, lists and dicts; its training flags are kept.
        x: the input; converted to float64.
        others: further inputs without a gradient; numbers that are not whole are converted, too.
        budget: budget of the compiled model.
        options: passed on to ``sft.compile``.
        tolerance: largest relative error, by the rule in this module's docstring.
        steps: number of training steps.
        input_grad: True if the input requires grad.
        seed: of the output gradients and of the second step's data.
        to_the_byte: as of :func:`assert_within_budget`.

    Raises:
        InexactError: naming what differs, by how much.
        AssertionError: the two differ in more than numbers, or the plan does not hold.
    """
    eager = with_contiguous_norm_gradients(with_positional_dropout(copy.deepcopy(model).double()))
    x = x.detach().double()
    others = tuple(other.double() if other.is_floating_point() else other for other in others)
    example = x.clone().requires_grad_(input_grad)
    net = sft.compile(copy.deepcopy(model).double(), [example, *others], budget=budget, options=options)
    plan, reading = plan_of(net, x.clone().requires_grad_(input_grad), *others), _Reading()
    worst = _compare(net, eager, x, others, tolerance=tolerance, steps=steps, input_grad=input_grad, seed=seed, last=reading)
    measured, flops, plan = reading.check(plan, budget, to_the_byte=to_the_byte)
    return ExactReport(
        output_error=worst["output"],
        input_grad_error=worst["input_grad"],
        param_grad_error=worst["param_grad"],
        buffer_error=worst["buffer"],
        param_error=worst["param"],
        measured_peak_bytes=measured,
        projected_peak_bytes=plan.projected_peak_bytes,
        flops=flops,
        plan=plan,
    )


def rounding_of_eager(
    model: nn.Module, x: Tensor, *others: Tensor, steps: int = 2, input_grad: bool = True, seed: int = 0, weights: bool = False
) -> float:
    """Sensitivity of eager PyTorch's results to rounding.

    The largest error, by the rule in this module's docstring and over the steps that :func:`assert_exact` takes, of eager PyTorch on the
    neighbouring float64 numbers of ``x``, and of eager PyTorch in channels-last layout, against eager PyTorch on ``x``. An ill-conditioned
    model (a norm over two values, a gradient that cancels) amplifies every rounding error by as much; no order of summation is more
    accurate. With ``weights`` also on the neighbouring numbers of the parameters, for results that do not depend on ``x``.
    """
    others = tuple(other.double() if other.is_floating_point() else other for other in others)
    largest = 0.0
    version_guards = [(_nudged, _as_it_is), (_channels_last, _channels_last), *([(_as_it_is, _nudged)] if weights else [])]
    for of_input, of_weights in version_guards:
        eager, other = (with_contiguous_norm_gradients(with_positional_dropout(copy.deepcopy(model).double())) for _ in range(2))
        for parameter in other.parameters():
            parameter.data = of_weights(parameter.data)
        worst = _compare(
            _Witness(other, of_input), eager, x.detach().double(), others, tolerance=math.inf, steps=steps, input_grad=input_grad, seed=seed
        )
        largest = max(largest, *worst.values())
    return largest


class _Witness:
    """A model with a transformed input."""

    def __init__(self, model: nn.Module, of_input: Callable[[Tensor], Tensor]) -> None:
        self.model, self.of_input = model, of_input

    def __call__(self, x: Tensor, *others: Tensor) -> object:
        return self.model(self.of_input(x), *others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _nudged(x: Tensor) -> Tensor:
    """Each element half a time one float64 above, half a time one below."""
    up = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    number = x.detach()
    return x + (torch.nextafter(number, torch.where(up, math.inf, -math.inf).to(x)) - number)


def _channels_last(x: Tensor) -> Tensor:
    """In channels-last layout, where it is an image or a volume; what follows from it is, too."""
    return x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format))


def _compare(
    net: Any,
    eager: nn.Module,
    x: Tensor,
    others: Sequence[Tensor],
    *,
    tolerance: float,
    steps: int,
    input_grad: bool,
    seed: int,
    last: _Reading | None = None,
) -> dict[str, float]:
    """Train ``net`` and ``eager`` side by side, and read the last of ``net``'s steps; the worst errors.

    Raises:
        InexactError: naming what differs, by how much.
        AssertionError: the two differ in more than numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    worst = dict.fromkeys(("output", "input_grad", "param_grad", "buffer", "param"), 0.0)

    for step in range(steps):
        if step:
            x = torch.empty_like(x).copy_(torch.randn(x.shape, dtype=x.dtype, generator=generator))  # laid out as the first
        x_eager = x.clone().requires_grad_(input_grad)

        if isinstance(net, _Witness):
            reseed(net.model, seed_of(seed + step))
        reseed(eager, seed_of(seed + step))
        torch.manual_seed(seed + step)
        tree_eager = eager(x_eager, *others)
        y_eager = _leaves(tree_eager)
        # Integer outputs (labels, masks) have no gradient; the random numbers for them are not used.
        gradients = [torch.randn(y.shape, dtype=y.dtype if y.requires_grad else x.dtype, generator=generator) for y in y_eager]
        _backward(y_eager, gradients)

        surroundings = _surroundings(is_first=step == 0, reading=last if step == steps - 1 else None)
        with surroundings():
            inputs = _own(x, others, input_grad=input_grad)
            tree_ours = net(*inputs)
        y_ours = _leaves(tree_ours)
        assert pytree.tree_structure(tree_ours) == pytree.tree_structure(tree_eager), "the outputs' structure differs"
        assert [y.requires_grad for y in y_ours] == [y.requires_grad for y in y_eager], "which outputs require grad differs"
        before = [y.detach().clone() for y in y_ours]
        values, directions = _once(y_ours, gradients)
        with surroundings():
            _backward(values, [direction.clone() for direction in directions])

        at, x_ours = f"step {step}, ", inputs[0]
        errors_of: dict[str, dict[str, float]] = {
            "output": {f"output {i}": relative_error(a, b) for i, (a, b) in enumerate(zip(y_ours, y_eager, strict=True))},
            "input_grad": {},
            "param_grad": gradient_errors(param_grads(net), param_grads(eager)),
            "buffer": {},
        }
        assert all(torch.equal(y, copied) for y, copied in zip(y_ours, before, strict=True)), f"{at}the backward changed an output"
        assert (x_ours.grad is None) == (x_eager.grad is None), f"{at}only one of the two has an input gradient"
        if x_ours.grad is not None and x_eager.grad is not None:
            floor = _SMALLEST_SHARE * max(
                (float(g.abs().max()) for g in param_grads(eager).values() if g is not None and g.numel()), default=0.0
            )
            scale = max(floor, float(x_eager.grad.abs().max()))
            errors_of["input_grad"]["input"] = relative_error(x_ours.grad, x_eager.grad, scale=scale)
        assert torch.equal(x_ours, x), f"{at}the input was changed"
        assert all(map(torch.equal, inputs[1:], others)), f"{at}an input was changed"
        buffers = dict(net.named_buffers())
        assert buffers.keys() == dict(eager.named_buffers()).keys(), f"{at}the buffers' names differ"
        errors_of["buffer"] = {name: relative_error(buffers[name], b) for name, b in eager.named_buffers()}
        for what, errors in errors_of.items():
            try:
                worst[what] = max(worst[what], _worst(errors, tolerance, at + what))
            except InexactError as error:
                if what not in ("input_grad", "param_grad"):
                    raise
                name = max(errors, key=lambda name: errors[name])
                verdict = _verdict(eager, name, x_eager, x_ours.grad, net, others, gradients, seed + step)
                raise InexactError(f"{error}. Along the difference of the gradients of {name}, {verdict}") from None

        largest = max((float(g.abs().max()) for g in param_grads(eager).values() if g is not None and g.numel()), default=0.0)
        for module in (eager, net):
            _sgd_step(module, _LEARNING_RATE / max(largest, 1e-300))
            module.zero_grad(set_to_none=True)
        moved = gradient_errors(dict(net.named_parameters()), dict(eager.named_parameters()))
        worst["param"] = max(worst["param"], _worst(moved, tolerance, at + "parameter after the update"))
    return worst


def _verdict(
    eager: nn.Module,
    name: str,
    x: Tensor,
    input_grad: Tensor | None,
    net: Any,
    others: Sequence[Tensor],
    gradients: Sequence[Tensor],
    seed: int,
) -> Verdict:
    """The verdict of finite differences on two gradients of the input, or of the parameter ``name``."""
    ours = input_grad if name == "input" else param_grads(net)[name]
    theirs = x.grad if name == "input" else param_grads(eager)[name]
    assert ours is not None and theirs is not None

    def function(value: Tensor) -> Tensor:
        parameter = None if name == "input" else eager.get_parameter(name)
        before, state = None if parameter is None else parameter.data, {key: buffer.clone() for key, buffer in eager.named_buffers()}
        reseed(eager, seed_of(seed))
        torch.manual_seed(seed)
        if parameter is not None:
            parameter.data = value
        outputs = _leaves(eager(value if parameter is None else x.detach(), *others))
        if parameter is not None and before is not None:
            parameter.data = before
        for key, buffer in eager.named_buffers():
            buffer.copy_(state[key])
        return torch.stack([(y * g).sum() for y, g in zip(outputs, gradients, strict=True) if y.is_floating_point()]).sum()

    return judge_gradients(function, x if name == "input" else eager.get_parameter(name), ours, theirs)


def _surroundings(*, is_first: bool, reading: _Reading | None) -> Callable[[], AbstractContextManager[None]]:
    """Contexts of the steps: the first in poisoned memory, the last under the meter."""

    @contextmanager
    def entered() -> Iterator[None]:
        with poisoned() if is_first else nullcontext(), reading.on() if reading is not None else nullcontext():
            yield

    return entered


def _once(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Distinct outputs, each with the sum of its gradients: a plan counts values, and a tensor may be returned twice."""
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    for y, gradient in zip(outputs, gradients, strict=True):
        if y.requires_grad:
            sums[id(y)] = (y, sums[id(y)][1] + gradient if id(y) in sums else gradient)
    return [y for y, _ in sums.values()], [gradient for _, gradient in sums.values()]
