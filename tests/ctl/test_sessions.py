# SPDX-License-Identifier: Apache-2.0
"""``ctl sessions``: those of clients that are away, what waits for them, ending them, and what belongs to nobody."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl import orphans, records
from mqtt_nats.ctl.commands import sessions
from mqtt_nats.ctl.nats_connection import connected
from mqtt_nats.ctl.verb import Refused
from mqtt_streams import pages, stored
from mqtt_streams.consumers import ConsumerRef, consumer_names, create_consumer, delete_consumer
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import Position, position_subject
from mqtt_streams.sessions import PREFIX, STREAM, SessionStore
from tests.ctl.conftest import Fleet
from tests.harness.raw5 import CONNACK, SESSION_EXPIRY, Raw5, connect, prop
from tests.harness.waiting import eventually

FOREVER = 0xFFFFFFFF


def on_nats(fleet: Fleet, work: Any) -> Any:
    """Run something with a connection of its own."""

    async def run() -> Any:
        async with connected(Settings(nats=(fleet.server.url,))) as inbox:
            return await work(inbox)

    return asyncio.run(run())


def leave(fleet: Fleet, name: str, topic: str, expiry: int = 1000) -> None:
    """A client that has subscribed something and is gone."""
    with Raw5.open(fleet.one.port, name, prop(SESSION_EXPIRY, expiry)) as client:
        assert client.subscribed((topic, 1)) == (1,)
        client.send(b"\xe0\x00")
        client.expect_closed()
    gone(fleet, name)


def gone(fleet: Fleet, name: str) -> None:
    """Wait until a client is away."""
    eventually(lambda: not listed(fleet, name)[0]["connected"])


def listed(fleet: Fleet, pattern: str, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.json("sessions", "list", "--match", pattern, *arguments)["sessions"]
    return found


@pytest.fixture
def away(fleet: Fleet) -> Iterator[str]:
    """A client that is away."""
    leave(fleet, "c-away", "letters/#")
    yield "c-away"
    fleet.run("sessions", "clean", "--match", "c-away*")


def test_list_and_show(fleet: Fleet, away: str) -> None:
    for number in range(3):
        fleet.text("publish", "letters/a", f"{number}", "--qos", "1")
    (found,) = eventually(lambda: one if (one := listed(fleet, away))[0]["queued"] == 3 else None)
    assert (found["connected"], found["expiry"], found["subscriptions"], found["inflight"]) == (False, 1000, 1, 0)
    assert found["owner"] == fleet.ids[0]
    assert listed(fleet, away, "--state", "connected") == []
    (quick,) = listed(fleet, away, "--quick", "--state", "disconnected")
    assert quick["queued"] is None
    (found,) = eventually(lambda: one if (one := listed(fleet, away))[0]["ends"] is not None else None)
    text = fleet.text("sessions", "--match", "c-away")
    assert re.search(r"^c-away +\(anonymous\) +not connected +in \d+ min +1 +3 +0 ", text, re.MULTILINE), text
    one = fleet.json("sessions", "show", away)
    (subscription,) = one["subscribed"]
    assert (subscription["filter"], subscription["qos"], subscription["queued"]) == ("letters/#", 1, 3)
    assert (subscription["consumers"], subscription["missing"]) == (2, 0)
    text = fleet.text("sessions", "show", away)
    assert re.search(r"^letters/# +1 +3 +0$", text, re.MULTILINE), text
    assert re.search(r"^queued +3, 0 in flight$", text, re.MULTILINE), text


def test_a_session_at_its_second_key(fleet: Fleet) -> None:
    """Another client id has the same hash: each is listed, shown and ended by its own id."""
    pair = ("device-1954068", "device-21015175")
    for number, client_id in enumerate(pair):
        with Raw5.open(fleet.one.port, client_id, prop(SESSION_EXPIRY, 1000)) as client:
            assert client.subscribed((f"letters/second-{number}", 1)) == (1,)
            assert fleet.json("sessions", "show", client_id)["connected"]
    assert {one["client"] for one in listed(fleet, "device-*")} == set(pair)
    for number, client_id in reversed(list(enumerate(pair))):
        gone(fleet, client_id)
        assert fleet.json("sessions", "show", client_id)["subscribed"][0]["filter"] == f"letters/second-{number}"
        assert fleet.json("sessions", "clean", client_id)["sessions"] == [client_id]
        assert [one["client"] for one in listed(fleet, "device-*")] == list(pair[:number])


@pytest.mark.parametrize("which", [0, 1])
def test_a_session_of_a_client_that_is_connected(fleet: Fleet, which: int) -> None:
    """It is kept, whichever gateway is asked to end it."""
    port = (fleet.one, fleet.two)[which].port
    with Raw5.open(port, "c-here", prop(SESSION_EXPIRY, FOREVER)) as client:
        (found,) = listed(fleet, "c-here")
        assert (found["connected"], found["gateway"], found["ends"]) == (True, fleet.ids[which], None)
        assert "7 d after the connection" in fleet.text("sessions", "show", "c-here")
        for arguments in (("--dry-run",), ()):
            kept, complaint = fleet.part("sessions", "clean", "c-here", *arguments)
            assert complaint == "the session of c-here is kept: the client is connected"
            assert kept["sessions"] == []
            assert kept["kept"] == [{"client": "c-here", "why": "the client is connected"}]
        assert client.subscribed(("letters/still", 1)) == (1,)
    eventually(lambda: not listed(fleet, "c-here")[0]["connected"])
    assert fleet.json("sessions", "clean", "c-here")["sessions"] == ["c-here"]


def test_a_client_that_connects_meanwhile_keeps_its_session(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look who is connected and the end of the session."""
    leave(fleet, "c-late", "late/#")
    there: list[Raw5] = []

    async def connects(inbox: RequestInbox, *, surely: bool = False) -> tuple[dict[str, str], list[str]]:
        client = Raw5(fleet.two.port)
        client.send(connect("c-late", prop(SESSION_EXPIRY, 1000), flags=0))
        client.answer(CONNACK, reason=0)
        there.append(client)
        return {}, []

    try:
        monkeypatch.setattr(sessions, "_connected", connects)
        # Of a pattern, only those are meant whose clients are away; who is named is meant anyhow.
        for arguments, status in (("c-late",), 1), (("--match", "c-late*"), 0):
            done = fleet.run("sessions", "clean", *arguments, "--json")
            assert done.status == status
            found = orjson.loads(done.output or done.text)
            assert found["sessions"] == []
            (kept,) = found["kept"]
            # The gateway that is asked may be the one where it is connected.
            assert kept["why"] in ("the client has connected meanwhile", "the client is connected")
        monkeypatch.undo()
        assert there[-1].subscribed(("late/more", 1)) == (1,)
    finally:
        for client in there:
            client.close()
    eventually(lambda: not listed(fleet, "c-late")[0]["connected"])
    fleet.json("sessions", "clean", "c-late")


