# SPDX-License-Identifier: Apache-2.0
"""Scheduled messages: what a timer holds, and how its message is published once, whichever gateway has the timer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

import pytest

from mqtt_nats.backbone.pending_stores import PendingStore, TooLarge
from mqtt_nats.ingress.interceptors import Taken
from mqtt_nats.ingress.publish import Ingress
from mqtt_nats.ingress.publish_properties import Extras, extras
from mqtt_nats.ingress.request_reply import Replying
from mqtt_nats.ingress.retained.store import Tombstones
from mqtt_nats.ingress.scheduled import message_due, release_of, schedule
from mqtt_nats.ingress.server_publish import LoggedStore
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.fanout import Fanout
from mqtt_nats.pubsub.routing_table import Route
from mqtt_streams.api import ApiError, RequestTimeout
from mqtt_streams.retained import set_block
from mqtt_streams.timers import FiredTimer
from tests.harness.doubles import stands_for
from tests.harness.jetstream import NS
from tests.harness.waiting import aeventually
from tests.ingress.fakes import FakeIngress, FakePublishingServices, FakeTombstones
from tests.sessions.fakes import FakeLink, FakePath, FakeStore

if TYPE_CHECKING:
    from mqtt_nats.messages.message import Message

pytestmark = pytest.mark.sources

SENDER = b"Nmqtt-Client:lamp\r\n"
FIRED = "$MQTT.timers.fired.message.id1"
DUE = 50 * NS
"""Store time of the fired timer, in nanoseconds since 1970."""
ACK = "$JS.ACK.$MQTT_timers.gateways.%d.9.1.%d.0"
RETAINED = b"HPUB $MQTT.rmsgs.a.b "
STORED = b"HPUB $MQTT.msgs.a.b "


class FakeAnsweringStore(FakeStore):
    """Answers each store at the end of the turn, or refuses it; silent while ``fake_silent``."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_silent = False
        self.fake_refusal: ApiError | None = None

    def put(self, target: bytes, headers: bytes, payload: bytes, operation: PendingStore) -> None:
        super().put(target, headers, payload, operation)
        if not self.fake_silent:
            asyncio.get_running_loop().call_soon(self.fake_answer, operation)

    def fake_answer(self, operation: PendingStore) -> None:
        if self.fake_refusal is None:
            operation.stored(b'{"seq":1}')
        else:
            operation.failed(self.fake_refusal)


@stands_for(Fanout)
class FakeFanout:
    """Stands for `Fanout`: what is delivered to clients here, and under which id."""

    def __init__(self) -> None:
        self.fake_local: list[tuple[Message, bytes]] = []
        self.fake_released: list[tuple[Message, bytes]] = []

    def local(self, route: Route, message: Message, known: bytes = b"") -> None:
        self.fake_local.append((message, known))

    def released(self, route: Route, message: Message, release: bytes) -> None:
        self.fake_released.append((message, release))


@stands_for(Path)
class FakeIngressPath(FakePath):
    """Stands for `Path`, on which messages are published."""

    def __init__(self, link: FakeLink, store: FakeStore) -> None:
        super().__init__(link, store)
        self.ids = MessageIds(1)
        self.with_ids = False
        self.fanout = FakeFanout()


@stands_for(Tombstones)
class FakePassingTombstones(FakeTombstones):
    """Stands for `Tombstones`, which are removed at once."""

    def add(self, subject: str, sequence: int, parent: PendingStore | None, ack: bytes) -> None:
        super().add(subject, sequence, parent, ack)
        if parent is not None:
            parent.stored(ack)


@stands_for(Replying)
class FakeReplying:
    """Stands for `Replying`: marks the properties of messages that may be answered."""

    def addressed(self, more: Extras, record: bytes) -> Extras:
        return more._replace(reply=b"answers ") if b"Nmqtt-Answer:1\r\n" in record else more


