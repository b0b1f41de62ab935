"""Outputs in files: complete or absent after any failure, and refused at impossible paths."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.common.interval import Interval
from sft.sources.sink import NpyFile
from tests.helpers.capture_cache import remembered_captures
from tests.helpers.exactness import gradient_errors, relative_error
from tests.helpers.models import chain, image, seeded
from tests.helpers.sources import Watched, mapped_bytes

SHAPE = (2, 3, 20, 14)
TILED = sft.Options(tile=(4, 6), batch_tile=1)


@pytest.fixture(scope="module", autouse=True)
def captured_once() -> Iterator[None]:
    with remembered_captures():
        yield


class TwoHeads(nn.Module):
    """A map for each pixel, scores and a single number, besides the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.body(x))
        logits = self.head(y)
        return logits, y.mean((2, 3)), x, logits, logits.mean()


def _body() -> nn.Module:
    return seeded(lambda: chain(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1)))


def _nothing_but(folder: Path, *names: str) -> bool:
    return sorted(os.listdir(folder)) == sorted(names)


# --- files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 9), SHAPE, (2, 3, 5, 6, 4)], ids=["signal", "image", "volume"])
def test_the_tensor_is_the_file(shape: tuple[int, ...], tmp_path: Path) -> None:
    layer = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
    model, target = seeded(lambda: chain(layer(3, 4, 3, padding=1), nn.ReLU(), layer(4, 5, 3, padding=1))), tmp_path / "out.npy"
    net = sft.compile(copy.deepcopy(model), shape, output=target, options=sft.Options(tile=(2, 3)))
    results = []
    for seed in (0, 1):
        x = image(*shape, seed=seed)
        y, expected = net(x), model(x)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert relative_error(y, expected) <= 1e-12
        assert np.array_equal(np.load(target), y.detach().numpy()) and _nothing_but(tmp_path, "out.npy")
        results.append((y, expected))
    assert all(relative_error(y, expected) <= 1e-12 for y, expected in results), "an older output is a file of its own"
    errors = gradient_errors({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in model.named_parameters()})
    assert max(errors.values()) <= 1e-10
    with torch.inference_mode():
        net(image(*shape, seed=2))
    assert np.allclose(np.load(target), model(image(*shape, seed=2)).detach().numpy(), rtol=0, atol=1e-12)


def test_a_file_for_each_output(tmp_path: Path) -> None:
    model = seeded(TwoHeads)
    names = ("logits.npy", "scores.npy", "input.npy", "again.npy", "number.npy")
    net = sft.compile(copy.deepcopy(model), SHAPE, output=[str(tmp_path / name) for name in names], options=TILED)
    x, x_eager = (image(*SHAPE).requires_grad_() for _ in range(2))
    results, expected = net(x), model(x_eager)
    for name, y, reference in zip(names, results, expected, strict=True):
        assert relative_error(y, reference) <= 1e-12 and np.array_equal(np.load(tmp_path / name), y.detach().numpy())
    for outputs in (results, expected):
        sum(weight * y.square().sum() for weight, y in enumerate(outputs, start=1)).backward()
    assert x.grad is not None and x_eager.grad is not None and relative_error(x.grad, x_eager.grad) <= 1e-12
    mixed = sft.compile(model, SHAPE, output=["host", tmp_path / "scores.npy", "host", "host", "host"], options=TILED)(x)
    assert mixed[2] is x and mixed[0] is mixed[3] and np.array_equal(np.load(tmp_path / "scores.npy"), mixed[1].detach().numpy())


