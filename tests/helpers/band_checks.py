"""Checks on a rank of a mesh: the compiled model against eager PyTorch on full images, and against its plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import sft
from sft.common.torch_internals import pytree
from tests.helpers.exactness import gradient_errors, param_grads, relative_error
from tests.helpers.models import image, seeded
from tests.helpers.positional_rng import reseed, seed_of, with_positional_dropout

__all__ = ["check_bands", "mesh_of"]

_RATE = 1e-3


def mesh_of(num_replicas: int, num_bands: int) -> Any:
    """A mesh of all ranks."""
    return init_device_mesh("cpu", (num_replicas, num_bands), mesh_dim_names=("replica", "band"))


def _step(net: nn.Module, x: Tensor, weights: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    """Outputs of a step that differentiates their weighted sum."""
    outputs: list[Tensor] = pytree.tree_leaves(net(x))
    loss = sum((scale * (y * w).sum() for y, w in zip(outputs, weights, strict=True) if y.requires_grad), torch.zeros((), dtype=x.dtype))
    if loss.requires_grad:
        loss.backward()
    return [y.detach() for y in outputs]


def check_bands(
    rank: int,
    num_replicas: int,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    options: sft.Options | None = None,
    *,
    num_ranks: int = 2,
    training: bool = True,
    synchronized: bool = False,
    output: str = "device",
    input_grad: bool = True,
    tolerance: float = 1e-10,
    steps: int = 2,
) -> dict[str, float]:
    """Take steps on a mesh and in eager PyTorch; compare all results, on every rank.

    The worst errors by the rule of :mod:`tests.helpers.exactness` are returned.
    """
    mesh = mesh_of(num_replicas, num_ranks // num_replicas)
    replica = mesh.get_coordinate()[0]
    eager = with_positional_dropout(seeded(make).train(training))
    model = copy.deepcopy(seeded(make).train(training))
    if synchronized:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    options = replace(options or sft.Options(), mesh_timeout_seconds=240)
    # The bands are queried before the first call, so their plan must be that of the call.
    example = torch.empty(shape, dtype=torch.float64, device="meta", requires_grad=input_grad)
    net: Any = sft.compile(model, example, budget="1GiB", options=options, mesh=mesh, output=output)
    worst = dict.fromkeys(("output", "input_grad", "param_grad", "buffer", "param"), 0.0)
    for step in range(steps):
        images = [image(*shape, seed=10 * step + r) for r in range(num_replicas)]
        references = [x.clone().requires_grad_(input_grad) for x in images]
        with torch.no_grad():
            probe = [y.shape for y in pytree.tree_leaves(copy.deepcopy(eager)(images[0]))]
        weights = [image(*size, seed=100 + i) if len(size) else torch.ones((), dtype=torch.float64) for i, size in enumerate(probe)]
        theirs = _eager_step(eager, references, weights, step, synchronized=synchronized)
        torch.manual_seed(step + 1000 * replica)
        ours = images[replica].clone().requires_grad_(input_grad)
        own = weights
        if output == "band":
            is_image = [w.dim() == len(shape) and w.shape[2:].numel() > 1 for w in weights]  # a single pixel is a global value
            rows = [net.band_rows(w.shape[2]) if each else None for each, w in zip(is_image, weights, strict=True)]
            own = [w if band_rows is None else w[:, :, band_rows[0] : band_rows[1]] for w, band_rows in zip(weights, rows, strict=True)]
            theirs[replica] = [
                y if band_rows is None else y[:, :, band_rows[0] : band_rows[1]] for y, band_rows in zip(theirs[replica], rows, strict=True)
            ]
        outputs = _step(net, ours, own)
        errors = {
            "output": max(relative_error(a, b) for a, b in zip(outputs, theirs[replica], strict=True)),
            "param_grad": max(gradient_errors(param_grads(net), param_grads(eager)).values(), default=0.0),
            "buffer": max((relative_error(b, dict(eager.named_buffers())[n]) for n, b in net.named_buffers()), default=0.0),
            "input_grad": 0.0,
        }
        if input_grad:
            mine, reference = ours.grad, references[replica].grad
            assert (mine is None) == (reference is None), "only one of the two has an input gradient"
            if mine is not None and reference is not None:
                floor = 1e-3 * max((float(g.abs().max()) for g in param_grads(eager).values() if g is not None), default=0.0)
                errors["input_grad"] = relative_error(mine, reference, scale=max(floor, float(reference.abs().max())))
        largest = max((float(g.abs().max()) for g in param_grads(eager).values() if g is not None), default=1.0)
        for module in (eager, net):
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=_RATE / max(largest, 1e-300))
            module.zero_grad(set_to_none=True)
        errors["param"] = max(gradient_errors(dict(net.named_parameters()), dict(eager.named_parameters())).values(), default=0.0)
        for name, error in errors.items():
            assert error <= tolerance, f"step {step}, {name}: {error}"
            worst[name] = max(worst[name], error)
    _check_plan(net, images[replica], weights if output == "device" else own, input_grad=input_grad)
    return worst


def _eager_step(eager: nn.Module, images: list[Tensor], weights: list[Tensor], step: int, *, synchronized: bool) -> list[list[Tensor]]:
    """The outputs of each replica; gradients are the mean over replicas, buffers the first one's."""
    count = len(images)
    if synchronized:
        reseed(eager, seed_of(step))
        joined = torch.cat([x.detach() for x in images]).requires_grad_(True)
        outputs: list[Tensor] = pytree.tree_leaves(eager(joined))
        chunks = [list(y.chunk(count)) for y in outputs]
        loss = sum((chunk * w).sum() for whole, w in zip(chunks, weights, strict=True) for chunk in whole)
        assert isinstance(loss, Tensor)
        loss.backward()
        for parameter in eager.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        assert joined.grad is not None
        for own, gradient in zip(images, joined.grad.chunk(count), strict=True):
            own.grad = gradient.clone()
        return [[whole[r].detach() for whole in chunks] for r in range(count)]
    start = {name: buffer.clone() for name, buffer in eager.named_buffers()}
    first: dict[str, Tensor] = {}
    replicas = []
    total: dict[str, Tensor] = {}
    for replica, x in enumerate(images):
        with torch.no_grad():
            for name, buffer in eager.named_buffers():
                buffer.copy_(start[name])
        reseed(eager, seed_of(step + 1000 * replica))
        replicas.append(_step(eager, x, weights))
        for name, grad in param_grads(eager).items():
            if grad is not None:
                total[name] = total.get(name, torch.zeros_like(grad)) + grad / count
        eager.zero_grad(set_to_none=True)
        if not replica:
            first = {name: buffer.clone() for name, buffer in eager.named_buffers()}
    with torch.no_grad():
        for name, buffer in eager.named_buffers():
            buffer.copy_(first[name])
    for name, parameter in eager.named_parameters():
        if name in total:
            parameter.grad = total[name]
    return replicas


