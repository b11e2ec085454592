# SPDX-License-Identifier: Apache-2.0
"""A snapshot of a stream whose records are replaced meanwhile, and the records that complete it."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import nats
import orjson
import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.backup import later_records, snapshot
from mqtt_nats.ctl.backup.directory import SafeFile, SavedFile, SavedState, SavedStream
from mqtt_nats.ctl.backup.later_records import aged
from mqtt_nats.ctl.backup.restore import _restore, _verify
from mqtt_nats.ctl.backup.save import _later, _least, _snapshot
from mqtt_nats.ctl.nats_connection import connected
from mqtt_streams import stored
from mqtt_streams.api import ApiError, Reply, call, publish
from mqtt_streams.definitions import load_definition
from tests.conftest import NatsFactory
from tests.harness.doubles import stands_for

RECORDS = 800
"""So many that nats-server, which reads some megabytes ahead, has not read the last ones when the first ones arrive."""

KEPT = 3
"""Of these, so many stay when the others are removed."""

STREAMS = {"$MQTT_sess": "$MQTT.sess", "$MQTT_qos2in": "$MQTT.qos2.in", "$MQTT_rmsgs": "$MQTT.rmsgs"}


async def _records(inbox: RequestInbox, stream: str) -> dict[str, tuple[int, bytes]]:
    found = {}
    at, subject = 1, f"{STREAMS[stream]}.>"
    while (one := await stored.get_next(inbox, stream, subject, at)) is not None:
        found[one.subject] = (one.seq, one.payload)
        at = one.seq + 1
    return found


async def _replace(url: str, stream: str) -> None:
    client = await nats.connect(url)
    js = client.jetstream()
    for number in range(RECORDS - 20, RECORDS, 2):
        subject = f"{STREAMS[stream]}.{number}"
        await js.purge_stream(stream, subject=subject)
        await js.publish(f"{STREAMS[stream]}.gone", b"a sequence that is not used any more")
        await js.purge_stream(stream, subject=f"{STREAMS[stream]}.gone")
        await js.publish(subject, b"new %d" % number)
    await client.close()


async def _remove(url: str, stream: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().purge_stream(stream, keep=KEPT)
    await client.close()


async def _save(
    inbox: RequestInbox,
    directory: Path,
    stream: str,
    change: Callable[[str, str], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
) -> SavedStream:
    """Fill a stream, and save it while ``change`` changes it."""
    # One chunk on its way at a time, so that nats-server waits for us in the middle of the snapshot.
    monkeypatch.setattr(snapshot, "CHUNK", 16384)
    monkeypatch.setattr(snapshot, "UNACKNOWLEDGED_BYTES", 16384)
    await call(inbox, f"STREAM.CREATE.{stream}", load_definition(stream))
    for number in range(RECORDS):
        await publish(inbox, f"{STREAMS[stream]}.{number}", os.urandom(20_000))
    write, chunks = SafeFile.write, itertools.count(1)
    url = str(inbox.link.connected_url.geturl()) if inbox.link.connected_url else ""

    def note(file: SafeFile, data: bytes) -> None:
        write(file, data)
        if next(chunks) == 2:  # nats-server waits: it has read the beginning, and not the end
            work = threading.Thread(target=asyncio.run, args=(change(url, stream),))
            work.start()
            work.join()

    monkeypatch.setattr(SafeFile, "write", note)
    saved = await _snapshot(inbox, directory, stream)
    monkeypatch.setattr(SafeFile, "write", write)
    return saved


@pytest.mark.parametrize("stream", STREAMS)
async def test_records_that_are_replaced_meanwhile(
    nats_factory: NatsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """All keys are restored, with their sequences where these identify records elsewhere."""
    async with connected(Settings(nats=(nats_factory().url,))) as inbox:
        saved = await _save(inbox, tmp_path, stream, _replace, monkeypatch)
        wanted = await _records(inbox, stream)
        assert sum(payload.startswith(b"new ") for _, payload in wanted.values()) == 10
        complete = await _later(inbox, tmp_path, saved)
        assert complete.records == 10
        config = saved.config
        await snapshot.load(inbox, config, saved.answer, tmp_path / saved.snapshot.name)
        assert len(await _records(inbox, stream)) == RECORDS - 10  # so much nats-server's snapshot lacks
        await _restore(inbox, tmp_path, complete, config)
        found = await _records(inbox, stream)
        assert {one: payload for one, (_, payload) in found.items()} == {
            one: payload for one, (_, payload) in wanted.items()
        }
        if stream != "$MQTT_rmsgs":
            assert found == wanted
        info = await call(inbox, f"STREAM.INFO.{stream}")
        assert info["state"]["messages"] == RECORDS  # nothing is left below them
        assert {name: info["config"].get(name) for name in load_definition(stream)} == load_definition(stream)


@pytest.mark.parametrize("stream", STREAMS)
async def test_records_that_are_removed_meanwhile(
    nats_factory: NatsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """They may be missing; what has stayed may not."""
    async with connected(Settings(nats=(nats_factory().url,))) as inbox:
        saved = await _save(inbox, tmp_path, stream, _remove, monkeypatch)
        wanted = await _records(inbox, stream)
        assert len(wanted) == KEPT
        assert (saved.state.messages, saved.least) == (RECORDS, KEPT)
        await _restore(inbox, tmp_path, await _later(inbox, tmp_path, saved), saved.config)
        found = await _records(inbox, stream)
        assert KEPT < len(found) < RECORDS  # the snapshot has the beginning that was read before
        assert {one: found.get(one) for one in wanted} == wanted


EXPIRES = {"max_age": 1}, {"allow_msg_ttl": True}, {"retention": "interest"}


@pytest.mark.parametrize("config", [{}, *EXPIRES])
def test_messages_that_are_missing(config: dict[str, object]) -> None:
    file = SavedFile(name="one", size=1, sha256="")
    state = SavedState(messages=9, bytes=1, first_seq=1, last_seq=9, consumers=0)
    saved = SavedStream(name="one", config=config, state=state, answer={}, snapshot=file, least=3)
    _verify(saved, {"state": {"messages": 3, "last_seq": 9}})
    with pytest.raises(StartupError, match="ends at sequence 8 in place of 9"):
        _verify(saved, {"state": {"messages": 9, "last_seq": 8}})
    few = {"state": {"messages": 2, "last_seq": 9}}
    if config:
        _verify(saved, few)
    else:
        with pytest.raises(StartupError, match="has 2 messages, and had at least 3"):
            _verify(saved, few)


@stands_for(RequestInbox)
class FakeInbox:
    """Stands for `RequestInbox`: an answer."""

    api_prefix = "$JS.API"

    def __init__(self, answer: dict[str, Any]) -> None:
        self.fake_answer = orjson.dumps(answer)

    async def request(self, subject: str, payload: bytes, *, timeout: float) -> Reply:
        return Reply("", b"", self.fake_answer)


@pytest.mark.parametrize(
    ("leader", "last", "messages", "wanted"),
    [
        ("n1", 9, 9, 9),
        ("n1", 9, 4, 4),  # five were removed
        ("n1", 12, 10, 7),  # three are new
        ("n1", 20, 10, 0),  # all may be new
        ("n1", 8, 8, 0),  # another stream
        ("", 9, 9, 0),  # a replica that may be behind
    ],
)
async def test_how_many_messages_a_snapshot_has_at_least(leader: str, last: int, messages: int, wanted: int) -> None:
    inbox: Any = FakeInbox({"state": {"last_seq": last, "messages": messages}, "cluster": {"leader": leader}})
    assert await _least(inbox, "one", 9) == wanted


@pytest.mark.parametrize(
    ("stream", "lines", "seconds", "wanted"),
    [
        (
            "$MQTT_rmsgs",
            "Nmqtt-RTopic:a|Nats-TTL:60s|Nmqtt-Expiry:50",
            10,
            "Nmqtt-RTopic:a|Nats-TTL:50s|Nmqtt-Expiry:40",
        ),
        ("$MQTT_rmsgs", "Nats-TTL:60s|Nmqtt-Expiry:50", 50, None),
        ("KV_MQTT_bans", "Nats-TTL:60s", 60, None),
        ("$MQTT_wills", "Nmqtt-Expiry:50", 60, "Nmqtt-Expiry:50"),  # it begins with the publication of the will
        ("$MQTT_qos2in", "Nmqtt-Expiry:50", 60, "Nmqtt-Expiry:1"),  # the publisher will release it
        ("$MQTT_sess", "Nats-Expected-Last-Subject-Sequence:7|nats-msg-id:a|X:1", 0, "X:1"),
        ("$MQTT_sess", "Nats-Expected-Last-Subject-Sequence:7", 0, ""),
        ("KV_MQTT_gateways", "Nats-Marker-Reason:MaxAge", 0, None),
        ("$MQTT_timers", "Nats-TTL:never", 5, "Nats-TTL:never"),
    ],
)
def test_headers_of_another_store(stream: str, lines: str, seconds: int, wanted: str | None) -> None:
    def block(text: str) -> bytes:
        return "\r\n".join(["NATS/1.0", *text.split("|"), "", ""]).encode() if text else b""

    assert aged(stream, block(lines), seconds) == (None if wanted is None else block(wanted))


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "later").write_bytes(b'{"subject": 1}\n')
    with pytest.raises(StartupError, match="cannot be read"):
        list(later_records.read(tmp_path / "later"))


async def test_a_stream_that_is_not_there(nats_factory: NatsFactory, tmp_path: Path) -> None:
    async with connected(Settings(nats=(nats_factory().url,))) as inbox:
        file = SafeFile(tmp_path / "snapshot")
        with pytest.raises(ApiError, match="stream not found"):
            await snapshot.save(inbox, "absent", file)
        file.close()
        await snapshot.remove(inbox, "absent")
