"""Models of other packages by name: also with a torchvision built for another torch, and with errors that name the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from sft.common.errors import InputError
from sft.common.model_zoo import ModelName, import_library

#: A torchvision in the import order of the real one: the package's own modules, and fake kernels of compiled operators.
_TORCHVISION = {
    "torchvision/__init__.py": "from torchvision import extension, _meta_registrations, models\n",
    "torchvision/_meta_registrations.py": (
        "import torch, torchvision.extension\n"
        "assert torchvision.extension.IS_COMPILED in (True, False)\n"
        "for name in ('nms', 'qnms'):\n"
        "    torch.library.register_fake(f'torchvision::{name}')(lambda dets, scores, iou_threshold: dets.new_empty(0))\n"
    ),
    "torchvision/models.py": (
        "from torch import nn\n"
        "def list_models(): return ['both', 'ours']\n"
        "def get_model(name, **options):\n"
        "    model = nn.Conv2d(3, 2, 1)\n"
        "    model.made_with = (name, options)\n"
        "    return model\n"
    ),
    "timm/__init__.py": (
        "import torchvision\n"
        "from torch import nn\n"
        "def list_models(): return ['both', 'theirs']\n"
        "def is_model(name): return name in list_models()\n"
        "def create_model(name, **options): return nn.ReLU(**options)\n"
    ),
    "mine.py": "import torchvision, torch\ndef net(): return torch.nn.Tanh()\nready = torch.nn.Sigmoid()\n",
}
_UNFITTING = "IS_COMPILED = False\n"
_FITTING = (
    "import torch\n"
    "IS_COMPILED = True\n"
    "for name in ('nms', 'qnms'):\n"
    "    torch.library.define(f'torchvision::{name}', '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
)
_NAMES = (
    "from sft.common.model_zoo import ModelName\n"
    "def maker(text, **given): return ModelName(text=text, place='MODEL', options_place='--model-args', **given).factory()\n"
)


def _run(folder: Path, extension: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process with these packages first on its path."""
    for name, text in {**_TORCHVISION, "torchvision/extension.py": extension}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_a_torchvision_for_another_torch_is_imported(tmp_path: Path) -> None:
    done = _run(
        tmp_path,
        _UNFITTING,
        "import importlib\n"
        "try:\n"
        "    importlib.import_module('timm')\n"
        "except RuntimeError as error:\n"
        "    assert 'torchvision::nms' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('this torchvision can be imported as it is')\n"
        "import sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] in ('torchvision', 'timm')]: del sys.modules[name]\n"
        f"{_NAMES}"
        "assert type(maker('mine:net').make({})).__name__ == 'Tanh'\n"
        "assert maker('timm:theirs').make({'inplace': True}).inplace\n"
        "assert maker('torchvision:Ours').make({'classes': 2}).made_with == ('Ours', {'weights': None, 'classes': 2})\n"
        "assert maker('ours').make({'weights': 'DEFAULT'}).made_with == ('ours', {'weights': 'DEFAULT'})\n"
        "assert [maker('both').library, maker('both', libraries=('timm', 'torchvision')).library] == ['torchvision', 'timm']\n"
        "assert maker('mine:ready').make({}) is importlib.import_module('mine').ready\n"
        "import torchvision\n"
        "assert not torchvision.extension.IS_COMPILED\n"
        "for text, words in (('neither', 'torchvision has no such model; timm has no such model'), ('timm:ours', \"no model 'ours'\"),\n"
        "    ('thiers', 'Did you mean theirs?'), ('torchvision:bot', 'Did you mean both? torchvision.models.list_models()')):\n"
        "    try:\n"
        "        maker(text)\n"
        "    except ValueError as error:\n"
        "        assert words in str(error) and repr(text) in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(text)\n",
    )
    assert done.returncode == 0, done.stderr


def test_a_torchvision_that_fits_declares_its_operators_itself(tmp_path: Path) -> None:
    done = _run(
        tmp_path, _FITTING, f"{_NAMES}maker('timm:theirs'), maker('ours')\nimport torchvision\nassert torchvision.extension.IS_COMPILED\n"
    )
    assert done.returncode == 0, done.stderr


def _name(text: str) -> ModelName:
    return ModelName(text=text, place="model.backbone", options_place="model.options", libraries=("no_such_library",))


def test_other_import_failures_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sft_test_broken.py").write_text("raise RuntimeError('operator torchvision::roi_align does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="roi_align"):
        import_library("sft_test_broken")
    with pytest.raises(InputError, match=r"model.backbone 'sft_test_broken:net': cannot import .*roi_align.*PYTHONPATH"):
        _name("sft_test_broken:net").factory()


def test_a_library_that_is_not_installed_is_the_one_to_install() -> None:
    with pytest.raises(
        InputError, match=r"'net18': not found \(no_such_library is not installed\)\. pip install no_such_library, or write"
    ):
        _name("net18").factory()


def test_a_module_of_an_unsearched_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sft_test_near.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"current folder, which is not on Python's path: set PYTHONPATH=\.$"):
        _name("sft_test_near:net").factory()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch.nn:", "write package.module:callable"),
        ("torch.nn:NoSuch.Thing", r"module torch.nn has no callable 'NoSuch.Thing'"),
        ("torch:zeros", r"'torch:zeros' cannot be made .*model\.options"),
        ("builtins:dict", "returned an object of type dict"),
    ],
)
def test_names_of_no_model_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _name(text).factory().make({})


def test_a_callable_may_be_an_attribute_of_a_class() -> None:
    assert isinstance(_name("torch:nn.modules.activation.ReLU").factory().make({"inplace": True}), nn.ReLU)
