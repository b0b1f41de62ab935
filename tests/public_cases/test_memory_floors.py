"""Memory floors: volumes and images that exceeded the device in public threads, planned at their size."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sft
from tests.helpers.bags import AttentionBag, VisionTransformer
from tests.helpers.exactness import assert_exact
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget

pytestmark = pytest.mark.usefixtures("without_proposals")


class _DilatedBlock(nn.Module):
    """Norm, activation and convolution twice, with a shortcut padded by channels of zeros, as in MONAI's HighResBlock."""

    def __init__(self, num_inputs: int, num_outputs: int, dilation: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((num_inputs, num_outputs), (num_outputs, num_outputs)):
            layers += [nn.BatchNorm3d(a), nn.ReLU(), nn.Conv3d(a, b, 3, padding=dilation, dilation=dilation, bias=False)]
        self.layers = nn.Sequential(*layers)
        before = (num_outputs - num_inputs) // 2
        self.pad = (0, 0, 0, 0, 0, 0, before, num_outputs - num_inputs - before, 0, 0)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x, self.pad) if any(self.pad) else x
        out: Tensor = self.layers(x) + shortcut
        return out


def _highres3dnet(widths: tuple[int, ...] = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)) -> nn.Module:
    """HighRes3DNet (Li et al., 2017): residual blocks of dilation 1, 2 and 4."""
    blocks = [_DilatedBlock(a, b, {1: 1, 2: 2}.get(b // widths[0], 4)) for a, b in pairwise(widths)]
    return nn.Sequential(nn.Conv3d(1, widths[0], 3, padding=1), *blocks, nn.Conv3d(widths[-1], 2, 1))


def test_a_volume_of_512_x_512_x_256_monai_854() -> None:
    """Project-MONAI/MONAI#854: highres3dnet exceeds 8 GB on images larger than this; its channel pads ran on full tensors here."""
    with torch.device("meta"):
        model = _highres3dnet().eval()
    assert not sft.check(model, (1, 1, None, None, None)).whole_reasons
    with torch.no_grad(), pytest.raises(sft.BudgetError) as refused:
        sft.plan(model, (1, 1, 512, 512, 256), budget=1)
    assert refused.value.needed_bytes < 2 * 2**30


@pytest.mark.parametrize("training", [False, True])
def test_the_same_blocks_in_small_are_exact_monai_854(training: bool) -> None:
    model = seeded(lambda: _highres3dnet((3, 3, 6, 13)))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.train(training)
    assert_exact(model, image(1, 1, 9, 8, 7), options=sft.Options(tile=(3, 5)), steps=1)


def test_a_bag_of_tiles_prov_gigapath_31() -> None:
    """prov-gigapath/prov-gigapath#31: a tile encoder trained with the label of the slide, at memory for a few tiles instead of all."""
    torch.manual_seed(0)
    model, tiles = AttentionBag(VisionTransformer(32, 2, 1, 8, 16), 32), torch.randn(24, 3, 16, 16)
    needed = least_budget(model.double(), [tiles.double().requires_grad_()])
    assert needed is not None
    report = assert_exact(model, tiles, budget=needed, to_the_byte=True, steps=1)
    assert any(segment.takes_samples for segment in report.plan.segments)
