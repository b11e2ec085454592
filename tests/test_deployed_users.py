# SPDX-License-Identifier: Apache-2.0
"""The users of nats-server that deploy/ has: each may do what it is for, and nobody else does what gateways do."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from click.testing import CliRunner, Result
from nats.aio.client import Client
from nats.errors import AuthorizationError, Error, NoServersError

from mqtt_nats.cli import command
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import snapshot, split
from pyspark_mqtt_nats.reading.read import read_range
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.installation import Secrets, SecuredNats, users_of_the_chart
from tests.harness.nats import ROOT
from tests.harness.raw import PUBLISH, Raw, publish
from tests.spark.servers import connect
from tests.spark.storing import sequences

pytestmark = pytest.mark.processes

OPERATOR = [
    "status",
    "clients",
    "clients show lamp",
    "sessions",
    "sessions show lamp",
    "subscriptions",
    "topics",
    "retained list",
    "retained get plant/kept",
    "retained delete plant/kept",
    "publish plant/x hello",
    "listeners",
    "acl check - plant/x",
    "hooks",
    "plugins",
    "streams",
    "bans add client mallory --for 1m",
    "bans list",
    "bans remove client mallory",
    "cluster status",
    "reload",
    "clients kick lamp",
    "sessions clean lamp",
]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets(tmp_path_factory.mktemp("secrets") / "made")


@pytest.fixture(scope="module", params=["users.conf", "nats-values.yaml"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, secrets: Secrets
) -> Iterator[SecuredNats]:
    users = None if request.param == "users.conf" else users_of_the_chart()
    found = SecuredNats(tmp_path_factory.mktemp("nats"), secrets, users=users)
    found.start()
    try:
        yield found
    finally:
        found.process.discard()


@pytest.fixture(scope="module")
def gateway(server: SecuredNats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    found = Gateway(log, "", env=server.login("gateway"))
    found.start()
    try:
        yield found
    finally:
        found.process.discard()


def violations(server: SecuredNats, user: str) -> list[str]:
    """What nats-server has refused to a user."""
    return [line for line in server.log.splitlines() if " Violation " in line and f"user:{user}" in line]


def ctl(server: SecuredNats, user: str, *arguments: str) -> Result:
    """What a command of an operator comes to."""
    return CliRunner().invoke(command, ["ctl", *arguments], env=server.login(user))


@pytest.mark.long
def test_gateways_and_operators_do_their_work_and_nobody_else(gateway: Gateway, server: SecuredNats) -> None:
    with Raw.connected(gateway.port, "lamp", clean=False) as lamp, Raw.connected(gateway.port) as other:
        assert lamp.subscribe(("plant/#", 1)) == [1]
        other.send(publish("plant/kept", b"1", qos=1, id=1, flags=1))
        assert lamp.expect(PUBLISH).payload == b"1"
        for line in OPERATOR:
            if line == "sessions clean lamp":
                lamp.close()
            done = ctl(server, "operator", *line.split())
            assert done.exit_code == 0, (line, done.output, done.exception)
    for user in ("gateway", "operator"):
        assert violations(server, user) == []
    done = ctl(server, "application", "status")
    assert done.exit_code == 1
    assert violations(server, "application")


FORBIDDEN = [
    "$JS.API.STREAM.DELETE.$MQTT_msgs",
    "$JS.API.STREAM.PURGE.$MQTT_rmsgs",
    "$JS.API.STREAM.NAMES",
    "$JS.API.CONSUMER.CREATE.$MQTT_sess",
    "$JS.ACK.x",
    "$MQTT.sess.x",
    "$MQTT.rmsgs.plant.x",
    "$MQTT.qos2.in.x.1",
    "$MQTT.wills.x",
    "$MQTT.timers.expiry.x",
    "$MQTT.gateways.ask",
    "$MQTT.msgs.secret",
    "$MQTT_SYS.x",
    "$KV.MQTT_bans.x",
    "$KV.MQTT_gateways.x",
    "$KV.MQTT_fleet.x",
    "$MQTT.spark.x",
    "$MQTT.inbox.x",
    "secret.topic",
]
"""Subjects on which an application publishes nothing."""

UNHEARD = [
    ">",
    "$MQTT.>",
    "$MQTT.sub.*",
    "$MQTT.inbox.>",
    "$MQTT.spark.>",
    "_INBOX.>",
    "$KV.>",
    "$MQTT_SYS.>",
    "$SRV.>",
    "secret.>",
    "*.topic",
]
"""Subjects that it does not subscribe."""


class Application:
    """A connection of a user; what it is refused."""

    def __init__(self, server: SecuredNats, secrets: Secrets, user: str) -> None:
        self.errors: list[str] = []
        self.client = Client()
        self._options: dict[str, Any] = {
            "servers": server.url,
            "user": user,
            "password": secrets.text(f"{user}-password"),
            "tls": ssl.create_default_context(cafile=str(secrets.authority)),
            "inbox_prefix": f"_INBOX_{user}",
            "error_cb": self._note,
        }

    async def _note(self, error: Exception) -> None:
        self.errors.append(str(error))

    async def __aenter__(self) -> Application:
        await self.client.connect(**self._options)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()


async def refused(one: Application, word: str, subject: str) -> None:
    """Wait until nats-server has refused this."""
    async with asyncio.timeout(10):
        while not any(word in said and f'"{subject.lower()}"' in said.lower() for said in one.errors):
            await fence(one.client)
            await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_what_an_application_may(gateway: Gateway, server: SecuredNats, secrets: Secrets) -> None:
    with Raw.connected(gateway.port) as device:
        assert device.subscribe(("plant/#", 1)) == [1]
        async with Application(server, secrets, "application") as one:
            heard = await one.client.subscribe("plant.>")
            await fence(one.client)
            device.send(publish("plant/up", b"21"))
            assert (await heard.next_msg(timeout=10)).data == b"21"
            headers = {"Nmqtt-Pub": "1"}
            await one.client.publish("plant.down", b"on", headers=headers)
            stored = await one.client.request("$MQTT.msgs.plant.down", b"on", timeout=10, headers=headers)
            assert b'"stream":"$MQTT_msgs"' in stored.data
            got = [device.expect(PUBLISH) for _ in range(2)]
            assert [(one.topic, one.payload) for one in got] == [("plant/up", b"21"), ("plant/down", b"on")]
            assert one.errors == []
            for subject in FORBIDDEN:
                await one.client.publish(subject, b"x")
                await refused(one, "publish", subject)
            for subject in UNHEARD:
                await one.client.subscribe(subject)
                await refused(one, "subscription", subject)


@pytest.mark.anyio
async def test_an_application_answers_requests_and_permits_itself_nothing(
    gateway: Gateway, server: SecuredNats, secrets: Secrets
) -> None:
    """A request of its own, whose reply subject is what it may not publish to, does not permit it that."""
    async with Application(server, secrets, "application") as one, Application(server, secrets, "operator") as asking:
        heard = await one.client.subscribe("plant.>")
        await fence(one.client)
        inbox = f"_INBOX.{secrets.text('operator-password')}"
        answers = await asking.client.subscribe(inbox)
        await fence(asking.client)
        for answerable in (inbox, "_INBOX_application.y"):
            await one.client.publish("plant.question", b"?", reply=answerable)
            await (await heard.next_msg(timeout=10)).respond(b"!")
        assert (await answers.next_msg(timeout=10)).data == b"!"
        assert one.errors == []
        for subject in ("$JS.API.STREAM.DELETE.$MQTT_wills", "$MQTT.sess.x", "$KV.MQTT_bans.x", "secret.topic"):
            await one.client.publish("plant.question", b"?", reply=subject)
            assert (await heard.next_msg(timeout=10)).reply == subject
            await one.client.publish(subject, b"x")
            await refused(one, "publish", subject)


@pytest.mark.anyio
async def test_spark_may_change_nothing_of_sessions(gateway: Gateway, server: SecuredNats, secrets: Secrets) -> None:
    """A consumer delivers to any subject, so who creates one writes; who deletes one stops a client's messages."""
    async with Application(server, secrets, "spark") as one:
        for request in ("CREATE", "DELETE", "MSG.NEXT"):
            subject = f"$JS.API.CONSUMER.{request}.$MQTT_msgs.x"
            await one.client.publish(subject, b"{}")
            await refused(one, "publish", subject)


