from __future__ import annotations

import resource
from typing import Any

import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.field_names import plain_name
from agentspec.proxy.body.upstream_fields import UpstreamFields


def check(fields: dict[str, Any], **settings: Any) -> None:
    UpstreamFields(OpenAISettings(base_url="http://up/v1", **settings)).check(fields)  # type: ignore[arg-type]


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    "name",
    """
    api_base API_BASE apiBase api-base base_url baseURL model_url fallbacks azure_endpoint azure_ad_token api_key
    api_version kv_transfer_params ec_transfer_params aws_access_key_id aws_bedrock_runtime_endpoint vertex_credentials
    custom_llm_provider extra_headers extra_body mock_response litellm_metadata litellm_params router_settings_override
    user_config lora_path lora_request bootstrap_host bootstrap_port bootstrap_room chat_template rid request_id
    custom_logit_processor prompt_embeds data_parallel_rank webhook_url callback_url proxy remote_host langfuse_host
    \N{FULLWIDTH LATIN SMALL LETTER A}pi_base api_ba\N{LATIN SMALL LETTER LONG S}e aws_\N{KELVIN SIGN}ey
    """.split(),
)  # fmt: skip
def test_fields_of_other_products_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="configured, not requested") as caught:
        check({"messages": [], name: None})
    assert caught.value.param == name.encode("ascii", "replace").decode()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"a": {"api_base": "x"}}, "a.api_base"),
        ({"x": [{"model": "m"}, {"Base_URL": "x"}]}, "x[1].Base_URL"),
        ({"a": {"b": [[{"c": {"model_url": None}}]]}}, "a.b[0][0].c.model_url"),
        ({"tools": [{"type": "function", "base_url": "x"}]}, "tools[0].base_url"),
        ({"tools": [{"type": "mcp", "server_url": "http://10.0.0.1"}]}, "tools[0].server_url"),
        (
            {"input": [{"type": "additional_tools", "tools": [{"type": "mcp", "server_url": "x.example/mcp"}]}]},
            "input[0].tools[0].server_url",
        ),
        (
            {"input": [{"type": "tool_search_output", "tools": [{"type": "namespace", "tools": [{"host": "x"}]}]}]},
            "input[0].tools[0].tools[0].host",
        ),
        ({"tools": [{"type": "x", "x": {"parameters": {}, "where": "http://10.0.0.1"}}]}, "tools[0].x.where"),
        ({"a": {"parameters": {"api_base": "x"}}}, "a.parameters.api_base"),
        ({"a": {"metadata": {"api_base": "x"}}}, "a.metadata.api_base"),
        ({"metadata": {"langfuse_host": "x"}}, "metadata.langfuse_host"),
        ({"metadata": '{"langfuse_host": "x"}'}, "metadata"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"messages": [{"role": "user", "content": "x", "api_key": "k"}]}, "messages[0].api_key"),
        ({"unheard_of": ["http://169.254.169.254/"]}, "unheard_of[0]"),
        ({"unheard_of": {"x": "FILE:///etc/passwd"}}, "unheard_of.x"),
        ({"unheard_of": " \u200bht\ntp://x"}, "unheard_of"),
        ({"model": "http://127.0.0.1/m"}, "model"),
        ({"chat_template_kwargs": {"loops": 10**9}}, "chat_template_kwargs.loops"),
        (said({"type": "prompt_embeds", "data": "AAAA"}), "messages[0].content[0].type"),
        (said({"image_embeds": "AAAA"}), "messages[0].content[0].image_embeds"),
    ],
)
def test_they_are_refused_at_any_depth(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(fields)
    assert caught.value.param == path


@pytest.mark.parametrize(
    "name",
    ["N", "Max_Tokens", "maxTokens", "MODEL", "Messages", "best-of", "\uff2d\uff2f\uff24\uff25\uff2c", "Cache_Salt"],
)
def test_a_field_has_one_spelling(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="must be spelled"):
        check({"model": "m", name: 1})


INLINE = "data:image/png;base64,iVBORw0KGgo="
ELSEWHERE = ["http://x/a.png", "https://x", "file:///etc/passwd", "/etc/passwd", "//x", "\\\\x\\y", "gs://b/x", "x.png"]


@pytest.mark.parametrize("url", ELSEWHERE)
@pytest.mark.parametrize(
    "part",
    [
        lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        lambda url: {"type": "image_url", "image_url": url},
        lambda url: {"image_url": {"url": url}},
        lambda url: {"type": "input_image", "image_url": url},
        lambda url: {"type": "video_url", "video_url": {"url": url}},
        lambda url: {"type": "audio_url", "audio_url": {"url": url}},
        lambda url: {"type": "image", "source": {"type": "url", "url": url}},
        lambda url: {"type": "video", "video": [url, INLINE]},
        lambda url: {"type": "tool_result", "content": [{"type": "image_url", "image_url": {"url": url}}]},
    ],
)
def test_media_come_with_the_request(part: Any, url: str) -> None:
    check(said({"type": "text", "text": url}, part(INLINE)))
    with pytest.raises(InvalidRequestError, match="must be a data: URL") as caught:
        check(said(part(url)))
    assert str(caught.value.param).startswith("messages[0].content[0].")


@pytest.mark.parametrize(
    ("part", "refused"),
    [
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, False),
        ({"type": "input_audio", "input_audio": {"data": "http://x/a.wav", "format": "wav"}}, True),
        ({"type": "input_audio", "input_audio": {"data": "../a.wav", "format": "wav"}}, True),
        ({"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBE", "filename": "a.pdf"}}, False),
        ({"type": "file", "file": {"file_id": "file-abc"}}, False),
        ({"type": "file", "file": {"file_id": "https://x/a.pdf"}}, True),
        ({"type": "file", "file": "http://x/a.pdf"}, True),
        ({"type": "image_url", "image_url": {"url": INLINE}, "cache_control": {"type": "ephemeral"}}, False),
    ],
)
def test_files_and_sounds(part: dict[str, Any], refused: bool) -> None:
    if not refused:
        check(said(part))
        return
    with pytest.raises(InvalidRequestError):
        check(said(part))


