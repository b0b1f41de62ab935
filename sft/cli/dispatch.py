"""Commands of ``python -m sft``: parsed options become a request, which its command runs."""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn

from sft.api.memory_limits import is_automatic
from sft.cli.doctor import show_doctor
from sft.cli.parser import DEFAULT_TUNED_DTYPES
from sft.cli.plans import (
    ExampleInput,
    PlanRequest,
    compare_strategies,
    load_model,
    parse_input,
    parse_tile,
    show_check,
    show_pareto,
    show_plan,
)
from sft.cli.tune import STANDARD_STRIP_ROWS, TuneRequest, list_cases, show_tune, standard_models
from sft.common.byte_units import parse_bytes, parse_rate
from sft.common.errors import InputError, MissingValuesError
from sft.planner.options import STRATEGIES, Options
from sft.planner.plan import Plan

__all__ = ["run_command"]


def run_command(args: argparse.Namespace, console: Console) -> int:
    """Run the command that was named; returns the exit code.

    Raises:
        SftError, OSError: it failed.
    """
    if args.command == "doctor":
        return show_doctor(console, as_json=args.json)
    if args.command in ("plan", "tune"):
        _check_byte_options(args)
    if args.command == "tune":
        request = _tune_request(args)
        return list_cases(request, console, as_json=args.json) if args.dry_run else show_tune(request, console, as_json=args.json)
    if args.command == "plan":
        _check_unused_options(args)
    is_timed = getattr(args, "time", False)
    try:
        return _run_on_model(args, console, meta=not is_timed)  # a model on the meta device can be planned, but not timed
    except MissingValuesError:
        return _run_on_model(args, console, meta=False)


def _run_on_model(args: argparse.Namespace, console: Console, *, meta: bool) -> int:
    """Run `plan` or `check`.

    Raises:
        MissingValuesError: ``forward`` reads values, which a model on the meta device lacks.
    """
    model = load_model(args.model, _parse_model_arguments(args.model_args), meta=meta)
    model.train(not args.inference)
    if args.frozen_norms:
        _freeze_norms(model)
    inputs = tuple(parse_input(text) for text in args.input)
    if args.command == "check":
        return show_check(model, inputs, console, as_json=args.json)
    if args.inference:
        model.requires_grad_(False)
    options = Options(
        strategy=args.strategy,
        halo=args.halo,
        tile=parse_tile(args.tile) if args.tile else None,
        host_budget=0 if args.host_budget == "0" else args.host_budget,
        link_bandwidth=args.link_bandwidth,
        weights=args.weights,
        profile="measure" if args.time else "auto",
        progress=args.time,
    )
    request = PlanRequest(
        model=model,
        inputs=inputs,
        budget=args.budget,
        device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        options=options,
        out=args.out,
        plot=args.plot,
        html=args.html,
        pareto=args.pareto,
        budgets=tuple(args.budgets),
        costs=args.costs,
        full=args.full,
        mesh=_mesh(args),
        reads=args.read,
        link_bytes_per_second=None if args.link is None else parse_rate(args.link),
    )
    if args.pareto is not None:
        # Options about strips exclude the plain strategy.
        names = STRATEGIES if args.compare else (args.strategy,) if args.tile or args.halo != "auto" else (args.strategy, "none")
        return show_pareto(request, console, as_json=args.json, strategies=names)
    show = compare_strategies if args.compare else show_plan
    return show(request, console, as_json=args.json)


