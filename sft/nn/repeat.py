"""Repeated blocks: a chain of blocks of one structure, traced once, run any number of times, inside a byte budget."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sft.analysis.frontend.fingerprint import module_fingerprint
from sft.analysis.ir.repeat_op import RepeatCapture, current_repeat_capture
from sft.common.atomic_files import as_path
from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError, UnsupportedError
from sft.common.legacy_names import renamed
from sft.common.module_snapshot import ModuleSnapshot
from sft.common.process_lock import patch_lock
from sft.common.transform_checks import autocast_dtype, dynamo_disabled, refuse_tracing
from sft.kernels.rng.philox import draw_seed
from sft.nn.stacking import extract_block, load_blocks, shared_buffers, stack_blocks, stacked_buffers, stacked_tensors
from sft.repeat.autograd import ChainCall, run_chain, run_inference
from sft.repeat.calls import pass_function
from sft.repeat.costs import BlockRepeat
from sft.repeat.executor import StackedWeightAccess
from sft.repeat.lowering import BlockPrograms, lower_block
from sft.repeat.plan import STRATEGIES, RepeatCosts, RepeatPlan, Strategy, plan_chain
from sft.repeat.streamed import StreamedBlocks, StreamedWeightAccess
from sft.repeat.trace import TensorMeta, trace_block
from sft.solvers.schedule import Operation

__all__ = ["Repeat"]


class _BlockCache:
    """Programs and plans derived from a block.

    Not a dataclass: fields of dataclasses are part of a module's fingerprint, and a model would be captured again when they change
    (`sft.analysis.frontend.fingerprint`).
    """

    def __init__(self) -> None:
        self.programs: dict[Any, BlockPrograms] = {}
        self.plans: dict[Any, RepeatPlan] = {}


class Repeat(nn.Module):
    """A chain of ``num_blocks`` blocks of one structure, each with its own weights.

    It computes the same as ``nn.Sequential(*[make_block() for _ in range(num_blocks)])``, with the same gradients and running statistics,
    and draws the same random numbers for its weights. The block is traced once for any number, and the backward pass follows a
    checkpointing schedule that fits the budget: it says which activations are stored, dropped and recomputed.

    >>> net = Repeat(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 50, budget="5KiB")
    >>> x = torch.randn(2, 4)
    >>> net(x).sum().backward()
    >>> net.block[0].weight.shape, net.block[0].weight.grad.shape
    (torch.Size([50, 4, 4]), torch.Size([50, 4, 4]))
    >>> net.plan_for(x).num_forwards > 50
    True

    The parameters of all blocks are stacked: ``block`` is the module of one block; its parameters and buffers have an additional leading
    dimension, and optimizers, ``state_dict``, ``requires_grad_`` and ``train()`` work on these. Non-persistent buffers are constants shared
    by all blocks. :meth:`unstacked` returns the blocks as plain modules.

    Each block takes one tensor and returns one of the same shape and type. Buffers may change only in ways that the output does not depend
    on (running statistics of norms in training). Dropout is a function of position and of a seed drawn once a call from torch's
    generator, so a recomputation has the same bits. Side effects of a block in Python (printing, counting) happen once, during tracing.

    Args:
        make_block: makes a block.
        num_blocks: number of blocks.
        budget: bytes that a call may hold on the device in addition to its input and the parameters: activations, intermediate values,
            gradients of parameters, the output and its gradient. Default: `None` (all activations are kept, as in plain PyTorch; inside a
            model compiled with `sft.compile`, as many as that model's budget allows)
        strategy: the schedule search: ``"auto"``, ``"none"``, ``"revolve"``, ``"bisect"`` or ``"optimal"``. Default: ``"auto"``

    Raises:
        InputError: the blocks differ in structure, or an argument is out of range.
    """

    def __init__(
        self, make_block: Callable[[], nn.Module], num_blocks: int, *, budget: int | str | None = None, strategy: Strategy = "auto"
    ) -> None:
        super().__init__()
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise InputError(f"num_blocks={num_blocks!r}: give an integer of at least 1")
        if strategy not in STRATEGIES:
            raise InputError(f"strategy={strategy!r}: choose one of {', '.join(STRATEGIES)}")
        self.num_blocks = num_blocks
        self.budget_bytes = None if budget is None else parse_bytes(budget)
        self.strategy: Strategy = strategy
        self.trace: Callable[[str], None] | None = None
        self.block = stack_blocks(make_block, num_blocks)
        self.streamed: StreamedBlocks | None = None
        self.is_streamed = False  # part of the fingerprint: an enclosing compiled model is captured again when it changes
        self._known = _BlockCache()

    def stream(
        self,
        window: int | str,
        *,
        path: str | os.PathLike[str] | None = None,
        resume: bool = False,
        durable: bool = True,
        prefetch: bool | None = None,
    ) -> Repeat:
        """Move the weights off the device; from now on each pass reads them through a window.

        The parameters become views of host memory, or of a privately mapped file: values written to them are used from then on, and are in
        the file with the next generation that an optimizer commits. Without an optimizer for streamed weights, gradients are accumulated in
        host memory. Buffers move to host memory too.

        Args:
            window: bytes for parameters on the device; at least one block, twice that to read ahead.
            path: a file (safetensors) for the parameters. Default: `None` (host memory, pinned if CUDA is available)
            resume: load an existing file, which is refused otherwise; with it a missing file is refused. Default: `False`
            durable: whether each generation of the file survives a loss of power. Default: `True`
            prefetch: whether threads read ahead. Default: `None` (if reading or copying is slow)

        Returns:
            This module.

        Raises:
            InputError: the weights are streamed already, the block has none, or the file exists or has other blocks.
            SourceError: the file cannot be read or written.
            BudgetError: the window is smaller than a block.
        """
        device = self._device()
        if self.streamed is not None or device is None:
            raise InputError("the block has no parameters to stream" if device is None else "the weights are streamed already")
        self.streamed = StreamedBlocks(
            self.block,
            list(stacked_buffers(self.block)),
            self.num_blocks,
            device=device,
            window_bytes=parse_bytes(window),
            path=None if path is None else as_path(path, "the weights file"),
            resume=resume,
            durable=durable,
            prefetch=prefetch,
        )
        self.is_streamed = True
        return self

    def close(self) -> None:
        """Close the stores of streamed weights; the parameters become ordinary ones on the host."""
        if self.streamed is not None:
            self.streamed.close()
            self.streamed, self.is_streamed = None, False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Repeat:
        """Implement ``to``, ``cuda``, ``double`` and so on: for streamed weights only the device of their window changes."""
        if self.streamed is None:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # as torch leaves it
            return self
        dtypes = {param.dtype for param in self.block.parameters()}
        if any(fn(torch.empty(0, dtype=dtype, device=self.streamed.device)).dtype != dtype for dtype in dtypes):
            raise InputError("weights that are streamed keep their element type; convert the module before stream()")
        shared = shared_buffers(self.block)
        device = fn(torch.empty(0, dtype=next(iter(dtypes)), device=self.streamed.device)).device
        for name, buffer in shared.items():
            prefix, _, last = name.rpartition(".")
            self.block.get_submodule(prefix)._buffers[last] = fn(buffer)
        self.streamed.move(device)
        return self

    def extra_repr(self) -> str:
        """Arguments, for ``repr``."""
        return f"num_blocks={self.num_blocks}, budget={self.budget_bytes}, strategy={self.strategy!r}"

    def __getstate__(self) -> dict[str, Any]:
        """The state without caches.

        Raises:
            InputError: the weights are streamed.
        """
        if self.streamed is not None:
            raise InputError("streamed weights are not copied or pickled; take the state_dict, or close() the store first")
        return {**self.__dict__, "_known": _BlockCache(), "trace": None}

    @dynamo_disabled
    def forward(self, x: Tensor) -> Tensor:
        """Apply all blocks in order.

        Args:
            x: input of the first block.

        Raises:
            InputError: it is not a floating-point tensor, or not on the parameters' device.
            UnsupportedError: the block cannot be traced, or its output differs from its input in shape or type.
            BudgetError: no schedule fits.
        """
        enclosing = current_repeat_capture()
        if enclosing is not None:
            return self._record_repeat(enclosing, x)
        self._check_input(x)
        params = dict(self.block.named_parameters())
        needs_grad = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in params.values()))
        programs, key = self._programs_for(x)
        plan = self._plan(x, programs, key)
        generator_state = torch.get_rng_state() if programs.is_random else None
        try:
            seed = draw_seed() if programs.is_random else 0
            call = self._call(x, programs, plan, params, seed)
            if not needs_grad:
                return run_inference(call, x)
            watched, guarded = self._watched(params, programs)
            return run_chain(call, x, watched, guarded)
        except BaseException:
            if generator_state is not None:
                torch.set_rng_state(generator_state)
            raise

    def _record_repeat(self, enclosing: RepeatCapture, x: Tensor) -> Tensor:
        """Record one operator for all blocks in the capture of an enclosing model."""
        path = enclosing.path_of(self)
        if self.is_streamed:
            raise UnsupportedError(
                [
                    f"{path}: repeat: it streams its blocks, which a compiled model does not; compile the parts before and after it, and "
                    "call it between them, or stream all weights of the compiled model with Options(weights='stream')"
                ]
            )
        params, stacked, shared = self._params(), stacked_buffers(self.block), shared_buffers(self.block)
        repeated = BlockRepeat(
            block=self.block,
            num_blocks=self.num_blocks,
            user_budget_bytes=self.budget_bytes,
            strategy=self.strategy,
            device=x.device,
            autocast=autocast_dtype(x.device),
            params=tuple(params),
            fixed=tuple(stacked),
            shared=tuple(shared),
            make=pass_function,
            trace=self.trace,
        )
        try:
            repeated = repeated.at_hint(x, {**params, **stacked, **shared})
        except UnsupportedError as error:
            raise UnsupportedError([f"{path}: repeat: {problem}" for problem in error.problems]) from error
        out, *next_values = enclosing.call(
            repeated,
            x,
            params=[*params.values()],
            fixed=[stacked[name] for name in repeated.fixed],
            shared=[*shared.values()],
            updated=[stacked[name] for name in repeated.updated],
        )
        with torch.no_grad():
            for name, value in zip(repeated.updated, next_values, strict=True):
                stacked[name].copy_(value)
        return out

    def plan_for(self, x: Tensor) -> RepeatPlan:
        """The plan for an input of this shape, type and device.

        Raises:
            InputError: it is not a floating-point tensor, or not on the parameters' device.
            UnsupportedError: the block cannot be traced, or its output differs from its input in shape or type.
            BudgetError: no schedule fits.
        """
        self._check_input(x)
        programs, key = self._programs_for(x)
        return self._plan(x, programs, key)

    def unstacked(self) -> nn.Sequential:
        """The blocks as plain modules, with copies of their weights."""
        return nn.Sequential(*(extract_block(self.block, number) for number in range(self.num_blocks)))

    def load_blocks(self, blocks: Sequence[nn.Module]) -> None:
        """Load the parameters and buffers of plain modules.

        Raises:
            InputError: their number or structure differs; no weight is changed.
        """
        load_blocks(self.block, self.num_blocks, blocks)

    def _device(self) -> torch.device | None:
        """Device of the blocks; ``None`` if they have no tensors."""
        if self.streamed is not None:
            return self.streamed.device
        tensors = [*self.block.parameters(), *self.block.buffers()]
        return tensors[0].device if tensors else None

    def _check_input(self, x: Tensor) -> None:
        refuse_tracing([x])
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"a repeated block takes one floating tensor, got {kind}; convert it")
        device = self._device()
        if device is not None and device != x.device:
            raise InputError(f"the input is on {x.device}, the parameters are on {device}; move one of them")

    def _programs_for(self, x: Tensor) -> tuple[BlockPrograms, Any]:
        """The block's programs for an input, and their cache key."""
        autocast = autocast_dtype(x.device)
        params = {
            name: TensorMeta(shape=tuple(p.shape[1:]), dtype=p.dtype, requires_grad=p.requires_grad) for name, p in self._params().items()
        }
        buffers = {name: TensorMeta(shape=tuple(b.shape[1:]), dtype=b.dtype) for name, b in stacked_buffers(self.block).items()}
        buffers |= {name: TensorMeta.of(buffer) for name, buffer in shared_buffers(self.block).items()}
        modes = tuple(module.training for module in self.block.modules())
        input_meta = TensorMeta(shape=tuple(x.shape), dtype=x.dtype)
        of_block = (tuple(params.items()), tuple(buffers.items()), modes, module_fingerprint(ModuleSnapshot(self.block)))
        key = (input_meta, x.device, autocast, torch.get_default_dtype(), *of_block)
        if key not in self._known.programs:
            with patch_lock():
                traced = trace_block(self.block, input_meta, params, buffers, device=x.device, autocast=autocast)
            programs = lower_block(traced)
            shared = [name for name in programs.updated if name in shared_buffers(self.block)]
            if shared:
                raise InputError(f"buffers {', '.join(shared)} change, and all blocks share them; register them as persistent")
            self._known.programs[key] = programs
        return self._known.programs[key], key

    def _params(self) -> Mapping[str, Tensor]:
        return dict(self.block.named_parameters())

    def _plan(self, x: Tensor, programs: BlockPrograms, key: Any) -> RepeatPlan:
        wants_input_grad = x.requires_grad and torch.is_grad_enabled()
        extra = self._extra_bytes(programs)
        key = (key, wants_input_grad, x.is_contiguous(), self.budget_bytes, self.strategy, extra)
        if key not in self._known.plans:
            costs = RepeatCosts.of(
                programs,
                self.num_blocks,
                wants_input_grad=wants_input_grad,
                input_copy_bytes=0 if x.is_contiguous() else x.numel() * x.element_size(),
                forward_extra_bytes=extra[0],
                backward_extra_bytes=extra[1],
            )
            self._known.plans[key] = plan_chain(costs, budget_bytes=self.budget_bytes, strategy=self.strategy)
        return self._known.plans[key]

    def _extra_bytes(self, programs: BlockPrograms) -> tuple[int, int]:
        """Bytes held in addition to activations, in the forward and in the backward pass.

        These are the windows of streamed weights; otherwise the next values of buffers (forward) and the gradients of parameters
        (backward).
        """
        if self.streamed is not None:
            window = self.streamed.extra_bytes
            return window, window + self.streamed.sink.extra_bytes()
        stacks = stacked_tensors(self.block)

        def size(names: Sequence[str]) -> int:
            return sum(stacks[name].numel() * stacks[name].element_size() for name in names)

        return size(programs.updated), size(programs.with_gradient)

    def _call(self, x: Tensor, programs: BlockPrograms, plan: RepeatPlan, params: Mapping[str, Tensor], seed: int) -> ChainCall:
        if self.streamed is not None:
            return self._streamed_call(self.streamed, programs, plan, params, seed)
        access = partial(StackedWeightAccess, buffers=stacked_buffers(self.block), shared=shared_buffers(self.block))

        @contextlib.contextmanager
        def forward(operations: Sequence[Operation]) -> Iterator[StackedWeightAccess]:
            yield access({name: p.detach() for name, p in params.items()}, updated=programs.updated)

        fixed = [name for name in stacked_buffers(self.block) if name not in programs.updated]

        @contextlib.contextmanager
        def backward(operations: Sequence[Operation], tensors: Sequence[Tensor], _: Collection[str]) -> Iterator[StackedWeightAccess]:
            checked = dict(zip([*params, *fixed], (tensor.detach() for tensor in tensors), strict=True))
            stacked = {name: checked.pop(name) for name in params}
            yield StackedWeightAccess(stacked, checked, shared_buffers(self.block), with_gradient=programs.with_gradient)

        return ChainCall(
            programs=programs,
            plan=plan,
            device=x.device,
            names=tuple(params),
            forward=forward,
            backward=backward,
            seed=seed,
            trace=self.trace,
        )

    def _streamed_call(
        self, streamed: StreamedBlocks, programs: BlockPrograms, plan: RepeatPlan, params: Mapping[str, Tensor], seed: int
    ) -> ChainCall:
        versions = streamed.versions()

        @contextlib.contextmanager
        def backward(operations: Sequence[Operation], _: Sequence[Tensor], unwanted: Collection[str]) -> Iterator[StreamedWeightAccess]:
            if streamed.versions() != versions:
                raise RuntimeError(
                    "streamed weights were changed after the forward pass, and the backward pass needs them as they were; "
                    "call backward before step()"
                )
            with streamed.backward(operations, unwanted) as access:
                yield access

        return ChainCall(
            programs=programs,
            plan=plan,
            device=streamed.device,
            names=tuple(params),
            forward=streamed.forward,
            backward=backward,
            seed=seed,
            trace=self.trace,
        )

    def _watched(self, params: Mapping[str, Tensor], programs: BlockPrograms) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that autograd checks for changes between passes (parameters, then unchanged buffers), and those that a store checks."""
        if self.streamed is not None:
            return [], [*params.values()]
        fixed = [buffer for name, buffer in stacked_buffers(self.block).items() if name not in programs.updated]
        return [*params.values(), *fixed], []


def __getattr__(name: str) -> Any:
    """Old names of classes in pickles."""
    return renamed(__name__, name)
