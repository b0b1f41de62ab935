"""Remedies of a budget error: changes after which a step may fit, in the words of the interface that was used.

A remedy names settings, not their spelling. Python, ``python -m sft`` and ``python -m sft.wsi`` spell a setting differently
(``output='host'``, ``--host-budget``, ``model.budget``), and leave out remedies about settings that they do not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sft.common.byte_units import format_bytes, size_at_least
from sft.common.errors import BudgetError

__all__ = ["COMMAND_LINE", "PYTHON", "Remedy", "Setting", "Spelling", "budget_error", "message_for", "with_prefix", "with_remedies"]

#: A setting that a remedy changes.
Setting = Literal["budget", "input", "norms", "read", "output", "host", "weights", "repeats", "options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that may help.

    Attributes:
        settings: the settings to change, together.
        num_bytes: value of the budget or of the host memory.
        needed_bytes: device bytes of a plan that was made with the change; 0 if none was made.
        fits: true if that plan fits the budget.
    """

    settings: tuple[Setting, ...]
    num_bytes: int = 0
    needed_bytes: int = 0
    fits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """A setting in the words of an interface; ``{size}``, ``{text}`` (without a space) and ``{num_bytes}`` stand for its value.

    Attributes:
        action: an instruction; empty if the remedy only appears when a plan was made with it.
        change: the option that was changed for a plan.
        code: the setting as it is written in a call or a command line.
    """

    action: str = ""
    change: str = ""
    code: str = ""


#: Names of changes in sentences about plans.
_CHANGES: Mapping[Setting, str] = {
    "norms": "frozen norms",
    "read": "an input that is read in strips",
    "output": "outputs on the host",
    "host": "{size} of host memory",
    "weights": "streamed weights",
}

#: Settings of ``sft.compile`` and ``sft.plan``.
PYTHON: Mapping[Setting, Spelling] = {
    "budget": Spelling(action="raise the budget to {size} ({num_bytes} bytes)", code="budget='{text}'"),
    "input": Spelling(action="give a smaller input"),
    "norms": Spelling(change=".eval() of the norms"),
    "read": Spelling(change="an array or a file in place of a tensor"),
    "output": Spelling(action="keep the outputs on the host with output='host'", change="output='host'", code="output='host'"),
    "host": Spelling(
        action="let values wait on the host with Options(host_budget=...)",
        change="Options(host_budget='{text}')",
        code="options=sft.Options(host_budget='{text}')",
    ),
    "weights": Spelling(
        action="stream the weights with Options(weights='stream')",
        change="Options(weights='stream')",
        code="options=sft.Options(weights='stream')",
    ),
    "repeats": Spelling(action="leave out the budget of repeated blocks, so that it follows this one"),
    "options": Spelling(action="leave out options that force strategy, tile, state_every or state_slots"),
}

#: Options of ``python -m sft``.
COMMAND_LINE: Mapping[Setting, Spelling] = {
    "budget": Spelling(action="raise the budget to {size} ({num_bytes} bytes) with --budget {text}", code="--budget {text}"),
    "input": Spelling(action="give a smaller --input"),
    "norms": Spelling(change="--frozen-norms", code="--frozen-norms"),
    "read": Spelling(change="--read", code="--read"),
    "host": Spelling(
        action="let values wait on the host with --host-budget BYTES", change="--host-budget {text}", code="--host-budget {text}"
    ),
    "weights": Spelling(action="stream the weights with --weights stream", change="--weights stream", code="--weights stream"),
    "repeats": Spelling(action="leave out the budget of repeated blocks, so that it follows this one"),
    "options": Spelling(action="leave out --strategy, --halo and --tile"),
}


def budget_error(problem: str, needed_bytes: int, remedies: Iterable[Remedy]) -> BudgetError:
    """The error of a search, with its remedies in the words of the Python interface."""
    listed = tuple(remedies)
    return BudgetError(_message(problem, listed, PYTHON), needed_bytes=needed_bytes, problem=problem, remedies=listed)