def _check_plan(net: Any, x: Tensor, weights: list[Tensor], *, input_grad: bool) -> None:
    """Compare measured peak, FLOPs and traffic of one step with this rank's plan."""
    plan: sft.Plan = net.plan
    assert plan.mesh is not None
    engine = net._sft_engine
    rank = plan.mesh.ranks[engine.settings.mesh.band]
    net.zero_grad(set_to_none=True)
    traffic = engine.rank_context.traffic
    before = copy.deepcopy(traffic)

    def step() -> None:
        own = x.clone().requires_grad_(input_grad)
        outputs = {id(y): y for y in pytree.tree_leaves(net(own))}
        wanted = [(y, w) for y, w in zip(outputs.values(), weights, strict=False) if y.requires_grad]
        torch.autograd.backward([y for y, _ in wanted], [torch.ones_like(y) for y, _ in wanted])

    with sft.measure_peak("cpu") as peak:
        step()
    sent = {topic: traffic.sent_bytes[topic] - before.sent_bytes[topic] for topic in traffic.sent_bytes}
    received = sum(traffic.received_bytes.values()) - sum(before.received_bytes.values())
    overlapped_sent_bytes = sum(traffic.overlapped_sent_bytes.values()) - sum(before.overlapped_sent_bytes.values())
    overlapped_received_bytes = sum(traffic.overlapped_received_bytes.values()) - sum(before.overlapped_received_bytes.values())
    assert (overlapped_sent_bytes, overlapped_received_bytes) == (rank.overlapped_sent_bytes, rank.overlapped_received_bytes), (
        f"overlapped {traffic}, planned {rank}"
    )
    assert (sent["rows"], sent["globals"], sent["parameters"]) == (
        rank.sent_row_bytes,
        rank.sent_global_bytes,
        rank.sent_parameter_bytes,
    ), f"sent {sent}, planned {rank}"
    assert received == rank.received_bytes, f"received {received}, planned {rank.received_bytes}"
    net.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter:
        step()
    net.zero_grad(set_to_none=True)
    assert counter.get_total_flops() == rank.flops, f"counted {counter.get_total_flops()}, planned {rank.flops}"
    slack = max(peak.num_bytes // 100, 64 * 1024)
    assert peak.num_bytes <= rank.projected_peak_bytes <= peak.num_bytes + slack, f"measured {peak.num_bytes}, planned {rank}"
    assert rank.projected_peak_bytes <= plan.projected_peak_bytes
    assert plan.total_bytes <= plan.budget_bytes
