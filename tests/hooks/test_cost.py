# SPDX-License-Identifier: Apache-2.0
"""Points without hooks cost a message nothing: the interpreter executes the same number of instructions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import mode
from types import FrameType
from typing import Any

import pytest

from mqtt_nats.hooks import CLIENT_CONNECT, CLIENT_CONNECTED, CLIENT_DISCONNECTED, MESSAGE_PUBLISH, SESSION_SUBSCRIBED
from mqtt_nats.transport import turns
from tests.harness import raw
from tests.harness.inprocess import InProcess
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually
from tests.hooks.conftest import Add

pytestmark = pytest.mark.anyio

BODY = b"x" * 100
PACKETS = raw.publish("cost/a", BODY) * 20 + raw.publish("cost/b", BODY) + raw.publish("cost/a", BODY, qos=1)


def instructions(work: Callable[[], None]) -> int:
    """Instructions of Python that ``work`` executes, in everything that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(former)
    return count


async def cost(inside: InProcess) -> int:
    """What one read of a publisher with a subscriber costs, from its socket to the subscriber's."""
    account = inside.account

    def receive() -> int:
        connection = account.registry.clients["cost-writer"].connection

        def work() -> None:
            connection.data_received(PACKETS)
            account.services.path.round.flush()

        return instructions(work)

    found = []
    for _ in range(40):
        found.append(inside.call(receive))
        await aeventually(lambda: inside.call(lambda: not account.registry.clients["cost-writer"].receipts))
    return mode(found)  # what is looked up for the first time costs more, what comes in a turn that has begun less


async def test_points_without_hooks_cost_nothing(inside: InProcess, add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does a hook elsewhere, nor one that has been there."""
    for name in ("SLICE_S", "TURN_S"):  # to count takes long, and what waits for another turn is not counted
        monkeypatch.setattr(turns, name, 60.0)
    async with (
        await RawClient.connect(inside.port, "cost-reader") as reader,
        await RawClient.connect(inside.port, "cost-writer"),
    ):
        await reader.subscribe("cost/#")
        await cost(inside)
        bare = await cost(inside)
        assert bare, "little of it in the compiled build, but not nothing"
        for point in (CLIENT_CONNECT, CLIENT_CONNECTED, CLIENT_DISCONNECTED, SESSION_SUBSCRIBED):
            add(point, lambda *_: None)
        assert await cost(inside) == bare
        entry = add(MESSAGE_PUBLISH, lambda *_: None)
        assert await cost(inside) > bare
        inside.call(lambda: inside.account.services.hooks.remove(entry))
        assert await cost(inside) == bare
