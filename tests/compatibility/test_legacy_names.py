"""Stand-ins for moved modules. ``test_legacy_files.py`` reads pickles that name them."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import sft
from sft.common.legacy_names import moved, renamed

_ENTRIES = [(module, name, *place) for module, places in moved().items() for name, place in places.items()]
_ROOT = Path(sft.__file__).parent


@pytest.mark.parametrize(("module", "name", "place", "new_name"), _ENTRIES)
def test_old_names_are_the_present_objects(module: str, name: str, place: str, new_name: str) -> None:
    value = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert value is getattr(importlib.import_module(place), new_name)
    assert place not in moved(), "the new module has moved, too"


@pytest.mark.parametrize("module", moved())
def test_a_stand_in_hides_no_module(module: str) -> None:
    path = _ROOT.joinpath(*module.split(".")[1:])
    assert not path.with_suffix(".py").exists() and not (path / "__init__.py").exists()
    parent = module.rpartition(".")[0]
    assert parent in moved() or _ROOT.joinpath(*parent.split(".")[1:], "__init__.py").exists(), "no parent to import"


def test_unknown_names_are_attribute_errors() -> None:
    stand_in = sys.modules["sft.plan.types"]
    assert not hasattr(stand_in, "__file__") and not hasattr(stand_in, "__path__") and not hasattr(stand_in, "json")
    assert {"Plan", "SegmentPlan"} <= set(dir(stand_in))
    with pytest.raises(AttributeError, match="kept for old pickles"):
        _ = stand_in.nothing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        renamed("sft.plan.types", "nothing")


def test_importing_sft_imports_no_more_for_it_and_packages_have_no_new_attributes() -> None:
    code = (
        "import sys, sft\n"
        "from sft.common.legacy_names import moved\n"
        "assert not [name for name in sys.modules if name == 'sft.wsi' or name.startswith('sft.wsi.') and name not in moved()]\n"
        "assert callable(sft.plan) and callable(sft.compile) and callable(sft.check)\n"
        "assert not hasattr(sft, 'errors') and not hasattr(sft, 'bands')\n"
        "from sft.plan.types import Plan\n"
        "assert Plan is sft.Plan and callable(sft.plan)\n"
    )
    path = os.pathsep.join([str(_ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run([sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)
