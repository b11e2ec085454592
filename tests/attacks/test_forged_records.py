# SPDX-License-Identifier: Apache-2.0
"""nats-server sends an answer to whatever reply subject a request names, also where the requester may not publish.

An MQTT client publishes what a record says, and who reads the stored messages, as the shipped user `spark`, has the
answer to its direct get sent to the record's subject. Gateways obey none of these records, and lose none of their own.
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from mqtt_streams import bans, fleet, gateways
from mqtt_streams.bans import ban_subject
from mqtt_streams.fleet import PAUSE_SUBJECT, Wish, wish_subject
from mqtt_streams.gateway_subjects import RELOAD
from mqtt_streams.gateways import PREFIX as GATEWAYS
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import STREAM as POSITIONS
from mqtt_streams.positions import Position, position_subject
from mqtt_streams.retained import PREFIX as RETAINED
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.sessions import claim_subject
from mqtt_streams.timers import FIRED_PREFIX
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.installation import Secrets, SecuredCluster, SecuredNats
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.processes

KEPT = prop(SESSION_EXPIRY, 600)
DIRECT = f"$JS.API.DIRECT.GET.{MESSAGES}"
GET = f"$JS.API.STREAM.MSG.GET.{MESSAGES}"


@pytest.fixture(scope="module", params=["one server, consumers", "three servers, records"])
def installation(request: pytest.FixtureRequest) -> str:
    """Number of nats-servers, and where positions of sessions are."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def server(installation: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredNats | SecuredCluster]:
    secrets = Secrets(tmp_path_factory.mktemp("secrets") / "made")
    kind = SecuredCluster if installation.startswith("three") else SecuredNats
    found = kind(tmp_path_factory.mktemp("nats"), secrets)
    try:
        found.start()
        yield found
    finally:
        found.discard()


