"""Code that a configuration may name: refusals before the import, and before the call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from sft.common.errors import InputError
from sft.common.model_zoo import ModelName
from sft.common.untrusted.trusted_code import Trust, TrustedCode

#: A module that records its import and forbidden calls.
_MODULE = """
import functools, os, pathlib
from os import system
from torch import nn
from torch.nn import Conv2d
LOG = pathlib.Path(__file__).with_name("log")
def record(text): LOG.write_text(LOG.read_text() + text + "\\n" if LOG.exists() else text + "\\n")
record("import")
class Net(nn.Sequential):
    def __init__(self, width=4): super().__init__(nn.Conv2d(3, width, 1))
    @classmethod
    def build(cls): return cls()
    @staticmethod
    def make(): return Net()
    class Inner(nn.Identity): pass
def net(width=4): return Net(width)
def number(): return 3
class Command:
    def __init__(self, **options): record("call")
    def __call__(self, **options): record("call")
command = Command
ready = Net()
partial = functools.partial(record, "call")
cached = functools.lru_cache(record)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "sft_test_net.py").write_text(_MODULE)
    (tmp_path / "nets" / "sft_test_other.py").write_text(_MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "nets")])
    yield tmp_path / "nets"
    for name in ("sft_test_net", "sft_test_other"):
        sys.modules.pop(name, None)


def _name(text: str, trust: Trust) -> ModelName:
    return ModelName(text=text, place="model.backbone", options_place="model.options", trust=TrustedCode.of(trust))


def _log(folder: Path) -> list[str]:
    path = folder / "log"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize("trust", ["sft_test_net", "sft_test_net.py", "."])
@pytest.mark.parametrize("member", ["Net", "net", "Net.build", "Net.make", "Net.Inner"])
def test_networks_of_a_trusted_module_are_built(folder: Path, trust: str, member: str) -> None:
    place = trust if trust == "sft_test_net" else str(folder / trust)
    assert isinstance(_name(f"sft_test_net:{member}", place).factory().make({}), nn.Module)
    assert _log(folder) == ["import"]


@pytest.mark.parametrize("trust", [(), "sft_test", "sft_test_nets", ["sft_test_other"], "sft_test_net.sub"])
def test_modules_that_are_not_trusted_are_not_imported(folder: Path, trust: Trust) -> None:
    with pytest.raises(
        InputError, match=r"model\.backbone 'sft_test_net:Net': the module sft_test_net \(.*sft_test_net\.py\) .*--trust sft_test_net"
    ):
        _name("sft_test_net:Net", trust).factory()
    assert not _log(folder)


