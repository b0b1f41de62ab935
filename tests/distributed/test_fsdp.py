"""``fully_shard`` under a compiled model: outputs, sharded gradients and updates equal unsharded eager PyTorch's, inside the budget."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sft
from tests.helpers.exactness import gradient_errors, param_grads, relative_error
from tests.helpers.models import image, seeded
from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")

_SHAPE = (1, 3, 21, 12)
_OPTIONS = sft.Options(tile=(4, None), mesh_timeout_seconds=60)


class Net(nn.Module):
    """Odd widths, indivisible by the number of ranks; a norm over the image, a frozen layer, and two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.frozen = nn.Conv2d(5, 5, 1).requires_grad_(False)
        self.first, self.second = nn.Conv2d(5, 5, 3, padding=1, bias=False), nn.Conv2d(5, 5, 3, padding=1)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.stem(x))
        x = torch.relu(self.second(torch.relu(self.first(x))))
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def _whole(model: Any, **settings: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, **settings)


def _in_parts(model: Any, **settings: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in (model.stem, [model.first, model.second], model):  # the head is the root's own
        fully_shard(module, **settings)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _full(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in values.items()}


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=1e-2)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def _loss(module: Any, x: Tensor) -> Tensor:
    loss: Tensor = module(x).square().sum()
    return loss


def _check(
    rank: int,
    shard: Callable[..., None],
    shard_mesh: tuple[int, ...],
    image_mesh: tuple[int, int] | None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    micro_steps: int = 1,
    is_synced: bool = True,
    settings: dict[str, Any] | None = None,
) -> None:
    """Two optimizer steps, compared with an unsharded model on all images at once."""
    eager = seeded(Net)
    model = copy.deepcopy(eager)
    shard(model, mesh=_mesh(shard_mesh, ("outer", "inner")[: len(shard_mesh)]), **(settings or {}))
    mesh = None if image_mesh is None else _mesh(image_mesh, ("replica", "band"))
    net: Any = sft.compile(model, _SHAPE, budget="64MiB", options=_OPTIONS, mesh=mesh)
    num_images, own = (dist.get_world_size(), rank) if image_mesh is None else (image_mesh[0], rank // image_mesh[1])
    ours, theirs = make_optimizer(net.parameters()), make_optimizer(eager.parameters())
    for step in range(2):
        for micro in range(micro_steps):
            net.set_requires_gradient_sync(is_synced or micro == micro_steps - 1)
            images = [image(*_SHAPE, seed=100 * step + 10 * micro + number) for number in range(num_images)]
            y = net(images[own])
            y.square().sum().backward()
            before = {name: buffer.clone() for name, buffer in eager.named_buffers()}
            for number in (*(n for n in range(num_images) if n != own), own):  # only this rank's running statistics count
                with torch.no_grad():
                    for name, buffer in eager.named_buffers():
                        buffer.copy_(before[name])
                z = eager(images[number])
                (z.square().sum() / num_images).backward()
            assert relative_error(y.detach(), z.detach()) <= 1e-12
        if image_mesh is None or image_mesh[0] == 1:
            for name, buffer in net.named_buffers():
                assert relative_error(buffer, eager.get_buffer(name)) <= 1e-12, name
        gradients, expected = _full(param_grads(net)), param_grads(eager)
        for grads in (gradients, expected):
            assert {name for name, grad in grads.items() if grad is None} == {"frozen.weight", "frozen.bias"}
        worst = max(gradient_errors(gradients, expected).items(), key=lambda item: item[1])
        assert worst[1] <= 1e-12, f"step {step}: {worst}"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for name, p in _full(dict(net.named_parameters())).items():
            assert relative_error(p.detach(), eager.get_parameter(name).detach()) <= 1e-12, name
    assert all(hasattr(p, "full_tensor") for p in net.parameters()), "a parameter stayed whole"


@pytest.mark.parametrize("shard", [_whole, _in_parts])
@pytest.mark.parametrize("make_optimizer", [_sgd, _adamw])
def test_each_rank_has_images_of_its_own(pair: Ranks, shard: Callable[..., None], make_optimizer: Any) -> None:
    pair.run(_check, shard, (2,), None, make_optimizer)


@pytest.mark.parametrize("is_synced", [True, False])
def test_gradients_of_several_backward_passes_add_up(pair: Ranks, is_synced: bool) -> None:
    pair.run(partial(_check, micro_steps=3, is_synced=is_synced), _in_parts, (2,), None, _sgd)


@pytest.mark.parametrize("reshards", [True, False])
def test_weights_between_the_passes(pair: Ranks, reshards: bool) -> None:
    pair.run(partial(_check, settings={"reshard_after_forward": reshards}), _in_parts, (2,), None, _sgd)


@pytest.mark.parametrize("image_mesh", [(2, 1), (1, 2)])
def test_replicas_or_bands_of_two_ranks(pair: Ranks, image_mesh: tuple[int, int]) -> None:
    pair.run(_check, _in_parts, (2,), image_mesh, _adamw)


@pytest.mark.parametrize(("shard_mesh", "image_mesh"), [((4,), (2, 2)), ((2, 2), None)])
def test_four_ranks(four: Ranks, shard_mesh: tuple[int, ...], image_mesh: tuple[int, int] | None) -> None:
    # Two images of two bands each, with every weight in four shards; and two copies of every weight, in two shards each.
    four.run(_check, _in_parts, shard_mesh, image_mesh, _adamw)


def _stays_inside(rank: int, has_optimizer: bool) -> None:
    model: Any = seeded(lambda: nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 65, 3, padding=1), nn.ReLU()))
    whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    _whole(model, mesh=_mesh((2,), ("outer",)))
    optimizer = _adamw(model.parameters()) if has_optimizer else None
    shape = (1, 3, 16, 16)
    net: Any = sft.compile(model, shape, budget="64MiB", optimizer=optimizer, options=_OPTIONS)
    before = sum(p.to_local().untyped_storage().nbytes() for p in net.parameters())
    planned = net.plan
    with sft.measure_peak("cpu") as peak:
        _loss(net, image(*shape, seed=rank)).backward()
        if optimizer is not None:
            optimizer.step()
    assert net.plan is planned
    assert planned.resident_bytes >= before + whole_bytes
    assert before + peak.num_bytes <= planned.total_bytes, (before, peak, planned.total_bytes)
    with pytest.raises(sft.BudgetError) as caught:
        sft.compile(model, shape, budget=planned.resident_bytes, optimizer=optimizer)
    assert caught.value.needed_bytes > planned.resident_bytes


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_whole_copies_are_in_the_budget(pair: Ranks, has_optimizer: bool) -> None:
    pair.run(_stays_inside, has_optimizer)


