"""The checks of `agentspec doctor`. A check changes nothing and never raises: it returns problems as its result."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Literal

from agentspec.backends.model_store import STORE_VARIABLE, store_folder
from agentspec.backends.settings import EncoderSettings, OpenAISettings, TorchSettings
from agentspec.errors import EXTRAS, AgentSpecError, install_advice
from agentspec.reasoning.settings import IndexSettings
from agentspec.settings.load import Settings
from agentspec.version import __version__

if TYPE_CHECKING:
    from agentspec.backends.openai import DrafterInfo, ProbeReport

_ABILITIES = ("token_ids", "tokenizes", "continue_final", "logprobs")
# Distributions whose name differs from the package's by more than a dash.
_DISTRIBUTIONS = {"faiss": "faiss-cpu", "opentelemetry": "opentelemetry-exporter-otlp-proto-http"}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `state` is "note" for a defect that the settings tolerate; `advice` says what to do."""

    name: str
    state: Literal["ok", "note", "fail"]
    detail: str
    advice: str = ""


def all_checks(settings: Settings) -> Iterator[Check]:
    """Every check that applies to `settings`; quick checks come first."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Check("agentspec", "ok", __version__)
    local = {name: one for name, one in settings.backends.items() if not isinstance(one, OpenAISettings)}
    indexed = any(isinstance(knowledge, IndexSettings) for knowledge in settings.knowledge.values())
    needed = {*(["torch"] if local else []), *(["retrieval"] if indexed else [])}
    for extra in EXTRAS:
        yield check_extra(extra, needed=extra in needed)
    yield check_native()
    if isinstance(settings.cache.path, Path):
        yield check_folder("cache folder", settings.cache.path, "cache.path")
    if local:
        yield check_folder("model store", store_folder(), STORE_VARIABLE)
    for name, backend in settings.backends.items():
        if isinstance(backend, OpenAISettings):
            yield from check_servers(name, backend)
            continue
        yield check_device(name, backend)
        yield check_model(name, "model", backend.model)
        if isinstance(backend, TorchSettings) and backend.draft_model is not None and backend.max_draft_tokens:
            yield check_model(name, "draft_model", backend.draft_model)


def check_extra(extra: str, *, needed: bool) -> Check:
    """Whether the packages of an extra are installed, with their versions."""
    found, missing = [], []
    for package in EXTRAS[extra]:
        name = distribution(package)
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if not missing:
        return Check(f"[{extra}]", "ok", ", ".join(found))
    detail = f"missing {', '.join(missing)}"
    return Check(f"[{extra}]", "fail" if needed else "note", detail, install_advice(extra))


def distribution(package: str) -> str:
    """The name under which `package` is installed."""
    return _DISTRIBUTIONS.get(package, package.replace("_", "-"))


def check_native() -> Check:
    """Whether the compiled suffix index loads."""
    try:
        module = importlib.import_module("agentspec.cache._native")
    except ImportError as error:
        advice = "reinstall agentspec; in a source tree run: pip install -e ."
        return Check("native extension", "fail", str(error), advice)
    return Check("native extension", "ok", str(module.__file__))


def check_folder(name: str, folder: Path, setting: str) -> Check:
    """Whether `folder` exists or can be created, and is writable: tried, since rights alone do not say it of root."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        detail = f"{folder} cannot be written: {error.strerror}"
        return Check(name, "fail", detail, f"make it writable or set {setting}")
    return Check(name, "ok", f"{folder} is writable, {shutil.disk_usage(existing).free / 1e9:.1f} GB free")


