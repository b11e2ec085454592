# SPDX-License-Identifier: Apache-2.0
"""CONNECT, session present, client ids, keepalive, PINGREQ, DISCONNECT."""

import time

import pytest

from mqtt_nats.codec import Connack, ConnackCode, Connect, Disconnect, PingReq, PingResp, Publish
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.integration.conftest import Connector, Stored, until

CLIENT_IDS = [
    "a",
    "0123456789abcdefghijklm",
    "nopqrstuvwxyzABCDEFGHIJ",
    "KLMNOPQRSTUVWXYZ",
    "0123456789ABCDEFGHIJKLMN",
    "with.dots.in.it",
    ".",
    "..",
    "with spaces in it",
    " ",
    "*",
    ">",
    "a.*.>",
    "a/b/c",
    "/",
    "=x",
    "=",
    "x" * 256,
    "é" * 128,
    "клиент-температуры",
    "客户端",
    "\U0001f321 thermometer",
    "tab\tnewline\nreturn\r",
    "\x7f\x01",
    "\ufeff",
    "$MQTT",
    "+/#",
    'quote"back\\slash',
    "%41",
]


async def test_clean_session_is_new_every_time(connect: Connector, name: str) -> None:
    """[MQTT-3.1.2-6], [MQTT-3.1.4-3], [MQTT-3.1.4-4], [MQTT-3.2.2-1]"""
    first = await connect(name)
    assert not first.session_present
    assert await first.subscribe(name, qos=1) == (1,)
    await first.disconnect()
    second = await connect(name)
    assert not second.session_present
    await second.deliver(name, b"nobody is subscribed", 1)
    await second.quiet()


async def test_session_is_continued(connect: Connector, name: str) -> None:
    """[MQTT-3.1.2-4], [MQTT-3.1.4-3], [MQTT-3.1.4-4], [MQTT-3.2.2-2], [MQTT-3.2.2-3]"""
    first = await connect(name, clean=False)
    assert not first.session_present
    await first.disconnect()
    second = await connect(name, clean=False)
    assert second.session_present
    await second.subscribe(name, qos=1)
    second.drop()
    third = await connect(name, clean=False)
    assert third.session_present
    third.publish(name, b"still subscribed")
    await third.message(name, b"still subscribed", qos=0)


async def test_clean_start_ends_the_stored_session(connect: Connector, name: str, stored: Stored) -> None:
    """[MQTT-3.1.2-6]: nothing of the earlier session is used again, not even by a later one."""
    first = await connect(name, clean=False)
    await first.subscribe(f"{name}/+", f"{name}/#", qos=2)
    first.publish(f"{name}/held", b"never released", 2, packet_id=7)
    await first.expect_ack(PUBREC, 7)
    await first.disconnect()

    async def everything() -> None:
        traces = await stored.traces(name)
        assert len(traces.pop("consumers")) == 3
        assert set(traces) == {"record", "pubrel consumer", "held", "timers"}

    await until(everything)
    clean = await connect(name)
    assert not clean.session_present
    assert await stored.traces(name) == {"record": 1}
    await clean.deliver(f"{name}/a", b"not subscribed", 2)
    clean.ack(PUBREL, 7)
    await clean.expect_ack(PUBCOMP, 7)
    await clean.disconnect()
    await stored.gone(name)
    again = await connect(name, clean=False)
    assert not again.session_present
    await again.deliver(f"{name}/a", b"not subscribed either", 1)
    await again.quiet()


async def test_clean_session_leaves_nothing(connect: Connector, name: str, stored: Stored) -> None:
    """[MQTT-3.1.2-6]: the session lasts as long as the network connection, whichever way that ends."""
    for orderly in (True, False):
        client = await connect(name)
        await client.subscribe(f"{name}/#", qos=2)
        client.publish(f"{name}/a", b"held", 2, packet_id=3)
        await client.expect_ack(PUBREC, 3)
        assert (await stored.traces(name))["record"] == 1
        if orderly:
            await client.disconnect()
        else:
            client.drop()
        await stored.gone(name)


async def test_empty_client_id(connect: Connector, name: str) -> None:
    """[MQTT-3.1.3-6]: each gets an id of its own, so neither disturbs the other."""
    one, two = await connect(""), await connect("")
    await one.subscribe(name, qos=1)
    await two.subscribe(name, qos=1)
    for client in (one, two):
        await client.quiet()
    publisher = await connect("")
    await publisher.deliver(name, b"for both", 1)
    await one.receive(name, b"for both")
    await two.receive(name, b"for both")


async def test_empty_client_id_needs_clean_session(gateway: Gateway) -> None:
    """[MQTT-3.1.3-7], [MQTT-3.1.3-8], [MQTT-3.1.3-9], [MQTT-3.2.2-4], [MQTT-3.2.2-5]"""
    async with await RawClient.open(gateway.port) as client:
        client.send(Connect(4, "", False, 0))
        await client.expect(Connack, code=ConnackCode.IDENTIFIER_REJECTED, session_present=False)
        await client.expect_closed()


