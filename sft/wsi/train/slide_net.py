"""Compiled network of a slide: a whole-slide network, or an encoder of tiles with the pooling of all tiles of the slide.

Ranks that share a slide divide it in one of two ways. A whole slide is divided into bands of rows, inside the compiled network. The tiles
of a slide are divided into runs of consecutive tiles: each rank computes the summary of its own tiles (`sft.wsi.model.bags`), the
summaries are gathered, one row of each rank, and each rank continues with the pooled vector of the slide. The gradient needs no further
message: each rank has the gradient of its own summary. Gradients of parameters are then sums over all ranks (`Ranks.add_up`); the linear
layer after the pooling is computed by all ranks and differentiated by the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sft
from sft.common.errors import InputError
from sft.common.interval import Interval
from sft.nn import WithLoss
from sft.sources import select_samples
from sft.wsi.data.table import SlideRecord
from sft.wsi.data.tile_bags import SlideTiles
from sft.wsi.model.bags import BagModel, BagSummary
from sft.wsi.train.distributed import SINGLE_RANK, Ranks
from sft.wsi.train.experiment import Experiment, compile_model, segmentation_loss
from sft.wsi.train.rank_sync import gather_results, reading_slide

__all__ = ["BagNet", "compile_slide_net"]


def compile_slide_net(experiment: Experiment, *, optimizer: torch.optim.Optimizer | None = None, ranks: Ranks = SINGLE_RANK) -> Any:
    """Compile the network of an experiment for slides of any size: scores of a slide, or the loss of a segmentation.

    Args:
        experiment: with the network.
        optimizer: before its first step; its state counts. Default: `None`
        ranks: ranks that share each slide. Default: this process alone

    Raises:
        UnsupportedError: the network has operators without an exact rule.
    """
    model, config = experiment.model, experiment.config
    if isinstance(model, BagModel):
        return BagNet(model, compile_model(BagSummary(model), config, optimizer=optimizer), ranks)
    segments = experiment.task.kind == "segmentation"
    return compile_model(
        WithLoss(model, segmentation_loss) if segments else model,
        config,
        optimizer=optimizer,
        num_inputs=2 if segments else 1,
        skip_repeats=experiment.paints,
        ranks=ranks,
    )


class BagNet:
    """Compiled network of bags of tiles; the ranks of a slide share its tiles.

    Args:
        model: the network.
        summary: its compiled `BagSummary`.
        ranks: ranks that share each slide.
    """

    def __init__(self, model: BagModel, summary: Any, ranks: Ranks) -> None:
        self._model, self._summary, self._ranks = model, summary, ranks
        # A single process may plan for several ranks.
        self._num_bands = ranks.mesh[1] if isinstance(ranks.mesh, tuple) else ranks.shape.num_bands
        self._band = ranks.rank % self._num_bands

    def train(self) -> BagNet:
        """Put the network into training mode."""
        self._model.train()
        return self

    def eval(self) -> BagNet:
        """Put the network into evaluation mode."""
        self._model.eval()
        return self

    def plan_for(self, tiles: Any) -> sft.Plan:
        """Plan of this rank's tiles of a slide, one at least."""
        first, last = self._share(tiles.shape[0])
        plan: sft.Plan = self._summary.plan_for(select_samples(tiles, Interval(first, last) if last > first else Interval(0, 1)))
        return plan

    @property
    def last_reading(self) -> Any:
        """Statistics of the tiles that the last call read."""
        return self._summary.last_reading

    @property
    def last_skipping(self) -> None:
        """None: no tile is skipped."""
        return None

    def __call__(self, tiles: SlideTiles) -> Tensor:
        """Scores of a slide ``[1, K]``, the same on all ranks that share it.

        Raises:
            SlideFailed: a rank cannot read its tiles.
            InputError: the network draws random numbers for tiles that several ranks share.
        """
        first, last = self._share(len(tiles))
        own: list[Tensor] = []

        def summarize() -> Tensor | None:
            if last == first:
                return None
            drawn = torch.get_rng_state()
            with reading_slide(tiles.record, self._ranks):
                own.append(self._summary(select_samples(tiles, Interval(first, last))))
            if self._num_bands > 1 and not torch.equal(drawn, torch.get_rng_state()):
                raise InputError(
                    f"ranks.bands {self._num_bands} with model.encoder tiles: the backbone draws random numbers for each tile (dropout, "
                    "stochastic depth), which would differ from those of one process. Set its rates to 0 in model.options, or give "
                    "ranks.bands 1, with which ranks have slides of their own."
                )
            return own[0].detach().cpu()

        summaries = gather_results(summarize, self._ranks, among="bands")
        device = self._model.head.classifier.weight.device
        rows = [own[0] if band == self._band else summary.to(device) for band, summary in enumerate(summaries) if summary is not None]
        pooled = self._model.head.merge(torch.cat(rows))
        return self._model.head.classify(pooled, is_constant=self._band > 0)

    def backward(self, record: SlideRecord, loss: Tensor) -> None:
        """Differentiate the loss of a slide, on all ranks that share it.

        Raises:
            SlideFailed: a rank cannot read its tiles.
        """

        def differentiate() -> None:
            if loss.requires_grad:  # a rank without tiles has nothing to differentiate
                with reading_slide(record, self._ranks):
                    loss.backward()

        gather_results(differentiate, self._ranks, among="bands")

    def _share(self, num_tiles: int) -> tuple[int, int]:
        """First and last (exclusive) tile of this rank; the first ranks have one more if the tiles do not divide."""
        size, rest = divmod(num_tiles, self._num_bands)
        first = self._band * size + min(self._band, rest)
        return first, first + size + (self._band < rest)
