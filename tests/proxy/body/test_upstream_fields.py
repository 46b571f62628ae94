from __future__ import annotations

import importlib
from typing import Any

import pytest

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError
from agentspec.proxy.app import APIS
from agentspec.proxy.body.reading import MAX_DEPTH
from agentspec.proxy.body.upstream_fields import UpstreamFields, allowed
from agentspec.proxy.metering import demand_of

ROUTE = "/any"  # of the operator's list, where the fields of all APIs pass


def check(fields: dict[str, Any], path: str = ROUTE, **settings: Any) -> None:
    UpstreamFields(OpenAISettings(base_url="http://up/v1", **settings)).check(fields, path)  # type: ignore[arg-type]


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize("path", [*allowed.BY_API, ROUTE])
def test_fields_that_are_not_on_the_list_are_refused(path: str) -> None:
    for name in """
    api_base API_BASE apiBase api-base base_url fallbacks azure_endpoint api_key api_version kv_transfer_params
    aws_access_key_id vertex_credentials custom_llm_provider extra_headers extra_body mock_response litellm_metadata
    router_settings_override lora_path bootstrap_host chat_template rid custom_logit_processor prompt_embeds priority
    data_parallel_rank proxy remote_host workspace_id anthropic_workspace_id use_ssl ssl_verify rust organization
    deployment_id num_retries provider preset route nvext return_hidden_states mcp_servers unheard_of vector_store_ids
    N Max_Tokens maxTokens MODEL best-of Cache_Salt
    \N{FULLWIDTH LATIN SMALL LETTER A}pi_base \uff2d\uff2f\uff24\uff25\uff2c
    """.split():
        with pytest.raises(InvalidRequestError, match="is refused") as caught:
            check({"model": "m", name: None}, path)
        assert caught.value.param == name.encode("ascii", "replace").decode()


def test_no_api_lacks_a_list_or_a_charge() -> None:
    """Without a list the fields of all APIs would pass; without a charge an answer without a bound would be free."""
    paths = {api.path for api in APIS}
    assert paths <= allowed.BY_API.keys() and all(demand_of(path, b"{}", {}).answer for path in paths)


def test_fields_of_the_clients_libraries_pass() -> None:
    """But what acts under another identity, skips accounting, or goes elsewhere."""
    chats: Any = importlib.import_module("openai.types.chat.completion_create_params")
    texts: Any = importlib.import_module("openai.types.completion_create_params")
    vectors: Any = importlib.import_module("openai.types.embedding_create_params")
    responses: Any = importlib.import_module("openai.types.responses.response_create_params")
    messages: Any = importlib.import_module("anthropic.types.beta.message_create_params")
    for path, kind in (
        (CHAT, chats.CompletionCreateParamsBase),
        (COMPLETIONS, texts.CompletionCreateParamsBase),
        (EMBEDDINGS, vectors.EmbeddingCreateParams),
        (RESPONSES, responses.ResponseCreateParamsBase),
        (MESSAGES, messages.MessageCreateParamsBase),
    ):
        refused = "access_programs betas billing_policy fallback_credit_token fallbacks mcp_servers thread"
        assert {*kind.__annotations__} - allowed.BY_API[path] <= {*refused.split(), "user_profile_id", "workspace_id"}


