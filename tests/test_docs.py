"""The README and docs/: their Python blocks run, configurations load, commands and links exist, pages stay short."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from agentspec.cli import app
from agentspec.settings.load import load_settings

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
ALL = [*TEXTS, *PAGES, *GUIDES]

FOLDERS = ("agentspec", "cache", "backends", "reasoning", "benchmarks", "tests", "examples", "docs")

MOST_PAGES = 14
MOST_WORDS = 35_000  # of all pages but the generated settings
MOST_WORDS_OF_A_GUIDE = 600

PRINTS = {"cache.md": "[5 6 7]", "decorator.md": "plan", "how-it-works.md": "[5, 6, 7]"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run(block: str) -> str:
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_are_few_and_short() -> None:
    assert len(PAGES) <= MOST_PAGES
    texts = {
        page.name: re.sub(r"<!-- settings: begin.*end -->", "", page.read_text(), flags=re.DOTALL) for page in PAGES
    }
    assert sum(len(text.split()) for text in texts.values()) <= MOST_WORDS
    assert {
        page.name: count for page in GUIDES if (count := len(page.read_text().split())) > MOST_WORDS_OF_A_GUIDE
    } == {}


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: page.name)
def test_a_page_begins_with_what_a_reader_can_do_and_a_block(page: Path) -> None:
    before = page.read_text().partition("\n```")[0]
    assert "\n## " not in before and len(before.split()) < 120


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"https?:", link):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(link)
    assert broken == []


def test_the_map_names_files_and_functions_that_exist() -> None:
    texts = (ROOT / "docs" / "structure.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    paths = [file for name in FOLDERS for suffix in ("*.py", "*.cpp") for file in (ROOT / name).rglob(suffix)]
    files = {file for file in re.findall(r"`([\w/]+\.(?:py|cpp))`", texts) if not file.endswith("yours.py")}
    assert {file for file in files if not any(str(path).endswith(f"/{file}") for path in paths)} == set()
    words = {word for path in paths if "tests" not in path.parts for word in re.findall(r"\w+", path.read_text())}
    names = re.findall(r"`([A-Za-z_]+)\.(\w+)`", re.sub(r"`\S+\.(?:py|pyi|cpp|md|lock|toml)`", "", texts))
    assert {word for name in names for word in name} - words == set()


def test_pages_that_are_named_exist() -> None:
    folders = [
        ROOT / name for name in ("agentspec", "cache", "backends", "reasoning", "benchmarks", "tests", "examples")
    ]
    files = [*ALL, *(file for folder in folders for suffix in ("*.py", "*.toml") for file in folder.rglob(suffix))]
    named = {(str(file), name) for file in files for name in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text())}
    assert {(file, name) for file, name in named if not (ROOT / name).exists()} == set()


ALONE = [
    (page, block)
    for page in ALL
    for block in blocks(page, "python")
    if re.search(r"FakeBackend|SuffixCache.open\(\)", block)
]


@pytest.mark.parametrize(("page", "block"), ALONE, ids=[page.name for page, _ in ALONE])
def test_a_python_block_that_needs_no_model_runs(page: Path, block: str) -> None:
    assert PRINTS.get(page.name, "") in run(block)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_python_blocks_are_python_and_import_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        tree = compile(block, page.name, "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentspec"):
                assert {name.name for name in node.names} <= words_of(node.module or "")


def words_of(module: str) -> set[str]:
    """All words of a module's text, found without importing what is in it, such as torch."""
    path = ROOT.joinpath("agentspec", *module.split(".")[1:])
    files = [path / "__init__.py", path / "__init__.pyi", path.with_suffix(".py")]
    return {word for file in files if file.exists() for word in re.findall(r"\w+", file.read_text())}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_configurations_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each block by itself; a model's backends, bases and knowledge may stand in another block."""
    for number, block in enumerate(
        [*blocks(page, "toml"), *re.findall(r"<<'TOML'\n(.*?)\nTOML", page.read_text(), re.DOTALL)]
    ):
        if "model_providers" not in block:  # Codex's
            file = tmp_path / f"{number}.toml"
            file.write_text(completed(block))
            load_settings(file)


def completed(block: str) -> str:
    """The block with the tables that it names and does not hold."""
    held: dict[str, Any] = tomllib.loads(block)
    backends, missing = held.get("backends", {}), ""
    for model in held.get("models", {}).values():
        named = [model.get(key) for key in ("backend", "base", "small")] + model.get("backends", [])
        for name in filter(None, named):
            if name not in backends and name not in held["models"] and f"[backends.{name}]" not in missing:
                missing += f'\n[backends.{name}]\nkind = "torch"\n'
        if (name := model.get("knowledge")) and name not in held.get("knowledge", {}):
            missing += f'\n[knowledge.{name}]\nkind = "index"\npath = "kb"\n'
    for name in held.get("model_aliases", {}).values():
        missing += (
            f'\n[backends.{name}]\nkind = "torch"\nmodel = "{name}"\n' if f"[backends.{name}]" not in missing else ""
        )
    return block + missing


def test_commands_and_their_options_exist() -> None:
    group = typer.main.get_command(app)
    written = "\n".join(text for page in ALL for text in blocks(page, "(?:console|sh)") if isinstance(text, str))
    unknown = []
    for line in re.findall(r"^(?:\$ )?(?:.*\$\()?agentspec ([a-z].*)", written, flags=re.MULTILINE):
        words = shlex.split(re.split(r"\s#|\)\"|&&|>", line)[0], posix=True)
        command: Any = group
        while words and hasattr(command, "commands") and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown += [line for word in words if word.startswith("--") and word.split("=")[0] not in known | {"--help"}]
        unknown += [line] if hasattr(command, "commands") and words != ["--help"] else []
    assert unknown == []


def test_the_readme_has_a_block_for_each_door_in_python() -> None:
    assert len(blocks(ROOT / "README.md", "python")) == 2


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_blocks_answer_on_the_model(page: str) -> None:
    for block in blocks(ROOT / page, "python"):
        assert ("plan" if "@agentspec.step" in block else "") in run(block).strip()
