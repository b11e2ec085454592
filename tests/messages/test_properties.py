# SPDX-License-Identifier: Apache-2.0
"""Properties as NATS headers and back: [MQTT-3.3.2-4] (5.0), [MQTT-3.3.2-15] (5.0) to [MQTT-3.3.2-20] (5.0)."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqtt_nats.codec import Properties
from mqtt_nats.codec.properties import read_properties
from mqtt_nats.codec.wire import PacketKind, Reader, put_varint
from mqtt_nats.messages import properties as module
from mqtt_nats.messages.properties import SHOWN_MOST, body, from_headers
from mqtt_streams import headers as streams_headers
from mqtt_streams import properties as written
from mqtt_streams.properties import header_lines, ttl_line

PUB1 = b"NATS/1.0\r\nNmqtt-Pub:1\r\n"

HOSTILE_NAMES = [
    "",
    " ",
    "a b",
    " a",
    "a ",
    "a:b",
    ":",
    "a\r\nNats-Rollup",
    "a\n",
    "\r",
    "Nats-Msg-Id",
    "nats-rollup",
    "NATS-TTL",
    "Nmqtt-Pub",
    "nmqtt-user",
    "Status",
    "status",
    "STATUS-Code",
    "Content-Type",
    "content-type",
    "CONTENT-TYPE",
    "Content-Type-Foo",
    "gr\u00f6\u00dfe",
    "\u212aelvin",
    "\u017ftatus",
    "\ufeffNats-Rollup",
    "%",
    "=",
    "NATS/1.0",
]
HOSTILE_VALUES = [
    "",
    " ",
    " a",
    "a ",
    "\t",
    "a\tb",
    "a\r\nNats-Rollup: all",
    "\r\n\r\n",
    "a\rb",
    "a\nb",
    "\u2028x",
    "\u00a0",
    "\x7f",
    "\x85x",
    "%41",
    "a=b",
    "1 2",
    "\u00e4 \U0001f600",
    "\ufeff",
    "\ufdd0",
    "\U0001fffe",
    "x" * 65_535,
]

EXPLICIT = {"content_type": "a\tb", "user_property": [("a", "\n")]}
"""What a publisher wanted to have sent."""

strings = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
topics = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), min_size=1, max_size=30)
plain_names = st.from_regex(r"[A-Za-z0-9!#$%&'*.^_`|~-]{1,12}", fullmatch=True)
pairs = st.tuples(
    st.one_of(plain_names, strings, st.sampled_from(HOSTILE_NAMES)),
    st.one_of(strings, st.sampled_from(HOSTILE_VALUES)),
)
user_properties = st.one_of(
    st.lists(pairs, min_size=1, max_size=64),
    st.lists(st.tuples(plain_names, st.sampled_from(["", "a", "b c", "\u00e4"])), min_size=1, max_size=64),
)
property_sets = st.fixed_dictionaries(
    {},
    optional={
        "payload_format_indicator": st.integers(0, 1),
        "message_expiry_interval": st.one_of(st.integers(0, 0xFFFF_FFFF), st.integers(0, 3)),
        "content_type": st.one_of(strings, st.sampled_from(HOSTILE_VALUES)),
        "response_topic": topics,
        "correlation_data": st.binary(max_size=50),
        "user_property": user_properties,
    },
).map(lambda found: cast("Properties", found))


def block(properties: Properties) -> bytes:
    return PUB1 + header_lines(properties) + b"\r\n"


def decoded(data: bytes) -> Properties:
    """A body as the codec reads it from a client's PUBLISH, None for no properties."""
    framed = put_varint(len(data)) + data
    reader = Reader(framed, 0, len(framed))
    found = read_properties(reader, 1 << PacketKind.PUBLISH, 100_000)
    reader.finish()
    return found if found is not None else {}


def users(headers: bytes) -> list[tuple[str, str]]:
    return decoded(from_headers(headers)[0]).get("user_property", [])


@pytest.mark.parametrize("properties", [b"", b"Content-Type:text/plain\r\n"])
@pytest.mark.parametrize("count", range(8))
def test_what_a_retained_message_begins_with_is_no_property(count: int, properties: bytes) -> None:
    """Whatever of it is there, in whatever order, and even in a block that is cut off."""
    own = [b"Nmqtt-RTopic:a/b", b"Nmqtt-RFlags:3", b"Nmqtt-ROrigin:7BA7vU7Z", b"Nmqtt-Client:me", b"Nats-Msg-Id:1"]
    for lines in (own[:count], own[count:], own[count:] + own[:count]):
        block = b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines)
        expected = b"\x03\0\x0atext/plain" if properties else b""
        assert from_headers(block + properties + b"\r\n") == (expected, -1)
        assert from_headers((block + properties).removesuffix(b"\r\n")) == (expected, -1)


