# SPDX-License-Identifier: Apache-2.0
"""RETAIN (section 3.3.1.3): what is kept, which subscription brings it, which flag is passed on."""

import pytest

from tests.harness.gateway import Gateway
from tests.harness.raw5 import AS_PUBLISHED, CONTENT_TYPE, SESSION_EXPIRY, UNSUBACK, Message, Raw5, prop, unsubscribe
from tests.integration.conftest import Stored
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)
KINDS = pytest.mark.parametrize("session", [[], [STORED]], ids=["regular", "durable"])
QOS = pytest.mark.parametrize("qos", [0, 1, 2])

ONLY_NEW, NEVER = 0x10, 0x20
"""Retain Handling 1 and 2."""


def brought(client: Raw5, publisher: Raw5, name: str, options: int) -> list[Message]:
    """What a subscription brings before its first new message, which nothing retained may follow."""
    client.subscribed((f"{name}/#", options))
    publisher.deliver(f"{name}/mark", b"mark", qos=1)
    found = []
    while (one := client.receive_message()).payload != b"mark":
        found.append(one)
    client.quiet()
    return found


def told(found: list[Message]) -> list[tuple[str, bytes, int, bool]]:
    """Topic, payload, QoS and RETAIN of messages, sorted."""
    return sorted((one.topic.rpartition("/")[2], one.payload, one.qos, one.retain) for one in found)


@KINDS
@QOS
def test_what_is_retained(open5: Opener, name: str, session: list[bytes], qos: int) -> None:
    """[MQTT-3.3.1-5], [MQTT-3.3.1-6], [MQTT-3.3.1-7], [MQTT-3.3.1-8] (5.0)"""
    publisher, listener = open5(), open5()
    listener.subscribed((f"{name}/a", 2))

    def expect(*payloads: bytes) -> None:
        late = open5(f"{name}-late", *session)
        found = brought(late, publisher, name, qos)
        assert told(found) == [("a", payload, qos, True) for payload in payloads]
        assert not any(one.properties for one in found)

    def publish(payload: bytes, *parts: bytes, flags: int = 1) -> None:
        publisher.deliver(f"{name}/a", payload, *parts, qos=qos, flags=flags)
        found = listener.receive_message(payload)
        assert (found.qos, found.retain) == (qos, False)

    publish(b"first", prop(CONTENT_TYPE, "t"))
    publish(b"second")
    expect(b"second")
    publish(b"passing", flags=0)
    publish(b"", flags=0)
    expect(b"second")
    publish(b"")
    expect()
    publish(b"")
    publish(b"passing", flags=0)
    expect()
    publish(b"third")
    expect(b"third")


@KINDS
@QOS
async def test_retain_handling(
    open5: Opener, name: str, stored: Stored, session: list[bytes], qos: int, second_gateway: Gateway
) -> None:
    """[MQTT-3.3.1-9], [MQTT-3.3.1-10], [MQTT-3.3.1-11] (5.0): each beside the others, so that each can be seen."""
    publisher = open5()
    for topic in ("a", "b/c"):
        publisher.deliver(f"{name}/{topic}", b"kept", qos=2, flags=1)
    kept = [("a", b"kept", qos, True), ("c", b"kept", qos, True)]
    client = open5(name, *session)

    def forget() -> None:
        client.send(unsubscribe(f"{name}/#"))
        client.answer(UNSUBACK, 1, 0)

    assert told(brought(client, publisher, name, qos)) == kept
    assert told(brought(client, publisher, name, qos)) == kept
    assert told(brought(client, publisher, name, qos | ONLY_NEW)) == []
    assert told(brought(client, publisher, name, qos | NEVER)) == []
    assert told(brought(client, publisher, name, qos)) == kept
    forget()
    assert told(brought(client, publisher, name, qos | ONLY_NEW)) == kept
    assert told(brought(client, publisher, name, qos | ONLY_NEW)) == []
    forget()
    assert told(brought(client, publisher, name, qos | NEVER)) == []
    assert told(brought(client, publisher, name, qos | ONLY_NEW)) == []
    await stored.settled(name)
    client.close()
    client = open5(name, *session, clean=False, to=second_gateway)
    assert client.present == bool(session)
    # With a session the subscription exists already.
    assert told(brought(client, publisher, name, qos | ONLY_NEW)) == ([] if session else kept)
    assert told(brought(client, publisher, name, qos | NEVER)) == []
    assert told(brought(client, publisher, name, qos)) == kept


@pytest.mark.parametrize("way", ["here", "elsewhere", "durable", "away"])
@QOS
def test_retain_as_published(
    open5: Opener, name: str, qos: int, way: str, second_gateway: Gateway, gateway: Gateway
) -> None:
    """[MQTT-3.3.1-12], [MQTT-3.3.1-13] (5.0)"""
    if way == "away" and qos == 0:
        qos = 1  # QoS 0 is not kept for those who are away
    there = second_gateway if way == "elsewhere" else gateway
    session = [STORED] if way in ("durable", "away") else []
    cleared, published = open5(f"{name}-0", *session, to=there), open5(f"{name}-1", *session, to=there)
    for client, options in ((cleared, 0), (published, AS_PUBLISHED)):
        client.subscribed((f"{name}/#", qos | options | NEVER))
        if way == "away":
            client.close()
    publisher = open5()
    for payload, flags in ((b"kept", 1), (b"passing", 0), (b"", 1), (b"kept", 1)):
        publisher.deliver(f"{name}/a", payload, qos=qos, flags=flags)
    if way == "away":
        cleared, published = open5(f"{name}-0", STORED, clean=False), open5(f"{name}-1", STORED, clean=False)
    for client, expected in ((cleared, [False] * 4), (published, [True, False, True, True])):
        found = [client.receive_message() for _ in range(4)]
        assert [one.payload for one in found] == [b"kept", b"passing", b"", b"kept"]
        assert [one.retain for one in found] == expected
        assert {one.qos for one in found} == {qos}


@KINDS
def test_retain_as_published_says_nothing_about_retained_messages(
    open5: Opener, name: str, session: list[bytes]
) -> None:
    """[MQTT-3.3.1-9] (5.0): what a new subscription brings has RETAIN 1, whatever its options."""
    publisher = open5()
    publisher.deliver(f"{name}/a", b"kept", qos=1, flags=1)
    for options in (0, 1, AS_PUBLISHED, 1 | AS_PUBLISHED):
        client = open5(name, *session)
        assert told(brought(client, publisher, name, options)) == [("a", b"kept", options & 1, True)]
