# SPDX-License-Identifier: Apache-2.0
"""A message and its id: in hooks, in the log, and in the stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from mqtt_nats.codec import ReasonCode
from mqtt_nats.config.settings import Settings
from mqtt_nats.hooks import (
    MESSAGE_ACKED,
    MESSAGE_DELIVERED,
    MESSAGE_DROPPED,
    MESSAGE_PUBLISH,
    Acked,
    Continue,
    Delivered,
    Drop,
    Dropped,
    Hooks,
    Published,
    Publishing,
    Stop,
)
from mqtt_nats.hooks.events import ClientView
from mqtt_nats.messages.headers import header
from mqtt_nats.observability.message_log import OWNER, follow
from mqtt_streams import stored
from mqtt_streams.messages import PREFIX, STREAM
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.observability.records import of_messages
from tests.plugins.fakes import PlainClient


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[InProcess]:
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,), sys_interval=0)) as found:
        yield found


class Told:
    """Hooks at every point of a message, and what they were told."""

    def __init__(self, inside: InProcess, decide: Any = None) -> None:
        self.ids: dict[str, list[str]] = {"published": [], "delivered": [], "acked": [], "dropped": []}
        self._inside = inside
        self._decide = decide

    def __enter__(self) -> Told:
        self._inside.call(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.call(lambda: self._inside.account.services.hooks.remove_all("test"))

    def _add(self) -> None:
        hooks = self._inside.account.services.hooks

        def published(event: Any, message: Published | Drop) -> Any:
            assert isinstance(message, Published)
            self.ids["published"].append(message.message_id)
            return self._decide(message) if self._decide is not None else None

        hooks.add(MESSAGE_PUBLISH, published, owner="test")

        def acked(event: Acked) -> None:
            assert event.message is not None
            self.ids["acked"].append(event.message.message_id)

        hooks.add(MESSAGE_DELIVERED, lambda one: self.ids["delivered"].append(one.message_id), owner="test")
        hooks.add(MESSAGE_ACKED, acked, owner="test")
        hooks.add(MESSAGE_DROPPED, lambda one: self.ids["dropped"].append(one.message_id), owner="test")


async def in_stream(inside: InProcess, topic: str) -> str:
    """The id of the last message on a topic."""
    found = inside.run(stored.get_last(inside.account.services.nats.inbox, STREAM, PREFIX + topic.replace("/", ".")))
    assert found is not None
    return header(found.headers, b"Nmqtt-Id:").decode()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("qos", [1, 2])
async def test_hooks_know_the_id(inside: InProcess, name: str, qos: int, asynchronous: bool) -> None:
    with Told(inside) as told:
        if asynchronous:

            async def waits(event: Any, message: Any) -> None:
                return None

            inside.call(lambda: inside.account.services.hooks.add(MESSAGE_PUBLISH, waits, owner="test"))
        async with (
            await RawClient.connect(inside.port, f"{name}-taker", clean=False) as taker,
            await RawClient.connect(inside.port, f"{name}-giver") as giver,
        ):
            await taker.subscribe(f"{name}/a", qos=2)
            ids = []
            for number in range(3):
                await giver.deliver(f"{name}/a", b"%d" % number, qos)
                await taker.receive(f"{name}/a", b"%d" % number, qos=qos)
                ids.append(await in_stream(inside, f"{name}/a"))
            assert len(set(ids)) == 3
            await aeventually(lambda: len(told.ids["acked"]) == 3)
            assert told.ids == {"published": ids, "delivered": ids, "acked": ids, "dropped": []}


async def test_many_at_once(inside: InProcess, name: str) -> None:
    """Packets of one read: each has its own id, also behind others that have none."""
    with Told(inside) as told:
        async with await RawClient.connect(inside.port, name) as client:
            for number in range(30):
                client.publish(f"{name}/{number}", b"x", number % 3, packet_id=number + 1)
            await aeventually(lambda: len(told.ids["published"]) == 30)
            for number, known in enumerate(told.ids["published"]):
                assert bool(known) is (number % 3 > 0)
                if number % 3 == 1:
                    await aeventually(partial(_same, inside, f"{name}/{number}", known))


async def _same(inside: InProcess, topic: str, known: str) -> bool:
    found = inside.run(stored.get_last(inside.account.services.nats.inbox, STREAM, PREFIX + topic.replace("/", ".")))
    return found is not None and header(found.headers, b"Nmqtt-Id:").decode() == known


@pytest.mark.parametrize("decision", ["another topic", "another QoS", "dropped"])
async def test_a_message_that_a_hook_changes_keeps_its_id(inside: InProcess, name: str, decision: str) -> None:
    def decide(message: Published) -> Any:
        if decision == "dropped":
            return Stop(Drop(ReasonCode.QUOTA_EXCEEDED, "too many"))
        qos = 2 if decision == "another QoS" else 1
        return Continue(Published(f"{name}/new", message.payload, qos, False, {}))

    with Told(inside, decide) as told:
        async with await RawClient5.connect5(inside.port, name) as client:
            client.publish(f"{name}/old", b"x", 1)
            await client.packet()
            (known,) = told.ids["published"]
            assert len(known) == 32
            if decision == "dropped":
                assert told.ids["dropped"] == [known]
            else:
                assert await in_stream(inside, f"{name}/new") == known


async def test_the_log_tells_what_becomes_of_a_message(nats_server: NatsServer, name: str) -> None:
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), sys_interval=0)
    with of_messages() as records, running(settings) as gateway:
        async with (
            await RawClient5.connect5(gateway.port, f"{name}-taker", clean=False, session_expiry_interval=60) as taker,
            await RawClient5.connect5(gateway.port, f"{name}-small", maximum_packet_size=100) as small,
            await RawClient.connect(gateway.port, f"{name}-giver") as giver,
        ):
            await taker.subscribe(f"{name}/#", qos=1)
            await small.subscribe(f"{name}/+", qos=0)
            await giver.deliver(f"{name}/a", b"x" * 200, 1)
            await taker.receive(f"{name}/a", b"x" * 200)
            await aeventually(lambda: len(records.lines) >= 4)
            kept = [one for one in records.lines if one["client"] != f"{name}-small"]
            assert [one["client"] for one in kept] == [f"{name}-giver", f"{name}-taker", f"{name}-taker"]
            assert {one["message_id"] for one in kept} == {await in_stream(gateway, f"{name}/a")}
            assert {one["gateway"] for one in kept} == {gateway.account.services.identity.id}
            assert [one["message"].split("' ")[1].split(" ")[0] for one in kept] == ["publishes", "is", "has"]
            (lost,) = (one for one in records.lines if one["client"] == f"{name}-small")
            assert lost["message"].endswith(f"a message on '{name}/a' at QoS 0 is dropped: too large")
            await small.quiet()


async def test_nothing_is_followed_where_nobody_reads_it(inside: InProcess) -> None:
    assert not inside.call(inside.account.services.hooks.accounts)


# -- the hooks of the log alone -------------------------------------------------------------------------


class Named(PlainClient):
    """A client with a name in the log."""

    def __str__(self) -> str:
        return f"client {self.client_id!r}"


def view() -> ClientView:
    return ClientView(Named("lamp"))


def delivered(qos: int = 1, *, dup: bool = False, message_id: str = "m1") -> Delivered:
    return Delivered(view(), "a/b", b"secret", qos, False, dup, 7, message_id)


async def each_line(hooks: Hooks) -> None:
    """Let everything happen about which the log has a line."""
    publish = hooks.deciding(MESSAGE_PUBLISH)
    assert publish is not None
    message = Published("a/b", b"secret", 1, False, {}, "m1", 7)
    assert publish.decide(Publishing(view()), message) is message
    publish.decide(Publishing(view(), will=True), Published("a/will", b"secret", 0, False, {}))
    publish.decide(Publishing(view()), Drop())
    for point, event in (
        (MESSAGE_DELIVERED, delivered()),
        (MESSAGE_DELIVERED, delivered(dup=True)),
        (MESSAGE_DELIVERED, delivered(0, message_id="")),
        (MESSAGE_ACKED, Acked(view(), 7, False, delivered())),
        (MESSAGE_ACKED, Acked(view(), 7, True, delivered())),
        (MESSAGE_ACKED, Acked(view(), 8, False, None)),
        (MESSAGE_DROPPED, Dropped(view(), "a/b", 1, "expired", "m1")),
    ):
        chain: Any = hooks.noticing(point)
        chain.emit(event)


async def test_each_line_of_the_log() -> None:
    hooks = Hooks(lambda work, name: work.close())
    with of_messages() as records:
        follow(hooks)
        await each_line(hooks)
    assert [(one["message"], one.get("message_id")) for one in records.lines] == [
        ("client 'lamp' publishes on 'a/b' at QoS 1", "m1"),
        ("client 'lamp' has a will on 'a/will' at QoS 0", None),
        ("client 'lamp' is sent a message on 'a/b' at QoS 1", "m1"),
        ("client 'lamp' is sent a message on 'a/b' at QoS 1 again", "m1"),
        ("client 'lamp' is sent a message on 'a/b' at QoS 0", None),
        ("client 'lamp' has the message on 'a/b'", "m1"),
        ("client 'lamp' refuses the message on 'a/b'", "m1"),
        ("client 'lamp': a message on 'a/b' at QoS 1 is dropped: expired", "m1"),
    ]
    assert "secret" not in str(records.lines)


async def test_the_log_shows_a_message_as_the_last_hook_has_changed_it() -> None:
    hooks = Hooks(lambda work, name: work.close())
    with of_messages() as records:
        follow(hooks)
        changed = Published("a/new", b"", 0, False, {})
        hooks.add(MESSAGE_PUBLISH, lambda event, message: Continue(changed), priority=-1_000_000_000)
        publish = hooks.deciding(MESSAGE_PUBLISH)
        assert publish is not None
        publish.decide(Publishing(view()), Published("a/old", b"", 0, False, {}))
    assert [one["message"] for one in records.lines] == ["client 'lamp' publishes on 'a/new' at QoS 0"]


def test_the_hooks_are_there_once_and_only_at_level_debug() -> None:
    hooks = Hooks(lambda work, name: work.close())
    follow(hooks)
    assert not hooks.in_use
    with of_messages():
        follow(hooks)
        follow(hooks)
        assert sorted(one.point for one in hooks.accounts() if one.owner == OWNER) == [
            *("message.acked", "message.delivered", "message.dropped", "message.publish"),
        ]
    follow(hooks)
    assert not hooks.in_use
