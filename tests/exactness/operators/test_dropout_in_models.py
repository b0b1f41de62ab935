"""Dropout inside compiled models has the masks of the positional reference, for any strips."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sft
from sft.common.errors import UnsupportedError
from tests.helpers.exactness import assert_exact
from tests.helpers.positional_rng import DropPath


class _Net(nn.Module):
    def __init__(self, drops: list[nn.Module], tail: nn.Module | None = None, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6) if norm else nn.Identity(), nn.LeakyReLU(), drop)
            for drop in drops
        )
        self.tail = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), tail or nn.Identity(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.tail(x.mean((2, 3)))
        return y


def _drop(kind: str, p: float) -> nn.Module:
    made: dict[str, nn.Module] = {
        "element": nn.Dropout(p),
        "inplace": nn.Dropout(p, inplace=True),
        "channel": nn.Dropout2d(p),
        "row": DropPath(p),
        "batch": DropPath(p, mode="batch"),
        "floored": DropPath(p, floors=True),
        "alpha": nn.AlphaDropout(p),
        "feature_alpha": nn.FeatureAlphaDropout(p),
    }
    return made[kind]


_KINDS = ["element", "inplace", "channel", "row", "batch", "floored", "alpha", "feature_alpha"]


@settings(max_examples=max(4, settings().max_examples // 25))
@given(
    kinds=st.lists(st.sampled_from(_KINDS), min_size=1, max_size=3),
    p=st.sampled_from([0.1, 0.5, 0.83]),
    rows=st.integers(1, 24),
    every=st.sampled_from([None, 1, 3]),
    batch=st.integers(1, 3),
    batch_tile=st.sampled_from([1, 2]),
    size=st.tuples(st.integers(9, 24), st.integers(5, 20)),
    norm=st.booleans(),
    cols=st.none() | st.integers(4, 20),
    halo=st.sampled_from(["carry", "recompute"]),
)
def test_every_kind_is_the_same_at_every_tiling(
    kinds: list[str],
    p: float,
    rows: int,
    every: int | None,
    batch: int,
    batch_tile: int,
    size: tuple[int, int],
    norm: bool,
    cols: int | None,
    halo: str,
) -> None:
    torch.manual_seed(0)
    model = _Net([_drop(kind, p) for kind in kinds], nn.Dropout(p), norm).double().train()
    x = torch.randn(batch, 3, *size, dtype=torch.float64)
    rows = rows if halo == "carry" else max(rows, 6)
    assert_exact(model, x, options=sft.Options(tile=(rows, cols), state_every=every, batch_tile=batch_tile, halo=halo))


@pytest.mark.parametrize(("kind", "p"), [*((kind, 0.0) for kind in _KINDS), ("element", 1.0)])
def test_nothing_and_everything_dropped(kind: str, p: float) -> None:
    torch.manual_seed(0)
    assert_exact(_Net([_drop(kind, p)]).double().train(), torch.randn(1, 3, 17, 12), options=sft.Options(tile=(5, None)))


@pytest.mark.parametrize("options", [sft.Options(strategy="none"), sft.Options(tile=(7, None), state_every=2), sft.Options()])
def test_whole_and_tiled_see_one_mask(options: sft.Options) -> None:
    torch.manual_seed(0)
    model = _Net([nn.Dropout(0.4), nn.Dropout2d(0.3), DropPath(0.5)], nn.Dropout(0.5)).double().train()
    assert_exact(model, torch.randn(2, 3, 33, 18), options=options)


@pytest.mark.parametrize("kind", _KINDS)
def test_dropout_runs_in_strips(kind: str) -> None:
    report = sft.check(nn.Sequential(nn.Conv2d(3, 4, 3), _drop(kind, 0.5), nn.Conv2d(4, 2, 3)).train(), (2, 3, 24, 16))
    assert report.ok, report
    assert not report.whole_reasons, report


class _Branch(nn.Module):
    """A branch on pixels with channels last, in one list or in rows, with a learned scale and stochastic depth (Swin, MaxViT)."""

    def __init__(self, *, is_list: bool) -> None:
        super().__init__()
        self.is_list, self.drop, self.scale = is_list, DropPath(0.5), nn.Parameter(torch.full((1, 1, 1), 0.7))
        self.first, self.linear, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).permute(0, 2, 3, 1)
        pixels = x.flatten(1, 2) if self.is_list else x
        pixels = pixels + self.drop(self.scale * self.linear(pixels))
        return self.last(pixels.reshape(x.shape).permute(0, 3, 1, 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("is_list", "num_images"), [(False, 1), (True, 1), (True, 2)])
def test_stochastic_depth_of_pixels_in_strips(is_list: bool, num_images: int) -> None:
    """The mask of a single image has one element."""
    torch.manual_seed(0)
    model, x = _Branch(is_list=is_list), torch.randn(num_images, 3, 12, 10)
    assert not sft.check(model, x.shape).whole_reasons
    assert_exact(model, x, options=sft.Options(tile=(5, 4)), steps=1)


class _Late(nn.Module):
    """Dropouts with another order of registration than of execution, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Dropout2d(0.5), nn.Dropout(0.5)
        self.also = self.second
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.also(self.second(self.first(self.conv(x))))
        return y


