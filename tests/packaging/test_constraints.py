"""``constraints.txt`` names every distribution of an installation with all extras."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).resolve().parents[2]
#: Distributions with versions that depend on the CUDA build of torch.
_CHOSEN_BY_TORCH = re.compile(r"nvidia-|cuda-|triton$")


def _constraints() -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (_ROOT / "constraints.txt").read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def _required(requirement: Requirement, seen: set[tuple[str, str]]) -> set[str]:
    """Names of the installed distributions that a requirement brings, its own included."""
    name = canonicalize_name(requirement.name)
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:  # an extra that is not installed here
        return {name}
    names: set[str] = {name}
    for extra in ("", *sorted(requirement.extras)):
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for line in distribution.requires or ():
            child = Requirement(line)
            if child.marker is None or child.marker.evaluate({"extra": extra}):
                names |= _required(child, seen)
    return names


def test_every_required_distribution_is_listed() -> None:
    extras = importlib.metadata.metadata("sft-engine").get_all("Provides-Extra") or []
    assert {"wsi", "test", "demo", "zoo", "tensorboard"} <= set(extras)
    required = _required(Requirement(f"sft-engine[{','.join(extras)}]"), set())
    assert {"torch", "narwhals", "cloudpickle", "tensorboard"} <= required
    missing = {name for name in required - {"sft-engine"} - set(_constraints()) if not _CHOSEN_BY_TORCH.match(name)}
    assert not missing, f"add to constraints.txt: {sorted(missing)}"


def test_versions_are_exact() -> None:
    loose = [str(item) for name, item in _constraints().items() if not str(item.specifier).startswith("==") and name != "triton"]
    assert not loose