def test_a_trusted_file_does_not_admit_its_neighbours(folder: Path) -> None:
    trust = TrustedCode.of(str(folder / "sft_test_net.py"))
    with pytest.raises(InputError, match="--trust sft_test_other"):
        _name("sft_test_other:Net", trust).factory()
    # Installed packages inside a trusted folder, as in an environment, are not its own modules.
    (folder / "deep").mkdir()
    (folder / "deep" / "sft_test_deep.py").write_text("")
    sys.path.append(str(folder / "deep"))
    with pytest.raises(InputError, match="--trust sft_test_deep"):
        _name("sft_test_deep:Net", str(folder)).factory()
    assert not _log(folder)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("system", "builtin_function_or_method, neither a class derived from torch.nn.Module nor a function"),
        ("os.system", "os is a module that sft_test_net imports"),
        ("pathlib.Path.cwd", "pathlib is a module"),
        ("Conv2d", "Conv2d is defined in torch.nn.modules.conv, which is not trusted"),
        ("Command", "the class Command, neither"),
        ("command", "the class Command, neither"),
        ("ready", "an object of type Net, neither"),
        ("partial", "an object of type partial, neither"),
        ("cached", "an object of type _lru_cache_wrapper, neither"),
        ("LOG.unlink", "no callable|neither|not trusted"),
        ("Net.__init__", "no callable"),
        ("net.__globals__", "no callable"),
        ("Net.load_state_dict", "defined in torch.nn.modules.module, which is not trusted"),
        ("nothing", "no callable 'nothing'"),
    ],
)
def test_members_that_are_no_networks_are_not_called(folder: Path, member: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _name(f"sft_test_net:{member}", "sft_test_net").factory()
    assert _log(folder) == ["import"]


def test_a_function_that_returns_no_network_is_reported(folder: Path) -> None:
    with pytest.raises(InputError, match="returned an object of type int"):
        _name("sft_test_net:number", "sft_test_net").factory().make({})


@pytest.mark.parametrize(
    "text",
    ["os:system", "posix:system", "builtins:exec", "subprocess:Popen", "os.path:join", "importlib:import_module", "shutil:rmtree",
     "torch:load", "torch.hub:load", "torch.nn.functional:relu", "sft.cli.main:main", "runpy:run_path"],
)  # fmt: skip
@pytest.mark.parametrize("trust", [(), TrustedCode(modules=("os", "torch", "sft", "builtins", "posix"))])
def test_the_standard_library_is_never_admitted(text: str, trust: Trust) -> None:
    with pytest.raises(InputError, match="which a configuration never runs"):
        _name(text, trust).factory()


@pytest.mark.parametrize(
    "text", ["a:b:c", ".os:system", "my.:net", "timm:hf-hub:owner/model", "local-dir:/tmp/model", "os;x:system", "my:a b"]
)
def test_names_that_are_no_paths_of_modules(text: str) -> None:
    with pytest.raises(InputError, match=r"write package\.module:name"):
        _name(text, ()).factory()


@pytest.mark.parametrize(
    ("trust", "message"),
    [
        ("os", "os is of Python's standard library"),
        ("builtins", "standard library"),
        ("importlib.util", "standard library"),
        ("torch", "torch holds functions"),
        ("sft.wsi", "sft holds functions"),
        ("no/such/folder", "give a module"),
        ("", "give a module"),
        ("my-net", "give a module"),
    ],
)
def test_untrusted_paths_and_names_are_refused(trust: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrustedCode.of(trust)


def test_a_file_named_as_a_standard_module_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("")
    with pytest.raises(InputError, match="json is of Python's standard library"):
        TrustedCode.of(str(tmp_path / "json.py"))


def test_layers_of_torch_need_no_trust() -> None:
    options = {"in_channels": 3, "out_channels": 2, "kernel_size": 1}
    assert isinstance(_name("torch.nn:Conv2d", ()).factory().make(options), nn.Conv2d)
    for member in ("functional", "functional.relu", "Module.__init__", "init", "Parameter", "__builtins__"):
        with pytest.raises(InputError, match=r"torch\.nn has no layer"):
            _name(f"torch.nn:{member}", ()).factory()


def test_a_name_on_the_command_line_is_the_callers(folder: Path) -> None:
    name = ModelName(text="sft_test_net:Net", place="MODEL", options_place="--model-args")
    assert isinstance(name.factory().make({"width": 2}), nn.Module)


def test_timm_reads_no_files_that_a_configuration_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text(
        "from torch import nn\ndef is_model(name): return name == 'net'\ndef create_model(name, **options): return nn.Identity()\n"
    )
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.syspath_prepend(tmp_path)
    for options in ({"checkpoint_path": "x.pt"}, {"pretrained_cfg": {"file": "x.pt"}}, {"pretrained_cfg_overlay": {"url": "http://x"}}):
        with pytest.raises(InputError, match=r"model\.options\.\w+ lets timm read files"):
            _name("timm:net", ()).factory().make(options)
        assert isinstance(_name("timm:net", "timm").factory().make(options), nn.Identity)
    assert isinstance(_name("timm:net", ()).factory().make({"pretrained": True, "checkpoint_path": ""}), nn.Identity)
    sys.modules.pop("timm", None)
