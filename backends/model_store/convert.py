"""Converts a GGUF file or an archive to a Hugging Face folder, once: unpacking takes long, loading the result does not.

Weights are dequantised to float32: packed kernels make one forward over two tokens slower than two forwards over one,
so that verifying drafts would not pay. The conversion runs in a child program, so that its memory is returned at the
end and its libraries' messages do not mix with ours.
"""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path, PurePosixPath

from agentspec.backends.model_store.store import announce, compute_sha256, file_sha256, run, scratch
from agentspec.errors import ModelUnavailableError, install_advice

FORMAT = 1
_MANIFEST = "agentspec.json"
_KEPT = (".safetensors", ".json", ".txt")


def prepare(source: Path, sha256: str, folder: Path, *, show: bool, inside: str | None = None) -> None:
    """Convert `source` into `folder`, whole or not at all. The caller holds the lock of `folder.parent`.

    `source` is a GGUF file, or with `inside` an archive that holds the model in that folder. Raises
    `ModelUnavailableError` if a GGUF file cannot be read as a decoder-only language model.
    """
    announce(f"preparing {source.name} (once)", show=show)
    with scratch(folder.parent) as temporary:
        result = temporary / "result"
        if inside is None:
            _unpack(source, result)
        else:
            _extract(source, inside, result)
        files = {path.name: compute_sha256(path) for path in sorted(result.iterdir())}
        manifest = {"format": FORMAT, "source_sha256": sha256, "files": files}
        (result / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if folder.exists():
            folder.rename(temporary / "damaged")
        result.rename(folder)


def is_prepared(folder: Path, sha256: str, *, fresh: bool = False) -> bool:
    """Whether `folder` holds the undamaged conversion of the file with that hash; `fresh` reads every byte again."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return (
            manifest["format"] == FORMAT
            and manifest["source_sha256"] == sha256
            and all(file_sha256(folder / name, fresh=fresh) == known for name, known in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _extract(archive: Path, inside: str, target: Path) -> None:
    """Extract weights, configuration and tokenizer from the folder `inside` of `archive`, without its subfolders."""
    target.mkdir()
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            path = PurePosixPath(name)
            if str(path.parent) == inside and path.suffix in _KEPT:
                with opened.open(name) as member, (target / path.name).open("wb") as file:
                    shutil.copyfileobj(member, file, 1 << 20)


def _unpack(gguf: Path, target: Path) -> None:
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, str(gguf), str(target)]
    result = run(command)
    if result.returncode == 0:
        return
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    cause = lines[-1].strip()
    if cause.startswith(("ImportError", "ModuleNotFoundError")):
        cause += f"; for GGUF files, {install_advice('torch')}"
    raise ModelUnavailableError(f"cannot prepare {str(gguf)!r} as a language model: {cause}")


def unpack(gguf: Path, target: Path) -> None:
    """Write the tokenizer and the float32 weights of `gguf` to the folder `target`, as `save_pretrained` does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    dequantized = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), **source, **dequantized)
    tokenizer.save_pretrained(str(target))
    model.save_pretrained(str(target))


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
