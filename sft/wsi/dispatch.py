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


def _plan(given: Namespace, console: Console) -> commands.CommandResult:
    config = make_config(given)
    with joined(config.ranks, plans_only=True) as ranks:
        return commands.plan(config, parse_size(given.size) if given.size else None, console, ranks, trust=given.trust)


def _train(given: Namespace, console: Console) -> commands.CommandResult:
    config = make_config(given)
    with joined(config.ranks, plans_only=given.dry_run) as ranks:
        return commands.train(config, console, is_dry=given.dry_run, num_draws=given.bootstrap, ranks=ranks, trust=given.trust)


def _evaluate(given: Namespace, console: Console) -> commands.CommandResult:
    with joined(RanksConfig(bands=given.bands)) as ranks:
        selection = ranks.from_first(lambda: _selection(given))
        return commands.evaluate(selection, console, num_draws=given.bootstrap, ranks=ranks, maps=given.maps or ())


def _folds(given: Namespace, console: Console) -> commands.CommandResult:
    config = make_config(given)
    with joined(config.ranks) as ranks:
        return compare_commands.folds(config, console, num_folds=given.folds, num_draws=given.bootstrap, ranks=ranks, trust=given.trust)


def _selection(given: Namespace, *, needs_masks: bool = True) -> InferenceRequest:
    return InferenceRequest(
        run=given.run,
        config=read_config(config_path(given.run)),
        split=given.split,
        csv=given.csv,
        slides=given.slides,
        checkpoint=given.checkpoint,
        device=given.device,
        budget=given.budget,
        out=given.out,
        trust=given.trust,
        needs_masks=needs_masks,
    )


#: Functions of all commands.
COMMANDS: Mapping[str, Callable[[Namespace, Console], commands.CommandResult]] = {
    "doctor": lambda given, console: inspection.doctor(console),
    "slide-info": lambda given, console: inspection.slide_information(given.slides, console),
    "tissue": lambda given, console: inspection.tissue(
        given.slides, given.out, console, mpp=given.mpp, slide_mpp=given.slide_mpp, overwrite=given.overwrite
    ),
    "plan": _plan,
    "train": _train,
    "evaluate": _evaluate,
    "folds": _folds,
    "compare": lambda given, console: compare_commands.compare(given.runs, console, split=given.split, out=given.out),
    "report": lambda given, console: compare_commands.report(given.run, console),
    "predict": lambda given, console: map_commands.predict(
        _selection(given, needs_masks=False),
        given.files,
        console,
        kind=given.kind,
        formats=given.formats or (),
        dtype=given.dtype,
        overwrite=given.overwrite,
    ),
    "heatmap": lambda given, console: commands.heatmap(
        _selection(given, needs_masks=False),
        console,
        names=given.names,
        classes=given.classes,
        saliency=given.saliency,
        num_crops=given.crops,
        crop_px=given.crop_px,
    ),
}
