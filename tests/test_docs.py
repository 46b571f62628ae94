"""The README and docs/: their Python blocks run, configurations load, commands and links exist, pages stay short."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import reduce
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from agentspec.cli import app
from agentspec.settings.load import load_settings
from agentspec.testing import FakeBackend
from tests.proxy.conftest import shared_gateway

__all__ = ["shared_gateway"]

ROOT = Path(__file__).parents[1]
TEXTS = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
ALL = [*TEXTS, *PAGES, *GUIDES]

FOLDERS = ("agentspec", "cache", "backends", "reasoning", "benchmarks", "tests", "examples", "docs")

MOST_PAGES = 15  # of which errors.md is generated
MOST_WORDS = 29_000  # of all pages but the generated settings
MOST_WORDS_OF_A_GUIDE = 600

PRINTS = {"README.md": "plan", "cache.md": "[5 6 7]", "decorator.md": "plan", "how-it-works.md": "[5, 6, 7]"}

GRAPH = """
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.checkpoint.memory import InMemorySaver as saver
builder = StateGraph(MessagesState).add_node("say", lambda state: state).add_edge(START, "say")
saver = saver()
"""
AGENT = """
from agentspec import ChatAgentSpec, Runtime
from agentspec.langchain import AgentSpecMiddleware
from agentspec.testing import FakeBackend
from langchain.agents import create_agent
from langchain_core.tools import tool
model = ChatAgentSpec(model="fake", runtime=Runtime(backends={"fake": FakeBackend()}))
@tool
def get_order(id: str) -> str: "An order."
@tool
def search_flights(to: str) -> str: "Flights."
tools = [get_order, search_flights]
"""
RETRIEVER = """
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.retrievers import BaseRetriever
class Mine(BaseRetriever):
    def _get_relevant_documents(self, query, **options): return [Document("a passage")]
mine = Mine()
async def write(documents): return "an answer"
"""
ASSUMED = {
    "cache.md": [
        "",
        "prompt_tokens, committed_tokens = [1, 2, 3], [4, 5]",
        "from types import SimpleNamespace; cache = SuffixCache.open(); tokenizer = SimpleNamespace(decode=str)",
    ],
    "engines.md": ["import openai; client = openai.OpenAI(base_url=URL, api_key='none'); old_text = 'a = 1'"],
    "langgraph.md": ["", GRAPH, AGENT, AGENT, AGENT],
    "retrieval.md": [RETRIEVER],
}
"""What the blocks of a page, one after another, take for granted."""

RUNNER = """
import ast, asyncio, contextlib, io, json, sys
pages, printed = json.load(sys.stdin), {}
for page, blocks in pages.items():
    names = {"__name__": page}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block in blocks:
            running = eval(compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if running is not None:
                asyncio.run(running)
    printed[page] = out.getvalue()
print(json.dumps(printed))
"""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


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


@pytest.fixture(scope="module")
def served(shared_gateway: Any) -> str:
    """The address of a gateway with the models of the documentation."""
    return str(shared_gateway({name: FakeBackend("Paris") for name in ("smollm2-135m", "qwq-fast")}).url)


def pasted(page: Path, served: str, model: Path) -> list[str]:
    """The Python blocks of a page, each after what it assumes, with that gateway and that model."""
    written = [block for block in blocks(page, "python") if "pydantic_ai" not in block or find_spec("pydantic_ai")]
    texts = chain(*zip_longest(ASSUMED.get(page.name, []), written, fillvalue=""))
    replaced = {
        "http://127.0.0.1:8700": served,
        "=URL": f"={served + '/v1'!r}",
        "model=..., messages=[...]": "model='smollm2-135m', messages=[{'role': 'user', 'content': 'hi'}], max_tokens=4",
        'TorchSettings(model="smollm2-135m")': f"TorchSettings(model={str(model)!r})",
    }
    return [reduce(lambda text, old: text.replace(old, replaced[old]), replaced, text) for text in texts]


def test_python_blocks_run(served: str, tiny_model: Path, tmp_path: Path) -> None:
    """As a user would paste them one after another; a tiny model has the name of the built-in one."""
    (tmp_path / "agentspec.toml").write_text(
        f'[backends.tiny]\nkind = "torch"\nmodel = "{tiny_model}"\ndevice = "cpu"\n'
        '[models."smollm2-135m"]\nbackend = "tiny"\n'
    )
    pages = {page.name: pasted(page, served, tiny_model) for page in ALL}
    own = {"HOME": str(tmp_path), "AGENTSPEC_CONFIG": "agentspec.toml", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", RUNNER], input=json.dumps(pages), env={**os.environ, **own}, **options)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert {page for page, text in PRINTS.items() if text not in printed[page]} == set()


def test_requests_by_curl_are_answered(served: str) -> None:
    written = "\n$\n".join(text for page in ALL for text in blocks(page, "(?:console|sh)"))
    requests = set(re.findall(r"^(?:\$ )?(curl [^$]*?'\{.*?\}')$", written, flags=re.MULTILINE | re.DOTALL))
    assert len(requests) == 4
    for request in requests:
        command = request.replace("http://127.0.0.1:8700", served).replace("curl ", "curl --fail-with-body -s ", 1)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Paris" in done.stdout


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
        words = words[: words.index("--")] if "--" in words else words
        unknown += [line for word in words if word.startswith("--") and word.split("=")[0] not in known | {"--help"}]
        unknown += [line] if hasattr(command, "commands") and words != ["--help"] else []
    assert unknown == []


def test_the_readme_has_a_block_for_each_door_in_python() -> None:
    assert len(blocks(ROOT / "README.md", "python")) == 2
