# SPDX-License-Identifier: Apache-2.0
"""QoS 1 and 2 messages that NATS brings to another subject: durable and shared subscriptions get them, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, RePublish, StreamConfig

from mqtt_nats.config.settings import Settings
from mqtt_streams.messages import STREAM as MESSAGES
from tests.conftest import NatsFactory
from tests.harness.fence import fence
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

COUNT: Final = 5
"""Messages of each QoS."""


def settings(server: NatsServer, **values: Any) -> Settings:
    return Settings.model_validate({"listen": "127.0.0.1:0", "nats": (server.url,), **values})


@pytest.fixture
def gateways(nats_server: NatsServer) -> Iterator[tuple[InProcess, InProcess]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(running(settings(nats_server))) for _ in range(2))  # type: ignore[misc]


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    one = await nats.connect(nats_server.url)
    yield one
    await one.close()


class Readers:
    """Subscribers of some filters: sessions that end with their connections, durable ones, members of a group."""

    def __init__(self, stack: AsyncExitStack, root: str) -> None:
        self._stack = stack
        self.root = root
        self.all: dict[str, RawClient] = {}

    async def add(
        self, gateway: InProcess, name: str, *, version: int = 4, durable: bool = True, share: str = ""
    ) -> None:
        """One more; it gets everything below the root at QoS 2."""
        called = f"{self.root}-{name}"
        if version == 5:
            expiry = 600 if durable else 0
            one: RawClient = await RawClient5.connect5(
                gateway.port, called, clean=not durable, session_expiry_interval=expiry
            )
        else:
            one = await RawClient.connect(gateway.port, called, clean=not durable)
        await self._stack.enter_async_context(one)
        assert await one.subscribe(f"{share and f'$share/{share}/'}{self.root}/#", qos=2) == (2,)
        self.all[name] = one

    async def back(self, gateway: InProcess, name: str) -> None:
        """A durable one comes back."""
        one = await RawClient.connect(gateway.port, f"{self.root}-{name}", clean=False)
        self.all[name] = await self._stack.enter_async_context(one)
        assert one.session_present

    async def get(self, wanted: list[tuple[str, bytes, int]]) -> None:
        """Each gets these, in their order by QoS, and nothing else."""
        for name, one in self.all.items():
            found = []
            for _ in wanted:
                message = (await one.messages(1))[0]
                await one.complete(message)
                found.append((topic_of(message), message.payload, message.qos))
            for qos in (1, 2):
                assert [each for each in found if each[2] == qos] == [each for each in wanted if each[2] == qos], name
        await asyncio.sleep(0)
        for one in self.all.values():
            await one.quiet()


async def publish(gateway: InProcess, topic: str) -> list[bytes]:
    payloads = [b"%d" % number for number in range(COUNT)]
    async with await RawClient.connect(gateway.port, f"publisher-{topic.replace('/', '-')}") as publisher:
        for qos in (1, 2):
            for payload in payloads:
                await publisher.deliver(topic, payload, qos)
    return payloads


async def stored(client: NatsClient, subject: str) -> int:
    info = await client.jetstream().stream_info(MESSAGES, subjects_filter=f"$MQTT.msgs.{subject}")
    return (info.state.subjects or {}).get(f"$MQTT.msgs.{subject}", 0)


def copies(*gateways: InProcess) -> int:
    return sum(one.account.copies.stored for one in gateways)


def passed_over(gateway: InProcess) -> int:
    return gateway.account.services.counters.drops(0)["copy"]


@pytest.mark.parametrize("publishes", [0, 1])
async def test_a_stream_that_republishes(
    gateways: tuple[InProcess, InProcess], client: NatsClient, publishes: int
) -> None:
    """Whichever gateway has published it, and whoever sees the copy: one copy is stored for all."""
    source, root = f"from{publishes}", f"to{publishes}"
    js = client.jetstream()
    republish = RePublish(src=f"{source}.>", dest=f"{root}.>")
    await js.add_stream(StreamConfig(name=f"OWN{publishes}", subjects=[f"{source}.>"], republish=republish))
    async with AsyncExitStack() as stack:
        readers = Readers(stack, root)
        await readers.add(gateways[0], "regular", durable=False)
        await readers.add(gateways[0], "durable")
        await readers.add(gateways[1], "durable5", version=5)
        await readers.add(gateways[1], "member", durable=False, share="one")
        await readers.add(gateways[0], "durable-member", version=5, share="two")
        away = await RawClient.connect(gateways[0].port, f"{root}-away", clean=False)
        assert await away.subscribe(f"{root}/+", qos=1) == (1,)
        await away.disconnect()
        payloads = await publish(gateways[publishes], f"{source}/x")
        await readers.get([(f"{root}/x", payload, qos) for qos in (1, 2) for payload in payloads])
        assert await stored(client, f"{root}.x") == 2 * COUNT
        assert copies(*gateways) == 2 * COUNT
        async with await RawClient.connect(gateways[1].port, f"{root}-away", clean=False) as back:
            assert back.session_present, "who was away has what others had stored meanwhile"
            for _ in range(2):
                for payload in payloads:
                    await back.receive(f"{root}/x", payload, qos=1)
    await js.delete_stream(f"OWN{publishes}")


async def test_a_filter_that_has_both_subjects(gateways: tuple[InProcess, InProcess], client: NatsClient) -> None:
    """The copy is another message on another topic: it is not taken for a repetition, on any gateway."""

    async def relay(message: Msg) -> None:
        await client.publish("both.copy", message.data, headers=message.headers)

    await client.subscribe("both.origin", cb=relay)
    await fence(client)
    async with AsyncExitStack() as stack:
        readers = Readers(stack, "both")
        for number, gateway in enumerate(gateways):
            await readers.add(gateway, f"regular{number}", durable=False)
            await readers.add(gateway, f"durable{number}")
        payloads = await publish(gateways[0], "both/origin")
        for name, one in readers.all.items():
            found = []
            for _ in range(4 * COUNT):
                message = (await one.messages(1))[0]
                await one.complete(message)
                found.append((topic_of(message), message.payload, message.qos))
            wanted = [
                (topic, each, qos) for topic in ("both/copy", "both/origin") for qos in (1, 2) for each in payloads
            ]
            assert sorted(found) == sorted(wanted), name
        for one in readers.all.values():
            await one.quiet()
        assert await stored(client, "both.copy") == 2 * COUNT


ACCOUNTS = """
accounts {
  A { jetstream: enabled, users: [{ user: a, password: a }], exports: [{ stream: "shown.>" }] }
  B { jetstream: enabled, users: [{ user: b, password: b }],
      imports: [{ stream: { account: A, subject: "shown.>" }, to: "seen.>" }] }
}
"""


async def test_an_import_of_another_account(nats_factory: NatsFactory) -> None:
    """The other account has stored it for itself. It may have its stored copy brought here as well: it is counted."""
    server = nats_factory(config=ACCOUNTS)
    with (
        running(settings(server, nats_user="a", nats_password="a")) as theirs,
        running(settings(server, nats_user="b", nats_password="b")) as ours,
    ):
        async with AsyncExitStack() as stack:
            readers = Readers(stack, "seen")
            await readers.add(ours, "regular", durable=False)
            durable = await stack.enter_async_context(await RawClient.connect(ours.port, "seen-durable", clean=False))
            assert await durable.subscribe("seen/x", qos=1) == (1,)
            payloads = await publish(theirs, "shown/x")
            await readers.get([("seen/x", payload, qos) for qos in (1, 2) for payload in payloads])
            await aeventually(lambda: passed_over(ours) == 2 * COUNT)
            assert copies(ours) == copies(theirs) == passed_over(theirs) == 0
            await durable.quiet()


@pytest.mark.parametrize("share", ["", "group"])
@pytest.mark.parametrize("space", ["", " "])
async def test_a_relay_whose_original_no_filter_sees(
    gateways: tuple[InProcess, InProcess], client: NatsClient, share: str, space: str
) -> None:
    """The copy names the subject of its publish: it is counted, also where libraries write headers anew."""
    root = f"{share or 'one'}{len(space)}"
    before = passed_over(gateways[1])

    async def relay(message: Msg) -> None:
        assert message.headers is not None
        assert message.headers["Nmqtt-Subject"] == f"{root}.from"
        headers = {name: f"{space}{value}" for name, value in message.headers.items()}
        await client.publish(f"{root}.to", message.data, headers=headers)

    await client.subscribe(f"{root}.from", cb=relay)
    await fence(client)
    async with AsyncExitStack() as stack:
        one = await RawClient.connect(gateways[1].port, f"{root}-reader", clean=False)
        await stack.enter_async_context(one)
        # NATS brings a message once for each of these filters: it counts once.
        for text in (f"$share/{share}/{root}/to",) if share else (f"{root}/to", f"{root}/to/#"):
            assert await one.subscribe(text, qos=1) == (1,)
        await publish(gateways[0], f"{root}/from")
        await aeventually(lambda: passed_over(gateways[1]) == before + 2 * COUNT)
        await one.quiet()
    assert copies(*gateways) == 0


async def test_an_import_of_what_the_other_account_stores(nats_factory: NatsFactory) -> None:
    """The way for an import: the stored copies are imported as well, also for sessions that are all away."""
    exported = ACCOUNTS.replace('[{ stream: "shown.>" }]', '[{ stream: "shown.>" }, { stream: "$MQTT.msgs.shown.>" }]')
    more = 'to: "seen.>" }, { stream: { account: A, subject: "$MQTT.msgs.shown.>" }, to: "$MQTT.msgs.seen.>" }]'
    server = nats_factory(config=exported.replace('to: "seen.>" }]', more))
    with (
        running(settings(server, nats_user="a", nats_password="a")) as theirs,
        running(settings(server, nats_user="b", nats_password="b")) as ours,
    ):
        async with AsyncExitStack() as stack:
            readers = Readers(stack, "seen")
            await readers.add(ours, "away")
            await readers.all.pop("away").disconnect()
            first = await publish(theirs, "shown/x")
            await readers.add(ours, "regular", durable=False)
            await readers.back(ours, "away")
            for qos in (1, 2):
                for payload in first:
                    await readers.all["away"].receive("seen/x", payload, qos=qos)
            second = await publish(theirs, "shown/x")
            await readers.get([("seen/x", payload, qos) for qos in (1, 2) for payload in second])
            await aeventually(lambda: not ours.account.copies.waiting())
            assert copies(ours) == passed_over(ours) == 0


async def test_nats_clients_that_store_what_they_publish(
    gateways: tuple[InProcess, InProcess], client: NatsClient
) -> None:
    """Both copies are there, with an id that no gateway has given: nothing is stored again."""
    async with await RawClient.connect(gateways[0].port, "with-id", clean=False) as reader:
        assert await reader.subscribe("with/id", qos=1) == (1,)
        for number in range(COUNT):
            headers = {"Nmqtt-Pub": "1", "Nmqtt-Id": f"{number:016x}feedbeef0001{number:04x}"}
            await client.publish("with.id", b"%d" % number, headers=headers)
            await client.jetstream().publish("$MQTT.msgs.with.id", b"%d" % number, headers=headers)
            await reader.receive("with/id", b"%d" % number, qos=1)
        await reader.quiet()
        assert await stored(client, "with.id") == COUNT
        # One without an id, which is as nats-server's own listener publishes: nobody else stores it.
        await client.publish("with.id", b"without", headers={"Nmqtt-Pub": "1"})
        await client.publish("with.id", b"plain")
        await reader.receive("with/id", b"plain", qos=0)
        assert copies(*gateways) == 0


async def test_messages_that_go_the_usual_way(
    gateways: tuple[InProcess, InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks for those of gateways."""
    suspects: list[bytes] = []
    for one in gateways:
        fanout = one.account.services.path.fanout
        monkeypatch.setattr(fanout, "suspected", lambda subject, target, headers, payload: suspects.append(headers))
        monkeypatch.setattr(fanout, "unclear", lambda subject, headers: suspects.append(headers))
    async with AsyncExitStack() as stack:
        readers = Readers(stack, "usual")
        for number, gateway in enumerate(gateways):
            await readers.add(gateway, f"regular{number}", durable=False)
            await readers.add(gateway, f"durable{number}")
        await readers.add(gateways[1], "member", version=5, share="g")
        wild = await stack.enter_async_context(await RawClient.connect(gateways[0].port, "usual-wild", clean=False))
        assert await wild.subscribe("#", qos=2) == (2,)
        for gateway in gateways:
            payloads = await publish(gateway, "usual/x")
            await readers.get([("usual/x", payload, qos) for qos in (1, 2) for payload in payloads])
    assert not suspects


