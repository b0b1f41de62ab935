"""Errors in a model's own code: the error of eager PyTorch, at its line, from every entry point."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sft
from sft.cli.main import main
from tests.helpers.models import image, seeded

_SHAPE = (1, 3, 16, 12)


class _Failing(nn.Module):
    """A convolution, and then a mistake."""

    def __init__(self, mistake: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(5, 2)
        self.layers = nn.ModuleList([nn.Identity()])
        self.named = nn.ModuleDict({"a": nn.Identity()})
        self.mistake = _divides if mistake is None else mistake

    def forward(self, x: Tensor) -> Any:
        return self.mistake(self, self.conv(x))


class _ConfigError(Exception):
    """An exception of the user's own."""


def _divides(model: Any, y: Tensor) -> Any:
    return y * (1 / 0)  # here


def _raises(error: BaseException) -> Callable[[Any, Tensor], Any]:
    def mistake(model: Any, y: Tensor) -> Any:
        raise error  # here

    return mistake


def _asserts(model: Any, y: Tensor) -> Any:
    assert y.shape[1] == 5, "five channels"  # here


_OWN: dict[str, tuple[Callable[[Any, Tensor], Any], type[BaseException], str]] = {
    "division": (_divides, ZeroDivisionError, "division by zero"),
    "value": (_raises(ValueError("bad config")), ValueError, "bad config"),
    "own class": (_raises(_ConfigError("no such option")), _ConfigError, "no such option"),
    "not implemented": (_raises(NotImplementedError("later")), NotImplementedError, "later"),
    "file": (_raises(FileNotFoundError(2, "No such file", "weights.pt")), FileNotFoundError, "weights.pt"),
    "fake in its text": (_raises(RuntimeError("fake images are missing")), RuntimeError, "fake images"),
    "key": (lambda m, y: {"a": y}["b"], KeyError, "b"),
    "key of a module": (lambda m, y: m.named["b"](y), KeyError, "b"),
    "index": (lambda m, y: [y][3], IndexError, "list index out of range"),
    "index of a module": (lambda m, y: m.layers[3](y), IndexError, "index 3 is out of range"),
    "attribute": (lambda m, y: m.missing(y), AttributeError, "has no attribute 'missing'"),
    "attribute of a tensor": (lambda m, y: getattr(y, "missing"), AttributeError, "has no attribute 'missing'"),  # noqa: B009
    "name": (lambda m, y: missing(y), NameError, "'missing' is not defined"),  # type: ignore[name-defined]  # noqa: F821
    "type": (lambda m, y: "a" + 1, TypeError, "can only concatenate str"),  # type: ignore[operator]
    "assertion": (_asserts, AssertionError, "five channels"),
    "unpacking": (lambda m, y: _unpacked((y, y, y)), ValueError, "too many values to unpack"),
}


def _unpacked(values: Any) -> Any:
    first, _second = values
    return first


def _compile_all_ways(model: nn.Module) -> list[Callable[[], Any]]:
    return [
        lambda: sft.compile(model, _SHAPE),
        lambda: sft.compile(model, (1, 3, None, None))(image(*_SHAPE).float()),
        lambda: sft.plan(model, _SHAPE),
    ]


@pytest.mark.parametrize("name", _OWN)
def test_errors_of_the_users_code_are_raised_as_they_are(name: str) -> None:
    mistake, error_class, words = _OWN[name]
    model = _Failing(mistake)
    for run in _compile_all_ways(model):
        with pytest.raises(error_class, match=words) as raised:
            run()
        assert type(raised.value) is error_class and raised.value.__cause__ is None
        assert "forward` of _Failing" in "".join(raised.value.__notes__) and "1x3x16x12" in "".join(raised.value.__notes__)
        frames = traceback.extract_tb(raised.tb)
        assert any(frame.filename == __file__ for frame in frames[-4:]), "the user's line is in the traceback"
    report = sft.check(model, _SHAPE)
    assert not report.ok and error_class.__name__ in report.problems[0] and "test_model_errors.py:" in report.problems[0]


