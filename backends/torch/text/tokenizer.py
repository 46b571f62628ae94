"""A model's text side: chat templates, encoding and decoding, end tokens, and the hashes of its namespace."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from agentspec.backends.base import NONE
from agentspec.backends.chat_templates import rendered
from agentspec.backends.torch.text.tool_parser import HERMES, ToolFormat, format_of
from agentspec.errors import ContextLengthError, InvalidRequestError, ModelUnavailableError
from agentspec.protocol.validation import NOT_TEXT, is_text
from agentspec.text import Decode
from agentspec.types import GenerateRequest, Message, Namespace


def template_of(tokenizer: Any, *, tools: bool = False) -> str:
    """The source of the chat template (of several, with `tools`, the one for tools); empty if there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):
        template = template.get("tool_use" if tools and "tool_use" in template else "default", "")
    return str(template)


def tool_format(tokenizer: Any, *, required: bool = True) -> ToolFormat | None:
    """The tool call format of the model's chat template; Hermes' if the template has no tools.

    For a format not known here, raises `InvalidRequestError` if a format is `required`, else returns None.
    """
    template = template_of(tokenizer, tools=True)
    format = format_of(template) if "tools" in template else HERMES
    if format is None and required:
        raise InvalidRequestError(
            "this model's chat template writes tool calls in a format that is not known here; known: Hermes, Llama 3, "
            "Mistral",
            param="tools",
        )
    return format


def render(tokenizer: Any, request: GenerateRequest, *, start: bool, continue_final: bool) -> str:
    """Render messages by the model's own chat template, in transformers' sandbox: `start` opens an answer,
    `continue_final` leaves the last message open. Raises `InvalidRequestError` for messages that the template refuses.
    """
    source = template_of(tokenizer, tools=bool(request.tools))
    if not source:
        message = "this model has no chat template: use completions with a plain prompt instead of messages"
        raise InvalidRequestError(message, param="messages")
    if not request.messages:
        raise InvalidRequestError("messages must not be empty", param="messages")

    def apply(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=start,
            continue_final_message=continue_final,
            **request.template_arguments,
        )
        return str(text)

    knows_tools = "tools" in source
    return rendered(apply, request.messages, request.tools, request.template_arguments, knows_tools=knows_tools)


LONG_TEXT = 4096  # characters


