"""The pip command in messages about missing libraries, and versions of distributions, as the doctors print them."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.common import installation
from sft.common.installation import installed_version

_ROOT = Path(__file__).resolve().parents[2]


class _Record:
    """A distribution with the origin that pip has recorded."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, 'pip install "sft-engine[wsi]"'),
        ({"url": "file:///home/me/my%20code/sft", "dir_info": {"editable": True}}, 'pip install -e "/home/me/my code/sft[wsi]"'),
        ({"url": "file:///home/me/sft", "dir_info": {}}, 'pip install "/home/me/sft[wsi]"'),
        ({"url": "file:///x/sft_engine-1-py3-none-any.whl", "archive_info": {}}, 'pip install "/x/sft_engine-1-py3-none-any.whl[wsi]"'),
        ({"url": "https://x/s.whl", "archive_info": {}}, 'pip install "sft-engine[wsi] @ https://x/s.whl"'),
        (
            {"url": "https://x/s.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            'pip install "sft-engine[wsi] @ git+https://x/s.git@ab12"',
        ),
    ],
)
def test_origin_of_the_installation(origin: dict[str, Any] | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: _Record(origin))
    assert installation.install_command("wsi") == expected


def test_checkout_without_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert installation.install_command("plot") == f'pip install -e "{_ROOT}[plot]"'


def test_the_version_of_torch_names_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert installed_version("torch") == "2.11.0+cu130"


def test_other_distributions_have_that_of_their_metadata() -> None:
    assert installed_version("numpy") == importlib.metadata.version("numpy")
    assert installed_version("no-such-distribution") is None
