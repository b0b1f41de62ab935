"""Fixtures of running ranks, started once for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.ranks import Ranks, ranks_of


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_of(2, tmp_path_factory.mktemp("pair")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks_of(4, tmp_path_factory.mktemp("four")) as ranks:
        yield ranks
