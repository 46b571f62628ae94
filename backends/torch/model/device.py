"""What differs between devices: errors, waiting, and how values get there."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
DEVICE_FAILED = ("CUDA error", "HIP error", "STATUS_EXECUTION_FAILED", "STATUS_INTERNAL_ERROR", "STATUS_MAPPING_ERROR")


def is_out_of_memory(error: BaseException) -> bool:
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
