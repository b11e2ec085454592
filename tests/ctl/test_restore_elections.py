# SPDX-License-Identifier: Apache-2.0
"""A restore whose requests meet elections: it goes on, or says that it has to be run again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.backup import later_records, save, snapshot
from mqtt_nats.ctl.backup import restore as restoring
from mqtt_nats.ctl.backup.restore import Wanted, _insist, _wait_for_replicas, restore
from mqtt_nats.ctl.nats_connection import connected
from mqtt_streams.api import ApiError, NoResponders, Reply, RequestTimeout, call, publish
from mqtt_streams.definitions import load_definition
from mqtt_streams.fleet import PAUSE_SUBJECT, FleetStore, Wish
from mqtt_streams.gateways import STREAM as GATEWAYS
from mqtt_streams.gateways import GatewayStore, LeaseTaken
from mqtt_streams.pages import pages_of
from tests.conftest import NatsFactory
from tests.harness.doubles import stands_for

STREAMS = ("$MQTT_sess", "$MQTT_msgs", "$MQTT_shared", GATEWAYS, "KV_MQTT_fleet")


class Elections:
    """Each subject has no leader once, from the moment on at which streams are replaced."""

    def __init__(self, inbox: RequestInbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[str] | None = None
        self.refused = 0
        self._request, self._stream = inbox.request, inbox.stream
        monkeypatch.setattr(inbox, "request", self.request)
        monkeypatch.setattr(inbox, "stream", self.stream)

    def _meet(self, subject: str) -> None:
        assert self.seen is not None
        if subject not in self.seen:
            self.seen.add(subject)
            self.refused += 1
            raise NoResponders(subject)

    async def request(self, subject: str, payload: bytes = b"", *rest: bytes, **options: Any) -> Reply:
        if self.seen is None and subject == PAUSE_SUBJECT and b"restoring" in payload:
            self.seen = set()
        if self.seen is not None:
            self._meet(subject)
        return await self._request(subject, payload, *rest, **options)

    async def stream(self, subject: str, *rest: bytes, **options: Any) -> AsyncGenerator[Reply, None]:
        if self.seen is not None and "DIRECT.GET" in subject:
            self._meet(subject)
        answers = self._stream(subject, *rest, **options)
        try:
            async for one in answers:
                yield one
        finally:
            await answers.aclose()


async def fill(inbox: RequestInbox) -> None:
    """Streams of a gateway that lives."""
    for stream in STREAMS:
        await call(inbox, f"STREAM.CREATE.{stream}", load_definition(stream))
    for number in range(3):
        await publish(inbox, f"$MQTT.sess.{number}", b"record")
        await publish(inbox, f"$MQTT.msgs.{number}", b"message")
    store = GatewayStore(inbox)
    await store.register("one", 1.0, {}, 0)
    await store.hold("one", "one", 0, 600)
    await FleetStore(inbox).put(Wish("plugin", "id", "some", loaded=True))


async def test_each_request_meets_an_election_once(
    nats_factory: NatsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "JETSTREAM_RETRY_S", 0.01)
    monkeypatch.setattr(snapshot, "REPLACE_RETRY_S", 0.01)
    read: Any = later_records.save

    async def later(inbox: RequestInbox, stream: str, *rest: Any) -> Any:
        if stream == "$MQTT_sess":  # records behind the snapshot
            await publish(inbox, "$MQTT.sess.3", b"later")
        return await read(inbox, stream, *rest)

    monkeypatch.setattr(later_records, "save", later)
    async with connected(Settings(nats=(nats_factory().url,))) as inbox:
        await fill(inbox)
        await save.backup(inbox, tmp_path / "saved", pause=False, tell=lambda line: None)
        await GatewayStore(inbox).end_all()
        elections = Elections(inbox, monkeypatch)
        await restore(inbox, Wanted(tmp_path / "saved", replace=True), lambda line: None)
        assert elections.refused > 15
        elections.seen = None
        pause = await FleetStore(inbox).pause()
        assert pause is not None
        assert pause.stage == "ended"
        found = [one.payload async for page in pages_of(inbox, "$MQTT_sess", "$MQTT.sess.>") for one in page]
        assert found == [b"record"] * 3 + [b"later"]
        assert [one.lapsed for one in await GatewayStore(inbox).entries()] == [True]


@pytest.mark.parametrize("error", [NoResponders("one"), RequestTimeout("no reply"), LeaseTaken("lease")])
async def test_patience_ends(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "JETSTREAM_RETRY_S", 0.01)
    monkeypatch.setattr(restoring, "LEADERS_KNOWN_MOST_S", 0.05)
    attempts: list[int] = []

    async def work() -> None:
        attempts.append(1)
        raise error

    with pytest.raises(StartupError, match="run the restore again"):
        await _insist(work)
    assert len(attempts) > 1


async def test_a_refusal_ends_it_at_once() -> None:
    attempts: list[int] = []

    async def work() -> None:
        attempts.append(1)
        raise ApiError(503, 10023, "insufficient resources")

    with pytest.raises(ApiError):
        await _insist(work)
    assert attempts == [1]


@stands_for(NatsConnection)
class FakeLink:
    """Stands for `NatsConnection`."""

    max_payload = 4


@stands_for(RequestInbox)
class FakeInbox:
    """Stands for `RequestInbox`: chunks, where another server announces its subscription only after some attempts."""

    api_prefix = "$JS.API"

    def __init__(self, *unheard: int) -> None:
        self.link = FakeLink()
        self.fake_unheard, self.fake_attempts = unheard, 0
        self.fake_taken: list[bytes] = []

    async def request(self, subject: str, payload: bytes = b"", *, timeout: float) -> Reply:
        if "RESTORE" in subject:
            return Reply("", b"", orjson.dumps({"deliver_subject": "there"}))
        self.fake_attempts += 1
        if self.fake_attempts in self.fake_unheard:
            raise NoResponders(subject)
        self.fake_taken.append(payload)
        return Reply("", b"", b"" if payload else b'{"state": {}}')


async def test_a_subscription_for_chunks_that_is_announced_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first chunk is sent again: others would come in another order."""
    monkeypatch.setattr(snapshot, "REPLACE_RETRY_S", 0.001)
    (tmp_path / "file").write_bytes(b"0123456789")
    late: Any = FakeInbox(1, 2)
    assert await snapshot._load(late, {"name": "one"}, {}, tmp_path / "file") == {"state": {}}
    assert late.fake_taken == [b"0123", b"4567", b"89", b""]
    gone: Any = FakeInbox(2)
    with pytest.raises(NoResponders):
        await snapshot._load(gone, {"name": "one"}, {}, tmp_path / "file")
    monkeypatch.setattr(snapshot, "SUBSCRIPTION_KNOWN_S", 0.01)
    never: Any = FakeInbox(*range(1000))
    with pytest.raises(NoResponders):
        await snapshot._load(never, {"name": "one"}, {}, tmp_path / "file")
    assert never.fake_attempts > 1