def test_sites_are_numbered_as_they_run() -> None:
    assert_exact(_Late().train(), torch.randn(2, 3, 16, 12), options=sft.Options(tile=(5, None)))


def test_a_dropout_of_three_axes_on_images_drops_samples() -> None:
    """An input without a batch by its rank is one sample."""
    assert_exact(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout3d(0.5)).train(), torch.randn(4, 3, 16, 12), options=sft.Options(tile=(5, None))
    )


def _compiled(model: nn.Module, rows: int = 5) -> nn.Module:
    net: nn.Module = sft.compile(model, (1, 3, 24, 16), budget="1GiB", options=sft.Options(tile=(rows, None)))
    return net


def test_a_seed_a_call_from_torchs_generator() -> None:
    torch.manual_seed(0)
    net, x = _compiled(_Net([nn.Dropout(0.5)]).train()), torch.randn(1, 3, 24, 16)
    torch.manual_seed(1)
    first, second = net(x), net(x)
    assert not torch.equal(first, second), "two calls share their mask"
    torch.manual_seed(1)
    assert torch.equal(net(x), first), "the seed does not come from torch's generator"


def test_no_randomness_leaves_the_generator_alone() -> None:
    net, x = _compiled(_Net([nn.Dropout(0.5)]).eval()), torch.randn(1, 3, 24, 16)
    before = torch.get_rng_state()
    net(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failing_forward_leaves_the_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = _compiled(_Net([nn.Dropout(0.5)]).train()), torch.randn(1, 3, 24, 16)

    def fail(*arguments: object, **keywords: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("sft.api.engine.run_region", fail)
    before = torch.get_rng_state()
    with pytest.raises(MemoryError):
        net(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_inference_in_training_mode_drops_too() -> None:
    torch.manual_seed(0)
    model = _Net([nn.Dropout(0.5)]).train()
    x = torch.randn(1, 3, 24, 16)
    with torch.no_grad():
        results = []
        for rows in (3, 24):
            torch.manual_seed(5)
            results.append(_compiled(model, rows)(x))
    torch.testing.assert_close(results[0], results[1])


class _OnTheKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, nn.functional.dropout(self.weight, 0.5, self.training))


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.poisson(x.abs())


class _Drawn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(x.sigmoid())


class _Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(1, 1, x.shape[2], x.shape[3]).bernoulli_(0.5)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_OnTheKernel(), "drop its input or its output"),
        (_Noise(), "outside the compiled model"),
        (_Drawn(), "draw with one probability"),
        (_Block(), "follows the image's size"),
    ],
)
def test_dropout_without_positions_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        sft.compile(model.train(), (1, 3, 24, 16), budget="1GiB")