@pytest.fixture(scope="module")
def gateway(
    installation: str, server: SecuredNats | SecuredCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    settings = {"MQTT_NATS_GATEWAY_LEASE": "4", "MQTT_NATS_SESSION_POSITIONS": installation.rpartition(" ")[2]}
    found = Gateway(log, "", env={**server.login("gateway"), **settings})
    found.start()
    try:
        yield found
    finally:
        found.process.discard()


async def connected(server: SecuredNats | SecuredCluster, user: str, **more: Any) -> Client:
    login = server.login(user)
    tls = ssl.create_default_context(cafile=login["MQTT_NATS_NATS_TLS_CA"])
    password = login["MQTT_NATS_NATS_PASSWORD"]
    return await nats.connect(server.url.split(","), tls=tls, user=user, password=password, **more)


class Forger:
    """An MQTT client, and `spark`. `reader` hears what nats-server sends."""

    def __init__(self, port: int, spark: Client, reader: Client) -> None:
        self.port, self.spark, self.reader, self.js = port, spark, reader, reader.jetstream()
        self.topics = 0

    async def forge(self, subject: str, body: Any, request: str = DIRECT) -> None:
        """Have something that a client has published sent to a subject."""
        self.topics += 1
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        with Raw5.open(self.port, "publisher") as client:
            client.deliver(f"forged/{self.topics}", payload, qos=1)
        what = {"last_by_subj": f"$MQTT.msgs.forged.{self.topics}"}

        def is_it(answer: Msg) -> bool:
            if request == DIRECT:
                return answer.data == payload and "Nats-Stream" in (answer.headers or {})
            return b"stream_msg_get_response" in answer.data and b'"message"' in answer.data

        await self.answer(subject, request, what, is_it)

    async def answer(self, subject: str, request: str, what: dict[str, Any], is_it: Callable[[Msg], bool]) -> None:
        """Have an answer sent to a subject, and wait until nats-server has sent it.

        Any server with a replica answers, also one that has not stored the message yet, or does not know of the reader.
        """
        heard = await self.reader.subscribe(subject)
        await fence(self.reader)

        async def sent() -> bool:
            await self.spark.publish(request, json.dumps(what).encode(), reply=subject)
            with contextlib.suppress(nats.errors.TimeoutError):
                while True:
                    if is_it(await heard.next_msg(1.0)):
                        return True
            return False

        await aeventually(sent)
        await heard.unsubscribe()

    async def stored(self, stream: str, subject: str) -> bytes:
        """The last message of a subject, once it is an answer."""

        async def found() -> bytes | None:
            try:
                message = await self.js.get_last_msg(stream, subject)
            except NotFoundError:
                return None
            known = message.headers or {}
            forged = "Nats-Stream" in known or (message.data or b"").startswith(b'{"type":"io.nats')
            return message.data if forged or not message.data else None

        return await aeventually(found)


@pytest.fixture
async def forger(server: SecuredNats | SecuredCluster, gateway: Gateway) -> AsyncIterator[Forger]:
    spark = await connected(server, "spark", inbox_prefix="$MQTT.spark")
    reader = await connected(server, "gateway")
    try:
        yield Forger(gateway.port, spark, reader)
    finally:
        await spark.close()
        await reader.close()


def admitted(port: int, client_id: str) -> None:
    Raw5.open(port, client_id).close()


@pytest.mark.long
async def test_a_ban(forger: Forger, gateway: Gateway, server: SecuredNats | SecuredCluster) -> None:
    """Neither when it comes, nor by a gateway that reads it when it starts; a ban stays in force behind it."""
    subject = ban_subject("client", "victim")
    body = {"kind": "client", "value": "victim", "until": 0, "reason": "forged", "by": "nobody"}
    with Raw5.open(gateway.port, "victim") as victim:
        await forger.forge(subject, body)
        assert await forger.stored(bans.STREAM, subject)
        assert victim.ping() == []
    admitted(gateway.port, "victim")
    other = Gateway(gateway.process.log.with_name("other.log"), "", env=server.login("gateway"))
    other.start()
    try:
        admitted(other.port, "victim")
    finally:
        other.process.discard()


async def test_wishes_and_a_pause(forger: Forger, gateway: Gateway, server: SecuredNats | SecuredCluster) -> None:
    """Gateways do not read files again, load nothing, and serve on."""
    reload = Wish("reload", "forged")
    plugin = Wish("plugin", "forged too", "forged-plugin", True)
    with Raw5.open(gateway.port, "served") as client:
        for wish in (reload, plugin):
            body = {"kind": wish.kind, "id": wish.identity, "name": wish.name, "loaded": wish.loaded}
            await forger.forge(wish_subject(wish), body)
            assert await forger.stored(fleet.STREAM, wish_subject(wish))
        await forger.forge(RELOAD.decode(), {"id": "asked", "gateway": ""})
        await forger.forge(PAUSE_SUBJECT, {"kind": "pause", "id": "forged", "stage": "restoring"})
        assert await forger.stored(fleet.STREAM, PAUSE_SUBJECT)
        assert client.ping() == []
    other = Gateway(gateway.process.log.with_name("later.log"), "", env=server.login("gateway"))
    other.start()
    try:
        admitted(other.port, "served")
        for log in (gateway.log, other.log):
            assert "read again" not in log
            assert "forged-plugin" not in log
            assert "pause" not in log
    finally:
        other.process.discard()


@pytest.mark.parametrize("request_", [DIRECT, GET], ids=["copy", "answer of the API"])
async def test_a_session(forger: Forger, gateway: Gateway, request_: str) -> None:
    """It goes on with what waits for it, connected or not, and nobody takes it over."""
    client_id = f"session {request_}"
    subject = f"$MQTT.sess.{name_hash(client_id)}"
    body = {"id": client_id, "subs": {"forged.topic": 0}}
    with Raw5.open(gateway.port, client_id, KEPT) as client:
        assert client.subscribed(("kept/#", 1)) == (1,)
        await forger.forge(subject, body, request_)
        assert await forger.stored(SESSIONS, subject)
        with Raw5.open(gateway.port, "other") as other:
            other.deliver("kept/a", b"waits", qos=1)
        assert client.receive_message().payload == b"waits"
    await forger.forge(subject, body, request_)
    for _ in range(2):
        with Raw5.open(gateway.port, client_id, KEPT, clean=False) as client:
            assert client.present
            client.ping()


@pytest.mark.parametrize("request_", [DIRECT, GET], ids=["copy", "answer of the API"])
async def test_a_position(forger: Forger, gateway: Gateway, installation: str, request_: str) -> None:
    """What waits for a session comes, whatever an answer says of its position; also where consumers have it."""
    client_id = f"positioned {request_}"
    subject = position_subject(name_hash(client_id))

    async def position() -> dict[str, Any] | None:
        try:
            message = await forger.js.get_last_msg(POSITIONS, subject)
        except NotFoundError:
            return None
        found: dict[str, Any] = json.loads(message.data or b"")
        return found if found["clean"] else None

    with Raw5.open(gateway.port, client_id, KEPT) as client:
        assert client.subscribed(("kept/position", 1)) == (1,)
        with Raw5.open(gateway.port, "other") as other:
            other.deliver("kept/position", b"first", qos=1)
        assert client.receive_message().payload == b"first"
        client.ping()
    records = installation.endswith("records")
    known = await aeventually(position) if records else json.loads(Position("none", clean=True).encode())
    with Raw5.open(gateway.port, "other") as other:
        other.deliver("kept/position", b"second", qos=1)
    await forger.forge(subject, {**known, "reached": 10**9}, request_)
    assert await forger.stored(POSITIONS, subject)
    with Raw5.open(gateway.port, client_id, KEPT, clean=False) as client:
        assert client.present
        assert client.receive_message().payload == b"second"


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "kept"])
@pytest.mark.parametrize("request_", [DIRECT, GET], ids=["copy", "answer of the API"])
async def test_a_session_of_a_client_that_has_none(
    forger: Forger, gateway: Gateway, request_: str, clean: bool
) -> None:
    """It begins one, and nobody is kept out."""
    client_id = f"new {request_} {clean}"
    subject = f"$MQTT.sess.{name_hash(client_id)}"
    await forger.forge(subject, {"id": client_id, "subs": {"forged.topic": 0}}, request_)
    assert await forger.stored(SESSIONS, subject)
    for present in (False, not clean):
        with Raw5.open(gateway.port, client_id, KEPT, clean=clean) as client:
            assert client.present is present
            client.ping()


