"""Run by a Python with vLLM and TRL: a trainer's program, with its arguments, on a CPU.

vLLM packs the weights of linear layers for a CPU and drops them, so that a trainer could load none later.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial
from typing import Any

import torch
import trl  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding  # pyright: ignore[reportMissingImports]


def keep_weights(layer: Any, remove_weight: bool = False) -> None:
    layer.cpu_linear = torch.nn.functional.linear


for module in (linear, utils, vocab_parallel_embedding):
    module.dispatch_cpu_unquantized_gemm = keep_weights
trl.GRPOConfig = partial(trl.GRPOConfig, use_cpu=True, bf16=False)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
