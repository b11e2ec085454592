# SPDX-License-Identifier: Apache-2.0
"""Which packets are messages for some sessions only, and what a session makes of such a message."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import ProtocolError, Publish
from mqtt_nats.ingress.carried import destination
from mqtt_nats.messages.message import stored
from mqtt_streams.headers import for_line, for_some

TOPIC = b"\0\1t"


def packet(
    *pairs: tuple[str, str], qos: int = 1, retain: bool = False, key: bytes = TOPIC, named: bool = True
) -> Publish:
    return Publish(qos, retain, False, key, 1, b"x", {"user_property": list(pairs)} if named else None)


def test_a_message_without_sessions_is_an_ordinary_one() -> None:
    assert destination(packet(named=False)) == (0, b"")
    assert destination(packet(("a", "b"), qos=0, retain=True)) == (0, b"")


@pytest.mark.parametrize("qos", [1, 2])
def test_it_names_sessions_and_its_qos(qos: int) -> None:
    """Of two QoS the last one counts: `migrate sessions` puts its own behind those of the message."""
    pairs = (("a", "b"), ("Nmqtt-Pub", "7"), ("Nmqtt-For", "one"), ("Nmqtt-For", "100%\r\n"), ("Nmqtt-Pub", str(qos)))
    assert destination(packet(*pairs)) == (qos, b"Nmqtt-For:one\r\nNmqtt-For:100%25%0D%0A\r\n")


@pytest.mark.parametrize(
    "wrong",
    [
        packet(("Nmqtt-For", "one")),
        packet(("Nmqtt-For", "one"), ("Nmqtt-Pub", "0")),
        packet(("Nmqtt-For", "one"), ("Nmqtt-Pub", "1"), qos=2),
        packet(("Nmqtt-For", "one"), ("Nmqtt-Pub", "1"), retain=True),
        packet(("Nmqtt-For", "one"), ("Nmqtt-Pub", "1"), key=b"\0\0"),
    ],
)
def test_what_is_not_as_it_has_to_be(wrong: Publish) -> None:
    with pytest.raises(ProtocolError):
        destination(wrong)


def test_who_gets_a_stored_message() -> None:
    """Only the sessions that it names, by their whole client id. Its packets are not shared."""

    def withheld(headers: bytes, client_id: str) -> bool:
        return stored("t", TOPIC, b"x", 1, b"1000", headers).withheld_from(client_id)

    plain = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Expiry:30\r\n\r\n"
    named = b"NATS/1.0\r\nNmqtt-Pub:1\r\n%b%b\r\n" % (for_line("one"), for_line("a b"))
    assert not for_some(plain)
    assert not withheld(plain, "one")
    assert stored("t", TOPIC, b"x", 1, b"1000", named).timed
    assert [withheld(named, one) for one in ("one", "a b", "on", "one ", "a", "")] == [False] * 2 + [True] * 4
