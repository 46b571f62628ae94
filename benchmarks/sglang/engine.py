"""One SGLang engine gives the recorded answers of calls, one call at a time, and writes what each took.

It runs in SGLang's environment, as `python -m agentspec.benchmarks.sglang.engine agentspec --traces FILE --tokenizer
FOLDER --json OUT`. The weights are random, the model does all of its work, but what it says is the record. What drafts
begins empty and learns the calls as they come. Engines with other drafters are runs of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentspec.benchmarks.gpu.random_model import CONTEXT
from agentspec.benchmarks.traces import load_encoder, read_calls
from agentspec.benchmarks.vllm.shapes import scripted_model
from agentspec.recordings.replay import EncodedCall

NODES = 32  # of a tree, with the last token of the text
CHAIN = {"speculative_num_draft_tokens": 8, "speculative_ngram_max_bfs_breadth": 1}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "NGRAM": {"speculative_num_draft_tokens": NODES},
    "agentspec": {"speculative_num_draft_tokens": NODES},
    "agentspec, chains": CHAIN,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", choices=DRAFTERS)
    parser.add_argument("--traces", type=Path, action="append", required=True, help="a file of recorded calls")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json for them")
    parser.add_argument("--json", type=Path, required=True, help="where the results go")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--seconds", type=float, default=150.0, help="no call begins later")
    parser.add_argument("--calls", type=int, default=100, help="the first calls of each file")
    given = parser.parse_args()
    encode = load_encoder(given.tokenizer)
    calls = [(path, call) for path in given.traces for call in read_calls(path, encode, given.calls) if fits(call)]
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
        mark = write_model(Path(folder), given.shape, [call for _, call in calls])
        engine = started(Path(folder), given.drafter)
        try:
            found, until = list[dict[str, Any]](), time.monotonic() + given.seconds
            for number, (path, call) in enumerate(calls):
                if time.monotonic() < until:
                    found.append({"file": path.name.split(".")[0], **answered(engine, call, mark + number)})
        finally:
            engine.shutdown()
    described = {"drafter": given.drafter, "shape": given.shape, "device": device(), "of": len(calls)}
    given.json.write_text(json.dumps({**described, "calls": found}))


def fits(call: EncodedCall) -> bool:
    return len(call.prompt) + len(call.response) + NODES < CONTEXT


def write_model(folder: Path, shape: str, calls: Sequence[EncodedCall]) -> int:
    """The model whose scripts are the calls. Returns the token that marks the first."""
    texts = [np.concatenate([call.prompt, call.response]) for call in calls]
    mark = 1 + max(int(text.max()) for text in texts)
    scripts = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for script, text in zip(scripts, texts, strict=True):
        script[: len(text)] = text
    np.save(folder / "scripts.npy", scripts)
    config = scripted_model(folder, shape, mark + len(texts)) / "config.json"
    added = {"architectures": ["ForcedLlamaForCausalLM"], "scripts": f"{folder}/scripts.npy", "mark": mark}
    config.write_text(json.dumps(json.loads(config.read_text()) | added))
    return mark


def started(model: Path, drafter: str) -> Any:
    """The engine; further options are in SGLANG_OPTIONS, as JSON."""
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = __name__.rpartition(".")[0]
    os.environ["AGENTSPEC_SGLANG"] = "on" if drafter.startswith("agentspec") else "off"
    from sglang import Engine  # pyright: ignore

    options = {"model_path": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "random_seed": 0}
    drafting = {"speculative_algorithm": "NGRAM", **DRAFTERS[drafter]} if DRAFTERS[drafter] else {}
    return Engine(**options, **drafting, **json.loads(os.environ.get("SGLANG_OPTIONS", "{}")))


def answered(engine: Any, call: EncodedCall, mark: int) -> dict[str, Any]:
    """Seconds of a call, the steps after its first token, and whether its answer was the record."""
    count, custom = len(call.response), {"custom_params": {"agentspec_session": call.session}}
    sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True, **custom}
    started = time.perf_counter()
    found = engine.generate(input_ids=[mark, *call.prompt[1:].tolist()], sampling_params=sampling)
    seconds = time.perf_counter() - started
    steps = found["meta_info"].get("spec_verify_ct") or count - 1
    equal = found["output_ids"] == call.response.tolist()
    return {"seconds": seconds, "tokens": count, "steps": steps, "equal": equal}


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main()