@stands_for(Ingress)
class FakeScheduling(FakeIngress):
    """Stands for `Ingress`, with answers and tombstones that go at once."""

    def __init__(self, services: FakePublishingServices) -> None:
        super().__init__(services)
        self.replying = FakeReplying()
        self.retained.tombstones = cast("Tombstones", FakePassingTombstones())


class Gateway:
    """A gateway to which a timer has come."""

    def __init__(self) -> None:
        services = FakePublishingServices()
        self.store = services.fake_store = FakeAnsweringStore()
        self.path = services.path = FakeIngressPath(services.fake_link, self.store)
        self.js = services.fake_inbox
        self.ingress = FakeScheduling(services)

    @property
    def targets(self) -> list[bytes]:
        return [target for target, *_ in self.store.fake_put]

    @property
    def timers(self) -> list[str]:
        return self.js.subjects("$MQTT_timers")

    def schedule(
        self, qos: int, retain: bool = False, more: Extras | None = None, payload: bytes = b"x", topic: str = "a/b"
    ) -> bytes:
        """Schedule a message; returns the headers of its timer."""
        route = self.path.table.route(len(topic).to_bytes(2) + topic.encode())
        taken = Taken(f"$delayed/1/{topic}", route, payload, qos, retain, SENDER, more, b"id1")
        operation = LoggedStore(topic)
        schedule(cast("Path", self.path), taken, 2e9, operation)
        assert operation.remaining == 1
        (found,) = self.store.fake_put
        self.store.fake_put.clear()
        assert found[0] == b"HPUB $MQTT.timers.message.id1 "
        assert found[2:] == (payload, operation)
        return found[1]

    def fire(self, headers: bytes, payload: bytes = b"x", delivered: int = 1) -> FiredTimer:
        """What nats-server makes of a timer that is due."""
        kept = b"\r\n".join(line for line in headers.split(b"\r\n") if not line.startswith(b"Nats-Schedule"))
        self.js.now = DUE - NS
        sequence = self.js.put(FIRED, payload, kept)
        return FiredTimer("message", "id1", 0, sequence, kept, payload, ACK % (delivered, DUE))

    async def due(self, timer: FiredTimer) -> None:
        await message_due(cast("Ingress", self.ingress), timer)

    @contextlib.asynccontextmanager
    async def publishing(self, timer: FiredTimer) -> AsyncIterator[None]:
        """Publish, and look on."""
        task = asyncio.create_task(self.due(timer))
        try:
            yield
        finally:
            await task


# -- the timer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_timer_holds_all_of_a_message(qos: int, retain: bool) -> None:
    more = extras({"content_type": "text", "response_topic": "r"}, b"reply ")
    headers = Gateway().schedule(qos, retain, more)
    assert headers.startswith(b"NATS/1.0\r\nNats-Schedule:@at 2033-05-18T03:33:20")
    assert headers.endswith(b"\r\n\r\n")
    assert headers.count(b"\r\n\r\n") == 1
    for line in (b"Nmqtt-Pub:%d" % qos, b"Nmqtt-Subject:a.b", SENDER.strip(), b"Content-Type:text", b"Nmqtt-Answer:1"):
        assert b"\r\n%b\r\n" % line in headers
    assert (b"\r\nNmqtt-Retain:1\r\n" in headers) is retain


async def test_a_message_that_is_too_large_is_refused() -> None:
    gateway = Gateway()
    gateway.store.fake_error = TooLarge("too large")
    with pytest.raises(TooLarge):
        gateway.schedule(1)


# -- a message that is due ------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_is_stored_before_its_timer_is_removed(qos: int) -> None:
    """[MQTT-4.3.2-1] [MQTT-4.3.3-1] (5.0): a gateway that dies meanwhile leaves the timer to another one."""
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(qos))
    gateway.store.fake_silent = True
    async with gateway.publishing(timer):
        await aeventually(lambda: bool(gateway.store.fake_put))
        ((target, headers, payload, operation),) = gateway.store.fake_put
        assert (target, payload) == (STORED, b"x")
        assert b"\r\nNmqtt-Pub:%d\r\n" % qos in headers
        assert b"\r\nNats-Msg-Id:%b\r\n" % release_of("id1") in headers
        assert gateway.timers == [FIRED]
        gateway.store.fake_answer(operation)
    assert gateway.timers == []
    ((message, release),) = gateway.path.fanout.fake_released
    assert (message.payload, message.qos, release) == (b"x", qos, release_of("id1"))
    assert [frame.startswith(b"HPUB a.b ") for frame in gateway.path.out] == [True]
    assert SENDER in gateway.path.out[0]


