# SPDX-License-Identifier: Apache-2.0
"""Rules against a running gateway: what is denied, how clients are told, and what changes when the rules do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

import mqtt_nats.gateway.gateway
from mqtt_nats.base.logs import FAILURES, RECORDS_BURST
from mqtt_nats.codec import Subscription
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import Gateway
from mqtt_nats.transport.listener_settings import Bound
from tests.conftest import Logged
from tests.harness import raw, raw5
from tests.harness.fence import fence
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import ALIAS, NO_LOCAL, RESPONSE_TOPIC, SESSION_EXPIRY, Raw5, prop
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually, eventually

pytestmark = pytest.mark.anyio

RULES = """
[[rules]]
effect = "deny"
topics = "open/secret/x/#"

[[rules]]
effect = "allow"
topics = ["open/#", "own/%c/#", "nats/#"]

[[rules]]
effect = "allow"
access = "subscribe"
topics = "read/#"
"""

NOT_AUTHORIZED = 0x87


class Ruled:
    """A gateway in this process, and the file of its rules."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.gateway: Gateway | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.port = 0

    def write(self, rules: str) -> None:
        """Have other rules; they are in force when this returns."""
        self.file.write_text(rules, encoding="utf-8")
        done = threading.Event()

        def reload() -> None:
            assert self.gateway is not None
            self.gateway.reload()
            done.set()

        assert self.loop is not None
        self.loop.call_soon_threadsafe(reload)
        assert done.wait(20)


@pytest.fixture
def ruled(nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ruled]:
    found = Ruled(tmp_path / "acl.toml")
    found.file.write_text(RULES, encoding="utf-8")
    started = threading.Event()
    control: list[Callable[[], Any]] = []

    def make(settings: Settings) -> Gateway:
        found.gateway = Gateway(settings)
        return found.gateway

    monkeypatch.setattr(mqtt_nats.gateway.gateway, "Gateway", make)

    async def main() -> None:
        stop = anyio.Event()
        loop = found.loop = asyncio.get_running_loop()
        control.append(lambda: loop.call_soon_threadsafe(stop.set))

        def on_ready(addresses: list[Bound]) -> None:
            found.port = addresses[0].port
            started.set()

        settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=found.file)
        await mqtt_nats.gateway.gateway.serve(settings, on_ready=on_ready, stop=stop)

    thread = threading.Thread(target=lambda: anyio.run(main), daemon=True)
    thread.start()
    assert started.wait(20)
    yield found
    control[0]()
    thread.join(20)
    assert not thread.is_alive()


async def test_publishes_of_3_1_1_are_answered_and_dropped(ruled: Ruled) -> None:
    """[MQTT-3.3.5-2] (3.1.1): acknowledged, since nothing else can be said; the connection goes on."""
    async with (
        await RawClient.connect(ruled.port, "observer") as observer,
        await RawClient.connect(ruled.port, "publisher") as publisher,
    ):
        assert await observer.subscribe("read/#", "open/+", qos=2) == (2, 2)
        for topic in ("read/x", "open/secret/x", "elsewhere", "own/observer/x"):
            for qos in (0, 1, 2):
                await publisher.deliver(topic, b"denied", qos)
                await publisher.deliver(topic, b"denied", qos, retain=True)
        for qos in (0, 1, 2):
            await publisher.deliver("open/x", b"%d" % qos, qos)
            await observer.receive("open/x", b"%d" % qos)
        await observer.quiet()
        assert await observer.subscribe("read/+") == (0,)
        await observer.quiet()  # nothing was retained


async def test_publishes_of_5_0_are_refused(ruled: Ruled) -> None:
    """[MQTT-3.4.2-1] [MQTT-3.5.2-1] (5.0): at QoS 1 and 2 the reason says so; at QoS 0 nothing does."""
    async with await RawClient5.connect5(ruled.port, "publisher") as publisher:
        publisher.publish5("elsewhere", b"", 0)
        publisher.publish5("elsewhere", b"", 1, packet_id=7)
        await publisher.expect_refusal(4, 7, NOT_AUTHORIZED)
        publisher.publish5("read/x", b"", 2, packet_id=8)
        await publisher.expect_refusal(5, 8, NOT_AUTHORIZED)
        await publisher.deliver("open/x", b"", 2)