def _counts_waiting_gradients(rank: int) -> None:
    model: Any = seeded(Net)
    _in_parts(model, mesh=_mesh((2,), ("outer",)))
    net: Any = sft.compile(model, _SHAPE, budget="64MiB", options=_OPTIONS)
    net.set_requires_gradient_sync(False)
    _loss(net, image(*_SHAPE)).backward()
    alone = net.plan
    _loss(net, image(*_SHAPE)).backward()
    whole_bytes = sum(sizes.gathered_bytes for name, sizes in net._sft_engine.settings.sharding.sizes.items() if "frozen" not in name)
    assert net.plan.resident_bytes - alone.resident_bytes == whole_bytes


def _fails_and_goes_on(rank: int) -> None:
    eager, model = seeded(Net), seeded(Net)
    _in_parts(model, mesh=_mesh((2,), ("outer",)))
    net: Any = sft.compile(model, _SHAPE, budget="64MiB", options=_OPTIONS, mesh=_mesh((1, 2), ("replica", "band")))
    x = image(*_SHAPE)

    class Failing:
        """A source that fails on one rank when the backward pass reads it."""

        dtype, shape, is_broken = torch.float64, _SHAPE, False

        def rows(self, interval: Any, out: Tensor) -> None:
            if self.is_broken and rank == 1:
                raise OSError("the disk is gone")
            out.copy_(x[:, :, interval.start : interval.stop])

    source = Failing()
    y = net(source)
    source.is_broken = True
    with pytest.raises(sft.SourceError if rank == 1 else sft.RankError):
        y.square().sum().backward()
    assert all(p.grad is None for p in net.parameters())
    source.is_broken = False
    eager(x)  # the failed call's forward has updated the running statistics
    _loss(net, x).backward()
    _loss(eager, x).backward()
    assert max(gradient_errors(_full(param_grads(net)), param_grads(eager)).values()) <= 1e-12
    # Not with versions of FSDP that cannot be reset.
    y = net(source)
    source.is_broken = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft.distributed.fsdp.fsdp_reset", lambda model: None)
        with pytest.raises(sft.SourceError if rank == 1 else sft.RankError):
            y.square().sum().backward()
        with pytest.raises(sft.InputError, match="start again from the last checkpoint"):
            net(x)


