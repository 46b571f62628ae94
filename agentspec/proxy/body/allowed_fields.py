"""What upstreams may get: the fields of each API and kind of server, types of tools, arguments of templates, and which
parts of a request are text, media, or neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final

from agentspec.backends.base import (
    CHAT,
    COMPACT,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    INPUT_TOKENS,
    MESSAGES,
    RESPONSES,
)
from agentspec.protocol.requests import SAMPLED


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TOOLS_OFFERED: Final = _names("tools tool_choice parallel_tool_calls")
# Of all APIs that generate: OpenAI's; and of vLLM, SGLang, TGI, llama.cpp, Ollama and hosted models with their own.
_GENERATING: Final = SAMPLED | _names("""
    model stream stream_options user metadata service_tier safety_identifier prompt_cache_key
    prompt_cache_options prompt_cache_retention logprobs max_tokens n prediction response_format
    top_a typical_p length_penalty early_stopping use_beam_search beam_width num_beams
    best_of n_choices n_probs n_predict num_predict max_new_tokens min_new_tokens min_tokens ignore_eos stop_token_ids
    stop_regex no_stop_trim include_stop_str_in_output bad_words allowed_token_ids logprob_token_ids prompt_logprobs
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens add_special_tokens
    add_generation_prompt continue_final_message chat_template_kwargs documents include_reasoning separate_reasoning
    stream_reasoning reasoning thinking think thinking_budget thinking_token_budget enable_thinking structured_outputs
    guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern structural_tag regex ebnf
    json_schema grammar return_token_ids return_tokens_as_token_ids token_ids cache_prompt
""")

BY_API: dict[str, frozenset[str]] = {
    CHAT: _GENERATING | _TOOLS_OFFERED | _names("""
        messages max_completion_tokens top_logprobs reasoning_effort verbosity modalities audio moderation
        web_search_options functions function_call store
    """),
    COMPLETIONS: _GENERATING | _names("prompt suffix echo"),
    EMBEDDINGS: _names("""
        model input encoding_format dimensions user messages input_type truncate truncate_prompt_tokens
        add_special_tokens normalize
    """),
    RESPONSES: _GENERATING | _TOOLS_OFFERED | _names("""
        input instructions max_output_tokens max_tool_calls top_logprobs text truncation include image
        previous_response_id conversation prompt store background context_management moderation client_metadata
    """),
    MESSAGES: _GENERATING | _names("""
        messages system stop_sequences tools tool_choice output_config output_format
        cache_control container context_management compaction inference_geo speed diagnostics
    """),
}  # fmt: skip
BY_API |= {COUNT_TOKENS: BY_API[MESSAGES], **dict.fromkeys((INPUT_TOKENS, COMPACT), BY_API[RESPONSES])}
OTHER_ROUTES: Final = frozenset[str]().union(*BY_API.values()) | _names("""
    query queries text_1 text_2 top_n return_documents max_tokens_per_doc tokens return_token_strs
    voice speed stream_format size quality style background moderation output_format output_compression
    partial_images num_images
""")  # of routes that the operator lists: rerankers, scores, tokens, speech, images
BY_KIND: Final[Mapping[str, frozenset[str]]] = {
    "vllm": _names("cache_salt session_id vllm_xargs"),
    "sglang": _names("cache_salt session_id"),
}
TOOL_TYPES: Final = _names("""
    function custom namespace tool_search file_search code_interpreter image_generation local_shell shell apply_patch
    computer computer_use computer_use_preview web_search web_search_preview