class ClassMap(nn.Module):
    """The most likely class of each pixel, a byte each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits.argmax(1).to(torch.uint8)


def test_a_map_of_classes(tmp_path: Path) -> None:
    model = seeded(ClassMap)
    with torch.no_grad():
        net: Any = sft.compile(model, SHAPE, output=tmp_path / "classes.npy", options=TILED)
        net(image(*SHAPE))
        classes = np.load(tmp_path / "classes.npy")
        assert classes.dtype == np.uint8 and np.array_equal(classes, model(image(*SHAPE)).numpy())
    assert [segment.placement for segment in net.plan.segments] == ["host"], "never whole on the device, without channels, too"


def test_a_loss_that_works_on_rows(tmp_path: Path) -> None:
    """The caller computes the gradient and passes it in a file, as on the page on outputs."""
    model, target = _body(), torch.from_numpy(np.random.default_rng(0).integers(0, 5, (2, 20, 14)))
    net = sft.compile(copy.deepcopy(model), SHAPE, output=tmp_path / "out.npy", options=TILED)
    y = net(image(*SHAPE))
    gradient = np.lib.format.open_memmap(tmp_path / "gradient.npy", "w+", np.float64, tuple(y.shape))
    for top in range(0, y.shape[2], 8):
        rows = y.detach()[:, :, top : top + 8].requires_grad_()
        nn.functional.cross_entropy(rows, target[:, top : top + 8], reduction="sum").backward()
        assert rows.grad is not None
        gradient[:, :, top : top + 8] = rows.grad
    y.backward(torch.from_numpy(gradient))
    nn.functional.cross_entropy(model(image(*SHAPE)), target, reduction="sum").backward()
    errors = gradient_errors({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in model.named_parameters()})
    assert max(errors.values()) <= 1e-10


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out.npy").symlink_to(tmp_path / "disk" / "real.npy")
    net = sft.compile(_body(), SHAPE, output=tmp_path / "out.npy", options=TILED)
    net(image(*SHAPE))
    assert (tmp_path / "out.npy").is_symlink() and np.load(tmp_path / "disk" / "real.npy").shape == (2, 5, 20, 14)


def test_file_systems_that_cannot_preallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    net = sft.compile(_body(), SHAPE, output=tmp_path / "out.npy", options=TILED)
    y = net(image(*SHAPE))
    assert np.array_equal(np.load(tmp_path / "out.npy"), y.detach().numpy())


# --- failures -----------------------------------------------------------------------------------------------------------


def _failing(folder: Path) -> tuple[Any, Watched, bytes]:
    """A compiled model that has written a file, its input, and the file's content."""
    source = Watched(image(*SHAPE))
    net = sft.compile(_body(), source, output=folder / "out.npy", options=TILED)
    net(source)
    return net, source, (folder / "out.npy").read_bytes()


def test_a_forward_that_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    net, source, before = _failing(tmp_path)
    source.fails_at = 11
    state = torch.get_rng_state()
    with pytest.raises(sft.SourceError, match="the disk is on fire"):
        net(source)
    assert _nothing_but(tmp_path, "out.npy") and (tmp_path / "out.npy").read_bytes() == before
    assert torch.equal(torch.get_rng_state(), state)
    source.fails_at = None
    net(source)
    assert (tmp_path / "out.npy").read_bytes() == before


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, source, before = _failing(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(sft.SourceError, match=r"shape \(2, 5, 20, 14\) \(21.88 KiB\) .*No space left.* are free in .*Make room") as raised:
        net(source)
    assert raised.value.errno == errno.ENOSPC
    assert _nothing_but(tmp_path, "out.npy") and (tmp_path / "out.npy").read_bytes() == before


def test_a_path_that_becomes_a_folder(tmp_path: Path) -> None:
    net, source, _ = _failing(tmp_path)
    (tmp_path / "out.npy").unlink()
    (tmp_path / "out.npy").mkdir()
    with pytest.raises(sft.InputError, match="Is a directory"):
        net(source)
    assert _nothing_but(tmp_path, "out.npy")
    (tmp_path / "out.npy").rmdir()
    file = NpyFile(tmp_path / "out.npy", (3,), torch.float32)
    (tmp_path / "out.npy").mkdir()
    with pytest.raises(sft.SourceError, match="cannot rename the finished output"):
        file.publish()
    file.discard()
    assert _nothing_but(tmp_path, "out.npy")


def test_a_file_that_is_cut_short_while_it_is_written(tmp_path: Path) -> None:
    """An access beyond the end of the file would kill the process."""
    net, source, before = _failing(tmp_path)

    class Cutting(Watched):
        def rows(self, interval: Interval, out: Tensor) -> None:
            for temporary in tmp_path.glob(".sft-*.part"):
                os.truncate(temporary, 0)
            super().rows(interval, out)

    with pytest.raises(sft.SourceError, match=r"the output .*out.npy.*cut short"):
        net(Cutting(source.content[:1]))
    assert _nothing_but(tmp_path, "out.npy") and (tmp_path / "out.npy").read_bytes() == before


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("disk", r"output 'disk': choose 'device', 'host', or a path that ends in \.npy$"),
        ("gpu", r"output 'gpu': choose 'device', 'host', or a path that ends in \.npy$"),
        ("a" * 300 + ".npy", "no file can have this name"),
        ("a\0.npy", "no file can have this name"),
        ("out.zarr", "not in '.zarr'"),
        ("there/is/none/out.npy", "'there/is/none' is not a directory; make it first"),
        (["a.npy", "./a.npy"], "names a file twice"),
        ([], "choose 'device'"),
        (7, "output 7: choose"),
        ([7], "output 7 is an int; give a path"),
        (["a.npy", "b.npy"], r"output has 2 path\(s\) for the model's 1 output\(s\)"),
    ],
)
def test_invalid_destinations(output: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sft.InputError, match=message):
        sft.compile(_body(), SHAPE, output=output)


