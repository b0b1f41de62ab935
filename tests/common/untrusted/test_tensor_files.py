"""Files of torch.save: tensors are read, code is not run, and the message recommends no way to run it."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from sft.common.errors import SourceError
from sft.common.untrusted.tensor_files import load_tensor_file


class _Touch:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_tensors_numbers_and_texts_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3), "b": [1, 2.5, "text", None]}, tmp_path / "t.pt")
    content = load_tensor_file(tmp_path / "t.pt")
    assert content["a"].tolist() == [0, 1, 2] and content["b"] == [1, 2.5, "text", None]


@pytest.mark.parametrize("kind", ["torch", "network", "pickle", "protocol 0"])
def test_code_is_named_and_not_run(tmp_path: Path, kind: str) -> None:
    path, touched = tmp_path / "t.pt", tmp_path / "touched"
    if kind == "network":
        torch.save(torch.nn.Linear(2, 2), path)
    elif kind == "torch":
        torch.save({"a": _Touch(touched)}, path)
    else:
        path.write_bytes(pickle.dumps(_Touch(touched), protocol=0 if kind == "protocol 0" else None))
    with pytest.raises(SourceError) as caught:
        load_tensor_file(path)
    message = str(caught.value)
    assert str(path) in message and "weights_only" not in message and "False" not in message and "\n" not in message
    if kind == "network":
        assert "it names torch.nn.modules.linear.Linear, which is code" in message
    assert not touched.exists()


def test_archives_that_expand_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "t.pt")
    with zipfile.ZipFile(tmp_path / "t.pt") as source, zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    with pytest.raises(SourceError, match="compressed archive"):
        load_tensor_file(tmp_path / "c.pt")


@pytest.mark.parametrize("content", [b"", b"garbage" * 20, b"PK\x03\x04 cut short"])
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.pt").write_bytes(content)
    with pytest.raises(SourceError, match=r"t\.pt"):
        load_tensor_file(tmp_path / "t.pt")
    with pytest.raises(SourceError, match="cannot be read"):
        load_tensor_file(tmp_path / "none.pt")