async def test_an_alias_that_a_denied_publish_has_set(ruled: Ruled) -> None:
    """It stands for a topic, not for a permission."""
    with Raw5.open(ruled.port, "observer") as observer, Raw5.open(ruled.port, "p") as publisher:
        observer.subscribed(("read/#", 0), ("open/a", 0))
        publisher.send(raw5.publish("read/x", b"first", prop(ALIAS, 1)))
        publisher.send(raw5.publish("", b"second", prop(ALIAS, 1)))
        publisher.send(raw5.publish("open/a", b"third", prop(ALIAS, 1)))
        publisher.send(raw5.publish("", b"fourth", prop(ALIAS, 1)))
        assert [observer.message().payload for _ in range(2)] == [b"third", b"fourth"]


async def test_subscriptions(ruled: Ruled) -> None:
    """Each filter by itself; also behind $share; what has a denied topic in it is denied."""
    wanted = ("read/#", "open/#", "open/+", "open/secret/x", "#", "+/x", "own/c5/x", "own/+/x", "own/other/x")
    codes = (0, NOT_AUTHORIZED, 0, NOT_AUTHORIZED, NOT_AUTHORIZED, NOT_AUTHORIZED, 0, NOT_AUTHORIZED, NOT_AUTHORIZED)
    async with await RawClient5.connect5(ruled.port, "c5") as client:
        assert await client.subscribe5(*(Subscription(each, 0) for each in wanted)) == codes
        assert await client.subscribe5(*(Subscription(f"$share/g/{each}", 0) for each in wanted)) == codes
    async with await RawClient.connect(ruled.port, "c5") as older:
        assert await older.subscribe(*wanted) == tuple(code and 0x80 for code in codes)


async def test_retained_messages_are_not_read_by_who_may_not_subscribe(ruled: Ruled) -> None:
    async with await RawClient.connect(ruled.port, "p") as publisher:
        await publisher.deliver("own/p/x", b"mine", 1, retain=True)
        assert await publisher.subscribe("own/p/x") == (0,)
        await publisher.message("own/p/x", b"mine", retain=True)
    async with await RawClient.connect(ruled.port, "q") as other:
        assert await other.subscribe("own/p/x", "own/p/#") == (0x80, 0x80)
        await other.quiet()


@pytest.mark.parametrize("retain", [0, 0x20])
async def test_wills(ruled: Ruled, retain: int) -> None:
    """A will on a topic that the client may not publish to keeps it out, and so does its response topic."""

    def connected(topic: str, *parts: bytes) -> int:
        with Raw5(ruled.port) as client:
            client.send(raw5.connect("w", flags=0x0C | retain, tail=raw5.will(topic, b"gone", *parts)))
            return client.answer(raw5.CONNACK).reason

    assert connected("read/x") == NOT_AUTHORIZED
    assert connected("own/other/x") == NOT_AUTHORIZED
    assert connected("open/x", prop(RESPONSE_TOPIC, "read/x")) == NOT_AUTHORIZED
    assert connected("own/w/x", prop(RESPONSE_TOPIC, "own/w/y")) == 0
    with Raw(ruled.port) as older:
        older.send(raw.connect("w", flags=0x0E | retain, tail=("read/x", "gone")))
        (answer,) = older.expect_closed()
        assert answer.body == b"\0\x05"


async def test_nats_clients_answer_only_where_the_requester_may_publish(ruled: Ruled, nats_server: NatsServer) -> None:
    service = await nats.connect(nats_server.url)
    requests: list[tuple[bytes, str]] = []

    async def asked(message: Any) -> None:
        requests.append((message.data, message.reply))

    try:
        await service.subscribe("nats.service", cb=asked)
        await fence(service)
        with Raw5.open(ruled.port, "r") as requester:
            requester.send(raw5.publish("nats/service", b"allowed", prop(RESPONSE_TOPIC, "own/r/answer")))
            requester.send(raw5.publish("nats/service", b"injected", prop(RESPONSE_TOPIC, "read/x")))
            await aeventually(lambda: len(requests) == 2)
        assert [data for data, _ in requests] == [b"allowed", b"injected"]
        assert requests[0][1] == "own.r.answer"
        assert requests[1][1] == ""
    finally:
        await service.close()


TIGHTER = """
[[rules]]
effect = "allow"
topics = ["open/#"]
"""


