# SPDX-License-Identifier: Apache-2.0
"""What a server adds to the headers of a message that a direct get has brought."""

from typing import Any

import pytest

from mqtt_streams import headers
from mqtt_streams.api import Reply
from mqtt_streams.gateways import GatewayStore
from mqtt_streams.pages import pages_of
from mqtt_streams.retained import PREFIX, STREAM
from mqtt_streams.stored import StoredMessage, all_of, direct_get, direct_get_last, get_last, is_answer, newest, scan
from tests.harness.jetstream import MemoryJetStream

ADDED = b"Nats-Stream: s\r\nNats-Subject: a.b\r\nNats-Sequence: 7\r\nNats-Time-Stamp: 1970-01-01T00:00:01.5Z\r\n"
FORGED = b"Nats-Stream: x\r\nNats-Subject: c\r\nNats-Sequence: 9\r\nNats-Time-Stamp: 1970-01-01T00:00:09Z\r\n"
OTHERWISE = b"Nats-Time-Stamp:1970-01-01T00:00:01.5Z\r\nNats-Sequence:7\r\nNats-Subject:a.b\r\nNats-Stream:s\r\n"
LEFT = OTHERWISE.removesuffix(b"Nats-Stream:s\r\n")


class Server:
    """Answers every request with one block of headers."""

    api_prefix = "$JS.API"
    max_ack_pending = 0

    def __init__(self, lines: bytes) -> None:
        self.block = b"NATS/1.0\r\n" + lines + b"\r\n"

    async def request(self, *_: object, **__: object) -> Reply:
        return Reply("", self.block, b"x", "")


@pytest.mark.parametrize(
    ("lines", "own"),
    [
        (ADDED, b""),
        (b"A: b\r\n" + ADDED + b"Nats-Num-Pending: 0\r\n", b"NATS/1.0\r\nA: b\r\n\r\n"),
        (FORGED + ADDED, b"NATS/1.0\r\n" + FORGED + b"\r\n"),
        (b"A: b\r\n" + OTHERWISE, b"NATS/1.0\r\nA: b\r\n" + LEFT + b"\r\n"),
        (FORGED + OTHERWISE, b"NATS/1.0\r\n" + FORGED + LEFT + b"\r\n"),
    ],
    ids=["alone", "with others", "forged", "in another order", "in another order, forged"],
)
async def test_where_a_message_is_from(lines: bytes, own: bytes) -> None:
    server: Any = Server(lines)
    expected = StoredMessage("a.b", 7, 1_500_000_000, own, b"x")
    assert await direct_get(server, "s", 7) == expected


COPY = b"NATS/1.0\r\nNmqtt-RFlags:1\r\n" + ADDED + b"\r\n"
OWN = headers.build([("Nmqtt-RFlags", "1")])
ANSWERS = {
    "a copy": (COPY, b"forged"),
    "no message": (b"NATS/1.0 404 Message Not Found\r\n\r\n", b""),
    "of a store": (b"", b'{"stream":"$MQTT_msgs", "seq":7}'),
    "of the API": (b"", b'{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","message":{}}'),
}
"""What nats-server answers to direct gets, and to other requests: headers and payload."""


def test_what_is_an_answer() -> None:
    assert all(is_answer(*one) for one in ANSWERS.values())
    for block in (b"", OWN, headers.REPLACING, b"NATS/1.0\r\nNats-Stream-Source: s 1\r\n\r\n"):
        assert not is_answer(block, b"Nats-Stream:")
    assert not is_answer(OWN, ANSWERS["of the API"][1]), "a payload of a client"


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_answers_are_no_records(answer: tuple[bytes, bytes]) -> None:
    """The record behind them counts, and can be replaced; a subject that has nothing else has an empty record."""
    js = MemoryJetStream()
    for subject, own in (("kept", True), ("other", True), ("forged", False)):
        if own:
            js.put(PREFIX + subject, b"former", OWN)
            js.put(PREFIX + subject, subject.encode(), OWN)
        for _ in range(2):
            js.put(PREFIX + subject, answer[1], answer[0])
    js.put(f"{PREFIX}other", b"later", OWN)
    for look in (get_last, direct_get_last):
        found = [await look(js, STREAM, PREFIX + subject) for subject in ("kept", "other", "forged")]
        assert [(one.seq, one.payload) for one in found if one] == [(4, b"kept"), (11, b"later"), (10, b"")]
        assert found[2] is not None
        assert found[2].is_answer
    assert [one.payload for one in await all_of(js, STREAM, f"{PREFIX}kept")] == [b"former", b"kept"]
    assert await all_of(js, STREAM, f"{PREFIX}forged") == []
    expected = [b"kept", b"later"]
    stored = [one async for one in scan(js, STREAM, f"{PREFIX}>")]
    assert [one.payload for one in newest(stored)] == expected
    for messages in (1, 2, 5, 100):
        pages = [page async for page in pages_of(js, STREAM, f"{PREFIX}>", newest=True, messages=messages)]
        assert sorted(one.payload for page in pages for one in page) == expected


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_a_lease_stays_that_of_its_holder(answer: tuple[bytes, bytes]) -> None:
    js = MemoryJetStream()
    store = GatewayStore(js)
    held = await store.hold("a", "a", 0, 20)
    await store.register("a", 1.0, {"name": "first"}, 0)
    for key in ("lease", "gateway"):
        js.put(f"$KV.MQTT_gateways.{key}.a", answer[1], answer[0])
        js.put(f"$KV.MQTT_gateways.{key}.forged", answer[1], answer[0])
    assert await store.lease("a") == (held + 2, "a")
    assert [(one.identity, one.lapsed) for one in await store.entries()] == [("a", False)]
    assert [(one.identity, one.lapsed) for one in await store.oldest()] == [("a", False)]
    assert await store.hold("a", "a", held + 2, 20) == held + 6