def _led(*replicas: dict[str, Any], leader: str = "one") -> dict[str, Any]:
    return {"cluster": {"leader": leader, "replicas": list(replicas)}}


CURRENT = {"name": "two", "current": True}
BEHIND = {"name": "three", "current": False, "lag": 5}


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([{}], []),
        ([_led(CURRENT, CURRENT)], []),
        ([_led(CURRENT, BEHIND | {"offline": True})], []),
        ([_led(CURRENT, BEHIND), _led(CURRENT, BEHIND | {"current": True}), _led(CURRENT, CURRENT)], []),
        ([_led(leader=""), _led(CURRENT)], []),
        ([_led(CURRENT, BEHIND), _led(CURRENT, BEHIND)], ["the replicas on three are behind"]),
        ([_led(leader=""), _led(leader="")], ["it has no leader"]),
    ],
    ids=["alone", "current", "a server does not run", "two rounds", "an election", "one stays behind", "no leader"],
)
async def test_a_restore_ends_when_the_replicas_have_all(
    monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]], told: list[str]
) -> None:
    """The death of a server then takes nothing with it."""
    left = list(answers)

    async def call_next(inbox: RequestInbox, subject: str) -> dict[str, Any]:
        assert subject == "STREAM.INFO.$MQTT_sess"
        return left.pop(0)

    monkeypatch.setattr(restoring, "call", call_next)
    monkeypatch.setattr(restoring, "JETSTREAM_RETRY_S", 0.01)
    if told:
        monkeypatch.setattr(restoring, "REPLICA_WAIT_MOST_S", 0.0)
    lines: list[str] = []
    await _wait_for_replicas(cast("RequestInbox", None), "$MQTT_sess", lines.append)
    more = "until that ends, fewer servers than replicas have what was restored"
    assert lines == [f"$MQTT_sess: {one}; {more}" for one in told]
    assert left == []
