"""Progress: bars on a terminal, otherwise a line per epoch and one every few minutes, and events for TensorBoard.

Progress within a slide comes from the executor (`sft.torch_runtime.pass_statistics`): the FLOPs of the strips that are done, of those of
the plan.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sft.common.errors import InputError
from sft.common.installation import install_command
from sft.common.terminal import print_text
from sft.common.terminal.progress_display import hidden
from sft.torch_runtime.pass_statistics import report_flops
from sft.wsi.run.estimate import RunEstimate, about_text, duration_text

__all__ = ["Reporter"]

#: Seconds between two lines of a log, and between two updates of a bar.
_LOG_SECONDS, _BAR_SECONDS = 180.0, 0.25
#: Remaining seconds from which the first measured estimate is a line of its own.
_LONG_SECONDS = 300.0


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
            TextColumn("{task.fields[status]}"),
        )
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._bar: TaskID | None = None
        self._stack = ExitStack()
        self._estimate: RunEstimate | None = None
        self._text, self._total, self._completed, self._loss_text, self._lr = "", 0, 0, "", ""
        #: of the current slide: work, FLOPs, and FLOPs that are done
        self._slide: tuple[float, int] | None = None
        self._slide_flops = 0
        self._started = self._shown = self._logged = time.monotonic()
        self._has_shown_total = False
        self._writer: Any = None
        self._new_writer: Callable[[], Any] | None = None  # at the first event: a run that is refused writes nothing
        if events is not None:
            try:
                self._new_writer = partial(importlib.import_module("torch.utils.tensorboard").SummaryWriter, str(events))
            except ImportError as error:
                raise InputError(f"TensorBoard is missing ({error}). Install it with: {install_command('tensorboard')}") from error

    def __enter__(self) -> Reporter:
        self._bars.start()
        self._stack.enter_context(hidden())
        if not self._console.quiet:
            self._stack.enter_context(report_flops(self._note_flops))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        self._bars.stop()
        if self._writer is not None:
            self._writer.close()

    def note(self, text: str) -> None:
        """Print a line."""
        print_text(self._console, text)

    def start_epoch(self, epoch: int, num_slides: int, position: int) -> None:
        """An epoch begins, or resumes at a position."""
        self._start(f"epoch {epoch + 1} of {self._num_epochs}", num_slides, position)

    def start_checks(self, num_slides: int) -> None:
        """Start of the check of all slides."""
        self._start("opening slides", num_slides, 0)

    def start_validation(self, num_slides: int, epoch: int) -> None:
        """Start of the validation after an epoch, counted from 0."""
        self._start(f"validation of epoch {epoch + 1} of {self._num_epochs}", num_slides, 0)

    def start_predictions(self, num_slides: int) -> None:
        """Start of an evaluation."""
        self._start("evaluation", num_slides, 0)

    def start_run(self, estimate: RunEstimate) -> None:
        """Start of the slides; the estimate is updated, and reported, as they are done."""
        self._estimate = estimate
        estimate.start()

    def start_slide(self, work: float, flops: int) -> None:
        """Start of a slide.

        Args:
            work: of the slide, in the unit of the estimate.
            flops: of its plan.
        """
        self._slide, self._slide_flops = (work, flops), 0

    def advance(self, num_slides: int = 1, *, others: float = 0.0) -> None:
        """Slides are done.

        Args:
            num_slides: number of slides. Default: 1
            others: work of the slides of other ranks among them. Default: 0
        """
        rank_work = self._slide[0] if self._slide is not None and not others else 0.0
        if self._estimate is not None:
            self._estimate.note(rank_work, others)
        self._slide, self._completed = None, self._completed + num_slides
        self._update()
        self._log()

    def step(self, row: Mapping[str, Any]) -> None:
        """An optimizer step is done: ``step``, ``loss``, ``lr``, ``grad_norm``."""
        self._loss_text = f"loss {row['loss']:.4f}"
        self._lr = f"  lr {row['lr']:.2e}"
        self._update()
        self._events("train", row, row["step"])

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is done: its row of metrics.csv, and ``seconds``."""
        metrics_text = ", ".join(f"{name} {value:.4f}" for name, value in row.items() if isinstance(value, float) and name != "seconds")
        self.note(f"epoch {row['epoch']} of {self._num_epochs}: {metrics_text}, {row['seconds']:.1f} s")
        self._events("epoch", row, row["epoch"])

    def _start(self, text: str, total: int, completed: int) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
        self._text, self._total, self._completed, self._slide = text, total, completed, None
        self._bar = self._bars.add_task(text, total=total, completed=completed, status="")

    def _note_flops(self, flops: int) -> None:
        """A program has run: called for each strip."""
        if self._slide is None:
            return
        self._slide_flops += flops
        now = time.monotonic()
        if now - self._shown >= _BAR_SECONDS:
            self._shown = now
            self._update()
            self._log()

    @property
    def _slide_share(self) -> float:
        """Share of the current slide that is done. Planning may time programs, so it is limited."""
        return min(1.0, self._slide_flops / max(1, self._slide[1])) if self._slide is not None else 0.0

    def _update(self) -> None:
        """Update the bar."""
        if self._bar is not None and not self._bars.disable:
            share = self._slide_share
            status = (f"slide {100 * share:.0f} %  " if self._slide is not None else "") + self._loss_text + self._lr
            if self._estimate is not None and self._estimate.is_measured:
                status += f"  run: {duration_text(self._seconds_left())} left"
            self._bars.update(self._bar, completed=self._completed + share, status=status)

    def _seconds_left(self) -> float:
        assert self._estimate is not None
        return self._estimate.seconds_left(self._slide[0] * self._slide_share if self._slide is not None else 0.0)

    def _log(self) -> None:
        """Print a line if there is no terminal and the last one is old, or if the duration of the run is known for the first time."""
        if self._console.is_terminal or not self._text:
            return
        estimate, now = self._estimate, time.monotonic()
        seconds_left = 0.0 if estimate is None else self._seconds_left()
        is_new = estimate is not None and estimate.is_measured and not self._has_shown_total and seconds_left >= _LONG_SECONDS
        if not is_new and now - self._logged < _LOG_SECONDS:
            return
        self._logged, self._has_shown_total = now, self._has_shown_total or is_new
        share = f" ({100 * self._slide_share:.0f} % of it done)" if self._slide is not None else ""
        place = f"slide {min(self._completed + (self._slide is not None), self._total)} of {self._total}{share}"
        source = "measured" if estimate is not None and estimate.is_measured else "estimated from the plan"
        left = f", {about_text(seconds_left)} left ({source})" if seconds_left > 0 else ""
        metrics_text = f", {self._loss_text}" if self._loss_text else ""
        self.note(f"{self._text}, {place}: {duration_text(now - self._started)} elapsed{left}{metrics_text}")

    def _events(self, group: str, row: Mapping[str, Any], number: int) -> None:
        if self._writer is None and self._new_writer is not None:
            self._writer = self._new_writer()
        if self._writer is not None:
            for name, value in row.items():
                if isinstance(value, float) and math.isfinite(value):
                    self._writer.add_scalar(f"{group}/{name}", value, number)
