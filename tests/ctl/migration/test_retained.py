# SPDX-License-Identifier: Apache-2.0
"""`migrate retained` with a broker that a test writes: when the search ends, and what is not carried over."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import (
    Connack,
    Connect,
    Decoder,
    Limits,
    Packet,
    Publish,
    Suback,
    Subscribe,
    ack_bytes,
    encode,
)
from mqtt_nats.ctl.migration.transfer import retained
from mqtt_nats.ctl.migration.transfer.mqtt_client import ANSWER_S, Broker, connected
from mqtt_nats.ctl.migration.transfer.publisher import Carried, Publisher
from mqtt_nats.ctl.migration.transfer.retained import Search, carry_retained

pytestmark = pytest.mark.anyio

LIMITS = Limits(1_000_000, 1_000_000, 65_535, 65_535, 65_535)
PUBACK = 4


def key(topic: str) -> bytes:
    return len(topic).to_bytes(2, "big") + topic.encode()


def message(topic: str, *, retain: bool = True, qos: int = 0, payload: bytes = b"x") -> Publish:
    return Publish(qos, retain, False, key(topic), 1 if qos else 0, payload)


Answer = Callable[[Packet], Sequence[Packet | bytes]]


@asynccontextmanager
async def broker(
    answer: Answer, connack: Callable[[Connect], Connack] | None = None, **properties: Any
) -> AsyncIterator[Broker]:
    """A server of MQTT 5.0 on this machine that answers CONNECT and other packets as the functions say."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = Decoder(LIMITS)
        while data := await reader.read(65_536):
            for packet in decoder.feed(data):
                found: Sequence[Packet | bytes]
                if isinstance(packet, Connect):
                    given: Any = properties or None
                    found = [Connack(False, 0, given) if connack is None else connack(packet)]
                else:
                    found = answer(packet)
                for each in found:
                    writer.write(each if isinstance(each, bytes) else encode(each, 5))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Broker("127.0.0.1", server.sockets[0].getsockname()[1], None, None, None)


def test_the_search_ends_behind_its_mark() -> None:
    """Not before SUBACK, and not while the topic of the second subscription has not come again."""
    search = Search(["#"])
    search.add(key("a"), 100)
    assert search.left(100) == ANSWER_S
    search.grant(101)
    search.ask(key("a"))
    assert search.left(101) == ANSWER_S
    search.add(key("b"), 102)
    assert search.left(103) == ANSWER_S - 1
    search.add(key("a"), 103)
    assert search.left(103) == retained.QUIET_S
    search.add(key("c"), 104)
    assert search.left(105) == retained.QUIET_S - 1
    assert search.found == {key("a"), key("b"), key("c")}


def test_a_search_that_finds_nothing_ends_soon() -> None:
    search = Search(["#"])
    search.grant(100)
    assert search.left(100) == retained.QUIET_S


async def test_a_message_that_is_cleared_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no loss. Retained messages that come before SUBACK count; live ones do not."""
    monkeypatch.setattr(retained, "QUIET_S", 0.1)
    stored = {"a", "b"}

    def old(packet: Packet) -> list[Packet]:
        if not isinstance(packet, Subscribe):
            return []
        asked = [one.topic_filter for one in packet.filters]
        found = sorted(stored) if asked == ["#"] else sorted(stored.intersection(asked))
        if asked[0] != "#" and packet.filters[0].qos == 0:
            stored.discard("b")
        live = [message("live", retain=False, payload=b"%d" % number) for number in range(3)]
        suback = Suback(packet.packet_id, tuple(one.qos for one in packet.filters))
        return [*live, *map(message, found), suback]

    published = []

    def new(packet: Packet) -> list[Packet]:
        published.append(packet)
        return []

    shown: list[tuple[int, int | None]] = []
    carried = Carried(progress=lambda done, total: shown.append((done, total)))
    async with broker(old) as source, broker(new) as target:
        await carry_retained(source, target, ["#"], replace_all=True, carried=carried)
    assert [one.key for one in published if isinstance(one, Publish)] == [key("a")]
    assert (carried.count, carried.gone, carried.lost, shown) == (1, 1, [], [(1, 2)])


async def test_a_filter_that_is_refused() -> None:
    def old(packet: Packet) -> list[Packet]:
        return [Suback(packet.packet_id, (0x87,))] if isinstance(packet, Subscribe) else []

    async with broker(old) as source:
        with pytest.raises(StartupError, match="refuses the subscription '#': not authorized"):
            await carry_retained(source, source, ["#"], replace_all=True, carried=Carried())


async def test_a_message_that_is_larger_than_the_gateway_accepts() -> None:
    """It is named with the setting and not sent; the others are carried over."""

    def new(packet: Packet) -> list[Any]:
        return [ack_bytes(PUBACK, packet.packet_id)] if isinstance(packet, Publish) else []

    carried = Carried()
    async with broker(new, maximum_packet_size=1000) as target, connected(target, 5) as connection:
        publisher = Publisher(connection, carried)
        await publisher.publish(message("big", qos=1, payload=b"x" * 1000), retain=True)
        await publisher.publish(message("small", qos=1), retain=True)
        await publisher.finish()
    assert carried.count == 1
    assert carried.lost == ["big: a packet of 1,011 bytes, and the gateway accepts 1,000 (max_packet_size)"]
