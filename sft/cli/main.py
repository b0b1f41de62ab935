"""The commands and their options.

Exit codes: 0 success; 1 an error, or a negative result (a model that cannot be compiled, a failed self-check); 2 an invalid command line.
An error is printed as one line; ``--debug`` shows its traceback.
"""

from __future__ import annotations

import argparse
import ast
import io
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import sft
from sft.cli.doctor import show_doctor
from sft.cli.plans import PlanRequest, compare_strategies, load_model, parse_input, parse_tile, show_check, show_pareto, show_plan
from sft.cli.tune import DTYPES, TuneRequest, show_tune, standard_models
from sft.common.byte_units import parse_rate
from sft.common.errors import InputError, SftError
from sft.planner.options import STRATEGIES, WEIGHT_MODES, Options

__all__ = ["escape_unencodable_output", "main"]


def escape_unencodable_output() -> None:
    r"""Escape characters that standard output cannot encode, as ``\xe4``; standard error does so by default."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


_PIPED_COLUMNS = 240


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of ``python -m sft``; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    escape_unencodable_output()
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_COLUMNS  # no screen limits the width of tables
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the model's package during import and construction
            code = _run(args, console)
            sys.stdout.flush()
            return code
    except (SftError, OSError) as error:
        if args.debug:
            raise
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1


def _run(args: argparse.Namespace, console: Console) -> int:
    if args.command == "doctor":
        return show_doctor(console, as_json=args.json)
    if args.command == "tune":
        return show_tune(_tune_request(args), console, as_json=args.json)
    if args.command == "plan":
        _check_unused_options(args)
    # A model on the meta device can be planned, but not timed.
    model = load_model(args.model, _parse_model_arguments(args.model_args), meta=not getattr(args, "time", False))
    model.train(not args.inference)
    if args.frozen_norms:
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.eval()
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
        options=options,
        out=args.out,
        plot=args.plot,
        pareto=args.pareto,
        budgets=tuple(args.budgets),
        costs=args.costs,
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


def _check_unused_options(args: argparse.Namespace) -> None:
    """Refuse options that another option makes ineffective."""
    if args.budgets and args.pareto is None:
        raise InputError("--budgets is about --pareto, which draws what they cost; give that, too, or one --budget")
    multi_plan_option = "--pareto" if args.pareto is not None else "--compare" if args.compare else None
    unused = [f"--{name}" for name in ("out", "plot", "costs") if getattr(args, name)]
    if multi_plan_option is not None and unused:
        raise InputError(f"{' and '.join(unused)}: about one plan, and {multi_plan_option} makes several; leave out the one or the other")


def _mesh(args: argparse.Namespace) -> tuple[int, int] | None:
    """Replicas and bands, if ``--ranks`` is given."""
    if args.ranks is None:
        if args.replicas != 1 or args.link is not None:
            raise InputError("--replicas and --link are about --ranks; give that, too")
        return None
    if args.compare or args.pareto is not None or args.time:
        raise InputError("--ranks plans for a mesh, which has one strategy; leave out --compare, --pareto and --time")
    return args.replicas, args.ranks


def _tune_request(args: argparse.Namespace) -> TuneRequest:
    """The request of ``tune``: about a named model, or about layers that most networks have."""
    options = Options(tile=parse_tile(args.tile) if args.tile else None)
    dtypes = tuple(args.dtype)
    if args.model is None:
        if args.input or args.model_args:
            raise InputError("--input and --model-args are about a model; name one")
        models = standard_models()
    else:
        if not args.input:
            raise InputError(f"tune {args.model}: give the shape of its input, such as --input 1x3x2048x2048")
        model = load_model(args.model, _parse_model_arguments(args.model_args))
        model.train(not args.inference)
        models = [(model, tuple(parse_input(text) for text in args.input))]
    return TuneRequest(
        models=models,
        dtypes=dtypes,
        options=options,
        budget=args.budget,
        folder=args.out,
        again=args.again,
        limit_seconds=math.inf if args.seconds is None else args.seconds,
    )


def _parse_model_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``num_classes=2 width=0.5 name=text``."""
    arguments = {}
    for text in texts:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name.isidentifier():
            raise InputError(f"--model-args {text!r}: write name=value, such as num_classes=2")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sft", description="Exact training on images that do not fit the device.")
    parser.add_argument("--version", action="version", version=f"sft {sft.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="installed versions, devices, and a self-check of a step in strips")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    check = commands.add_parser("check", help="operators of a model that run in strips, operators that cannot, and remedies")
    _add_model(check)

    plan = commands.add_parser("plan", help="memory, time and schedule of a step, without running it")
    _add_model(plan)
    plan.add_argument("--budget", default="11GiB", metavar="BYTES", help="device memory (default: 11GiB)")
    plan.add_argument("--strategy", default="auto", choices=STRATEGIES, help="planning strategy (default: auto)")
    plan.add_argument("--halo", default="auto", choices=("auto", "carry", "recompute"), help="source of the halo rows of strips")
    plan.add_argument("--tile", metavar="ROWS[xCOLS]", help="force strips of ROWS rows, and panels of COLS columns")
    host = "host memory for offloading, 0 for none (default: no limit; none with --time on the CPU, which shares it)"
    plan.add_argument("--host-budget", metavar="BYTES", help=host)
    plan.add_argument("--link-bandwidth", metavar="BYTES", help="bytes per second between device and host, such as 24GB (default: 10GB)")
    weights = "placement of parameters: on the device (default), streamed from the host, or streamed if no resident plan fits"
    plan.add_argument("--weights", choices=WEIGHT_MODES, default="resident", help=weights)
    plan.add_argument("--time", action="store_true", help="measure the plan's programs on this machine to project the time of a step")
    plan.add_argument("--compare", action="store_true", help="print a table of all strategies")
    plan.add_argument("--costs", action="store_true", help="print the time of each segment")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="plot memory and operations over time: .png, .svg, .pdf, ...")
    plan.add_argument(
        "--pareto",
        type=Path,
        metavar="FILE",
        help="plan for several budgets and plot time against memory, for all strategies with --compare",
    )
    plan.add_argument("--budgets", nargs="+", default=(), metavar="BYTES", help="for --pareto (default: from plain PyTorch's need down)")
    plan.add_argument("--read", action="store_true", help="inputs are read in strips (slides, arrays) and never resident")
    plan.add_argument("--ranks", type=int, metavar="N", help="split the image over N ranks, each with the budget")
    plan.add_argument("--replicas", type=int, default=1, metavar="N", help="train on N images at once, each on --ranks ranks (default: 1)")
    plan.add_argument("--link", metavar="RATE", help="bandwidth between a rank and the other ranks, such as 400Gbit or 50GB per second")
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the plan as JSON, for sft.Plan.from_json")

    tune = commands.add_parser("tune", help="measure on this machine's GPU which kernels are faster than PyTorch's operators")
    _add_model(tune, is_needed=False)
    tune.add_argument(
        "--dtype", nargs="+", default=("bfloat16", "float32"), choices=DTYPES, help="element types (default: bfloat16 float32)"
    )
    tune.add_argument(
        "--budget", default="11GiB", metavar="BYTES", help="device memory of the plans that provide the programs (default: 11GiB)"
    )
    tune.add_argument("--tile", metavar="ROWS[xCOLS]", help="force strips of ROWS rows, and panels of COLS columns")
    tune.add_argument("--seconds", type=_positive_seconds, metavar="N", help="time limit; the same command resumes the measurement")
    tune.add_argument("--again", action="store_true", help="measure the entries of the table again")
    tune.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the table (default: the one that backend='auto' reads)")
    return parser


def _positive_seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return number


def _add_model(parser: argparse.ArgumentParser, *, is_needed: bool = True) -> None:
    about = "package.module:callable, or the name of a model of torchvision or timm"
    if is_needed:
        parser.add_argument("model", metavar="MODEL", help=about)
    else:
        parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{about}; default: layers that most networks have")
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=is_needed,
        metavar="SHAPE",
        help="such as 1x3x20480x20480; 4x512:int64 for integers; one per input",
    )
    parser.add_argument("--model-args", nargs="*", default=(), metavar="NAME=VALUE", help="arguments of the model's factory")
    parser.add_argument("--frozen-norms", action="store_true", help="put norms with running statistics into evaluation mode")
    parser.add_argument("--inference", action="store_true", help="plan for evaluation mode without gradients")
    parser.add_argument("--json", action="store_true", help="print JSON")