def _names_a_rank_that_does_not_come(rank: int) -> None:
    """Check the error about a missing rank: FSDP's all-gather would wait for half an hour and not name it."""
    eager, model = seeded(Net), seeded(Net)
    _in_parts(model, mesh=_mesh((2,), ("outer",)))
    options = sft.Options(mesh_timeout_seconds=3)
    net: Any = sft.compile(model, _SHAPE, budget="64MiB", options=options, mesh=_mesh((1, 2), ("replica", "band")))
    x, store = image(*_SHAPE), dist.distributed_c10d._get_default_store()
    net(x)
    if rank == 1:
        store.wait(["told"])
    with pytest.raises(sft.RankError, match="rank 1 does not answer"):  # a late rank gets an error
        net(x)
    store.set("told", "1")
    eager(x)
    _loss(net, x).backward()
    _loss(eager, x).backward()
    assert max(gradient_errors(_full(param_grads(net)), param_grads(eager)).values()) <= 1e-12


def _infers_and_differentiates_the_image(rank: int) -> None:
    """Weights in halves of their columns, which FSDP assembles through a second copy."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    shape = (1, 4, 9, 8)
    eager, model = (seeded(lambda: nn.Sequential(nn.Conv2d(4, 30, 3, padding=1), nn.ReLU(), nn.Conv2d(30, 2, 1))) for _ in range(2))
    fully_shard(model, mesh=_mesh((2,), ("outer",)), shard_placement_fn=lambda p: Shard(1) if p.dim() == 4 else None)
    net: Any = sft.compile(model, shape, budget="64MiB", options=_OPTIONS)
    before = sum(p.to_local().untyped_storage().nbytes() for p in net.parameters())
    with sft.measure_peak("cpu") as peak:
        x, y = (image(*shape).requires_grad_() for _ in range(2))
        _loss(net, x).backward()
    assert before + peak.num_bytes <= net.plan.total_bytes
    _loss(eager, y).backward()
    assert x.grad is not None and y.grad is not None and relative_error(x.grad, y.grad) <= 1e-12
    assert max(gradient_errors(_full(param_grads(net)), param_grads(eager)).values()) <= 1e-12
    with torch.no_grad():
        assert relative_error(net(x), eager(y)) <= 1e-12
    net.set_unshard_in_backward(False)
    net.set_reshard_after_forward(True)
    with pytest.raises(sft.InputError, match="set_unshard_in_backward"):
        _loss(net, x).backward()


def _changed_in_between(rank: int) -> None:
    model: Any = seeded(Net)
    _in_parts(model, mesh=_mesh((2,), ("outer",)))
    net: Any = sft.compile(model, _SHAPE, budget="64MiB", options=_OPTIONS)
    optimizer = _sgd(net.parameters())
    _loss(net, image(*_SHAPE)).backward()
    y = net(image(*_SHAPE))
    optimizer.step()
    with pytest.raises(RuntimeError, match="changed between its forward and its backward"):
        y.sum().backward()
    with pytest.raises(sft.InputError, match=r"not around net.forward\(x\); call net\(x\)"):
        net.forward(image(*_SHAPE))


def _refusals(rank: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = _mesh((2,), ("outer",))
    half: Any = seeded(Net)
    _whole(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    partly_sharded: Any = seeded(Net)
    fully_shard(partly_sharded.stem, mesh=mesh)
    other: Any = seeded(Net)
    other.head.weight = nn.Parameter(distribute_tensor(other.head.weight.detach(), mesh, [Replicate()]))
    for model, message in (
        (half, "casts where modules begin and end"),
        (partly_sharded, r"call fully_shard\(model\) last, too"),
        (other, "head.weight: a DTensor of placements"),
    ):
        with pytest.raises(sft.UnsupportedError, match=message):
            sft.compile(model, _SHAPE)
        assert not sft.check(model, _SHAPE).ok


def _refuses_shards_after_compile(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    net: Any = sft.compile(seeded(Net), _SHAPE)
    fully_shard(net.stem)
    fully_shard(net)
    with pytest.raises(sft.InputError, match=r"after sft\.compile.*call it before"):
        net(image(*_SHAPE))


def _refuses_flat_shards(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrapped(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))

    model = nn.Conv2d(_SHAPE[1], 2, 3).double()
    net = wrapped(sft.compile(copy.deepcopy(model), (*_SHAPE[:3], None)))
    for call in (lambda: net(image(*_SHAPE)), lambda: sft.compile(wrapped(model), _SHAPE)):
        with pytest.raises(sft.SftError, match=r"FullyShardedDataParallel replaces the parameters .*fully_shard before sft\.compile"):
            call()


@pytest.mark.parametrize(
    "case",
    [
        _counts_waiting_gradients,
        _fails_and_goes_on,
        _names_a_rank_that_does_not_come,
        _infers_and_differentiates_the_image,
        _changed_in_between,
        _refusals,
        _refuses_flat_shards,
        _refuses_shards_after_compile,
    ],
)
def test_habits(pair: Ranks, case: Callable[..., None]) -> None:
    pair.run(case)


_HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"


def _how_to() -> dict[str, Any]:
    """The checkpoint functions of docs/scaling.md."""
    blocks = re.findall(r"^```python\n(.*?)^```", _HOW_TO.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "torch.distributed.checkpoint" in block]
    names: dict[str, Any] = {}
    exec(compile(block, "docs/scaling.md", "exec"), names)
    return names


def _trained(rank: int, layout: str, folder: str, make_optimizer: Any, *, loads: bool, saves: bool, num_steps: int) -> dict[str, Tensor]:
    """Weights after some steps, each on the mean of two images; they are equal for all layouts."""
    model: Any = seeded(Net) if not loads else seeded(Net, seed=5)
    mesh, own = None, [0, 1]
    if layout == "parts":
        _in_parts(model, mesh=_mesh((2,), ("outer",)))
        own = [rank]
    elif layout in ("replicas", "bands", "sharded bands"):
        mesh = _mesh((2, 1) if layout == "replicas" else (1, 2), ("replica", "band"))
        own = [rank] if layout == "replicas" else own
        if layout == "sharded bands":
            _whole(model, mesh=_mesh((2,), ("outer",)))
    # Statistics are those of one image in eager PyTorch, too; with frozen ones all layouts compute the same.
    net: Any = sft.compile(model.eval(), _SHAPE, budget="64MiB", options=_OPTIONS, mesh=mesh)
    optimizer = make_optimizer(net.parameters())
    if loads:
        _how_to()["load"](net, optimizer, folder)
    for step in range(num_steps):
        for number in own:
            (_loss(net, image(*_SHAPE, seed=10 * (loads * 2 + step) + number)) / len(own)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if saves:
        _how_to()["save"](net, optimizer, folder)
    return {name: value.detach().clone() for name, value in _full(net.state_dict()).items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the reason to load on one rank
@pytest.mark.parametrize("make_optimizer", [_sgd, _adamw])
def test_checkpoints_fit_other_numbers_of_ranks_and_layouts(pair: Ranks, tmp_path: Path, make_optimizer: Any) -> None:
    folders = {layout: str(tmp_path / layout) for layout in ("parts", "replicas")}
    for layout, folder in folders.items():
        pair.run(partial(_trained, loads=False, saves=True, num_steps=2), layout, folder, make_optimizer)
    go_on = partial(_trained, loads=True, saves=False, num_steps=2)
    expected = pair.run(go_on, "parts", folders["parts"], make_optimizer)[0]
    parameters = [go_on(0, "alone", folder, make_optimizer) for folder in folders.values()]
    parameters += pair.run(go_on, "sharded bands", folders["parts"], make_optimizer)
    parameters += pair.run(go_on, "parts", folders["replicas"], make_optimizer)
    parameters += pair.run(go_on, "bands", folders["parts"], make_optimizer)
    for values in parameters:
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert relative_error(value, expected[name]) <= 1e-12, name
