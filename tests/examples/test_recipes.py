"""The recipes in `examples/recipes` train as with the plain model, and the documentation shows their code."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sft
from tests.helpers.bags import AttentionBag, VisionTransformer
from tests.helpers.models import chain, seeded

_ROOT = Path(__file__).resolve().parents[2]
_SHAPE = (2, 3, 16, 12)
_OPTIONS = sft.Options(tile=(5, None))

pytestmark = [
    pytest.mark.filterwarnings("ignore:::pytorch_lightning"),  # advice on workers and loggers, and deprecations among themselves
    pytest.mark.filterwarnings("ignore:::accelerate"),
]


def _net() -> nn.Module:
    body = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 3, stride=2)
    return chain(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def _compiled(model: nn.Module) -> nn.Module:
    net: nn.Module = sft.compile(copy.deepcopy(model), (*_SHAPE[:2], None, None), options=_OPTIONS)
    return net


def _batches() -> DataLoader[Any]:
    images = torch.randn((8, *_SHAPE[1:]), generator=torch.Generator().manual_seed(0))
    samples: Any = [(image, number % 3) for number, image in enumerate(images)]
    return DataLoader(samples, batch_size=_SHAPE[0])


def _assert_same(ours: dict[str, Tensor], eager: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == eager.keys()
    for name, value in eager.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_accelerate(tmp_path: Path) -> None:
    """With mixed precision, for which it replaces ``forward``."""
    accelerate = pytest.importorskip("accelerate")
    from examples.recipes.with_accelerate import train

    model = seeded(_net).float()
    trained = []
    for net in (copy.deepcopy(model), _compiled(model)):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        prepared = train(accelerator, net, _batches(), num_epochs=2)
        assert prepared is net
        assert prepared.eval()(torch.zeros(_SHAPE)).dtype == torch.float32
        trained.append({name: value.clone() for name, value in prepared.state_dict().items()})
    _assert_same(trained[1], trained[0], 2e-3)
    assert not torch.equal(trained[1]["0.weight"], model.state_dict()["0.weight"])
    assert cast(Any, net).plan.segments, "the compiled one was used"
    accelerator.save_model(net, tmp_path, safe_serialization=False)
    _assert_same(torch.load(tmp_path / "pytorch_model.bin"), trained[1], 0)
    accelerator.free_memory()


def _fit(net: nn.Module, num_epochs: int, resume: Path | None = None) -> Any:
    import pytorch_lightning as pl

    from examples.recipes.with_lightning import Classifier

    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        max_epochs=num_epochs,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        num_sanity_val_steps=0,
        **quiet,
    )
    trainer.fit(Classifier(net), _batches(), _batches(), ckpt_path=None if resume is None else str(resume))
    return trainer


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    model = seeded(_net).float()
    path = tmp_path / "checkpoint.ckpt"
    eager = _fit(copy.deepcopy(model), 2)
    # Half the epochs, then the rest in a fresh model.
    half = _fit(_compiled(model), 1)
    half.save_checkpoint(path)
    ours = _fit(_compiled(seeded(_net, seed=5).float()), 2, path)
    _assert_same(ours.model.net.state_dict(), eager.model.net.state_dict(), 2e-3)
    assert not torch.equal(half.model.net.state_dict()["0.weight"], ours.model.net.state_dict()["0.weight"])
    torch.testing.assert_close(ours.callback_metrics["loss"], eager.callback_metrics["loss"], rtol=2e-3, atol=2e-3)
    assert ours.callback_metrics["right"] == eager.callback_metrics["right"]
    # The plain model loads it.
    copy.deepcopy(model).load_state_dict({k.removeprefix("net."): v for k, v in torch.load(path)["state_dict"].items()})


def test_lightning_s_summary_of_inner_layers_is_refused() -> None:
    pl: Any = pytest.importorskip("pytorch_lightning")
    from examples.recipes.with_lightning import Classifier

    module = Classifier(_compiled(seeded(_net).float()))
    module.example_input_array = torch.randn(_SHAPE)
    summary: Callable[..., Any] = pl.utilities.model_summary.ModelSummary
    assert summary(module, max_depth=1).total_parameters > 0
    with pytest.raises(sft.UnsupportedError, match=r"a compiled model does not call its submodules"):
        summary(module, max_depth=2)


def _smallest(model: nn.Module, x: Tensor) -> nn.Module:
    with pytest.raises(sft.BudgetError) as refusal:
        sft.compile(model, x, budget=1)
    net: nn.Module = sft.compile(model, x, budget=refusal.value.needed_bytes)
    return net


def test_peft() -> None:
    """Low-rank adapters of an encoder of tiles, trained by slide labels, as around the plain model."""
    pytest.importorskip("peft")
    from examples.recipes.with_peft import adapted, train

    bags = [(torch.randn((6, 3, 8, 8), generator=torch.Generator().manual_seed(number)), torch.tensor([number % 2])) for number in range(3)]
    trained = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = AttentionBag(adapted(VisionTransformer(24, 3, 2, 4, 8), ("qkv", "project")), 24)
        net = _smallest(model, bags[0][0]) if is_compiled else model
        train(net, bags, num_epochs=2)
        # A softmax does not depend on this bias: its gradient is rounding error, which Adam scales to the size of other gradients.
        trained.append({name: value.clone() for name, value in model.state_dict().items() if name != "score.2.bias"})
        if is_compiled:
            plan = net.plan_for(bags[0][0])  # type: ignore[operator]
            assert any(segment.takes_samples for segment in plan.segments)
            assert plan.frozen_bytes > 0.5 * sum(value.nbytes for value in model.state_dict().values())
    _assert_same(trained[1], trained[0], 1e-5)


@pytest.mark.parametrize("name", ["with_accelerate", "with_lightning", "with_peft"])
def test_the_documentation_shows_them(name: str) -> None:
    source = (_ROOT / "examples" / "recipes" / f"{name}.py").read_text()
    shown = source.partition("# [recipe]\n")[2].partition("# [end]")[0].rstrip()
    assert textwrap.dedent(shown) in (_ROOT / "docs" / "training.md").read_text()
