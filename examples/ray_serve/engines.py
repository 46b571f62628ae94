"""Ray Serve runs N engines, each a program with an OpenAI API at a port of its own; a file names those that are ready.

AGENTSPEC_SERVERS is the file, MODEL what the engines serve, REPLICAS how many there are, CPUS and GPUS what each takes,
and ENGINE the program: by default vLLM, which drafts from our cache where agentspec is installed beside it.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import ray
from ray import serve

VLLM = (
    """vllm serve {model} --port {port} --speculative-config '{{"method": "suffix", "num_speculative_tokens": 15}}'"""
)


@serve.deployment(health_check_period_s=2, health_check_timeout_s=10, graceful_shutdown_timeout_s=60)
class Engine:
    """One engine, which lives as long as its replica. A failed health check has Ray start another."""

    def __init__(self, program: str, model: str) -> None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        self.url = f"http://{ray.util.get_node_ip_address()}:{port}/v1"
        self.process = subprocess.Popen(shlex.split(program.format(model=model, port=port)))
        while not self._answers():
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine ended with {self.process.returncode}")
            time.sleep(1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url.removesuffix("/v1") + "/health", timeout=5):
                return True
        except OSError:
            return False

    def check_health(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the engine ended with {self.process.returncode}")

    def address(self) -> str:
        self.check_health()
        return self.url

    def __del__(self) -> None:
        process = getattr(self, "process", None)
        if process is not None:
            process.terminate()
            process.wait(60)


def addresses(handle: serve.handle.DeploymentHandle, replicas: int) -> set[str]:
    """Where the replicas serve: Ray picks one a call, so all are asked until none is new."""
    asked = [handle.address.remote() for _ in range(8 * replicas)]
    return {one.result(timeout_s=30) for one in asked}


def write(file: Path, urls: set[str]) -> None:
    """In one step, so that the gateway never reads half a file."""
    new = file.with_suffix(".new")
    new.write_text("".join(f"{url}\n" for url in sorted(urls)))
    new.replace(file)


def main() -> None:
    replicas, gpus = int(os.environ.get("REPLICAS", "2")), float(os.environ.get("GPUS", "1"))
    options = {"num_cpus": float(os.environ.get("CPUS", "1")), "num_gpus": gpus}
    engine = Engine.options(num_replicas=replicas, ray_actor_options=options)
    handle = serve.run(engine.bind(os.environ.get("ENGINE", VLLM), os.environ["MODEL"]), route_prefix=None)
    file, known = Path(os.environ["AGENTSPEC_SERVERS"]), set[str]()
    while True:
        try:
            found = addresses(handle, replicas)
        except Exception as error:  # a replica is being replaced: its call fails until Ray has noticed
            print(f"asking again: {type(error).__name__}", flush=True)
            found = known
        if found and found != known:
            write(file, found)
            known = found
        time.sleep(2)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
    serve.shutdown()  # ends the engines
