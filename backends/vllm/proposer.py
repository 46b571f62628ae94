"""Our replacement for the proposer of `vllm.v1.spec_decode.suffix_decoding`, vLLM's suffix method."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentspec.backends.engine_plugin.cache_router import close_at_exit, close_now, forget, new_policy, open_router
from agentspec.backends.engine_plugin.drafter import DraftTurn, ServerDrafter
from agentspec.backends.engine_plugin.request_state import RequestInfo, RequestState, client_fields
from agentspec.backends.engine_plugin.rounds import FailureLog
from agentspec.backends.engine_plugin.settings import enabled, read_settings
from agentspec.cache.index import DEPTH
from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError

logger = logging.getLogger(__name__)

ENGINE = "VLLM"
"""The name in the settings' environment variables."""
STRICT = f"{ENGINE}_STRICT"
"""The switch by which a request with a seed gets the text that it gets without drafts."""
SALT = "agentspec_cache_salt"
"""Attribute that carries a new request's `cache_salt` to the worker; without it a request gets a private cache."""

_UNKNOWN = "?"  # a salt that belongs to no tenant
_SAMPLE = re.compile(r"\d+_")  # vLLM writes the number of a sample (`n`) before the id of its request


def drafts_here(config: Any) -> bool:
    """Whether this rank drafts: only the first of a tensor-parallel group does.

    Raises `ConfigurationError` if the stages of a pipeline have schedulers of their own: the last alone has the drafts.
    """
    if _schedules_itself(config) and config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigurationError(
            "agentspec cannot draft under vLLM's external_launcher with pipeline parallelism: use another executor, or"
            " pipeline_parallel_size=1"
        )
    group = tensor_group()
    return group is None or group.rank_in_group == 0


def _schedules_itself(config: Any) -> bool:
    """Whether each rank has a scheduler of its own, as trainers start them, and all must decide alike."""
    return bool(config.parallel_config.distributed_executor_backend == "external_launcher")


def tensor_group() -> Any:
    """This rank's tensor-parallel group; None before there is one."""
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized  # pyright: ignore[reportMissingImports]

    return get_tp_group() if model_parallel_is_initialized() else None


def open_drafter(config: Any) -> ServerDrafter:
    """The drafter for a `VllmConfig`, with its cache open. Raises `ConfigurationError` and `CacheError`s."""
    model = config.model_config
    router = open_router(read_settings(ENGINE), model, "in the first model runner")
    least = float(config.speculative_config.suffix_decoding_min_token_prob)
    drafter = ServerDrafter(router.open, model.get_vocab_size(), chains=True, least=least, on_close=router.close)
    close_at_exit(drafter.close)
    return drafter


