"""Progress: bars on a terminal, otherwise one line per epoch, and events for TensorBoard."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sft.common.errors import InputError
from sft.common.installation import install_command

__all__ = ["Reporter"]


class Reporter:
    """Reporter of a run's progress.

    Args:
        console: output; bars are drawn if it is a terminal.
        num_epochs: of the run.
        events: folder for TensorBoard's events. Default: `None` (none)

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, console: Console, num_epochs: int, *, events: Path | None = None) -> None:
        self._console, self._num_epochs = console, num_epochs
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}"),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._bar: TaskID | None = None
        self._writer: Any = None
        if events is not None:
            try:
                self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(events))
            except ImportError as error:
                raise InputError(f"TensorBoard is missing ({error}). Install it with: {install_command('tensorboard')}") from error

    def __enter__(self) -> Reporter:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()
        if self._writer is not None:
            self._writer.close()

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start_epoch(self, epoch: int, num_slides: int, position: int) -> None:
        """An epoch begins, or goes on at a position."""
        self._start(f"epoch {epoch + 1} of {self._num_epochs}", num_slides, position)

    def start_checks(self, num_slides: int) -> None:
        """Start of the check of all slides."""
        self._start("opening slides", num_slides, 0)

    def start_validation(self, num_slides: int) -> None:
        """Validation begins."""
        self._start("validation", num_slides, 0)

    def advance(self, num_slides: int = 1) -> None:
        """Slides are done."""
        if self._bar is not None:
            self._bars.advance(self._bar, num_slides)

    def step(self, row: Mapping[str, Any]) -> None:
        """An optimizer step is done: ``step``, ``loss``, ``lr``, ``grad_norm``."""
        if self._bar is not None:
            self._bars.update(self._bar, told=f"loss {row['loss']:.4f}  lr {row['lr']:.2e}")
        self._events("train", row, row["step"])

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is done: its row of metrics.csv, and ``seconds``."""
        told = ", ".join(f"{name} {value:.4f}" for name, value in row.items() if isinstance(value, float) and name != "seconds")
        self.note(f"epoch {row['epoch']} of {self._num_epochs}: {told}, {row['seconds']:.1f} s")
        self._events("epoch", row, row["epoch"])

    def _start(self, text: str, total: int, completed: int) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._bar = self._bars.add_task(text, total=total, completed=completed, told="")

    def _events(self, group: str, row: Mapping[str, Any], number: int) -> None:
        if self._writer is not None:
            for name, value in row.items():
                if isinstance(value, float) and math.isfinite(value):
                    self._writer.add_scalar(f"{group}/{name}", value, number)
