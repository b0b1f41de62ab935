"""``sft.position_grids``: the centres of a model's output positions, in pixels of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sft.analysis.tiling.position_grid import PositionGrid, output_grids
from sft.api.check import check_capturable
from sft.api.engine import Engine
from sft.api.inputs import dtypes_of, is_streamable_input, shapes_of
from sft.common.errors import InputError
from sft.planner.options import Options

__all__ = ["position_grids"]


def position_grids(model: nn.Module, *inputs: Any) -> tuple[tuple[PositionGrid, ...] | None, ...]:
    """Centre and stride of the positions of every output, in pixels of the first image: to draw a map, or to crop what it shows.

    A ResNet has position ``i`` centred on pixel ``32 * i``, not on the middle of pixels ``32 * i`` to ``32 * i + 31``. The grids follow
    from the access maps of the operators (padding, stride, dilation, pooling, upsampling, crops); nothing is computed.
    An operator without an access map (attention over all positions) keeps the grid of the latest image of its size, or else divides the
    latest image into equal cells.

    >>> conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
    >>> position_grids(conv, (1, 3, 64, 65))[0]  # doctest: +NORMALIZE_WHITESPACE
    (PositionGrid(stride_px=Fraction(2, 1), first_centre_px=Fraction(1, 2)),
     PositionGrid(stride_px=Fraction(2, 1), first_centre_px=Fraction(1, 2)))

    Args:
        model: a compiled model, whose captured graph is used, or any ``nn.Module`` that `sft.compile` takes.
        inputs: as in a call, or as shapes.

    Returns:
        For each tensor of the result a grid for each axis (height and width of an image); ``None`` for a result without positions.

    Raises:
        InputError: an extent is missing, or the model cannot be captured.
        UnsupportedError: the model has operators without an exact rule.
    """
    engine = getattr(model, "_sft_engine", None)
    if not isinstance(engine, Engine):
        check_capturable(model)
        engine = Engine(model, budget_bytes=2**62, options=Options(), optimizer=None, plan=None)
    if inputs and all(isinstance(value, torch.Tensor) or is_streamable_input(value) for value in inputs):
        return output_grids(engine.specialize_for_inputs(inputs))
    input_shape = inputs[0] if len(inputs) == 1 else inputs
    shapes = [tuple(extent for extent in shape if extent is not None) for shape in shapes_of(input_shape)]
    if shapes != list(shapes_of(input_shape)):
        raise InputError(f"position_grids needs every extent, got {inputs!r}")
    return output_grids(engine.specialize_for_shapes(shapes, dtypes_of(input_shape)))