async def test_a_signal_that_a_session_has_moved(
    forger: Forger, gateway: Gateway, server: SecuredNats | SecuredCluster
) -> None:
    """Whoever has it stays connected. The acknowledgement of another store is no such signal either."""
    key = name_hash("moved")
    subject = claim_subject(key, "FORGED00", "x")
    with Raw5.open(gateway.port, "moved", KEPT) as client:
        await forger.forge(subject, {"stream": SESSIONS, "seq": 1_000_000})
        application = await connected(server, "application", inbox_prefix="_INBOX_application")
        try:
            for _ in range(100):  # its sequence is to be higher than that of the session
                await application.publish("$MQTT.msgs.plant.x", b"x", headers={"Nmqtt-Pub": "1"})
            await application.publish("$MQTT.msgs.plant.x", b"x", headers={"Nmqtt-Pub": "1"}, reply=subject)
            await fence(application)
        finally:
            await application.close()
        assert client.ping() == []
    assert "was taken over" not in gateway.log


@pytest.mark.parametrize("kind", ["copy", "answer of the API", "no message"])
async def test_a_lease(forger: Forger, gateway: Gateway, kind: str) -> None:
    """The gateway renews it, and goes on under its id."""

    identity = re.findall(r"this gateway has the id (\S+)", gateway.log)[-1]
    subject = f"{GATEWAYS}lease.{identity}"
    if kind == "no message":
        await forger.answer(subject, DIRECT, {"seq": 10**9}, lambda answer: "Status" in (answer.headers or {}))
    else:
        await forger.forge(subject, {"holder": "FORGED00"}, DIRECT if kind == "copy" else GET)

    async def renewed() -> bytes | None:
        message = await forger.js.get_last_msg(gateways.STREAM, subject)  # from any replica: another one may be behind
        return (message.data or b"") if (message.headers or {}).get("Nats-Rollup") == "sub" else None

    found = await aeventually(renewed)
    assert "was considered dead" not in gateway.log
    assert json.loads(found) == {"holder": identity}
    admitted(gateway.port, "after")


async def test_a_retained_message(forger: Forger, gateway: Gateway) -> None:
    """The one of the topic is sent, and there is none where there was none; by a filter with wildcards too."""
    with Raw5.open(gateway.port, "writer") as client:
        client.deliver("retained/own", b"own", flags=1)
    for name in ("own", "none"):
        await forger.forge(f"{RETAINED}retained.{name}", b"forged")
    for topic_filter in ("retained/own", "retained/+", "retained/none"):
        with Raw5.open(gateway.port, "reader") as client:
            client.subscribed((topic_filter, 1))
            if topic_filter != "retained/none":
                assert client.receive_message().payload == b"own"
            client.quiet()
    with Raw5.open(gateway.port, "writer") as client:
        client.deliver("retained/own", b"newer", flags=1)
        client.subscribed(("retained/#", 1))
        assert client.receive_message().payload == b"newer"
        client.quiet()


async def test_a_timer(forger: Forger, gateway: Gateway) -> None:
    """A session whose deadline is said to have come does not end, and timers fire on."""
    with Raw5.open(gateway.port, "timed", KEPT) as client:
        assert client.subscribed(("kept/b", 1)) == (1,)
    await forger.forge(f"{FIRED_PREFIX}expiry.{name_hash('timed')}", b"timed")
    Raw5.open(gateway.port, "short", prop(SESSION_EXPIRY, 1)).close()

    async def ended() -> bool:
        try:
            await forger.js.get_last_msg(SESSIONS, f"$MQTT.sess.{name_hash('short')}")
        except NotFoundError:
            return True
        return False

    await aeventually(ended)

    async def none() -> bool:
        info = await forger.js.stream_info("$MQTT_timers", subjects_filter=f"{FIRED_PREFIX}>")
        return not info.state.subjects

    await aeventually(none)
    with Raw5.open(gateway.port, "timed", KEPT, clean=False) as client:
        assert client.present


async def test_what_is_left(forger: Forger, gateway: Gateway) -> None:
    """Messages, which other streams may republish, are as before: the page says so."""
    with Raw5.open(gateway.port, "reader") as client:
        client.subscribed(("anywhere", 0))
        await forger.forge("anywhere", b"stored before")
        assert client.receive_message().payload == b"stored before"