def test_a_number_of_outputs_that_is_known_at_the_call(tmp_path: Path) -> None:
    net = sft.compile(seeded(TwoHeads), (1, 3, None, None), output=tmp_path / "out.npy")
    with pytest.raises(sft.InputError, match=r"output has 1 path\(s\) for the model's 5 output\(s\); give output=\[path, ...\]"):
        net(image(1, 3, 8, 8))
    assert _nothing_but(tmp_path)


def test_folders_and_directories(tmp_path: Path) -> None:
    (tmp_path / "taken.npy").mkdir()
    with pytest.raises(sft.InputError, match="is a directory; give the path of a file in it"):
        sft.compile(_body(), SHAPE, output=tmp_path / "taken.npy")
    (tmp_path / "folder").mkdir()
    net = sft.compile(_body(), SHAPE, output=tmp_path / "folder" / "out.npy")
    (tmp_path / "folder").rmdir()
    with pytest.raises(sft.InputError, match=r"No such file or directory\. Give a path in a folder that exists"):
        net(image(*SHAPE))


def test_a_folder_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write anywhere
    with pytest.raises(sft.InputError, match="no permission to write into"):
        sft.compile(_body(), SHAPE, output=tmp_path / "out.npy")


def test_a_dry_run_writes_no_file(tmp_path: Path) -> None:
    net = sft.compile(_body().to("meta"), SHAPE, output=tmp_path / "out.npy")
    with pytest.raises(sft.InputError, match="the meta device computes no values to write"):
        net(torch.empty(SHAPE, dtype=torch.float64, device="meta"))
    assert _nothing_but(tmp_path)


def test_types_that_files_cannot_hold(tmp_path: Path) -> None:
    model = _body().to(torch.bfloat16)
    with pytest.raises(sft.InputError, match=r"output 0 is torch.bfloat16, which .npy files cannot hold .*'host'.*output.float\(\)"):
        sft.compile(model, SHAPE, output=tmp_path / "out.npy")
    y = sft.compile(model, SHAPE, output="host")(image(*SHAPE).to(torch.bfloat16))
    assert y.dtype == torch.bfloat16 and relative_error(y, model(image(*SHAPE).to(torch.bfloat16))) <= 0.05


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_pages_that_were_written_are_released(tmp_path: Path) -> None:
    file = NpyFile(tmp_path / "out.npy", (1, 2, 4096, 2048), torch.float32)
    file.array[:] = 1.0
    file.publish()
    most = mapped_bytes(tmp_path / "out.npy")
    file.release(2, Interval(0, 1), Interval(1024, 3072))
    assert most > 60 * 2**20 and mapped_bytes(tmp_path / "out.npy") < most * 0.6
    file.release()
    assert mapped_bytes(tmp_path / "out.npy") == 0 and float(np.load(tmp_path / "out.npy").min()) == 1.0