def check_device(name: str, settings: TorchSettings | EncoderSettings) -> Check:
    """The device and the number format that the backend's model would use; an encoder's is always float32."""
    try:
        from agentspec.backends.torch.loader import choose_device, choose_dtype

        device = choose_device(settings.device)
        wanted = settings.dtype if isinstance(settings, TorchSettings) else "float32"
        dtype = str(choose_dtype(wanted, device)).removeprefix("torch.")
    except (ImportError, AgentSpecError) as error:
        setting = getattr(error, "param", None) or "device"
        return Check(
            f"{name}: device", "fail", str(error), f"correct backends.{name}.{setting}, or install torch for it"
        )
    return Check(f"{name}: device", "ok", f"{device} in {dtype} ({os.cpu_count()} CPUs)")


def check_model(name: str, setting: str, ref: str) -> Check:
    """Whether the model that `setting` of a backend names is ready, or of a kind that is fetched."""
    from agentspec.backends.model_store import locate, require_known

    label = f"{name}: {setting.replace('_', ' ')}"
    try:
        require_known(ref)
        if files := locate(ref):
            return Check(label, "ok", f"{ref} is ready in {files.folder}")
    except AgentSpecError as error:
        return Check(label, "fail", str(error), f"correct backends.{name}.{setting}")
    return Check(label, "note", f"{ref} is fetched and prepared at first use", f"agentspec model fetch {ref}")


def check_servers(name: str, settings: OpenAISettings) -> Iterator[Check]:
    """Each server of an upstream: listed, or by DNS."""
    import anyio

    from agentspec.backends.pool.fleet import discover

    if not settings.has_several_servers:
        yield from check_upstream(name, settings)
        return
    try:
        found = anyio.run(discover, settings)
    except (OSError, UnicodeError, AgentSpecError) as error:
        setting = "base_url" if settings.base_urls is None else "base_urls"
        yield Check(f"{name}: upstream", "fail", str(error), f"correct backends.{name}.{setting}")
        return
    for one in found:
        yield from check_upstream(f"{name}/{one.name}", settings.for_server(one.url), one.connect)


def check_upstream(name: str, settings: OpenAISettings, address: str | None = None) -> Iterator[Check]:
    """Whether an upstream answers, its models and abilities, and the drafter if it is a vLLM server."""
    import anyio

    from agentspec.backends.openai import OpenAIBackend

    async def probe() -> ProbeReport:
        backend = OpenAIBackend(settings, address=address)
        try:
            return await backend.probe()
        finally:
            await backend.aclose()

    label = f"{name}: upstream"
    try:
        report = anyio.run(probe)
    except AgentSpecError as error:
        setting = error.param or ("api_key_file" if settings.api_key_file else "base_url")
        yield Check(label, "fail", str(error), f"correct backends.{name.partition('/')[0]}.{setting}")
        return
    if report.error is not None:
        advice = f"correct backends.{name} and its API key" if report.reachable else "start it"
        setting = f"backends.{name.partition('/')[0]}.base_url"
        yield Check(label, "fail", report.error, f"{advice}, or correct {setting}, which usually ends in /v1")
        return
    yield Check(label, "ok", _described(report))
    if report.drafter is not None:
        yield check_drafter(name, report.drafter)


def _described(report: ProbeReport) -> str:
    abilities = [ability for ability in _ABILITIES if getattr(report, ability)]
    models = ", ".join(report.models[:5]) + (", ..." if len(report.models) > 5 else "")
    detail = f"models: {models or 'none listed'}; can do: {', '.join(abilities) or 'plain answers only'}"
    if report.other_tokenizer:
        detail += "; its /tokenize is not the model's tokenizer, so no token ids are used"
    return detail


def check_drafter(name: str, drafter: DrafterInfo) -> Check:
    """The drafter that a vLLM server uses, as far as its metrics show it."""
    label = f"{name}: drafter"
    if drafter.name == "agentspec":
        refused = "vLLM refuses min_p and logit_bias with any drafter"
        return Check(label, "ok", f"agentspec {drafter.version}, as vLLM's {drafter.method} method; {refused}")
    detail = drafter.name or "unknown: agentspec's plug-in is not loaded there, or the server publishes no metrics"
    return Check(label, "note", detail, "docs/engines.md says how to use agentspec's drafter")
