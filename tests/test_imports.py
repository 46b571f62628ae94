from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

import agentspec
from agentspec import errors
from agentspec.errors import EXTRAS, extra_of, install_advice, needs_extra

NAMES = {
    "faiss": "faiss-cpu",
    "opentelemetry": "opentelemetry-exporter-otlp-proto-http",
}  # of distributions that differ by more than a dash
HEAVY = {"torch", "transformers", "numpy", "httpx", "pydantic", "sqlalchemy", "starlette", "langchain_core", "typer"}


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_importing_the_package_imports_nothing_heavy():
    loaded = modules_after("import agentspec")
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("agentspec")} == {"agentspec"}


def test_nothing_is_traced_unless_the_process_traces():
    loaded = modules_after("import agentspec.proxy.serving as one, agentspec.client; one.tracing.configure()")
    assert "agentspec.telemetry.tracing" in loaded and not any(name.startswith("opentelemetry") for name in loaded)


@pytest.mark.parametrize("code", ["import agentspec.types", "import agentspec.errors", "from agentspec import step"])
def test_light_parts_stay_light(code):
    assert not modules_after(code) & HEAVY


def test_the_help_of_the_program_loads_no_model_library():
    loaded = modules_after("import agentspec.cli")
    assert not loaded & {"torch", "transformers", "numpy", "sqlalchemy", "starlette", "langchain_core"}


def test_every_exported_name_resolves():
    missing = [name for name in agentspec.__all__ if getattr(agentspec, name, None) is None]
    assert missing == []
    assert set(agentspec.__all__) <= set(dir(agentspec))


def test_every_error_is_exported():
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.AgentSpecError)
    }
    assert tree <= set(agentspec.__all__)


def test_step_is_the_decorator_whatever_is_imported_first():
    program = "import agentspec.step.decorator\nfrom agentspec import step\nprint(type(step).__name__)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "function"


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        ("langchain_core", "from agentspec import ChatAgentSpec", "langgraph"),
        pytest.param(
            *("langchain", "from agentspec.langchain import AgentSpecMiddleware", "langgraph"), marks=pytest.mark.slow
        ),
        ("starlette", "from agentspec.proxy import create_app", "proxy"),
    ],
)
def test_an_import_without_its_extra_says_what_to_install(missing, code, extra):
    program = f"import sys\nsys.modules[{missing!r}] = None\n{code}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError") and last.endswith(f"; {install_advice(extra)}")


@pytest.mark.parametrize("missing", ["agentspec.proxy.lost", "dependency_of_starlette", "torch.nn", None])
def test_what_no_extra_mends_is_reported_as_it_is(missing):
    lost = ModuleNotFoundError("lost", name=missing)
    with pytest.raises(ModuleNotFoundError) as raised, needs_extra("proxy"):
        raise lost
    assert raised.value is lost


def test_the_packages_of_an_extra_are_those_that_it_installs(repository):
    declared = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        required = {re.match(r"[\w-]+", one)[0] for one in declared[extra]} - {"agentspec-inference"}
        assert {NAMES.get(package, package.replace("_", "-")) for package in packages} == required
    assert (
        extra_of("torch.nn") == "torch" and extra_of("jinja2") == "proxy" and extra_of("json") is extra_of(None) is None
    )
