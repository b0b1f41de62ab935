"""torchvision's networks: each family of classifiers, videos, the segmentation models, and the dense detectors without their
post-processing, which is not a function with gradients.

The classifiers of AlexNet and VGG have up to 120 million parameters after a pool to 7 x 7; they are made narrow, which changes no operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .case import IMAGE, MULTIPLE_OF_32, Case

__all__ = ["TORCHVISION"]

_CLASSES = 5


def _model(name: str, **arguments: Any) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=_CLASSES, **arguments)
    return model


def _case(name: str, *, shape: tuple[int, ...] = IMAGE, **arguments: Any) -> Case:
    return Case(package="torchvision", name=name, make=lambda: _model(name, **arguments), shape=shape)


def _with_narrow_classifier(name: str, num_features: int, **arguments: Any) -> Case:
    def make() -> nn.Module:
        model = _model(name, **arguments)
        layers = [nn.Dropout(0.5), nn.Linear(num_features, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, _CLASSES)]
        model.classifier = nn.Sequential(*layers)
        return model

    return Case(package="torchvision", name=name, make=make)


def _vision_transformer() -> nn.Module:
    """Two blocks, with dropout of activations and of the weights of attention."""
    from torchvision.models import VisionTransformer

    model: nn.Module = VisionTransformer(64, 16, 2, 2, 32, 64, dropout=0.1, attention_dropout=0.1, num_classes=_CLASSES)
    return model


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    model: nn.Module = SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4], num_classes=_CLASSES)
    return model


class _Dense(nn.Module):
    """A feature pyramid and a head on each of its levels: a detector up to its raw predictions."""

    def __init__(self, backbone: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Any:
        levels = self.backbone(x)
        return levels if self.head is None else self.head(list(levels.values()))


def _detector(name: str, head: Callable[[], nn.Module] | None) -> Case:
    def make() -> nn.Module:
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

        backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5)
        return _Dense(backbone, head() if head is not None else None)

    return Case(package="torchvision", name=name, make=make, shape=MULTIPLE_OF_32)


def _retinanet_head() -> nn.Module:
    from torchvision.models.detection.retinanet import RetinaNetHead

    head: nn.Module = RetinaNetHead(256, 3, _CLASSES)
    return head


def _fcos_head() -> nn.Module:
    from torchvision.models.detection.fcos import FCOSHead

    head: nn.Module = FCOSHead(256, 1, _CLASSES, num_convs=2)
    return head


TORCHVISION: tuple[Case, ...] = (
    _with_narrow_classifier("alexnet", 256 * 6 * 6),
    _with_narrow_classifier("vgg11", 512 * 7 * 7, init_weights=False),
    _with_narrow_classifier("vgg11_bn", 512 * 7 * 7, init_weights=False),
    _case("resnet18"),
    _case("resnet50"),
    _case("resnext50_32x4d"),
    _case("wide_resnet50_2"),
    _case("densenet121"),
    _case("googlenet", aux_logits=True, init_weights=False),
    _case("inception_v3", shape=MULTIPLE_OF_32, aux_logits=False, init_weights=False),
    _case("squeezenet1_0"),
    _case("squeezenet1_1"),
    _case("mobilenet_v2"),
    _case("mobilenet_v3_small"),
    _case("mobilenet_v3_large"),
    _case("mnasnet0_5"),
    _case("shufflenet_v2_x0_5"),
    _case("efficientnet_b0"),
    _case("efficientnet_v2_s"),
    _case("regnet_x_400mf"),
    _case("regnet_y_400mf"),
    _case("convnext_tiny"),
    _case("r2plus1d_18", shape=(2, 3, 8, 32, 32)),
    Case(package="torchvision", name="vit", make=_vision_transformer, shape=(2, 3, 64, 64)),
    Case(package="torchvision", name="swin", make=_swin, shape=(2, 3, 64, 64)),
    _case("fcn_resnet50", weights_backbone=None, aux_loss=True),
    _case("deeplabv3_resnet50", weights_backbone=None, aux_loss=True),
    _case("deeplabv3_mobilenet_v3_large", weights_backbone=None),
    _case("lraspp_mobilenet_v3_large", weights_backbone=None),
    _detector("resnet18_fpn", None),
    _detector("retinanet_resnet18_fpn", _retinanet_head),
    _detector("fcos_resnet18_fpn", _fcos_head),
)
