"""What examples/deploy mounts, probes and connects is what agentspec reads, answers and listens on."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import pytest
import yaml

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import Settings, load_settings
from agentspec.telemetry.metrics import Metrics
from agentspec.telemetry.scrape import ENGINE, INDEX, MEMBER, SPEC_DECODE, TENANT
from agentspec.testing import FakeBackend
from tests.proxy.conftest import gateway, wait_for

__all__ = ["gateway"]

ENVIRONMENT = Path(os.environ.get("AGENTSPEC_DEPLOY_ENV") or Path(__file__).parents[1] / ".venv-deploy")
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def deploy(repository: Path) -> Path:
    return repository / "examples" / "deploy"


@pytest.fixture(scope="module")
def manifests(deploy: Path) -> list[Manifest]:
    return list(yaml.safe_load_all((deploy / "kubernetes.yaml").read_text()))


@pytest.fixture(scope="module")
def compose(deploy: Path) -> Manifest:
    return dict(yaml.safe_load((deploy / "compose.yaml").read_text()))


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == f"agentspec-{name}"]
    return found


def pod(manifests: list[Manifest], kind: str, name: str) -> tuple[Manifest, Manifest]:
    """A pod's specification, and that of its one container."""
    spec = named(manifests, kind, name)["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


def configured(text: str, folder: Path) -> Settings:
    """What the gateway makes of a configuration file."""
    file = folder / "agentspec.toml"
    file.write_text(text)
    return load_settings(file)


def secret_files(settings: Settings) -> list[str]:
    server, cache = settings.server, settings.cache
    files = [server.secret_file, cache.password_file, *(key.key_file for key in server.api_keys)]
    return [str(file) for file in files if file is not None]


def test_the_chart_mounts_a_configuration_whose_engines_are_the_headless_service(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    settings = configured(named(manifests, "ConfigMap", "gateway")["data"]["agentspec.toml"], tmp_path)
    engines = settings.backends["vllm"]
    service = named(manifests, "Service", "vllm")
    assert isinstance(engines, OpenAISettings) and engines.resolve == "a" and service["spec"]["clusterIP"] == "None"
    [port] = service["spec"]["ports"]
    assert str(engines.base_url) == f"http://agentspec-vllm.agentspec.svc:{port['port']}/v1"
    _, vllm = pod(manifests, "StatefulSet", "vllm")
    assert vllm["args"][0] == settings.models["qwen"].upstream_model and f"--port={port['port']}" in vllm["args"]
    assert named(manifests, "StatefulSet", "vllm")["spec"]["serviceName"] == service["metadata"]["name"]


def test_every_file_that_the_configuration_names_is_an_entry_of_the_mounted_secret(
    manifests: list[Manifest], deploy: Path, tmp_path: Path
) -> None:
    settings = configured(named(manifests, "ConfigMap", "gateway")["data"]["agentspec.toml"], tmp_path)
    keys = yaml.safe_load((deploy / "chart" / "values.yaml").read_text())["keys"]
    entries = {*keys["tenants"], keys["operator"], keys["salt"], keys["postgresPassword"]}
    spec, gateway = pod(manifests, "Deployment", "gateway")
    mounts = {mount["name"]: mount["mountPath"] for mount in gateway["volumeMounts"]}
    assert {file.removeprefix(mounts["keys"] + "/") for file in secret_files(settings)} == entries
    assert {"name": "keys", "secret": {"secretName": keys["secret"], "defaultMode": 0o440}} in spec["volumes"]
    made = (deploy / "chart" / "values.yaml").read_text()
    assert all(f"--from-literal={entry}=" in made for entry in entries)


def test_probes_ask_what_the_gateway_answers_and_pods_outlive_their_drain(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    settings = configured(named(manifests, "ConfigMap", "gateway")["data"]["agentspec.toml"], tmp_path)
    spec, gateway = pod(manifests, "Deployment", "gateway")
    [port] = gateway["ports"]
    assert (port["name"], port["containerPort"]) == ("http", settings.server.port)
    paths = {kind: gateway[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {kind: one["path"] for kind, one in paths.items()} == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    before = float(gateway["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > before + settings.server.drain_timeout
    stop = pod(manifests, "StatefulSet", "vllm")[1]["lifecycle"]["preStop"]["exec"]["command"][-1]
    [pause] = re.findall(r"^sleep (\d+)", stop)
    assert float(pause) > 5  # seconds: gateways have looked again before anything ends


def test_every_selector_finds_its_pods_and_every_port_by_name_is_there(manifests: list[Manifest]) -> None:
    pods = [one["spec"]["template"] for one in manifests if one["kind"] in ("Deployment", "StatefulSet")]

    def chosen(labels: dict[str, str]) -> list[Manifest]:
        return [one for one in pods if labels.items() <= one["metadata"]["labels"].items()]

    for one in manifests:
        spec = one.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if one["kind"] == "ConfigMap":
            continue
        assert len(chosen(selector.get("matchLabels", selector))) == 1, one["metadata"]
        for rule in spec.get("ingress", ()):
            assert all(len(chosen(peer["podSelector"]["matchLabels"])) == 1 for peer in rule.get("from", ()))
        if one["kind"] == "Service":
            ports = {port["name"] for port in chosen(selector)[0]["spec"]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= ports


def test_compose_mounts_what_its_configuration_names(compose: Manifest, deploy: Path, tmp_path: Path) -> None:
    settings = configured((deploy / "agentspec.toml").read_text(), tmp_path)
    services = compose["services"]
    gateway = services["gateway"]
    assert {f"/run/secrets/{name}" for name in gateway["secrets"]} == set(secret_files(settings))
    assert set(compose["secrets"]) == set(gateway["secrets"])
    engines = settings.backends["vllm"]
    assert isinstance(engines, OpenAISettings) and engines.base_url is not None
    assert (
        engines.base_url.host in services and services["vllm"]["command"][0] == settings.models["qwen"].upstream_model
    )
    assert str(settings.cache.path).startswith("postgresql://agentspec@postgres:5432/gateway")
    assert "CREATE DATABASE gateway" in compose["configs"]["databases"]["content"]
    assert float(gateway["stop_grace_period"].rstrip("s")) > settings.server.drain_timeout
    assert gateway["ports"] == [f"127.0.0.1:{settings.server.port}:{settings.server.port}"]


def test_what_the_images_are_built_from_is_there(compose: Manifest, deploy: Path, repository: Path) -> None:
    for name in ("gateway", "vllm"):
        build = compose["services"][name]["build"]
        assert (deploy / build["context"]).resolve() == repository.resolve()
        text = (repository / build["dockerfile"]).read_text()
        extras = re.findall(r"\[([a-z,]+)\]'", text)
        project = (repository / "pyproject.toml").read_text()
        assert extras and all(f"\n{extra} = [" in project for extra in extras[0].split(","))
    assert "examples/deploy/secrets" in (repository / ".dockerignore").read_text()  # or an image would hold the keys


@pytest.mark.long
@pytest.mark.skipif(not ENVIRONMENT.exists(), reason="no Helm: run .ci/deploy-env, or set AGENTSPEC_DEPLOY_ENV")
def test_the_chart_renders_to_what_schemas_allow(repository: Path) -> None:
    environment = os.environ | {"AGENTSPEC_DEPLOY_ENV": str(ENVIRONMENT)}
    done = subprocess.run(
        [repository / ".ci" / "deploy-check"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "default: 13 objects" in done.stdout and "dashboard.json: 25 panels" in done.stdout


@pytest.fixture(scope="module")
def queries(deploy: Path) -> list[str]:
    """The queries of the dashboard and the alerts."""
    monitoring = deploy / "monitoring"
    panels = [one for one in json.loads((monitoring / "dashboard.json").read_text())["panels"] if one["type"] != "row"]
    rules = yaml.safe_load((monitoring / "alerts.yaml").read_text())["groups"][0]["rules"]
    written = [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]
    return [one.replace("$__rate_interval", "5m").replace("$model", ".*") for one in written]


def test_boards_alerts_and_the_page_name_the_series_that_the_gateway_exports(queries: list[str], deploy: Path) -> None:

    metrics = Metrics(version="1")
    metrics.connections(lambda: 0)
    kinds = re.findall(r"^# TYPE (\S+) (\w+)", metrics.render().decode(), re.MULTILINE)
    families: list[Any] = [*ENGINE, *INDEX, *MEMBER, *SPEC_DECODE, *TENANT]
    computed = {one.name + ("" if one.falls else "_total") for one in families}
    exported = {name for name, _ in kinds if name.startswith("agentspec_")} | computed
    named = set(re.findall(r"(?:agentspec_|vllm:)\w+", " ".join(queries)))
    assert {name.removesuffix("_bucket") for name in named} <= exported
    page = (deploy.parents[1] / "docs" / "operations.md").read_text()
    table = "".join(line for line in page.splitlines() if line.startswith(("| `agentspec_", "| `vllm:")))
    assert set(re.findall(r"`((?:agentspec_|vllm:)\w+)`", table)) == exported


@pytest.mark.long
@pytest.mark.skipif(not (which("prometheus") and which("promtool")), reason="needs Debian's package prometheus")
def test_prometheus_scrapes_the_gateway_and_answers_every_query(
    gateway: Any, queries: list[str], deploy: Path, tmp_path: Path, free_tcp_port: int
) -> None:
    running = gateway({"m": FakeBackend("an answer")})
    url = f"{running.url}/v1/chat/completions"
    assert httpx.post(url, json={"model": "m", "messages": [{"role": "user", "content": "hi"}]}).status_code == 200
    text = httpx.get(f"{running.url}/metrics").text
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert [line for line in (found.stdout + found.stderr).splitlines() if not line.startswith("vllm:")] == []
    for name in ("alerts.yaml", "prometheus.yaml"):
        written = (deploy / "monitoring" / name).read_text()
        (tmp_path / name).write_text(written.replace("127.0.0.1:8700", running.url[7:]).replace(": 15s", ": 1s"))
    files = ["--config.file=prometheus.yaml", f"--storage.tsdb.path={tmp_path / 'data'}"]
    command = ["prometheus", *files, f"--web.listen-address=127.0.0.1:{free_tcp_port}", "--log.level=error"]
    with subprocess.Popen(command, cwd=tmp_path) as prometheus:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{free_tcp_port}/api/v1") as client:
                wait_for(lambda: _result(client, 'up{job="agentspec"} == 1'))
                assert _result(client, 'agentspec_requests_total{model="m"}')
                for query in queries:
                    _result(client, query)
                rules = client.get("/rules").json()["data"]["groups"][0]["rules"]
                assert len(rules) == 12 and {rule["health"] for rule in rules} <= {"ok", "unknown"}
        finally:
            prometheus.terminate()


def _result(client: httpx.Client, query: str) -> Any:
    try:
        answer = client.get("/query", params={"query": query})
    except httpx.TransportError:
        return None
    assert answer.status_code in (200, 503), (query, answer.text)  # 503 while it starts
    return answer.status_code == 200 and answer.json()["data"]["result"]
