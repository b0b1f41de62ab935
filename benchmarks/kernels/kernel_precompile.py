"""Compile Triton kernels ahead of time into a cache folder that a machine with a GPU uses, on a machine without one.

A kernel takes 0.3 to 2 seconds to compile, and a first hour on a GPU has hundreds of them. Triton keeps compiled kernels in the folder of
``TRITON_CACHE_DIR``, by a key of their source, types, constants, options, the target, and the installed Triton and assembler. This script
makes the launches of ``python -m sft tune`` for the standard networks (all launch variants, so also those of ``backend="triton"``), and of
the kernel benchmark, with fake tensors and a driver that launches nothing; each kernel is compiled for the target and stays in the folder.

Run it with the Triton of the GPU machine (the same wheel; kernels of another one are never looked up), and copy the folder to that machine:
``benchmarks/gpu.sh`` uses ``build/triton-cache``. Kernels with misaligned tensors are compiled there at their launch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kernel_bench import all_cases
from kernel_case import Case, Draw

from sft.backends.selector import launch_variants
from sft.cli import tune as tuning
from sft.common.torch_internals import FakeTensorMode
from sft.planner.options import Options

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: A kernel with the arguments and options of its launch; tensors are replaced by their dtypes.
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
_LAUNCHES: list[Launch] = []


@contextmanager
def _noted_launches(*, computes_operands: bool) -> Iterator[list[Launch]]:
    """Context that records launches, for a GPU with or without a correct assembler of computed operands of products."""
    import triton

    launches: list[Launch] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = {name: _without_memory(value) for name, value in options.items()}
        launches.append((self, tuple(map(_without_memory, args)), values))

    with ExitStack() as patches:
        patches.enter_context(patch.object(triton.runtime.jit.JITFunction, "run", note))
        for name, module in list(sys.modules.items()):
            if name.startswith("sft.kernels.") and hasattr(module, "can_compute_operands"):
                patches.enter_context(patch.object(module, "can_compute_operands", lambda device: computes_operands))
        patches.enter_context(patch.object(tuning, "computes_operands", lambda device: computes_operands))
        yield launches


def _without_memory(value: Any) -> Any:
    """The dtype of a tensor, which Triton takes for an aligned tensor when it compiles without a launch."""
    return value.dtype if isinstance(value, torch.Tensor) else value


def _tuning_launches(networks: Sequence[str], dtypes: Sequence[str], *, computes_operands: bool) -> list[Launch]:
    """Launches of ``python -m sft tune``."""
    with torch.device("meta"):
        models = [(tuning.STANDARD_NETWORKS[name](), ((1, 3, 2048, 2048),)) for name in networks]
    request = tuning.TuneRequest(models=models, dtypes=dtypes, options=Options(), budget="11GiB", strip_rows=tuning.STANDARD_STRIP_ROWS)
    cpu = torch.device("cpu")
    with _noted_launches(computes_operands=computes_operands) as launches:
        for case in tuning.collect_tuning_cases(request, cpu):
            for variant in launch_variants(case.shape_class):
                with FakeTensorMode(), torch.no_grad():
                    varied = case.with_variant(variant)
                    varied.run_kernels(varied.draw(cpu))
    return launches


def _benchmark_launches(cases: Sequence[Case], dtypes: Sequence[str], *, computes_operands: bool) -> list[Launch]:
    """Launches of the kernel benchmark, at the sizes that are verified and timed."""
    with _noted_launches(computes_operands=computes_operands) as launches:
        for case in cases:
            for dtype in case.dtypes:
                if dtype in [_DTYPES[name] for name in dtypes]:
                    for size in (case.small, case.large):
                        with FakeTensorMode(), torch.no_grad():
                            case.build(Draw(device=torch.device("cpu"), dtype=dtype, size=size)).ours()
    return launches


def _distinct(launches: Sequence[Launch]) -> list[Launch]:
    """Launches that may differ for the compiler: in the kernel, in types, constants and options, or in the divisibility of a number."""
    distinct: dict[str, Launch] = {}
    for kernel, args, options in launches:
        values = [_specialization(value) for value in (*args, *options.items())]
        distinct.setdefault(f"{kernel.fn.__module__}.{kernel.fn.__name__} {values}", (kernel, args, options))
    return list(distinct.values())


def _specialization(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):  # an option with its name
        return f"{value[0]}={value[1]}"
    if isinstance(value, int) and not isinstance(value, bool):
        return "1" if value == 1 else f"{value % 16 == 0} {-(2**31) <= value < 2**31}"
    return repr(value)


def _compile(number: int) -> str:
    """Compile one of the launches as its launch would; the error, or an empty text."""
    kernel, args, options = _LAUNCHES[number]
    try:
        kernel.warmup(*args, grid=(1,), **options)
    except Exception as error:  # one kernel that fails to compile must not stop the others
        return f"{kernel.fn.__name__}: {type(error).__name__}: {error}".splitlines()[0][:300]
    return ""


def _collect(options: argparse.Namespace, *, computes_operands: bool) -> list[Launch]:
    launches: list[Launch] = []
    if options.only is None or "tune" in options.only:
        launches += _tuning_launches(options.networks, options.dtypes, computes_operands=computes_operands)
    families = {case.family for case in all_cases()} if options.only is None else set(options.only)
    launches += _benchmark_launches(
        [case for case in all_cases() if case.family in families], options.dtypes, computes_operands=computes_operands
    )
    return _distinct(launches)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    networks, families = tuple(tuning.STANDARD_NETWORKS), sorted({case.family for case in all_cases()})
    parser = argparse.ArgumentParser(prog="benchmarks/kernels/kernel_precompile.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="sm_90", help="architecture to compile for (default: sm_90)")
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "triton-cache", help="cache folder (default: build/triton-cache)")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(_DTYPES), default=("bfloat16",), help="element types (default: bfloat16)")
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks, metavar="NETWORK", help=", ".join(networks))
    only = f"tune, or families of the kernel benchmark: {', '.join(families)} (default: all)"
    parser.add_argument("--only", nargs="+", choices=("tune", *families), metavar="PART", help=only)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    options = parser.parse_args(arguments)
    if not options.target.removeprefix("sm_").isdecimal():
        parser.error(f"--target {options.target}: give an architecture such as sm_90")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile; 0 if every kernel compiled, 1 if not, 2 without Triton."""
    options = parse(arguments)
    from sft.kernels.common import has_triton

    if not has_triton():
        print("kernel_precompile.py: Triton is not installed; install the version of the GPU machine", file=sys.stderr)
        return 2
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kernel_precompile.py: TRITON_INTERPRET=1 makes kernels that nothing compiles; unset it", file=sys.stderr)
        return 2
    os.environ["TRITON_CACHE_DIR"] = str(options.out.resolve())
    return _fill(options)


