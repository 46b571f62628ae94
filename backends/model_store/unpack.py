"""`python -m agentspec.backends.model_store.unpack FILE.gguf FOLDER`: float32 safetensors, with the tokenizer.

Nothing else imports this module; `convert.py` runs it as a program.
"""

from __future__ import annotations

import sys
from pathlib import Path


def unpack(gguf: Path, target: Path) -> None:
    """Write the tokenizer and the float32 weights of `gguf` to the folder `target`, as `save_pretrained` does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        local_files_only=True,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer.save_pretrained(str(target))
    model.save_pretrained(str(target))


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
