"""Models of vectors and token ids: stages on full tensors, exact and within budgets."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import sft
from sft.analysis.ir.axes import Axes
from sft.api.inputs import find_missing_channels
from sft.cli.main import main
from tests.helpers.capture_cache import remembered_captures
from tests.helpers.exactness import assert_exact, gradient_errors, relative_error
from tests.helpers.models import image, seeded
from tests.helpers.plans import least_budget

pytestmark = pytest.mark.usefixtures("without_proposals")

_TOLERANCE = 1e-12


class Block(nn.Module):
    """A block of a decoder: causal attention and two linear layers, each after a layer norm and with a skip."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries(self.attention_norm(x)).view(batch, length, 3 * self.heads, width // self.heads).transpose(1, 2)
        queries, keys, values = split.chunk(3, dim=1)
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Gpt(nn.Module):
    """Token ids and labels ``[N, L]`` to a loss; with weights of tokens ``[N, L]`` as first input, which may require grad."""

    def __init__(self, num_blocks: int = 3, vocabulary: int = 11, length: int = 12, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.head = nn.Linear(width, vocabulary)

    def scores(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.tokens(ids) + self.places))
        return out

    def forward(self, weights: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        losses = cross_entropy(self.scores(ids).flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.view_as(weights) * weights).mean()


class FromIds(Gpt):
    """Token ids to scores."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]  # another signature on purpose
        return self.scores(ids)


class Skips(nn.Module):
    """A DAG: every layer adds the value of half its depth, and all values are joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(16, 16) for _ in range(6)), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = []
        for layer in self.layers:
            seen.append(x)
            x = torch.tanh(layer(x)) + seen[len(seen) // 2]
        return {"last": self.norm(x), "all": torch.stack(seen, 1).softmax(1).square().mean((0, 2))}


def _mlp() -> nn.Module:
    layers = (layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)))
    return nn.Sequential(*layers, nn.Linear(16, 3))


def _repeat() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), sft.nn.Repeat(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 16), nn.Linear(8, 2))


def _ids(seed: int = 0) -> Tensor:
    return torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(seed))


_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (_mlp, lambda: (image(32, 16),)),
    "gpt": (Gpt, lambda: (image(2, 12).abs(), _ids(), _ids(1))),
    "skips": (Skips, lambda: (image(5, 16),)),
    "six axes": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lambda: (image(2, 1, 2, 3, 2, 3),)),
    "one axis": (lambda: nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2)), lambda: (image(9),)),
}


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_() if x.is_floating_point() else x


