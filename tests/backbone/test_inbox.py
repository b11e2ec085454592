# SPDX-License-Identifier: Apache-2.0
"""Requests and their replies."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from mqtt_nats.backbone import inbox as module
from mqtt_nats.backbone.inbox import RequestInbox, frame
from mqtt_nats.backbone.link import Handler, NatsConnection
from mqtt_streams.api import ApiError, NoResponders, Reply, RequestTimeout, bounded_ack_pending
from tests.harness.waiting import aeventually

NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"

INFO = "$JS.API.CONSUMER.INFO.$MQTT_msgs.C"
DELETE = "$JS.API.STREAM.MSG.DELETE.$MQTT_msgs"


class FakeLink:
    """A link whose server is the test."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.online = True
        self.max_payload = 1000
        self.handlers: dict[bytes, tuple[bytes, Handler]] = {}

    def kick(self) -> None:
        """Nothing to schedule."""

    def subscribe_raw(self, subject: bytes, handler: Handler) -> bytes:
        sid = b"%d" % (len(self.handlers) + 1)
        self.handlers[sid] = subject, handler
        return sid

    def unsubscribe_raw(self, sid: bytes) -> None:
        del self.handlers[sid]

    def unsubscribe_later(self, sid: bytes) -> None:
        """Messages on their way still reach the handler."""

    def renew(self, sid: bytes, subject: bytes) -> None:
        self.out.append(b"SUB %b %b" % (subject, sid))

    def reply(self, payload: bytes, headers: bytes = b"", *, delivery: bytes = b"") -> None:
        """Answer the last request; ``delivery``: how a consumer's message is acknowledged."""
        subject = self.out[-1].split(b" ")[2]
        for pattern, handler in list(self.handlers.values()):
            if subject == pattern or (pattern.endswith(b"*") and subject.startswith(pattern[:-1])):
                handler(subject, delivery, headers, payload)


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


@pytest.fixture
def inbox(link: FakeLink) -> RequestInbox:
    return RequestInbox(cast(NatsConnection, link))


def test_frames() -> None:
    assert frame(b"s", b"r", b"", b"abc") == b"PUB s r 3\r\nabc\r\n"
    assert frame(b"s", b"r", b"NATS/1.0\r\n\r\n", b"abc") == b"HPUB s r 12 15\r\nNATS/1.0\r\n\r\nabc\r\n"


async def test_the_account_limits_no_consumer_before_that_is_known(inbox: RequestInbox) -> None:
    assert bounded_ack_pending(inbox, 100) == 100
    inbox.limit(10)
    assert bounded_ack_pending(inbox, 100) == 10
    inbox.limit(0)
    assert bounded_ack_pending(inbox, 100) == 100


async def test_requests_get_their_own_replies(link: FakeLink, inbox: RequestInbox) -> None:
    first = asyncio.create_task(inbox.request("one", b"1"))
    await asyncio.sleep(0)
    target = link.out[-1].split(b" ")[2]
    second = asyncio.create_task(inbox.request("two", b"2"))
    await asyncio.sleep(0)
    link.reply(b"reply to two")
    _, handler = link.handlers[b"1"]
    handler(target, b"", b"", b"reply to one")
    handler(target, b"", b"", b"late")
    assert (await first).payload == b"reply to one"
    assert (await second).payload == b"reply to two"
    assert not inbox.waiters


@pytest.mark.parametrize(("subject", "missing"), [("$JS.API.STREAM.INFO.a", True), ("$MQTT.gateways.left.a", False)])
async def test_what_a_silence_says(link: FakeLink, inbox: RequestInbox, subject: str, missing: bool) -> None:
    """Of a stream that it may be no more; of a gateway that it is dead."""
    task = asyncio.create_task(inbox.request(subject))
    await asyncio.sleep(0)
    link.reply(b"", NO_RESPONDERS)
    with pytest.raises(NoResponders):
        await task
    assert inbox.unheard is missing


