"""Check a release before it is published: sdist, wheel, metadata, README, and an installation of each extra in a clean environment.

Run by ``make release-check``. It builds the sdist and from it the wheel, and checks properties that no test in a checkout can:

- the sdist has no links, no absolute names and none with ``..``, and has the license and the README;
- sdist and wheel state the version and the extras of the checkout, and no requirement with a URL, which the index refuses;
- the README renders on the package index (``twine check --strict``, if twine is installed);
- the wheel installs into an empty environment with its own requirements alone, passes ``pip check`` and a step in strips;
- so does each extra, in an environment of its own that shares nothing but the requirements of the wheel.

An extra whose requirements cannot be downloaded here is reported as not checked; ``--strict`` makes that a failure.
"""

from __future__ import annotations

import argparse
import email
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Literal

__all__ = ["Outcome", "main", "metadata_problems", "readme_problems", "sdist_problems"]

_ROOT = Path(__file__).resolve().parents[2]
#: Extras of developers: `make setup`, `make docs` and `make test-zoo` install them.
_DEVELOPERS = ("test", "docs", "release", "zoo", "frameworks", "demo", "peers")
_RETRIES = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check.

    Attributes:
        name: the check.
        status: ``"ok"``, ``"failed"``, or ``"not checked"`` if this machine lacks the means.
        detail: reason, or the checked items.
    """

    name: str
    status: Literal["ok", "failed", "not checked"]
    detail: str = ""


def sdist_problems(archive: tarfile.TarFile) -> list[str]:
    """Members that a release must not have, and files that it lacks."""
    problems, names = [], set()
    for member in archive.getmembers():
        path = PurePosixPath(member.name)
        names.add("/".join(path.parts[1:]))
        if not (member.isfile() or member.isdir()):
            problems.append(f"{member.name} is a link or a device; package files in place of links")
        if path.is_absolute() or ".." in path.parts:
            problems.append(f"{member.name} leads out of the archive")
    required = ("PKG-INFO", "LICENSE", "README.md", "pyproject.toml", "src/sft/__init__.py", "src/sft/analysis/__init__.py")
    return problems + [f"{name} is missing" for name in required if name not in names]


def metadata_problems(metadata: Message, project: dict[str, object], version: str) -> list[str]:
    """Fields that differ from ``pyproject.toml``, and requirements that the package index refuses."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    expected = {"Name": project["name"], "Version": version, "Requires-Python": project["requires-python"]}
    problems = [f"{name} is {metadata[name]!r}, expected {value!r}" for name, value in expected.items() if metadata[name] != value]
    missing = sorted(set(extras) - set(metadata.get_all("Provides-Extra", [])))
    problems += [f"the extra {name} is missing" for name in missing]
    problems += [f"the requirement {text!r} has a URL" for text in metadata.get_all("Requires-Dist", []) if re.search(r"\s@\s", text)]
    if metadata["Description-Content-Type"] != "text/markdown" or not metadata.get_payload():
        problems.append("the description is not a Markdown text; set readme in pyproject.toml")
    return problems


def readme_problems(text: str, root: Path) -> list[str]:
    """Relative links of the README without a file in the repository."""
    return [f"README.md links to {target}, which does not exist" for target in _relative_links(text) if not (root / target).exists()]


def _relative_links(text: str) -> list[str]:
    targets = re.findall(r"\]\(([^)\s#]+)", text) + re.findall(r'(?:src|srcset|href)="([^"#]+)"', text)
    return [target for target in targets if ":" not in target]


def _outcome(name: str, problems: Sequence[str], detail: str) -> Outcome:
    return Outcome(name=name, status="failed" if problems else "ok", detail="; ".join(problems) or detail)


def _run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, text=True, capture_output=True, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr.strip() or done.stdout.strip()).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]


def _check_archives(dist: Path) -> list[Outcome]:
    """Checks of the sdist and the wheel as files."""
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    match = re.search(r'__version__ = "([^"]+)"', (_ROOT / "sft" / "__init__.py").read_text(encoding="utf-8"))
    version = match[1] if match else ""
    with tarfile.open(sdist) as archive:
        problems = sdist_problems(archive)
        count = len(archive.getmembers())
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(packed.read(name))
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    num_links = len(_relative_links(readme))
    return [
        _outcome("sdist", problems, f"{count} members, no links"),
        _outcome("metadata", metadata_problems(metadata, project, version), f"{metadata['Name']} {version}"),
        _outcome(
            "README links", readme_problems(readme, _ROOT), f"{num_links} relative links lead to files; the index does not follow them"
        ),
        _check_rendering(dist),
    ]


