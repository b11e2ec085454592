# SPDX-License-Identifier: Apache-2.0
"""Clients of the gateway, and a look into what it has stored."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

import nats
import orjson
import pytest
from nats.aio.client import Client as NatsClient
from nats.js.api import ConsumerInfo
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from mqtt_nats.codec import Will
from mqtt_streams.gateway_subjects import ASK
from mqtt_streams.hashing import name_hash
from mqtt_streams.positions import Position
from mqtt_streams.positions import decode as decode_position
from tests.chaos.points.proxy import NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

_COUNT = itertools.count()
_RUN = secrets.token_hex(3)


@pytest.fixture
def name() -> str:
    """A name for topics and clients that no other test uses."""
    return f"t{_RUN}{next(_COUNT)}"


class Connector(Protocol):
    """Connects raw clients to a gateway and breaks what is left of them when the test ends."""

    async def __call__(
        self,
        client_id: str,
        *,
        clean: bool = True,
        keepalive: int = 0,
        will: Will | None = None,
        username: str | None = None,
        password: bytes | None = None,
        to: Gateway | None = None,
    ) -> RawClient: ...


@pytest.fixture
async def connect(gateway: Gateway) -> AsyncIterator[Connector]:
    """Connect raw clients, to the module's gateway unless ``to`` names another."""
    clients: list[RawClient] = []

    async def connect(client_id: str, *, to: Gateway | None = None, **options: Any) -> RawClient:
        client = await RawClient.connect((to or gateway).port, client_id, **options)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.drop()


class Connector5(Protocol):
    """As :class:`Connector`, for clients of 5.0; ``properties`` are those of CONNECT."""

    async def __call__(
        self, client_id: str, *, clean: bool = True, to: Gateway | None = None, **properties: Any
    ) -> RawClient5: ...


@pytest.fixture
async def connect5(gateway: Gateway) -> AsyncIterator[Connector5]:
    """Connect raw clients of 5.0, to the module's gateway unless ``to`` names another."""
    clients: list[RawClient5] = []

    async def connect(client_id: str, *, to: Gateway | None = None, **options: Any) -> RawClient5:
        client = await RawClient5.connect5((to or gateway).port, client_id, **options)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.drop()


@pytest.fixture(scope="module")
def second_gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A second gateway on the module's nats-server."""
    second = Gateway(tmp_path_factory.mktemp("second") / "gateway.log", nats_server.url)
    second.start()
    yield second
    second.process.discard()
    assert "Traceback" not in second.log, second.log


async def until(check: Callable[[], Awaitable[None]], timeout: float = 30.0) -> None:
    """Repeat a check until its assertions hold."""

    async def holds() -> bool:
        await check()
        return True

    condition: Callable[[], bool | Awaitable[bool | None] | None] = holds
    await aeventually(condition, timeout, what="the check")


async def position(js: JetStreamContext, client_id: str) -> Position:
    """Where a session is whose messages come, or have come, through a shared reader; else an empty one."""
    try:
        message = await js.get_last_msg("$MQTT_pos", f"$MQTT.pos.{name_hash(client_id)}")
    except NotFoundError:
        return Position("")
    return decode_position(message.data or b"") or Position("")


async def catching_up(client: NatsClient, client_id: str) -> bool:
    """Whether a reader of its own brings a connected session what the shared reader has passed; by its gateway."""
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    try:
        question = {"ask": "connected", "clients": [client_id], "loads": True}
        await client.publish(ASK.decode(), orjson.dumps(question), reply=inbox)
        while True:
            answer = orjson.loads((await answers.next_msg(5)).data)
            if answer["items"]:
                return answer["items"][0]["taken"] is not None
    except nats.errors.TimeoutError:
        raise AssertionError(f"no gateway says that {client_id} is connected") from None
    finally:
        await answers.unsubscribe()


async def live(client: NatsClient, client_id: str, count: int = 1, *, own: bool = False) -> Position:
    """Wait until the shared reader brings a connected session the messages of so many subscriptions.

    Args:
        own: that may also be a reader of the session's own, which brings what the shared reader has passed.
    """
    found: list[Position] = []

    async def speaks() -> None:
        at = await position(client.jetstream(), client_id)
        assert (len(at.live), at.clean) == (count, False)
        assert own or not await catching_up(client, client_id)
        found.append(at)

    await until(speaks)
    return found[-1]


async def all_consumers(js: JetStreamContext, stream: str) -> list[ConsumerInfo]:
    """The consumers of a stream: JetStream lists 256 of them at a time."""
    found: list[ConsumerInfo] = []
    while some := await js.consumers_info(stream, offset=len(found)):
        found += some
    return found


