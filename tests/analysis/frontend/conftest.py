"""Separate captures for tests of captures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.capture_cache import separate_captures


@pytest.fixture(autouse=True)
def _separate_captures() -> Iterator[None]:
    with separate_captures():
        yield
