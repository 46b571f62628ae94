"""GRPO with verl, whose rollouts agentspec drafts inside its vLLM servers.

pip install '.[vllm]' verl
python examples/rollouts/with_verl.py Qwen/Qwen2.5-0.5B-Instruct trainer.total_training_steps=10
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

PROMPTS = [f"What is {first} times {second}? Answer with the number alone." for first, second in ((7, 8), (12, 9))]
FEWER = "[[1,8,7],[9,32,3],[33,64,1]]"  # the more samples run; 64 and more get 1
DRAFTS = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config="
    f"{{method:ngram_gpu,num_speculative_tokens:7,num_speculative_tokens_per_batch_size:{FEWER}}}"
)


def brevity(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    return 1 / (1 + len(solution_str))


def write_prompts(file: Path) -> None:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    other = {"data_source": "products", "ability": "math", "reward_model": {"style": "rule", "ground_truth": ""}}
    Dataset.from_list([{"prompt": [{"role": "user", "content": text}], **other} for text in PROMPTS]).to_parquet(file)


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog="Further arguments go to verl.")
    parser.add_argument("model")
    given, further = parser.parse_known_args()
    prompts = Path("rollouts.parquet").resolve()
    write_prompts(prompts)
    sys.argv[1:] = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        f"data.train_batch_size={len(PROMPTS)}",
        f"actor_rollout_ref.model.path={given.model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={len(PROMPTS)}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        DRAFTS,
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "reward.custom_reward_function.name=brevity",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console]",
        *further,
    ]
    from verl.trainer.main_ppo import main as train  # pyright: ignore[reportMissingImports]

    train()


if __name__ == "__main__":
    main()
