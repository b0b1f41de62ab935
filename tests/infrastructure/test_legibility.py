"""Limits on names, docstrings and layout: of the product, and for docstrings and comments also of tests, benchmarks, examples and docs.

A count is no measure of a good sentence; it lists the sentences to read again.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PRODUCT, _TESTS, _SCRIPTS = ("sft", "analysis", "kernels"), ("tests",), ("benchmarks", "examples", "docs")
_OPENERS = {"what", "whether", "where", "which", "how", "who", "whoever", "whatever", "whose", "from"}
_INDEFINITE = {"what", "whatever", "others", "anything", "else", "something", "nothing", "everything"}
_PARTICLES = {"there", "beside", "besides", "behind", "elsewhere", "meanwhile", "apart", "aside"}
_PERSONS = {"nobody", "somebody", "whoever", "who", "whose", "anybody", "everybody"}
#: Words without any use, in docstrings, comments and pages.
_EXCLUDED = (_PERSONS | {"beside", "behind"}) - {"whose"}
_COMMENT = re.compile(r"(?:^|\s)#:? (?P<text>.*)$", re.MULTILINE)
_PRIVATE_TORCH = re.compile(r"\btorch(?:\.\w+)*\._(?!_)\w+")

_VAGUE_NAME = re.compile(r"\b(?:found|given|held)\b")

_MAX_LINES, _SMALL_LINES = 450, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Definition:
    """A class or function at the top of a module."""

    name: str
    line: int
    is_class: bool
    has_docstring: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A module without its syntax tree: the trees of all modules would be millions of objects, which every garbage collection visits.

    Attributes:
        place: path in the repository.
        text: source.
        docstrings: line and text of each docstring.
        definitions: classes and functions at its top.
        vague_names: line and name of each variable or parameter that says how its value was obtained.
    """

    place: str
    text: str
    docstrings: tuple[tuple[int, str], ...]
    definitions: tuple[_Definition, ...]
    vague_names: tuple[tuple[int, str], ...]

    @classmethod
    def read(cls, path: Path) -> _Module:
        """The module in a file."""
        text = path.read_text()
        tree = ast.parse(text)
        documented = [
            node for node in _statements(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        docstrings = [(getattr(node, "lineno", 1), ast.get_docstring(node)) for node in documented]
        own = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        return cls(
            place=str(path.relative_to(_ROOT)),
            text=text,
            docstrings=tuple((line, docstring) for line, docstring in docstrings if docstring),
            definitions=tuple(
                _Definition(
                    name=node.name, line=node.lineno, is_class=isinstance(node, ast.ClassDef), has_docstring=bool(ast.get_docstring(node))
                )
                for node in own
            ),
            vague_names=tuple(_vague_names(tree)) if _VAGUE_NAME.search(text) else (),
        )

    @property
    def name(self) -> str:
        return Path(self.place).stem

    @property
    def folder(self) -> str:
        return str(Path(self.place).parent)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """A module, class or function and the statements in it, at any depth; no expressions, which are most of a tree."""
    yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, field, ())
        for child in inner if isinstance(inner, list) else ():
            yield from _statements(child)


def _vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of assigned variables and of parameters with a name of `_VAGUE_NAME`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _VAGUE_NAME.fullmatch(node.id):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and _VAGUE_NAME.fullmatch(node.arg):
            yield node.lineno, node.arg


@functools.cache
def _modules(tops: tuple[str, ...] = _PRODUCT) -> tuple[_Module, ...]:
    """All modules of some folders; the links in ``sft/`` are not followed."""
    paths = [path for top in tops for path in sorted((_ROOT / top).rglob("*.py"))]
    own = [path for path in paths if not any(parent.is_symlink() for parent in path.parents if _ROOT in parent.parents)]
    return tuple(map(_Module.read, own))


def _named_modules() -> list[_Module]:
    """Modules other than ``__init__`` and ``__main__``."""
    return [module for module in _modules() if module.name not in ("__init__", "__main__")]


def _docstrings(tops: tuple[str, ...]) -> list[tuple[str, str]]:
    """Place and text of every docstring in some folders."""
    return [(f"{module.place}:{line}", docstring) for module in _modules(tops) for line, docstring in module.docstrings]


def _places_with(words: set[str], limit_per_1000: float, tops: tuple[str, ...]) -> list[str]:
    """Docstrings with one of some words, where these are more frequent than a limit."""
    texts = [(place, re.findall(r"[a-z']+", docstring.lower())) for place, docstring in _docstrings(tops)]
    total = sum(len(text) for _, text in texts)
    hits = sum(word in words for _, text in texts for word in text)
    return [place for place, text in texts if words & set(text)] if 1000 * hits > limit_per_1000 * total else []


@pytest.mark.parametrize("tops", [_PRODUCT, _TESTS, _SCRIPTS], ids="_".join)
def test_docstrings_begin_with_a_noun_or_a_verb(tops: tuple[str, ...]) -> None:
    texts = [(place, re.match(r"\W*([A-Za-z]+)", docstring)) for place, docstring in _docstrings(tops)]
    places = [place for place, first in texts if first and first.group(1).lower() in _OPENERS]
    assert len(places) <= 0.003 * len(texts), places


@pytest.mark.parametrize(("tops", "indefinite"), [(_PRODUCT, 1.2), (_TESTS, 1.8), (_SCRIPTS, 3.0)])
def test_docstrings_name_things(tops: tuple[str, ...], indefinite: float) -> None:
    assert not _places_with(_INDEFINITE, indefinite, tops)
    assert not _places_with(_PARTICLES, 1.0, tops)
    assert not _places_with(_PERSONS, 0.4, tops)


def test_no_persons_and_vague_positions() -> None:
    groups = _PRODUCT, _TESTS, _SCRIPTS
    texts = [item for tops in groups for item in _docstrings(tops)]
    comments = ((module.place, match["text"]) for tops in groups for module in _modules(tops) for match in _COMMENT.finditer(module.text))
    texts += [(f"{place}: {text}", text) for place, text in comments]
    pages = [*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "tests").rglob("*.md")]
    texts += [(str(path.relative_to(_ROOT)), path.read_text()) for path in pages]
    excluded = re.compile(rf"(?<![a-z_'])(?:{'|'.join(sorted(_EXCLUDED))})(?![a-z_'])")
    assert not [place for place, text in texts if excluded.search(text.lower())]


