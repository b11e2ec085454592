# SPDX-License-Identifier: Apache-2.0
"""A stream of messages that was created anew or restored: which sessions end."""

from __future__ import annotations

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.base import server_clock
from mqtt_nats.sessions.message_stream import ADVISORIES, StreamIdentity
from mqtt_streams.api import NoResponders
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import V5
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_identity, as_tasks, v5_of

SUBJECT = "$MQTT.msgs.a"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look also learns what time it is at nats-server; other tests keep theirs."""
    monkeypatch.setattr(server_clock, "learn", lambda *_: None)


async def looked(services: FakeServices, messages: int = 10) -> StreamIdentity:
    """The identity of a stream with so many messages."""
    for _ in range(messages):
        services.fake_inbox.put(SUBJECT)
    found = StreamIdentity(services.nats, as_identity(services.identity), as_tasks(services.tasks), services.registry)
    await found.check()
    services.stream.id = found.id
    return found


def replace(services: FakeServices, messages: int) -> None:
    """Make the stream anew, with so many messages of a backup."""
    js = services.fake_inbox
    js.created[MESSAGES] = "2026-01-01T00:00:00.000000000Z"
    kept, js.messages[MESSAGES] = js.messages[MESSAGES][:messages], []
    js.messages[MESSAGES] += kept
    js.last[MESSAGES] = messages


def session(services: FakeServices, client_id: str, generation: str, *, delivered: bool = True) -> FakeClient:
    client = FakeClient(services, client_id, V5(generation=generation, start={"a": 9}))
    client.durable_side = FakeSide(client) if delivered else None
    return client


async def test_the_first_look_ends_nobody() -> None:
    services = FakeServices()
    client = session(services, "client", "other")
    found = await looked(services)
    assert (found.id, found.floor) == ("nuid1", 10)
    assert client.fake_ended == []


async def test_the_number_of_consumers() -> None:
    """As of the last look, with what this gateway and, as is assumed, each other one decide on until the next."""
    services = FakeServices()
    services.fake_inbox.consumers[MESSAGES] |= {f"c{number}": {} for number in range(5)}
    found = await looked(services)
    assert (found.consumers, found.replicas) == (5, 1)
    found.count_consumers(3)
    found.count_consumers(-1)
    assert found.consumers == 7
    found.share(4.0)
    found.count_consumers(10)
    assert found.consumers == 47
    found.count_consumers(-10)
    assert found.consumers == 37
    await found.check()
    assert found.consumers == 5


@pytest.mark.parametrize(
    ("allowed", "consumers", "crowded"),
    [(-1, 10_000, False), (100, 75, False), (100, 76, True), (4, 2, False), (4, 3, True), (1, 0, True)],
)
async def test_readers_have_a_place(allowed: int, consumers: int, crowded: bool) -> None:
    """A quarter of the consumers that JetStream allows for the stream, two at least."""
    services = FakeServices()
    found = await looked(services)
    assert not found.crowded
    found._store.info = {"config": {"max_consumers": allowed}}
    found.count_consumers(consumers - found.consumers)
    assert found.crowded is crowded


async def test_a_stream_that_does_not_answer_has_no_leader() -> None:
    """So that the answer before is no proof that JetStream is there."""
    services = FakeServices()
    found = await looked(services)
    assert found.has_leader

    def silent(subject: str) -> None:
        if ".STREAM.INFO." in subject:
            raise NoResponders(subject)

    services.fake_inbox.before = silent
    with pytest.raises(NoResponders):
        await found.check()
    assert not found.has_leader


async def test_the_same_stream() -> None:
    services = FakeServices()
    found = await looked(services)
    client = session(services, "client", "other")
    services.fake_inbox.put(SUBJECT)
    await found.check()
    assert (found.id, client.fake_ended) == ("nuid1", [])


async def test_a_replaced_stream_ends_the_connections_that_count_in_the_former_one() -> None:
    services = FakeServices()
    found = await looked(services)
    before = session(services, "before", found.id)
    resuming = session(services, "resuming", found.id, delivered=False)
    after = session(services, "after", "nuid2")  # another gateway has seen it first, and the session came from there
    replace(services, 4)
    await found.check()
    assert (found.id != "nuid1", found.floor) == (True, 4)
    assert [str(one) for one in before.fake_ended] == ["stream $MQTT_msgs was replaced"]
    assert (found.id, after.fake_ended) == ("nuid2", [])
    # A session without deliveries, which is being resumed or ends with its connection, counts anew.
    assert (resuming.fake_ended, v5_of(resuming).start) == ([], {"a": 5})


async def test_a_new_leader_counts_all_messages_before_it_is_believed() -> None:
    """It ends lower than before, and not any more at the second look."""
    services = FakeServices()
    found = await looked(services)
    client = session(services, "client", found.id)
    services.fake_inbox.last[MESSAGES] = 8
    looks = []

    def catch_up(subject: str) -> None:
        if ".STREAM.INFO." in subject:
            looks.append(subject)
            if len(looks) == 2:
                services.fake_inbox.last[MESSAGES] = 10

    services.fake_inbox.before = catch_up
    await found.check()
    assert (len(looks), found.id, client.fake_ended) == (2, "nuid1", [])


async def test_an_advisory_about_the_stream_has_it_looked_at() -> None:
    services = FakeServices()
    found = await looked(services)
    replace(services, 0)
    services.fake_link.fake_bring(ADVISORIES)
    await services.tasks.fake_settle()
    assert found.id != "nuid1"


async def test_after_a_reconnect_it_is_looked_at_without_an_answer() -> None:
    services = FakeServices()
    found = await looked(services)

    def fail(subject: str) -> None:
        raise NoResponders("nobody")

    services.fake_inbox.before = fail
    services.nats.reconnect.renew(Phase.REQUESTS)
    await services.tasks.fake_settle()
    assert services.fake_link.fake_renewed == [(b"1", ADVISORIES)]
    assert found.id == "nuid1"
