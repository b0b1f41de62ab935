"""Checks of a YAML file before it is read as a configuration.

A file of a few hundred bytes can stand for billions of values, since an alias repeats the value of its anchor ("billion laughs"), and a
file of brackets can exceed any recursion limit. Both are refused from the events of the parser, in time that is linear in the bytes that
are read, before any value is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import yaml

from sft.common.errors import InputError
from sft.common.untrusted.foreign_files import require_regular_file

__all__ = ["check_config_file"]

_MAX_BYTES = 2**20
#: Values of a configuration, each counted as often as aliases repeat it. The reader's time grows with the square of a list: a second.
_MAX_VALUES = 2_000
_MAX_DEPTH = 32
#: Characters of one value: a path has up to 4096.
_MAX_CHARACTERS = 8192
_NULL = "tag:yaml.org,2002:null"


def check_config_file(path: Path, groups: Collection[str]) -> None:
    """Refuse a YAML file that is too large, or that the reader of configurations would misread without a warning.

    The latter are a duplicate key (the last value would win), a group without settings, and an anchor inside its own value. A missing file
    passes: its reader says so.

    Args:
        path: the file.
        groups: names of the groups of settings.

    Raises:
        InputError: it is such a file, or no YAML of settings by name.
    """
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise InputError(f"{path} has more than {_MAX_BYTES} bytes, which no configuration has; give the YAML file of one")
        text = content.decode("utf-8")
        _check_amount(path, text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_names(root, path)
        _check_node(root, path, groups)
        _check_values(path, text)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; save it as plain text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise InputError(f"{path}{where}: invalid YAML: {error.problem or error.context}; correct this line") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from error
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}. Give the YAML file of a configuration.") from error


def _check_amount(path: Path, text: str) -> None:
    """Refuse more values than a configuration has, counted with their repetitions by aliases."""
    anchored: dict[str, int] = {}  # the number of values of each anchor
    open_counts = [0]  # of the collections around the event, the innermost last
    open_anchors: list[tuple[str | None, int]] = [(None, 0)]  # with their lines
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            around = dict(open_anchors).get(event.anchor)
            if around is not None:
                raise InputError(f"{path}, line {around}: an alias of what it is part of; write it out")
            open_counts[-1] += anchored.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > _MAX_CHARACTERS:
                raise InputError(f"{path}, line {line}: a value of {len(event.value)} characters; {_MAX_CHARACTERS} are the most")
            open_counts[-1] += 1
            if event.anchor is not None:
                anchored[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_counts.append(1)
            open_anchors.append((event.anchor, line))
            if len(open_counts) > _MAX_DEPTH:
                raise InputError(f"{path}, line {line}: more than {_MAX_DEPTH} levels, one inside the other; a configuration has a few")
        elif isinstance(event, yaml.CollectionEndEvent):
            count, (anchor, _) = open_counts.pop(), open_anchors.pop()
            open_counts[-1] += count
            if anchor is not None:
                anchored[anchor] = count
        if sum(open_counts) > _MAX_VALUES:
            raise InputError(
                f"{path}, line {line}: more than {_MAX_VALUES} values, those that aliases repeat included; a configuration has some hundred"
            )


def _check_names(root: yaml.Node | None, path: Path) -> None:
    """Refuse a file that is not a mapping, or that has keys other than names."""
    if not isinstance(root, yaml.MappingNode):
        kind = "empty" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise InputError(f"{path} is {kind}; a configuration has settings by name, such as train: {{epochs: 20}}")
    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            line = key.start_mark.line + 1
            raise InputError(
                f"{path}, line {line}: {getattr(key, 'value', 'a list')!r} is not a name of a setting; write a name or quote it"
            )


def _check_node(node: yaml.Node, path: Path, groups: Collection[str], *, is_top: bool = True) -> None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    counts = Counter(key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode))
    for key, value in pairs:
        where = f"{path}, line {key.start_mark.line + 1}: {key.value}"
        if isinstance(key, yaml.ScalarNode) and counts[key.value] > 1:
            raise InputError(f"{where} is given {counts[key.value]} times; leave one")
        is_empty = not isinstance(value, yaml.MappingNode) if is_top else key.value == "options" and value.tag == _NULL
        if is_empty and (not is_top or key.value in groups):
            raise InputError(f"{where} has no settings below it; write some, or leave the line out")
        _check_node(value, path, groups, is_top=False)
    for item in node.value if isinstance(node, yaml.SequenceNode) else []:
        _check_node(item, path, groups, is_top=False)


def _check_values(path: Path, text: str) -> None:
    """Refuse values that contradict their tags or exceed Python's numbers, on which the reader fails."""
    try:
        yaml.load(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # constructors of numbers and dates raise their own
        raise InputError(f"{path}: a value cannot be read ({type(error).__name__}: {error}); write it in quotes, or correct it") from error
