# SPDX-License-Identifier: Apache-2.0
"""Gateways, each behind a proxy of its own, and what JetStream has left when all is done."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import nats
import nats.aio.client
import orjson

from mqtt_streams.hashing import name_hash, subject_token
from mqtt_streams.positions import Position
from mqtt_streams.positions import decode as decode_position
from mqtt_streams.sessions import SessionRecord, decode
from tests.chaos.points.proxy import Frame, NatsProxy
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer

AGAIN: Final = 0.5
"""Seconds until a gateway is started again whose port somebody else has taken meanwhile."""

OnFrame = Callable[["Slot", Frame], None]
OnKill = Callable[["Slot"], None]


class Slot:
    """One gateway and its proxy. It keeps its port when it is started again."""

    def __init__(
        self,
        name: str,
        log: Path,
        server: NatsServer,
        on_frame: OnFrame,
        on_kill: OnKill,
        arguments: tuple[str, ...],
        module: str,
    ) -> None:
        self.name = name
        self.proxy = NatsProxy(server.port, self._kill, lambda frame: on_frame(self, frame))
        self.kills = 0
        self._log = log
        self._on_kill = on_kill
        self._arguments, self._module = arguments, module
        self._gateway: Gateway | None = None
        self._starting: asyncio.Task[None] | None = None

    @property
    def gateway(self) -> Gateway:
        """The gateway; it was started once."""
        assert self._gateway is not None
        return self._gateway

    @property
    def port(self) -> int:
        """For clients."""
        return self.gateway.port

    @property
    def alive(self) -> bool:
        """Whether the gateway runs."""
        return self._gateway is not None and self._gateway.process.alive

    def begin(self) -> None:
        """Start, where it does not run, without waiting for it."""
        if self._starting is None and not self.alive:
            self._starting = asyncio.get_running_loop().create_task(self._boot())

    async def _boot(self) -> None:
        try:
            while True:
                kills = self.kills
                try:
                    await asyncio.to_thread(self.gateway.start)
                    return
                except RuntimeError as error:  # it has ended
                    if self.kills == kills and "in use" not in str(error):
                        raise
                    await asyncio.sleep(AGAIN)
        finally:
            self._starting = None

    async def start(self) -> None:
        """Start, where it does not run, and wait until it is ready."""
        if self._gateway is None:
            await self.proxy.start()
            self._gateway = Gateway(self._log, self.proxy.url, arguments=self._arguments, module=self._module)
        self.begin()
        if self._starting is not None:
            await self._starting

    def stop(self) -> None:
        """Have the gateway end in order; without waiting for that."""
        if self.alive and self._starting is None:
            self.gateway.process.send(signal.SIGTERM)

    def crash(self) -> None:
        """Kill the gateway; what it has written and has not passed is lost."""
        if self.alive:
            self.proxy.crash()

    def _kill(self) -> None:
        if self.alive:
            self.kills += 1
            self._on_kill(self)
            self.gateway.process.send(signal.SIGKILL)
            self.gateway.process.wait()

    async def close(self) -> None:
        """End everything."""
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._gateway is not None:
            self._gateway.process.discard()
        await self.proxy.close()


class Fleet:
    """Some gateways on one nats-server.

    Args:
        directory: for logs.
        server: the nats-server, which runs.
        size: how many gateways.
        on_frame: is told of every message that a gateway and the server exchange.
        on_kill: is told of every gateway that is killed.
        arguments: more flags of the gateways.
        module: what is run in place of ``mqtt_nats``.
        own: more flags of each gateway.
    """

    def __init__(
        self,
        directory: Path,
        server: NatsServer,
        size: int,
        on_frame: OnFrame = lambda slot, frame: None,
        on_kill: OnKill = lambda slot: None,
        arguments: tuple[str, ...] = (),
        module: str = "",
        own: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self.server = server
        self.directory = directory
        self.slots = []
        for number in range(size):
            name, flags = chr(ord("a") + number), arguments + (own[number] if own else ())
            slot = Slot(name, directory / f"gateway-{name}.log", server, on_frame, on_kill, flags, module)
            self.slots.append(slot)
        self._client: nats.aio.client.Client | None = None

    async def start(self) -> None:
        """Start all; the first one alone, since it makes the streams."""
        self._client = await nats.connect(self.server.url)
        await self.slots[0].start()
        await asyncio.gather(*(slot.start() for slot in self.slots[1:]))

    async def ready(self) -> None:
        """Start those that were killed, and wait for them."""
        await asyncio.gather(*(slot.start() for slot in self.slots))

    async def trio(self, turn: int) -> tuple[Slot, Slot]:
        """The gateway that dies next and another one, which run, while the third is started."""
        victim, other, third = (self.slots[(turn + number) % 3] for number in range(3))
        await victim.start()
        await other.start()
        third.begin()
        return victim, other

    async def close(self) -> None:
        """End all.

        Raises:
            AssertionError: a gateway has written a traceback.
        """
        for slot in self.slots:
            await slot.close()
        if self._client is not None:
            await self._client.close()
        for slot in self.slots:
            log = self.directory / f"gateway-{slot.name}.log"
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            assert "Traceback" not in text, text[-8000:]

    # -- what is left in JetStream ------------------------------------------------------------------

    async def request(self, subject: str, **body: Any) -> dict[str, Any]:
        """One answer of JetStream's API; an error is one too."""
        assert self._client is not None
        answer = await self._client.request(f"$JS.API.{subject}", orjson.dumps(body), timeout=30)
        found: dict[str, Any] = orjson.loads(answer.data)
        return found

    async def count(self, stream: str, subject: str) -> int:
        """Messages of a stream on a subject."""
        info = await self.request(f"STREAM.INFO.{stream}", subjects_filter=subject)
        return sum((info.get("state", {}).get("subjects") or {}).values())

    async def unfinished(self, client_id: str) -> list[str]:
        """What JetStream still has to do, or to forget, for a client that has settled; a line for each thing."""
        hashed, token = name_hash(client_id), subject_token(client_id)
        found = []
        for stream, subject, what in (
            ("$MQTT_qos2in", f"$MQTT.qos2.in.{token}.*", "held publishes"),
            ("$MQTT_out", f"$MQTT.out.pubrel.{hashed}", "owed PUBRELs"),
        ):
            count = await self.count(stream, subject)
            if count:
                found.append(f"{client_id}: {count} {what}")
        record = await self._record(client_id)
        # What the record names of ended subscriptions may have been removed.
        named = {consumer.durable_name for consumer in record.cons.values()}
        listed = await self._listed()
        present = {one["name"]: one for one in listed if one["name"].startswith(f"{hashed}_")}
        at = await self.position(client_id)
        spoken_for = set(at.live) if record.v5 is not None and record.v5.consumerless else set()
        if present.keys() - named or named - present.keys() - spoken_for:
            found.append(f"{client_id}: consumers {sorted(present)}, but the record has {sorted(named)}")
        if at.pending or at.released:
            found.append(f"{client_id}: {len(at.pending)} pending and {len(at.released)} released in its position")
        for name, one in present.items():
            if name in at.live:
                continue  # it lies dormant
            if one["num_pending"] or one["num_ack_pending"]:
                found.append(
                    f"{client_id}: {name} has {one['num_pending']} to send, {one['num_ack_pending']} to be acknowledged"
                )
        return found

    async def position(self, client_id: str) -> Position:
        """Where a session is whose messages come through a shared reader; else an empty one."""
        answer = await self.request("STREAM.MSG.GET.$MQTT_pos", last_by_subj=f"$MQTT.pos.{name_hash(client_id)}")
        found = None if "error" in answer else decode_position(base64.b64decode(answer["message"]["data"]))
        return found or Position("")

    async def in_records(self, client_id: str) -> bool:
        """Whether a session has no consumers, by its record."""
        record = await self._record(client_id)
        return record.v5 is not None and record.v5.consumerless

    async def _listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            page = await self.request("CONSUMER.LIST.$MQTT_msgs", offset=len(found))
            found += page["consumers"] or []
            if len(found) >= page["total"] or not page["consumers"]:
                return found

    async def _record(self, client_id: str) -> SessionRecord:
        """The record of a session; else an empty one."""
        answer = await self.request("STREAM.MSG.GET.$MQTT_sess", last_by_subj=f"$MQTT.sess.{name_hash(client_id)}")
        if "error" in answer:
            return SessionRecord(client_id)
        return decode(base64.b64decode(answer["message"]["data"]))
