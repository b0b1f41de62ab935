"""The class-activation map of a pooled classifier, drawn over the slide.

Pooling and the linear layer commute: the logit of a class is the average over all positions of the feature map
weighted by that class's row of the classifier, plus the bias.  The weighted map therefore *is* the decision, split by position, without any
estimate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from task import MEAN, STD
from torch import Tensor, nn
from torch.nn import functional as F

from sft.common.atomic_files import atomic_write

__all__ = ["class_activation_map", "draw_heatmap"]

_MAX_THUMBNAIL_PX = 1024


def class_activation_map(features: Tensor, classifier: nn.Linear, label: int) -> npt.NDArray[np.float32]:
    """Weight a feature map ``[1, channels, rows, cols]`` with the classifier's row of `label`; returns ``[rows,
    cols]``."""
    evidence: npt.NDArray[np.float32] = torch.einsum("chw,c->hw", features[0], classifier.weight[label]).numpy()
    return evidence


def draw_heatmap(path: Path, image: Tensor, evidence: npt.NDArray[np.float32], *, stride_px: int, title: str) -> None:
    """Draw the slide, and the slide under its class-activation map next to it.

    Args:
        path: the image file to write.
        image: the normalised slide, ``[1, 3, height, width]``.
        evidence: one value for each position of the feature map.
        stride_px: px of the slide from one position to the next; the first is centred on px 0.
        title: above the picture.
    """
    height_px, width_px = image.shape[2:]
    thumbnail = _thumbnail(image)
    slide_extent = (0, width_px, height_px, 0)
    # With odd kernels and half padding, position i looks at the neighbourhood of px i * stride, whose middle is half a px further
    # (sft.position_grids computes it for any network).
    rows, cols = evidence.shape
    first = (1 - stride_px) / 2
    map_extent = (first, first + cols * stride_px, first + rows * stride_px, first)
    # A few border positions see mostly padding and would take the whole range of colours.
    low, high = np.percentile(evidence, (1, 99))

    figure = Figure(figsize=(11, 6.8), layout="constrained")
    plain, overlaid = figure.subplots(1, 2, sharex=True, sharey=True)
    plain.imshow(thumbnail, extent=slide_extent)
    plain.set_title("slide")
    overlaid.imshow(thumbnail, extent=slide_extent)
    scale = ScalarMappable(Normalize(low, high), "turbo")
    overlaid.imshow(evidence, extent=map_extent, norm=scale.norm, cmap=scale.cmap, alpha=0.45, interpolation="bicubic")
    overlaid.set_title("class-activation map")
    for axes in (plain, overlaid):
        axes.set(xlim=(0, width_px), ylim=(height_px, 0), xlabel="px")
    plain.set_ylabel("px")
    figure.colorbar(scale, ax=overlaid, shrink=0.8, extend="both", label="contribution to the logit")
    figure.suptitle(title)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=130)


def _thumbnail(image: Tensor) -> npt.NDArray[np.float32]:
    """Average the slide down to at most 1024 px a side, colours in 0..1, ``[height, width, 3]``."""
    factor = -(-max(image.shape[2:]) // _MAX_THUMBNAIL_PX)
    small = F.avg_pool2d(image, factor, ceil_mode=True)[0]
    colours = small * torch.tensor(STD).view(-1, 1, 1) + torch.tensor(MEAN).view(-1, 1, 1)
    pixels: npt.NDArray[np.float32] = colours.clamp(0, 1).permute(1, 2, 0).numpy()
    return pixels
