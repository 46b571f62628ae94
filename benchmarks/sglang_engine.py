"""One SGLang engine with a small random model answers prompts that repeat themselves, twice, and writes what that took.

It runs in SGLang's environment, as `python -m agentspec.benchmarks.sglang_engine none|NGRAM|agentspec MODEL OUT`;
MODEL is a folder that is made if it is not there. Its answers are its own, equal for all drafters but for near-ties.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from agentspec.benchmarks.vllm.bench import FOLLOW, SPREAD, TOKENS, prompts
from agentspec.benchmarks.vllm.shapes import answering_model

TREE = 32  # nodes of a tree, with the last token of the text
NEIGHBOURS = 32  # each token is likely to be followed by the next of so many


def main() -> None:
    drafter, model, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    os.environ["AGENTSPEC_SGLANG"] = "on" if drafter == "agentspec" else "off"
    if not (model / "model.safetensors").exists():
        write_model(model)
    import sglang  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"model_path": str(model), "skip_tokenizer_init": True, "random_seed": 0}
    if drafter != "none":
        options |= {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": TREE}
    engine = sglang.Engine(**options, **json.loads(os.environ.get("SGLANG_OPTIONS", "{}")))
    passes = [answered(engine) for _ in range(2)]
    engine.shutdown()
    out.write_text(json.dumps({"drafter": drafter, "version": sglang.__version__, "passes": passes}))


def write_model(folder: Path) -> None:
    """Weights of the shape that answers in the comparison of vLLM's drafters, so that texts repeat."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    answering_model(folder, "cuda")
    config = LlamaConfig.from_pretrained(folder, initializer_range=SPREAD)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    table, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    table /= SPREAD
    place = torch.arange(len(table))
    head[place // NEIGHBOURS * NEIGHBOURS + (place + 1) % NEIGHBOURS] += FOLLOW * table
    model.bfloat16().save_pretrained(folder)


def answered(engine: Any) -> dict[str, Any]:
    """One request at a time: seconds, steps after the first tokens, and token ids of all answers."""
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    started = time.perf_counter()
    found = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts()]
    steps = sum(answer["meta_info"].get("spec_verify_ct") or TOKENS - 1 for answer in found)
    tokens = [answer["output_ids"] for answer in found]
    return {"seconds": time.perf_counter() - started, "steps": steps, "tokens": tokens}


if __name__ == "__main__":
    main()