async def test_at_qos_0_the_gateway_that_has_removed_the_timer_publishes() -> None:
    """[MQTT-4.3.1-1] (5.0): at most once."""
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(0))
    await gateway.due(timer)
    assert gateway.timers == []
    assert [frame.startswith(b"HPUB a.b ") for frame in gateway.path.out] == [True]
    assert [message.payload for message, _ in gateway.path.fanout.fake_local] == [b"x"]
    await gateway.due(timer)
    assert len(gateway.path.out) == 1
    assert gateway.targets == []


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_message_is_retained(qos: int) -> None:
    gateway = Gateway()
    await gateway.due(gateway.fire(gateway.schedule(qos, retain=True)))
    assert gateway.targets == [RETAINED, *([STORED] if qos else [])]
    assert all(b"\r\nNats-Msg-Id:q2-later-id1\r\n" in headers for _, headers, *_ in gateway.store.fake_put)
    assert b"\r\nNmqtt-Retain:1\r\n" in gateway.path.out[0]


async def test_the_expiry_counts_from_the_time_at_which_a_message_is_due() -> None:
    """Properties are those of the publish [MQTT-3.3.2-17] [MQTT-3.3.2-20] (5.0)."""
    gateway = Gateway()
    more = extras({"message_expiry_interval": 60, "content_type": "text", "response_topic": "r"}, b"reply ")
    await gateway.due(gateway.fire(gateway.schedule(1, retain=True, more=more)))
    for _, headers, *_ in gateway.store.fake_put:
        assert b"\r\nNmqtt-Expiry:60\r\n" in headers
        assert b"\r\nContent-Type:text\r\n" in headers
        assert b"Nmqtt-Answer" not in headers
        assert headers.count(SENDER) == 1
    assert gateway.path.out[0].startswith(b"HPUB a.b answers ")
    assert gateway.path.out[0].count(b"Nmqtt-Retain:1\r\n") == 1


async def test_properties_that_may_not_be_answered_name_no_reply_subject() -> None:
    gateway = Gateway()
    await gateway.due(gateway.fire(gateway.schedule(1, more=extras({"response_topic": "r"}))))
    assert b" answers " not in gateway.path.out[0]


# -- a timer that comes again ---------------------------------------------------------------------------


def published_before(gateway: Gateway) -> None:
    """A gateway has published the message after the timer fired, and has died."""
    gateway.js.put("$MQTT.msgs.a.b", b"x", b"NATS/1.0\r\nNats-Msg-Id:q2-later-id1\r\n\r\n")


async def test_a_message_that_was_published_is_not_published_again() -> None:
    """[MQTT-4.3.3-1] (5.0): the stream may have forgotten its id."""
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(2), delivered=2)
    published_before(gateway)
    await gateway.due(timer)
    assert (gateway.targets, gateway.path.out, gateway.timers) == ([], [], [])


@pytest.mark.parametrize("delivered", [1, 2])
async def test_a_message_that_was_not_published_is_published(delivered: int) -> None:
    """The first time nobody can have published it, so that the stream is not read."""
    gateway = Gateway()
    await gateway.due(gateway.fire(gateway.schedule(2), delivered=delivered))
    assert gateway.targets == [STORED]
    assert ("$JS.API.DIRECT.GET.$MQTT_msgs" in gateway.js.asked) is (delivered == 2)


