"""What the tests of Triton kernels share.

Triton reads `TRITON_INTERPRET` when it is imported, so that the tests of a file run again in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WITH_TRITON = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")]
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="not in the process with the interpreter")


def run_interpreted(file: str, passed: int) -> None:
    """Run the slow tests of `file` by the interpreter, of which so many have to pass."""
    without = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the latter warns in a worker's process
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "slow", *without, file]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and f"{passed} passed" in done.stdout, done.stdout + done.stderr


def compile_kernel(kernel: Any, types: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    """Compile `kernel` for a GPU of compute capability 9.0, for which Triton needs none. Arguments without a type are
    constants, whose values are in `sizes`.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    constants = {(kernel.arg_names.index(size),): value for size, value in sizes.items() if size in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
