"""A speculator for vLLM's Model Runner V2 that drafts from own text and from passages that the host retrieved.

Mixed into vLLM's n-gram speculator, which keeps the texts of all requests on the device. Nothing here waits for the
device or for a search: the retriever's thread copies what a step sampled to the host once it is computed, and has the
passages that it found on the device before the engine's thread gets to know of them. A step costs the latter one kernel
and one message to that thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from agentspec.backends.engine_plugin.cache_router import close_now
from agentspec.backends.engine_plugin.request_state import Deletions
from agentspec.backends.engine_plugin.rounds import FailureLog
from agentspec.backends.vllm.proposer import request_info, tensor_group
from agentspec.backends.vllm.runner_v2 import matching, retrieval
from agentspec.backends.vllm.runner_v2.passages import NO_TOKEN, PassageShape, shape_for
from agentspec.backends.vllm.runner_v2.retrieval import Packed, PassageRequest, PassageRetriever, SampledTokens

logger = logging.getLogger(__name__)


class PassageSpeculator:
    """The methods that take the place of those of vLLM's `NgramGPUSpeculator`, to be mixed in before it.

    `begin` and `finish` are called with the scheduler's output after the runner's own handling of it.
    """

    drafted = 0  # tokens of the last drafts that are verified
    seeded = True  # whether requests with a seed have drafts
    max_num_reqs: int
    max_model_len: int
    num_speculative_steps: int
    req_states: Any
    device: torch.device

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)  # type: ignore[call-arg]  # of the class it is mixed into
        self.open_cache(vllm_config)

    def open_cache(self, vllm_config: Any, beside: str = "") -> None:
        """Open the retriever, and begin without requests. Raises `ConfigurationError` and `CacheError`s."""
        self._shape = shape_for(self.num_speculative_steps)
        self._retriever = retrieval.open_retriever(vllm_config, self._shape, f"in Model Runner V2{beside}")
        self._ranks = tensor_group()
        self._requests: dict[str, PassageRequest] = {}
        self._silent: set[PassageRequest] = set()  # for which no drafts are wanted
        self._failures = FailureLog(logger, "a request goes without drafts")
        drafts = (self.max_num_reqs, self.num_speculative_steps)
        self.drafts = torch.zeros(drafts, dtype=torch.int64, device=self.device)
        given = getattr(vllm_config, "speculative_config", None)
        self.enable_adaptive_verification = bool(getattr(given, "enable_adaptive_verification", False))
        self.draft_token_confidence_probs = torch.zeros(drafts, dtype=torch.float32, device=self.device)
        self._confidence = matching.MatchConfidence(*drafts, self.device)
        self._drafts: dict[int, torch.Tensor] = {}  # the first rows of `drafts`
        if self._retriever is not None:  # one row more for requests that the runner has none for
            self._found = self._retriever.hold(self.max_num_reqs + 1, self.device)  # whose passages were taken last
            self._passages = [self._found.passages]  # by the runner's row: what a step uses, after those before it
        self._deletions = Deletions.count  # before these were searched for
        self._ended = 0  # requests
        self._over = dict[int, int]()  # rows of those that `_found` does not know to be over, with their number
        self._spare = deque[Packed]()
        self._spare.extend([self._memory() for _ in range(4)])  # for steps on their way, of which there are fewer
        self._matches = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)  # before the last drafts
        self._chances = torch.zeros(drafts, dtype=torch.int32, device=self.device)  # of these
        self._match = _matcher(self, self._shape)

    def begin(self, new_requests: Sequence[Any]) -> None:
        """Follow requests (`NewRequestData`) that a step begins or resumes."""
        if self._retriever is None or not new_requests:
            return
        for new in new_requests:
            self._end(new.req_id)
            row = self.req_states.req_id_to_index.get(new.req_id, self.max_num_reqs)
            self._passages[-1][row].fill_(NO_TOKEN)
            prompt, text = new.prompt_token_ids, new.prefill_token_ids
            if prompt is None or new.prompt_embeds is not None or new.sampling_params is None:
                continue  # a prompt without token ids, or a request that generates no tokens
            with self._failures.caught():
                whole, info = np.array(text, dtype=np.int32), request_info(new, self.max_model_len, self.seeded)
                start, output = whole[: len(prompt)], whole[len(prompt) :]  # the latter from before it was preempted
                request = self._retriever.begin(start, info, row, output)
                self._requests[new.req_id] = request
                if not info.speculation:
                    self._silent.add(request)

    def finish(self, identities: Iterable[str], preempted: Iterable[str] = ()) -> None:
        """End requests that are over, or `preempted`, which begin again later, once all their tokens have arrived."""
        for identity in preempted:
            if (request := self._requests.get(identity)) is not None:
                request.preempted = identity not in identities
            self._end(identity)
        for identity in identities:
            self._end(identity)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *_: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Draft for each request of the batch, of which the server verifies so many tokens. The other arguments are for
        drafters with a model.
        """
        count = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        requests = input_batch.num_reqs
        if (drafts := self._drafts.get(requests)) is None:
            drafts = self._drafts[requests] = self.drafts[:requests]
        if dummy_run:
            return drafts
        if self._retriever is not None:
            self._draft(self._retriever, input_batch, num_sampled, drafts, count)
        if self.enable_adaptive_verification:
            self.shared(self.draft_token_confidence_probs)
        return self.shared(drafts)

    def shared(self, drafts: torch.Tensor) -> torch.Tensor:
        """The first rank's drafts on all ranks that compute a model together, as they depend on the host's timing."""
        if self._ranks is not None and self._ranks.world_size > 1:
            self._ranks.broadcast(drafts, src=0)
        return drafts

    def close(self) -> None:
        """Record all tokens that were sampled, then stop. Idempotent."""
        if self._retriever is not None:
            close_now(self._retriever.close)

    def _draft(
        self,
        retriever: PassageRetriever,
        batch: Any,
        sampled: torch.Tensor,
        drafts: torch.Tensor,
        count: int,
    ) -> None:
        requests = list(map(self._requests.get, batch.req_ids))
        own, lengths = self.req_states.all_token_ids.gpu, self.req_states.total_len.gpu
        ends, _ = packed = self._memory()
        try:
            self._upload(retriever)
            texts = own, lengths, batch.idx_mapping, sampled
            self._match(*texts, self._passages[-1], drafts, ends, self._matches, self._chances)
            silent = [row for row, request in enumerate(requests) if request in self._silent] if self._silent else []
            if silent:
                drafts[silent] = 0  # no guess
            if self.enable_adaptive_verification:
                if silent:
                    self._matches[silent] = 0
                match, chances, newest = (kept[: len(drafts)] for kept in (self._matches, self._chances, ends[:, -1]))
                rows = batch.idx_mapping[: len(drafts)].long()
                known = rows, lengths.index_select(0, rows)
                self._confidence.observe(*known, sampled, newest)
                self.draft_token_confidence_probs[: len(drafts)] = self._confidence.of(*known, match, drafts, chances)
        except Exception as error:
            self._failures.report(error)
            self.draft_token_confidence_probs.zero_()
            drafts.zero_()  # the runner has marked by -1 there what it did not verify, which is no token
            rows = batch.idx_mapping[: len(drafts)].long()
            ends[: len(drafts)] = matching.last_sampled(own, lengths, rows, sampled, ends.shape[1] - 1)
        self._send(retriever, packed, requests, count)

    def _upload(self, retriever: PassageRetriever) -> None:
        """Have the device hold the passages that were found since the last step. None that were found before text was
        deleted, which may hold it.
        """
        if self._deletions != Deletions.count:
            self._deletions = Deletions.count
            self._passages.append(torch.full_like(self._passages[-1], NO_TOKEN))
            for request in self._requests.values():
                retriever.after(None, partial(retriever.want, request))
        found = retriever.found
        if found is self._found or found.deletions != self._deletions:
            return
        self._over = {row: ended for row, ended in self._over.items() if ended > found.ends}
        for row in self._over:
            found.passages[row].fill_(NO_TOKEN)
        self._found = found
        self._passages.append(found.passages)

    def _memory(self) -> Packed:
        """Memory of the device for the ends of texts in one step, and an event there."""
        if self._spare:
            return self._spare.pop()
        events: Any = torch.cuda.Event  # untyped in torch
        size = (self.max_num_reqs, self.num_speculative_steps + 2)
        ends = torch.zeros(size, dtype=torch.int32, device=self.device)
        return ends, events(blocking=True) if ends.is_cuda else None

    def _send(
        self, retriever: PassageRetriever, packed: Packed, requests: Sequence[PassageRequest | None], count: int
    ) -> None:
        """Have a step's tokens read once the device has computed them; `count` are drafted for the next."""
        sampled = SampledTokens(packed, self._spare, self._passages)
        self._passages = self._passages[-1:]
        retriever.after(sampled, partial(self._take, retriever, sampled, requests, self.drafted))
        self.drafted = count

    def _take(
        self,
        retriever: PassageRetriever,
        sampled: SampledTokens,
        requests: Sequence[PassageRequest | None],
        drafted: int,
    ) -> None:
        """Take in the tokens of a step, which verified `drafted` tokens. In the retriever's thread."""
        tokens, _ = sampled.take(len(requests))
        news = zip(requests, tokens, strict=True)
        retriever.advance(((request, tokens) for request, tokens in news if request), drafted)

    def _end(self, identity: str) -> None:
        request = self._requests.pop(identity, None)
        if request is not None and self._retriever is not None:
            self._ended += 1
            self._over[request.row] = self._ended
            self._silent.discard(request)
            self._retriever.after(None, partial(self._retriever.end, request))


def _matcher(speculator: PassageSpeculator, shape: PassageShape) -> Callable[..., None]:
    """The kernel, or plain torch on a CPU: writes the drafts, the ends of the texts, how many tokens match before each
    draft, and the chances of its tokens.
    """
    if speculator.device.type == "cpu":

        def match(*given: Any) -> None:
            own, lengths, rows, sampled, passages, drafts, last, *others = given
            count = len(drafts)
            rows = rows[:count].long()
            texts, ends, found = (held.index_select(0, rows) for held in (own, lengths, passages))
            last[:count] = matching.last_sampled(own, lengths, rows, sampled, last.shape[1] - 1)
            found = found.view(-1, 2, shape.rows, shape.width)
            new = matching.draft(texts, ends, found, shape.overlap, drafts.shape[1])
            for kept, made in zip((drafts, *others), new, strict=True):
                kept[:count] = made

        return match
    from agentspec.backends.vllm.runner_v2.matching_triton import PassageMatcher

    sizes = (speculator.max_num_reqs, speculator.max_model_len, speculator.num_speculative_steps)
    return PassageMatcher(*sizes, shape, speculator.device).draft
