# SPDX-License-Identifier: Apache-2.0
"""Records from which a message is published later: the publisher's name stands in the message once."""

from __future__ import annotations

from mqtt_nats.ingress.publish_properties import restored
from mqtt_nats.ingress.server_publish import sender_line
from mqtt_streams import headers as block
from mqtt_streams.qos2 import held_block

SENDER = b"%b:a%%20b\r\n" % block.CLIENT.encode()


def test_a_held_publish_has_its_properties_without_the_lines_of_its_record() -> None:
    lines = SENDER + b"Nmqtt-Expiry:30\r\nContent-Type:text/plain\r\n"
    more = restored(held_block(b"a", 4, 17, b"00112233445566778899aabb", lines), 1000.0)
    assert more is not None
    assert more.lines == b"Nmqtt-Expiry:30\r\nContent-Type:text/plain\r\n"


def test_the_line_that_names_the_publisher() -> None:
    assert sender_line(SENDER + b"Own: 1\r\n") == SENDER
    assert sender_line(b"Own: 1\r\n" + SENDER) == b""