def test_a_rank_three_gate_with_as_many_channels_as_samples_is_not_a_sample_each() -> None:
    """[C, 1, 1] with [N, C, H, W] belongs to channels even if C equals N."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            gate = x.mean((2, 3)).mean(0).view(3, 1, 1)
            y: Tensor = self.conv(x) * gate
            return y

    assert_exact(Gate().double(), torch.randn(3, 3, 12, 9), options=sft.Options(tile=(4, None), batch_tile=1))


class _Called(nn.Module):
    """Dropout as a function, and one that never drops, between others."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.conv, self.p = nn.Conv2d(3, 4, 3), p
        self.drop, self.idle = nn.Dropout(0.4), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.idle(F.dropout(self.conv(x), self.p, self.training))
        y: Tensor = self.drop(x) + F.dropout(x, training=self.training)
        return y


@pytest.mark.parametrize("p", [0.3, 0.0, 1.0])
def test_dropout_may_be_called_as_a_function(p: float) -> None:
    assert_exact(_Called(p).train(), torch.rand(2, 3, 20, 11), options=sft.Options(tile=(5, None)))


def test_a_default_device_of_the_caller_is_ignored() -> None:
    """Models are often made on the meta device, and planned while it is still the default."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 11), nn.Dropout(0.25)
        )
        inside = sft.plan(model, (13, 3, 32, 32), budget="1GiB")
    assert inside == sft.plan(model, (13, 3, 32, 32), budget="1GiB")


class _Attention(nn.Module):
    """Attention of all pixels with dropout of its weights, of two heads for the queries."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.num_heads = form, 1 if form == "grouped" else 2
        self.query, self.pair = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 2 * 4 * self.num_heads, 1)
        self.bias, self.last = nn.Parameter(torch.randn(2, 1, 1)), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        num_pixels = x.shape[2] * x.shape[3]
        query, key, value = (y.view(x.shape[0], -1, 4, num_pixels).mT for y in (self.query(x), *self.pair(x).chunk(2, 1)))
        mask: Tensor | None = None
        if self.form == "table":  # the first queries read no key
            mask = (torch.arange(num_pixels) > 2)[:, None] & (torch.arange(num_pixels) % 3 > 0)
        elif self.form == "bias":
            mask = self.bias * query.mean(-1, keepdim=True)
        options = {"grouped": {"enable_gqa": True}, "causal": {"is_causal": True, "scale": 0.7}}.get(self.form, {})
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.3, **options)  # type: ignore[arg-type]
        return self.last(y.mT.reshape(x.shape[0], 8, *x.shape[2:]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["grouped", "causal", "table", "bias"])
def test_attention_drops_weights_by_position(form: str) -> None:
    torch.manual_seed(0)
    assert_exact(_Attention(form), torch.randn(2, 3, 4, 5), options=sft.Options(tile=(2, None)))


class _Encoder(nn.Module):
    """A vision transformer of torch's own layers, with its default dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layer = nn.Conv2d(3, 8, 4, stride=4), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.patches(x).flatten(2).mT).mean(1)  # type: ignore[no-any-return]


def test_torchs_transformer_layer_in_training() -> None:
    torch.manual_seed(0)
    model, x = _Encoder(), torch.randn(2, 3, 12, 16)
    assert_exact(model, x, steps=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert sft.compile(model, x.shape)(x).dtype == model(x).dtype


class _ChannelAttention(nn.Module):
    """Attention between channels: the scale of the scores is a function of the number of pixels."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale, self.first = scale, nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).flatten(2).unsqueeze(1)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.3, scale=self.scale).reshape(x.shape[0], 4, *x.shape[2:])


def test_attention_with_a_scale_of_the_image_asks_for_a_number() -> None:
    with pytest.raises(UnsupportedError, match="its scale follows the image's size; give scale= as a number"):
        sft.compile(_ChannelAttention(None), (1, 3, 8, 6))
    torch.manual_seed(0)
    assert_exact(_ChannelAttention(0.2), torch.randn(1, 3, 8, 6), options=sft.Options(tile=(2, None)))
