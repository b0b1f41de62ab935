"""The training loop, which may be killed at any moment and goes on to the same bits.

All that decides a step is either in the last checkpoint (weights, optimizer, loss scale, position) or follows from counters (order of the
slides, augmentation, dropout, learning rate: functions of seed, epoch, slide and step). What a killed process had computed since its last
checkpoint is computed again, from the same numbers, in the same order. A slide of its own never changes the model: ``.grad`` and the
buffers of an unfinished group are dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from sft.errors import BudgetError, SourceError
from sft.nn import WithLoss
from sft.plan.types import Plan
from sft.wsi.ahead import Inputs, SlideAhead, decode_beginning
from sft.wsi.augment import draw_augmentation
from sft.wsi.checkpoint import get_random_state, seed_everything, set_random_state
from sft.wsi.errors import RunInterrupted, TrainingError
from sft.wsi.experiment import Experiment, autocast, calibrate_norms, compile_model, segmentation_loss
from sft.wsi.inference import Predictor, mean_loss
from sft.wsi.interruption import Interruption
from sft.wsi.metrics import evaluate_predictions
from sft.wsi.norms import set_training
from sft.wsi.optimization import learning_rate, make_optimizer
from sft.wsi.progress import Reporter
from sft.wsi.randomness import counter_seed, generator
from sft.wsi.runfolder import RunFolder
from sft.wsi.runstate import Progress, check_same_run, fingerprint, surroundings
from sft.wsi.table import SlideRecord
from sft.wsi.tasks import cox_gradients

__all__ = ["Trainer"]


class _SlideFailed(Exception):
    """A slide cannot be read."""

    def __init__(self, record: SlideRecord, error: SourceError) -> None:
        self.record, self.error = record, error


class Trainer:
    """A run.

    Args:
        experiment: what is trained.
        folder: what it writes to, opened.
        failed: slides to leave out, with what is wrong.
        reporter: is told what happens.
    """

    def __init__(self, experiment: Experiment, folder: RunFolder, failed: dict[str, str], reporter: Reporter) -> None:
        self.experiment, self._folder, self._reporter = experiment, folder, reporter
        self._config, self._task, self._model = experiment.config, experiment.task, experiment.model
        config = self._config
        self._model.to(config.train.device)
        self._optimizer = make_optimizer(self._model, config.train)
        segments = self._task.kind == "segmentation"
        whole = WithLoss(self._model, segmentation_loss) if segments else self._model
        self._net = compile_model(whole, config, optimizer=self._optimizer, num_inputs=2 if segments else 1, skip_repeats=experiment.paints)
        self._scaler = torch.amp.GradScaler(torch.device(config.train.device).type, enabled=config.train.precision == "fp16")
        #: predicts with the model as it is, through plans that training has made already
        self.predictor = Predictor(experiment, self._net)
        self._ahead = SlideAhead()
        self._strips_waited_seconds = 0.0
        self._skipped_flops = self._planned_flops = 0
        self._records = experiment.records("train")
        self.progress = Progress(failed=tuple(failed.items()))
        self._saved: Progress | None = None
        num_groups = math.ceil(len(self._records) / config.train.accumulate)
        self._num_steps = num_groups * config.train.epochs

    def plan(self, record: SlideRecord, *, turned: bool = False) -> Plan:
        """The plan of a training step on a slide.

        Raises:
            BudgetError: it does not fit.
            SourceError: the slide cannot be opened.
        """
        self._set_training()
        augmentation = replace(draw_augmentation(self._config.augment, 0, 0, record.name), quarters=int(turned))
        with autocast(self._config):
            found: Plan = self._net.plan_for(*self._inputs(record, augmentation))
        return found

    def restore(self) -> None:
        """Go to where the run in the folder is, or to its beginning.

        Raises:
            RunFolderError: the folder is of another run, damaged, or cannot be written.
            SourceError: slides to measure statistics on cannot be read.
        """
        checkpoint = self._folder.checkpoints.load("last")
        if checkpoint is None:
            seed_everything(self._config.train.seed)
            num_norms = calibrate_norms(self.experiment, dict(self.progress.failed))
            if num_norms:
                self._reporter.note(f"statistics of {num_norms} norms measured on crops of the training slides, then frozen")
            self._folder.start_steps(0)
            self._save()
            return
        check_same_run(self._folder.path, checkpoint.state, self._config, self.experiment.table)
        self._model.load_state_dict(checkpoint.weights)
        self._optimizer.load_state_dict(checkpoint.state["optimizer"])
        self._scaler.load_state_dict(checkpoint.state["scaler"])
        set_random_state(checkpoint.state["random"])
        failed = {**dict(self.progress.failed), **{name: problem for name, problem in checkpoint.state["progress"]["failed"]}}
        self.progress = replace(Progress(**checkpoint.state["progress"]), failed=tuple(failed.items()))
        self._saved = self.progress
        self._folder.start_steps(self.progress.step)
        self._folder.write_epochs(self.progress.epochs)
        if self.progress.step or self.progress.epoch:
            self._reporter.note(
                f"going on from step {self.progress.step}, epoch {self.progress.epoch + 1}, slide {self.progress.position + 1}"
            )

    def run(self, interruption: Interruption) -> Progress:
        """Train from where the run is to the end; :meth:`restore` comes before.

        Raises:
            RunInterrupted: it was asked to end; its state is saved.
            RunFolderError: the folder cannot be written.
            SourceError: a slide cannot be read, and ``train.on_error`` is not "skip".
            BudgetError: a slide does not fit.
            TrainingError: the loss is no number.
        """
        settings = self._config.train
        while self.progress.epoch < settings.epochs and not self.progress.stopped:
            started = time.perf_counter()
            self._train_epoch(interruption)
            self._validate(interruption, started)
        return self.progress

    def _train_epoch(self, interruption: Interruption) -> None:
        settings, epoch = self._config.train, self.progress.epoch
        self._skipped_flops = self._planned_flops = 0
        order = generator(settings.seed, "order", epoch).permutation(len(self._records)).tolist()
        self._reporter.start_epoch(epoch, len(order), self.progress.position)
        while self.progress.position < len(order):
            started, waited_before = time.perf_counter(), self._waited_seconds
            skipped_before, planned_before = self._skipped_flops, self._planned_flops
            start = self.progress.position
            group = [self._records[number] for number in order[start : start + settings.accumulate]]
            later = [self._records[number] for number in order[start + settings.accumulate :]]
            buffers = self._buffers()
            loss, weight = self._accumulate_readable(group, later, buffers, interruption)
            reached = replace(self.progress, position=min(start + settings.accumulate, len(order)))
            if loss is not None:
                rate = learning_rate(settings, reached.step, self._num_steps)
                norm = self._step(rate)
                reached = replace(
                    reached, step=reached.step + 1, loss_sum=reached.loss_sum + loss * weight, loss_weight=reached.loss_weight + weight
                )
                row = {"step": reached.step, "epoch": epoch, "loss": loss, "lr": rate, "grad_norm": norm}
                slides = " ".join(record.name for record in group if record.name not in dict(self.progress.failed))
                seconds, waited = time.perf_counter() - started, self._waited_seconds - waited_before
                skipped = (self._skipped_flops - skipped_before) / max(1, self._planned_flops - planned_before)
                told = {"seconds": round(seconds, 3), "waited_seconds": round(waited, 3), "skipped_share": round(skipped, 4)}
                self._folder.add_step({**row, **told, "slides": slides})
                self._reporter.step(row)
            self.progress = reached
            if reached.step % settings.checkpoint_every == 0 or reached.position == len(order):
                self._save()
            self._stop_if(interruption)

    @property
    def _waited_seconds(self) -> float:
        """For pixels, so far: for slides to be opened, and for strips."""
        return self._ahead.waited_seconds + self._strips_waited_seconds

    def _accumulate_readable(
        self, group: Sequence[SlideRecord], later: Sequence[SlideRecord], buffers: dict[str, Tensor], interruption: Interruption
    ) -> tuple[float | None, float]:
        """Gradients of those slides of a group that can be read; a slide that turns out to be broken does not change them."""
        while True:
            known_bad = dict(self.progress.failed)
            readable = [record for record in group if record.name not in known_bad]
            self._optimizer.zero_grad(set_to_none=True)
            if not readable:
                return None, 0.0
            try:
                following = next((record for record in later if record.name not in known_bad), None)
                return self._accumulate(readable, following, buffers, interruption)
            except _SlideFailed as failure:
                self._set_buffers(buffers)
                if self._config.train.on_error != "skip":
                    raise failure.error from None
                problem = " ".join(str(failure.error).split())
                self.progress = replace(self.progress, failed=(*self.progress.failed, (failure.record.name, problem)))
                self._reporter.note(f"left out: {failure.record.name}: {problem}")

    def _accumulate(
        self, group: Sequence[SlideRecord], following: SlideRecord | None, buffers: dict[str, Tensor], interruption: Interruption
    ) -> tuple[float | None, float]:
        """The loss of a group, and its weight in the epoch's mean; gradients are in ``.grad``. ``following`` is the slide behind it."""
        self._set_training()
        behind: list[SlideRecord | None] = [*group[1:], following]
        if self._task.kind == "cox":
            risks = []
            with torch.no_grad():
                for record, again in zip(group, [*group[1:], group[0]], strict=True):
                    risks.append(float(self._forward(record, again)))
                    self._drop_if(interruption, buffers)
            self._set_buffers(buffers)  # the second pass updates running statistics, as if it were the only one
            loss, gradients = cox_gradients(risks, [record.target for record in group if record.target is not None])
            self._check_finite(loss, group)
            if not any(gradients):
                return None, 0.0
            for record, upcoming, gradient in zip(group, behind, gradients, strict=True):
                self._scaler.scale(self._forward(record, upcoming).sum() * gradient).backward()
                self._note_step()
                self._reporter.advance()
                self._drop_if(interruption, buffers)
            return loss, float(len(group))
        weights = [self._task.slide_weight(record) for record in group]
        total, sum_of_losses = sum(weights), 0.0
        for record, upcoming, weight in zip(group, behind, weights, strict=True):
            output = self._forward(record, upcoming)
            slide_loss = output if self._task.kind == "segmentation" else self._task.slide_loss(output, record.target or ())
            share = slide_loss.float() * (weight / total)
            self._check_finite(share.item(), [record])
            try:
                self._scaler.scale(share).backward()
            except SourceError as error:
                raise _SlideFailed(record, error) from error
            self._note_step()
            sum_of_losses += share.item()
            self._reporter.advance()
            self._drop_if(interruption, buffers)
        return sum_of_losses, total

    def _forward(self, record: SlideRecord, upcoming: SlideRecord | None) -> Tensor:
        """The output of a slide, while the one that comes after it is opened."""
        settings, epoch = self._config.train, self.progress.epoch
        torch.manual_seed(counter_seed(settings.seed, "slide", epoch, record.name))
        try:
            inputs = self._ahead.take((epoch, record.name), lambda: self._begun(record, epoch))
            if upcoming is not None:
                self._ahead.start((epoch, upcoming.name), lambda: self._begun(upcoming, epoch))
            with autocast(self._config):
                output: Tensor = self._net(*inputs)
        except SourceError as error:
            raise _SlideFailed(record, error) from error
        except BudgetError as error:
            raise BudgetError(f"slide {record.name}: {error}", needed_bytes=error.needed_bytes) from error
        return output

    def _begun(self, record: SlideRecord, epoch: int) -> Inputs:
        inputs = self._inputs(record, draw_augmentation(self._config.augment, self._config.train.seed, epoch, record.name))
        for source in inputs:
            decode_beginning(source)
        return inputs

    def _note_step(self) -> None:
        """How long a training step waited for strips, and what of it was background that need not run."""
        reading, skipping = self._net.last_reading, self._net.last_skipping
        if reading is not None:
            self._strips_waited_seconds += reading.forward.waited_seconds + reading.backward.waited_seconds
        self._planned_flops += self._net.plan.flops
        if skipping is not None:
            self._skipped_flops += skipping.skipped_flops

    def _inputs(self, record: SlideRecord, augmentation: Any) -> Inputs:
        feed = self.experiment.feed
        source = feed.source(record, augmentation)
        return (source, feed.labels(record, augmentation)) if self._task.kind == "segmentation" else (source,)

    def _step(self, rate: float) -> float:
        """One optimizer step; returns the norm of the gradient."""
        settings = self._config.train
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.unscale_(self._optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), settings.clip_norm or math.inf)
        if not torch.isfinite(norm) and not self._scaler.is_enabled():
            raise TrainingError(
                f"step {self.progress.step + 1}: the gradient's norm is {norm.item()}. Lower train.lr, or set train.clip_norm; the "
                "run goes on from its last checkpoint."
            )
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def _validate(self, interruption: Interruption, started: float) -> None:
        """Predict the validation slides, note the epoch, keep the best model."""
        progress, settings = self.progress, self._config.train
        failed = dict(progress.failed)
        records = self.experiment.records("val")
        self._reporter.start_validation(len(records))

        def after() -> None:
            self._reporter.advance()
            self._stop_if(interruption)

        predictions = self.predictor.predict_all(records, failed, after=after)
        train_loss = progress.loss_sum / progress.loss_weight if progress.loss_weight else math.nan
        row: dict[str, Any] = {"epoch": progress.epoch + 1, "step": progress.step, "train_loss": train_loss}
        if records:
            estimates = evaluate_predictions(self._task, predictions, num_draws=0)
            row["val_loss"] = mean_loss(self._task.kind, predictions)
            row |= {f"val_{name}": estimate.value for name, estimate in estimates.items() if name != "loss"}
        # Without slides to validate on, the training loss is all there is.
        monitored = settings.monitor if records else "loss"
        value = row.get(f"val_{monitored}", math.nan) if records else train_loss
        score = -value if monitored == "loss" else value
        best = progress.best
        if not math.isnan(score) and (best is None or score > best[0]):
            best = (score, progress.epoch + 1)
            self._folder.checkpoints.save("best", progress.epoch + 1, self._model, {"epoch": progress.epoch + 1, "value": value}, keep=1)
        without = progress.epoch + 1 - (best[1] if best else 0)
        self.progress = replace(
            progress,
            epoch=progress.epoch + 1,
            position=0,
            loss_sum=0.0,
            loss_weight=0.0,
            best=best,
            epochs=(*progress.epochs, row),
            failed=tuple(failed.items()),
            stopped=settings.patience is not None and without >= settings.patience,
        )
        self._save()
        self._folder.write_epochs(self.progress.epochs)
        self._reporter.epoch({**row, "seconds": round(time.perf_counter() - started, 1)})
        if self._skipped_flops:
            share = self._skipped_flops / self._planned_flops
            self._reporter.note(f"  background: {100 * share:.1f} % of the FLOPs of its training steps were left out")

    def _set_training(self) -> None:
        self._net.train()
        set_training(self._model, training=True, freeze_norms=self.experiment.freezes_norms)

    def _check_finite(self, loss: float, group: Sequence[SlideRecord]) -> None:
        if not math.isfinite(loss):
            names = ", ".join(record.name for record in group)
            raise TrainingError(
                f"the loss of {names} is {loss} at step {self.progress.step + 1}. Lower train.lr, or use precision fp32 or bf16."
            )

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _set_buffers(self, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])

    def _drop_if(self, interruption: Interruption, buffers: dict[str, Tensor]) -> None:
        """Inside a group: back to its start, if the run was asked to end."""
        if interruption.received is not None:
            self._optimizer.zero_grad(set_to_none=True)
            self._set_buffers(buffers)
            self._stop_if(interruption)

    def _stop_if(self, interruption: Interruption) -> None:
        if interruption.received is not None:
            if self.progress != self._saved:
                self._save()
            raise RunInterrupted(
                f"{interruption.received.name}: saved at step {self.progress.step}, epoch {self.progress.epoch + 1}. Start the same "
                "command again to go on."
            )

    def _save(self) -> None:
        self.progress = replace(self.progress, serial=self.progress.serial + 1)
        state = {
            "progress": asdict(self.progress),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "random": get_random_state(),
            "settings": fingerprint(self._config),
            "table": self.experiment.table.digest(),
            "surroundings": surroundings(),
        }
        # Before the checkpoint: what is computed again is noted again.
        self._folder.add_damage(self.experiment.feed.bad_tiles)
        self._folder.checkpoints.save("last", self.progress.serial, self._model, state, keep=2)
        self._saved = self.progress