async def test_an_acknowledgement_subject_that_is_not_understood_publishes() -> None:
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(1))._replace(ack="$JS.ACK.strange")
    await gateway.due(timer)
    assert (gateway.targets, gateway.timers) == ([STORED], [])


@pytest.mark.parametrize(("payload", "retained"), [(b"x", True), (b"", False)])
async def test_the_retained_copy_is_stored_where_the_former_gateway_did_not(payload: bytes, retained: bool) -> None:
    """An empty message leaves nothing retained, which is so already."""
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(1, retain=True, payload=payload), payload, delivered=2)
    published_before(gateway)
    await gateway.due(timer)
    assert gateway.targets == ([RETAINED] if retained else [])
    assert gateway.timers == []


@pytest.mark.parametrize(("after", "again"), [(-2, True), (0, False), (5, False)])
async def test_a_newer_retained_message_stays(after: int, again: bool) -> None:
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(1, retain=True), delivered=2)
    published_before(gateway)
    gateway.js.now = DUE + (after - 1) * NS
    gateway.js.put("$MQTT.rmsgs.a.b", b"other", set_block("a/b", 3, "gateway1"))
    await gateway.due(timer)
    assert gateway.targets == ([RETAINED] if again else [])


async def test_a_message_that_has_expired_meanwhile_is_not_retained() -> None:
    """[MQTT-3.3.2-5] (5.0): it was due in 1970."""
    gateway = Gateway()
    headers = gateway.schedule(1, retain=True, more=extras({"message_expiry_interval": 60}))
    timer = gateway.fire(headers, delivered=2)
    published_before(gateway)
    await gateway.due(timer)
    assert (gateway.targets, gateway.timers) == ([], [])


# -- what fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n",
        b"NATS/1.0\r\nNmqtt-Subject:a.b\r\n\r\n",
        b"NATS/1.0\r\nNmqtt-Pub:3\r\nNmqtt-Subject:a.b\r\n\r\n",
        b"NATS/1.0\r\nNmqtt-Pub:x\r\nNmqtt-Subject:a.b\r\n\r\n",
        b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Subject:a.+.b\r\n\r\n",
    ],
)
async def test_a_timer_that_names_no_message_is_removed(headers: bytes, caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway()
    await gateway.due(gateway.fire(headers))
    assert (gateway.targets, gateway.path.out, gateway.timers) == ([], [], [])
    assert "a scheduled message names no topic, or no QoS: removed" in caplog.text


@pytest.mark.parametrize(("qos", "retain"), [(0, True), (1, False), (2, True)])
async def test_a_message_that_nats_does_not_take_is_given_up(
    qos: int, retain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Another gateway could not publish it either."""
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(qos, retain))
    gateway.store.fake_error = TooLarge("2 bytes, the nats-server takes 1")
    await gateway.due(timer)
    assert gateway.timers == []
    assert "on 'a/b' cannot be published: 2 bytes" in caplog.text


async def test_a_retained_copy_that_nats_does_not_take_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(1, retain=True), delivered=2)
    published_before(gateway)
    gateway.store.fake_error = TooLarge("2 bytes, the nats-server takes 1")
    await gateway.due(timer)
    assert gateway.timers == []
    assert "on 'a/b' cannot be retained: 2 bytes" in caplog.text


async def test_a_message_that_jetstream_refuses_keeps_its_timer() -> None:
    """The timer fires again at some gateway."""
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(1))
    gateway.store.fake_refusal = ApiError(503, 10023, "insufficient resources")
    with pytest.raises(ApiError, match="insufficient resources"):
        await gateway.due(timer)
    assert gateway.timers == [FIRED]


async def test_a_look_without_an_answer_keeps_the_timer() -> None:
    gateway = Gateway()
    timer = gateway.fire(gateway.schedule(2), delivered=2)

    def silent(subject: str) -> None:
        raise RequestTimeout("a test")

    gateway.js.before = silent
    with pytest.raises(RequestTimeout):
        await gateway.due(timer)
    assert gateway.timers == [FIRED]
    assert gateway.path.out == []
