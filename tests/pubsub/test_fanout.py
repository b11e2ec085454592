# SPDX-License-Identifier: Apache-2.0
"""From a message to what its subscribers are sent."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import Decoder, Limits, PublishRun, encode_publish
from mqtt_nats.messages.headers import header, identity, publish_qos, publisher
from mqtt_nats.messages.message import Message, Stored
from mqtt_nats.pubsub import fanout as module
from mqtt_nats.pubsub.backlog import Backlog
from tests.pubsub.support import Bench, Subscriber, key_of

KEY = key_of("a")
PACKET = b"\x30\x04\x00\x01ax"


def headers(qos: int, identifier: bytes = b"", *more: bytes) -> bytes:
    lines = [b"Nmqtt-Pub:%d" % qos, *([b"Nmqtt-Id:" + identifier] if identifier else []), *more]
    return b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


@pytest.mark.parametrize(
    ("block", "qos"),
    [
        (b"", 0),
        (b"NATS/1.0\r\nNmqtt-Pub:0\r\n\r\n", 0),
        (b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n", 1),
        (b"NATS/1.0\r\nNmqtt-Pub: 1\r\n\r\n", 1),
        (b"NATS/1.0\r\nX: y\r\nNmqtt-Pub: 2\r\n\r\n", 2),
        (b"NATS/1.0\r\nNmqtt-Pub:\t2 \r\n\r\n", 2),
        (b"NATS/1.0\r\nNmqtt-Pub: 3\r\n\r\n", 0),
        (b"NATS/1.0\r\nNmqtt-Pub:\r\n\r\n", 0),
        (b"NATS/1.0\r\nXNmqtt-Pub: 1\r\n\r\n", 0),
        (b"NATS/1.0\r\nX: Nmqtt-Pub:1\r\n\r\n", 0),
    ],
)
def test_publish_qos(block: bytes, qos: int) -> None:
    assert publish_qos(block) == qos


def test_header_values() -> None:
    block = b"NATS/1.0\r\nA:x\r\nB:  y z \r\nNmqtt-Client:caf%C3%A9%20%0A\r\nNmqtt-Id: i\r\n\r\n"
    assert header(block, b"A:") == b"x"
    assert header(block, b"B:") == b"y z"
    assert header(block, b"C:") == b""
    assert publisher(block) == "café \n"
    assert publisher(b"") == ""
    assert identity(block) == b"i"
    assert identity(b"NATS/1.0\r\nNats-Msg-Id:q2-7\r\nNmqtt-Id:i\r\n\r\n") == b"q2-7"
    assert identity(b"NATS/1.0\r\nNats-Msg-Id:mine\r\nNmqtt-Id:i\r\n\r\n") == b"i"


# -- runs -----------------------------------------------------------------------------------------


def run_of(*payloads: bytes) -> PublishRun:
    decoder = Decoder(
        Limits(
            max_packet_size=10**6,
            connect_packet_size=10**6,
            max_topic_levels=10,
            max_filters=10,
            max_user_properties=0,
        )
    )
    connect = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"
    packets = decoder.feed(connect + b"".join(encode_publish(KEY, one, 0, False, False, 0, 4) for one in payloads))
    run = packets[1]
    assert isinstance(run, PublishRun)
    assert run.count == len(payloads)
    return run


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_run_is_sent_as_it_came_and_published_one_by_one(count: int) -> None:
    bench = Bench()
    sender, near, other = (Subscriber(bench, name) for name in ("sender", "near", "other"))
    bench.subscribe(near, "a", 1)
    bench.subscribe(other, "a", 0)
    run = run_of(*(b"%02d" % number for number in range(count)))
    bench.fanout.run(bench.route("a"), run, sender)
    bench.round.start()
    bench.turn()
    assert near.bytes == other.bytes == [run.raw]
    expected = b"".join(b"PUB a 2\r\n%02d\r\n" % number for number in range(count))
    assert b"".join(bench.main.out) == expected
    assert bench.fanout.sent == [2 * count, 0, 0]
    assert bench.fanout.sent_bytes == [4 * count, 0, 0]


@pytest.mark.parametrize("count", [1, 3])
def test_large_packets_are_published_one_by_one(count: int) -> None:
    bench = Bench()
    sender = Subscriber(bench, "sender")
    payloads = [b"%d" % number * (module.PARTS_PACKET_BYTES + 1) for number in range(count)]
    bench.fanout.run(bench.route("a"), run_of(*payloads), sender)
    expected = b"".join(b"PUB a %d\r\n%b\r\n" % (module.PARTS_PACKET_BYTES + 1, payload) for payload in payloads)
    assert b"".join(bench.main.out) == expected
    assert [len(part) for part in bench.main.out[1::2]] == [module.PARTS_PACKET_BYTES + 1] * count, (
        "a payload is copied"
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("topic", ["t" * 2045, "t" * 3000])
def test_large_packets_without_payload(topic: str, count: int) -> None:
    bench = Bench()
    sender, one = Subscriber(bench, "sender"), Subscriber(bench, "one")
    bench.subscribe(one, topic, 0)
    raw = encode_publish(key_of(topic), b"", 0, False, False, 0, 4)
    run = PublishRun(key_of(topic), raw * count, count, len(raw), len(raw))
    bench.fanout.run(bench.route(topic), run, sender)
    bench.round.start()
    bench.turn()
    assert b"".join(bench.main.out) == b"PUB %b 0\r\n\r\n" % topic.encode() * count
    assert one.bytes == [raw * count]


def into_a_buffer(run: PublishRun) -> PublishRun:
    """The same as it is when it was read into a buffer of its own."""
    return PublishRun(run.key, bytearray(run.raw), run.count, run.step, run.head)


@pytest.mark.parametrize("version", [4, 5])
def test_what_was_read_into_a_buffer_goes_the_same_way(version: int) -> None:
    """To clients of both versions and to NATS, not copied for those who get it as it is, after what waited for them."""
    outcomes = []
    for large in (False, True):
        bench = Bench()
        sender, four = Subscriber(bench, "sender", version=version), Subscriber(bench, "four")
        five, gated = Subscriber(bench, "five", version=5), Subscriber(bench, "gated")
        for one in (four, five, gated):
            found = bench.subscribe(one, "a", 1)
        gated.close_gate(found)
        bench.table.changed(found)
        plain = run_of(b"x" * 200_000)
        if version == 5:
            plain = PublishRun(
                KEY, encode_publish(KEY, b"x" * 200_000, 0, False, False, 0, 5), 1, plain.step + 1, plain.head + 1
            )
        run = into_a_buffer(plain) if large else plain
        four.write_buffer.write(b"first")
        bench.fanout.run(bench.route("a"), run, sender)
        bench.round.start()
        bench.turn()
        same = five if version == 5 else four
        if large:
            assert same.bytes[-1] is run.raw
        assert [type(payload) for _, payload, _, _ in gated.guarded] == [bytes]
        ways = [b"".join(one.bytes) for one in (four, five)]
        outcomes.append((ways, b"".join(bench.main.out), gated.guarded, bench.fanout.sent, bench.fanout.sent_bytes))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0][0].startswith(b"first")


def test_what_was_read_into_a_buffer_is_lost_as_the_rest() -> None:
    """By who does not read: counted, once there is more than it may have waiting."""
    bench = Bench()
    slow, sender = Subscriber(bench, "slow"), Subscriber(bench, "sender")
    bench.subscribe(slow, "a", 0)
    run = into_a_buffer(run_of(b"x" * 200_000))
    slow.write_buffer.limit = len(run.raw)
    slow.write_buffer.clog()
    for _ in range(2):
        bench.fanout.run(bench.route("a"), run, sender)
    assert (slow.write_buffer.dropped, slow.write_buffer.held) == (1, len(run.raw))
    slow.write_buffer.unclog()
    assert slow.bytes == [run.raw]


def test_a_run_past_a_gate() -> None:
    bench = Bench()
    sender, one = Subscriber(bench, "sender"), Subscriber(bench, "one")
    found = bench.subscribe(one, "a", 1)
    one.close_gate(found)
    bench.table.changed(found)
    bench.fanout.run(bench.route("a"), run_of(b"1", b"2"), sender)
    bench.turn()
    assert one.guarded == [("a", b"1", 0, 1), ("a", b"2", 0, 1)]
    assert one.bytes == []


# -- dedupe ---------------------------------------------------------------------------------------


def test_a_message_with_an_id_comes_once_per_filter() -> None:
    bench = Bench()
    one, two = Subscriber(bench, "one"), Subscriber(bench, "two")
    bench.subscribe(one, "a", 1)
    bench.subscribe(two, "+", 1)
    for _ in range(2):
        bench.from_nats(b"a", headers(1, b"id"))
    bench.fanout.rotate()
    bench.from_nats(b"a", headers(1, b"id"))
    assert one.taken == two.taken == [(b"x", 1)]
    bench.fanout.rotate()
    bench.fanout.rotate()
    assert not bench.fanout._remembering, "nothing is kept for good"
    bench.from_nats(b"a", headers(1, b"id"))
    assert len(one.taken) == 2


def test_what_was_on_its_way_is_not_for_a_member_that_joins() -> None:
    """A retained message is: the replay may have been read before it was stored."""
    bench = Bench()
    first, second = Subscriber(bench, "first"), Subscriber(bench, "second")
    bench.subscribe(first, "+", 1).begin_joining(first)
    bench.from_nats(b"a", headers(1, b"1"))
    found = bench.subscribe(second, "+", 1)
    found.begin_joining(second)
    bench.from_nats(b"a", headers(1, b"2"))
    bench.from_nats(b"a", headers(1, b"3", b"Nmqtt-Retain:1"), b"r")
    assert second.taken == [(b"r", 1)]
    found.end_joining(second)
    assert found.joining is None
    bench.from_nats(b"a", headers(1, b"4"))
    assert second.taken == [(b"r", 1), (b"x", 1)]
    assert len(first.taken) == 4


def test_what_waits_when_a_subscription_is_in_force_is_not_for_it() -> None:
    bench = Bench()
    first, second = Subscriber(bench, "first"), Subscriber(bench, "second")
    bench.subscribe(first, "+", 1)
    found = bench.subscribe(second, "+", 1)
    found.begin_joining(second)
    found.queue(backlog := Backlog(10_000))
    bench.from_nats(b"a", headers(1, b"1"))
    found.end_joining(second)
    bench.from_nats(b"a", headers(1, b"2"))
    assert [backlog.later(number, kept=False) for number in range(2)] == [{second}, set()]
    assert backlog.later(0, kept=True) == set()
    found.remove_member(second)
    assert backlog.later(0, kept=False) == set()


def test_the_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEEN_MOST", 10)
    bench = Bench()
    one = Subscriber(bench, "one")
    found = bench.subscribe(one, "a", 1)
    for number in range(35):
        for _ in range(2):
            bench.from_nats(b"a", headers(1, b"%d" % number))
    assert len(one.taken) == 35
    assert 10 <= len(found.seen) + len(found.seen_before) <= 20
    bench.from_nats(b"a", headers(1, b"25"))
    assert len(one.taken) == 35, "the newest are known"


def test_messages_without_an_id_are_never_taken_for_each_other() -> None:
    """A NATS client need not make ids."""
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "a", 1)
    for _ in range(2):
        bench.from_nats(b"a", headers(1))
    assert one.taken == [(b"x", 1)] * 2
    for _ in range(2):
        bench.from_nats(b"a", headers(0, b"id"))
        bench.from_nats(b"a")
    assert b"".join(one.bytes) == PACKET * 4, "QoS 0 is not looked at"


def test_a_release_that_is_repeated_is_dropped() -> None:
    """Locally and from another gateway, which repeats it after the first one has died."""
    bench = Bench()
    near, far = Subscriber(bench, "near"), Subscriber(bench, "far")
    bench.subscribe(near, "a", 2)
    bench.subscribe(far, "#", 2)
    message = Message(KEY, b"x", 2)
    for _ in range(2):
        bench.fanout.released(bench.route("a"), message, b"q2-7")
    assert near.taken == [(b"x", 2)]
    assert far.taken == [], "the wildcard's copy comes through NATS"
    for identifier in (b"first", b"second"):
        bench.from_nats(b"a", headers(2, identifier, b"Nats-Msg-Id:q2-7"))
    assert near.taken == [(b"x", 2)]
    assert far.taken == [(b"x", 2)]
    bench.fanout.released(bench.route("a"), message, b"q2-8")
    assert len(near.taken) == 2


def test_what_a_consumer_delivers_elsewhere_is_not_a_publish() -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "a", 0)
    bench.from_nats(b"a", reply=b"$JS.ACK.S.c.1.1.1.1.0")
    assert one.bytes == []
    bench.from_nats(b"a", reply=b"_INBOX.x")
    assert one.bytes == [PACKET]


def test_wildcards_do_not_see_reserved_subjects() -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "#", 0)
    bench.subscribe(one, "+/x", 0)
    for subject in (b"$JS.x", b"_INBOX.x", b"$MQTT.x", b"$x"):
        for _ in range(2):
            bench.from_nats(subject)
    assert one.bytes == []
    bench.from_nats(b"_x")
    assert len(one.bytes) == 1


# -- members --------------------------------------------------------------------------------------


def test_no_local_looks_at_every_message() -> None:
    bench = Bench()
    bridge, one = Subscriber(bench, "bridge", bridge=True), Subscriber(bench, "one")
    found = bench.subscribe(bridge, "a", 1)
    bench.subscribe(one, "a", 1)
    group = bench.route("a").groups[found]
    assert [(member, choice.found, choice.qos, choice.own) for member, choice in group.guarded] == [
        (bridge, found, 1, None)
    ]
    assert group.zero == [one.write_buffer]
    bench.from_nats(b"a", headers(1, b"id", b"Nmqtt-Client:bridge"))
    bench.fanout.local(bench.route("a"), Message(KEY, b"y", 1, "someone"))
    assert bridge.guarded == [("a", b"x", 1, 1), ("a", b"y", 1, 1)], "the member decides"
    assert one.taken == [(b"x", 1), (b"y", 1)]


def test_one_encoding_for_all() -> None:
    bench = Bench()
    members = [Subscriber(bench, str(number)) for number in range(3)]
    for member in members:
        bench.subscribe(member, "a", 0)
    bench.fanout.local(bench.route("a"), Message(KEY, b"x", 1))
    chunks = [member.write_buffer.chunks[0] for member in members]
    assert chunks[0] is chunks[1] is chunks[2]
    bench.turn()
    assert [member.bytes for member in members] == [[PACKET]] * 3


def test_one_write_per_member_and_turn() -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "a", 0)
    for _ in range(3):
        bench.fanout.local(bench.route("a"), Message(KEY, b"x", 0))
    assert len(bench.scheduled) == 1
    bench.turn()
    assert one.bytes == [PACKET * 3]


def test_a_clogged_member_loses_qos_0_and_is_counted_and_nobody_else_is_touched() -> None:
    bench = Bench()
    slow, one = Subscriber(bench, "slow"), Subscriber(bench, "one")
    slow.write_buffer.limit = 3 * len(PACKET)
    bench.subscribe(slow, "a", 1)
    bench.subscribe(one, "a", 1)
    slow.write_buffer.clog()
    for _ in range(5):
        bench.fanout.local(bench.route("a"), Message(KEY, b"x", 0))
        bench.from_nats(b"a")
    bench.turn()
    assert slow.bytes == []
    assert slow.write_buffer.dropped == bench.round.dropped == 7
    assert b"".join(one.bytes) == PACKET * 10
    bench.fanout.local(bench.route("a"), Message(KEY, b"x", 1))
    assert slow.taken == [(b"x", 1)], "QoS 1 is never dropped here"
    slow.write_buffer.unclog()
    assert b"".join(slow.bytes) == PACKET * 3
    bench.fanout.local(bench.route("a"), Message(KEY, b"x", 0))
    bench.turn()
    assert b"".join(slow.bytes) == PACKET * 4


def test_a_clogged_member_loses_whole_runs() -> None:
    bench = Bench()
    slow, sender = Subscriber(bench, "slow"), Subscriber(bench, "sender")
    bench.subscribe(slow, "a", 0)
    run = run_of(b"1", b"2", b"3")
    slow.write_buffer.limit = len(run.raw)
    slow.write_buffer.clog()
    for _ in range(2):
        bench.fanout.run(bench.route("a"), run, sender)
    assert slow.write_buffer.dropped == 3
    slow.write_buffer.unclog()
    assert slow.bytes == [run.raw]


def test_encodings() -> None:
    message = Message(KEY, b"x", 2, retain=True)
    assert message.zero() == b"\x31\x04\x00\x01ax"
    assert message.head(1) == b"\x33\x06\x00\x01a"
    assert message.head(2) is message.head(2)
    stored = Stored("a", KEY, b"x", 2, 0x0102)
    assert stored.packet(2) == b"\x34\x06\x00\x01a\x01\x02x"
    assert stored.packets == [b"", b"", stored.packet(2)]
    assert Stored("a", KEY, b"x", 1, 0x0102, retain=True).packet(1) == b"\x33\x06\x00\x01a\x01\x02x"


@pytest.mark.parametrize("topic_filter", ["a/b", "+/b", "#"])
def test_a_run_from_nats_is_the_same_as_its_messages(topic_filter: str) -> None:
    bench = Bench()
    four, five = Subscriber(bench, "four"), Subscriber(bench, "five", version=5)
    gated, other = Subscriber(bench, "gated"), Subscriber(bench, "other")
    for each in (four, five, gated):
        found = bench.subscribe(each, topic_filter, 1)
    gated.close_gate(found)
    bench.table.changed(found)
    bench.subscribe(other, "c", 0)
    payloads = [b"%03d" % number for number in range(50)]
    for payload in payloads:
        bench.from_nats(b"a.b", payload=payload)
    one = [b"".join(each.bytes) for each in (four, five)]
    kept = list(gated.guarded)
    assert bench.fanout.sent == [100, 0, 0]  # who looks at each counts what it sends
    assert bench.fanout.sent_bytes == [300, 0, 0]
    assert len(kept) == 50
    for each in (four, five, gated):
        each.bytes.clear()
    gated.guarded.clear()
    bench.run_from_nats(b"a.b", *payloads)
    assert [b"".join(each.bytes) for each in (four, five)] == one
    assert all(one)
    assert gated.guarded == kept
    assert bench.fanout.sent == [200, 0, 0]
    assert bench.fanout.sent_bytes == [600, 0, 0]
    assert not other.bytes


@pytest.mark.parametrize(("qos", "sent"), [(0, [3, 0, 0]), (1, [1, 2, 0]), (2, [1, 1, 1])])
def test_what_is_sent_is_counted_by_the_qos_at_which_each_gets_it(qos: int, sent: list[int]) -> None:
    bench = Bench()
    for granted in range(3):
        bench.subscribe(Subscriber(bench, f"s{granted}"), "a", granted)
    route = bench.route("a")
    bench.fanout.group(route.local, Message(route.key, b"12345", qos))
    assert bench.fanout.sent == sent
    assert bench.fanout.sent_bytes == [5 * count for count in sent]


def test_a_run_for_nobody() -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "#", 0)
    bench.run_from_nats(b"$SYS.x", b"1", b"2")
    bench.run_from_nats(b"_INBOX.x", b"1", b"2")
    assert not one.bytes
