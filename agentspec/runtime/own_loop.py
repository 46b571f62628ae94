"""Runs asynchronous work on behalf of a blocking function that may itself run in an event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_on_own_loop(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end on a new event loop, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(make())).result()
