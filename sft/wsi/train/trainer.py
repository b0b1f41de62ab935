"""Training loop that may be killed at any moment and resumes with the same bits.

The state of a step is either in the last checkpoint (weights, optimizer, loss scale, position) or a function of counters (order of the
slides, augmentation, dropout, learning rate: of seed, epoch, slide and step). Work after the last checkpoint is computed again from the
same numbers, in the same order. A single slide never changes the model: ``.grad`` and the buffers of an unfinished group are dropped.

Several ranks run this loop in parallel. Their decisions use numbers that are equal on all of them: results of a group are gathered
(`sft.wsi.train.grad_accumulation`), results of a validation are the first rank's, which also reads and writes the folder.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sft.common.errors import RankError
from sft.planner.plan import Plan
from sft.wsi.data.augment import draw_augmentation
from sft.wsi.data.dataset import SlidePrefetcher
from sft.wsi.data.table import SlideRecord, file_bytes
from sft.wsi.errors import RunInterrupted, TrainingError
from sft.wsi.eval.metrics import Prediction, evaluate_predictions
from sft.wsi.eval.predict import Predictor, mean_loss
from sft.wsi.run.estimate import RunEstimate, RunWork
from sft.wsi.run.files import counted
from sft.wsi.run.folder import RunFolder
from sft.wsi.run.progress import Reporter
from sft.wsi.run.trained_record import check_network, trained_record
from sft.wsi.train.checkpoint import get_random_state, restore_weights, seed_everything, set_random_state
from sft.wsi.train.distributed import SINGLE_RANK, Ranks
from sft.wsi.train.experiment import Experiment, autocast_context, calibrate_norms
from sft.wsi.train.grad_accumulation import GradientAccumulator, StepCost
from sft.wsi.train.optim import learning_rate, make_optimizer, philox_generator
from sft.wsi.train.rank_sync import scatter_items
from sft.wsi.train.run_state import RunProgress, check_same_run, run_environment
from sft.wsi.train.run_work import run_work
from sft.wsi.train.signals import EndRequested, Interruption
from sft.wsi.train.slide_net import compile_slide_net

__all__ = ["Trainer"]

#: Share of skipped FLOPs below which a run says why it is not more.
_SMALL_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class _InitialState:
    """State that a run starts or resumes with.

    Attributes:
        weights: parameters and buffers by name.
        state: remaining state of a checkpoint; None at the start.
        num_norms: number of calibrated norms.
    """

    weights: dict[str, Tensor]
    state: dict[str, Any] | None = None
    num_norms: int = 0


class Trainer:
    """Trainer of a run.

    Args:
        experiment: to train.
        folder: output folder, opened.
        failed: slides to skip, with their problems.
        reporter: of the progress.
        ranks: ranks that share the work. Default: this process alone
    """

    def __init__(
        self, experiment: Experiment, folder: RunFolder, failed: dict[str, str], reporter: Reporter, ranks: Ranks = SINGLE_RANK
    ) -> None:
        self.experiment, self._folder, self._reporter, self._ranks = experiment, folder, reporter, ranks
        self._config, self._task, self._model = experiment.config, experiment.task, experiment.model
        config = self._config
        self._model.to(config.train.device)
        self._optimizer = make_optimizer(self._model, config.train)
        self._net = compile_slide_net(experiment, optimizer=self._optimizer, ranks=ranks)
        self._scaler = torch.amp.GradScaler(torch.device(config.train.device).type, enabled=config.train.precision == "fp16")
        ahead = SlidePrefetcher()
        #: predicts with the model as it is, through plans that training has made already
        self.predictor = Predictor(experiment, self._net, ranks, ahead)
        self._groups = GradientAccumulator(experiment, self._net, self._scaler, ranks, reporter, ahead)
        self._epoch_cost = StepCost()
        self._records = experiment.records("train")
        self.progress = RunProgress(failed=tuple(failed.items()))
        self._saved: RunProgress | None = None
        self._file_bytes = file_bytes(experiment.table)
        num_groups = math.ceil(len(self._records) / config.train.accumulate)
        self._num_steps = num_groups * config.train.epochs

    def plan(self, record: SlideRecord, *, turned: bool = False) -> Plan:
        """The plan of a training step on a slide.

        Raises:
            BudgetError: it does not fit.
            SourceError: the slide cannot be opened.
        """
        self._groups.set_training()
        augmentation = replace(draw_augmentation(self._config.augment, 0, 0, record.name), quarters=int(turned))
        with autocast_context(self._config):
            plan: Plan = self._net.plan_for(*self._groups.inputs(record, augmentation))
        return plan

    def restore(self) -> None:
        """Go to where the run in the folder is, or to its beginning.

        Raises:
            RunFolderError: the folder is of another run, damaged, or cannot be written.
            SourceError: slides to measure statistics on cannot be read.
        """
        start = self._ranks.from_first(self._start)
        restore_weights(self._model, start.weights, self._folder.path)
        check_network(self._folder.path, start.state or {}, self.experiment.feature_shapes)
        if start.state is None:
            seed_everything(self._config.train.seed)
            if start.num_norms:
                self._reporter.note(
                    f"statistics of {counted(start.num_norms, 'norm', 'norms')} measured on crops of the training slides, then frozen"
                )
            self._folder.start_steps(0)
            self._save()
            return
        self._optimizer.load_state_dict(start.state["optimizer"])
        self._scaler.load_state_dict(start.state["scaler"])
        set_random_state(start.state["random"])
        failed = {**dict(self.progress.failed), **{name: problem for name, problem in start.state["progress"]["failed"]}}
        reached = RunProgress(**start.state["progress"])
        # Patience may have changed since.
        self.progress = replace(reached, failed=tuple(failed.items()), stopped=self._patience_exhausted(reached.epoch, reached.best))
        self._saved = self.progress
        self._folder.start_steps(self.progress.step)
        self._folder.write_epochs(self.progress.epochs)
        if self.progress.stopped or self.progress.epoch >= self._config.train.epochs:
            self._reporter.note(f"trained already: {self.progress.step} steps, {self.progress.epoch} epochs")
        elif self.progress.step or self.progress.epoch:
            self._reporter.note(
                f"resuming from step {self.progress.step}, epoch {self.progress.epoch + 1}, slide {self.progress.position + 1}"
            )

    def _start(self) -> _InitialState:
        """State in the folder, or the initial state of a run."""
        checkpoint = self._folder.checkpoints.load("last")
        if checkpoint is not None:
            check_same_run(self._folder.path, checkpoint.state, self._config, self.experiment.table, self._ranks.shape)
            return _InitialState(weights=checkpoint.weights, state=checkpoint.state)
        seed_everything(self._config.train.seed)
        num_norms = calibrate_norms(self.experiment, dict(self.progress.failed))
        return _InitialState(weights={name: value.cpu() for name, value in self._model.state_dict().items()}, num_norms=num_norms)

    def run(self, interruption: Interruption, *, plan: Plan | None = None) -> RunProgress:
        """Train from where the run is to the end; :meth:`restore` comes before.

        Args:
            interruption: requests the end.
            plan: of the largest slide, to estimate the duration of the run with. Default: `None` (no estimate)

        Raises:
            RunInterrupted: a signal requested its end; its state is saved.
            RunFolderError: the folder cannot be written.
            SourceError: a slide cannot be read, and ``train.on_error`` is not "skip".
            BudgetError: a slide does not fit.
            TrainingError: the loss is not a number.
            RankError: another rank failed.
        """
        settings = self._config.train
        if plan is not None:
            work = run_work(self.experiment, plan, self._ranks)
            self._reporter.start_run(RunEstimate(work, done=self._work_done(work)))
        try:
            while self.progress.epoch < settings.epochs and not self.progress.stopped:
                started = time.perf_counter()
                self._train_epoch(interruption)
                self._validate(interruption, started)
        except EndRequested as request:
            if self.progress != self._saved:
                self._save()
            # A rank that has left makes torchrun end the others: no rank leaves before the first has saved.
            self._ranks.gathered(None)
            raise RunInterrupted(
                f"{request.signal.name}: saved at step {self.progress.step}, epoch {self.progress.epoch + 1}. Start the same "
                "command again to resume."
            ) from None
        return self.progress

    def _train_epoch(self, interruption: Interruption) -> None:
        settings, epoch = self._config.train, self.progress.epoch
        self._epoch_cost = StepCost()
        order = self._order(epoch)
        self._reporter.start_epoch(epoch, len(order), self.progress.position)
        while self.progress.position < len(order):
            started = time.perf_counter()
            start = self.progress.position
            group = [self._records[number] for number in order[start : start + settings.accumulate]]
            later = [self._records[number] for number in order[start + settings.accumulate :]]
            failed = dict(self.progress.failed)
            result = self._groups.accumulate(group, later, failed, interruption, epoch=epoch, step=self.progress.step)
            reached = replace(
                self.progress,
                position=min(start + settings.accumulate, len(order)),
                failed=tuple({**failed, **result.failed}.items()),
            )
            if result.loss is not None:
                rate = learning_rate(settings, reached.step, self._num_steps)
                norm = self._step(rate)
                reached = replace(
                    reached,
                    step=reached.step + 1,
                    loss_sum=reached.loss_sum + result.loss * result.weight,
                    loss_weight=reached.loss_weight + result.weight,
                )
                row = {"step": reached.step, "epoch": epoch + 1, "loss": result.loss, "lr": rate, "grad_norm": norm}
                timings = {"seconds": round(time.perf_counter() - started, 3), "waited_seconds": round(result.cost.waited_seconds, 3)}
                timings |= {"skipped_share": round(result.cost.skipped_share, 4)}
                self._folder.add_step({**row, **timings, "slides": " ".join(result.names)})
                self._reporter.step(row)
                self._epoch_cost += result.cost
            self.progress = reached
            if reached.step % settings.checkpoint_every == 0 or reached.position == len(order):
                self._save()
            self._stop_on_signal(interruption)

    def _order(self, epoch: int) -> list[int]:
        """Numbers of the training slides in the order of an epoch."""
        order: list[int] = philox_generator(self._config.train.seed, "order", epoch).permutation(len(self._records)).tolist()
        return order

    def _work_done(self, work: RunWork) -> float:
        """Work of the epochs and slides that earlier processes have done."""
        done = self._order(self.progress.epoch)[: self.progress.position]
        return self.progress.epoch * work.epoch_work + sum(self.experiment.work_of(self._records[number]) for number in done)

    def _step(self, rate: float) -> float:
        """One optimizer step; returns the norm of the gradient."""
        settings = self._config.train
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        self._scaler.unscale_(self._optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), settings.clip_norm or math.inf)
        if not torch.isfinite(norm) and not self._scaler.is_enabled():
            raise TrainingError(
                f"step {self.progress.step + 1}: the gradient's norm is {norm.item()}. Lower train.lr, or set train.clip_norm; the "
                "run resumes from its last checkpoint."
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
        self._check_same_weights()
        own_records = scatter_items(records, self._ranks)
        self._reporter.start_validation(len(own_records), progress.epoch)
        predictions = self.predictor.predict_all(
            records,
            failed,
            before=lambda record, flops: self._reporter.start_slide(self.experiment.work_of(record, predicts=True), flops),
            after=self._reporter.advance,
            interruption=interruption,
        )
        other_work = sum(self.experiment.work_of(r, predicts=True) for r in records) - sum(
            self.experiment.work_of(r, predicts=True) for r in own_records
        )
        self._reporter.advance(0, others=other_work)
        train_loss = progress.loss_sum / progress.loss_weight if progress.loss_weight else math.nan
        row: dict[str, Any] = {"epoch": progress.epoch + 1, "step": progress.step, "train_loss": train_loss}
        if records:
            row |= self._ranks.from_first(lambda: self._measured(predictions))
        # Without slides to validate on, the training loss is all there is.
        monitored = settings.monitor if records else "loss"
        value = row.get(f"val_{monitored}", math.nan) if records else train_loss
        score = -value if monitored == "loss" else value
        best = progress.best
        if not math.isnan(score) and (best is None or score > best[0]):
            best = (score, progress.epoch + 1)
            state = {"epoch": progress.epoch + 1, "step": progress.step, "value": value, **self._record()}
            self._folder.checkpoints.save("best", progress.epoch + 1, self._model, state, keep=1)
        self.progress = replace(
            progress,
            epoch=progress.epoch + 1,
            position=0,
            loss_sum=0.0,
            loss_weight=0.0,
            best=best,
            epochs=(*progress.epochs, row),
            failed=tuple(failed.items()),
            stopped=self._patience_exhausted(progress.epoch + 1, best),
        )
        self._save()
        self._folder.write_epochs(self.progress.epochs)
        self._reporter.epoch({**row, "seconds": round(time.perf_counter() - started, 1)})
        if self._epoch_cost.skipped_flops or self.experiment.paints:
            self._reporter.note(f"  background: {_skipped_text(self._epoch_cost.skipped_share, self._config.model.tile)}")

    def _patience_exhausted(self, epoch: int, best: tuple[float, int] | None) -> bool:
        """True if patience has run out in this epoch, given the best one."""
        patience = self._config.train.patience
        return patience is not None and epoch - (best[1] if best else 0) >= patience

    def _measured(self, predictions: list[Prediction]) -> dict[str, float]:
        """Metrics of the predictions of validation slides, for metrics.csv."""
        estimates = evaluate_predictions(self._task, predictions, num_draws=0)
        row = {"val_loss": mean_loss(self._task.kind, predictions)}
        return row | {f"val_{name}": estimate.value for name, estimate in estimates.items() if name != "loss"}

    def _check_same_weights(self) -> None:
        """Refuse ranks with different weights, which unequal devices may cause."""
        digest = hashlib.sha256()
        for value in self._model.state_dict().values():
            digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        digests = self._ranks.gathered(digest.hexdigest())
        differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if differing:
            raise RankError(
                f"step {self.progress.step}: ranks {differing} have other weights than rank 0, though all took the same steps: their "
                "devices or versions of torch differ. Use the same ones on all ranks, and resume from the last checkpoint."
            )

    def _stop_on_signal(self, interruption: Interruption) -> None:
        received = [signal for signal in self._ranks.gathered(interruption.received) if signal is not None]
        if received:
            raise EndRequested(received[0])

    def _record(self) -> dict[str, Any]:
        experiment = self.experiment
        return trained_record(experiment.config, experiment.task, experiment.table, experiment.feature_shapes)

    def _save(self) -> None:
        self.progress = replace(self.progress, serial=self.progress.serial + 1)
        state = {
            "progress": asdict(self.progress),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "random": get_random_state(),
            **self._record(),
            "file_bytes": self._file_bytes,
            "surroundings": run_environment(self._ranks.shape, self._config.train.device),
        }
        # Before the checkpoint: steps that run again are also recorded again.
        if self._config.train.on_error == "fill":
            for tiles in self._ranks.gathered(self.experiment.feed.bad_tiles):
                self._folder.add_damage(tiles)
        self._folder.checkpoints.save("last", self.progress.serial, self._model, state, keep=2)
        self._saved = self.progress


def _skipped_text(share: float, tile: Sequence[int] | None) -> str:
    """Share of the skipped FLOPs, with the reason where it is small.

    >>> _skipped_text(0.25, None)
    '25.0 % of the FLOPs of its training steps were left out'
    """
    text = f"{100 * share:.1f} % of the FLOPs of its training steps were left out"
    if share >= _SMALL_SHARE:
        return text
    if tile is None:
        return f"{text}: a strip as wide as the slide is skipped where it and the strip before it are background; model.tile divides strips"
    return f"{text}: a tile is skipped where it and the tile before it are background, halos included; a smaller model.tile skips more"
