"""Build the sdist, build the wheel from it, install that wheel in an empty environment elsewhere, and import it.

Run by ``make package``, not by pytest. It detects errors that no test in a checkout can: a lost link, a changed build backend, a file that
only the checkout has. The new environment finds the dependencies through a path entry to this one's site-packages (a path entry does not
follow the .pth files in there, so the editable install stays invisible), and the import check asserts that every file of ours comes from
the wheel, in a folder that contains a clone named ``sft`` as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sft", "sft/kernels", "sft/analysis")

IMPORT_CHECK = """
import importlib, importlib.metadata, pathlib, sys
site = pathlib.Path(sys.argv[1]).resolve()
for name in sys.argv[2:]:
    file = pathlib.Path(importlib.import_module(name).__file__).resolve()
    assert file.is_relative_to(site), f"{name} comes from {file}, not from the wheel in {site}"
print("imported", *sys.argv[2:], importlib.metadata.version("sft-engine"))
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sft-wheel-") as scratch:
        wheel = _build(Path(scratch))
        _check_files(wheel)
        _install_and_import(wheel, Path(scratch))


def _build(scratch: Path) -> Path:
    """Build the sdist and, from the sdist alone, the wheel."""
    _run(sys.executable, "-P", "-m", "build", "--outdir", scratch / "dist", ROOT, cwd=scratch)
    (wheel,) = (scratch / "dist").glob("*.whl")
    return wheel


def _check_files(wheel: Path) -> None:
    """Compare the wheel's contents with the checkout's: the same modules and data, as files."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted: set[str] = set()
    for package in PACKAGES:  # each by name: rglob does not follow the two links
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md":
                wanted.add(f"{package}/{path.relative_to(ROOT / package)}")
    for required in ("sft/py.typed", *(f"{package}/__init__.py" for package in PACKAGES)):
        if required not in wanted:
            sys.exit(f"{required} is not in the checkout; are the links sft/kernels and sft/analysis intact?")
    if packed != wanted:
        missing, extra = sorted(wanted - packed), sorted(packed - wanted)
        sys.exit(
            f"{wheel.name} and the checkout differ; missing from the wheel: {missing}, only in the wheel: {extra}. "
            "A package needs an __init__.py; a data file needs an entry in package-data."
        )
    print(f"{wheel.name}: {len(packed)} files, the same as the checkout")


def _install_and_import(wheel: Path, scratch: Path) -> None:
    """Install the wheel into an empty environment and import it without the repository on the path."""
    home = scratch / "venv"
    venv.create(home, symlinks=True)
    names = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=names))
    _run(sys.executable, "-P", "-m", "pip", "--quiet", "install", "--no-deps", "--target", site, wheel, cwd=scratch)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = Path(sysconfig.get_path("scripts", scheme="venv", vars=names)) / "python"
    (scratch / "sft").mkdir()  # a namespace package by the rules of Python
    _run(python, "-E", "-s", "-c", IMPORT_CHECK, site, *(package.replace("/", ".") for package in PACKAGES), cwd=scratch)


def _run(*command: str | Path, cwd: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    print(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else f"ran {Path(command[0]).name}")


if __name__ == "__main__":
    main()