async def test_no_responders_and_silence(link: FakeLink, inbox: RequestInbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP", 0.01)
    task = asyncio.create_task(inbox.request("nobody"))
    await asyncio.sleep(0)
    link.reply(b"", NO_RESPONDERS)
    with pytest.raises(NoResponders):
        await task
    with pytest.raises(RequestTimeout):
        await inbox.request("silent", timeout=0.01)
    link.online = False
    with pytest.raises(RequestTimeout):
        await inbox.request("gone")
    assert not inbox.waiters


async def test_a_request_that_nats_would_not_take_is_not_sent(link: FakeLink, inbox: RequestInbox) -> None:
    with pytest.raises(ApiError):
        await inbox.request("large", b"x" * 989, b"NATS/1.0\r\n\r\n")
    assert not link.out


async def test_a_reply_subject_of_ones_own(link: FakeLink, inbox: RequestInbox) -> None:
    task = asyncio.create_task(inbox.request("s", reply="my.reply"))
    await asyncio.sleep(0)
    assert link.out[-1].startswith(b"PUB s my.reply 0\r\n")
    inbox.literal(b"other.reply", b"", b"no")
    inbox.literal(b"my.reply", b"H", b"yes")
    inbox.literal(b"my.reply", b"H", b"again")
    assert await task == ("my.reply", b"H", b"yes", "")


async def test_stream(link: FakeLink, inbox: RequestInbox) -> None:
    replies = inbox.stream("pages", timeout=0.05)
    first = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    for payload in (b"1", b"2"):
        link.reply(payload)
    assert (await first).payload == b"1"
    assert (await anext(replies)).payload == b"2"
    assert len(link.handlers) == 2
    with pytest.raises(RequestTimeout):
        await anext(replies)
    assert len(link.handlers) == 1, "its subscription is gone"


async def test_a_stream_that_nobody_serves(link: FakeLink, inbox: RequestInbox) -> None:
    replies = inbox.stream("pages")
    first = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    link.reply(b"", NO_RESPONDERS)
    with pytest.raises(NoResponders):
        await first


async def test_renew(link: FakeLink, inbox: RequestInbox) -> None:
    inbox.renew()
    assert link.out == [b"SUB %b* 1" % inbox.prefix]
    assert inbox.token() != inbox.token()


async def begin(inbox: RequestInbox, subject: str) -> asyncio.Task[Reply]:
    """A request that has no reply yet."""
    task = asyncio.create_task(inbox.request(subject))
    await asyncio.sleep(0)
    return task


async def test_a_new_leader_is_asked_again(
    link: FakeLink, inbox: RequestInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that may be repeated, once, and not one that the former leader may still answer."""
    monkeypatch.setattr(module, "SWEEP", 0.01)
    monkeypatch.setattr(module, "FORMER_LEADER_ANSWER_S", 0.05)
    task = await begin(inbox, INFO)
    inbox.elected("$MQTT_msgs", "")
    await asyncio.sleep(0.03)
    assert len(link.out) == 1
    await asyncio.sleep(0.05)
    inbox.elected("$MQTT_msgs", "")
    await aeventually(lambda: len(link.out) == 2)
    assert link.out[0] == link.out[1], "the reply to either will do"
    link.reply(b"here")
    assert (await task).payload == b"here"
    assert not inbox.waiters


async def test_requests_are_repeated_while_leaders_are_elected(
    link: FakeLink, inbox: RequestInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells of the election of the leader of metadata."""
    monkeypatch.setattr(module, "SWEEP", 0.01)
    monkeypatch.setattr(module, "REQUEST_REPEAT_S", 0.05)
    inbox.elected("$MQTT_out", "")
    task = await begin(inbox, "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs.C")
    await aeventually(lambda: len(link.out) == 4)
    link.reply(b"here")
    await task


async def test_the_first_leader_of_another_consumer_repeats_nothing(
    link: FakeLink, inbox: RequestInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster each new consumer has its leader elected."""
    monkeypatch.setattr(module, "SWEEP", 0.01)
    monkeypatch.setattr(module, "FORMER_LEADER_ANSWER_S", 0.0)
    monkeypatch.setattr(module, "REQUEST_REPEAT_S", 0.02)
    task = await begin(inbox, "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs.C")
    for number in range(10):
        inbox.elected("$MQTT_msgs", f"other{number}")
        await asyncio.sleep(0.01)
    link.reply(b"made")
    await task
    assert len(link.out) == 1


@pytest.mark.parametrize("stream", ["$MQTT_msgs", "$MQTT_out"])
async def test_a_change_that_may_not_be_made_twice(
    link: FakeLink, inbox: RequestInbox, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """Its outcome is unknown when its stream has a new leader."""
    monkeypatch.setattr(module, "SWEEP", 0.01)
    monkeypatch.setattr(module, "FORMER_LEADER_ANSWER_S", 0.0)
    task = await begin(inbox, DELETE)
    inbox.elected(stream, "")
    if stream == "$MQTT_msgs":
        with pytest.raises(RequestTimeout):
            await asyncio.wait_for(task, 1.0)
    else:
        await asyncio.sleep(0.05)
        link.reply(b"removed")
        assert (await task).payload == b"removed"
    assert len(link.out) == 1


@pytest.mark.parametrize("verb", ["DELETE", "RESET", "PAUSE"])
@pytest.mark.parametrize("elected", ["C", "other"])
async def test_a_change_of_a_consumer_that_had_no_leader(
    link: FakeLink, inbox: RequestInbox, monkeypatch: pytest.MonkeyPatch, verb: str, elected: str
) -> None:
    """nats-server does not answer it: whoever asked may ask again when the consumer has a leader."""
    monkeypatch.setattr(module, "SWEEP", 0.01)
    monkeypatch.setattr(module, "FORMER_LEADER_ANSWER_S", 0.0)
    task = await begin(inbox, f"$JS.API.CONSUMER.{verb}.$MQTT_msgs.C")
    inbox.elected("$MQTT_msgs", elected)
    if elected == "C":
        with pytest.raises(RequestTimeout):
            await asyncio.wait_for(task, 1.0)
    else:
        await asyncio.sleep(0.05)
        link.reply(b"done")
        assert (await task).payload == b"done"
    assert len(link.out) == 1


async def test_requests_of_a_lost_connection(
    link: FakeLink, inbox: RequestInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SWEEP", 0.01)
    question, change = await begin(inbox, INFO), await begin(inbox, DELETE)
    pages = asyncio.ensure_future(anext(inbox.stream("pages")))
    await asyncio.sleep(0)
    link.out.clear()
    inbox.renew()
    assert [one.split(b" ")[:2] for one in link.out] == [[b"SUB", inbox.prefix + b"*"], [b"PUB", INFO.encode()]]
    for task in (change, pages):
        with pytest.raises(RequestTimeout):
            await asyncio.wait_for(task, 1.0)
    link.reply(b"here")
    assert (await question).payload == b"here"


async def test_a_pull_request_ends_with_the_leader_of_its_consumer(link: FakeLink, inbox: RequestInbox) -> None:
    subject = "$JS.API.CONSUMER.MSG.NEXT.$MQTT_timers.gateways"
    waiting = asyncio.ensure_future(anext(inbox.stream(subject, timeout=60.0)))
    await asyncio.sleep(0)
    for other in (("$MQTT_timers", ""), ("$MQTT_timers", "ways"), ("$MQTT_msgs", "gateways")):
        inbox.elected(*other)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    inbox.elected("$MQTT_timers", "gateways")
    with pytest.raises(RequestTimeout):
        await asyncio.wait_for(waiting, 1.0)


async def test_what_came_before_the_leader_went(link: FakeLink, inbox: RequestInbox) -> None:
    """A page of messages is read to its end."""
    subject = "$JS.API.CONSUMER.MSG.NEXT.$MQTT_timers.gateways"
    replies = inbox.stream(subject)
    first = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    link.reply(b"1")
    link.reply(b"2")
    inbox.elected("$MQTT_timers", "gateways")
    assert [(await first).payload, (await anext(replies)).payload] == [b"1", b"2"]
    with pytest.raises(RequestTimeout):
        await anext(replies)


async def test_messages_that_nobody_takes_any_more_go_back(link: FakeLink, inbox: RequestInbox) -> None:
    """Those that the reader has not taken, and those that were on their way when the pull request ended."""
    replies = inbox.stream("$JS.API.CONSUMER.MSG.NEXT.$MQTT_timers.gateways")
    first = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    for number in (b"1", b"2"):
        link.reply(number, delivery=b"$JS.ACK." + number)
    assert (await first).payload == b"1"
    answer = link.handlers[b"2"][1]
    await replies.aclose()
    assert link.out[1:] == [b"PUB $JS.ACK.2 4\r\n-NAK\r\n"]
    answer(b"", b"$JS.ACK.3", b"", b"late")
    answer(b"", b"", b"NATS/1.0 408 Request Timeout\r\n\r\n", b"")
    assert link.out[2:] == [b"PUB $JS.ACK.3 4\r\n-NAK\r\n"]
