"""Commands of ``python -m sft.wsi`` by name.

Parsed options become arguments of the functions in `commands`, `compare_commands` and `inspect_commands`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jsonargparse import Namespace
from rich.console import Console

from sft.wsi import commands, compare_commands, map_commands
from sft.wsi import inspect_commands as inspection
from sft.wsi.cli import make_config, read_config
from sft.wsi.config import RanksConfig
from sft.wsi.eval.predict import InferenceRequest, config_path
from sft.wsi.train.distributed import joined
from sft.wsi.train.size_plan import parse_size

__all__ = ["COMMANDS"]


def _plan(options: Namespace, console: Console) -> commands.CommandResult:
    config = make_config(options)
    with joined(config.ranks, plans_only=True) as ranks:
        return commands.plan(config, parse_size(options.size) if options.size else None, console, ranks, trust=options.trust)


def _train(options: Namespace, console: Console) -> commands.CommandResult:
    config = make_config(options)
    with joined(config.ranks, plans_only=options.dry_run) as ranks:
        return commands.train(config, console, is_dry=options.dry_run, num_draws=options.bootstrap, ranks=ranks, trust=options.trust)


def _evaluate(options: Namespace, console: Console) -> commands.CommandResult:
    with joined(RanksConfig(bands=options.bands)) as ranks:
        selection = ranks.from_first(lambda: _selection(options))
        return commands.evaluate(selection, console, num_draws=options.bootstrap, ranks=ranks, maps=options.maps or ())


def _folds(options: Namespace, console: Console) -> commands.CommandResult:
    config = make_config(options)
    with joined(config.ranks) as ranks:
        return compare_commands.folds(
            config, console, num_folds=options.folds, num_draws=options.bootstrap, ranks=ranks, trust=options.trust
        )


def _selection(options: Namespace, *, needs_masks: bool = True) -> InferenceRequest:
    return InferenceRequest(
        run=options.run,
        config=read_config(config_path(options.run)),
        split=options.split,
        csv=options.csv,
        slides=options.slides,
        checkpoint=options.checkpoint,
        device=options.device,
        budget=options.budget,
        out=options.out,
        trust=options.trust,
        needs_masks=needs_masks,
    )


#: Functions of all commands.
COMMANDS: Mapping[str, Callable[[Namespace, Console], commands.CommandResult]] = {
    "doctor": lambda options, console: inspection.doctor(console),
    "slide-info": lambda options, console: inspection.slide_information(options.slides, console),
    "tissue": lambda options, console: inspection.tissue(
        options.slides, options.out, console, mpp=options.mpp, slide_mpp=options.slide_mpp, overwrite=options.overwrite
    ),
    "plan": _plan,
    "train": _train,
    "evaluate": _evaluate,
    "folds": _folds,
    "compare": lambda options, console: compare_commands.compare(options.runs, console, split=options.split, out=options.out),
    "report": lambda options, console: compare_commands.report(options.run, console),
    "predict": lambda options, console: map_commands.predict(
        _selection(options, needs_masks=False),
        options.files,
        console,
        kind=options.kind,
        formats=options.formats or (),
        dtype=options.dtype,
        overwrite=options.overwrite,
    ),
    "heatmap": lambda options, console: commands.heatmap(
        _selection(options, needs_masks=False),
        console,
        names=options.names,
        classes=options.classes,
        saliency=options.saliency,
        num_crops=options.crops,
        crop_px=options.crop_px,
    ),
}
