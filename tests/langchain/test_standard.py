"""LangChain's own tests of a chat model: in process on a fake backend, and remote on an endpoint with tools."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from agentspec.langchain import ChatAgentSpec
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation

pytestmark = pytest.mark.anyio


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatAgentSpec]:
        return ChatAgentSpec

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"AGENTSPEC_API_KEY": "k"}, {"base_url": "http://127.0.0.1:8700/v1"}, {"api_key": "k"}


class TestInProcess(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatAgentSpec]:
        return ChatAgentSpec

    @property
    def chat_model_params(self) -> dict[str, Any]:
        script = Answer(text="hello there, this is an answer", speculation=Speculation(4, 3, 2, 0.1))
        backends = {"local": FakeBackend(script), "other": FakeBackend(script)}
        return {"model": "smollm2-135m", "runtime": Runtime(Settings(), backends=backends)}

    @property
    def model_override_value(self) -> str:
        return "other"

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def has_tool_calling(self) -> bool:
        return False  # the script says what it says

    @property
    def has_structured_output(self) -> bool:
        return False


class TestRemote(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatAgentSpec]:
        return ChatAgentSpec

    @pytest.fixture(autouse=True)
    def _served(self, server: Any) -> None:
        self._base_url = server.base_url

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "fast", "base_url": self._base_url}

    @property
    def model_override_value(self) -> str:
        return "slow"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False


class TestRemoteWithJsonSchema(TestRemote):
    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}
