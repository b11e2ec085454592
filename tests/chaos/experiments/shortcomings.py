# SPDX-License-Identifier: Apache-2.0
"""R5: six short scripts that brokers are known to fail, against this one and others.

Each script gets a broker that runs, and raises AssertionError with what was wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from mqtt_nats.codec import Publish, Will
from tests.chaos.brokers import Broker, others, started, whole
from tests.chaos.experiment import Experiment, Result, Setting
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient, topic_of

_PROMPT = 15.0
"""Seconds in which something happens that needs nothing but the broker itself; AckWait is twice as long."""

_NOTED = 3.0
"""Seconds after which a nats-server has written down what it has delivered; before that it may come without DUP."""

_LEASE = 5
"""Seconds after which a gateway of ours counts as dead."""

_WILL = 60.0
"""Seconds in which a will must have been published."""


async def _space(broker: Broker) -> None:
    """A topic may have a space."""
    port = broker.ports[0]
    async with await RawClient.connect(port, "space-sub") as subscriber, await RawClient.connect(port, "p") as client:
        await subscriber.subscribe("living room/lamp", qos=1)
        await client.deliver("living room/lamp", b"on", 1)
        message = await subscriber.expect(Publish, _PROMPT)
        assert topic_of(message) == "living room/lamp", f"it arrives on {topic_of(message)!r}"


async def _clean_start(broker: Broker) -> None:
    """A clean start ends an old QoS 2 exchange: a new message under its packet id is the one that arrives."""
    port = broker.ports[0]
    async with await RawClient.connect(port, "clean-sub") as subscriber:
        await subscriber.subscribe("clean", qos=2)
        async with await RawClient.connect(port, "clean-pub", clean=False) as publisher:
            publisher.publish("clean", b"old", 2, packet_id=1)
            await publisher.expect_ack(PUBREC, 1)
        async with await RawClient.connect(port, "clean-pub") as publisher:
            publisher.publish("clean", b"new", 2, packet_id=1)
            await publisher.expect_ack(PUBREC, 1)
            publisher.ack(PUBREL, 1)
            await publisher.expect_ack(PUBCOMP, 1)
        arrived = (await subscriber.expect(Publish, _PROMPT)).payload
        if arrived == b"old":  # a broker may hand a message on when it is published
            arrived = (await subscriber.expect(Publish, _PROMPT)).payload
        assert arrived == b"new", f"{arrived!r} arrives"


async def _again_first(broker: Broker) -> None:
    """What was not acknowledged at QoS 1 comes first, and at once, after a reconnect."""
    port = broker.ports[0]
    async with await RawClient.connect(port, "again-pub") as publisher:
        async with await RawClient.connect(port, "again-sub", clean=False) as subscriber:
            await subscriber.subscribe("again", qos=1)
            await publisher.deliver_all("again", [b"0", b"1"], 1)
            await subscriber.messages(2)
        await publisher.deliver("again", b"2", 1)
        async with await RawClient.connect(port, "again-sub", clean=False) as subscriber:
            payloads = [(await subscriber.expect(Publish, _PROMPT)).payload for _ in range(3)]
            assert payloads == [b"0", b"1", b"2"], f"{payloads} arrive"


async def _after_kill(broker: Broker, new: bool) -> None:
    """QoS 2 exchanges go on after the broker was killed, and no packet id has two meanings.

    Args:
        new: look at the identifiers of new messages; otherwise at how soon the old ones go on.
    """
    name = f"kill{new:d}"
    async with (
        await RawClient.connect(broker.ports[0], f"{name}-pub") as publisher,
        await RawClient.connect(broker.ports[0], f"{name}-sub", clean=False) as subscriber,
    ):
        await subscriber.subscribe(name, qos=2)
        await publisher.deliver_all(name, [b"0", b"1"], 2)
        ids = [message.packet_id for message in await subscriber.messages(2)]
        subscriber.ack(PUBREC, ids[0])
        await subscriber.expect_ack(PUBREL, ids[0])
        await subscriber.quiet()
        await asyncio.sleep(_NOTED)
        await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.start)
    async with (
        await RawClient.connect(broker.ports[0], f"{name}-pub") as publisher,
        await RawClient.connect(broker.ports[0], f"{name}-sub", clean=False) as subscriber,
    ):
        assert subscriber.session_present, "the session is gone"
        if not new:
            await subscriber.expect_ack(PUBREL, ids[0], timeout=_PROMPT)
            message = await subscriber.expect(Publish, _PROMPT)
            assert (message.payload, message.packet_id, message.dup) == (b"1", ids[1], True), f"{message} comes again"
            return
        payloads = [b"2", b"3", b"4"]
        await publisher.deliver_all(name, payloads, 2)
        fresh: list[Publish] = []
        while len(fresh) < len(payloads):
            packet = await subscriber.packet(_PROMPT)
            if isinstance(packet, Publish) and packet.payload in payloads:
                fresh.append(packet)
        reused = {one.packet_id for one in fresh} & set(ids)
        assert not reused, f"packet id {reused} has two meanings: a receiver drops the new message"


async def _at_once(broker: Broker) -> None:
    """After a kill, an owed PUBREL and an unacknowledged message come at once."""
    await _after_kill(broker, new=False)


async def _ids(broker: Broker) -> None:
    """After a kill, no new message has the packet id of an exchange that is not complete."""
    await _after_kill(broker, new=True)


async def _will(broker: Broker) -> None:
    """The will of a client that was connected to a killed broker is published, by whoever is there afterwards."""
    async with await RawClient.connect(broker.ports[0], "will-sub", clean=False) as subscriber:
        await subscriber.subscribe("will", qos=1)
    client = await RawClient.connect(broker.ports[0], "will", will=Will("will", b"gone", 1, False))
    await client.quiet()
    await asyncio.to_thread(broker.kill)
    client.drop()
    await asyncio.to_thread(broker.start)
    async with await RawClient.connect(broker.ports[0], "will-sub", clean=False) as subscriber:
        assert (await subscriber.expect(Publish, _WILL)).payload == b"gone"


_CASES: dict[str, Callable[[Broker], Awaitable[None]]] = {
    "space in a topic": _space,
    "clean start ends QoS 2": _clean_start,
    "unacknowledged first": _again_first,
    "at once after a kill": _at_once,
    "packet ids after a kill": _ids,
    "will after a kill": _will,
}


async def _all(broker: Broker) -> Result:
    result = Result()
    for name, script in _CASES.items():
        try:
            await script(broker)
        except (AssertionError, OSError) as error:
            result.figures[name] = "no"
            result.violations.append(f"{name}: {str(error)[:200] or type(error).__name__}")
        else:
            result.figures[name] = "yes"
    return result


async def _run(setting: Setting) -> Result:
    """All cases; the other brokers in the long version."""
    broker = await asyncio.to_thread(whole, setting, "--gateway-lease", str(_LEASE))
    result = await _all(broker)
    if setting.long:
        for name, start in others().items():
            result.peers[name] = await _all(await started(start, setting))
    return result


EXPERIMENTS = [
    Experiment(
        "R5",
        "six short scripts that brokers are known to fail; for three of them the broker is killed",
        "each does what the standard says, at once",
        _run,
    )
]
