# SPDX-License-Identifier: Apache-2.0
"""Waiting for conditions, and free ports."""

import contextlib
import inspect
import itertools
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import anyio

T = TypeVar("T")

_POLL = 0.01  # seconds


# Below the range from which kernels take the ports of outgoing connections. One of those could have the port of a
# server that is being started again, and a client that tries such a port meanwhile can even connect to itself.
_PORTS = range(12_000, 32_000)

# Who asks has a part of them for himself, by turns: a port that was free a moment ago is not given to somebody else.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
_MINE = _PORTS[int(_WORKER) :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
_turns = itertools.cycle(random.SystemRandom().sample(_MINE, len(_MINE)))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago, and that no outgoing connection takes."""
    while True:
        port = next(_turns)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def eventually(condition: Callable[[], T | None], timeout: float = 30.0, *, what: str = "") -> T:
    """Call ``condition`` until its value is true and return that; AssertionError after ``timeout`` seconds.

    An AssertionError inside ``condition`` counts as not yet, and is the cause of the one that is raised.
    """
    deadline = time.monotonic() + timeout
    while True:
        value, cause = _try(condition)
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_complaint(condition, what, timeout, value)) from cause
        time.sleep(_POLL)


@overload
async def aeventually(condition: Callable[[], Awaitable[T | None]], timeout: float = 30.0, *, what: str = "") -> T: ...


@overload
async def aeventually(condition: Callable[[], T | None], timeout: float = 30.0, *, what: str = "") -> T: ...


async def aeventually(condition: Callable[[], Any], timeout: float = 30.0, *, what: str = "") -> Any:
    """``eventually`` for async tests; ``condition`` may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        value, cause = _try(condition)
        if inspect.isawaitable(value):
            try:
                value = await value
            except AssertionError as error:
                value, cause = None, error
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_complaint(condition, what, timeout, value)) from cause
        await anyio.sleep(_POLL)


def _try(condition: Callable[[], T]) -> tuple[T | None, AssertionError | None]:
    try:
        return condition(), None
    except AssertionError as error:
        return None, error


def _complaint(condition: Callable[[], object], what: str, timeout: float, value: object) -> str:
    return f"{what or condition} was not so within {timeout} s; last value {value!r}"
