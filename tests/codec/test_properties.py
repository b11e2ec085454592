# SPDX-License-Identifier: Apache-2.0
"""The property table: against the type, against paho-mqtt's table, and each row in each place."""

from __future__ import annotations

from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from paho.mqtt import properties as paho_properties
from paho.mqtt.packettypes import PacketTypes

from mqtt_nats.codec import EncodeError, MalformedPacket, MqttError, Properties, ProtocolError, QuotaExceeded
from mqtt_nats.codec.properties import PROPERTIES, WILL, Property, Wire, place, put_properties, read_properties
from mqtt_nats.codec.wire import MAX_REMAINING_LENGTH, PacketKind, Reader, put_varint
from tests.codec.strategies import properties

PahoProperties: Any = paho_properties.Properties  # untyped
PLACES = {"WILL": WILL} | {
    kind.name: place(kind) for kind in PacketKind if kind not in (PacketKind.PINGREQ, PacketKind.PINGRESP)
}
EXAMPLES: dict[Wire, Any] = {
    Wire.BYTE: 1,
    Wire.TWO: 0x1234,
    Wire.FOUR: 0x12345678,
    Wire.VARINT: 200,
    Wire.BINARY: b"\0b",
    Wire.STRING: "s",
    Wire.PAIR: ("k", "v"),
}
each_row = pytest.mark.parametrize("row", PROPERTIES, ids=lambda row: row.name)
each_place = pytest.mark.parametrize("where", PLACES.values(), ids=PLACES.keys())


def _example(row: Property, where: int) -> Properties:
    value = EXAMPLES[row.wire]
    found = {row.name: [value] if row.repeats else value}
    if row.name == "authentication_data":
        found["authentication_method"] = "m"
    return cast("Properties", found)


def _read(raw: bytes, where: int, users: int = 3) -> Properties | None:
    reader = Reader(raw, 0, len(raw))
    found = read_properties(reader, where, users)
    reader.finish()
    return found


def _paho(name: str) -> int:
    return cast("int", getattr(PacketTypes, "WILLMESSAGE" if name == "WILL" else name))


def test_names_and_types() -> None:
    hints = get_type_hints(Properties)
    assert [row.name for row in PROPERTIES] == list(hints)
    for row in PROPERTIES:
        hint = hints[row.name]
        assert (list in (hint, get_origin(hint))) is bool(row.repeats)
        if hint is list:
            continue  # mypyc keeps no more of it
        single = get_args(hint)[0] if row.repeats else hint
        assert (get_origin(single) or single) is type(EXAMPLES[row.wire])


def test_table_is_that_of_paho() -> None:
    theirs = PahoProperties(PacketTypes.CONNECT)
    kinds = {"Byte": "BYTE", "Two Byte Integer": "TWO", "Four Byte Integer": "FOUR", "Variable Byte Integer": "VARINT"}
    kinds |= {"Binary Data": "BINARY", "UTF-8 Encoded String": "STRING", "UTF-8 String Pair": "PAIR"}
    assert {row.id: row.name for row in PROPERTIES} == {
        number: name.lower().replace(" ", "_") for name, number in theirs.names.items()
    }
    for row in PROPERTIES:
        wire, packets = theirs.properties[row.id]
        assert kinds[theirs.types[wire]] == row.wire.name
        assert {name for name, mask in PLACES.items() if row.places & mask} == {
            name for name in PLACES if _paho(name) in packets
        }


@each_row
@each_place
def test_each_row_in_each_place(row: Property, where: int) -> None:
    found = _example(row, where)
    if row.places & where:
        raw = put_properties(found, where)
        assert raw[1] == row.id
        assert _read(raw, where) == found
    else:
        with pytest.raises(EncodeError):
            put_properties(found, where)
        lawful = next(mask for mask in PLACES.values() if row.places & mask)
        with pytest.raises(MalformedPacket):
            _read(put_properties(found, lawful), where)


@each_row
def test_repeats(row: Property) -> None:
    for where in PLACES.values():
        if not row.places & where:
            continue
        once = put_properties(_example(row, where), where)[1:]
        twice = put_varint(2 * len(once)) + once + once
        if row.repeats & where:
            value = EXAMPLES[row.wire]
            assert _read(twice, where) == {row.name: [value, value]}
            assert put_properties(cast("Properties", {row.name: [value, value]}), where) == twice
        else:
            with pytest.raises(ProtocolError):
                _read(twice, where)
            if row.repeats:
                with pytest.raises(EncodeError):
                    put_properties(cast("Properties", {row.name: [1, 2]}), where)


@each_row
def test_range(row: Property) -> None:
    size = {Wire.BYTE: 1, Wire.TWO: 2, Wire.FOUR: 4, Wire.VARINT: 1}.get(row.wire)
    if size is None:
        return
    where = next(mask for mask in PLACES.values() if row.places & mask)
    top = {Wire.BYTE: 0xFF, Wire.TWO: 0xFFFF, Wire.FOUR: 0xFFFF_FFFF, Wire.VARINT: 100}[row.wire]
    for value in (0, 1, 2, top):
        raw = bytes((1 + size, row.id)) + value.to_bytes(size, "big")
        named = cast("Properties", {row.name: [value] if row.repeats else value})
        if row.low <= value <= row.high:
            assert _read(raw, where) == named
            assert put_properties(named, where) == raw
        else:
            with pytest.raises(MqttError) as caught:
                _read(raw, where)
            assert type(caught.value) is row.error
            with pytest.raises(EncodeError):
                put_properties(named, where)
    with pytest.raises(EncodeError):
        put_properties(cast("Properties", {row.name: [1 << 32] if row.repeats else 1 << 32}), where)


def test_no_properties() -> None:
    assert put_properties(None, WILL) == put_properties({}, WILL) == b"\0"
    assert _read(b"\0", WILL) is None


def test_limit_of_user_properties() -> None:
    pairs = [("k", str(number)) for number in range(3)]
    where = PLACES["PUBLISH"]
    assert _read(put_properties({"user_property": pairs}, where), where) == {"user_property": pairs}
    with pytest.raises(QuotaExceeded):
        _read(put_properties({"user_property": [*pairs, ("k", "3")]}, where), where)


def test_a_value_does_not_run_over_the_end_of_the_list() -> None:
    reader = Reader(b"\x03\x03\x00\x01a", 0, 5)
    with pytest.raises(MalformedPacket):
        read_properties(reader, WILL, 1)


@pytest.mark.parametrize("name", PLACES)
def test_paho_reads_what_we_write(name: str) -> None:
    @given(properties(PLACES[name]))
    def check(found: Properties | None) -> None:
        if found and found.get("maximum_packet_size", 0) > MAX_REMAINING_LENGTH:
            found["maximum_packet_size"] = MAX_REMAINING_LENGTH  # paho's limit, not MQTT's
        raw = put_properties(found, PLACES[name])
        theirs = PahoProperties(_paho(name))
        theirs.unpack(raw)
        values = {}
        for row in PROPERTIES:
            value = getattr(
                theirs, "".join(word.capitalize() for word in row.name.split("_")).replace("Qos", "QoS"), None
            )
            if value is not None:
                values[row.name] = value
        assert values == (found or {})

    check()
