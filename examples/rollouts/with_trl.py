"""GRPO with TRL: rollouts that agentspec drafts inside the trainer's vLLM, and the tokens a step that this gives.

pip install '.[vllm]' trl
python examples/rollouts/with_trl.py Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from typing import Any

FEWER = [[1, 8, 7], [9, 32, 3], [33, 64, 1]]  # the more samples run; 64 and more get 1
CONFIG = {"method": "ngram_gpu", "num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": FEWER}
os.environ.setdefault("AGENTSPEC_VLLM_SPECULATIVE_CONFIG", json.dumps(CONFIG))  # before vLLM starts

from datasets import Dataset  # noqa: E402  # pyright: ignore[reportMissingImports]
from prometheus_client import REGISTRY  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402  # pyright: ignore[reportMissingImports]

PROMPTS = [f"What is {first} times {second}? Answer with the number alone." for first, second in ((7, 8), (12, 9))]


def brevity(completions: list[str], **_: Any) -> list[float]:
    return [1 / (1 + len(text)) for text in completions]


def accepted() -> float:
    """Drafted tokens of this process that were accepted."""
    name = "agentspec_drafter_accepted_tokens_total"
    return sum(sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == name)


def show_rollouts(trainer: GRPOTrainer) -> None:
    """Print after each batch of rollouts how many tokens a sample got in a step."""
    engine = trainer.vllm_generation.llm
    generate = engine.generate

    def generate_and_show(*args: Any, **kwargs: Any) -> Any:
        before, answers = accepted(), generate(*args, **kwargs)
        tokens = sum(len(sample.token_ids) for answer in answers for sample in answer.outputs)
        print(f"{tokens} tokens, {tokens / (tokens - accepted() + before):.2f} a step")
        return answers

    engine.generate = generate_and_show


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--length", type=int, default=64, help="most tokens of a sample")
    given = parser.parse_args()
    config = GRPOConfig(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=512,
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=given.length,
        max_steps=given.updates,
        output_dir="rollouts",
        save_strategy="no",
        report_to=[],
    )
    prompts = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = GRPOTrainer(given.model, reward_funcs=brevity, args=config, train_dataset=prompts)
    show_rollouts(trainer)
    trainer.train()


if __name__ == "__main__":
    main()
