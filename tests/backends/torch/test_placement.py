"""Devices and number formats: what `auto` means, and what is refused."""

from __future__ import annotations

import pytest
import torch

from agentspec.backends.torch.placement import choose_device, choose_dtype
from agentspec.errors import ConfigurationError

CPU = torch.device("cpu")


def test_auto_means_float32_on_a_cpu() -> None:
    assert choose_dtype("auto", choose_device("cpu")) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("native", "want"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_takes_what_a_device_computes_natively(
    monkeypatch: pytest.MonkeyPatch, native: bool, want: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert choose_dtype("auto", torch.device("cuda")) == want
    assert choose_dtype("auto", torch.device("mps")) == torch.bfloat16


@pytest.mark.parametrize("name", ["no-such", "cuda:99", "meta"])
def test_devices_that_cannot_be_used_are_configuration_errors(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        choose_device(name)
    assert caught.value.param == "device"


@pytest.mark.parametrize(("name", "advice"), [("int8", "must be auto or one of"), ("float16", "bfloat16 to halve")])
def test_formats_that_cannot_be_used_are_configuration_errors(name: str, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=advice) as caught:
        choose_dtype(name, CPU)
    assert caught.value.param == "dtype"
