# SPDX-License-Identifier: Apache-2.0
"""``ctl trace``: packets of one client and messages of one topic, live, until it is stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.control import trace as control_trace
from mqtt_nats.control.trace import TRACE_RENEWAL_TIMEOUT
from mqtt_nats.ctl.commands import trace as tracing
from mqtt_nats.ctl.commands.trace import Durations, line, trace
from mqtt_nats.ctl.nats_connection import connected
from tests.ctl.conftest import Fleet
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.raw5 import Raw5, will
from tests.harness.waiting import eventually

Event = dict[str, Any]


class Watching:
    """A trace in a thread of its own."""

    def __init__(self, server: NatsServer, **what: str) -> None:
        self.events: list[Event] = []
        self._settings = Settings(nats=(server.url,))
        self._what = what
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        async with connected(self._settings) as inbox:
            events = trace(inbox, 0.0, **self._what)
            try:
                async for event in events:
                    self.events.append(event)
            except asyncio.CancelledError:
                pass
            finally:
                await events.aclose()

    def __enter__(self) -> Watching:
        self._thread.start()
        eventually(lambda: self.events)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._loop.close()

    def one(self, **wanted: Any) -> Event:
        """The first event that has all of this."""

        def found() -> Event | None:
            return next((one for one in self.events if wanted.items() <= one.items()), None)

        return eventually(found, what=str(wanted))


def untraced(fleet: Fleet) -> bool:
    """Whether no gateway has hooks any more."""
    return not fleet.json("hooks")["hooks"]


def test_a_client(fleet: Fleet) -> None:
    """Its packets with the times of the answers, also when it comes back, to the other gateway."""
    with Raw5.open(fleet.one.port, "c-traced") as client:
        with Watching(fleet.server, client="c-traced") as watching:
            first = watching.events[0]
            assert (first["event"], first["connected"]) == ("tracing", [fleet.ids[0]])
            assert set(first["gateways"]) == set(fleet.ids)
            assert client.subscribed(("traced/#", 1)) == (1,)
            fleet.text("publish", "traced/x", "hello", "--qos", "1")
            client.receive_message(b"hello")
            client.deliver("elsewhere", b"12345678", qos=2)
            client.ping()
            subscribe = watching.one(packet="SUBSCRIBE", from_client=True)
            assert subscribe["filters"] == ["traced/# at QoS 1"]
            suback = watching.one(packet="SUBACK", from_client=False)
            assert (suback["codes"], suback["answers"]) == ([1], "SUBSCRIBE")
            assert suback["ms"] > 0
            publish = watching.one(packet="PUBLISH", from_client=False)
            assert (publish["topic"], publish["qos"], publish["bytes"]) == ("traced/x", 1, 5)
            assert watching.one(packet="PUBACK", from_client=True)["answers"] == "PUBLISH"
            publish = watching.one(packet="PUBLISH", from_client=True)
            assert (publish["topic"], publish["qos"], publish["bytes"], publish["id"]) == ("elsewhere", 2, 8, 1)
            for kind, sender, answers in (
                ("PUBREC", False, "PUBLISH"),
                ("PUBREL", True, "PUBREC"),
                ("PUBCOMP", False, "PUBREL"),
                ("PINGRESP", False, "PINGREQ"),
            ):
                assert watching.one(packet=kind, from_client=sender)["answers"] == answers
            assert not any("hello" in str(one) or "12345678" in str(one) for one in watching.events)
            with Raw5.open(fleet.two.port, "c-traced") as again:
                assert watching.one(event="connected", gateway=fleet.ids[1])["session_present"] is False
                watching.one(event="disconnected", gateway=fleet.ids[0])
                again.ping()
                watching.one(packet="PINGREQ", gateway=fleet.ids[1])
            text = "\n".join(map(line, watching.events))
            assert f"{fleet.ids[0]}  from client  PUBLISH  elsewhere  QoS 2  id 1  8 bytes" in text
            assert "ms after its SUBSCRIBE" in text
        assert untraced(fleet)


def test_a_topic(fleet: Fleet) -> None:
    """Who publishes, who gets it, at which gateway, how long it takes, and who does not get it."""
    with (
        Raw5.open(fleet.one.port, "c-from") as sender,
        Raw5.open(fleet.two.port, "c-to") as receiver,
        Watching(fleet.server, topic="path/+") as watching,
    ):
        assert receiver.subscribed(("path/#", 1), ("secret/#", 1)) == (1, 0x87)
        sender.deliver("path/a", b"one", qos=1)
        sender.deliver("other", b"two", qos=1)
        receiver.receive_message(b"one")
        published = watching.one(event="published", client="c-from", gateway=fleet.ids[0])
        assert (published["topic"], published["qos"], published["bytes"]) == ("path/a", 1, 3)
        delivered = watching.one(event="delivered", client="c-to", gateway=fleet.ids[1])
        assert delivered["crc"] == published["crc"]
        assert delivered["answers"] == "publish"
        acknowledged = watching.one(event="acknowledged", client="c-to")
        assert acknowledged["answers"] == "delivery"
        assert acknowledged["ms"] >= 0
        assert not [one for one in watching.events if one.get("topic") == "other"]
        assert "delivered  path/a  QoS 1" in "\n".join(map(line, watching.events))
    assert untraced(fleet)


def test_a_will_is_not_published_before_it_is(fleet: Fleet) -> None:
    """That a client has one is said when it connects; when it is published, it is delivered."""
    with (
        Raw5.open(fleet.two.port, "c-heir") as heir,
        Watching(fleet.server, topic="path/+") as watching,
    ):
        assert heir.subscribed(("path/#", 1)) == (1,)
        testator = Raw5.open(fleet.one.port, "c-testator", flags=4, tail=will("path/will", b"dead"))
        found = watching.one(event="will", client="c-testator", gateway=fleet.ids[0])
        assert (found["topic"], found["qos"], found["bytes"]) == ("path/will", 0, 4)
        testator.close()
        heir.receive_message(b"dead")
        delivered = watching.one(event="delivered", client="c-heir", gateway=fleet.ids[1])
        assert delivered["crc"] == found["crc"]
        assert "ms" not in delivered
        assert not [one for one in watching.events if one.get("event") == "published"]
    assert untraced(fleet)


def test_who_may_not_publish(fleet: Fleet) -> None:
    with Raw5.open(fleet.one.port, "c-denied") as client, Watching(fleet.server, topic="secret/#") as watching:
        client.send(b"\x30\x0b\x00\x08secret/x\x00")
        assert watching.one(event="dropped", client="c-denied")["reason"] == "denied"


def test_a_process_until_ctrl_c(fleet: Fleet, tmp_path: Path) -> None:
    """As somebody runs it."""

    def start(name: str, *arguments: str) -> LoggedProcess:
        process = LoggedProcess(name, tmp_path / name)
        command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", fleet.server.url, "trace", "start", *arguments]
        process.start(command, None, ROOT)
        return process

    endless = start("endless", "client", "c-process", "--json")
    try:
        eventually(lambda: '"event":"tracing"' in endless.text, 60)
        with Raw5.open(fleet.two.port, "c-process"):
            eventually(lambda: '"event":"connected"' in endless.text)
        endless.send(signal.SIGINT)
        assert endless.wait(30) == 0, endless.text
        assert {"tracing", "connected"} <= {orjson.loads(one).get("event") for one in endless.text.splitlines()}
    finally:
        endless.discard()
    assert untraced(fleet)


def test_a_time_that_ends_it(fleet: Fleet) -> None:
    assert fleet.text("trace", "start", "topic", "#", "--for", "1s").rstrip().endswith("are looking")
    assert untraced(fleet)


@pytest.mark.long
def test_a_trace_that_nobody_looks_at_ends(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a word of who has asked for it, as when that is killed."""
    monkeypatch.setattr(tracing, "tell", lambda inbox, what, question: None)
    with Watching(fleet.server, topic="forgotten"):
        assert not untraced(fleet)
    assert not untraced(fleet)
    eventually(lambda: untraced(fleet), TRACE_RENEWAL_TIMEOUT + 30)


