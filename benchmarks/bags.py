"""Memory of a step on all tiles of a slide: `sft` against plain PyTorch, checkpointing of each block, and frozen features.

A bag `[N, 3, h, w]` goes through an encoder and is pooled by attention. `sft` reads the tiles from an array, a few at a time, and takes the
smallest budget that it accepts. Plain PyTorch has all tiles in memory, as has checkpointing. Frozen features are made in groups of 16 tiles
without gradients, and the head alone is trained on them: another function, for comparison of memory. Two more networks take one image:
tiles cut inside the model, and windows. Bytes are above the weights, new gradients included; those that ran are metered by
`sft.measure_peak`, others projected.

The last case is a ViT-S/14 (shape of DINOv2, random weights) with low-rank adapters of rank 8 on 4,096 tiles of 224 px, in 2 GiB: it is
planned. Its frozen weights have no gradients, so plain PyTorch takes the FLOPs of two forward passes. One recomputation takes half as many
again. On 128 tiles it runs, and its gradients are compared with those of checkpointing, which computes the function of plain PyTorch.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from harness.bags import AttentionBag, VisionTransformer, adapted_bag, checkpoint_modules
from harness.cases import load_models
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

import sft

#: Tiles in one forward pass of the encoder that makes features.
_FEATURE_TILES = 16
#: Least scale of the error of a gradient, as a share of the largest gradient.
_SMALLEST_SHARE = 1e-3
#: Bytes of plain PyTorch's step above which it is projected, and does not run.
_MOST_PLAIN_BYTES = 6 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network on inputs of one shape.

    Attributes:
        network: name, as in :func:`build`.
        shape: of the input.
        runs: True if `sft` takes a step; otherwise it is planned.
    """

    network: str
    shape: tuple[int, int, int, int]
    runs: bool = True

    @property
    def text(self) -> str:
        """The input in words."""
        num, _, height, _ = self.shape
        return f"one image of {height:,} px" if num == 1 else f"{num:,} tiles of {height} px"