def _freeze_norms(model: nn.Module) -> None:
    """Put norms with running statistics into evaluation mode."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.eval()


def _check_unused_options(args: argparse.Namespace) -> None:
    """Refuse options that another option makes ineffective."""
    if args.budgets and args.pareto is None:
        raise InputError("--budgets is for --pareto; give --pareto, too, or a single --budget")
    multi_plan_option = "--pareto" if args.pareto is not None else "--compare" if args.compare else None
    unused = [f"--{name}" for name in ("out", "plot", "html", "costs", "full") if getattr(args, name)]
    if multi_plan_option is not None and unused:
        raise InputError(f"{' and '.join(unused)}: for a single plan, and {multi_plan_option} makes several; leave one of them out")


def _check_byte_options(args: argparse.Namespace) -> None:
    """Parse byte sizes in advance, so that an error names the option."""
    options: list[tuple[str, str, Callable[[str], Any]]] = [("--budget", args.budget, parse_bytes)]
    if args.command == "plan":
        options += [("--budgets", text, parse_bytes) for text in args.budgets]
        options += [("--link-bandwidth", args.link_bandwidth, parse_bytes), ("--link", args.link, parse_rate)]
        if args.host_budget != "0":
            options.append(("--host-budget", args.host_budget, parse_bytes))
    for option, text, parse in options:
        if text is None or is_automatic(text):
            continue
        try:
            parse(text)
        except InputError as error:
            raise InputError(f"{option} {text}: {error}") from error


def _mesh(args: argparse.Namespace) -> tuple[int, int] | None:
    """Replicas and bands, if ``--ranks`` is given."""
    if args.ranks is None:
        if args.replicas != 1 or args.link is not None:
            raise InputError("--replicas and --link are for --ranks; give --ranks, too")
        return None
    if args.compare or args.pareto is not None or args.time:
        raise InputError("--ranks plans for a mesh, which has one strategy; leave out --compare, --pareto and --time")
    if min(args.replicas, args.ranks) < 1:
        raise InputError(f"--replicas {args.replicas}, --ranks {args.ranks}: give numbers of at least 1")
    return args.replicas, args.ranks


def _tune_request(args: argparse.Namespace) -> TuneRequest:
    """The request of ``tune``: about a named model, or about layers that most networks have."""
    options = Options(tile=parse_tile(args.tile) if args.tile else None)
    dtypes, budget, plan = tuple(args.dtype or DEFAULT_TUNED_DTYPES), args.budget, None
    if args.model is None:
        if args.input or args.model_args or args.plan:
            raise InputError("--input, --model-args and --plan need a model; name one")
        models = standard_models()
    else:
        if not args.input:
            raise InputError(f"tune {args.model}: give the shape of its input, such as --input 1x3x2048x2048")
        model = load_model(args.model, _parse_model_arguments(args.model_args))
        model.train(not args.inference)
        if args.frozen_norms:
            _freeze_norms(model)
        models = [(model, tuple(parse_input(text) for text in args.input))]
    if args.plan is not None:
        plan, budget = _plan_to_tune(args, models[0][1])
        dtypes = tuple(args.dtype or (plan.dtype,))
    seconds = args.seconds if args.minutes is None else 60 * args.minutes
    return TuneRequest(
        models=models,
        dtypes=dtypes,
        options=options,
        budget=budget,
        folder=args.out,
        again=args.again,
        limit_seconds=math.inf if seconds is None else seconds,
        strip_rows=STANDARD_STRIP_ROWS if args.model is None and not args.tile else (),
        plan=plan,
    )


def _plan_to_tune(args: argparse.Namespace, inputs: Sequence[ExampleInput]) -> tuple[Plan, int]:
    """The plan of ``tune --plan``, and a budget that it fits.

    Raises:
        InputError: the file is not a plan, or one for other inputs.
    """
    if args.tile:
        raise InputError("--tile forces strips, and --plan has strips; leave one of them out")
    try:
        plan = Plan.from_json(args.plan.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--plan {args.plan}: cannot read it ({error}); write a plan with python -m sft plan ... --out FILE") from error
    shapes = tuple(tuple(each.shape) if isinstance(each, torch.Tensor) else tuple(each) for each in inputs)
    if plan.input_shapes != shapes:
        raise InputError(f"--plan {args.plan}: it is for inputs of shape {plan.input_shapes}, --input gives {shapes}; give the same")
    return plan, max(plan.budget_bytes, plan.total_bytes)


def _parse_model_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``num_classes=2 width=0.5 name=text``."""
    arguments = {}
    for text in texts:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name.isidentifier():
            raise InputError(f"--model-args {text!r}: write name=value, such as num_classes=2")
        if name in arguments:
            raise InputError(f"--model-args: {name} is given twice; leave one")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments
