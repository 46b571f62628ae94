"""The headers that tell clients where their key stands: as OpenAI's, and on Anthropic's routes as Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from agentspec.proxy.metering.limiter import Standing

Headers = tuple[tuple[bytes, bytes], ...]


def openai_headers(standing: Standing) -> Headers:
    """`x-ratelimit-limit-requests`, `-remaining-` and `-reset-`, with times such as `6m0s`."""
    return tuple(
        (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
        for kind, limit, left, reset in standing
        for name, value in (("limit", str(limit)), ("remaining", str(left)), ("reset", duration(reset)))
    )


def anthropic_headers(standing: Standing, time: float) -> Headers:
    """`anthropic-ratelimit-requests-limit`, `-remaining` and `-reset`, a moment as in RFC 3339; it is `time` now, in
    seconds since 1970. Of two limits on tokens it is the one of which less is left.
    """
    most_left_first = sorted(standing, key=lambda one: one[2], reverse=True)
    tightest = {one[0].removesuffix("-day"): one for one in most_left_first}
    return tuple(
        (f"anthropic-ratelimit-{kind}-{name}".encode(), value.encode())
        for kind, (_, limit, left, reset) in sorted(tightest.items())
        for name, value in (("limit", str(limit)), ("remaining", str(left)), ("reset", _moment(time, reset)))
    )


def duration(seconds: int) -> str:
    """As Go writes durations: `0s`, `59s`, `6m0s`, `23h59m59s`."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _moment(time: float, seconds: int) -> str:
    moment = datetime.fromtimestamp(int(time), UTC) + timedelta(seconds=seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
