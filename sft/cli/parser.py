"""Options of ``python -m sft``; imports no torch, so that ``--help`` and mistakes in a command line are answered at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import sft
from sft.planner.options import STRATEGIES, WEIGHT_MODES

__all__ = ["DEFAULT_TUNED_DTYPES", "EXAMPLES", "TUNED_DTYPES", "UsageError", "build_parser", "parse_command_line"]

#: Element types that most layers are trained in.
TUNED_DTYPES = ("bfloat16", "float16", "float32")
#: Element types that ``tune`` measures if none is named.
DEFAULT_TUNED_DTYPES = ("bfloat16", "float32")


#: Output without a command.
EXAMPLES = """\
Exact training on images that do not fit the device. Examples:

  python -m sft doctor
      installed versions, devices, and a self-check
  python -m sft check resnet18 --input 1x3x4096x4096
      operators that run in strips, operators that cannot, and remedies
  python -m sft plan resnet18 --input 1x3x20000x20000 --budget 8GiB --frozen-norms
      memory, time and schedule of a training step, without running it
  python -m sft plan resnet18 --input 1x3x20000x20000 --budget 8GiB --frozen-norms --html plan.html
      the same as a page with a picture
  python -m sft tune --minutes 10
      measure on this machine's GPU which kernels are faster than PyTorch's

resnet18 is a model of torchvision; package.module:function names your own. python -m sft COMMAND --help lists the options of a command, and
python -m sft.wsi the commands for whole slides."""


class UsageError(Exception):
    """The command line is invalid."""


class _Parser(argparse.ArgumentParser):
    """Parser with errors of one line, as all errors of the commands."""

    def parse_known_args(  # type: ignore[override]  # overloads of the base class differ in the type of the namespace alone
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse arguments; a misspelt option is an error with the option that it resembles, also where it leaves a required one out."""
        own = args or () if self._subparsers is None else takewhile(lambda argument: argument.startswith("-"), args or ())
        for name in (argument.partition("=")[0] for argument in own if argument.startswith("--") and len(argument) > 2):
            known = list(self._option_string_actions)
            is_known = any(option.startswith(name) for option in known)
            close = [] if is_known else get_close_matches(name, known, n=1, cutoff=0.75)
            if close:
                self.error(f"unrecognized option {name}; did you mean {close[0]}?")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        example = f". {self.epilog}" if self.epilog and message.startswith("the following arguments are required") else ""
        end = "" if message.endswith("?") else ";"
        raise UsageError(f"{message}{example}{end} {self.prog} --help lists all options")


def parse_command_line(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of ``python -m sft``.

    Raises:
        UsageError: they are invalid.
    """
    args, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        json_note = "--json prints to standard output and takes no file; " if args.json and not unknown[0].startswith("-") else ""
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; {json_note}python -m sft {args.command} --help lists all options")
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(prog="python -m sft", description="Exact training on images that do not fit the device.")
    parser.add_argument("--version", action="version", version=f"sft {sft.__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="installed versions, devices, and a self-check of a step in strips")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    check = commands.add_parser(
        "check",
        help="operators of a model that run in strips, operators that cannot, and remedies",
        epilog="Example: python -m sft check resnet18 --input 1x3x4096x4096",
    )
    _add_model(check)

    plan = commands.add_parser(
        "plan",
        help="memory, time and schedule of a step, without running it",
        epilog="Example: python -m sft plan resnet18 --input 1x3x4096x4096 --budget 2GiB --frozen-norms",
    )
    _add_model(plan)
    budget = "device memory, such as 11GiB (default: auto, what the device has free, less a margin)"
    plan.add_argument("--budget", default="auto", metavar="BYTES", help=budget)
    device = "kind of device to plan for, which this machine need not have (default: cuda if this machine has one, otherwise cpu)"
    plan.add_argument("--device", choices=("cpu", "cuda"), help=device)
    plan.add_argument("--strategy", default="auto", choices=STRATEGIES, help="planning strategy (default: auto)")
    plan.add_argument("--halo", default="auto", choices=("auto", "carry", "recompute"), help="source of the halo rows of strips")
    plan.add_argument("--tile", metavar="ROWS[xCOLS]", help="force strips of ROWS rows, and panels of COLS columns")
    host = "host memory for offloading, 0 for none (default: what the host has free; none on the CPU, which shares it)"
    plan.add_argument("--host-budget", metavar="BYTES", help=host)
    plan.add_argument("--link-bandwidth", metavar="BYTES", help="bytes per second between device and host, such as 24GB (default: 10GB)")
    weights = "placement of parameters: on the device (default), streamed from the host, or streamed if no resident plan fits"
    plan.add_argument("--weights", choices=WEIGHT_MODES, default="resident", help=weights)
    plan.add_argument("--time", action="store_true", help="measure the plan's programs on --device to project the time of a step")
    plan.add_argument("--compare", action="store_true", help="print a table of all strategies")
    plan.add_argument("--costs", action="store_true", help="print a line for each segment, with its time")
    plan.add_argument("--full", action="store_true", help="print a block for each segment (default: 40 lines, with the largest segments)")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="plot memory and operations over time: .png, .svg, .pdf, ...")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write a page with a picture, a table of segments and the report: .html")
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
        "--dtype",
        nargs="+",
        choices=TUNED_DTYPES,
        help=f"element types (default: {' '.join(DEFAULT_TUNED_DTYPES)}; with --plan that of the plan)",
    )
    tune.add_argument(
        "--budget", default="11GiB", metavar="BYTES", help="device memory of the plans that provide the programs (default: 11GiB)"
    )
    tune.add_argument("--tile", metavar="ROWS[xCOLS]", help="force strips of ROWS rows, and panels of COLS columns")
    tune.add_argument("--plan", type=Path, metavar="FILE", help="plan of MODEL as JSON (plan --out): measure the kernels of its strips")
    limit = tune.add_mutually_exclusive_group()
    limit.add_argument("--seconds", type=_positive_number, metavar="N", help="time limit; the same command resumes the measurement")
    limit.add_argument("--minutes", type=_positive_number, metavar="N", help="the same in minutes")
    tune.add_argument("--dry-run", action="store_true", help="list the kernels that would be measured, in order; needs no GPU")
    tune.add_argument("--again", action="store_true", help="measure the entries of the table again")
    tune.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the table (default: the one that backend='auto' reads)")
    return parser


def _positive_number(text: str) -> float:
    """Parse a positive number."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return number


def _add_model(parser: argparse.ArgumentParser, *, is_needed: bool = True) -> None:
    about = "package.module:callable (it is imported and called), or the name of a model of torchvision or timm"
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
