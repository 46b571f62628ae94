"""Chooses a model's device and number type, and moves values to the device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.errors import ConfigurationError

WAITS = "called a synchronizing CUDA operation"
NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
DEVICE_FAILED = ("CUDA error", "HIP error", "STATUS_EXECUTION_FAILED", "STATUS_INTERNAL_ERROR", "STATUS_MAPPING_ERROR")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device named `name`; `auto` is a CUDA device if there is one, else the CPU. Raises `ConfigurationError` for
    a device that cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {name!r} cannot be used here: {reason}", param="device") from error
    if device.type == "meta":
        raise ConfigurationError("device 'meta' holds no numbers: use auto, cpu, cuda or mps", param="device")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype named `name`. `auto` is float32 on a CPU, whose bfloat16 kernels are slow or missing; elsewhere it is
    bfloat16, or float16 if the device only emulates bfloat16. Raises `ConfigurationError` for an unknown name, and for
    float16 on a CPU.
    """
    if name == "auto":
        return _best_dtype(device)
    if name not in DTYPES:
        raise ConfigurationError(f"dtype must be auto or one of {sorted(DTYPES)}, not {name!r}", param="dtype")
    if name == "float16" and device.type == "cpu":
        message = "float16 has no fast kernels on a CPU: use float32, or bfloat16 to halve the memory"
        raise ConfigurationError(message, param="dtype")
    return DTYPES[name]


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    native = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float16


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that an allocation failed, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_MEMORY)


def is_device_error(error: BaseException) -> bool:
    """Whether the device itself failed: then this process can compute nothing on it any more. An illegal access or a
    failed assertion poisons a CUDA context, and every later call fails as well.
    """
    if is_out_of_memory(error):
        return False
    signs = isinstance(error, RuntimeError) and any(sign in str(error) for sign in DEVICE_FAILED)
    return signs or isinstance(error, torch.AcceleratorError)


def is_async_device(device: torch.device) -> bool:
    """Whether the device computes concurrently with the host, which then loses time whenever it waits for a result."""
    return device.type != "cpu"


def to_device(values: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """Copy host values to `device`. A copy to a CUDA device uses pinned memory, so that the host does not wait."""
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished everything that this thread's stream queued. Waiting for the whole device
    would break a graph that another thread is recording.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        return _free_host_memory()
    return None


def _free_host_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # only Linux tells it so
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) << 10


def choose_kernels(device: torch.device) -> None:
    """Disable cuDNN attention for the whole process, since it makes a new plan for every number of slots."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


_COUNTING = threading.Lock()  # torch and Python have one mode and one list of warnings for the whole process


def count_host_syncs(work: Callable[[], object]) -> int:
    """How often the host waits for a CUDA device while this thread runs `work`, as far as torch reports it.

    The waits of other threads, such as another engine's, are not counted, and their other warnings are shown as usual.
    """
    own, waits = threading.get_ident(), 0
    with _COUNTING, warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def hear(message: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal waits
            if WAITS not in str(message):
                show(message, *args, **kwargs)
            elif threading.get_ident() == own:
                waits += 1

        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits
