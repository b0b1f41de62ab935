"""The spatial axes of a model's images, and their position among a value's dimensions.

Every streamed value has the layout ``[N, channels..., axes...]``: the batch first, then one or more dimensions of channels, then the
image's axes, in one order for the whole graph (enforced by :mod:`sft.analysis.passes.layout`). A sweep streams along the first axis
(*rows*: the height of an image, the depth of a volume, the length of a signal) and cuts panels along the second (*columns*); a third axis
is never split. A signal has no second axis: its values count as one column wide.

Inputs of other ranks (vectors, token ids) have no spatial axes, and a model with such inputs only is not tiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["COLUMNS", "ROWS", "Axes"]

#: Index of the streamed axis, and of the axis that panels cut.
ROWS, COLUMNS = 0, 1

_AXIS_NAMES: dict[int, tuple[str, ...]] = {0: (), 1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}

Extent = TypeVar("Extent")


@dataclass(frozen=True, slots=True)
class Axes:
    """The spatial axes of a graph.

    Attributes:
        count: number of axes, 1 to 3; 0 if no input is an image.
    """

    count: int = 2

    @classmethod
    def of_inputs(cls, shapes: Iterable[Sequence[object]]) -> Axes:
        """The axes of a model with inputs of these shapes: the images are those with the most dimensions, three to five.

        >>> Axes.of_inputs([(1, 3, 8, 9), (1, 5)]).count, Axes.of_inputs([(32, 16), (32,)]).count
        (2, 0)
        """
        rank = max(map(len, shapes), default=0)
        return cls(rank - 2 if 3 <= rank <= 5 else 0)

    @classmethod
    def num_samples_of(cls, shapes: Sequence[Sequence[int]]) -> int | None:
        """Number of samples of inputs of these shapes: the first extent of the first image, else of the first input with any dimension.

        >>> Axes.num_samples_of([(5,), (4, 3, 8, 9)]), Axes.num_samples_of([(), (32, 16)]), Axes.num_samples_of([()])
        (4, 32, None)
        """
        axes = cls.of_inputs(shapes)
        images = [shape for shape in shapes if axes.is_image_shape(shape)]
        return next((shape[0] for shape in (*images, *shapes) if shape), None)

    def is_image_shape(self, shape: Sequence[object]) -> bool:
        """True if an input of this shape is an image (a signal, a volume) with these axes."""
        return self.count > 0 and len(shape) == self.rank

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, in order.

        >>> Axes(3).names
        ('depth', 'height', 'width')
        """
        return _AXIS_NAMES[self.count]

    @property
    def rank(self) -> int:
        """Number of dimensions of an ordinary image: batch, channels, axes."""
        return 2 + self.count

    def dim(self, rank: int, axis: int) -> int | None:
        """Index of the dimension that is ``axis`` in a value with ``rank`` dimensions; ``None`` if the graph has no such axis.

        >>> Axes(2).dim(4, ROWS), Axes(2).dim(5, COLUMNS), Axes(1).dim(3, COLUMNS)
        (2, 4, None)
        """
        return rank - self.count + axis if axis < self.count else None

    def extent(self, shape: Sequence[int], axis: int) -> int:
        """The extent of a value along an axis; 1 if the graph has no such axis."""
        return shape[len(shape) - self.count + axis] if axis < self.count else 1

    def of(self, shape: Sequence[Extent]) -> tuple[Extent, ...]:
        """The spatial extents of a shape, in order of the axes."""
        return tuple(shape[max(0, len(shape) - self.count) :])

    def with_extent(self, shape: Sequence[int], axis: int, extent: int) -> tuple[int, ...]:
        """A copy of a shape with another extent along an axis; unchanged if the graph has no such axis.

        >>> Axes(2).with_extent((1, 3, 8, 9), ROWS, 2)
        (1, 3, 2, 9)
        """
        resized = list(shape)
        dim = self.dim(len(shape), axis)
        if dim is not None:
            resized[dim] = extent
        return tuple(resized)