class TestBothWays:
    @given(property_sets)
    def test_headers_give_the_same_properties(self, properties: Properties) -> None:
        expiry = properties.get("message_expiry_interval", -1)
        assert from_headers(block(properties)) == (body(properties), expiry)

    @given(property_sets)
    def test_body_is_what_the_codec_reads(self, properties: Properties) -> None:
        expected = {name: value for name, value in properties.items() if name != "message_expiry_interval"}
        assert decoded(body(properties)) == expected

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    @pytest.mark.parametrize("value", HOSTILE_VALUES)
    def test_hostile_user_property(self, name: str, value: str) -> None:
        properties: Properties = {"user_property": [("a", "1"), (name, value), ("a", "1")]}
        assert users(block(properties)) == properties["user_property"]

    @pytest.mark.parametrize("value", HOSTILE_VALUES)
    def test_hostile_content_type(self, value: str) -> None:
        assert decoded(from_headers(block({"content_type": value}))[0]) == {"content_type": value}

    @pytest.mark.parametrize(
        "topic", ["a", "a b", " a", "a/b ", "/", "a%2Fb", "\r\nNats-Rollup: all", "\u00e4", "$x/y"]
    )
    def test_response_topic(self, topic: str) -> None:
        assert decoded(from_headers(block({"response_topic": topic}))[0]) == {"response_topic": topic}

    def test_more_names_than_are_kept(self) -> None:
        for number in range(0, 10_000, 50):
            properties: Properties = {"user_property": [(f"n{one}", "v") for one in range(number, number + 50)]}
            assert users(block(properties)) == properties["user_property"]
        assert len(written._to_header) <= written.NAMES_MOST
        assert len(module._to_property) <= written.NAMES_MOST

    def test_long_names_are_not_kept(self) -> None:
        name = "n" * 65_535
        properties: Properties = {"user_property": [(name, "v")]}
        assert users(block(properties)) == properties["user_property"]
        assert name not in written._to_header
        assert name.encode() not in module._to_property


class TestLines:
    """What a message's headers are, byte by byte."""

    @pytest.mark.parametrize(
        ("properties", "lines"),
        [
            ({}, b""),
            ({"topic_alias": 3, "subscription_identifier": [1]}, b""),
            ({"message_expiry_interval": 0}, b"Nmqtt-Expiry:0\r\n"),
            ({"message_expiry_interval": 0xFFFF_FFFF}, b"Nmqtt-Expiry:4294967295\r\n"),
            ({"payload_format_indicator": 0}, b"Nmqtt-Format:0\r\n"),
            ({"payload_format_indicator": 1}, b"Nmqtt-Format:1\r\n"),
            ({"content_type": "text/plain; charset=utf-8"}, b"Content-Type:text/plain; charset=utf-8\r\n"),
            ({"content_type": ""}, b"Content-Type:\r\n"),
            ({"content_type": "a\r\nb"}, b"Nmqtt-Content-Type:a%0D%0Ab\r\n"),
            ({"response_topic": "reply/to/$me"}, b"Nmqtt-Reply:reply/to/$me\r\n"),
            ({"response_topic": "a b"}, b"Nmqtt-Reply:a%20b\r\n"),
            ({"correlation_data": b"\x00\xff"}, b"Nmqtt-Correlation:AP8=\r\n"),
            ({"correlation_data": b""}, b"Nmqtt-Correlation:\r\n"),
            ({"user_property": [("a", "1"), ("b", ""), ("a", "\u00e4 2")]}, b"a:1\r\nb:\r\na:\xc3\xa4 2\r\n"),
            (
                {"user_property": [("a", "1"), ("Nats-TTL", "1 s")]},
                b"Nmqtt-User:a=1\r\nNmqtt-User:Nats-TTL=1%20s\r\n",
            ),
        ],
    )
    def test_lines(self, properties: Properties, lines: bytes) -> None:
        assert header_lines(properties) == lines

    def test_the_expiry_is_the_first_line(self) -> None:
        """So that it can be told from a user property that looks like it."""
        lines = header_lines({"user_property": [("x", "Nmqtt-Expiry:7")], "message_expiry_interval": 7})
        assert lines == b"Nmqtt-Expiry:7\r\nx:Nmqtt-Expiry:7\r\n"

    @given(property_sets)
    @example({"user_property": [("a", "b\r\nNats-Rollup: all")]})
    @example({"user_property": [("Nats-Rollup", "all")]})
    def test_nothing_is_injected(self, properties: Properties) -> None:
        """Every line is one of ours or a user property as it is, and there are as many as there are properties."""
        lines = header_lines(properties)
        if not properties:
            assert lines == b""
            return
        assert lines.endswith(b"\r\n")
        given_users = properties.get("user_property", [])
        single = sum(name != "user_property" for name in properties)
        found = streams_headers.parse(PUB1 + lines)[1:]
        assert len(found) == single + len(given_users)
        ours = {"Nmqtt-Expiry", "Nmqtt-Format", "Content-Type", "Nmqtt-Content-Type", "Nmqtt-Reply"}
        ours |= {"Nmqtt-Correlation", "Nmqtt-User"}
        for name, value in found:
            assert name in ours or (name, value) in given_users
            assert not name.lower().startswith(("nats-", "status"))
        # No line ends but ours, for whatever splits lines more eagerly than NATS.
        assert len(lines.splitlines()) == len(found)
        assert len(lines.decode().splitlines()) == len(found)

    @pytest.mark.parametrize(
        ("properties", "line"),
        [
            ({}, b""),
            ({"message_expiry_interval": 0}, b"Nats-TTL:1s\r\n"),
            ({"message_expiry_interval": 1}, b"Nats-TTL:1s\r\n"),
            ({"message_expiry_interval": 4_294_967_295}, b"Nats-TTL:4294967295s\r\n"),
        ],
    )
    def test_ttl(self, properties: Properties, line: bytes) -> None:
        assert ttl_line(properties) == line