def test_the_error_is_raised_at_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        sft.compile(_Failing(), _SHAPE)
    assert traceback.extract_tb(raised.tb)[-1].line == "return y * (1 / 0)  # here"


def test_endless_recursion_is_a_recursion_error() -> None:
    class Endless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            return self(self.conv(x))

    for run in _compile_all_ways(Endless()):
        with pytest.raises(RecursionError):
            run()
    good = seeded(lambda: nn.Conv2d(3, 4, 3))
    torch.testing.assert_close(sft.compile(good, _SHAPE)(image(*_SHAPE)), good(image(*_SHAPE))), "torch is as it was"


def test_recursion_that_ends_is_followed() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor, depth: int = 2) -> Any:
            y = self.conv(x)
            return y if depth == 0 else self(y, depth - 1)

    model = seeded(Recursive)
    torch.testing.assert_close(sft.compile(model, _SHAPE)(image(*_SHAPE)), model(image(*_SHAPE)))


@pytest.mark.parametrize(
    ("mistake", "error_class", "words"),
    [
        (lambda m, y: m.linear(y), RuntimeError, r"the model refuses an input of shape 1x3x16x12: .* \(at diagnostics/test_model_errors"),
        (lambda m, y: torch.cat([y, y[:, :, 1:]], 1), RuntimeError, "Sizes of tensors must match"),
        (lambda m, y: y.view(7, -1), RuntimeError, "the model refuses"),
        (lambda m, y: y.sum(7), IndexError, "Dimension out of range"),
        (lambda m, y: nn.functional.cross_entropy(y, torch.zeros(1, 9, 9, dtype=torch.long)), RuntimeError, "class labels of shape"),
        (lambda m, y: nn.BatchNorm2d(4)(y.mean((2, 3), keepdim=True)), ValueError, "more than 1 value per channel"),
    ],
)
def test_errors_of_operators_are_input_errors_of_the_same_class(
    mistake: Callable[[Any, Tensor], Any], error_class: type[Exception], words: str
) -> None:
    model = _Failing(mistake)
    with pytest.raises(error_class):
        model(torch.zeros(_SHAPE))
    for run in _compile_all_ways(model):
        with pytest.raises(error_class, match=words) as raised:
            run()
        assert isinstance(raised.value, sft.InputError)


class _Annotated(Tensor):
    """A subclass of tensors."""


@pytest.mark.parametrize(
    ("mistake", "remedy"),
    [
        (lambda m, y: y.as_subclass(_Annotated), "computes with plain tensors"),
        (lambda m, y: pickle.loads(pickle.dumps(m.conv))(y), "stores a tensor as bytes"),
        (lambda m, y: torch.save(y, io.BytesIO()), "stores a tensor as bytes"),
        (lambda m, y: m.double()(y), "casts or moves a module"),
        (lambda m, y: y.share_memory_(), "shares the memory of a tensor"),
    ],
    ids=["subclass", "pickle", "save", "cast", "shared memory"],
)
def test_errors_of_traces_alone_are_refusals(mistake: Callable[[Any, Tensor], Any], remedy: str) -> None:
    """Eager PyTorch runs these lines; they fail on the fake tensors of a capture."""
    with pytest.raises(sft.UnsupportedError, match=f"{remedy}.* The line is"):
        sft.compile(_Failing(mistake), _SHAPE)


def test_the_command_line_shows_the_error_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "check"):
        assert main([command, f"{__name__}:_Failing", "--input", "1x3x16x12"]) == 1
        output = capsys.readouterr()
        text = " ".join((output.out + output.err).split())
        assert "ZeroDivisionError: division by zero" in text and "test_model_errors.py:" in text and "return y * (1 / 0)" in text
        assert "Traceback" not in text
    with pytest.raises(ZeroDivisionError):
        main(["--debug", "plan", f"{__name__}:_Failing", "--input", "1x3x16x12"])