class TokenizerAdapter:
    """Encodes and decodes with a tokenizer; decoding skips special tokens. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # settings in the tokenizer's file would cut prompts silently
            self._fast.no_truncation()
            self._fast.no_padding()
        self.special_ids = _special_ids(tokenizer)
        self._longest = 0 if self._fast is None else _longest_token(self._fast)

    def prompt(self, request: GenerateRequest) -> list[int]:
        """The prompt's token ids. Raises `InvalidRequestError` for messages that the chat template refuses."""
        return self.read(request)[1]

    def read(self, request: GenerateRequest, limit: int | None = None) -> tuple[str, list[int]]:
        """The prompt as text (empty if it was given as token ids) and its token ids.

        Raises `InvalidRequestError`, and `ContextLengthError` for a text that certainly has more than `limit` tokens.
        """
        if request.token_ids is not None:
            return "", [int(token) for token in request.token_ids]
        if request.text is not None:
            self._check_length(request.text, limit, "prompt")
            return request.text, self.encode(request.text, special=True)
        start = request.start_answer and not request.continue_final
        text = render(self.tokenizer, request, start=start, continue_final=request.continue_final)
        self._check_length(text, limit, "messages")
        return text, self.encode(text)

    def _check_length(self, text: str, limit: int | None, param: str) -> None:
        if limit is not None and (fewest := self.fewest_tokens(text)) > limit:
            raise ContextLengthError(f"at least {fewest} prompt tokens do not fit the model's {limit}", param=param)

    def encode_chat(self, messages: Sequence[Message], *, continue_final: bool = False) -> list[int]:
        """Token ids of the text that `render` returns."""
        return self.encode(self.render(messages, start=not continue_final, continue_final=continue_final))

    def render(
        self,
        messages: Sequence[Message],
        *,
        start: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """Render messages by the model's own chat template (sandboxed): `start` opens an answer, `continue_final`
        leaves the last message open. Raises `InvalidRequestError` for messages that the template refuses.
        """
        shown = GenerateRequest("", messages=messages, tools=tuple(tools), template_arguments=template_arguments)
        return render(self.tokenizer, shown, start=start, continue_final=continue_final)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`; `special` adds the special tokens that the model wants around a prompt.

        Raises `InvalidRequestError` for half a surrogate pair.
        """
        if not is_text(text):
            raise InvalidRequestError(f"the text{NOT_TEXT}")
        if self._fast is None:
            with self._lock:
                return list(self.tokenizer.encode(text, add_special_tokens=special))
        if len(text) > LONG_TEXT:  # a batch lets other threads run meanwhile
            return list(self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without tokenizing it; 0 if nothing is known."""
        return len(text) // self._longest if self._longest else 0

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of `token_ids`, without special tokens unless `special`."""
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=not special))
        with self._lock:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not special))

    def decoder(self, shown: frozenset[int]) -> Decode:
        """A function like `decode` that writes out the special tokens in `shown`."""
        if not shown:
            return self.decode

        def decode(token_ids: Sequence[int]) -> str:
            parts = [(token in shown, token) for token in token_ids]
            runs = groupby(parts, key=itemgetter(0))
            return "".join(
                "".join(self.spell(token) for _, token in run) if marked else self.decode([token for _, token in run])
                for marked, run in runs
            )

        return decode

    def spell(self, token_id: int) -> str:
        """The text of one token, even if it is a special token."""
        return self.decode([token_id], special=True)


def _longest_token(tokenizer: Any) -> int:
    """The most characters that one token can stand for; 0 if that is not known.

    Tokens of byte-level BPE spell the text byte by byte, unless a normalizer shortens it or a token means any text.
    """
    model, kind = tokenizer.model, type(tokenizer.decoder).__name__
    if kind != "ByteLevel" or tokenizer.normalizer is not None or getattr(model, "unk_token", "") is not None:
        return 0
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # such a token takes any number of blanks
        return 0
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of special tokens, which stand for no text: ends, roles and other marks."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marks = (token for token, added_token in added.items() if getattr(added_token, "special", False))
    return frozenset([*getattr(tokenizer, "all_special_ids", ()), *marks])


def load_tokenizer(model: str) -> tuple[Any, str]:
    """The tokenizer of a model, and its hash for namespaces. Raises `ModelUnavailableError`."""
    from agentspec.backends.model_store import resolve

    tokenizer = read_tokenizer(resolve(model).folder)
    return tokenizer, hashes(tokenizer)[0]


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder. Raises `ModelUnavailableError`."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(f"cannot read the tokenizer in {str(folder)!r}: {error}") from error


def hashes(tokenizer: Any) -> tuple[str, str]:
    """The hashes of the tokenizer and of its chat template, for namespaces."""
    return _hash(_tokenizer_text(tokenizer)), _hash(str(getattr(tokenizer, "chat_template", None) or ""))


def _tokenizer_text(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class ModelTokens:
    """`Tokenization` of a backend that has a tokenizer in this process."""

    _tokenizer: TokenizerAdapter

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as a completion prompt."""
        return self._tokenizer.encode(text, special=True)

    def encode_chat(self, messages: Sequence[Message], *, continue_final: bool = False) -> list[int]:
        """Token ids of `messages` through the chat template, ready for the assistant's answer."""
        return self._tokenizer.encode_chat(messages, continue_final=continue_final)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens."""
        return self._tokenizer.decode(token_ids)

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        """The prompt text that the chat template makes of `messages`, ready for the assistant's answer."""
        shown = partial(self._tokenizer.render, messages, tools=tools, template_arguments=template_arguments)
        return await asyncio.to_thread(shown)

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        """Token ids of `text` as the continuation of a prompt or, with `begins`, as its beginning."""
        return await asyncio.to_thread(self._tokenizer.encode, text, special=begins)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self._tokenizer.decode, token_ids)

    async def spell(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` with special tokens by their names."""
        return await asyncio.to_thread(self._tokenizer.decode, token_ids, special=True)


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's tokenizer, chat template and end tokens, with the hashes that make up its namespace."""

    tokenizer: TokenizerAdapter
    fingerprint: str
    tokenizer_hash: str
    template_hash: str
    end_ids: frozenset[int]

    @classmethod
    def load(cls, model: str) -> ModelText:
        """Load from a model reference. Raises `ModelUnavailableError`."""
        from agentspec.backends.model_store import resolve

        files = resolve(model)
        tokenizer = read_tokenizer(files.folder)
        tokenizer_hash, template_hash = hashes(tokenizer)
        ends = ids_of_end(_generation_config(files.folder), tokenizer)
        return cls(TokenizerAdapter(tokenizer), files.fingerprint, tokenizer_hash, template_hash, ends)

    def namespace(self, tenant: str) -> Namespace:
        """The namespace in which the engine caches this model's tokens for a tenant."""
        return Namespace(tenant, self.fingerprint, self.tokenizer_hash, self.template_hash)

    def encode(
        self, messages: Sequence[Message], answer: Message, *, prompt: str | None = None, finished: bool = True
    ) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, which is `prompt` or `messages`, and of the answer with its end token.

        With `messages`, the chat template renders the answer, including its tool calls. An answer that is not
        `finished` gets no end token. Raises `InvalidRequestError` for messages that the template refuses and for an
        answer without tokens.
        """
        if prompt is not None or not messages:
            before, answered = [] if prompt is None else self.tokenizer.encode(prompt, special=True), _content(answer)
        else:
            text = self.tokenizer.render(messages, start=True)
            whole = self.tokenizer.render([*messages, answer], start=False)
            before = self.tokenizer.encode(text)
            answered = whole.removeprefix(text) if whole.startswith(text) else _content(answer)
        if not (ids := self._ended(self.tokenizer.encode(answered), finished)):
            raise InvalidRequestError("the answer holds no tokens", param="messages")
        return before, ids

    def _ended(self, ids: list[int], finished: bool) -> list[int]:
        """Cut `ids` after the first end token, or add one if there is none; without end token if not `finished`."""
        end = next((at for at, token in enumerate(ids) if token in self.end_ids), len(ids))
        if not finished:
            return ids[:end]
        own = getattr(self.tokenizer.tokenizer, "eos_token_id", None)
        return ids[: end + 1] if end < len(ids) or own is None else [*ids, int(own)]


def ids_of_end(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The token ids that end an answer, according to the model's generation settings and its tokenizer."""
    configured = getattr(generation_config, "eos_token_id", None)
    own = getattr(tokenizer, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in [*ids, own] if token is not None)


def _generation_config(folder: Any) -> Any:
    """The model's generation settings, or those that its configuration implies, as transformers finds them."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        pass
    try:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailableError(f"cannot read the configuration in {str(folder)!r}: {error}") from error


def _content(answer: Message) -> str:
    content = answer.get("content")
    if not isinstance(content, str) or not content:
        raise InvalidRequestError("the answer holds no text", param="messages")
    return content
