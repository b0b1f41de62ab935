"""Call signatures: the properties of a call on which captures and plans are specialised.

A compiled module keeps one :class:`~sft.api.pipeline.PreparedPlan` per :class:`CallSignature`, as ``torch.compile`` keeps one graph per set
of guards. The signature has three parts:

- :attr:`CallSignature.capture_key`: properties that select a capture (element types, training flags, the model's fingerprint);
- shapes, layouts and requested gradients, which select a plan of that capture;
- :attr:`CallSignature.guards`: the answers to the questions that ``forward`` asks of a call, such as ``torch.is_grad_enabled()``. Only
  questions that a capture has met are guards, so most models need none (:mod:`sft.analysis.frontend.call_mode_guards`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, methodcaller
from typing import Any

import torch

from sft.analysis.frontend.call_mode_guards import CallModes, GuardKind, GuardValues
from sft.analysis.frontend.capture import is_channels_last
from sft.analysis.frontend.fingerprint import Fingerprint, module_fingerprint
from sft.analysis.frontend.switched_settings import needs_deterministic_sums
from sft.analysis.ir.axes import Axes
from sft.api.call_arguments import CallStructure
from sft.api.inputs import InputSpec
from sft.common.module_snapshot import ModuleSnapshot
from sft.common.transform_checks import autocast_dtype

__all__ = ["CallSignature", "CaptureKey", "Shape", "signature_of", "with_any_samples"]

Shape = tuple[int, ...]

_requires_grad, _stride, _training = attrgetter("requires_grad"), methodcaller("stride"), attrgetter("training")


@dataclass(frozen=True)
class CaptureKey:
    """Properties of a call that select a capture, in addition to the shapes for which it holds.

    Attributes:
        dtypes: element type of each input.
        lacking_channels: for each input, whether it is an image without channels.
        device: device of the model.
        autocast: element type of autocast; ``None`` if it is off.
        default_dtype: torch's default element type.
        training_flags: training flag of each module.
        fingerprint: attributes of the modules that ``forward`` may read.
        structure: containers, keywords and constants of the call.
    """

    dtypes: tuple[torch.dtype, ...]
    lacking_channels: tuple[bool, ...]
    device: torch.device
    autocast: torch.dtype | None
    default_dtype: torch.dtype
    training_flags: tuple[bool, ...]
    fingerprint: Fingerprint
    structure: CallStructure | None = None


@dataclass(frozen=True)
class CallSignature:
    """Properties of a call that select a plan.

    Attributes:
        shapes: shape of each input.
        capture_key: properties that select the capture.
        channels_last: for each input, whether its layout is channels last.
        weights_last: for each 4-D parameter, whether its layout is channels last.
        weight_strides: strides of each parameter, which its gradient has, too.
        requires_grad: for each parameter, whether it requires a gradient; empty if gradients are off.
        input_grads: for each input, whether its gradient is requested; empty if gradients are off.
        grad_enabled: whether gradients are on.
        from_source: for each input, whether it is read strip by strip.
        splits_batch: whether all inputs can be read in groups of batch elements.
        holds_gradients: whether full gradients of sharded weights are being accumulated.
        deterministic: whether sums must be made in a fixed order.
        weights_revision: revision of streamed weights, which changes with the destination of their gradients; ``None`` if resident.
        modes: the answers to all questions that ``forward`` may ask. Not compared.
        guards: the answers to the questions that captures have asked so far.
        constants: values that ``forward`` has read from tensors of the model in any capture, by a digest of their expression.
    """

    shapes: tuple[Shape, ...]
    capture_key: CaptureKey
    channels_last: tuple[bool, ...]
    weights_last: tuple[bool, ...]
    weight_strides: tuple[tuple[int, ...], ...]
    requires_grad: tuple[bool, ...]
    input_grads: tuple[bool, ...]
    grad_enabled: bool
    from_source: tuple[bool, ...] = ()
    splits_batch: bool = True
    holds_gradients: bool = False
    deterministic: bool = False
    weights_revision: int | None = None
    modes: CallModes = field(default=CallModes(), compare=False)
    guards: GuardValues = ()
    constants: tuple[Any, ...] = ()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.capture_key.device

    @property
    def shapes_of_any_samples(self) -> tuple[Shape, ...] | None:
        """The shapes without the number of samples, as :func:`with_any_samples`."""
        return with_any_samples(self.shapes)

    def with_guards(self, kinds: Iterable[GuardKind], constants: tuple[Any, ...] = ()) -> CallSignature:
        """The signature with the answers to questions of these kinds, and with values read from tensors of the model."""
        guards = self.modes.guard_values(kinds)
        return self if (guards, constants) == (self.guards, self.constants) else replace(self, guards=guards, constants=constants)

    def rank_invariants(self) -> tuple[object, ...]:
        """Properties that must be equal on all ranks that share an image."""
        key = self.capture_key
        inputs = (self.shapes, self.requires_grad, self.input_grads, self.from_source, key.dtypes, key.training_flags)
        return (*inputs, key.autocast, key.default_dtype, self.deterministic, repr(key.structure))


def with_any_samples(shapes: Sequence[Shape]) -> tuple[Shape, ...] | None:
    """Shapes of inputs with -1 for the number of samples; ``None`` for less than two samples, which plans treat in another way."""
    num_samples = Axes.num_samples_of(shapes)
    if num_samples is None or num_samples < 2:
        return None
    return tuple((-1, *shape[1:]) if shape[:1] == (num_samples,) else shape for shape in shapes)


def signature_of(
    snapshot: ModuleSnapshot,
    inputs: Sequence[InputSpec],
    lacking_channels: tuple[bool, ...],
    device: torch.device,
    structure: CallStructure | None = None,
    *,
    holds_gradients: bool = False,
    weights_revision: int | None = None,
) -> CallSignature:
    """The signature of a call in the present modes of torch.

    Args:
        snapshot: modules and tensors of the model.
        inputs: the inputs, with a channel added to those that lack one.
        lacking_channels: for each input, whether it lacked channels.
        device: device of the model.
        structure: containers, keywords and constants of the call.
        holds_gradients: see :class:`CallSignature`.
        weights_revision: see :class:`CallSignature`.
    """
    grad_enabled = torch.is_grad_enabled()
    requires_grad = tuple(map(_requires_grad, snapshot.parameters))
    input_grads = tuple(spec.needs_grad for spec in inputs)
    channels_last = tuple(spec.channels_last for spec in inputs)
    weights_last = tuple([is_channels_last(parameter) for parameter in snapshot.parameters if parameter.ndim == 4])
    return CallSignature(
        shapes=tuple(spec.shape for spec in inputs),
        capture_key=CaptureKey(
            dtypes=tuple(spec.dtype for spec in inputs),
            lacking_channels=lacking_channels,
            device=device,
            autocast=autocast_dtype(device),
            default_dtype=torch.get_default_dtype(),
            training_flags=tuple(map(_training, snapshot.modules.values())),
            fingerprint=module_fingerprint(snapshot),
            structure=structure,
        ),
        channels_last=channels_last,
        weights_last=weights_last,
        weight_strides=tuple(map(_stride, snapshot.parameters)),
        requires_grad=requires_grad if grad_enabled else (),
        input_grads=input_grads if grad_enabled else (),
        grad_enabled=grad_enabled,
        from_source=tuple(spec.from_source for spec in inputs),
        splits_batch=all(spec.splits_batch for spec in inputs),
        holds_gradients=holds_gradients,
        deterministic=needs_deterministic_sums(device),
        weights_revision=weights_revision,
        modes=CallModes(
            grad_enabled=grad_enabled,
            inference=torch.is_inference_mode_enabled(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            weights=requires_grad,
            inputs=input_grads,
            channels_last=channels_last,
            weights_last=weights_last,
        ),
    )
