"""The HTTP client: only this folder imports an HTTP library, so that another one is a change in one place."""

from agentspec.backends.http.endpoint import Endpoint
from agentspec.backends.http.errors import decode_json
from agentspec.backends.http.proxies import Transport
from agentspec.backends.http.response import MAX_LIST_BYTES, MEMBER_HEADER, Room, UpstreamResponse

__all__ = ["MAX_LIST_BYTES", "MEMBER_HEADER", "Endpoint", "Room", "Transport", "UpstreamResponse", "decode_json"]