async def test_a_stream_that_republishes_what_gateways_store(
    gateways: tuple[InProcess, InProcess], client: NatsClient
) -> None:
    """A copy of a copy is not stored: else there would be copies for ever."""
    js = client.jetstream()
    config = (await js.stream_info(MESSAGES)).config
    await js.update_stream(config.evolve(republish=RePublish(src="$MQTT.msgs.>", dest="again.>")))
    gateway = gateways[0]
    before = passed_over(gateway)
    try:
        async with await RawClient.connect(gateway.port, "of-all", clean=False) as reader:
            assert await reader.subscribe("#", qos=1) == (1,)
            async with await RawClient.connect(gateway.port, "publisher") as publisher:
                await publisher.deliver("loop", b"x", 1)
            topics = [topic_of(await reader.receive(topic, b"x", qos=1)) for topic in ("loop", "again/loop")]
            assert topics == ["loop", "again/loop"]
            await aeventually(lambda: passed_over(gateway) == before + 1)
            await reader.quiet()
    finally:
        await js.update_stream(config)


async def test_a_push_consumer_that_delivers_on_a_topic(
    gateways: tuple[InProcess, InProcess], client: NatsClient
) -> None:
    """It asks for acknowledgements, which no MQTT client gives: nobody gets its messages."""
    js = client.jetstream()
    await js.add_stream(StreamConfig(name="PUSHED", subjects=["pushed.>"]))
    await js.add_consumer("PUSHED", ConsumerConfig(name="p", deliver_subject="topic.pushed"))
    async with AsyncExitStack() as stack:
        readers = []
        for name, text in (("plain", "topic/#"), ("durable", "topic/+"), ("member", "$share/g/topic/#")):
            expiry = 60 if name == "durable" else 0
            one = await RawClient5.connect5(gateways[0].port, f"push-{name}", session_expiry_interval=expiry)
            readers.append(await stack.enter_async_context(one))
            assert await one.subscribe(text, qos=1) == (1,)
        heard = await client.subscribe("topic.pushed")
        await js.publish("pushed.x", b"one", headers={"Nmqtt-Pub": "1", "Nmqtt-Id": "f" * 32})
        assert (await heard.next_msg(20)).data == b"one"
        await client.publish("topic.end", b"end")
        for one in readers:
            await one.receive("topic/end", b"end", qos=0)
            await one.quiet()
        assert copies(*gateways) == 0
    await js.delete_stream("PUSHED")


SERVICES = """
accounts {
  A { jetstream: enabled, users: [{ user: a, password: a }], exports: [{ service: "ask.door" }] }
  B { users: [{ user: b, password: b }], imports: [{ service: { account: A, subject: "ask.door" }, to: "their.door" }] }
}
"""


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_service_import_that_an_mqtt_client_answers(nats_factory: NatsFactory, qos: int) -> None:
    """Who asks is in another account: it gets the answer as from any service."""
    server = nats_factory(config=SERVICES)
    with running(settings(server, nats_user="a", nats_password="a")) as gateway:
        async with await RawClient5.connect5(gateway.port, "door") as door:
            assert await door.subscribe("ask/door", qos=1) == (1,)
            other = await nats.connect(server.url, user="b", password="b")
            try:
                asking = asyncio.create_task(other.request("their.door", b"open?", timeout=20))
                question = await door.message("ask/door", b"open?")
                assert question.properties is not None
                door.publish5(question.properties["response_topic"], b"shut", qos)
                assert (await asking).data == b"shut"
            finally:
                await other.close()
