# SPDX-License-Identifier: Apache-2.0
"""Any bytes give packets or a documented error, and the cutting of the bytes into reads changes neither."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqtt_nats.codec import Limits, MqttError, encode
from tests.codec.cases import CASES
from tests.codec.strategies import connects, sent_by
from tests.codec.support import cut, decoder, outcome

SMALL = Limits(max_packet_size=200, connect_packet_size=120, max_topic_levels=3, max_filters=3, max_user_properties=2)

STARTS = [(0, "client"), (4, "client"), (5, "client"), (4, "server"), (5, "server")]
each_start = pytest.mark.parametrize(("version", "side"), STARTS)


def _check(data: bytes, version: int, side: str, sizes: list[int]) -> None:
    whole = outcome(decoder(version, side, SMALL), [data])
    assert whole[1] is None or issubclass(whole[1], MqttError)
    assert outcome(decoder(version, side, SMALL), cut(data, sizes)) == whole
    assert outcome(decoder(version, side, SMALL), (data[at : at + 1] for at in range(len(data)))) == whole


cuts = st.lists(st.integers(1, 20), max_size=10)


@each_start
@given(data=st.binary(max_size=200), sizes=cuts)
@example(data=b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x3c\x00\x01a\x40\x02\x00\x00", sizes=[])
def test_any_bytes(version: int, side: str, data: bytes, sizes: list[int]) -> None:
    _check(data, version, side, sizes)


@each_start
@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from([case.raw for case in CASES if len(case.raw) < 200]),
            st.sampled_from([bytes((first,)) for first in range(0x10, 0x100, 2)]),
            st.sampled_from([b"\0\1a", b"\0\0", b"\0\1", b"\x02", b"\x80\x01", b"\xff\xff\xff\x7f", b"\x26", b"\x0b"]),
            st.binary(max_size=4),
        ),
        max_size=8,
    ),
    sizes=cuts,
)
def test_fragments(version: int, side: str, parts: list[bytes], sizes: list[int]) -> None:
    _check(b"".join(parts), version, side, sizes)


@each_start
@given(data=st.data(), sizes=cuts)
def test_mutated_packets(version: int, side: str, data: st.DataObject, sizes: list[int]) -> None:
    spoken = version or data.draw(st.sampled_from((4, 5)))
    packets = data.draw(st.lists(sent_by(side, spoken), min_size=1, max_size=4))
    raw = bytearray(b"".join(encode(packet, spoken) for packet in packets))
    if not version:
        raw[:0] = encode(data.draw(connects(spoken)), spoken)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        how = data.draw(st.sampled_from(("set", "insert", "cut", "truncate")))
        if how == "set" and raw:
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=3))
        elif how == "cut":
            del raw[at : at + data.draw(st.integers(1, 3))]
        else:
            del raw[at:]
    _check(bytes(raw), version, side, sizes)