class SuffixDecodingProposer:
    """Drafts for a vLLM worker, which passes request ids. Its runner reports ended and new requests by `finished` and
    `scheduled`."""

    def __init__(self, vllm_config: Any) -> None:
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._seeded = not enabled(STRICT)  # this runner's verification gives seeded requests another text
        self._drafter: ServerDrafter | None = open_drafter(vllm_config) if drafts_here(vllm_config) else None
        group = tensor_group() if _schedules_itself(vllm_config) else None
        self._ranks = group if group and group.world_size > 1 else None  # of which all schedulers need the same drafts
        self._states: dict[str, RequestState] = {}
        self._failures = FailureLog(logger, "a request goes without drafts")
        self._skip = False  # the scheduler wants no drafts after the step that runs now
        listen_to_scheduler()
        keep_temperatures()

    def load_model(self, *_: object, **__: object) -> None:
        """Does nothing: there is no draft model."""

    def finished(self, output: Any, batch: Any) -> None:
        """End the requests that a step of the scheduler (`SchedulerOutput`) ends; `batch` still holds them.

        vLLM does not call `propose` in steps in which a request comes near the model's maximum length; the output of
        these steps is recorded here.
        """
        for identity in output.finished_req_ids:
            row, state = batch.req_id_to_index.get(identity), self._states.get(identity)
            if self._drafter and state and row is not None:
                with self._failures.caught():
                    length = int(batch.num_tokens_no_spec[row])
                    self._drafter.record(state, _copy(batch.token_ids_cpu[row, state.length : length]))
            self._end(identity)

    def scheduled(self, output: Any, batch: Any) -> None:
        """Begin the requests that a step begins; `batch` holds them already."""
        self._skip = bool(getattr(output, "skip_drafts", False))  # vLLM before 0.33 does not say
        if self._drafter is None:
            return
        for new in output.scheduled_new_reqs:
            self._end(new.req_id)
            row = batch.req_id_to_index.get(new.req_id)
            if row is None or new.prompt_embeds is not None or new.sampling_params is None:
                continue  # a prompt without token ids, or a request that generates no tokens
            with self._failures.caught():
                prompt = _copy(batch.token_ids_cpu[row, : len(new.prompt_token_ids)])
                info = request_info(new, self._max_length, self._seeded)
                self._states[new.req_id] = self._drafter.begin_state(prompt, info)

    def propose(
        self,
        num_speculative_tokens: int,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        *_: object,
        **__: object,
    ) -> list[list[int]]:
        """A draft for each row of the batch; empty for rows whose prompt is not processed yet, or if none is wanted."""
        drafts = self._drafts(num_speculative_tokens, input_batch, sampled_token_ids)
        return drafts if self._ranks is None else list(self._ranks.broadcast_object(drafts, src=0))

    def _drafts(
        self, num_speculative_tokens: int, input_batch: Any, sampled_token_ids: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._drafter is None:
            return drafts
        turns: dict[int, DraftTurn] = {}
        for row, sampled in enumerate(sampled_token_ids):
            state = self._states.get(input_batch.req_ids[row])
            if not sampled or state is None:
                continue
            length = int(input_batch.num_tokens_no_spec[row])
            # A preempted request may have more new tokens than were sampled in this step.
            tokens = input_batch.token_ids_cpu[row]
            wanted = state.request.speculation and not self._skip
            limit = min(num_speculative_tokens, self._max_length - length - 1) if wanted else 0
            turns[row] = draft_turn(state, tokens, length, len(sampled), limit)
        for row, chain in zip(turns, self._drafter.propose(list(turns.values())), strict=True):
            drafts[row] = chain.tokens
        return drafts

    def close(self) -> None:
        """Record everything so far, then stop. Idempotent."""
        if self._drafter is not None:
            close_now(self._drafter.close)

    def _end(self, identity: str) -> None:
        state = self._states.pop(identity, None)
        if state is not None and self._drafter is not None:
            self._drafter.end(state)


def draft_turn(state: RequestState, tokens: Any, length: int, sampled: int, limit: int) -> DraftTurn:
    """The draft turn of a request that has `length` tokens now, of which this step sampled the last `sampled`.

    `tokens` is its row of the batch. Where a load of KV blocks fails, the server has discarded what it sampled before.
    """
    state.rewind(length - sampled)
    fresh = _copy(tokens[state.length : length])
    return DraftTurn(state, fresh, tokens[max(0, length - DEPTH) : length], max(0, limit))


def _copy(row: Any) -> Tokens:
    return np.array(row, dtype=np.int32)


def request_info(new: Any, longest: int, seeded: bool = True) -> RequestInfo:
    """The fields of a `NewRequestData` that the drafter needs, for a model of `longest` tokens, at which outputs end
    too. Sampling with a seed is drafted for only if `seeded`.
    """
    sampling, adapter = new.sampling_params, new.lora_request
    most = longest - len(new.prompt_token_ids)
    stops = {sampling.eos_token_id, *(sampling.stop_token_ids or ())} - {None}
    sent, salt = client_fields(sampling.extra_args or {}), getattr(new, SALT, _UNKNOWN)
    sample = _SAMPLE.match(new.req_id)
    sent["group"] = "" if salt == _UNKNOWN else sent["group"] or (new.req_id[sample.end() :] if sample else "")
    sent["share"] &= salt != _UNKNOWN
    sent["speculation"] &= seeded or sampling.seed is None or sampling.temperature == 0
    return RequestInfo(
        salt=salt,
        adapter=adapter.lora_name if adapter else "",
        adapter_path=adapter.lora_path if adapter else "",
        stops=frozenset(stops),
        max_tokens=min(most, sampling.max_tokens or most),
        stop_strings=bool(sampling.stop),
        **sent,
    )


def offer_forget() -> None:
    """Give vLLM's workers `agentspec_new_policy` for `collective_rpc`, and `agentspec_forget` with the conditions of
    `SuffixCache.forget`.
    """
    from vllm.v1.worker.worker_base import WorkerBase  # pyright: ignore[reportMissingImports]

    WorkerBase.agentspec_forget = lambda self, **conditions: forget(**conditions)
    WorkerBase.agentspec_new_policy = new_policy


def keep_temperatures() -> None:
    """Correct vLLM 0.32 for CPUs, which verifies drafts with temperatures it never set: its kernel writes to a copy.

    Where that works, and on other devices, nothing changes.
    """
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample import rejection_sampler  # pyright: ignore[reportMissingImports]

    torch = rejection_sampler.torch  # vLLM's: the plug-in imports none before there is a runner

    def expand_batch_to_tokens(
        x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)

    given = torch.tensor([0.5, 0.25]), torch.tensor([2, 3], dtype=torch.int32), 3
    if current_platform.is_cpu() and not torch.equal(
        rejection_sampler.expand_batch_to_tokens(*given), expand_batch_to_tokens(*given)
    ):
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def listen_to_scheduler() -> None:
    """Make vLLM's model runners tell their proposer which requests a step begins and ends, and their own end."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # pyright: ignore[reportMissingImports]

    offer_forget()
    original, ended = GPUModelRunner._update_states, GPUModelRunner.shutdown
    if original.__module__ == __name__:
        return

    def _update_states(self: Any, scheduler_output: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if not isinstance(drafter, SuffixDecodingProposer):
            return original(self, scheduler_output)
        drafter.finished(scheduler_output, self.input_batch)
        result = original(self, scheduler_output)
        drafter.scheduled(scheduler_output, self.input_batch)
        return result

    def shutdown(self: Any) -> None:
        ended(self)
        if isinstance(drafter := getattr(self, "drafter", None), SuffixDecodingProposer):
            drafter.close()

    GPUModelRunner._update_states, GPUModelRunner.shutdown = _update_states, shutdown