def _check_rendering(dist: Path) -> Outcome:
    """Check that the package index can render the README."""
    name = "README on the index"
    if importlib.util.find_spec("twine") is None:
        return Outcome(name=name, status="not checked", detail="twine is missing: pip install twine 'readme-renderer[md]'")
    done = _run(sys.executable, "-P", "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)
    return Outcome(name=name, status="failed" if done.returncode else "ok", detail=" ".join((done.stdout + done.stderr).split())[-300:])


def _environment(home: Path, shared: Path | None = None) -> tuple[Path, Path]:
    """Create an environment; returns its interpreter and its site-packages. The packages of ``shared`` count as installed."""
    venv.create(home, symlinks=True)
    names = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=names))
    if shared is not None:
        (site / "shared.pth").write_text(f"{shared}\n", encoding="utf-8")
    return Path(sysconfig.get_path("scripts", scheme="venv", vars=names)) / "python", site


def _install(python: Path, requirement: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    pip = (sys.executable, "-P", "-m", "pip", "--python", python, "--disable-pip-version-check")
    return _run(*pip, "install", "--quiet", "--retries", _RETRIES, "-c", _ROOT / "constraints.txt", requirement, cwd=cwd)


def _check_installations(wheel: Path, extras: Sequence[str], scratch: Path, report: Callable[[Outcome], None]) -> None:
    """Install the wheel alone, then with each extra."""
    python, site = _environment(scratch / "base")
    done = _install(python, str(wheel), scratch)
    if done.returncode:
        report(Outcome(name="install", status="not checked", detail=_last_line(done)))
        return
    doctor = _run(python, "-m", "sft", "doctor", "--json", cwd=scratch)
    report(_outcome("install", [_last_line(doctor)] if doctor.returncode else [], "a step in strips is exact"))
    for extra in extras:
        python, _ = _environment(scratch / f"extra-{extra}", shared=site)
        done = _install(python, f"{wheel}[{extra}]", scratch)
        if done.returncode:
            report(Outcome(name=f"install [{extra}]", status="not checked", detail=_last_line(done)))
            continue
        pip = (sys.executable, "-P", "-m", "pip", "--python", python, "--disable-pip-version-check")
        checked = _run(*pip, "check", cwd=scratch)
        imported = _run(python, "-P", "-c", _IMPORT_REQUIREMENTS, extra, cwd=scratch)
        problems = [_last_line(step) for step in (checked, imported) if step.returncode]
        report(_outcome(f"install [{extra}]", problems, imported.stdout.strip()))


#: Imports one module of each requirement of an extra.
_IMPORT_REQUIREMENTS = """
import importlib, importlib.metadata, re, sys
marker = f'extra == "{sys.argv[1]}"'
wanted = {re.match(r"[\\w.-]+", line)[0].lower().replace("_", "-") for line in importlib.metadata.requires("sft-engine") if marker in line}
count = 0
for module, names in sorted(importlib.metadata.packages_distributions().items()):
    if module.isidentifier() and not module.startswith("_") and wanted & {name.lower().replace("_", "-") for name in names}:
        importlib.import_module(module)
        count += 1
print(f"{len(wanted)} requirements, {count} modules imported")
"""


def main() -> int:
    """Run all checks; returns 1 if one fails, or with ``--strict`` if one could not be made."""
    parser = argparse.ArgumentParser(description="Check a release before it is published.")
    parser.add_argument("--extras", nargs="*", metavar="NAME", help="extras to install (default: all but those of developers)")
    parser.add_argument("--strict", action="store_true", help="fail where a check cannot be made on this machine")
    args = parser.parse_args()
    outcomes: list[Outcome] = []

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(f"{outcome.status:<12} {outcome.name:<22} {outcome.detail}", flush=True)

    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = args.extras if args.extras is not None else [name for name in project["optional-dependencies"] if name not in _DEVELOPERS]
    if unknown := sorted(set(extras) - set(project["optional-dependencies"])):
        parser.error(f"no such extra: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="sft-release-") as folder:
        scratch = Path(folder)
        done = _run(sys.executable, "-P", "-m", "build", "--outdir", scratch / "dist", _ROOT, cwd=scratch)
        if done.returncode:
            report(Outcome(name="build", status="failed", detail=_last_line(done)))
            return 1
        for outcome in _check_archives(scratch / "dist"):
            report(outcome)
        (wheel,) = (scratch / "dist").glob("*.whl")
        _check_installations(wheel, extras, scratch, report)
    bad = {"failed", "not checked"} if args.strict else {"failed"}
    return int(any(outcome.status in bad for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