async def test_rules_that_are_tightened(ruled: Ruled) -> None:
    """Subscriptions that are not permitted any more end, shared ones too; the others go on."""
    async with (
        await RawClient5.connect5(ruled.port, "sub") as subscriber,
        await RawClient.connect(ruled.port, "own") as publisher,
    ):
        filters = ("own/sub/#", "$share/g/own/sub/#", "open/+", "read/#")
        assert await subscriber.subscribe5(*(Subscription(each, 1) for each in filters)) == (1, 1, 1, 1)
        ruled.write(TIGHTER)
        assert ruled.gateway is not None
        account = ruled.gateway.account
        assert account is not None
        client = account.registry.clients["sub"]
        eventually(lambda: {found.text for found in client.filters} == {"open/+"} and not client.shares)
        await publisher.deliver("open/x", b"still", 1)
        await subscriber.receive("open/x", b"still")
        subscriber.publish5("own/sub/x", b"", 1, packet_id=9)
        await subscriber.expect_refusal(4, 9, NOT_AUTHORIZED)
        assert await subscriber.subscribe5(Subscription("own/sub/#", 0)) == (NOT_AUTHORIZED,)


async def test_what_was_queued_for_an_absent_client_is_not_delivered(ruled: Ruled) -> None:
    """Its subscription ends when it comes back, before anything new is sent."""
    with Raw5.open(ruled.port, "away", prop(SESSION_EXPIRY, 600)) as away:
        away.subscribed(("own/away/#", 1), ("open/+", 1))
    async with await RawClient.connect(ruled.port, "p") as publisher:
        ruled.write(RULES.replace("own/%c", "own/+"))
        for number in range(3):
            await publisher.deliver("own/away/x", b"queued", 1)
            await publisher.deliver("open/x", b"%d" % number, 1)
    ruled.write(TIGHTER)
    with Raw5.open(ruled.port, "away", prop(SESSION_EXPIRY, 600), clean=False) as back:
        assert back.present
        assert [back.receive_message().payload for _ in range(3)] == [b"0", b"1", b"2"]
        back.quiet()
    ruled.write(RULES.replace("own/%c", "own/+"))
    with Raw5.open(ruled.port, "away", prop(SESSION_EXPIRY, 600), clean=False) as again:
        assert again.present
        with Raw5.open(ruled.port, "q") as other:
            other.deliver("own/away/x", b"")
        again.quiet()  # it has to subscribe anew


async def test_a_will_that_is_not_permitted_any_more(ruled: Ruled) -> None:
    with Raw5.open(ruled.port, "observer") as observer:
        observer.subscribed(("open/+", 1 | NO_LOCAL))
        for name, topic in (("w1", "own/w1/x"), ("w2", "open/w2")):
            doomed = Raw5(ruled.port)
            doomed.send(raw5.connect(name, flags=0x0C, tail=raw5.will(topic, name.encode())))
            doomed.answer(raw5.CONNACK, reason=0)
            if name == "w1":
                ruled.write(TIGHTER)
                assert ruled.gateway is not None
                account = ruled.gateway.account
                assert account is not None
                assert account.registry.clients["w1"].will is None
            doomed.close()
        assert observer.message().payload == b"w2"


async def test_a_file_that_is_wrong_changes_nothing(ruled: Ruled, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mqtt_nats.gateway")
    ruled.write("[[rules]]\neffect = 'maybe'\ntopics = '#'\n")
    assert "the former files stay in use: the ACL file" in caplog.text
    assert caplog.messages[-1] == "the other files are read again"
    async with await RawClient.connect(ruled.port, "own") as client:
        assert await client.subscribe("open/+", "elsewhere") == (0, 0x80)


async def test_denials_are_logged_and_bounded(ruled: Ruled, logged: Logged) -> None:
    counted = FAILURES["denied"]
    async with await RawClient.connect(ruled.port, "loud") as client:
        for number in range(200):
            await client.deliver("elsewhere", b"%d" % number, 0)
        await client.deliver("open/x", b"", 1)
    lines = [line for line in logged.messages if line.startswith("denied")]
    assert RECORDS_BURST <= len(lines) < RECORDS_BURST + 30
    assert lines[0] == "denied: publish on 'elsewhere' at QoS 0; client 'loud', anonymous, from 127.0.0.1"
    assert FAILURES["denied"] == counted + 200
