"""MONAI's networks, on images and on volumes: one table, two numbers of dimensions."""

from __future__ import annotations

from typing import Any

from torch import nn

from .case import Case

__all__ = ["MONAI"]

_CLASSES = 2
#: Every stride divides the extents, and no map shrinks to less than two positions, which an InstanceNorm would refuse.
_EXTENTS = {2: (96, 64), 3: (32, 32, 64)}
_PYRAMID = {"channels": (4, 8, 16, 32), "strides": (2, 2, 2)}
_WIDTHS = {"features": (4, 4, 8, 16, 32, 4)}
_NNUNET = {"kernel_size": (3,) * 4, "strides": (1, 2, 2, 2), "upsample_kernel_size": (2, 2, 2), "filters": (4, 8, 16, 32)}
_BLOCKS = {"blocks_down": (1,) * 4, "blocks_bottleneck": 1, "blocks_up": (1,) * 4}

#: Name of the case: the class, and its arguments besides the dimensions and the channels.
_NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "unet": ("UNet", _PYRAMID),
    "unet_residual": ("UNet", {**_PYRAMID, "num_res_units": 2, "norm": "batch", "dropout": 0.1}),
    "basic_unet": ("BasicUNet", _WIDTHS),
    "basic_unet_nearest": ("BasicUNet", {**_WIDTHS, "upsample": "nontrainable"}),
    "basic_unet_plus_plus": ("BasicUNetPlusPlus", {**_WIDTHS, "deep_supervision": True}),
    "dynunet": ("DynUNet", _NNUNET),
    "dynunet_deep": ("DynUNet", {**_NNUNET, "deep_supervision": True, "deep_supr_num": 2, "res_block": True}),
    "attention_unet": ("AttentionUnet", _PYRAMID),
    "segresnet": ("SegResNet", {"init_filters": 8}),
    "segresnet_transposed": ("SegResNet", {"init_filters": 8, "upsample_mode": "deconv"}),
    "segresnet_ds": ("SegResNetDS", {"init_filters": 8, "dsdepth": 2}),
    "vnet": ("VNet", {}),
    "highresnet": ("HighResNet", {}),
    "resnet10": ("resnet10", {}),
    "densenet": ("DenseNet", {"init_features": 8, "growth_rate": 4, "block_config": (3, 3, 3), "dropout_prob": 0.1}),
    "seresnet50": ("SEResNet50", {}),
    "efficientnet_b0": ("EfficientNetBN", {"model_name": "efficientnet-b0", "pretrained": False}),
    "flexible_unet": ("FlexibleUNet", {"backbone": "resnet18", "pretrained": False, "decoder_channels": (32, 16, 8, 8, 4)}),
    "autoencoder": ("AutoEncoder", {"channels": (4, 8, 16), "strides": (2, 2, 2)}),
    "regunet": ("RegUNet", {"num_channel_initial": 4, "depth": 3}),
    "unetr": ("UNETR", {"feature_size": 4, "hidden_size": 24, "mlp_dim": 32, "num_heads": 4, "dropout_rate": 0.1}),
    "swin_unetr": ("SwinUNETR", {"feature_size": 12, "depths": (1,) * 4, "window_size": 2}),
    "mednext": ("MedNeXt", {"init_filters": 4, **_BLOCKS}),
}
#: Classes with other names of the channel arguments.
_IN_CHANNELS = {"resnet10": "n_input_channels"}
_OUT_CHANNELS = {"resnet10": "num_classes", "SEResNet50": "num_classes", "EfficientNetBN": "num_classes"}
#: Classes with position embeddings of one size.
_OF_ONE_SIZE = frozenset({"UNETR"})
#: Classes with gates on maps of one position, and norms on maps of a few.
_BATCH = {"EfficientNetBN": 2, "SEResNet50": 2}


def _case(name: str, num_dims: int) -> Case:
    kind, arguments = _NETS[name]
    # V-Net divides its 16 channels by those of the input.
    num_channels = 1 if num_dims == 3 else 4 if kind == "VNet" else 3

    def make() -> nn.Module:
        from monai.networks import nets

        channels = {_IN_CHANNELS.get(kind, "in_channels"): num_channels, _OUT_CHANNELS.get(kind, "out_channels"): _CLASSES}
        size = {"img_size": _EXTENTS[num_dims]} if kind in _OF_ONE_SIZE else {}
        model: nn.Module = getattr(nets, kind)(spatial_dims=num_dims, **channels, **size, **arguments)
        for module in model.modules():
            if hasattr(module, "drop_connect_rate"):
                # A random call inside a function has no site in the reference; tests/exactness/operators/test_dropout_in_models.py has one.
                vars(module)["drop_connect_rate"] = 0.0
        return model

    return Case(package="monai", name=f"{name}_{num_dims}d", make=make, shape=(_BATCH.get(kind, 1), num_channels, *_EXTENTS[num_dims]))


def _hovernet() -> nn.Module:
    from monai.networks import nets

    model: nn.Module = nets.HoVerNet(mode="fast", in_channels=3, out_classes=_CLASSES)
    return model


def _milmodel() -> nn.Module:
    from monai.networks import nets

    model: nn.Module = nets.MILModel(_CLASSES, mil_mode="att", pretrained=False, backbone="resnet18")
    return model


MONAI: tuple[Case, ...] = (
    *(_case(name, 2) for name in _NETS),
    # Its convolutions have no padding: 256 is the size that it is made for.
    Case(package="monai", name="hovernet_2d", make=_hovernet, shape=(1, 3, 256, 256)),
    *(_case(name, 3) for name in _NETS),
    Case(package="monai", name="milmodel", make=_milmodel, shape=(1, 4, 3, 64, 64)),
)
