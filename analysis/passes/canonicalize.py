"""The graph with every image in one order of dimensions: permutes and reshapes gone, operators told where their dimensions are.

:mod:`sft.analysis.passes.layout` follows how the model's values lie in images. Here each operator is rewritten to work on the image itself:

* permutes, transposes, reshapes, squeezes vanish, or become ``sft.rearrange``, which moves channels within each pixel;
* operators of single elements stay, with what broadcasts to them aligned or in strips too (:mod:`sft.analysis.passes.elementwise`);
* operators along dimensions (``decompose_softmax``, ``cat``, ``sum``, ...) are told the image's dimensions;
* ``decompose_linear`` along channels is a convolution with a kernel of one pixel, ``decompose_layer_norm`` along channels
  ``sft.channel_norm``
  (:mod:`sft.analysis.passes.decompose_norms`); reductions over the image (:mod:`sft.analysis.passes.decompose_reductions`), matrix products
  (:mod:`sft.analysis.passes.decompose_products`) and losses (:mod:`sft.analysis.passes.decompose_losses`) are taken apart;
* pixels that become channels, and channels that become pixels, are ``sft.pixel_unshuffle`` and ``sft.pixel_shuffle`` images, windows of
  pixels
  that do are ``sft.im2col`` and ``sft.col2im`` (:mod:`sft.analysis.passes.decompose_windows`);
* anything else gets the value in the order that the model has it in, restored as a whole (``sft.restore_dims``), unless that is the
  image's.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import sympy as sp

from sft.analysis.ir.graph import Graph, Node, Ref, map_refs, refs_in
from sft.analysis.ir.ops import DIMENSION_ARGUMENTS, ELEMENTWISE
from sft.analysis.ir.symbolic import broadcast_shapes, same_shape
from sft.analysis.ir.targets import ELEMENTWISE_LOSSES
from sft.analysis.passes.decompose_losses import (
    LABEL_LOSSES,
    REDUCTION_NONE,
    decompose_label_loss,
    decompose_whole_loss,
    loss_reduction,
    reduce_loss,
    unreduced_loss,
)
from sft.analysis.passes.decompose_norms import LAYER_NORMS, decompose_layer_norm
from sft.analysis.passes.decompose_products import MATRIX_PRODUCTS, ContractionOperand, decompose_linear, decompose_product, product_letters
from sft.analysis.passes.decompose_reductions import REDUCTIONS, SOFTMAXES, ImageReduction, decompose_reduction, decompose_softmax
from sft.analysis.passes.decompose_windows import decompose_axis_unfold, decompose_fold, decompose_unfold
from sft.analysis.passes.elementwise import ElementwiseRewriter, is_constant, make_constant_image, varies_spatially
from sft.analysis.passes.layout import DimLayout
from sft.analysis.passes.layout_tracker import EXPANDS, PERMUTES, RESHAPES, TrackedImage

__all__ = ["CANONICALIZED_TARGETS", "canonicalize"]

#: What an assignment to a part comes to.
_SCATTERS = ("aten.slice_scatter.default", "aten.select_scatter.default")
#: Poolings by windows, and the same to a given number of windows.
_POOLINGS = {
    f"aten.{kind}_pool{count}d.default": f"aten.adaptive_{kind}_pool{count}d.default" for kind in ("avg", "max") for count in (1, 2, 3)
}

#: Operators that are followed, or become others.
_WINDOWS = ("aten.im2col.default", "aten.col2im.default", "aten.unfold.default")
CANONICALIZED_TARGETS = tuple(
    sorted({*PERMUTES, *RESHAPES, *EXPANDS, *LAYER_NORMS, *REDUCTIONS, *MATRIX_PRODUCTS, *_WINDOWS, "aten.linear.default"})
)


def canonicalize(graph: Graph) -> Graph:
    """Rewrite a graph as the module says; one that holds images in their own order already comes back unchanged."""
    rewriting = _Canonicalizer(graph)
    for node in graph.nodes:
        rewriting.add(node)
    return rewriting.finish()


def _all_equal(value: Any, number: int) -> bool:
    """Whether an argument that may have an entry for each axis is this number along all of them."""
    return all(entry == number for entry in (value if isinstance(value, (tuple, list)) else (value,)))


class _Canonicalizer(ElementwiseRewriter):
    def finish(self) -> Graph:
        graph = self.graph
        outputs = tuple(self.plain_name(name) for name in graph.outputs)
        updates = tuple((self.plain_name(name), target) for name, target in graph.updates)
        return replace(graph, nodes=tuple(self.nodes.values()), outputs=outputs, updates=updates).without_dead_operators()

    def add(self, node: Node) -> None:
        """Take over one node of the model."""
        if node.kind != "operator":
            self.nodes[node.name] = node
            if node.kind == "input" and self.axes.is_image_shape(node.shape):
                self.images[node.name] = TrackedImage(node.name, DimLayout.plain(len(node.shape)))
            return
        holds_image = any(name in self.images for name in node.operands)
        if not (holds_image and any(rewrite(node) for rewrite in self._rewrites_of(node))):
            for part in decompose_whole_loss(node, [self.graph[name].shape for name in node.operands]):
                self.keep(part)

    def _rewrites_of(self, node: Node) -> list[Callable[[Node], bool]]:
        """What may apply to a node, the most particular first."""
        target = node.target
        families: tuple[tuple[Container[str], Callable[[Node], bool]], ...] = (
            (PERMUTES, self.permute),
            (RESHAPES, self.reshape),
            (ELEMENTWISE, self.elementwise),
            (REDUCTIONS, self._reduce),
            (SOFTMAXES, self._softmax),
            (DIMENSION_ARGUMENTS, self._along),
            (ELEMENTWISE_LOSSES, self._element_loss),
            (LABEL_LOSSES, self._label_loss),
        )
        own = {
            "aten.linear.default": self._linear,
            **dict.fromkeys(LAYER_NORMS, self._layer_norm),
            "aten.max_unpool2d.default": self._unpool,
            **dict.fromkeys(_POOLINGS, self._pool_of_all),
            **dict.fromkeys(_WINDOWS, self._windows),
            "aten.pad.default": self._pad,
            **dict.fromkeys(EXPANDS, self._expand),
            **dict.fromkeys(MATRIX_PRODUCTS, self._product),
            "aten.broadcast_tensors.default": self._broadcast_tensors,
            "aten.one_hot.default": self._one_hot,
            **dict.fromkeys(("aten.scatter.value", "aten.scatter.src"), self._scatter),
            **dict.fromkeys(_SCATTERS, self._assigned),
        }
        return [rewrite for targets, rewrite in families if target in targets] + ([own[target]] if target in own else [])

    # -- rewrites; each says whether it applies ---------------------------------------------------------------------

    def _reduce(self, node: Node) -> bool:
        """A reduction over all axes of the image, and maybe channels and the batch."""
        image = self.images.get(node.operands[0])
        if image is None or len(node.operands) != 1:
            return False
        groups, held = image.layout.groups, self.nodes[image.node]
        dims = self._reduced_dims(node, image)
        if dims is None:
            return False
        first_axis = len(held.shape) - self.axes.count
        gone = [place for dim in dims for place in groups[dim]]
        axes = [place for place in gone if place >= first_axis]
        rest = tuple(sorted(set(gone) - set(axes)))
        left = [place for dim, group in enumerate(groups) if dim not in dims for place in group]
        if len(axes) != self.axes.count or (node.target == "aten.max.dim" and axes != sorted(axes)):
            return False
        if node.target in ("aten.mean.dim", "aten.sum.dim_IntList") and image.layout.is_plain and not rest:
            return False  # streams as it is
        left += [place for place in range(first_axis) if place not in left and place not in rest]
        found = decompose_reduction(ImageReduction(node=node, image=held, num_axes=self.axes.count, rest=rest, order=tuple(left)))
        if found is not None:
            self.nodes.update((made.name, made) for made in found)
        return found is not None

    def _pool_of_all(self, node: Node) -> bool:
        """A pooling whose one window is the whole image, ``F.avg_pool2d(x, x.shape[2:])``: a global value."""
        image, count = self.first_image(node), self.axes.count
        held, kernel = self.shape(image.node), node.argument("kernel_size")
        kernel = kernel if isinstance(kernel, (tuple, list)) and len(kernel) == count else (kernel,) * count
        padding, dilation, divisor = node.argument("padding", 0), node.argument("dilation", 1), node.argument("divisor_override")
        if not image.layout.is_plain or len(held) != self.axes.rank or len(node.shape) != len(held) or divisor is not None:
            return False
        is_one = all(extent == 1 for extent in self.axes.of(node.shape))
        if not is_one or not _all_equal(padding, 0) or not _all_equal(dilation, 1) or not same_shape(kernel, self.axes.of(held)):
            return False
        arguments = (("self", node.argument("self")), ("output_size", (1,) * count))
        made = replace(node, target=_POOLINGS[node.target], arguments=arguments)
        if made.target not in REDUCTIONS or not self._reduce(made):
            self.keep(made)
        return True

    def _reduced_dims(self, node: Node, image: TrackedImage) -> list[int] | None:
        """The dimensions of the model's value that are reduced."""
        rank = len(image.layout.groups)
        if "adaptive" in node.target:
            size = node.argument("output_size")
            is_pixel = all(extent == 1 for extent in ((size,) if isinstance(size, int) else size))
            return list(range(2, rank)) if is_pixel and image.layout.is_plain and rank == self.axes.rank else None
        given = node.argument("dim")
        return sorted({dim % rank for dim in ([given] if isinstance(given, int) else given or range(rank))})

    def _softmax(self, node: Node) -> bool:
        """A softmax over all axes of the image."""
        image = self.images[node.operands[0]]
        held = self.nodes[image.node]
        axes = range(len(held.shape) - self.axes.count, len(held.shape))
        if sorted(image.layout.groups[node.argument("dim") % len(image.layout.groups)]) != list(axes):
            return False
        found = decompose_softmax(node, held, self.axes.count)
        for made in found or ():
            self.put(made, image.layout)
        return found is not None

    def _along(self, node: Node) -> bool:
        """An operator along dimensions, each of which is one of the image's: of its channels, or all of its axes at once."""
        spec, name = DIMENSION_ARGUMENTS[node.target], DIMENSION_ARGUMENTS[node.target].argument
        if node.target in ("aten.cat.default", "aten.stack.default") and not self._join_sides(node, is_new=spec.adds):
            return False
        operands = [operand for operand in node.operands if operand in self.images]
        layout, held = self.images[operands[0]].layout, self.shape(self.images[operands[0]].node)
        if set(node.operands) != set(operands) or any(self.images[operand].layout != layout for operand in operands):
            return False
        if name not in dict(node.arguments) or any(len(self.shape(self.images[o].node)) != len(held) for o in operands):
            return False
        given, first_axis = node.argument(name), len(held) - self.axes.count
        if spec.adds:
            return layout.is_plain and self._stack(node, given % len(node.shape), first_axis)
        rank = len(layout.groups)
        dims = [dim % rank for dim in ([given] if isinstance(given, int) else given or range(rank))]
        places = [layout.place(dim) for dim in dims]
        found = [place for place in places if place is not None]
        if len(found) != len(places):
            return False
        goes = spec.drops and not node.argument("keepdim", False)
        after = layout.without(found) if goes else layout
        argument: Any = found[0] if isinstance(given, int) else tuple(found)
        if all(1 <= place < first_axis for place in found):
            extents = {place: node.shape[dim] for dim, place in zip(dims, found, strict=True)} if not goes else {}
            shape = [extents.get(place, extent) for place, extent in enumerate(held) if not (goes and place in found)]
            return self._put_along(node, after, (name, argument), tuple(shape))
        if node.target == "aten.slice.Tensor" and not layout.is_plain:
            sliced = tuple(node.shape[dims[0]] if place == found[0] else extent for place, extent in enumerate(held))
            return self._put_along(node, layout, (name, argument), sliced)
        if goes and sorted(found) == list(range(first_axis, len(held))) and after.is_plain and len(after.groups) == first_axis:
            return self._put_along(node, None, (name, argument))
        return False

    def _stack(self, node: Node, dim: int, first_axis: int) -> bool:
        """Images side by side in a new dimension of channels; one that the value has in front of the batch is the first of these."""
        if 1 <= dim <= first_axis:
            return self._put_along(node, DimLayout.plain(len(node.shape)))
        if dim:
            return False
        count, batch, *rest = node.shape
        layout = DimLayout(((1,), (0,), *((place,) for place in range(2, len(node.shape)))))
        return self._put_along(node, layout, ("dim", 1), (batch, count, *rest))

    def _join_sides(self, node: Node, *, is_new: bool) -> bool:
        """Make images of what is joined to one, and varies along it without being one; ``is_new`` where that is along a new dimension."""
        image = self.first_image(node)
        first_axis = len(self.shape(image.node)) - self.axes.count
        place = None if is_new else image.layout.place(node.argument("dim", 0))
        if not is_new and (place is None or not 1 <= place < first_axis):
            return False
        found: dict[str, TrackedImage] = {}
        for name in (name for name in dict.fromkeys(node.operands) if name not in self.images):
            shape, base = self.shape(name), self.unexpanded(name)
            if len(shape) != len(image.layout.groups) or not varies_spatially(shape, image.layout, first_axis):
                return False
            # What an expansion repeats along the image, or for each sample, is repeated here; channels are needed as they are.
            repeats = [at for at, extent in enumerate(self.shape(base)) if extent != shape[at]]
            is_plain = all(dim == 0 or dim >= first_axis for at in repeats for dim in image.layout.groups[at])
            side = self.side_input_image(node, base if is_plain else name, image)
            if side is None:
                return False
            found[name] = TrackedImage(side, image.layout)
        self.images.update(found)
        return True

    def _put_along(
        self, node: Node, layout: DimLayout | None, argument: tuple[str, Any] | None = None, shape: tuple[Any, ...] | None = None
    ) -> bool:
        """Add an operator on images; what it makes is one of this layout, or none."""
        arguments = tuple((key, map_refs(value, lambda name: Ref(self.images[name].node))) for key, value in node.arguments)
        if argument is not None:
            arguments = tuple(argument if key == argument[0] else (key, value) for key, value in arguments)
        made = replace(node, shape=node.shape if shape is None else shape, arguments=arguments)
        self.nodes[node.name] = made
        if layout is not None:
            self.images[node.name] = TrackedImage(node.name, layout)
        return True

    def _expand(self, node: Node) -> bool:
        """An expansion of channels."""
        image = self.images.get(node.operands[0])
        if image is None or len(node.shape) != len(image.layout.groups):
            return False
        held = self.shape(image.node)
        shape = list(held)
        for group, extent in zip(image.layout.groups, node.shape, strict=True):
            if len(group) == 1 and 1 <= group[0] < len(held) - self.axes.count:
                shape[group[0]] = extent
        if not same_shape(image.layout.shape(shape), node.shape):
            return False
        channels = tuple(shape[1 : len(held) - self.axes.count])
        arguments = (("self", Ref(image.node)), ("channels", channels))
        return self.put(replace(node, target="sft.expand_channels", shape=tuple(shape), arguments=arguments), image.layout)

    def _unpool(self, node: Node) -> bool:
        """The unpooling of a signal, which comes as that of an image one pixel wide."""
        narrow = [self.graph[name] for name in node.operands]
        images = [self.images.get(made.operands[0]) for made in narrow if made.target == "aten.unsqueeze.default"]
        if self.axes.count != 1 or [image and image.layout for image in images] != [DimLayout.plain(3)] * 2:
            return False
        value, indices = (Ref(image.node) for image in images if image is not None)
        arguments = (("self", value), ("indices", indices), ("output_size", node.argument("output_size")[:1]))
        unpooled = replace(node, target="sft.max_unpool1d", shape=node.shape[:3], arguments=arguments)
        return self.put(unpooled, DimLayout((*DimLayout.plain(3).groups, ())))

    def _pad(self, node: Node) -> bool:
        """Padding of an image that the model holds in another order of dimensions (channels last)."""
        image = self.images[node.operands[0]]
        held, flat, rank = self.shape(image.node), node.argument("pad"), len(image.layout.groups)
        amounts = ((rank - 1 - at, (flat[2 * at], flat[2 * at + 1])) for at in range(len(flat) // 2))
        padded = [(image.layout.place(dim), pair) for dim, pair in amounts if pair != (0, 0)]
        axes = range(len(held) - self.axes.count, len(held))
        if image.layout.is_plain or not all(place in axes for place, _ in padded):
            return False
        pairs = [dict(padded).get(place, (0, 0)) for place in axes]
        shape = (*held[: axes.start], *(low + held[place] + high for place, (low, high) in zip(axes, pairs, strict=True)))
        own = tuple(amount for pair in reversed(pairs) for amount in pair)
        arguments = (("self", Ref(image.node)), ("pad", own), *(pair for pair in node.arguments if pair[0] not in ("self", "pad")))
        return self.put(replace(node, shape=shape, arguments=arguments), image.layout)

    def _windows(self, node: Node) -> bool:
        """Windows as columns, or columns as windows."""
        image = self.images[node.operands[0]]
        held, count = self.nodes[image.node], self.axes.count
        if node.target == "aten.unfold.default":
            along = decompose_axis_unfold(node, held, image.layout, self.axes)
            return along is not None and self.put(*along)
        if node.target == "aten.col2im.default":
            columns = image.layout.groups == ((0,), (1,), tuple(range(2, 2 + count)))
            parts, layout = decompose_fold(node, held, self.axes) if columns else None, DimLayout.plain(len(node.shape))
        else:
            found = decompose_unfold(node, held, self.axes) if image.layout.is_plain else None
            parts, layout = found or (None, image.layout)
        return parts is not None and all([self.put(part, layout) for part in parts])

    def _product(self, node: Node) -> bool:
        """A matrix product over all pixels, or of every pixel's channels."""
        letters = product_letters(node, [len(self.graph[name].shape) for name in node.operands])
        if letters is None or len(node.operands) != 2:
            return False
        factors = [
            ContractionOperand(term, self.nodes[image.node if image else name], image.layout if image else None)
            for name, image, term in zip(node.operands, map(self.images.get, node.operands), letters, strict=False)
        ]
        found = decompose_product(node, factors[0], factors[1], letters[2], self.axes.count)
        if found is None:
            return False
        nodes, layout = found
        self.nodes.update((made.name, made) for made in nodes)
        return layout is None or self.follow(node, TrackedImage(nodes[-1].name, layout))

    def _broadcast_tensors(self, node: Node) -> bool:
        """Images of one size; whoever reads them broadcasts them."""
        name = node.operands[node.argument("result", 0)]
        image = self.images.get(name)
        if image is None or not same_shape(image.layout.shape(self.shape(image.node)), node.shape):
            return False
        self.images[node.name] = image
        return True

    def _one_hot(self, node: Node) -> bool:
        """Labels as channels: the value has them last."""
        image, num_classes = self.first_image(node), node.argument("num_classes", -1)
        held = self.shape(image.node)
        if len(held) != self.axes.rank or held[1] != 1 or num_classes < 1 or any(1 in group for group in image.layout.groups):
            return False
        arguments = (("self", Ref(image.node)), ("num_classes", num_classes))
        made = replace(node, target="sft.one_hot", shape=(held[0], num_classes, *self.axes.of(held)), arguments=arguments)
        return self.put(made, DimLayout((*image.layout.groups, (1,))))

    def _scatter(self, node: Node) -> bool:
        """Values put where labels say; constants that they are put into are an image like the labels."""
        self._fill_like(node.argument("self").name, self.images.get(node.argument("index").name))
        return self._along(node)

    def _fill_like(self, name: str, like: TrackedImage | None) -> None:
        """Make an image of a constant that is as large as another; anything else stays what it is."""
        constant = self.nodes.get(name)
        if name in self.images or like is None or constant is None or not is_constant(constant):
            return
        held, shape = self.shape(like.node), constant.shape
        if len(shape) != self.axes.rank or len(held) != self.axes.rank or not like.layout.is_plain:
            return
        if same_shape((held[0], *held[2:]), (shape[0], *shape[2:])):
            made = make_constant_image(f"{name}__filled", constant, self.nodes[like.node], shape[1])
            self.nodes[made.name] = made
            self.images[name] = TrackedImage(made.name, like.layout)

    def _assigned(self, node: Node) -> bool:
        """Some channels of an image assigned anew."""
        name, source = node.argument("self").name, self.images.get(node.argument("src").name)
        self._fill_like(name, source)
        image = self.images.get(name)
        if image is None or source is None:
            return False
        held = self.shape(image.node)
        place = image.layout.place(node.argument("dim", 0))
        if place is None or not 1 <= place < len(held) - self.axes.count:
            return False
        selects = node.target == "aten.select_scatter.default"
        if source.layout != (image.layout.without([place]) if selects else image.layout):
            return False
        given = [node.argument(key) for key in (("index",) if selects else ("start", "end", "step"))]
        if any(isinstance(number, sp.Basic) for number in (held[place], *given)):
            return False  # what the model has among its channels follows the image's size
        if selects:
            channels = range(given[0] % held[place], given[0] % held[place] + 1)
        else:
            channels = range(*slice(*given).indices(held[place]))
        arguments = (
            ("self", Ref(image.node)),
            ("src", Ref(source.node)),
            ("dim", place),
            *(("start", channels.start), ("stop", channels.stop), ("step", channels.step)),
            ("selects", selects),
        )
        return self.put(replace(node, target="sft.assign_channels", shape=held, arguments=arguments), image.layout)

    # -- losses -----------------------------------------------------------------------------------------------------

    def _element_loss(self, node: Node) -> bool:
        """A loss of single elements and, where there is one, its reduction."""
        each = unreduced_loss(node)
        images = [self.images[name] for name in node.operands if name in self.images]
        shape = broadcast_shapes([images[0].layout.shape(self.shape(image.node)) for image in images], len(images[0].layout.groups))
        if not self.elementwise(replace(each, shape=shape)):
            return False
        if each.name != node.name:
            made = self.nodes[self.images.pop(each.name).node]
            self.nodes.update((part.name, part) for part in reduce_loss(node, made, self.axes.count))
        return True

    def _label_loss(self, node: Node) -> bool:
        """A loss that looks up the channel which a pixel's label names."""
        scores, target = (self.images.get(node.argument(key).name) for key in ("self", "target"))
        if scores is None or target is None or len(self.shape(scores.node)) != self.axes.rank or scores.layout.place(1) != 1:
            return False
        pixels = DimLayout(tuple(group for group in scores.layout.groups if group != (1,)))
        held = self.nodes[target.node]
        has_labels = not held.is_floating
        if len(held.shape) != self.axes.rank or target.layout != (pixels if has_labels else scores.layout):
            return False
        if has_labels and held.shape[1] != 1:
            return False
        made = decompose_label_loss(node, self.nodes[scores.node], held, self.axes.count)
        self.nodes.update((part.name, part) for part in made)
        if loss_reduction(node) == REDUCTION_NONE:
            self.images[node.name] = TrackedImage(node.name, pixels)
        return True

    # -- products and norms of channels -----------------------------------------------------------------------------

    def _ends_with_channels(self, image: TrackedImage) -> bool:
        """Whether the image has just one dimension of channels, and the value's last dimension is that."""
        return len(self.shape(image.node)) == self.axes.rank and image.layout.place(-1) == 1

    def _linear(self, node: Node) -> bool:
        image = self.images.get(node.argument("input").name)
        weight = node.argument("weight")
        sides = [name for value in (weight, node.argument("bias")) for name in refs_in(value)]
        if image is None or any(name in self.images for name in sides) or not self._ends_with_channels(image):
            return False
        kernel, made = decompose_linear(node, self.nodes[weight.name], self.nodes[image.node], self.axes)
        self.nodes[kernel.name] = kernel
        return self.put(made, image.layout)

    def _layer_norm(self, node: Node) -> bool:
        image = self.images.get(node.argument("input").name)
        if image is None or any(name in self.images for name in node.operands[1:]):
            return False
        last = image.layout.groups[len(image.layout.groups) - len(node.argument("normalized_shape")) :]
        made = decompose_layer_norm(node, self.nodes[image.node], [place for group in last for place in group], self.axes.count)
        return made is not None and all([self.put(part, image.layout) for part in made])