@pytest.mark.parametrize(("kind", "passes"), [("auto", True), ("vllm", True), ("sglang", False), ("other", False)])
def test_a_server_gets_the_fields_of_its_kind(kind: str, passes: bool) -> None:
    if passes:
        check({"vllm_xargs": {"agentspec_step": "s"}}, CHAT, server_kind=kind)
    else:
        with pytest.raises(InvalidRequestError):
            check({"vllm_xargs": {}}, CHAT, server_kind=kind)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tools": [{"type": "mcp", "server_url": "http://10.0.0.1"}]}, "tools[0].type"),
        (
            {"input": [{"type": "additional_tools", "tools": [{"type": "mcp", "server_url": "x.example/mcp"}]}]},
            "input[0].tools[0].type",
        ),
        (
            {"input": [{"type": "tool_search_output", "tools": [{"type": "namespace", "tools": [{"type": "mcp"}]}]}]},
            "input[0].tools[0].tools[0].type",
        ),
        ({"tools": [{"type": "custom", "x": {"parameters": {}, "where": "http://10.0.0.1"}}]}, "tools[0].x.where"),
        ({"metadata": {"langfuse_host": "x"}}, "metadata.langfuse_host"),
        ({"metadata": {"API_BASE": "x"}}, "metadata.API_BASE"),
        ({"metadata": {"arize_api_key": "x"}}, "metadata.arize_api_key"),
        ({"metadata": '{"langfuse_host": "x"}'}, "metadata"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"reasoning": ["http://169.254.169.254/"]}, "reasoning[0]"),
        ({"reasoning": {"x": "FILE:///etc/passwd"}}, "reasoning.x"),
        ({"reasoning": " \u200bht\ntp://x"}, "reasoning"),
        ({"model": "http://127.0.0.1/m"}, "model"),
        ({"chat_template_kwargs": {"loops": 10**9}}, "chat_template_kwargs.loops"),
        (said({"type": "prompt_embeds", "data": "AAAA"}), "messages[0].content[0].type"),
        (said({"image_embeds": "AAAA"}), "messages[0].content[0].image_embeds"),
    ],
)
def test_addresses_and_unknown_tools_are_refused_at_any_depth(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(fields)
    assert caught.value.param == path


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The grass is green."}}
FOUND = {"type": "web_search_result", "url": "https://x.example", "title": "x", "encrypted_content": "AA=="}
CITED = {"type": "url_citation", "url_citation": {"url": "https://x.example", "title": "x"}}
QUOTED = {"type": "web_search_result_location", "url": "https://x.example", "cited_text": "x"}


INLINE = "data:image/png;base64,iVBORw0KGgo="
PDF = {"file_data": "data:application/pdf;base64,JVBE", "filename": "a.pdf"}
FETCHED = {"type": "web_fetch_result", "url": "https://x.example", "content": DOCUMENT}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    "fields",
    [
        said({**DOCUMENT, "citations": {"enabled": True}}),
        said({"type": "search_result", "source": "https://x.example", "content": [{"type": "text", "text": "x"}]}),
        said({"type": "text", "text": "x", "citations": [QUOTED]}),
        said({"type": "web_search_tool_result", "tool_use_id": "t", "content": [FOUND]}),
        said({"type": "web_fetch_tool_result", "content": FETCHED}),
        {"messages": [{"role": "assistant", "content": "x", "annotations": [CITED]}]},
        {"documents": [{"title": "x", "text": "x", "url": "https://x.example"}]},
        {"input": [{"type": "web_search_call", "action": {"type": "open_page", "url": "https://x.example"}}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["x.example"]}]},
        said({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
        said({"type": "file", "file": PDF}),
        said({"type": "file", "file": {"file_id": "file-abc"}}),
        said({"type": "image_url", "image_url": {"url": INLINE}, "cache_control": {"type": "ephemeral"}}),
    ],
)
def test_citations_search_results_and_inline_media_pass(fields: dict[str, Any]) -> None:
    check(fields)


@pytest.mark.parametrize(
    "fields",
    [
        said({"type": "document", "source": {"type": "url", "url": "https://x.example"}}),
        said({"type": "web_search_result", "image_url": {"url": "https://x.example"}}),
        said({"type": "search_result", "content": [IMAGE]}),
        said({"type": "base64", "data": "http://x"}),
        said({"type": "input_audio", "input_audio": {"data": "http://x/a.wav", "format": "wav"}}),
        said({"type": "input_audio", "input_audio": {"data": "../a.wav", "format": "wav"}}),
        said({"type": "file", "file": "http://x/a.pdf"}),
        {"documents": [{"content": [{"type": "image_url", "image_url": {"url": "https://x.example"}}]}]},
        {"documents": [{"image_url": "https://x.example"}]},
        {"documents": {"content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}},
        {"messages": [{"role": "user", "content": "x", "images": ["http://x"]}]},
        {"messages": {"content": {"image_url": "http://x"}}},
        {"input": [{"text": "http://fine", "image": "http://x"}]},
        {"input": {"messages": [{"content": [{"video_url": {"url": "http://x"}}]}]}},
        {"prompt": [{"image": "http://x"}]},
        {"query": {"content": [{"type": "video_url", "video_url": {"url": "http://x"}}]}},
    ],
)
def test_media_are_searched_for_in_messages_and_inputs_of_any_form(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="data: URL"):
        check(fields)


def test_text_and_schemas_may_speak_of_addresses() -> None:
    schema = {"type": "object", "properties": {"base_url": {"type": "string", "default": "http://x"}}}
    arguments = '{"url": "http://169.254.169.254/"}'
    custom = {"type": "custom", "description": "http://x", "format": {"definition": "// of a file"}}
    check(
        {
            "model": "org/name",
            "messages": [
                {"role": "system", "content": "http://169.254.169.254/"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
                {"role": "assistant", "tool_calls": [{"function": {"arguments": {"base_url": "http://x"}}}]},
                {"role": "tool", "tool_call_id": "c", "content": ["http://x", {"type": "text", "text": "http://x"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "description": "http://x"}}],
            "functions": [{"name": "f", "parameters": schema}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            **dict.fromkeys(("prompt", "query"), "http://x"),
            "input": ["http://x", "file:///x", {"type": "additional_tools", "tools": [custom]}],
            "documents": ["http://x", {"title": "http://x", "text": "file:///x"}],
            "stop": ["http://"],
            "user": "https://people/1",
            "metadata": {
                "page": "http://x",
                "trace_url": "http://x",
                "host": "web-1",
                "primary_key": "7",
                "tokens": "9",
            },
            "cache_salt": "a" * 64,
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning": {"a": [None, True, 1.5, "text"]},
        }
    )


def test_the_operator_may_allow_fields_hosts_and_template_arguments() -> None:
    check({"kv_transfer_params": {"block": 1}}, CHAT, allow_fields=["kv_transfer_params"])
    check({"tools": [{"type": "mcp", "server_label": "x"}]}, allow_fields=["mcp"])
    check({"priority": 1}, CHAT, priority="auto")
    with pytest.raises(InvalidRequestError):
        check({"kv_transfer_params": {"remote_host": "http://x"}}, CHAT, allow_fields=["kv_transfer_params"])
    check({"chat_template_kwargs": {"depth": 1}}, allow_fields=["depth"])
    for url, good in {
        "https://img.example.com/a.png": True,
        "HTTPS://IMG.example.com:443/a.png": True,
        "http://cdn.example.com:8080/a": True,
        "http://cdn.example.com/a": False,
        "https://img.example.com:8443/a": False,
        "https://img.example.com@evil/a": False,
        "https://evil/img.example.com": False,
        "https://img.example.com.evil/": False,
        "https://evil\\@img.example.com/": False,
        "https://img.example.com\t/": False,
        "ftp://img.example.com/a": False,
        "https://[::1]/a": False,
        "//img.example.com/a": False,
        "https://img.example.com:x/": False,
    }.items():
        part = {"type": "image_url", "image_url": {"url": url}}
        hosts = ["IMG.example.com", "cdn.example.com:8080"]
        if good:
            check(said(part), allow_media_hosts=hosts)
        else:
            with pytest.raises(InvalidRequestError):
                check(said(part), allow_media_hosts=hosts)


@pytest.mark.parametrize(
    "settings",
    [{"allow_media_hosts": ["https://x"]}, {"allow_media_hosts": ["*"]}, {"allow_media_hosts": [""]},
     {"allow_fields": [""]}],
)  # fmt: skip
def test_what_cannot_be_allowed(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        OpenAISettings(base_url="http://up/v1", **settings)  # type: ignore[arg-type]


def test_nesting_is_no_way_around_and_no_way_to_fail() -> None:
    deep: Any = "http://x"
    for _ in range(MAX_DEPTH):
        deep = {"a": deep}
    with pytest.raises(InvalidRequestError) as caught:
        check({"reasoning": deep})
    assert len(str(caught.value)) < 2000
