# SPDX-License-Identifier: Apache-2.0
"""JetStream over the blocking connection: what it answers, what it refuses and by which option, stores in bulk."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pyspark_mqtt_nats.errors import AccessError, ApiError, RequestTimeout
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import (
    PubAck,
    Publish,
    api,
    create_consumer,
    delete_consumer,
    get_message,
    publish_all,
    stream_info,
)
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer
from tests.spark.servers import connect, listener, says_hello

ID = b"NATS/1.0\r\nNats-Msg-Id:%d\r\n\r\n"


@pytest.fixture
def connection(nats_server: NatsServer) -> Iterator[Connection]:
    with connect(nats_server.url) as opened:
        yield opened


def create(connection: Connection, name: str, **config: Any) -> None:
    api(connection, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], "storage": "memory"} | config)


def store(connection: Connection, *subjects: str) -> list[int]:
    """Sequences of new messages, each with its number as payload and as header."""
    messages = (
        Publish(subject.encode(), b"NATS/1.0\r\nN:%d\r\n\r\n" % number, b"%d" % number)
        for number, subject in enumerate(subjects)
    )
    outcomes = list(publish_all(connection, messages))
    assert all(isinstance(outcome, PubAck) for outcome in outcomes)
    return [outcome.seq for outcome in outcomes if isinstance(outcome, PubAck)]


def refusal(connection: Connection, verb: str, body: dict[str, Any] | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        api(connection, verb, body)
    assert "\n" not in str(caught.value)
    assert f"option {caught.value.option})" in str(caught.value)
    return caught.value


def test_streams_and_messages(connection: Connection) -> None:
    create(connection, "plain")
    assert store(connection, "plain.a", "plain.b", "plain.a") == [1, 2, 3]
    state = stream_info(connection, "plain", subjects_filter="plain.a")["state"]
    assert (state["messages"], state["subjects"]) == (3, {"plain.a": 2})
    message = get_message(connection, "plain", seq=2)
    assert message is not None
    assert (message.subject, message.seq, message.payload) == ("plain.b", 2, b"1")
    assert message.headers == b"NATS/1.0\r\nN:1\r\n\r\n"
    newest = get_message(connection, "plain", last_by_subj="plain.a")
    after = get_message(connection, "plain", seq=2, next_by_subj="plain.a")
    assert newest == after
    assert newest is not None
    assert newest.seq == 3
    assert get_message(connection, "plain", seq=4) is None


def test_consumers(connection: Connection) -> None:
    create(connection, "consumed")
    store(connection, "consumed.a", "consumed.b.c", "consumed.b.d")
    info = create_consumer(connection, "consumed", {"name": "c", "ack_policy": "none", "filter_subject": "consumed.a"})
    assert (info["name"], info["num_pending"]) == ("c", 1)
    unnamed = create_consumer(connection, "consumed", {"filter_subjects": ["consumed.*.c", "consumed.b.*"]})
    assert unnamed["num_pending"] == 2
    for name in ("c", unnamed["name"]):
        assert delete_consumer(connection, "consumed", name)
        assert not delete_consumer(connection, "consumed", name)
    assert not delete_consumer(connection, "nosuch", "c")
    with pytest.raises(ApiError, match=r"filters cannot overlap \(option topics\)"):
        create_consumer(connection, "consumed", {"filter_subjects": ["consumed.>", "consumed.a"]})


def test_a_stream_that_is_not_there(connection: Connection) -> None:
    with pytest.raises(ApiError, match=r"there is no stream nosuch \(option stream\)") as caught:
        stream_info(connection, "nosuch")
    assert (caught.value.option, caught.value.err_code, caught.value.code) == ("stream", 10059, 404)
    for call in (
        lambda: create_consumer(connection, "nosuch", {}),
        lambda: get_message(connection, "nosuch", seq=1),
    ):
        with pytest.raises(ApiError, match=r"there is no stream nosuch \(option stream\)"):
            call()


def test_what_jetstream_refuses_is_said_in_its_words(connection: Connection) -> None:
    create(connection, "small", max_consumers=1)
    create_consumer(connection, "small", {"name": "one"})
    error = refusal(connection, "CONSUMER.CREATE.small.two", {"stream_name": "small", "config": {"name": "two"}})
    assert (error.option, error.description) == ("stream", "maximum consumers limit reached")
    assert str(error) == "JetStream: maximum consumers limit reached (option stream)"


def test_where_there_is_no_jetstream(nats_factory: NatsFactory) -> None:
    server = nats_factory(
        config="""
        jetstream: false
        accounts { A: {users: [{user: a, password: p}]} }"""
    )
    with connect(server.url, user="a", password="p") as connection:
        error = refusal(connection, "STREAM.INFO.s")
        assert (error.option, error.code) == ("servers", 503)
        assert "no JetStream on nats://" in str(error)


def test_an_account_without_jetstream(nats_factory: NatsFactory) -> None:
    server = nats_factory(
        config="""accounts {
            A: {jetstream: enabled, users: [{user: a, password: p}]}
            B: {users: [{user: b, password: p}]}
        }"""
    )
    with connect(server.url, user="a", password="p") as connection:
        create(connection, "s")
    with connect(server.url, user="b", password="p") as connection:
        error = refusal(connection, "STREAM.INFO.s")
    assert error.option == "user"
    assert "JetStream not enabled for account" in str(error)


def test_permissions(nats_factory: NatsFactory) -> None:
    server = nats_factory(
        config="""authorization { users: [
            {user: u, password: p, permissions: {publish: {allow: ["$JS.API.STREAM.INFO.s"]}}}
            {user: admin, password: p}
        ] }"""
    )
    with connect(server.url, user="admin", password="p") as connection:
        create(connection, "s")
    with connect(server.url, user="u", password="p") as connection:
        assert stream_info(connection, "s")["state"]["messages"] == 0
        with pytest.raises(AccessError, match=r'Publish to "\$JS.API.STREAM.INFO.t".*\(option user\)') as caught:
            stream_info(connection, "t")
        assert caught.value.option == "user"
        with pytest.raises(AccessError, match=r'Publish to "s\.a"'):
            list(publish_all(connection, [Publish(b"s.a", b"", b"")]))


def test_domains_and_prefixes(nats_factory: NatsFactory) -> None:
    server = nats_factory(
        config="""
        jetstream { domain: hub }
        accounts {
            A: {
                jetstream: enabled
                users: [{user: a, password: p}]
                exports: [{service: "$JS.API.>"}]
            }
            B: {
                users: [{user: b, password: p}]
                imports: [{service: {account: A, subject: "$JS.API.>"}, to: "theirs.js.>"}]
            }
        }"""
    )
    a, b = {"user": "a", "password": "p"}, {"user": "b", "password": "p"}
    with connect(server.url, jsDomain="hub", **a) as connection:
        create(connection, "s")
    for options in ({"jsDomain": "hub"} | a, a, {"apiPrefix": "theirs.js"} | b):
        with connect(server.url, **options) as connection:
            assert stream_info(connection, "s")["config"]["name"] == "s"
    for options, option in (({"jsDomain": "rim"} | a, "jsDomain"), ({"apiPrefix": "ours.js"} | b, "apiPrefix")):
        with connect(server.url, **options) as connection:
            error = refusal(connection, "STREAM.INFO.s")
        assert (error.option, error.code) == (option, 503)


# -- stores ---------------------------------------------------------------------------------------


def test_many_are_stored_in_order(connection: Connection) -> None:
    create(connection, "many")
    messages = (Publish(b"many.%d" % (number % 10), b"", b"%d" % number) for number in range(20_000))
    outcomes = list(publish_all(connection, messages, window=500))
    assert outcomes == [PubAck("many", number + 1) for number in range(20_000)]
    message = get_message(connection, "many", seq=12_346)
    assert message is not None
    assert (message.subject, message.payload) == ("many.5", b"12345")


def test_the_window_bounds_what_is_underway(connection: Connection) -> None:
    create(connection, "window")
    taken = yielded = most = 0

    def messages() -> Iterator[Publish]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield Publish(b"window.a", b"", bytes(1000))

    for bounds, limit in (({"window": 7}, 7), ({"window_bytes": 4500}, 5)):
        taken = yielded = most = 0
        for _ in publish_all(connection, messages(), **bounds):
            most = max(most, taken - yielded)
            yielded += 1
        assert (yielded, most) == (100, limit)
    assert list(publish_all(connection, ())) == []


def test_each_message_has_its_own_outcome(connection: Connection) -> None:
    """Repeated, in no stream, refused by the stream, too large: the others are stored."""
    create(connection, "mixed", max_msg_size=200, subjects=["mixed.>"])
    messages = [
        Publish(b"mixed.a", ID % 1, b"one"),
        Publish(b"mixed.a", ID % 1, b"one"),
        Publish(b"nowhere", b"", b""),
        Publish(b"mixed.a", b"", bytes(300)),
        Publish(b"mixed.a", b"", bytes(connection.max_payload + 1)),
        Publish(b"mixed.a", b"NATS/1.0\r\nNats-Expected-Last-Sequence:77\r\n\r\n", b""),
        Publish(b"mixed.a", ID % 2, b"two"),
    ]
    first, again, nowhere, large, huge, unexpected, last = publish_all(connection, messages)
    assert (first, again, last) == (PubAck("mixed", 1), PubAck("mixed", 1, True), PubAck("mixed", 2))
    expected = (
        (nowhere, 503, "no stream takes messages on this subject"),
        (large, 400, "message size exceeds maximum allowed"),
        (huge, 400, "more than the max_payload"),
        (unexpected, 400, "wrong last sequence: 1"),
    )
    for outcome, code, words in expected:
        assert isinstance(outcome, ApiError)
        assert (outcome.code, words in str(outcome)) == (code, True), str(outcome)


def test_answers_that_are_not_jetstreams_and_one_that_is_missing() -> None:
    answers = (b"hello", b'{"stream":"s"}', b'{"stream":"s","seq":5}', b"[]")

    def serve(client: socket.socket) -> None:
        says_hello(client)
        asked = b""
        while asked.count(b"PUB odd ") < 5:
            asked += client.recv(65_536)
        inboxes = [line.split()[2] for line in asked.splitlines() if line.startswith(b"PUB odd ")]
        for inbox, answer in reversed(list(zip(inboxes, answers, strict=False))):  # in any order
            client.sendall(b"MSG %b R %d\r\n%b\r\n" % (inbox, len(answer), answer))
        while client.recv(65_536):
            pass

    with listener(serve) as url, connect(url, requestTimeout=0.5) as connection:
        outcomes = publish_all(connection, [Publish(b"odd", b"", b"")] * 5)
        for expected in ("not JSON", "is not a JetStream acknowledgement", "", "not a JSON object"):
            outcome = next(outcomes)
            assert (expected in str(outcome)) if expected else outcome == PubAck("s", 5)
        with pytest.raises(RequestTimeout, match=r"not acknowledged within 0.5 s \(option requestTimeout\)"):
            next(outcomes)


def test_an_api_that_does_not_answer() -> None:
    def serve(client: socket.socket) -> None:
        says_hello(client)
        while client.recv(65_536):
            pass

    with listener(serve) as url, connect(url, requestTimeout=0.3) as connection:
        with pytest.raises(RequestTimeout, match=r"no answer on \$JS.API.STREAM.INFO.s within 0.3 s"):
            stream_info(connection, "s")
        with pytest.raises(ApiError, match=r"max_payload"):
            api(connection, "STREAM.INFO.s", {"a": "x" * (1 << 20)})
