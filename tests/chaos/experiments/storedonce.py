# SPDX-License-Identifier: Apache-2.0
"""R19: a message is stored once, for however many durable subscribers."""

from __future__ import annotations

import asyncio
import contextlib

import nats
import orjson

from tests.chaos.client import ChaosClient
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.history import History
from tests.harness.waiting import aeventually

_MESSAGES = 200


async def _stored(url: str) -> tuple[int, int]:
    """(messages, bytes) in the stream of QoS 1 and 2 messages."""
    client = await nats.connect(url)
    try:
        reply = orjson.loads((await client.request("$JS.API.STREAM.INFO.$MQTT_msgs", b"", timeout=30)).data)
    finally:
        await client.close()
    return reply["state"]["messages"], reply["state"]["bytes"]


async def _run(setting: Setting) -> Result:
    """The same messages for one subscriber, then for many; each gets all, and the stream grows by the same bytes."""
    many = 1000 if setting.long else 50
    server = await asyncio.to_thread(setting.nats)
    gateway = await asyncio.to_thread(setting.gateway, server.url)
    result = Result()
    grown: list[int] = []
    # A QoS 2 message has its number among those that were held in a header: the first round makes it three digits long.
    for round_, subscribers in enumerate((1, 1, many)):
        histories = setting.fresh("histories")
        clients = [
            ChaosClient(f"s{round_}-{number}", [gateway.port], History(histories / f"{number}"))
            for number in range(subscribers)
        ]
        for start in range(0, subscribers, 50):  # not all at once: a handshake has a time limit
            some = clients[start : start + 50]
            await asyncio.gather(*(client.connect() for client in some))
            await asyncio.gather(*(client.subscribe(f"{round_}/#", 2, 60) for client in some))
        before = await _stored(server.url)
        publisher = ChaosClient(f"p{round_}", [gateway.port], History(histories / "p"), size=200)
        await publisher.connect()
        for n in range(1, _MESSAGES + 1):
            await publisher.publish(f"{round_}/a", n, 1 + n % 2)
        if not await publisher.settled(60):
            result.violations.append("not acknowledged: some messages")
        missing = await _all_delivered(clients)
        after = await _stored(server.url)
        if missing:
            result.violations.append(f"not delivered: {missing} of {subscribers} subscribers have not got everything")
        if after[0] - before[0] != _MESSAGES:
            result.violations.append(f"stored more than once: {after[0] - before[0]} messages for {subscribers}")
        if round_:
            grown.append(after[1] - before[1])
            result.figures[f"bytes for {subscribers}"] = grown[-1]
        await asyncio.gather(*(client.close() for client in (*clients, publisher)))
    if grown[0] != grown[1]:
        result.violations.append(f"bytes differ: {grown[0]} and {grown[1]}")
    result.figures = {"messages": _MESSAGES} | result.figures
    return result


async def _all_delivered(clients: list[ChaosClient]) -> int:
    """How many clients have not got all messages after a minute."""
    with contextlib.suppress(AssertionError):
        await aeventually(lambda: all(len(client.delivered) >= _MESSAGES for client in clients), 60)
    return sum(len(client.delivered) < _MESSAGES for client in clients)


EXPERIMENTS = [
    Experiment(
        "R19",
        "the same messages for one durable subscriber and for many",
        "the stream grows by the same number of bytes",
        _run,
    )
]
