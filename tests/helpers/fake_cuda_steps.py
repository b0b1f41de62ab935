"""Steps of compiled models on the fake CUDA device: planned on the CPU, run by the code for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from sft.optim.streamed import StreamedOptimizer
from sft.torch_runtime import autograd
from sft.torch_runtime.host.host_memory import HostSlabPool
from sft.torch_runtime.region_inputs import RegionInputs
from sft.torch_runtime.streamed_parameters import StreamedParameters
from sft.weights import HostStore
from tests.helpers.fake_cuda import DEVICE, FakeGpu, fake_cuda, observed

__all__ = ["gpu_steps"]

#: Page-locked memory of a step; copies that do not fit there have memory of their own.
_STAGING_BYTES = 8192


@contextlib.contextmanager
def gpu_steps() -> Iterator[FakeGpu]:
    """Context in which passes of compiled models, and steps of optimizers for streamed weights, run on the fake device."""
    run_region, differentiate, step = autograd.run_region, autograd._differentiate, StreamedOptimizer.step
    pools: dict[int, HostSlabPool] = {}
    with fake_cuda() as gpu, pytest.MonkeyPatch.context() as patches:

        @contextlib.contextmanager
        def on_device(provider: Any) -> Iterator[None]:
            former = None if provider is None else provider.device
            if provider is not None:
                provider.device = DEVICE
                for window in (getattr(provider.sink, name, None) for name in ("_states", "_grad_window")):
                    if window is not None:
                        window.device = DEVICE
                if isinstance(provider.store, HostStore):
                    gpu.pin(provider.store.all_records())
                    provider.store._pin = True
            try:
                with observed(gpu):
                    yield
            finally:
                if provider is not None:
                    provider.device = former

        def run_on_device(region: Any, inputs: RegionInputs, hosts: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
            pool = inputs.resources.slab_pool
            if pool is not None:
                pool = pools.setdefault(id(pool), HostSlabPool(pool.num_bytes, DEVICE, inputs.host_allocator))
            staging = pools.setdefault(-id(inputs.active_graphs), HostSlabPool(_STAGING_BYTES, DEVICE, inputs.host_allocator))
            streamed = frozenset() if inputs.weights is None else frozenset(inputs.weights.paths)
            for name, tensor in zip(inputs.names, inputs.tensors, strict=True):
                if name not in streamed:
                    gpu.adopt(tensor)
            with on_device(None if inputs.weights is None else inputs.weights.provider):
                resources = replace(inputs.resources, slab_pool=pool, staging_pool=staging)
                outputs = run_region(region, replace(inputs, device=DEVICE, resources=resources), hosts)
            gpu.read(*outputs.values())
            return outputs

        def differentiate_on_device(ctx: Any, grads: list[Tensor | None]) -> list[Tensor | None]:
            for name, grad in zip(ctx.computed, grads, strict=True):
                if grad is not None:
                    if name in ctx.region.host_outputs:
                        gpu.write(grad)
                    else:
                        gpu.adopt(grad)
            weights = ctx.inputs.weights
            with on_device(None if weights is None else weights.provider):
                result = differentiate(ctx, grads)
            for grad in result:
                if grad is not None:
                    gpu.read(grad)
            return result

        def step_on_device(optimizer: Any, closure: Any = None) -> Any:
            (records,) = optimizer._record_optimizers
            with on_device(records.blocks):
                result = step(optimizer, closure)
            gpu.read(*records.params.values())  # on the host
            return result

        patches.setattr("sft.api.engine.run_region", run_on_device)
        patches.setattr("sft.kernels.rng.dropout.has_triton", lambda: False)  # operators alone run on the fake device
        patches.setattr(StreamedOptimizer, "step", step_on_device)
        patches.setattr(autograd, "_differentiate", differentiate_on_device)
        patches.setattr(StreamedParameters, "reads_ahead", property(lambda self: True))
        yield gpu
        pools.clear()
