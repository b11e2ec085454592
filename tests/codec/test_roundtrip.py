# SPDX-License-Identifier: Apache-2.0
"""Any legal packet comes back from its own bytes, alone and among others, however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.codec import Decoder, encode
from tests.codec.strategies import connects, sent_by
from tests.codec.support import LIMITS, cut, decoder, flatten, outcome

each_version = pytest.mark.parametrize("version", [4, 5])
each_side = pytest.mark.parametrize("side", ["client", "server"])


@each_version
@given(data=st.data())
def test_connect(version: int, data: st.DataObject) -> None:
    packet = data.draw(connects(version))
    reader = Decoder(LIMITS)
    assert reader.feed(encode(packet, version)) == [packet]
    assert reader.version == version


@each_version
@each_side
@given(data=st.data())
def test_packets(version: int, side: str, data: st.DataObject) -> None:
    packets = data.draw(st.lists(sent_by(side, version), max_size=8))
    raw = b"".join(encode(packet, version) for packet in packets)
    sizes = data.draw(st.lists(st.integers(1, 40), max_size=20))
    expected = list(flatten(packets))
    if side == "client":
        first = data.draw(connects(version))
        raw = encode(first, version) + raw
        expected.insert(0, first)
    reader = decoder(0 if side == "client" else version, side)
    assert outcome(reader, cut(raw, sizes)) == (expected, None, "None")
