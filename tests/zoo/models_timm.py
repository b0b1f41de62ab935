"""timm's convolutional networks, the smallest of each family. A few mix in attention: there the question is what is said about it."""

from __future__ import annotations

from typing import Any

from torch import nn

from .case import IMAGE, LARGER, MULTIPLE_OF_32, Case

__all__ = ["TIMM"]


def _case(name: str, *, shape: tuple[int, ...] = IMAGE, **arguments: Any) -> Case:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=5, **arguments)
        return model

    return Case(package="timm", name=name, make=make, shape=shape)


_RESIDUAL = (
    "resnet18",
    "resnet26d",
    "resnet26t",
    "resnet50_gn",
    "resnetblur18",
    "resnetrs50",
    "resnetv2_18",
    "resnetv2_50x1_bit",
    "resnext26ts",
    "seresnet33ts",
    "seresnext26d_32x4d",
    "legacy_seresnet18",
    "ecaresnet26t",
    "eca_resnext26ts",
    "gcresnext26ts",
    "skresnet18",
    "resnest14d",
    "res2net50_26w_4s",
    "res2next50",
    "nf_resnet26",
    "eca_nfnet_l0",
    "nf_regnet_b0",
    "regnetx_002",
    "regnety_002",
    "regnetz_005",
    "gernet_s",
    "tresnet_m",
    "dpn68",
)
_CROSS_STAGE = (
    "darknet17",
    "darknet53",
    "cspresnet50",
    "cspdarknet53",
    "cs3darknet_s",
    "cs3darknet_focus_s",
    "cs3sedarknet_l",
    "densenet121",
    "densenetblur121d",
    "rdnet_tiny",
    "selecsls42",
    "vovnet39a",
    "ese_vovnet19b_slim_dw",
    "hgnet_tiny",
    "hgnetv2_b0",
)
_MOBILE = (
    "mobilenetv1_100",
    "mobilenetv2_035",
    "mobilenetv3_small_050",
    "mobilenetv4_conv_small",
    "mobilenetv4_hybrid_medium",
    "efficientnet_b0",
    "efficientnet_lite0",
    "efficientnet_es",
    "efficientnet_b0_gn",
    "efficientnetv2_rw_t",
    "tf_efficientnetv2_b0",
    "tf_efficientnet_cc_b0_4e",
    "mixnet_s",
    "mnasnet_small",
    "semnasnet_075",
    "spnasnet_100",
    "fbnetc_100",
    "fbnetv3_b",
    "hardcorenas_a",
    "tinynet_e",
    "lcnet_050",
    "rexnet_100",
    "ghostnet_050",
    "ghostnetv2_100",
    "repghostnet_050",
    "repvgg_a0",
    "mobileone_s0",
    "repvit_m0_9",
    "fastvit_t8",
    "starnet_s1",
    "fasternet_t0",
)
_MODERN = (
    "convnext_atto",
    "convnextv2_atto",
    "inception_next_atto",
    "edgenext_xx_small",
    "poolformer_s12",
    "poolformerv2_s12",
    "convformer_s18",
    "caformer_s18",
    "focalnet_tiny_srf",
    "mambaout_femto",
    "efficientvit_b0",
)

TIMM: tuple[Case, ...] = (
    # The convolution in place of the first linear layer has 7 x 7 positions; narrow, it has the same operators.
    _case("vgg11", mlp_ratio=0.01),
    _case("vgg11_bn", mlp_ratio=0.01),
    *(_case(name) for name in (*_RESIDUAL, *_CROSS_STAGE, *_MOBILE, *_MODERN)),
    *(_case(name, shape=MULTIPLE_OF_32) for name in ("resnetaa50", "dla34", "dla46x_c", "hrnet_w18_small")),
    # Attention in blocks of 8 x 8 on the smallest map.
    _case("bat_resnext26ts", shape=(2, 3, 256, 256)),
    _case("convmixer_768_32"),
    _case("inception_v3", shape=LARGER),
    _case("inception_v4", shape=LARGER),
    _case("inception_resnet_v2", shape=MULTIPLE_OF_32),
    _case("legacy_xception"),
    _case("xception41"),
    _case("nasnetalarge"),
    _case("pnasnet5large"),
    # Position encodings of one size.
    *(_case(name, shape=MULTIPLE_OF_32, img_size=96) for name in ("coat_tiny", "efficientformerv2_s0", "visformer_tiny")),
)
