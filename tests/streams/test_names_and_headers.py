# SPDX-License-Identifier: Apache-2.0
"""Hashes, subject tokens and header blocks."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams import hashing, headers
from mqtt_streams.fields import is_literal, is_subject, is_token

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@pytest.mark.parametrize(("name", "expected"), [("sub-1", "A4a1Bsn5"), ("h1srv", "7BA7vU7Z")])
def test_hash_is_nats_servers(name: str, expected: str) -> None:
    assert hashing.name_hash(name) == expected


def test_consumer_name() -> None:
    assert hashing.consumer_name("A4a1Bsn5", "n" * 22) == "A4a1Bsn5_" + "n" * 22


@given(st.binary(min_size=17, max_size=32))
def test_nuid_is_22_base62_characters(entropy: bytes) -> None:
    assert re.fullmatch(r"[0-9A-Za-z]{22}", hashing.nuid(entropy))


def test_nuids_differ() -> None:
    assert len({hashing.nuid(bytes([n]) + bytes(16)) for n in range(256)}) == 256


@pytest.mark.parametrize("client_id", ["sub-1", "Ünïcode", "a" * 200, "a=b", "a/b", "$x"])
def test_plain_ids_are_their_own_token(client_id: str) -> None:
    assert hashing.subject_token(client_id) == client_id


@pytest.mark.parametrize("client_id", ["", "*", ">", "a.b", "a b", "a\tb", "a" * 201, "é" * 101, "=A4a1Bsn5", "\x7f"])
def test_other_ids_are_hashed(client_id: str) -> None:
    assert hashing.subject_token(client_id) == "=" + hashing.name_hash(client_id)


@given(text)
def test_tokens_are_one_literal_token(client_id: str) -> None:
    token = hashing.subject_token(client_id)
    assert token
    assert not set(token) & set(" .*>\t\r\n\f\v")
    assert len(token.encode()) <= 200


def test_parse_keeps_order_and_repeats() -> None:
    block = b"NATS/1.0\r\nNmqtt-Pub:1\r\nb: x \r\na:1\r\nb:y:z\r\nempty:\r\n\r\n"
    assert headers.parse(block) == [("Nmqtt-Pub", "1"), ("b", "x"), ("a", "1"), ("b", "y:z"), ("empty", "")]
    assert headers.get(block, "b") == "x"
    assert headers.get_last(block, "b") == "y:z"
    assert headers.get(block, "Nmqtt-Pub") == "1"
    assert headers.get(block, "nmqtt-pub") is None
    assert headers.get(block, "Pub") is None
    assert headers.get_last(block, "nope") is None
    assert headers.parse(b"") == []
    assert headers.get(b"", "a") is None


@given(st.binary(max_size=80))
def test_parse_takes_any_bytes(tail: bytes) -> None:
    headers.parse(headers.START + tail)
    headers.get(headers.START + tail, "a")
    headers.status(tail)
    headers.get_int(headers.START + b"a:" + tail, "a")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", 0), (" 42", 42), ("", None), ("-1", None), ("1x", None), ("²", None), ("٣", None), ("9" * 19, 10**19 - 1)],
)
def test_numbers(value: str, expected: int | None) -> None:
    assert headers.get_int(headers.build([("n", value)]), "n") == expected
    assert headers.get_int(headers.build([("n", "9" * 20)]), "n") is None


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"NATS/1.0 404 No Messages\r\n\r\n", 404),
        (b"NATS/1.0 503\r\n\r\n", 503),
        (b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n", None),
        (b"NATS/1.0 x04\r\n\r\n", None),
        (b"", None),
    ],
)
def test_inline_status(block: bytes, expected: int | None) -> None:
    assert headers.status(block) == expected


pairs = st.lists(
    st.tuples(
        st.text(st.characters(codec="ascii", exclude_characters=":\r\n"), min_size=1),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n")).map(lambda v: v.strip(" \t")),
    )
)


@given(pairs)
def test_build_and_parse(items: list[tuple[str, str]]) -> None:
    assert headers.parse(headers.build(items)) == items


@pytest.mark.parametrize("pair", [("", "x"), ("a:b", "x"), ("a\r", "x"), ("a", "x\r\ny"), ("a", "\n"), ("a\nb", "x")])
def test_build_refuses_what_breaks_the_block(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="not a header"):
        headers.build([pair])


def test_ready_blocks() -> None:
    assert headers.PUB_BLOCKS[1] == b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n"
    assert [headers.parse(block) for block in headers.PUB_BLOCKS] == [[("Nmqtt-Pub", str(qos))] for qos in range(3)]


def test_message_id() -> None:
    assert headers.message_id(1, 2, 3) == "0000000000000001" + "000000000002" + "0003"
    assert headers.message_id(2**64 + 1, 2**48 + 2, 2**16 + 3) == headers.message_id(1, 2, 3)


@given(text)
def test_percent_encoding(value: str) -> None:
    encoded = headers.percent_encode(value)
    assert headers.percent_decode(encoded) == value
    assert re.fullmatch(r"[A-Za-z0-9_.~%-]*", encoded)
    headers.build([("a", encoded)])


def subject_of(tokens: list[str]) -> bool:
    """What NATS accepts, token by token: `>` at the end only, `*` alone, nothing that ends a word."""
    plain = all(token and not set(token) & set(" \t\r\n\f\v\0\x7f") for token in tokens)
    wild = all(token == "*" for token in tokens if "*" in token) and all(
        token == ">" for token in tokens if ">" in token
    )
    return plain and wild and ">" not in tokens[:-1]


def test_what_is_a_subject() -> None:
    for size in range(6):
        for signs in product("aé.*> \n", repeat=size):
            one = "".join(signs)
            assert is_subject(one) == subject_of(one.split(".")), one
            assert is_literal(one) == (is_subject(one) and not set(one) & set("*>")), one
            assert is_token(one) == (is_literal(one) and "." not in one), one
    assert not any(is_subject(f"a{sign}b") for sign in "\t\r\f\v\0\x7f")
