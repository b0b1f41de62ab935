"""Output for terminals: text without markup, and progress displays."""

from __future__ import annotations

from rich.console import Console

__all__ = ["print_text"]


def print_text(console: Console, text: str) -> None:
    """Print text as it is: brackets are no markup, numbers have no colours, and long lines are not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