def test_public_definitions_have_docstrings() -> None:
    definitions = [(module.place, each) for module in _modules() for each in module.definitions]
    assert not [
        f"{place}:{each.line} {each.name}" for place, each in definitions if not each.name.startswith("_") and not each.has_docstring
    ]


def test_a_class_name_is_defined_once() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for module in _modules():
        for each in module.definitions:
            if each.is_class:
                places[each.name].add(module.place)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_module_names_are_few_and_folders_small() -> None:
    modules = _named_modules()
    names, folders = Counter(module.name for module in modules), Counter(module.folder for module in modules)
    assert sum(count > 1 for count in names.values()) <= 24, sorted(name for name, count in names.items() if count > 1)
    assert not {folder: count for folder, count in folders.items() if count > 20}
    assert folders["sft"] <= 3


def test_modules_are_neither_long_nor_tiny() -> None:
    modules = _named_modules()
    assert not [module.place for module in modules if module.num_lines > _MAX_LINES and not module.name.endswith("_triton")]
    small = [module.place for module in modules if module.num_lines <= _SMALL_LINES]
    assert len(small) <= 25, small


def test_names_are_those_of_values() -> None:
    """`error`, `plan`, `rows`, not how the value was obtained."""
    modules = [module for tops in (_PRODUCT, _TESTS, _SCRIPTS) for module in _modules(tops)]
    assert not [f"{module.place}:{line} {name}" for module in modules for line, name in module.vague_names]


def test_private_names_of_torch_are_in_few_modules() -> None:
    places = [module.place for module in _modules() if _PRIVATE_TORCH.search(re.sub(r"#.*", "", module.text))]
    assert len(places) <= 6, places
