# SPDX-License-Identifier: Apache-2.0
"""The mark that tells which ``$MQTT_msgs`` it is."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from mqtt_streams import stored
from mqtt_streams.api import NoLeader, call, publish
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.generations import SUBJECT, GenerationStore, Lower, Mark
from mqtt_streams.shared import STREAM
from tests.harness.backup import backup, restore
from tests.harness.jetstream import MemoryJetStream
from tests.streams.support import NatsPyJetStream

MESSAGES = "$MQTT_msgs"


async def add(js: NatsPyJetStream, count: int) -> None:
    for _ in range(count):
        await publish(js, "$MQTT.msgs.a", b"x")


async def look(js: NatsPyJetStream, new_id: str, store: GenerationStore | None = None) -> Mark:
    """As a gateway that has just started, or the one of ``store``."""
    store = store or GenerationStore(js)
    try:
        found = await store.look(new_id)
    except Lower as error:
        found = await store.look(new_id, error.last)
    assert found is not None
    return found


async def test_a_stream_that_goes_on(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await add(js, 3)
    first = await look(js, "one")
    assert (first.id, first.last, first.floor) == ("one", 3, 3)
    await add(js, 2)
    assert await look(js, "two") == first._replace(last=5)
    written = await stored.get_last(js, STREAM, SUBJECT)
    assert await look(js, "three") == first._replace(last=5)
    assert await stored.get_last(js, STREAM, SUBJECT) == written  # nothing new, nothing written
    await stored.purge(js, MESSAGES, "$MQTT.msgs.>")
    assert (await look(js, "four")).id == "one"  # an empty one counts on


async def test_one_that_is_no_more_and_one_made_anew(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await add(js, 3)
    await look(js, "one")
    await call(js, f"STREAM.DELETE.{MESSAGES}")
    assert await GenerationStore(js).look("two") is None
    await ensure_streams(js)
    await add(js, 5)  # further than it was
    found = await look(js, "two")
    assert (found.id, found.last, found.floor) == ("two", 5, 0)
    assert await look(js, "three") == found


async def test_one_restored_from_a_backup(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await add(js, 3)
    saved = await backup(js.client, MESSAGES)
    await add(js, 4)
    gateway = GenerationStore(js)
    await look(js, "one", gateway)
    await restore(js.client, saved)
    await add(js, 2)
    found = await look(js, "two")
    assert (found.id, found.last, found.floor) == ("two", 5, 3)
    assert await look(js, "three", gateway) == found


async def test_one_that_was_seen_before_its_messages_were_restored(js: NatsPyJetStream) -> None:
    """They are older than the mark that was made then."""
    await ensure_streams(js)
    await add(js, 3)
    await look(js, "one")
    await asyncio.sleep(1.1)  # that much older than the mark which follows
    early = Mark("two", "", 0, 0)
    info = await call(js, f"STREAM.INFO.{MESSAGES}")
    await publish(js, SUBJECT, orjson.dumps(early._replace(created=info["created"])._asdict()))
    found = await look(js, "three")
    assert (found.id, found.last, found.floor) == ("three", 3, 3)
    await add(js, 1)
    assert await look(js, "four") == found._replace(last=4)


async def test_one_that_has_less_than_before(js: NatsPyJetStream) -> None:
    """What it gets before it is looked at again is newer than the mark."""
    await ensure_streams(js)
    await add(js, 3)
    first = await look(js, "one")
    await publish(js, SUBJECT, orjson.dumps(first._replace(last=10)._asdict()))
    gateway = GenerationStore(js)
    with pytest.raises(Lower, match="ends at sequence 3") as caught:
        await gateway.look("two")
    await add(js, 9)
    found = await gateway.look("two", caught.value.last)
    assert found == Mark("two", first.created, 12, 3)
    await publish(js, SUBJECT, orjson.dumps(found._replace(last=20)._asdict()))
    with pytest.raises(Lower):
        await gateway.look("three")
    assert await gateway.look("three", 12) == Mark("three", first.created, 12, 12)


async def test_a_leader_that_catches_up(js: NatsPyJetStream) -> None:
    """What it had not applied yet is older than the mark."""
    await ensure_streams(js)
    await add(js, 5)
    first = await look(js, "one")
    gateway = GenerationStore(js)
    assert await gateway.look("two", 3) == first
    await add(js, 1)
    assert await gateway.look("two", 3) == first._replace(last=6)


async def test_a_mark_that_went_back_with_its_stream(js: NatsPyJetStream) -> None:
    """Who has seen more knows better."""
    await ensure_streams(js)
    await add(js, 3)
    gateway = GenerationStore(js)
    await gateway.look("one")
    saved = [await backup(js.client, name) for name in (MESSAGES, STREAM)]
    await add(js, 4)
    await gateway.look("one")
    for one in saved:
        await restore(js.client, one)
    found = await look(js, "two", gateway)
    assert (found.id, found.floor) == ("two", 3)


async def test_many_look_at_once(js: NatsPyJetStream) -> None:
    """While messages are stored: nobody takes the stream for another one."""
    await ensure_streams(js)
    stores = [GenerationStore(js) for _ in range(8)]
    await add(js, 1)

    async def keep_looking(store: GenerationStore, new_id: str) -> set[str]:
        found = [await store.look(new_id) for _ in range(10)]
        return {one.id for one in found if one is not None}

    looking = [keep_looking(store, f"id-{number}") for number, store in enumerate(stores)]
    ids, _ = await asyncio.gather(asyncio.gather(*looking), add(js, 100))
    assert len(set().union(*ids)) == 1


async def test_a_mark_that_cannot_be_read(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    await add(js, 2)
    for data in (b"", b"{", b'{"id": "x"}', b"[]"):
        await publish(js, SUBJECT, data)
        found = await look(js, "new")
        assert (found.id, found.last, found.floor) == ("new", 2, 2)


async def test_a_replica_without_a_leader_tells_nothing() -> None:
    """It may lack what the majority has stored."""
    js = MemoryJetStream()
    js.replicas = 3
    for _ in range(5):
        js.put("$MQTT.msgs.a")
    store = GenerationStore(js)
    first = await store.look("one")
    assert first is not None
    js.cluster, js.last[MESSAGES] = {"name": "c"}, 3
    with pytest.raises(NoLeader):
        await store.look("two")
    js.last[MESSAGES] = 6  # it lacks nothing
    found = await store.look("three")
    assert found is not None
    assert found.id == "one"


async def test_a_new_leader_decides_before_it_is_believed() -> None:
    """It may not count all messages before."""
    js = MemoryJetStream()
    js.replicas, js.cluster = 3, {"name": "c", "leader": "n1"}
    for _ in range(5):
        js.put("$MQTT.msgs.a")
    store = GenerationStore(js)
    first = await store.look("one")
    js.last[MESSAGES] = 3
    with pytest.raises(Lower) as caught:
        await store.look("two")

    def decide(subject: str) -> None:
        if "MSG.DELETE" in subject:
            js.last[MESSAGES] = 5

    js.before = decide
    assert await store.look("two", caught.value.last) == first