def _budgets(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[int]:
    """Smallest budget of a step that also differentiates the first input, a medium one, and that of plain PyTorch."""
    net: Any = sft.compile(model, list(inputs), budget="1GiB")
    most = net.plan_for(_leaf(inputs[0]), *inputs[1:]).total_bytes
    with pytest.raises(sft.BudgetError) as refused:
        sft.of(sft.compile(model, [(None,) * x.dim() for x in inputs], budget=1)).plan_for(_leaf(inputs[0]), *inputs[1:])
    least = refused.value.needed_bytes
    return [least, (least + most) // 2, most]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("case", _CASES)
def test_every_budget_is_exact_and_kept(case: str, training: bool) -> None:
    make, inputs_of = _CASES[case]
    model, inputs = seeded(make).train(training), inputs_of()
    with remembered_captures():
        budgets = _budgets(model, inputs)
        reports = [assert_exact(model, *inputs, budget=budget, tolerance=_TOLERANCE) for budget in budgets]
    assert all(segment.mode == "whole" for report in reports for segment in report.plan.segments)
    flops = [report.flops for report in reports]
    assert flops == sorted(flops, reverse=True) and flops[-1] == reports[-1].plan.plain_flops
    if len(list(model.modules())) > 6:  # deep enough that stages run again
        assert budgets[0] < budgets[-1] and flops[0] > flops[-1]


@pytest.mark.parametrize("strategy", ["sqrt", "revolve", "bisect", "optimal", "acg", "offload-greedy", "offload-dp", "vdnn"])
def test_published_strategies_run_as_planned(strategy: str) -> None:
    model, x = seeded(_mlp), image(32, 16)
    options = sft.Options(strategy=strategy)
    with remembered_captures():
        plain = sft.plan(model, (32, 16), options=sft.Options(strategy="none"))
        report = assert_exact(
            model, x, budget=least_budget(model, (32, 16), options), options=options, tolerance=_TOLERANCE, steps=1, input_grad=False
        )
    assert report.plan.total_bytes < plain.total_bytes
    copies = strategy.startswith(("offload", "vdnn"))
    assert (report.plan.host_bytes > 0) == copies and (report.flops > plain.flops) == (not copies)


def test_optimal_needs_no_more_flops_than_sqrt() -> None:
    model = seeded(_mlp)
    with remembered_captures():
        budget = least_budget(model, (32, 16), sft.Options(strategy="sqrt"))
        flops = [sft.plan(model, (32, 16), budget=budget, options=sft.Options(strategy=name)).flops for name in ("optimal", "sqrt")]
    assert flops[0] <= flops[1]


def test_values_that_do_not_fit_wait_on_the_host() -> None:
    model, inputs = seeded(Gpt), _CASES["gpt"][1]()
    with remembered_captures():
        plain = sft.plan(model, list(inputs), options=sft.Options(strategy="none")).total_bytes
        budget = (least_budget(model, list(inputs)) + plain) // 2
        options = sft.Options(host_budget="1MiB", link_bandwidth="1TB", strategy="offload-dp")
        report = assert_exact(model, *inputs, budget=budget, options=options, tolerance=_TOLERANCE, steps=1, input_grad=False)
    assert report.plan.total_bytes <= budget < plain and 0 < report.plan.host_bytes <= 2**20


def test_a_repetition_follows_the_budget() -> None:
    model, x = seeded(_repeat), image(4, 8)
    eager = nn.Sequential(*(child.unstacked() if isinstance(child, sft.nn.Repeat) else copy.deepcopy(child) for child in model.children()))
    blocks = list(eager[1].children())
    expected = eager(x)
    expected.square().sum().backward()
    with remembered_captures():
        plain = sft.plan(model, (4, 8)).total_bytes
        for budget in (least_budget(model, (4, 8)), plain):
            net: Any = sft.compile(copy.deepcopy(model), (4, 8), budget=budget)
            with sft.measure_peak() as peak:
                out = net(x.clone())
                out.square().sum().backward()
            assert peak.num_bytes <= net.plan.projected_peak_bytes + 4 * out.numel() * 8 + 64  # the square, its sum, their derivatives
            assert relative_error(out, expected) <= _TOLERANCE
            stacked = {
                f"1.block.{name}": torch.stack([block.get_parameter(name).grad for block in blocks])  # type: ignore[misc]  # they have one
                for name, _ in blocks[0].named_parameters()
            }
            around = {name: p.grad for name, p in eager.named_parameters() if not name.startswith("1.")}
            errors = gradient_errors({name: p.grad for name, p in net.named_parameters()}, {**around, **stacked})
            assert max(errors.values()) <= _TOLERANCE
        assert net.plan.total_bytes <= plain


def test_ids_alone_masks_and_other_sizes() -> None:
    """Integers of rank 2 with varying extents as the only input; the masks do not depend on the budget."""
    model = seeded(FromIds)
    with remembered_captures():
        net: Any = sft.compile(model, [torch.empty(2, 12, dtype=torch.long, device="meta")], budget="1GiB")
        small: Any = sft.compile(model, (None, 12), budget=least_budget(model, [torch.empty(2, 12, dtype=torch.long, device="meta")]))
        outputs = []
        for each in (net, small):
            torch.manual_seed(3)
            outputs.append(each(_ids()))
        assert torch.equal(*outputs) and small.plan.flops > net.plan.flops
        model.eval()
        for num in (1, 3):
            ids = _ids()[:1].expand(num, 12).contiguous()
            assert relative_error(net(ids), model(ids)) <= _TOLERANCE
            assert net.plan.input_shapes == ((num, 12),)


def test_autocast_on_vectors() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))).float()
    net, x = sft.compile(copy.deepcopy(model), (None, 16)), image(8, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = net(x), model(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert relative_error(ours, theirs) <= 2**-8


class _Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda: sft.plan(_Branching(), (32, 16)), sft.UnsupportedError, "control flow"),
        (lambda: sft.plan(nn.Conv2d(3, 3, 3), (32, 16)), sft.InputError, "32x16"),
        (lambda: sft.plan(nn.Linear(16, 2), (32, 16), mesh=(1, 2)), sft.InputError, "no input is one"),
        (lambda: sft.plan(nn.Linear(16, 2), ()), sft.InputError, "give"),
        (lambda: sft.compile(nn.Linear(16, 2), (None, 16))(torch.tensor(1.0)), sft.InputError, "no dimensions"),
        (lambda: sft.compile(nn.Linear(2, 2), (None, 2))(torch.ones(3, 2), input_grad=torch.ones(3, 2)), sft.InputError, "only images"),
    ],
)
def test_refusals_name_remedies(ask: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask()


def test_the_page_of_deep_models_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "deep.md").read_text()
    section = page.partition("## Non-image inputs")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/deep.md", "exec"), {})
    share, redundancy = map(float, capsys.readouterr().out.split())
    assert share < 1 < redundancy


def test_vectors_and_labels_have_no_axes() -> None:
    assert [Axes.of_inputs(shapes).count for shapes in ([(2, 3)], [(2,)], [(2,) * 6], [(2, 3), (2, 3, 4)])] == [0, 0, 0, 1]
    assert find_missing_channels([(2, 12), (2,)]) == (False, False)
    assert not Axes(0).is_image_shape((2, 3)) and Axes(0).names == () and Axes(0).extent((2, 3), 0) == 1


def test_the_command_line_plans_vectors(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["torch.nn:Linear", "--model-args", "in_features=16", "out_features=4", "--input", "32x16"]
    assert main(["plan", *asked]) == 0
    assert "Plan for a training step on 32x16 (float32)" in capsys.readouterr().out
    assert main(["check", *asked]) == 0
    assert "0 operators in strips, 1 whole" in capsys.readouterr().out
