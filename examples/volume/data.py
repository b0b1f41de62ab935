"""A real brain with its tissues: the ICBM 152 non-linear symmetric template (Fonov et al., 2011), which is in nilearn, at 1 mm.

The template is an average of 152 people, so noise is added, anew at every step. There is one volume: the network trains on its left half
and is tested on its right half. The halves are similar, so the result shows that a network trains on a whole volume, and not its accuracy
on another brain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sft.common.errors import SourceError

__all__ = ["DARKEST", "IGNORED_LABEL", "TISSUES", "Brain", "load_brain"]

#: Names of the labels 0, 1, ...
TISSUES = ("background", "fluid and rest", "grey matter", "white matter")
#: Lower bound of intensities. Four fifths of the voxels are outside of the brain; at their true darkness they would dominate the statistics
#: of norms.
DARKEST = -3.0
#: Label of voxels without weight in the loss.
IGNORED_LABEL = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Brain:
    """A volume and its labels.

    Attributes:
        volume: float32 ``[1, 1, depth, height, width]``: up, to the front, to the right; zero mean and unit deviation in the brain, and
            ``DARKEST`` where it is darker, as it is outside.
        left: labels int64 ``[1, depth, height, width]`` of the left half, ``IGNORED_LABEL`` elsewhere.
        right: those of the right half.
    """

    volume: Tensor
    left: Tensor
    right: Tensor


def load_brain(every: int = 1) -> Brain:
    """Load the template.

    Args:
        every: keep every n-th voxel along each axis; 1 is all of them, 1 mm apart.

    Raises:
        SourceError: nilearn is not installed.
    """
    try:
        from nilearn import datasets
    except ImportError as error:
        raise SourceError("the brain comes with nilearn: pip install nilearn") from error
    template = datasets.load_mni152_template(resolution=1)
    intensity, grey, white = (
        np.asarray(image.get_fdata(dtype=np.float32)).transpose(2, 1, 0)[::every, ::every, ::every]
        for image in (template, datasets.load_mni152_gm_template(resolution=1), datasets.load_mni152_wm_template(resolution=1))
    )
    inside = intensity > 0
    # Fluid is the rest of the brain; the most likely of the three is the label.
    shares = np.stack([np.clip(1 - grey - white, 0, 1), grey, white])
    labels = np.where(inside, 1 + shares.argmax(0), 0)
    volume = np.maximum((intensity - intensity[inside].mean()) / intensity[inside].std(), DARKEST)
    # Column i is at affine[0, 0] * i + affine[0, 3] mm, to the right of the middle where that is positive.
    columns = np.arange(labels.shape[2]) * every
    is_right = template.affine[0, 0] * columns + template.affine[0, 3] > 0
    halves = [torch.from_numpy(np.where(half, labels, IGNORED_LABEL).astype(np.int64))[None] for half in (~is_right, is_right)]
    return Brain(volume=torch.from_numpy(np.ascontiguousarray(volume, np.float32))[None, None], left=halves[0], right=halves[1])
