# SPDX-License-Identifier: Apache-2.0
"""Which consumers are orphans: no session record names them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqtt_nats.ctl import orphans
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.sessions import PREFIX, V5, Draining, SessionRecord, SessionStore
from tests.sessions.fakes import FakeInbox, as_inbox

KEY = name_hash("client")


class Store:
    """Consumers and session records in JetStream."""

    def __init__(self) -> None:
        self.inbox = FakeInbox()

    def consumer(
        self, name: str, *, stream: str = MESSAGES, deliver: str = "", age: float = 3600.0, **more: Any
    ) -> None:
        """A consumer of a session, unless it delivers elsewhere."""
        subject = deliver or ("$MQTT.sub.x" if stream == MESSAGES else "$MQTT.deliver.pubrel.x")
        created = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
        self.inbox.consumers[stream][name] = {"config": {"deliver_subject": subject}, "created": created} | more

    async def session(self, *names: str, draining: str = "") -> None:
        """The record of a session with these consumers."""
        record = SessionRecord("client", v5=V5())
        record.cons = {name: ConsumerRef(name, "$MQTT.sub.x", "$MQTT.msgs.a", 10) for name in names}
        assert record.v5 is not None
        record.v5.draining = [Draining(draining, "$MQTT.msgs.a", 0, 5, 1)] if draining else []
        await SessionStore(as_inbox(self.inbox)).save(record, expected=0)

    async def found(self) -> list[tuple[str, str]]:
        return await orphans.find(as_inbox(self.inbox))


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(orphans, "SECOND_READING_S", 0.0)
    return Store()


async def test_consumers_that_no_record_names(store: Store) -> None:
    """Of messages and of PUBREL records; those of a session are named, also of an ended subscription."""
    await store.session(f"{KEY}_one", draining=f"{KEY}_ended")
    for name in ("one", "ended", "left"):
        store.consumer(f"{KEY}_{name}")
    for key in (KEY, "nobody00"):
        store.consumer(f"$MQTT_PUBREL_{key}", stream=OUT)
    assert await store.found() == [(MESSAGES, f"{KEY}_left"), (OUT, "$MQTT_PUBREL_nobody00")]


async def test_a_session_whose_consumers_are_missing_is_whole(store: Store) -> None:
    """Its position decides; nothing of it is ended."""
    await store.session(f"{KEY}_one")
    assert await store.found() == []


@pytest.mark.parametrize(
    "more",
    [{"age": 1.0}, {"push_bound": True}, {"deliver": "elsewhere"}, {"name": "not-of-a-session"}],
    ids=["young", "somebody listens", "of another program", "another name"],
)
async def test_what_is_no_orphan(store: Store, more: dict[str, Any]) -> None:
    store.consumer(**({"name": "nobody00_one"} | more))
    assert await store.found() == []


async def test_consumers_of_a_record_that_cannot_be_read(store: Store) -> None:
    """Nobody knows which it names."""
    store.inbox.put(f"{PREFIX}{KEY}", b"[]")
    store.consumer(f"{KEY}_one")
    store.consumer("nobody00_one")
    assert await store.found() == [(MESSAGES, "nobody00_one")]


async def test_a_consumer_whose_record_is_written_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readings have to agree."""
    store.consumer(f"{KEY}_one")

    async def sleep(seconds: float) -> None:
        await store.session(f"{KEY}_one")

    monkeypatch.setattr(orphans, "asyncio", type("Clock", (), {"sleep": staticmethod(sleep)}))
    assert await store.found() == []


async def test_only_those_are_removed_to_which_nobody_listens(store: Store) -> None:
    """A client may have come since they were found."""
    store.consumer("nobody00_one")
    store.consumer("nobody00_two", push_bound=True)
    named = [(MESSAGES, f"nobody00_{name}") for name in ("one", "two", "gone")]
    assert [name async for name in orphans.remove(as_inbox(store.inbox), named)] == ["nobody00_one"]
    assert list(store.inbox.consumers[MESSAGES]) == ["nobody00_two"]
