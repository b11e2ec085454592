# SPDX-License-Identifier: Apache-2.0
"""What is in JetStream, seen by a NATS client that is none of the gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import nats
import nats.errors
import orjson
from nats.aio.client import Client as NatsClient
from nats.js.errors import NotFoundError

from mqtt_streams.hashing import name_hash
from tests.harness.waiting import aeventually

STREAMS = ("$MQTT_msgs", "$MQTT_rmsgs", "$MQTT_sess", "$MQTT_qos2in", "$MQTT_out", "$MQTT_wills", "$MQTT_timers")


class StoredCopy(NamedTuple):
    """A message of a stream."""

    seq: int
    subject: str
    payload: bytes
    time: str


class Look:
    """Asks JetStream; :func:`looking` makes one."""

    def __init__(self, client: NatsClient) -> None:
        self.nats = client
        self.js = client.jetstream(timeout=30)

    async def messages(self, subject: str, stream: str = "$MQTT_msgs") -> list[StoredCopy]:
        """All messages of a stream on a subject, in order."""
        found: list[StoredCopy] = []
        start = 1
        while True:
            body = orjson.dumps({"next_by_subj": subject, "seq": start})
            try:
                answer = await self.nats.request(f"$JS.API.DIRECT.GET.{stream}", body, timeout=30)
            except nats.errors.NoRespondersError as error:
                raise AssertionError(f"{stream} has no direct get") from error
            headers = answer.headers or {}
            if "Nats-Sequence" not in headers:
                return found
            start = int(headers["Nats-Sequence"]) + 1
            found.append(StoredCopy(start - 1, headers["Nats-Subject"], answer.data, headers["Nats-Time-Stamp"]))

    async def count(self, stream: str, subject: str = ">") -> int:
        """How many messages a stream has on a subject; 0 when there is no such stream."""
        try:
            info = await self.js.stream_info(stream, subjects_filter=subject)
        except NotFoundError:
            return 0
        return sum((info.state.subjects or {}).values())

    async def left(self, stream: str, wait: float) -> int:
        """How many messages a stream has as soon as it has none, or after ``wait`` seconds."""

        async def empty() -> bool:
            return not await self.count(stream)

        with suppress(AssertionError):
            await aeventually(empty, wait)
        return await self.count(stream)

    async def session(self, client_id: str) -> dict[str, Any] | None:
        """The session record of a client."""
        try:
            message = await self.js.get_last_msg("$MQTT_sess", f"$MQTT.sess.{name_hash(client_id)}")
        except NotFoundError:
            return None
        found: dict[str, Any] = orjson.loads(message.data or b"")
        return found

    async def consumers(self, stream: str) -> list[str]:
        """The names of a stream's consumers."""
        found: list[str] = []
        while True:
            body = orjson.dumps({"offset": len(found)})
            answer = orjson.loads((await self.nats.request(f"$JS.API.CONSUMER.NAMES.{stream}", body, timeout=30)).data)
            if "error" in answer or not answer.get("consumers"):
                return found
            found += answer["consumers"]
            if len(found) >= answer["total"]:
                return found

    async def gateways(self, expected: int, wait: float = 5.0) -> list[dict[str, Any]]:
        """What the gateways say of themselves, as soon as ``expected`` of them have."""
        inbox = self.nats.new_inbox()
        subscription = await self.nats.subscribe(inbox)
        found: list[dict[str, Any]] = []
        try:
            await self.nats.publish("$MQTT.gateways.who", b"", reply=inbox)
            while len(found) < expected:
                found.append(orjson.loads((await subscription.next_msg(wait)).data))
        except nats.errors.TimeoutError:
            pass
        finally:
            await subscription.unsubscribe()
        return found


@asynccontextmanager
async def looking(url: str) -> AsyncIterator[Look]:
    """A :class:`Look` at the NATS servers ``url``."""
    client = await nats.connect(url.split(","), max_reconnect_attempts=-1, error_cb=_ignore)
    try:
        yield Look(client)
    finally:
        await client.close()


async def _ignore(error: Exception) -> None:
    """A server that is away is no error here: requests that are not answered are."""