@pytest.mark.anyio
async def test_nobody_gets_in_without_password_and_tls(server: SecuredNats, secrets: Secrets) -> None:
    tls = ssl.create_default_context(cafile=str(secrets.authority))
    logins: list[dict[str, Any]] = [
        {},
        {"user": "gateway", "password": ""},
        {"user": "operator", "password": "operator"},
    ]
    for login in logins:
        with pytest.raises((AuthorizationError, Error, NoServersError), match=r"(?i)authorization"):
            await nats.connect(server.url, tls=tls, allow_reconnect=False, **login)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert b'"tls_required":true' in await reader.readline()
    writer.write(
        b'CONNECT {"verbose":false,"user":"gateway","pass":"%b"}\r\nPING\r\n'
        % secrets.text("gateway-password").encode()
    )
    assert b"PONG" not in await reader.read()
    writer.close()


def test_spark_reads_and_does_nothing_else(gateway: Gateway, server: SecuredNats, secrets: Secrets) -> None:
    before = violations(server, "spark")
    with Raw.connected(gateway.port) as device:
        device.send(publish("plant/spark", b"x", qos=1, id=1))
        device.receive()
    login = {
        "user": "spark",
        "password": secrets.text("spark-password"),
        "tlsCa": str(secrets.authority),
    }
    options = Options.parse({"servers": server.url, "topics": "plant/#", "readMode": "direct", **login})
    with connect(server.url, **login) as connection:
        found = snapshot(options, connection)
    assert [one for part in split(found, 2) for one in sequences(read_range(options, found, part, ["sequence"]))]
    assert violations(server, "spark") == before
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| reads by direct gets |"))
    permitted = re.findall(
        r"\$JS\.API\.[^\" ]+\$MQTT_msgs[.>]*", (ROOT / "deploy/nats/users.conf").read_text(encoding="utf-8")
    )
    assert set(re.findall("`([^`]*JS.API[^`]*)`", row)) <= set(permitted)


def test_secrets_stay_and_are_for_their_owner(tmp_path: Path) -> None:
    made = Secrets(tmp_path / "secrets")
    assert made.directory.stat().st_mode & 0o777 == 0o700
    before = {file.name: file.read_bytes() for file in made.directory.iterdir()}
    made.make()
    assert {file.name: file.read_bytes() for file in made.directory.iterdir()} == before
    passwords = [before[name].decode() for name in before if name.endswith(("-password", "-token"))]
    assert len(set(passwords)) == len(passwords) == 7
    assert all(re.fullmatch("p[0-9a-f]{48}", one) for one in passwords)  # nats-server takes none for a number
    (made.directory / "spark-password").unlink()
    made.make()
    assert made.text("spark-password").encode() != before["spark-password"]
    assert made.env("nats.env")["SPARK_PASSWORD"] == made.env("spark.env")["MQTT_NATS_SPARK_PASSWORD"]
    assert (made.directory / "nats.pem").read_bytes() == before["nats.pem"]