def test_what_nobody_reads_is_counted_and_not_kept(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EVENTS_WAITING_MOST", 5)

    async def watch() -> list[Event]:
        async with connected(Settings(nats=(fleet.server.url,))) as inbox:
            events = trace(inbox, 0.0, topic="flood/#")
            await anext(events)
            with Raw5.open(fleet.one.port, "c-flood") as client:
                found: list[Event] = []
                while not found or found[-1]["event"] != "lost":
                    for number in range(20):  # of which one is taken
                        client.deliver("flood/x", b"%d" % number, qos=1)
                    found.append(await anext(events))
            await events.aclose()
            return found

    found = asyncio.run(watch())
    assert found[-1]["count"] >= 1
    eventually(lambda: untraced(fleet))


def test_names_of_any_size_are_shortened(fleet: Fleet) -> None:
    """So that what is told of them stays below what NATS takes, and the trace goes on."""
    topic, filters = "long/" + "x" * 3000, [(f"{number}/" + "y" * 3000, 0) for number in range(100)]
    with Raw5.open(fleet.one.port, "c-long") as client, Watching(fleet.server, client="c-long") as watching:
        for _ in range(20):
            assert client.subscribed(*filters) == (0,) * len(filters)
        client.deliver(topic, b"x", qos=1)
        event = watching.one(packet="PUBLISH")
        assert event["topic"] == f"{topic[: control_trace.TEXT_MOST - 1]}…"
        (first, *_) = [one for one in watching.events if one.get("packet") == "SUBSCRIBE"]
        assert len(first["filters"]) == control_trace.TEXTS_MOST
        assert len([one for one in watching.events if one.get("packet") == "SUBSCRIBE"]) == 20
        assert all(len(orjson.dumps(one)) < 16 * 1024 for one in watching.events)
    assert untraced(fleet)


def test_it_goes_on_after_a_reconnect(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks had lost NATS."""
    monkeypatch.setattr(tracing, "TRACE_RENEWAL_S", 0.2)

    async def watch() -> Event:
        async with connected(Settings(nats=(fleet.server.url,))) as inbox:
            events = trace(inbox, 60.0, topic="again/#")
            await anext(events)
            assert inbox.link.wire is not None
            inbox.link.wire.transport.abort()
            coming = asyncio.ensure_future(anext(events))
            with Raw5.open(fleet.one.port, "c-again") as client:
                while not coming.done():
                    client.deliver("again/x", b"x", qos=1)
                    await asyncio.wait((coming,), timeout=0.2)
            found = coming.result()
            await events.aclose()
            return found

    assert asyncio.run(watch())["topic"] == "again/x"
    eventually(lambda: untraced(fleet))


def test_durations() -> None:
    """Of messages that look alike the latest counts; what was not seen has none."""
    durations = Durations()

    def add(kind: str, at: float, **more: Any) -> Event:
        event = {"event": kind, "time": at, "gateway": "g", "client": "c", "topic": "t", "crc": "1", "bytes": 1, **more}
        durations.add(event)
        return event

    assert "ms" not in add("delivered", 1.0, id=1)
    add("published", 2.0)
    assert add("delivered", 2.5, id=2)["ms"] == 500
    add("published", 3.0)
    assert add("delivered", 3.25, id=3)["ms"] == 250
    assert add("acknowledged", 4.25, id=3)["ms"] == 1000
    assert "ms" not in add("acknowledged", 5.0, id=3)
    assert "ms" not in add("delivered", 5.0, crc="2", id=4)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("start", "topic", "a/#/b"), 1, "is no topic filter"),
        (("start", "topic", "a", "--for", "long"), 2, "'long' is not a duration such as"),
        (("start", "topic", "a", "--for", "always"), 2, "an hour at most"),
        (("start", "topic", "a", "--for", "61m"), 2, "an hour at most"),
        (("start", "client", ""), 2, "the client id is empty"),
        (("start", "gateway"), 2, "No such command"),
    ],
)
def test_bad_input(fleet: Fleet, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = fleet.run("trace", *arguments)
    assert done.status == status, done.text
    assert text in done.text
