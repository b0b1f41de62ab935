"""Imports: lazy names of the packages, modules that each entry point loads, and every module imported alone."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sft

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("sft", "sft.nn", "sft.wsi")
#: Slow to import, and not needed until a model is compiled, a plan is drawn or a table is printed.
_SLOW = (
    *("torch", "numpy", "sympy", "networkx", "triton", "pandas", "matplotlib", "rich"),
    *("scipy", "sklearn", "skimage", "torch._dynamo", "torch._inductor"),
)


def _loaded(code: str) -> set[str]:
    """Slow modules that a new process has loaded after ``code``."""
    report = f"\nimport json, sys\nprint(json.dumps([name for name in {_SLOW!r} if name in sys.modules]))"
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-P", "-c", code + report]
    output = subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout
    return set(json.loads(output.splitlines()[-1]))


def test_import_alone_loads_no_library() -> None:
    assert not _loaded("import sft, sft.wsi, sft.nn")


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("sft.InputError, sft.parse_bytes, sft.Options(tile=(64, None), host_budget='1GiB')", set()),
        ("sft.nn.WithLoss, sft.measure_peak", {"torch", "numpy"}),
        ("sft.sources.open_image", {"torch", "numpy"}),
    ],
)
def test_light_names_load_little(code: str, needed: set[str]) -> None:
    assert _loaded(f"import sft\n{code}") == needed


@pytest.mark.parametrize("module", ["sft.cli.main", "sft.wsi.cli"])
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"], ["plan", "--nonsense"]])
def test_help_and_mistakes_load_no_torch(module: str, arguments: list[str]) -> None:
    code = f"from {module} import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass"
    assert _loaded(code) <= {"rich"}


@pytest.mark.parametrize("package", _PACKAGES)
def test_type_checkers_and_the_interpreter_see_the_same_names(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    static = {
        alias.asname: (str(statement.module), alias.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname is not None
    }
    assert dir(module) == sorted(static) == module.__all__
    for name, (origin, original) in static.items():
        place = importlib.import_module(f"{origin}.{original}") if origin == package else importlib.import_module(origin)
        assert getattr(module, name) is (place if origin == package else getattr(place, original))


def test_names_and_packages_that_were_attributes_before() -> None:
    code = """
import sft
assert sft.kernels.rng.dropout.PositionalDropout and sft.planner.plan.Plan is sft.Plan
assert sft.sources.source.Source and sft.nn.repeat.Repeat is sft.nn.Repeat
assert not hasattr(sft, "nothing") and not hasattr(sft, "errors")
from sft import *
assert compile is sft.compile and "wsi" not in dir()
"""
    assert "sympy" in _loaded(code)


def test_version() -> None:
    assert sft.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="module 'sft' has no attribute 'compil'"):
        _ = sft.compil  # type: ignore[attr-defined]


def _imports_at_load(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Module and name (empty for ``import module``) of each import that runs when a module is loaded."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (edge for child in node.orelse for edge in _imports_at_load(child))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports_at_load(node)


def test_every_module_can_be_imported_first() -> None:
    """No module depends on the load order: the graph of imports at load has no cycle."""
    trees: dict[str, ast.Module] = {}
    for folder, package in ((_ROOT / "sft", "sft"), (_ROOT / "analysis", "sft.analysis"), (_ROOT / "kernels", "sft.kernels")):
        for path in sorted(folder.rglob("*.py")):
            components = path.relative_to(folder).with_suffix("").parts
            trees[".".join((package, *(component for component in components if component != "__init__")))] = ast.parse(
                path.read_text(encoding="utf-8")
            )
    assert len(trees) > 300
    graph = {
        name: {place if (place := f"{module}.{imported}") in trees else module for module, imported in _imports_at_load(tree)} & set(trees)
        for name, tree in trees.items()
    }
    graph = {name: imported - {name} for name, imported in graph.items()}
    assert "sft.common.errors" in graph["sft.common.byte_units"]
    list(TopologicalSorter(graph).static_order())  # a CycleError names the modules
