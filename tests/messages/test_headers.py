# SPDX-License-Identifier: Apache-2.0
"""Single headers out of raw blocks."""

from __future__ import annotations

import pytest

from mqtt_nats.messages.headers import header, identity, moved, publisher


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\r\n", b""])
def test_the_last_header_is_whole_however_the_block_ends(end: bytes) -> None:
    """A NATS client may have left the end out."""
    block = b"NATS/1.0\r\nNmqtt-Id:abc\r\nNmqtt-Client:a%2Fb" + end
    assert publisher(block) == "a/b"
    assert identity(block) == b"abc"
    assert header(b"NATS/1.0\r\nNmqtt-Id: abc" + end, b"Nmqtt-Id:") == b"abc"
    assert identity(b"NATS/1.0\r\nNats-Msg-Id:q2-15" + end) == b"q2-15"


@pytest.mark.parametrize("separator", [b":", b": "])
@pytest.mark.parametrize("end", [b"\r\nX:y\r\n\r\n", b"\r\n\r\n", b"\r\n", b""])
def test_a_message_names_the_subject_under_which_it_is_stored(separator: bytes, end: bytes) -> None:
    block = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Subject" + separator + b"a.b" + end
    assert not moved(block, b"Nmqtt-Subject:a.b\r\n")
    assert moved(block, b"Nmqtt-Subject:a.bc\r\n")
    assert moved(block, b"Nmqtt-Subject:a\r\n")
    assert not moved(b"NATS/1.0\r\nNmqtt-Pub:1" + end, b"Nmqtt-Subject:a.b\r\n")
