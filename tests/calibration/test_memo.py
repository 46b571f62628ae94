from __future__ import annotations

import pytest

from agentspec.calibration.memo import CallMemo
from agentspec.errors import UpstreamError
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.testing import FakeBackend
from agentspec.types import GenerateRequest


@pytest.mark.anyio
async def test_a_call_that_fails_is_not_remembered() -> None:
    answers = iter([UpstreamError("gone"), "one\n\n"])
    memo = CallMemo()
    model = memo.roles({"base": ModelRole("base", FakeBackend(lambda request: next(answers)), "m")})["base"]
    with pytest.raises(UpstreamError):
        [delta async for delta in model.backend.generate(GenerateRequest("m", text="?"))]
    for _ in range(2):
        said = "".join([delta.text async for delta in model.backend.generate(GenerateRequest("m", text="?"))])
        assert said == "one\n\n"
    assert (memo.made, memo.remembered) == (1, 1)