def test_messages_and_inputs_of_any_form_are_searched() -> None:
    for fields in (
        {"messages": [{"role": "user", "content": "x", "images": ["http://x"]}]},
        {"messages": {"content": {"image_url": "http://x"}}},
        {"input": [{"text": "http://fine", "image": "http://x"}]},
        {"input": {"messages": [{"content": [{"video_url": {"url": "http://x"}}]}]}},
        {"prompt": [{"image": "http://x"}]},
        {"documents": [{"image_url": {"url": "http://x"}}]},
        {"documents": {"content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}},
        {"query": {"content": [{"type": "video_url", "video_url": {"url": "http://x"}}]}},
    ):
        with pytest.raises(InvalidRequestError, match="data: URL"):
            check(fields)


def test_text_and_schemas_may_speak_of_addresses() -> None:
    schema = {"type": "object", "properties": {"base_url": {"type": "string", "default": "http://x"}}}
    arguments = '{"url": "http://169.254.169.254/"}'
    check(
        {
            "model": "org/name",
            "messages": [
                {"role": "system", "content": "http://169.254.169.254/"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
                {"role": "assistant", "tool_calls": [{"function": {"arguments": {"api_base": "x"}}}]},
                {"role": "tool", "tool_call_id": "c", "content": ["http://x", {"type": "text", "text": "http://x"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "description": "http://x"}}],
            "functions": [{"name": "f", "parameters": schema}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            "prompt": "http://x",
            "input": [
                "http://x",
                "file:///x",
                {
                    "type": "additional_tools",
                    "tools": [{"type": "custom", "description": "http://x", "format": {"definition": "// of a file"}}],
                },
            ],
            "query": "http://x",
            "documents": ["http://x", {"title": "http://x", "text": "file:///x"}],
            "stop": ["http://"],
            "user": "https://people/1",
            "metadata": {"page": "http://x", "trace_url": "http://x"},
            "cache_salt": "a" * 64,
            "chat_template_kwargs": {"enable_thinking": False},
            "unheard_of": {"a": [None, True, 1.5, "text"]},
        }
    )


def test_the_operator_may_allow_fields_hosts_and_template_arguments() -> None:
    check({"kv_transfer_params": {"block": 1}}, allow_fields=["KV-transfer-params"])
    with pytest.raises(InvalidRequestError):
        check({"kv_transfer_params": {"remote_host": "x"}}, allow_fields=["kv_transfer_params"])
    check({"chat_template_kwargs": {"depth": 1}}, allow_template_arguments=["depth"])
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
     {"allow_fields": [""]}, {"allow_template_arguments": ["a b"]}],
)  # fmt: skip
def test_what_cannot_be_allowed(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        OpenAISettings(base_url="http://up/v1", **settings)  # type: ignore[arg-type]


def test_nesting_is_no_way_around_and_no_way_to_fail() -> None:
    deep: Any = {"api_base": "x"}
    for _ in range(20_000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequestError) as caught:
        check(deep)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("unit", [dict, list, lambda: {"a": 1}, lambda: "x", lambda: {"text": "x"}, lambda: [[1]]])
@pytest.mark.parametrize(
    "place",
    ["unheard_of", "messages", *(pytest.param(one, marks=pytest.mark.slow) for one in ("tools", "input", "metadata"))],
)
def test_many_elements_cost_little(unit: Any, place: str) -> None:
    """No path is spelled for what is not refused: memory stays near that of the value itself."""
    value: Any = [unit() for _ in range(30_000)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check({place: {"x": value} if place == "metadata" else value})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB


def test_long_names_are_not_remembered() -> None:
    before = plain_name.cache_info().currsize
    for number in range(20):
        name = "x" * 200 + str(number)
        UpstreamFields(OpenAISettings(base_url="http://127.0.0.1:9/v1")).check(  # type: ignore[arg-type]
            {"model": "m", name: 1, "messages": [{"role": "user", name: "text"}], "metadata": {name: "x"}}
        )
    assert plain_name.cache_info().currsize <= before + 8
