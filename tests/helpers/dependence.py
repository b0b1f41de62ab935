"""Rows that an eager result depends on, measured with NaNs: the reference for access maps and tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.interval import Interval
from sft.common.torch_internals import pytree
from tests.helpers.dag_nets import Dag, DagNet, Join
from tests.helpers.graphs import every_value, graph_of

__all__ = ["Matrix", "input_rows", "operator_dependence", "row_dependence"]

#: [input row, output row]: True if the output row depends on the input row.
Matrix: TypeAlias = npt.NDArray[np.bool_]


def row_dependence(function: Callable[[Tensor], object], shape: tuple[int, int, int], axis: int = 0) -> list[Matrix]:
    """Dependence of output rows on input rows, for each ``[N, C, H, W]`` result of ``function``.

    Image ``r`` of one batch has NaNs in its row ``r``. NaNs pass through maxima and products, so they reach exactly the dependent elements.

    Args:
        function: an eager function of a batch of images.
        shape: (channels, height, width) of one image.
        axis: 0 for rows, 1 for columns.
    """
    num_rows = shape[1 + axis]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((num_rows, *shape), dtype=torch.float64, generator=generator)
    for row in range(num_rows):
        images[row].select(1 + axis, row).fill_(torch.nan)
    with torch.no_grad():
        results = pytree.tree_leaves(function(images))
    return [result.isnan().any(dim=1).any(dim=2 - axis).numpy() for result in results]


def input_rows(dependence: Matrix, out: Interval) -> list[int]:
    """The input rows that any of the output rows ``out`` depends on, in order."""
    rows: list[int] = np.flatnonzero(dependence[:, out.start : out.stop].any(axis=1)).tolist()
    return rows


def operator_dependence(dag: Dag, axis: int = 0) -> dict[str, Matrix]:
    """Dependence of rows on those of the operand, for each operator of a network with one operand; names as in ``graph_of``."""
    shapes, dependences = graph_of(dag).shapes, {}
    for index, node in enumerate(dag.nodes, start=1):
        if isinstance(node, Join):
            continue
        _, channels, height, width = shapes[f"v{node.source}" if node.source else "x"]
        alone = Dag(shape=(1, channels, height, width), nodes=(replace(node, source=0),), outputs=(1,))
        (dependences[f"v{index}"],) = row_dependence(DagNet(every_value(alone)), (channels, height, width), axis)
    return dependences