def with_remedies(error: BudgetError, tried: Sequence[Remedy], note: str = "") -> BudgetError:
    """The error with a note, and with remedies of which plans were made in place of untried ones of the same setting."""
    if not error.remedies:
        return BudgetError(f"{error}{note}", needed_bytes=error.needed_bytes)
    settings = {setting for remedy in tried for setting in remedy.settings}
    untried = [remedy for remedy in error.remedies if not settings.intersection(remedy.settings)]
    return budget_error(f"{error.problem}{note}", error.needed_bytes, (*tried, *untried))


def with_prefix(error: BudgetError, prefix: str) -> BudgetError:
    """The error with a text before its message."""
    if error.remedies:
        return budget_error(f"{prefix}{error.problem}", error.needed_bytes, error.remedies)
    return BudgetError(f"{prefix}{error}", needed_bytes=error.needed_bytes)


def message_for(error: BudgetError, words: Mapping[Setting, Spelling]) -> str:
    """The message of an error in the words of an interface."""
    return _message(error.problem, error.remedies, words) if error.remedies else str(error)


def _message(problem: str, remedies: Sequence[Remedy], words: Mapping[Setting, Spelling]) -> str:
    named = [remedy for remedy in remedies if all(setting in words for setting in remedy.settings)]
    planned = [(remedy, format_bytes(remedy.needed_bytes), _changes_text(remedy, words)) for remedy in named if remedy.needed_bytes]
    fitting = [f"in {size} with {changes}" for remedy, size, changes in planned if remedy.fits]
    smaller = [f"With {changes} it still needs {size}." for remedy, size, changes in planned if not remedy.fits]
    actions = [_filled(words[remedy.settings[0]].action, remedy) for remedy in named if not remedy.needed_bytes]
    sentences = [problem]
    if fitting:
        sentences.append(f"It fits {'; or '.join(fitting)}.")
    else:
        sentences += smaller
    text = _joined([action for action in actions if action])
    message = " ".join([*sentences, *([f"{text[0].upper()}{text[1:]}."] if text else [])])
    attempt = _attempt(named, words)
    return f"{message}\nTry: {attempt}" if attempt else message


def _attempt(remedies: Sequence[Remedy], words: Mapping[Setting, Spelling]) -> str:
    """The code of the first remedy with a plan that fits, else of the budget that suffices; empty if no remedy has code."""
    budgets = [remedy for remedy in remedies if remedy.settings == ("budget",)]
    for remedy in (*(remedy for remedy in remedies if remedy.fits), *budgets):
        codes = [words[setting].code for setting in remedy.settings]
        if all(codes):
            return _filled((" " if codes[0].startswith("-") else ", ").join(codes), remedy)
    return ""


def _changes_text(remedy: Remedy, words: Mapping[Setting, Spelling]) -> str:
    """``frozen norms (.eval() of the norms) and 2.00 GiB of host memory (Options(host_budget='2.00GiB'))``."""
    return " and ".join(f"{_filled(_CHANGES[setting], remedy)} ({_filled(words[setting].change, remedy)})" for setting in remedy.settings)


def _filled(text: str, remedy: Remedy) -> str:
    """The text with the value of the setting; the host memory of a plan that does not fit is no advice."""
    if "host" in remedy.settings and not remedy.num_bytes:
        text = text.replace("{size} of ", "").replace("'{text}'", "...").replace(" {text}", " BYTES")
    size = size_at_least(remedy.num_bytes)
    return text.format(size=size, text=size.replace(" ", ""), num_bytes=remedy.num_bytes)


def _joined(texts: Sequence[str]) -> str:
    """``a``, ``a, or b``, ``a, b, or c``."""
    return ", or ".join((", ".join(texts[:-1]), texts[-1])) if len(texts) > 1 else "".join(texts)