def _fill(options: argparse.Namespace) -> int:
    import triton
    from idle_driver import activate_idle_driver  # a folder of scripts; it imports Triton

    from sft.kernels.common_triton import _FIRST_FIXED_ASSEMBLER, assembler_version

    capability, started = int(options.target.removeprefix("sm_")), time.monotonic()
    version = assembler_version(capability)
    computes_operands = capability // 10 != 9 or tuple(map(int, version.split(".")[:2])) >= _FIRST_FIXED_ASSEMBLER
    activate_idle_driver(capability)
    _LAUNCHES[:] = _collect(options, computes_operands=computes_operands)
    print(f"{len(_LAUNCHES)} kernels for {options.target}, Triton {triton.__version__}, ptxas {version}", flush=True)
    errors = [error for error in _run_all(_compile, len(_LAUNCHES), options.jobs) if error]
    for error in errors:
        print(f"failed: {error}")
    binaries = list(options.out.rglob("*.cubin"))
    facts = {"target": options.target, "triton": triton.__version__, "ptxas": version, "kernels": len(binaries)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "contents.json").write_text(json.dumps(facts, indent=1) + "\n")
    num_mib = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file()) / 2**20
    print(f"{len(binaries)} kernels, {num_mib:.1f} MiB in {options.out}, {time.monotonic() - started:.0f} s")
    return 1 if errors else 0


def _run_all(work: Callable[[int], str], count: int, jobs: int) -> list[str]:
    """Results for all numbers, by processes that share the launches of this one."""
    if jobs <= 1:
        return [work(number) for number in range(count)]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return pool.map(work, range(count), chunksize=4)


if __name__ == "__main__":
    sys.exit(main())
