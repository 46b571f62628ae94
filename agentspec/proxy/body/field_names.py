"""The names of fields that no client may set in a request to an upstream.

They belong to other gateways (LiteLLM, OpenRouter) and to the inside of servers (vLLM, SGLang): they make whoever reads
them connect to another address, use another identity, skip accounting, or load code and weights. A backend's
`allow_fields` permits single names.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Set
from functools import lru_cache

LONGEST_NAME = 128
"""Longer names belong to no server. They are not looked up, since what is looked up is remembered."""

# Where a request goes, and what may replace it: LiteLLM's and OpenRouter's routing, and settings of HTTP clients.
_ROUTING = """
    api_base api_type api_version base_model base_url model_url fallbacks fallback_models context_window_fallbacks
    content_policy_fallbacks context_window_fallback_dict default_fallbacks model_list models router_settings
    router_settings_override user_config routing_strategy custom_llm_provider mock_response mock_timeout mock_tool_calls
    mock_testing_fallbacks extra_body extra_headers extra_query headers default_headers provider_specific_header
    http_client client logger_fn callbacks success_callback failure_callback guardrails cache caching cache_key
    preset_cache_key prompt_id prompt_variables prompt_label model_info model_config proxy_server_request secret_fields
    configurable_clientside_auth_params model_file_id_mapping connector_id plugins dd_site dd_agent_port region_name
    tenant_id client_id no-log shared_session input_cost_per_token output_cost_per_token
"""
# The inside of vLLM and SGLang: transfers between servers, adapters, identities, tensors, code and templates.
_ENGINE = """
    kv_transfer_params ec_transfer_params data_parallel_rank routed_dp_rank disagg_prefill_dp_rank lora_path lora_paths
    lora_request lora_name lora request_id rid session_params extra_key custom_logit_processor custom_params priority
    logits_processors prompt_embeds input_embeds image_embeds audio_embeds video_embeds image_pil media_io_kwargs
    mm_processor_kwargs chat_template tokenizer trust_remote_code id_slot slot_id engine_id
"""
_PREFIXES = """
    litellm_ aws_ azure_ vertex_ gcs_ s3_ sagemaker_ bedrock_ watsonx_ langfuse_ langsmith_ humanloop_ arize_ posthog_
    phoenix_ wandb_ weave_ braintrust_ lunary_ slack_ newrelic_ bootstrap_ remote_ auto_router_ complexity_router_
    quality_router_ adaptive_router_ agentic_loop_
"""
_CREDENTIALS = """
    api_key api_keys secret secrets secret_key password passwd credential credentials access_key access_key_id
    private_key public_key access_token auth_token bearer_token session_token identity_token ad_token authorization
"""
_ADDRESSES = """
    url urls uri uris endpoint endpoints host hosts hostname hostnames webhook webhooks proxy proxies callback_function
"""


@lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """The letters and digits of `name` in lower case: parsers differ in whether case, `_` and `-` matter."""
    folded = name.casefold() if name.isascii() else unicodedata.normalize("NFKC", name).casefold()
    return "".join(filter(str.isalnum, folded))


def _plain(names: str) -> tuple[str, ...]:
    return tuple(map(plain_name, names.split()))


_NAMES = frozenset(_plain(_ROUTING + _ENGINE))
_STARTS = _plain(_PREFIXES)
_SECRETS = _plain(_CREDENTIALS)
_ENDS = (*_SECRETS, *_plain(_ADDRESSES))
# LiteLLM reads the address and the account of its logging services from `metadata`.
_METADATA = frozenset(_plain("api_base base_url model_url user_config"))


def is_denied(name: str, allowed: Set[str]) -> bool:
    """Whether no client may set the field `name`; `allowed` has the plain names that the operator permits."""
    return len(name) <= LONGEST_NAME and _anywhere(name) and plain_name(name) not in allowed


def is_denied_in_message(name: str, allowed: Set[str]) -> bool:
    """The same in a message, whose parts have fields for the addresses of images; those are checked by their values."""
    return len(name) <= LONGEST_NAME and _in_message(name) and plain_name(name) not in allowed


def is_denied_in_metadata(name: str, allowed: Set[str]) -> bool:
    """The same in `metadata`, whose names are the client's own otherwise."""
    return len(name) <= LONGEST_NAME and _in_metadata(name) and plain_name(name) not in allowed


@lru_cache(maxsize=4096)
def _anywhere(name: str) -> bool:
    return _matches(name, _NAMES, _ENDS)


@lru_cache(maxsize=4096)
def _in_message(name: str) -> bool:
    return _matches(name, _NAMES, _SECRETS)


@lru_cache(maxsize=4096)
def _in_metadata(name: str) -> bool:
    return _matches(name, _METADATA, _SECRETS)


def _matches(name: str, names: Set[str], ends: tuple[str, ...]) -> bool:
    plain = plain_name(name)
    return plain in names or plain.startswith(_STARTS) or plain.endswith(ends)
