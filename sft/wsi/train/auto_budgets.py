"""Automatic budgets of a run: ``model.budget: auto`` and ``data.host_budget: auto`` as bytes.

They are read once, from the free memory when a command starts. A resumed run needs the same plan for the same bits, and free memory
changes; so the bytes are in the run's config.yaml and its checkpoints, and a resumed run takes those of its checkpoint. Several
ranks take the least budget of any of them; each has its own cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import sft
from sft.api.memory_limits import AUTO, automatic_budget, is_automatic
from sft.common.byte_units import format_bytes, parse_bytes
from sft.common.errors import BudgetError, InputError
from sft.wsi.config import Config
from sft.wsi.data.cache_budget import cache_budget
from sft.wsi.train.checkpoint import CheckpointFolder
from sft.wsi.train.distributed import SINGLE_RANK, Ranks

__all__ = ["ResolvedBudgets", "resolve_budgets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedBudgets:
    """Configuration with budgets in bytes.

    Attributes:
        config: with budgets in bytes.
        budget_note: origin of an automatic ``model.budget``; empty for one in bytes.
        lines: about automatic budgets, for people.
    """

    config: Config
    budget_note: str = ""
    lines: tuple[str, ...] = ()

    def noted(self, plan: sft.Plan) -> sft.Plan:
        """A plan that states the origin of its budget."""
        return replace(plan, budget_note=self.budget_note) if self.budget_note else plan


def resolve_budgets(config: Config, ranks: Ranks = SINGLE_RANK, *, run: Path | None = None) -> ResolvedBudgets:
    """Replace automatic budgets by bytes.

    Args:
        config: of a command.
        ranks: ranks that share the work. Default: this process alone
        run: folder of a run that may be resumed, with the budget of its checkpoint. Default: `None`

    Raises:
        InputError: the free memory of the device is unknown.
        BudgetError: no memory is free.
    """
    lines: list[str] = []
    if is_automatic(config.data.host_budget):
        cache_bytes, note = cache_budget(config)
        config = replace(config, data=replace(config.data, host_budget=cache_bytes))
        lines.append(f"data.host_budget auto: {note}")
    if not is_automatic(config.model.budget):
        return ResolvedBudgets(config=config, lines=tuple(lines))
    recorded = None if run is None else ranks.from_first(lambda: _recorded_budget(run))
    if recorded is not None:
        budget_bytes, note = parse_bytes(recorded), f"{format_bytes(parse_bytes(recorded))}, as in the checkpoint of this run"
    else:
        budget_bytes, note = _least(_device_budget(config), ranks)
    config = replace(config, model=replace(config.model, budget=budget_bytes))
    lines.append(f"model.budget auto: {note}")
    return ResolvedBudgets(config=config, budget_note=f"auto: {note}", lines=tuple(lines))


def _device_budget(config: Config) -> tuple[int, str]:
    """Bytes of ``model.budget`` on this rank, and their origin."""
    options = sft.Options(host_budget=config.data.host_budget)  # the cached rows are in the same memory on the CPU
    try:
        budget_bytes, note = automatic_budget(torch.device(config.train.device), options)
    except (InputError, BudgetError) as error:
        text = str(error).replace("budget 'auto'", "model.budget auto", 1)
        if isinstance(error, BudgetError):
            raise BudgetError(text, needed_bytes=error.needed_bytes) from error
        raise InputError(text) from error
    return budget_bytes, note.removeprefix("budget auto: ")


def _least(own: tuple[int, str], ranks: Ranks) -> tuple[int, str]:
    """The least of all ranks."""
    budgets = ranks.gathered(own)
    least = min(budgets)
    return least if len(budgets) == 1 else (least[0], f"{least[1]}, the least of {len(budgets)} ranks")


def _recorded_budget(run: Path) -> Any:
    """``model.budget`` of the newest checkpoint of a run; None without one."""
    newest = CheckpointFolder(run / "checkpoints").newest_state("last")
    recorded = None if newest is None else newest[1].get("settings", {}).get("model.budget")
    return None if recorded is None or recorded == AUTO else recorded