""")
# Arguments of chat templates that published models read; templates are programs, and others may keep them busy.
TEMPLATE_ARGUMENTS = frozenset(
    "enable_thinking thinking thinking_mode thinking_budget reasoning_effort preserve_thinking clear_thinking"
    " add_vision_id date_string tools_in_user_message model_identity builtin_tools".split()
)

# These fields hold text, or a schema or grammar for text: no server takes an address from them.
TEXT_FIELDS = frozenset(
    "model suffix stop bad_words user safety_identifier prompt_cache_key response_format guided_json guided_regex"
    " guided_choice guided_grammar guided_whitespace_pattern structured_outputs structural_tag regex ebnf json_schema"
    " grammar stop_regex logit_bias instructions stop_sequences output_config output_format metadata".split()
)
# Of calls; what was cited and found, which clients send back; what stands in logs for the server's own tools.
_CALLS = frozenset("tool_calls function_call arguments parameters input_schema input_examples".split())
_CITED = frozenset({"annotations", "citations"})
_MESSAGE_TEXT = frozenset(
    "role name content text prompt input prediction thinking refusal reasoning reasoning_content summary title context"
    " signature tool_call_id messages transcript".split()
)
_TOOL_TEXT = frozenset("name description title definition syntax pattern examples type".split())
MEDIA = frozenset(
    "url image_url input_image video_url audio_url file_url image images video videos audio audios file path".split()
)
ENCODED = frozenset("data file_data input_audio b64_json".split())
TENSORS = re.compile(r"\w+_(?:embeds|pil)")  # parts that a server unpickles
# Strings of objects of these types are what the server's own search said, or the text of a document.
TEXT_BY_TYPE = {
    "text": frozenset({"data"}),
    "search_result": frozenset({"source"}),
    "web_search_result": frozenset({"url"}),
    "web_fetch_result": frozenset({"url"}),
}
# Other gateways read the accounts and addresses of clouds and logging services from `metadata`.
ACCOUNTS = re.compile(
    r"(?:langfuse|langsmith|humanloop|arize|posthog|phoenix|wandb|weave|braintrust|lunary|slack|newrelic|litellm"
    r"|aws|azure|vertex|gcs|s3)_.*|api_?base|base_?url|model_?url|user_config"
    r"|.*(?:(?:api|access|secret|private)_?key(?:_?id)?|secret|password|credentials?|(?:access|auth|bearer)_?token)",
    re.IGNORECASE,
)
TRANSFERS = frozenset({"kv_transfer_params", "ec_transfer_params"})  # which vLLM also takes from `vllm_xargs`


@dataclass(frozen=True, slots=True)
class Region:
    """How a part of a request is checked: which values are passed over, which strings are text, which are media."""

    skipped: Set[str] = frozenset()
    text: Set[str] = frozenset()
    media: bool = False
    inner: Mapping[str, Region] = field(default_factory=dict)  # parts of it that are checked by rules of their own


OTHER = Region()
_TOOLS = Region(skipped=_CALLS, text=_TOOL_TEXT)
_MESSAGES = Region(skipped=_CALLS | _CITED, text=_MESSAGE_TEXT, media=True)
# Items of the Responses API: results of calls are text, and so is what earlier answers searched.
_ITEMS = replace(
    _MESSAGES,
    skipped=_CALLS | _CITED | {"action", "results"},
    text=_MESSAGE_TEXT | {"output", "encrypted_content", "call_id", "id", "arguments"},
    inner={"tools": _TOOLS},  # that the conversation adds, or that were searched for
)
# Of rerankers, and of chats about documents: texts, or parts as messages have them, with media that vLLM fetches.
_RANKED = frozenset("documents query queries text_1 text_2".split())
_PARTS = replace(_MESSAGES, text=_MESSAGE_TEXT | _RANKED)
REGIONS = {
    "text": Region(skipped=frozenset({"schema"}), text=_TOOL_TEXT),
    "input": _ITEMS,
    "tools": _TOOLS,
    "functions": _TOOLS,
    "messages": replace(_MESSAGES, skipped=_CALLS | _CITED | {"input"}),  # of a `tool_use` block, its arguments
    **dict.fromkeys(("prompt", "prediction", "system"), _MESSAGES),
    **dict.fromkeys(_RANKED, _PARTS),
    # Where a document is from is text for the chat template.
    "documents": replace(_PARTS, text=_PARTS.text | {"url"}, inner=dict.fromkeys(MEDIA | {"content"}, _PARTS)),
}
