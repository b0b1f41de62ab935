"""Common settings of all tests: Hypothesis profiles, garbage collection, fixtures.

Choose a profile with ``SFT_HYPOTHESIS_PROFILE``: ``default`` (150 examples), ``ci`` (3, derandomised, for `make test`; without shrinking,
which may take longer than all tests), ``quick`` (15) or ``deep`` (2000).
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from sft.api import memory_limits
from sft.common.free_memory import FreeMemory
from tests.helpers.capture_cache import share_captures
from tests.slow import SAMPLED, SLOW, THINNED

# For `examples`, and for the `harness` of the benchmarks, which the zoo uses. Appended, not put first: the repository's folders must not
# hide installed packages of the same name.
_ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(_ROOT), str(_ROOT / "benchmarks")]

#: The zoo imports models of other packages, which are not in this environment. The module of forks freezes all objects of its process.
collect_ignore = ["zoo", "helpers/forked_state.py"]

pytest.register_assert_rewrite("tests.helpers.exactness")

# Measured times of one test must not reach the next one, nor the user's own files.
os.environ["SFT_CACHE_DIR"] = ""

# budget="auto", the default, is 11 GiB on every machine; tests of it replace this again.
patch.object(memory_limits, "free_host_memory", lambda: FreeMemory(free_bytes=25 * 2**29, total_bytes=2**34)).start()

share_captures()

# Tensors are tiny: a second thread costs more than it saves, most of all on a busy machine. Also in processes of tests.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Full collections take half a second or more, for the objects in caches of torch and SymPy: they run when memory has grown.
_MAX_GARBAGE_BYTES = 3 << 29
_STATM = Path("/proc/self/statm")
_limit_bytes = [_MAX_GARBAGE_BYTES]
gc.set_threshold(10_000, 10, 1000 if _STATM.exists() else 10)

_SLOW_TO_DRAW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)

settings.register_profile("default", max_examples=150, deadline=None, print_blob=True, suppress_health_check=_SLOW_TO_DRAW)
_NO_SHRINKING = (Phase.explicit, Phase.generate)
settings.register_profile("ci", settings.get_profile("default"), max_examples=3, derandomize=True, database=None, phases=_NO_SHRINKING)
settings.register_profile("quick", settings.get_profile("default"), max_examples=15)
settings.register_profile("deep", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("SFT_HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests; a listed name that is no test of a collected file is an error."""
    by_name = {f"{item.path.name}::{item.name}": item for item in items}
    seen: dict[str, set[tuple[str, str]]] = {}  # by test: values of parameters that a case of `make test` has
    begun: set[str] = set()
    for name, item in by_name.items():
        test = name.partition("[")[0]
        values = {(key, str(value)) for key, value in item.callspec.params.items()} if hasattr(item, "callspec") else set()
        known = seen.setdefault(test, set())
        # By a hash: each n-th case might have the same tiling.
        is_drawn = test not in SAMPLED or not values <= known or zlib.crc32(name.encode()) % SAMPLED[test] == 0
        if test in THINNED and test in begun:
            is_drawn &= zlib.crc32(name.encode()) % 3 == 0
        begun.add(test)
        if name in SLOW or not is_drawn:
            item.add_marker(pytest.mark.slow)
        else:
            known |= values
    files = {item.path.name for item in items if "[" in item.name}
    unknown = sorted(
        name for name in (SLOW - by_name.keys()) | ((SAMPLED.keys() | THINNED) - seen.keys()) if name.partition("::")[0] in files
    )
    if unknown and len(items) > 1000:
        raise pytest.UsageError(f"tests/slow.py has names of no test: {', '.join(unknown)}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Collect garbage if the process has grown: graphs of captures have reference cycles."""
    if _resident_bytes() > _limit_bytes[0]:
        gc.collect()
        _limit_bytes[0] = _resident_bytes() + _MAX_GARBAGE_BYTES


def pytest_unconfigure() -> None:
    """Collect the last garbage of a worker, so that pytest reports its errors; then exclude all objects from further collections."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.collect()
        gc.freeze()


def _resident_bytes() -> int:
    """Bytes of memory of this process; 0 without ``/proc``."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@pytest.fixture
def without_clones() -> Iterator[None]:
    """Plans with the operators of the model alone: images that cross a barrier are not computed again."""
    with patch("sft.api.capture_cache.rematerialize", lambda phases: None):
        yield


@pytest.fixture(scope="module")
def without_proposals() -> Iterator[None]:
    """Budget errors without plans of other settings, for tests of the smallest plan: proposals are up to six further searches."""
    with patch("sft.api.engine.propose", lambda error, *_: error):
        yield


@pytest.fixture
def frozen_objects() -> Iterator[None]:
    """Exclude the objects of earlier tests from garbage collections, for tests that collect often.

    A full collection takes a second or two after some hundred tests. Not for tests that plan often: each planning counts frozen objects
    (`sft.common.process_lock`).
    """
    gc.freeze()
    yield
    gc.unfreeze()