async def settled(js: JetStreamContext, client_id: str, *, inflight: int = 0, owed: int = 0) -> None:
    """Wait until JetStream has this many messages of a session in flight, and this many PUBRELs owed to it."""
    key = name_hash(client_id)

    async def reached() -> None:
        infos = [one for one in await all_consumers(js, "$MQTT_msgs") if one.name.startswith(f"{key}_")]
        at = await position(js, client_id)
        record = orjson.loads((await js.get_last_msg("$MQTT_sess", f"$MQTT.sess.{key}")).data or b"{}")
        if at.id != record.get("v5", {}).get("pos"):  # of a session before this one
            at = Position("")
        plain = [one for one in infos if one.name not in at.live]
        assert sum(one.num_ack_pending or 0 for one in plain) + len(at.pending) == inflight
        info = await js.stream_info("$MQTT_out", subjects_filter=f"$MQTT.out.pubrel.{key}")
        records = sum((info.state.subjects or {}).values())
        assert (max(records, len(at.released)) if at.clean else records + len(at.released)) == owed

    await until(reached)


class Stored:
    """What is in JetStream."""

    def __init__(self, client: NatsClient) -> None:
        self.nats = client
        self.js = client.jetstream()

    async def count(self, stream: str, subject: str = ">") -> int:
        """Messages of a stream, those whose subject matches."""
        info = await self.js.stream_info(stream, subjects_filter=subject)
        return sum((info.state.subjects or {}).values())

    async def last_sequence(self, stream: str = "$MQTT_msgs") -> int:
        """Sequence of the newest message of a stream."""
        return (await self.js.stream_info(stream)).state.last_seq

    async def consumers(self, stream: str, prefix: str = "") -> list[str]:
        """Names of consumers."""
        return [one.name for one in await all_consumers(self.js, stream) if one.name.startswith(prefix)]

    async def traces(self, client_id: str) -> dict[str, Any]:
        """Everything that a session has in JetStream, by stream; what is empty is left out."""
        key = name_hash(client_id)
        found = {
            "record": await self.count("$MQTT_sess", f"$MQTT.sess.{key}"),
            "consumers": await self.consumers("$MQTT_msgs", f"{key}_"),
            "pubrels": await self.count("$MQTT_out", f"$MQTT.out.pubrel.{key}"),
            "pubrel consumer": await self.consumers("$MQTT_out", f"$MQTT_PUBREL_{key}"),
            "held": await self.count("$MQTT_qos2in", f"$MQTT.qos2.in.{client_id}.*"),
            "timers": await self.count("$MQTT_timers", f"$MQTT.timers.expiry.{key}")
            + await self.count("$MQTT_timers", f"$MQTT.timers.fired.expiry.{key}"),
        }
        return {where: what for where, what in found.items() if what}

    async def record(self, client_id: str) -> dict[str, Any]:
        """The session record of a client."""
        message = await self.js.get_last_msg("$MQTT_sess", f"$MQTT.sess.{name_hash(client_id)}")
        found: dict[str, Any] = orjson.loads(message.data or b"")
        return found

    async def session_consumers(self, client_id: str) -> list[ConsumerInfo]:
        """The consumers of a session's subscriptions."""
        prefix = f"{name_hash(client_id)}_"
        return [one for one in await all_consumers(self.js, "$MQTT_msgs") if one.name.startswith(prefix)]

    async def live(self, client_id: str, count: int = 1, *, own: bool = False) -> Position:
        """As :func:`live`."""
        return await live(self.nats, client_id, count, own=own)

    async def settled(self, client_id: str, *, inflight: int = 0, owed: int = 0) -> None:
        """As :func:`settled`."""
        await settled(self.js, client_id, inflight=inflight, owed=owed)

    async def detached(self, client_id: str, *, killed: bool = False) -> None:
        """Wait until a session's client is known to be gone: what is published from now on waits for it.

        Args:
            killed: its gateway is dead, so that nobody leaves its position in order.
        """

        async def unbound() -> None:
            infos = await self.session_consumers(client_id)
            at = await position(self.js, client_id)
            assert infos or at.live  # without a consumer, its position speaks for it
            assert not any(one.push_bound for one in infos)
            assert killed or at.clean or not at.live

        await until(unbound)

    async def gone(self, client_id: str, timeout: float = 30.0) -> None:
        """Wait until a session has left no trace."""

        async def empty() -> None:
            left = await self.traces(client_id)
            assert not left, left

        await until(empty, timeout)


@pytest.fixture
async def stored(nats_server: NatsServer) -> AsyncIterator[Stored]:
    """A look into JetStream, and a NATS client (``stored.nats``)."""
    client = await nats.connect(nats_server.url)
    yield Stored(client)
    await client.close()


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[NatsProxy]:
    """Between the gateway that is late and nats-server."""
    between = NatsProxy(nats_server.port, lambda: None)
    await between.start()
    yield between
    await between.close()


@pytest.fixture
async def late(proxy: NatsProxy, gateway_factory: GatewayFactory) -> AsyncIterator[Gateway]:
    """A gateway whose words to nats-server may be held up, or not come there at all."""
    gateway = gateway_factory(proxy.url, "--gateway-lease", "60", start=False)
    await asyncio.to_thread(gateway.start)
    yield gateway
    await asyncio.to_thread(gateway.term)


async def answers(gateway: Gateway, name: str) -> None:
    """Wait until a gateway has done what it was to do before."""
    probe = await RawClient5.connect5(gateway.port, name)
    await probe.deliver(name, b"x", 1)
    probe.drop()