class TestFromNats:
    """Headers that no gateway has written."""

    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            (b"", {}),
            (b"NATS/1.0\r\n\r\n", {}),
            (b"NATS/1.0 503\r\n\r\n", {}),
            (b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 1\r\n\r\n", {}),
            (PUB1 + b"\r\n", {}),
            (PUB1 + b"Nmqtt-Id:00112233445566778899aabbccddeeff\r\nNmqtt-Client:c1\r\nNmqtt-Subject:a\r\n\r\n", {}),
            (PUB1 + b"Nmqtt-Id:00112233445566778899aabbccddeeff\r\nNmqtt-Client:c1\r\nNmqtt-Retain:1\r\n\r\n", {}),
            (b"NATS/1.0\r\na: 1\r\nNmqtt-Pub:1\r\nb:2\r\n\r\n", {"user_property": [("a", "1"), ("b", "2")]}),
            (b"NATS/1.0\r\na:1\r\nA: 1 2 \r\na:\t3\r\n\r\n", {"user_property": [("a", "1"), ("A", "1 2"), ("a", "3")]}),
            (b"NATS/1.0\r\na:b:c\r\n\r\n", {"user_property": [("a", "b:c")]}),
            (b"NATS/1.0\r\na:b", {"user_property": [("a", "b")]}),
            (b"NATS/1.0\r\na:x\ny\r\nb:\x1b[2J\r\nc\t:1\r\nd:\x7f\r\ne:\xc2\x85\r\nf:\xef\xbf\xbf\r\n\r\n", {}),
            (b"NATS/1.0\r\nContent-Type:a\tb\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Content-Type:a%09b\r\nNmqtt-User:a=%0A\r\n\r\n", EXPLICIT),
            (b"NATS/1.0\r\nTraceparent: 00-ab-01\r\n\r\n", {"user_property": [("Traceparent", "00-ab-01")]}),
            (b"NATS/1.0\r\nno colon\r\n:no name\r\n\r\n", {}),
            (b"NATS/1.0\r\nNats-Msg-Id:x\r\nNATS-Foo:y\r\nnmqtt-foo:z\r\n Nats-TTL:1\r\nstatus:200\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-RTopic:x\r\nNmqtt-Unknown:y\r\nContent-Type-X:z\r\n\r\n", {}),
            (b"NATS/1.0\r\na:\xff\r\n\xff:a\r\nb:\0\r\nc\0:1\r\nd:\xed\xa0\x80\r\n\r\n", {}),
            (b"NATS/1.0\r\na:\xc3\xa4\r\n\r\n", {"user_property": [("a", "\u00e4")]}),
            (b"NATS/1.0\r\ncontent-type: a/b\r\nContent-Type: c\r\n\r\n", {"content_type": "a/b"}),
            (b"NATS/1.0\r\nContent-Type: \xff\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Content-Type: %FF\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Format: 1 \r\n\r\n", {"payload_format_indicator": 1}),
            (b"NATS/1.0\r\nNmqtt-Format:2\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Format:0\r\nNmqtt-Format:1\r\n\r\n", {"payload_format_indicator": 0}),
            (b"NATS/1.0\r\nNmqtt-Reply:a/b c\r\n\r\n", {"response_topic": "a/b c"}),
            (b"NATS/1.0\r\nNmqtt-Reply:\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Reply:a/+\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Reply:%23\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Reply:%00\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Correlation:?\r\n\r\n", {}),
            (b"NATS/1.0\r\nNmqtt-Correlation:QQ==\r\n\r\n", {"correlation_data": b"A"}),
            (b"NATS/1.0\r\nNmqtt-User:a=b=c\r\nd:e\r\n\r\n", {"user_property": [("a", "b=c"), ("d", "e")]}),
            (
                b"NATS/1.0\r\nNmqtt-User:%00=1\r\nNmqtt-User:a=%FF\r\nNmqtt-User:=\r\n\r\n",
                {"user_property": [("", "")]},
            ),
        ],
    )
    def test_shown(self, headers: bytes, expected: dict[str, object]) -> None:
        found, expiry = from_headers(headers)
        assert (decoded(found), expiry) == (expected, -1)

    @pytest.mark.parametrize(
        ("value", "expiry"),
        [
            (b"0", 0),
            (b" 60 ", 60),
            (b"0060", 60),
            (b"4294967295", 4294967295),
            (b"4294967296", -1),
            (b"99999999999", -1),
            (b"", -1),
            (b"-1", -1),
            (b"1.5", -1),
            (b"1s", -1),
            ("\u0663".encode(), -1),
        ],
    )
    def test_expiry(self, value: bytes, expiry: int) -> None:
        assert from_headers(b"NATS/1.0\r\nNmqtt-Expiry:" + value + b"\r\n\r\n") == (b"", expiry)

    def test_strings_of_a_packet_have_65535_bytes(self) -> None:
        fits = b"x" * 65_535
        for name, value in ((b"a", fits), (fits, b"1")):
            assert users(b"NATS/1.0\r\n" + name + b":" + value + b"\r\n\r\n") == [(name.decode(), value.decode())]
        for line in (b"a:x" + fits, b"x" + fits + b":1", b"Nmqtt-User:x" + fits + b"=1", b"Nmqtt-User:a=x" + fits):
            assert from_headers(b"NATS/1.0\r\n" + line + b"\r\n\r\n") == (b"", -1)
        for line in (b"Content-Type:x", b"Nmqtt-Content-Type:x", b"Nmqtt-Reply:x"):
            assert from_headers(b"NATS/1.0\r\n" + line + fits + b"\r\n\r\n") == (b"", -1)
        data: Properties = {"correlation_data": bytes(65_535)}
        assert decoded(from_headers(block(data))[0]) == data
        data = {"correlation_data": bytes(65_536)}
        assert from_headers(PUB1 + header_lines(data) + b"\r\n") == (b"", -1)

    @pytest.mark.parametrize("line", [b"a:%d\r\n", b"Nmqtt-User:a=%d\r\n"])
    def test_number_of_user_properties_is_bounded(self, line: bytes) -> None:
        lines = b"".join(line % number for number in range(SHOWN_MOST + 10))
        found = users(b"NATS/1.0\r\n" + lines + b"\r\n")
        assert found == [("a", str(number)) for number in range(SHOWN_MOST)]

    @given(
        st.lists(
            st.one_of(
                st.binary(max_size=30),
                st.sampled_from([b"\r\n", b":", b"NATS/1.0\r\n", b"Nmqtt-Pub:1", b"Nmqtt-Id:", b"Nmqtt-Expiry:5"]),
                st.sampled_from([b"Nmqtt-Reply:", b"Nmqtt-User:", b"Nmqtt-Correlation:", b"Content-Type:", b"%", b"="]),
            )
        ).map(b"".join)
    )
    def test_any_bytes_give_legal_properties(self, headers: bytes) -> None:
        found, expiry = from_headers(headers)
        decoded(found)
        assert -1 <= expiry <= 0xFFFF_FFFF
