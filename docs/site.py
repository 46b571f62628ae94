"""Writes the pages of the site into build/site/pages: those of docs/ and of the root, as they are but for links to
other files of the repository, and pages that only name what has the docstrings they show. `make site` builds it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "site" / "pages"
MOVED = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
MODULES = {
    "langchain": "agentspec.langchain",
    "cache": "agentspec.cache",
    "tools": "agentspec.tools",
    "testing": "agentspec.testing",
}
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def place(source: Path) -> Path:
    """Where a file of the repository stands in the site."""
    path = source.relative_to(ROOT)
    if str(path) in MOVED:
        return Path(MOVED[str(path)])
    return path.relative_to("docs") if path.parts[0] == "docs" else Path("files") / path


def page(source: Path) -> str:
    """The page with its links as they lead in the site. Files that are linked are copied; folders are only named."""
    here = place(source).parent

    def moved(link: re.Match[str]) -> str:
        text, (name, _, anchor) = link[1], link[2].partition("#")
        if not name or re.match(r"\w+:", name):
            return link[0]
        target = (source.parent / name).resolve()
        if target.is_dir():
            return text.strip("![]")
        to = place(target)
        if to.parts[0] == "files":
            (PAGES / to).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, PAGES / to)
        up = Path(*[".."] * len(here.parts)) / to
        return f"{text}({up.as_posix()}{'#' if anchor else ''}{anchor})"

    return LINK.sub(moved, source.read_text())


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    docs = ROOT / "docs"
    for source in [*docs.rglob("*.md"), *(ROOT / name for name in MOVED)]:
        target = PAGES / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(source))
    for picture in [*docs.glob("*.svg"), *docs.glob("*.webp")]:
        shutil.copy(picture, PAGES)
    shutil.copy(docs / "zensical.toml", PAGES.parent)
    (PAGES / "reference").mkdir()
    for name, module in MODULES.items():
        (PAGES / "reference" / f"{name}.md").write_text(f"# {module}\n\n::: {module}\n")
    (PAGES / "reference" / "agentspec.md").write_text("\n\n".join(["# agentspec", *exported()]) + "\n")


def exported() -> list[str]:
    """The names that `agentspec` exports, but for errors, which have a page."""
    stub = (ROOT / "agentspec" / "__init__.pyi").read_text()
    names = re.findall(r"^from \.([\w.]+) import (?:\(\s+)?(\w+) as", stub, re.MULTILINE)
    return [f"::: agentspec.{module}.{name}" for module, name in names if module != "errors"]


if __name__ == "__main__":
    main()