@pytest.mark.parametrize("client_id", CLIENT_IDS)
async def test_legal_client_id(connect: Connector, client_id: str, name: str) -> None:
    """[MQTT-3.1.3-2], [MQTT-3.1.3-5] and beyond: every UTF-8 string is a client id, with all that a session can do."""
    client = await connect(client_id, clean=False)
    assert not client.session_present
    assert await client.subscribe(name, qos=2) == (2,)
    client.publish(name, b"held", 2, packet_id=1)
    await client.expect_ack(PUBREC, 1)
    client.drop()
    client = await connect(client_id, clean=False)
    assert client.session_present
    client.ack(PUBREL, 1)
    packets = [await client.packet(), await client.packet()]
    publish = next(packet for packet in packets if isinstance(packet, Publish))
    assert (publish.payload, publish.qos) == (b"held", 2)
    client.drop()
    client = await connect(client_id, clean=False)
    again = await client.message(name, b"held", dup=True, packet_id=publish.packet_id)
    await client.complete(again)
    await client.disconnect()
    client = await connect(client_id, clean=True)
    assert not client.session_present
    await client.quiet()
    await client.disconnect()


async def test_client_ids_do_not_touch_each_other(connect: Connector, name: str) -> None:
    """A client id that looks like a wildcard, or like another's hash, reaches nothing of anybody else's."""
    ids = [name, f"{name}.x", "*", ">", f"={name}", f"{name} ", f"{name}/x"]
    for client_id in ids:
        client = await connect(client_id, clean=False)
        await client.subscribe(f"{name}/shared", qos=1)
        client.publish(f"{name}/held", client_id.encode(), 2, packet_id=9)
        await client.expect_ack(PUBREC, 9)
        await client.disconnect()
    for client_id in ("*", ">"):
        await (await connect(client_id, clean=True)).disconnect()
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/held", qos=1)
    for client_id in ids:
        client = await connect(client_id, clean=False)
        assert client.session_present is (client_id not in ("*", ">")), client_id
        if client.session_present:
            client.ack(PUBREL, 9)
            await client.expect_ack(PUBCOMP, 9)
            await listener.receive(f"{name}/held", client_id.encode())
        await (await connect(client_id, clean=True)).disconnect()


async def test_username_and_password_are_accepted(connect: Connector, name: str) -> None:
    """Whoever they are."""
    client = await connect(name, username="somebody", password=b"\0\xff secret")
    await client.quiet()
    client = await connect(name, username="nobody with a password")
    await client.quiet()


async def test_packets_right_behind_connect(gateway: Gateway, name: str) -> None:
    """[MQTT-3.2.0-1]: a client need not wait for CONNACK, and nothing comes before it."""
    async with await RawClient.open(gateway.port) as client:
        client.send(Connect(4, name, True, 0), PingReq())
        packet_id = client.publish(name, b"early", 1)
        await client.expect(Connack, code=0)
        await client.expect(PingResp)
        await client.expect_ack(PUBACK, packet_id)


async def test_disconnect_right_behind_connect(gateway: Gateway, name: str) -> None:
    """[MQTT-3.2.0-1]; the gateway closes where the client does not."""
    async with await RawClient.open(gateway.port) as client:
        client.send(Connect(4, name, True, 0), Disconnect())
        await client.expect(Connack, code=0)
        await client.expect_closed()


async def test_pingreq(connect: Connector, name: str) -> None:
    """[MQTT-3.12.4-1]"""
    client = await connect(name)
    client.send(*(PingReq() for _ in range(3)))
    for _ in range(3):
        await client.expect(PingResp)


async def test_keepalive(connect: Connector, name: str) -> None:
    """[MQTT-3.1.2-24]: silence for one and a half times the keepalive ends the connection, and not less."""
    begun = time.monotonic()
    client = await connect(name, keepalive=1)
    await client.expect_closed()
    assert time.monotonic() - begun > 1.4


@pytest.mark.long
async def test_keepalive_counts_any_packet(connect: Connector, name: str) -> None:
    """[MQTT-3.1.2-24]: every control packet shows that the client is alive, PINGREQ or not."""
    silent = await connect(f"{name}-silent", keepalive=1)
    for turn in range(5):
        if await stays(connect, f"{name}-{turn}"):
            break
    else:
        pytest.fail("this test had no time to send as often as a client must")
    await silent.expect_closed()


async def stays(connect: Connector, name: str) -> bool:
    """A client that publishes is not closed, nor one without keepalive that only receives.

    Returns:
        False: the first one was closed after this test had not let it publish for too long.
    """
    endless = await connect(f"{name}-endless", keepalive=0)
    await endless.subscribe(name)
    keepalive = 3
    gap, sent = 0.0, time.monotonic()  # seconds between two packets, at most
    client = await connect(name, keepalive=keepalive)
    packet_id = client.next_id()
    end = time.monotonic() + 1.5 * keepalive + 1.5
    try:
        while time.monotonic() < end:
            client.publish(name, b"alive", 1, packet_id=packet_id)
            now = time.monotonic()
            gap, sent = max(gap, now - sent), now
            await client.expect_ack(PUBACK, packet_id)
            await endless.message(name, b"alive")
            await silent_for(client, 1)
    except AssertionError:
        if max(gap, time.monotonic() - sent) > 1.5 * keepalive:
            return False
        raise
    await endless.quiet()
    return True


async def silent_for(client: RawClient, seconds: float) -> None:
    """Say nothing for a while, and expect nothing."""
    try:
        packet = await client.packet(seconds)
    except AssertionError as error:
        if "no packet within" not in str(error):
            raise
    else:
        raise AssertionError(f"nothing was expected, not {packet}")
