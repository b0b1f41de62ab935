"""timm's convolutional networks, the smallest of each family, hybrids with attention, and transformers of two blocks a stage."""

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
    "convnext_zepto_rms",
    "cspnext_tiny",
    "efficientvim_m1",
    "efficientvit_b0",
    "mambaout_femto",
    "mobilevitv2_050",
    "shvit_s1",
    "swiftformer_xs",
    "test_efficientnet_evos",
)
_NARROW: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2}
_STAGES: dict[str, Any] = {"depths": (2, 2), "embed_dim": 16, "num_heads": (2, 2), "window_size": 4}
_PYRAMID: dict[str, Any] = {"depths": (1,) * 4, "embed_dims": (16, 32, 32, 64), "num_heads": (1, 2, 2, 2)}
#: Transformers with fewer blocks, of fewer channels, and their images' size.
_TRANSFORMERS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (64, {**_NARROW, "img_size": 64, "attn_drop_rate": 0.1}),
    "vit_relpos_small_patch16_224": (64, {**_NARROW, "img_size": 64}),
    "vit_small_patch16_dinov3": (64, {**_NARROW, "img_size": 64}),
    "eva02_tiny_patch14_224": (56, {**_NARROW, "img_size": 56}),
    "beit_base_patch16_224": (64, {**_NARROW, "img_size": 64}),
    "cait_xxs24_224": (64, {**_NARROW, "img_size": 64}),
    "xcit_nano_12_p16_224": (64, {**_NARROW, "img_size": 64}),
    "qwen3_vit_88m": (64, _NARROW),
    "samvit_base_patch16": (64, {**_NARROW, "img_size": 64, "global_attn_indexes": (1,), "window_size": 2}),
    "swin_tiny_patch4_window7_224": (64, {**_STAGES, "img_size": 64}),
    "swinv2_cr_tiny_224": (64, {**_STAGES, "img_size": 64}),
    "twins_svt_small": (64, {**_PYRAMID, "img_size": 64}),
    "davit_tiny": (64, _PYRAMID),
    "hiera_tiny_224": (64, {"img_size": 64, "embed_dim": 16}),
    "pvt_v2_b0": (64, {"depths": (1,) * 4}),
}

TIMM: tuple[Case, ...] = (
    # The convolution in place of the first linear layer has 7 x 7 positions; narrow, it has the same operators.
    _case("vgg11", mlp_ratio=0.01),
    _case("vgg11_bn", mlp_ratio=0.01),
    *(_case(name) for name in (*_RESIDUAL, *_CROSS_STAGE, *_MOBILE, *_MODERN)),
    *(_case(name, shape=MULTIPLE_OF_32) for name in ("resnetaa50", "dla34", "dla46x_c", "hrnet_w18_small")),
    *(_case(name, shape=(2, 3, size, size), **arguments) for name, (size, arguments) in _TRANSFORMERS.items()),
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