def test_nothing_is_cleaned_while_no_gateway_answers(fleet: Fleet, away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As just after NATS was lost: leases say that gateways run."""

    async def nobody(*_: object, **__: object) -> None:
        raise Refused("no gateway answers", 503)

    monkeypatch.setattr(sessions, "ask", nobody)
    done = fleet.run("sessions", "clean", "--match", "c-away*")
    assert (done.status, "no gateway answers" in done.text) == (1, True)
    assert [one["client"] for one in listed(fleet, away)] == [away]


def test_clean(fleet: Fleet, away: str) -> None:
    leave(fleet, "c-away-too", "letters/+", FOREVER)
    would = fleet.json("sessions", "clean", "--match", "c-away*", "--dry-run")
    assert set(would["sessions"]) == {"c-away", "c-away-too"}
    assert "  session of c-away-too" in fleet.text("sessions", "clean", "c-away-too", "--dry-run")
    done = fleet.json("sessions", "clean", "--match", "c-away*")
    assert set(done["sessions"]) == {"c-away", "c-away-too"}
    assert listed(fleet, "c-away*") == []
    for name in ("c-away", "c-away-too"):
        assert on_nats(fleet, lambda inbox, name=name: consumer_names(inbox, MESSAGES, name_hash(name))) == []
    with Raw5.open(fleet.one.port, "c-away", prop(SESSION_EXPIRY, 1000), clean=False) as client:
        assert not client.present
    gone, complaint = fleet.part("sessions", "clean", "c-nobody")
    assert complaint == "the session of c-nobody is kept: there is no such session"
    assert gone["kept"] == [{"client": "c-nobody", "why": "there is no such session"}]


def test_orphans(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer without a record; what is young, or has a record, is left alone, also a session without consumers."""
    monkeypatch.setattr(orphans, "SECOND_READING_S", 0.0)
    leave(fleet, "c-without", "without/x")
    leave(fleet, "c-whole", "whole/x")
    nobody = f"{name_hash('c-nobody')}_AAAAAAAAAAAAAAAAAAAAAA"

    async def disturb(inbox: RequestInbox) -> None:
        for name in await consumer_names(inbox, MESSAGES, name_hash("c-without")):
            await delete_consumer(inbox, MESSAGES, name)
        await create_consumer(
            inbox, MESSAGES, ConsumerRef(nobody, "$MQTT.sub.AAAAAAAAAAAAAAAAAAAAAA", "$MQTT.msgs.nobody", 10)
        )

    on_nats(fleet, disturb)
    young = fleet.json("sessions", "clean", "--orphans", "--dry-run")
    assert (young["sessions"], young["consumers"]) == ([], [])
    assert "1 of 1 consumers are gone" in fleet.text("sessions", "show", "c-without")
    monkeypatch.setattr(orphans, "YOUNG", 0.0)
    text = fleet.text("sessions", "clean", "--orphans", "--dry-run")
    assert f"  consumer {nobody}" in text
    assert text.startswith("0 sessions would be ended, 1 consumers would be removed")
    done = fleet.json("sessions", "clean", "--orphans")
    assert (done["sessions"], done["consumers"]) == ([], [nobody])
    again = fleet.json("sessions", "clean", "--orphans")
    assert (again["sessions"], again["consumers"]) == ([], [])
    for name in ("c-whole", "c-without"):
        (found,) = listed(fleet, name)
        assert found["subscriptions"] == 1
        fleet.text("sessions", "clean", name)


def test_a_session_without_consumers_is_whole(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record says that its position speaks for the consumers."""
    monkeypatch.setattr(orphans, "SECOND_READING_S", 0.0)
    leave(fleet, "c-records", "records/x")
    assert listed(fleet, "c-records")[0]["position"] == "consumers"

    async def remove(inbox: RequestInbox) -> None:
        (consumer,) = await consumer_names(inbox, MESSAGES, name_hash("c-records"))
        found = await SessionStore(inbox).load(name_hash("c-records"))
        assert found is not None
        record, sequence = found
        assert record.v5 is not None
        record.v5.name_position("p")
        record.v5.move_to_records()
        await inbox.request(position_subject(record.key), Position("p", live=[consumer], clean=True).encode())
        await SessionStore(inbox).save(record, expected=sequence)
        await delete_consumer(inbox, MESSAGES, consumer)

    on_nats(fleet, remove)
    assert fleet.json("sessions", "clean", "--orphans", "--dry-run")["sessions"] == []
    (subscription,) = fleet.json("sessions", "show", "c-records")["subscribed"]
    assert (subscription["consumers"], subscription["missing"], subscription["queued"]) == (1, 0, 0)
    assert re.search(r"^position +in records$", fleet.text("sessions", "show", "c-records"), re.MULTILINE)
    fleet.text("sessions", "clean", "c-records")


def test_a_record_that_cannot_be_read(fleet: Fleet) -> None:
    """It is shown, and its consumers are nobody's to remove."""
    client_hash = name_hash("c-poisoned")

    async def poison(inbox: RequestInbox) -> int:
        await inbox.request(f"{PREFIX}{client_hash}", b"[]")
        message = await stored.get_last(inbox, STREAM, f"{PREFIX}{client_hash}")
        assert message is not None
        return message.seq

    sequence = on_nats(fleet, poison)
    try:
        text = fleet.text("sessions")
        assert f"({client_hash})" in text
        assert "is not a JSON object" in fleet.text("sessions", "show", "c-poisoned")
        kept = fleet.part("sessions", "clean", "c-poisoned")[0]["kept"]
        assert kept[0]["why"] == "session record is not a JSON object"
    finally:
        on_nats(fleet, lambda inbox: stored.delete(inbox, STREAM, sequence))


async def _found(inbox: RequestInbox) -> list[str]:
    return [one.client_id async for one in records.records(inbox)]


def test_many_records_are_read_in_pages(fleet: Fleet, away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_FIRST", 2)
    for number in range(4):
        leave(fleet, f"c-away-{number}", "x")
    found = on_nats(fleet, _found)
    assert {"c-away", *(f"c-away-{number}" for number in range(4))} <= set(found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("clean",), 1, "no session is selected"),
        (("show", "c-nobody"), 1, "there is no session of c-nobody"),
        (("list", "--state", "asleep"), 2, "Invalid value for '--state'"),
        (("list", "--limit", "many"), 2, "limit: "),
    ],
)
def test_bad_input(fleet: Fleet, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = fleet.run("sessions", *arguments)
    assert done.status == status, done.text
    assert text in done.text
