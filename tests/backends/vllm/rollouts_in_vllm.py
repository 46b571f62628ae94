"""Run by a Python with vLLM, as one or each of several ranks of a trainer: samples of an engine in this process, and
the same again after its weights are reported as new. Writes each round's texts, and how many drafted tokens were right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

PROMPTS = ["Two plus two", "{" * 20, "The capital of France is"]


def main(model: str, ranks: str, out: str) -> None:
    llm = LLM(
        model, dtype="float32", max_model_len=512, max_num_seqs=8, enforce_eager=True, disable_log_stats=False,
        tensor_parallel_size=int(ranks), distributed_executor_backend="external_launcher",
    )  # fmt: skip
    more = {"seed": 7, "max_tokens": 32, "ignore_eos": True}
    sampling = [SamplingParams(n=2 if t else 1, temperature=t, **more) for t in (0.0, 0.3, 1.0)]
    rounds = []
    for _ in range(3):
        outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
        rounds.append([list(sample.token_ids) for output in outputs for sample in output.outputs])
        llm.reset_prefix_cache()  # as a trainer does when it has loaded new weights
    accepted = sum(one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_accepted_tokens")
    Path(out).write_text(json.dumps({"rounds": rounds, "accepted": accepted}))


main(*sys.argv[1:])
