"""Hooks of the documentation site: pages and links outside of ``docs/``.

Pages link to results and examples of the repository, as they must when read there. The site gets these Markdown files as pages of its own,
with their pictures. A link to any other file becomes the file's path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"
#: Markdown files of the repository that are pages of the site: path in the repository, and on the site.
_FOREIGN = {
    **{str(path.relative_to(_ROOT)): f"results/{path.name}" for path in sorted((_ROOT / "benchmarks" / "results").glob("*.md"))},
    **{str(path.relative_to(_ROOT)): str(path.relative_to(_ROOT)) for path in sorted((_ROOT / "examples").glob("*/README.md"))},
    "benchmarks/README.md": "results/README.md",
    "kernels/README.md": "kernels/README.md",
    "SECURITY.md": "SECURITY.md",
}
_LINK = re.compile(r"(?P<head>!?\[(?P<text>[^\]]*)\]\()(?P<target>[^)\s]+)\)")
_PICTURE = re.compile(r'<picture>.*?<img alt="(?P<text>[^"]*)" src="(?P<light>[^"]+)">.*?</picture>', re.DOTALL)
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the Markdown files of the repository, and the pictures that they show."""
    for source, page in _FOREIGN.items():
        files.append(File.generated(config, page, content=(_ROOT / source).read_text(encoding="utf-8")))
        folder = (_ROOT / source).parent
        for match in _LINK.finditer((_ROOT / source).read_text(encoding="utf-8")):
            picture = folder / match["target"]
            if match["head"].startswith("!") and picture.is_file():
                target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match["target"]))
                files.append(File.generated(config, target, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site, and put the repository's README before the list of documentation."""
    uri = page.file.src_uri
    sources = {site: source for source, site in _FOREIGN.items()}
    text = _with_site_links(markdown, sources.get(uri, f"docs/{uri}"), uri)
    if uri != "README.md":
        return text
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    readme = _PICTURE.sub(lambda match: _themed(match["text"], match["light"].removeprefix("docs/")), readme)
    return f"{_with_site_links(readme, 'README.md', uri)}\n\n{text.replace('# Documentation', '## All documentation', 1)}"


def _themed(text: str, light: str) -> str:
    """A picture for each colour scheme of the site."""
    schemes = {"only-light": light, "only-dark": light.replace("-light.", "-dark.")}
    return "\n".join(f"![{text}]({target}#{scheme})" for scheme, target in schemes.items())


def _with_site_links(markdown: str, source: str, uri: str) -> str:
    """A text with links to pages of the site; links to other files of the repository become their paths.

    Args:
        markdown: the text.
        source: path of its file in the repository.
        uri: its page.
    """

    def replace(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if (_ROOT / path).is_dir() and f"{path}/README.md" in _FOREIGN:
            path += "/README.md"
        site = _FOREIGN.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        is_picture = match["head"].startswith("!")
        if is_picture and (source in _FOREIGN or anchor):
            return match[0]
        if is_picture and path.startswith("benchmarks/results/"):
            site = f"results/{posixpath.basename(path)}"
        if is_picture and "-light." in target:
            return _themed(match["text"], target)
        if site is None or (_ROOT / path).is_dir():
            return f"{match['text']} (`{path}`)" if match["text"].strip("`") != path else f"`{path}`"
        relative = posixpath.relpath(site, posixpath.dirname(uri) or ".")
        return f"{match['head']}{relative}{'#' + anchor if anchor else ''})"

    pieces = _FENCE.split(markdown)
    return "".join(piece if piece.startswith("```") else _LINK.sub(replace, piece) for piece in pieces)
