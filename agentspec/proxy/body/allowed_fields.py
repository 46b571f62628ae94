"""The fields of requests that upstreams may get, by API and by kind of server; types of tools; templates' arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES
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
    latency_target_ms_per_token
""")

BY_API: Final[Mapping[str, frozenset[str]]] = {
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