CASES = (
    *(Case(network="ViT-tiny, 4 blocks", shape=(num_tiles, 3, 64, 64)) for num_tiles in (16, 64, 256)),
    Case(network="ViT-tiny, 4 blocks", shape=(4096, 3, 64, 64), runs=False),
    *(Case(network="ResNet-18", shape=(num_tiles, 3, 64, 64)) for num_tiles in (16, 256)),
    Case(network="ViT-tiny on tiles cut inside", shape=(1, 3, 1024, 1024)),
    Case(network="Swin-T", shape=(1, 3, 1024, 1024), runs=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Bytes of one method's step.

    Attributes:
        num_bytes: peak bytes above the weights, new gradients included.
        is_metered: True if the step ran.
    """

    num_bytes: int
    is_metered: bool

    @property
    def text(self) -> str:
        """The bytes as a cell."""
        return mib(self.num_bytes) if self.is_metered else f"{mib(self.num_bytes)} (projected)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Readings of a case.

    Attributes:
        case: the case.
        plain: plain PyTorch.
        checkpointed: each block of the encoder under `torch.utils.checkpoint`; ``None`` if it did not run.
        features: frozen features; ``None`` for networks without an encoder of tiles.
        least: `sft` at its smallest budget.
        projected_bytes: bytes that its plan projects.
        redundancy: its FLOPs over plain's.
    """

    case: Case
    plain: Reading
    checkpointed: Reading | None
    features: Reading | None
    least: Reading
    projected_bytes: int
    redundancy: float


def build(network: str) -> nn.Module:
    """A network by name."""
    torch.manual_seed(0)
    windows = load_models("tests/helpers/windows.py")
    if network == "ViT-tiny, 4 blocks":
        return AttentionBag(VisionTransformer(), 192)
    if network == "ViT-tiny on tiles cut inside":
        return AttentionBag(windows.TiledEncoder(VisionTransformer(), 64), 192)
    if network == "Swin-T":
        return windows.SwinTransformer()  # type: ignore[no-any-return]
    models = load_models()
    encoder = models.resnet18(num_classes=192)
    models.freeze_norm(encoder)
    return AttentionBag(encoder, 192)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Blocks of the encoder: of a transformer, or residual blocks of a convolutional network."""
    names = ("TransformerBlock", "SwinBlock", "BasicBlock")
    return [module for module in model.modules() if type(module).__name__ in names]


def metered(step: Callable[[], object], compiled: nn.Module | None = None) -> Reading:
    """Bytes of a step that runs; of a compiled model the second one, as the first makes constants."""
    if compiled is not None:
        step()
        compiled.zero_grad(set_to_none=True)
    with sft.measure_peak() as peak:
        step()
    return Reading(num_bytes=peak.num_bytes, is_metered=True)


def plain_step(model: nn.Module, array: NDArray[np.float32]) -> Callable[[], object]:
    """A step on all tiles, which are copied into a tensor."""

    def step() -> None:
        model(torch.from_numpy(array).clone()).sum().backward()

    return step


def feature_step(model: AttentionBag, array: NDArray[np.float32]) -> Callable[[], object]:
    """A step of the head on features of an encoder without gradients."""
    encoder, head = model.encoder, copy.deepcopy(model)
    head.encoder = nn.Identity()

    def step() -> None:
        with torch.no_grad():
            starts = range(0, len(array), _FEATURE_TILES)
            vectors = torch.cat([encoder(torch.from_numpy(array[start : start + _FEATURE_TILES]).clone()) for start in starts])
        head(vectors).sum().backward()

    return step


def least_net(model: nn.Module, array: NDArray[np.float32]) -> Any:
    """The model compiled for its smallest budget, on an input that is read from an array."""
    try:
        sft.compile(copy.deepcopy(model), [array], budget=1)
    except sft.BudgetError as error:
        return sft.compile(copy.deepcopy(model), [array], budget=error.needed_bytes)
    raise AssertionError("a budget of one byte")


def measure(case: Case) -> Result:
    """Readings of all methods."""
    array = np.random.default_rng(0).standard_normal(case.shape, dtype=np.float32)
    model = build(case.network)
    plain_plan = sft.plan(model, case.shape, budget="1TiB", options=sft.Options(strategy="none"))
    plain = Reading(num_bytes=plain_plan.projected_peak_bytes, is_metered=False)
    fits = plain.num_bytes <= _MOST_PLAIN_BYTES
    if fits:
        plain = metered(plain_step(copy.deepcopy(model), array))
    net = least_net(model, array)
    plan = net.plan
    least = Reading(num_bytes=plan.projected_peak_bytes, is_metered=False)
    if case.runs:
        least = metered(lambda: net(array).sum().backward(), net)
    features = metered(feature_step(copy.deepcopy(model), array)) if case.shape[0] > 1 and isinstance(model, AttentionBag) else None
    checkpoint_modules(blocks_of(model))
    checkpointed = metered(plain_step(model, array)) if fits else None
    return Result(
        case=case,
        plain=plain,
        checkpointed=checkpointed,
        features=features,
        least=least,
        projected_bytes=plan.projected_peak_bytes,
        redundancy=plan.redundancy,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterResult:
    """The ViT-S/14 with low-rank adapters.

    Attributes:
        num_tiles: tiles of the plan.
        budget_bytes: its budget.
        total_bytes: bytes of the plan, weights included.
        redundancy: its FLOPs over plain's.
        num_samples: tiles at a time.
        compared_tiles: tiles of the step that ran.
        metered_bytes: its peak bytes above the weights.
        projected_bytes: the same by its plan.
        worst_error: largest difference of a trained parameter's gradient from that of checkpointing, relative to the largest of its tensor,
            and not below a thousandth of the largest of all.
        loss_error: relative difference of the outputs.
    """

    num_tiles: int
    budget_bytes: int
    total_bytes: int
    redundancy: float
    num_samples: int
    compared_tiles: int
    metered_bytes: int
    projected_bytes: int
    worst_error: float
    loss_error: float


def seeded_bag() -> AttentionBag:
    """The bag with adapters, always with the same weights."""
    torch.manual_seed(0)
    return adapted_bag()


def measure_adapters(num_tiles: int, compared_tiles: int, budget: str) -> AdapterResult:
    """Plan a large bag, and compare a step on a small one."""
    planned: Any = sft.compile(seeded_bag(), [np.zeros((num_tiles, 3, 224, 224), np.float32)], budget=budget)
    plan: sft.Plan = planned.plan
    run = max(segment.batch_tile for segment in plan.segments if segment.takes_samples)
    array = np.random.default_rng(0).standard_normal((compared_tiles, 3, 224, 224), dtype=np.float32)
    net: Any = sft.compile(seeded_bag(), [array], budget=budget)
    outputs: list[Tensor] = []

    def step() -> None:
        y = net(array)
        y.square().sum().backward()
        outputs.append(y.detach())

    reading = metered(step)
    reference = seeded_bag()
    checkpoint_modules(blocks_of(reference))
    expected = reference(torch.from_numpy(array))
    expected.square().sum().backward()
    grads = [
        (ours.grad, theirs.grad)
        for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True)
        if ours.grad is not None and theirs.grad is not None
    ]
    # The bias of a score before the softmax over tiles has gradient 0: its computed value is rounding error.
    least = _SMALLEST_SHARE * max(float(theirs.abs().max()) for _, theirs in grads)
    errors = [float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), least) for ours, theirs in grads]
    expected = expected.detach()
    return AdapterResult(
        num_tiles=num_tiles,
        budget_bytes=plan.budget_bytes,
        total_bytes=plan.total_bytes,
        redundancy=plan.redundancy,
        num_samples=run,
        compared_tiles=compared_tiles,
        metered_bytes=reading.num_bytes,
        projected_bytes=net.plan.projected_peak_bytes,
        worst_error=max(errors),
        loss_error=float((outputs[0] - expected).abs().max() / expected.abs().max()),
    )


HEADERS = (
    "network",
    "input",
    "plain, MiB",
    "checkpoint per block, MiB",
    "frozen features, MiB",
    "sft, MiB",
    "of it projected, MiB",
    "FLOPs / plain",
)
ADAPTER_HEADERS = (
    "tiles",
    "budget, GiB",
    "plan, GiB",
    "FLOPs / plain",
    "tiles at a time",
    "tiles of the step",
    "metered, MiB",
    "projected, MiB",
    "worst error of a gradient",
    "error of the output",
)


def cells(result: Result) -> list[str]:
    """The row of a case."""
    others = [reading.text if reading is not None else "-" for reading in (result.checkpointed, result.features)]
    sizes = [result.least.text, mib(result.projected_bytes)]
    return [
        *(result.case.network, result.case.text, result.plain.text),
        *(*others, *sizes, f"{result.redundancy:.2f}"),
    ]


def adapter_cells(result: AdapterResult) -> list[str]:
    """The row of the network with adapters."""
    return [
        *(f"{result.num_tiles:,}", f"{result.budget_bytes / 2**30:.2f}", f"{result.total_bytes / 2**30:.2f}", f"{result.redundancy:.3f}"),
        *(str(result.num_samples), str(result.compared_tiles), mib(result.metered_bytes), mib(result.projected_bytes)),
        *(f"{result.worst_error:.1e}", f"{result.loss_error:.1e}"),
    ]


def main() -> None:
    """Measure all cases and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--only", choices=("networks", "adapters"), help="one of the two results (default: both)")
    parser.add_argument("--compared-tiles", type=positive_int, default=128, help="tiles of the step of the ViT-S/14 (default: 128)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    notes, raw = __doc__.split("\n\n", 1)[1], {"environment": environment(args.threads)}
    if args.only != "adapters":
        results = []
        for case in CASES:
            results.append(measure(case))
            Console().print("  ".join(cells(results[-1])), highlight=False)
        table = Table(title="Bytes of a step above the weights", headers=HEADERS, rows=[cells(result) for result in results])
        networks = {**raw, "results": [asdict(result) for result in results]}
        write_results(result_stem(args.out, "bags"), networks, [table], notes, None)
    if args.only != "networks":
        adapters = measure_adapters(4096, args.compared_tiles, "2GiB")
        table = Table(title="ViT-S/14 with adapters of rank 8", headers=ADAPTER_HEADERS, rows=[adapter_cells(adapters)])
        Console().print("  ".join(table.rows[0]), highlight=False)
        write_results(result_stem(args.out, "bag-adapters"), {**raw, "adapters": asdict(adapters)}, [table], notes, None)


if __name__ == "__main__":
    main()
