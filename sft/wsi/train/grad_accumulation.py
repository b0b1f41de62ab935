"""Gradient accumulation over a group of slides, the batch of one optimizer step.

The gradients equal those of the slides as a batch, for any number of ranks: slides are scattered over the replicas, each with its share of
the group's total weight, and the replicas' gradients are summed. An unreadable slide does not count: the group's gradients are computed
again without it. An unfinished group leaves ``.grad`` and the buffers unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sft.common.errors import BudgetError
from sft.planner.remedies import with_prefix
from sft.wsi.data.augment import Augmentation, draw_augmentation
from sft.wsi.data.dataset import Inputs, SlidePrefetcher, decode_ahead, decode_first_rows
from sft.wsi.data.table import SlideRecord
from sft.wsi.errors import TrainingError
from sft.wsi.model.heads import set_training
from sft.wsi.model.tasks import cox_gradients
from sft.wsi.run.progress import Reporter
from sft.wsi.train.distributed import Ranks
from sft.wsi.train.experiment import Experiment, autocast_context
from sft.wsi.train.optim import counter_seed
from sft.wsi.train.rank_sync import (
    SlideFailed,
    gather_in_order,
    gather_results,
    next_items,
    open_on_all_ranks,
    reading_slide,
    scatter_items,
)
from sft.wsi.train.signals import EndRequested, Interruption
from sft.wsi.train.slide_net import BagNet

__all__ = ["GradientAccumulator", "GroupResult", "StepCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Cost of steps.

    Attributes:
        waited_seconds: for pixels: opening of slides, and strips.
        planned_flops: of all training steps, as planned.
        skipped_flops: of these, background that need not run.
    """

    waited_seconds: float = 0.0
    planned_flops: int = 0
    skipped_flops: int = 0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            waited_seconds=self.waited_seconds + other.waited_seconds,
            planned_flops=self.planned_flops + other.planned_flops,
            skipped_flops=self.skipped_flops + other.skipped_flops,
        )

    @property
    def skipped_share(self) -> float:
        """Of the planned FLOPs."""
        return self.skipped_flops / max(1, self.planned_flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """Result of a group; the same on all ranks.

    Attributes:
        names: of its readable slides.
        loss: None without a gradient.
        weight: of the loss in the epoch's mean.
        cost: of all ranks; of the waiting, that of the rank that waited longest.
        failed: unreadable slides, with their problems.
    """

    names: tuple[str, ...]
    loss: float | None
    weight: float
    cost: StepCost
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankResult:
    """Result of a rank's slides of a group."""

    losses: tuple[float, ...]
    cost: StepCost


class GradientAccumulator:
    """Accumulator of the gradients of groups.

    Args:
        experiment: to train.
        net: its compiled network; for segmentation, with the loss.
        scaler: of losses.
        ranks: ranks that share the work.
        reporter: of the progress.
        ahead: prefetcher, possibly shared.
    """

    def __init__(self, experiment: Experiment, net: Any, scaler: Any, ranks: Ranks, reporter: Reporter, ahead: SlidePrefetcher) -> None:
        self._experiment, self._net, self._scaler, self._ranks, self._reporter = experiment, net, scaler, ranks, reporter
        self._config, self._task, self._model = experiment.config, experiment.task, experiment.model
        self._ahead = ahead
        self._waited_before, self._cost = 0.0, StepCost()
        self._epoch = self._step = self._planned_flops = 0

    def accumulate(
        self,
        group: Sequence[SlideRecord],
        later: Sequence[SlideRecord],
        failed: Mapping[str, str],
        interruption: Interruption,
        *,
        epoch: int,
        step: int,
    ) -> GroupResult:
        """Accumulate the gradients of the readable slides of a group in ``.grad``, on all ranks.

        Args:
            group: the slides.
            later: following slides, of which the first may be prefetched.
            failed: unreadable slides.
            interruption: requests the end of the run.
            epoch, step: from 0.

        Raises:
            EndRequested: a signal requested the end of the run; gradients and buffers are unchanged.
            SourceError: a slide cannot be read, and ``train.on_error`` is not "skip".
            BudgetError: a slide does not fit.
            TrainingError: the loss is NaN or infinite.
        """
        self._epoch, self._step = epoch, step
        self._waited_before, self._cost = self._ahead.waited_seconds, StepCost()
        before = self._buffers()
        unreadable: dict[str, str] = {}
        while True:
            readable = [record for record in group if record.name not in {**failed, **unreadable}]
            self._model.zero_grad(set_to_none=True)
            if not readable:
                return GroupResult(names=(), loss=None, weight=0.0, cost=self._cost, failed=unreadable)
            next_group = [record for record in later if record.name not in {**failed, **unreadable}][: self._config.train.accumulate]
            following = next(iter(scatter_items(next_group, self._ranks)), None)
            try:
                loss, weight, cost = self._accumulate(readable, following, before, interruption)
            except SlideFailed as failure:
                self._set_buffers(before)
                if self._config.train.on_error != "skip":
                    raise failure.error from None
                for record in readable:
                    if record.name in failure.slides:
                        unreadable[record.name] = failure.slides[record.name].problem
                        self._reporter.note(f"left out: {record.name}: {unreadable[record.name]}")
            except EndRequested:
                self._model.zero_grad(set_to_none=True)
                self._set_buffers(before)
                raise
            else:
                if loss is not None:
                    trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
                    # A whole-slide network has summed the gradients of its bands; ranks that share tiles have those of their own tiles.
                    self._ranks.add_up(trained, among="all" if isinstance(self._net, BagNet) else "replicas")
                    self._ranks.take_buffers(self._model)
                return GroupResult(names=tuple(r.name for r in readable), loss=loss, weight=weight, cost=cost, failed=unreadable)

    def inputs(self, record: SlideRecord, augmentation: Augmentation) -> Inputs:
        """Inputs of the network.

        Raises:
            SourceError: the slide cannot be opened.
        """
        feed = self._experiment.feed
        source = feed.source(record, augmentation)
        return (source, feed.labels(record, augmentation)) if self._task.kind == "segmentation" else (source,)

    def set_training(self) -> None:
        """Put the network into the mode that it is trained in."""
        self._net.train()
        set_training(self._model, training=True, freeze_norms=self._experiment.freezes_norms)

    def _accumulate(
        self, group: Sequence[SlideRecord], following: SlideRecord | None, buffers: Mapping[str, Tensor], interruption: Interruption
    ) -> tuple[float | None, float, StepCost]:
        """Loss of a group, its weight in the epoch's mean, and its cost; ``following`` is this rank's first slide after it."""
        self.set_training()
        own_slides = scatter_items(group, self._ranks)
        if self._task.kind == "cox":
            risks = gather_in_order(gather_results(lambda: self._risks(own_slides, interruption), self._ranks, interruption), self._ranks)
            self._set_buffers(buffers)  # the second pass updates running statistics, as if it were the only one
            loss, gradients = cox_gradients(risks, [record.target for record in group if record.target is not None])
            self._check_finite(loss, group)
            if not any(gradients):
                return None, 0.0, self._cost
            weights_of_rank = scatter_items(gradients, self._ranks)
            shares = gather_results(
                lambda: self._backward_of_risks(own_slides, weights_of_rank, following, interruption), self._ranks, interruption
            )
            weight = float(len(group))
        else:
            weights = [self._task.slide_weight(record) for record in group]
            weight = sum(weights)
            weights_of_rank = scatter_items([each / weight for each in weights], self._ranks)
            shares = gather_results(
                lambda: self._backward_of_losses(own_slides, weights_of_rank, following, interruption), self._ranks, interruption
            )
            loss = sum(gather_in_order([share.losses for share in shares], self._ranks))
        other_work = sum(map(self._experiment.work_of, group)) - sum(map(self._experiment.work_of, own_slides))
        if len(group) > len(own_slides):
            self._reporter.advance(len(group) - len(own_slides), others=other_work)
        cost = sum((share.cost for share in shares[:: self._ranks.shape.num_bands]), StepCost())
        waited = max(share.cost.waited_seconds for share in shares)
        return loss, weight, StepCost(waited_seconds=waited, planned_flops=cost.planned_flops, skipped_flops=cost.skipped_flops)

    def _risks(self, mine: Sequence[SlideRecord], interruption: Interruption) -> list[float]:
        """Risks of the slides, for Cox's loss of a group."""
        with torch.no_grad():
            return [float(self._forward(record, again, interruption)) for record, again in zip(mine, [*mine[1:], *mine[:1]], strict=True)]

    def _backward_of_risks(
        self, mine: Sequence[SlideRecord], gradients: Sequence[float], following: SlideRecord | None, interruption: Interruption
    ) -> _RankResult:
        for record, upcoming, gradient in zip(mine, next_items(mine, following), gradients, strict=True):
            risk = self._forward(record, upcoming, interruption).sum()
            self._backward(record, risk * gradient)
        return _RankResult(losses=(), cost=self._taken())

    def _backward_of_losses(
        self, mine: Sequence[SlideRecord], shares: Sequence[float], following: SlideRecord | None, interruption: Interruption
    ) -> _RankResult:
        losses = []
        for record, upcoming, share in zip(mine, next_items(mine, following), shares, strict=True):
            output = self._forward(record, upcoming, interruption)
            slide_loss = output if self._task.kind == "segmentation" else self._task.slide_loss(output, record.target or ())
            loss = slide_loss.to(torch.promote_types(slide_loss.dtype, torch.float32)) * share
            self._check_finite(loss.item(), [record])
            self._backward(record, loss)
            losses.append(loss.item())
        return _RankResult(losses=tuple(losses), cost=self._taken())

    def _forward(self, record: SlideRecord, upcoming: SlideRecord | None, interruption: Interruption) -> Tensor:
        """The output of a slide, while the one that comes after it is opened."""
        epoch = self._epoch
        torch.manual_seed(counter_seed(self._config.train.seed, "slide", epoch, record.name))
        inputs = open_on_all_ranks(
            record, lambda: self._ahead.take((epoch, record.name), lambda: self._begun(record, epoch)), self._ranks, interruption
        )
        if upcoming is not None:
            further = partial(decode_ahead, current=inputs, num_bands=self._ranks.shape.num_bands)
            self._ahead.start((epoch, upcoming.name), lambda: self._begun(upcoming, epoch), further)
        try:
            with reading_slide(record, self._ranks), autocast_context(self._config):
                work = self._experiment.work_of(record) if torch.is_grad_enabled() else 0.0
                self._planned_flops = self._net.plan_for(*inputs).flops
                self._reporter.start_slide(work, self._planned_flops)
                output: Tensor = self._net(*inputs)
        except BudgetError as error:
            raise with_prefix(error, f"slide {record.name}: ") from error
        return output

    def _backward(self, record: SlideRecord, loss: Tensor) -> None:
        scaled = self._scaler.scale(loss)
        if isinstance(self._net, BagNet):
            self._net.backward(record, scaled)
        else:
            with reading_slide(record, self._ranks):
                scaled.backward()
        strips, skipping = self._net.last_reading, self._net.last_skipping
        waited = 0.0 if strips is None else strips.forward.waited_seconds + strips.backward.waited_seconds
        skipped = 0 if skipping is None else skipping.skipped_flops
        self._cost += StepCost(waited_seconds=waited, planned_flops=self._planned_flops, skipped_flops=skipped)
        self._reporter.advance()

    def _taken(self) -> StepCost:
        """Cost of the group on this rank."""
        return self._cost + StepCost(waited_seconds=self._ahead.waited_seconds - self._waited_before)

    def _begun(self, record: SlideRecord, epoch: int) -> Inputs:
        inputs = self.inputs(record, draw_augmentation(self._config.augment, self._config.train.seed, epoch, record.name))
        for source in inputs:
            decode_first_rows(source)
        return inputs

    def _check_finite(self, loss: float, group: Sequence[SlideRecord]) -> None:
        if not math.isfinite(loss):
            names = ", ".join(record.name for record in group)
            raise TrainingError(f"the loss of {names} is {loss} at step {self._step + 1}. Lower train.lr, or use precision fp32 or bf16.")

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])
