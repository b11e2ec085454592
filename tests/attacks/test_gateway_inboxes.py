# SPDX-License-Identifier: Apache-2.0
"""What gateways fetch from JetStream has the payloads of everybody: no user but theirs hears it.

A device may be a user of nats-server, with the rights that docs/authentication.md gives it, and connect there itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, NamedTuple

import nats
import pytest
from click.testing import CliRunner
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from mqtt_nats.cli import command
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw, raw5
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw5 import Raw5
from tests.harness.waiting import aeventually, eventually

pytestmark = pytest.mark.processes

FOREVER = raw5.prop(17, 3600)
LOGIN = {"user": "gateway", "password": "g"}
SECRET = b"everybody's secret"
AUTHENTICATOR = '[[authenticators]]\ntype = "nats"\n'
OTHERS = """
    {user: other, password: "o", permissions: {publish: ["device.>", "$SYS.REQ.USER.INFO"], subscribe: ["device.>",
      "$MQTT.login.other.*"]}}
    {user: inboxes, password: "i", permissions: {publish: ["device.>", "$SYS.REQ.USER.INFO"], subscribe: ["_INBOX.>"]}}
"""
"""A device that fetches what is stored; and one as earlier versions of the page wanted it."""


def documented() -> str:
    """The users of the page, with passwords."""
    page = (ROOT / "docs" / "authentication.md").read_text(encoding="utf-8")
    (users,) = re.findall(r"^users: \[\n(.*?)^\]", page, re.MULTILINE | re.DOTALL)
    for password in "gl":
        users = users.replace('"..."', f'"{password}"', 1)
    return str(users)


def allowed(user: str) -> list[str]:
    """What a user of the page may subscribe."""
    (given,) = re.findall(rf"user: {user},.*?subscribe: \[([^\]]*)\]", documented(), re.DOTALL)
    return re.findall(r'"([^"]+)"', given)


class Setup(NamedTuple):
    """A server with these users, and a gateway whose clients are users of it."""

    server: NatsServer
    gateway: Gateway


@pytest.fixture(params=["consumers", "records"])
def setup(request: pytest.FixtureRequest, nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> Setup:
    server = nats_factory(config=f"authorization {{ users: [ {documented()} {OTHERS} ] }}")
    file = server.directory / "gateway.toml"
    file.write_text(AUTHENTICATOR, encoding="utf-8")
    env = {
        "MQTT_NATS_NATS_USER": LOGIN["user"],
        "MQTT_NATS_NATS_PASSWORD": LOGIN["password"],
        "MQTT_NATS_SESSION_POSITIONS": request.param,
    }
    return Setup(server, gateway_factory(server, "--config", str(file), env=env))


def entered(gateway: Gateway, user: str, password: str, client_id: str = "", **more: Any) -> Raw5:
    """A 5.0 client that has logged in."""
    tail = raw.field(user) + raw.field(password)
    return Raw5.open(gateway.port, client_id, FOREVER, flags=0xC0, tail=tail, **more)


class Listener:
    """A user's own connection to nats-server: what it gets."""

    def __init__(self, client: NatsClient) -> None:
        self.client = client
        self.found: list[Msg] = []

    async def listen(self, subjects: list[str]) -> None:
        """Subscribe all that the user may."""

        async def note(message: Msg) -> None:
            self.found.append(message)

        for subject in subjects:
            await self.client.subscribe(subject, cb=note)
        await fence(self.client)

    def heard(self, payload: bytes) -> list[str]:
        """The subjects on which it came."""
        return [one.subject for one in self.found if payload in one.data]


@pytest.fixture
async def listeners(setup: Setup) -> AsyncIterator[dict[str, Listener]]:
    """The lamp, the user with inboxes, and one who may hear the replies: that the payloads do pass is sure by it."""
    users = {"lamp": ("l", allowed("lamp")), "inboxes": ("i", ["_INBOX.>"]), "gateway": ("g", ["$MQTT.inbox.>"])}
    found: dict[str, Listener] = {}
    try:
        for user, (password, subjects) in users.items():
            found[user] = Listener(await nats.connect(setup.server.url, user=user, password=password))
            await found[user].listen(subjects)
        yield found
    finally:
        for one in found.values():
            await one.client.close()


def traffic(setup: Setup) -> None:
    """Stored, shared and retained messages, which the gateway fetches for its clients and for an operator."""
    gateway = setup.gateway
    with entered(gateway, "other", "o", "absent") as client:
        assert client.subscribed(("device/a", 1)) == (1,)
        client.send(raw5.disconnect())
        client.expect_closed()
    with entered(gateway, "other", "o") as client, entered(gateway, "other", "o", "member") as member:
        assert member.subscribed(("$share/g/device/s", 1)) == (1,)
        client.deliver("device/a", SECRET, qos=1)
        client.deliver("device/a", SECRET, qos=2)
        client.deliver("device/r", SECRET, qos=1, flags=1)
        client.deliver("device/s", SECRET, qos=1)
        member.receive_message(SECRET)
    with entered(gateway, "other", "o", "absent", clean=False) as client:
        assert client.present
        for _ in range(2):
            assert client.receive_message(SECRET).topic == "device/a"
        assert client.subscribed(("device/r", 1)) == (1,)
        assert client.message(SECRET).retain
    login = ["--nats-user", LOGIN["user"]]
    env = {"MQTT_NATS_NATS_PASSWORD": LOGIN["password"]}
    done = CliRunner().invoke(
        command, ["ctl", "--nats", setup.server.url, *login, "retained", "get", "device/r"], env=env
    )
    assert SECRET.decode() in done.output, done.output


@pytest.mark.anyio
async def test_a_device_hears_no_reply_to_a_gateway(setup: Setup, listeners: dict[str, Listener]) -> None:
    await asyncio.to_thread(traffic, setup)
    replies = listeners["gateway"]
    # A message that a group fetches, or a page of records, comes under the subject of the message.
    await aeventually(lambda: any(one.startswith("$MQTT.msgs.") for one in replies.heard(SECRET)))
    await aeventually(lambda: any(one.startswith("$MQTT.inbox.") for one in replies.heard(SECRET)))
    for user in ("lamp", "inboxes"):
        await fence(listeners[user].client)
        assert [one.subject for one in listeners[user].found if "login.lamp" not in one.subject] == []


@pytest.mark.long
@pytest.mark.anyio
async def test_a_device_logs_in_with_the_rights_of_the_page(setup: Setup, listeners: dict[str, Listener]) -> None:
    """And hears there what it may do itself; nothing about others."""
    entered(setup.gateway, "other", "o").close()
    with entered(setup.gateway, "lamp", "l") as lamp:
        assert lamp.subscribed(("device/lamp/x", 1), ("device/other/x", 1)) == (1, 0x87)
    await fence(listeners["lamp"].client)
    (told,) = listeners["lamp"].found
    assert told.subject.startswith("$MQTT.login.lamp.")
    assert b'"user":"lamp"' in told.data


def test_the_log_names_the_right_that_a_user_lacks(setup: Setup) -> None:
    tail = raw.field("inboxes") + raw.field("i")
    raw5.refused(setup.gateway.port, raw5.connect("", flags=0xC0, tail=tail), 0x87)
    eventually(lambda: "the NATS user may not subscribe to $MQTT.login.inboxes.*" in setup.gateway.log)


@pytest.mark.anyio
async def test_devices_cannot_subscribe_where_gateways_wait(setup: Setup) -> None:
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error).lower())

    def refused(subject: str) -> bool:
        return any(f'"{subject.lower()}"' in one for one in errors)

    client = await nats.connect(setup.server.url, user="lamp", password="l", error_cb=note)
    try:
        for subject in ("$MQTT.inbox.>", "$MQTT.*.>", "$MQTT.spark.>", "$MQTT.login.*.*", "_INBOX.>", ">"):
            await client.subscribe(subject)
            await aeventually(partial(refused, subject))
    finally:
        await client.close()


def test_mqtt_clients_hear_no_inbox(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Nor those that a NATS user has for itself, such as `_INBOX_app`: no filter brings them."""
    gateway = gateway_factory(nats_server)
    with Raw5.open(gateway.port) as client:
        reserved = [(f"{root}/#", 1) for root in ("$MQTT", "_INBOX", "_INBOX_app", "_INBOX_spark")]
        assert client.subscribed(*reserved, ("#", 0)) == (0x87,) * 4 + (0,)

        async def answer() -> None:
            other = await nats.connect(nats_server.url)
            for subject in ("_INBOX_app.x", "_INBOX.x", "$MQTT.inbox.x", "plain.x"):
                await other.publish(subject, b"!")
            await other.flush()
            await other.close()

        asyncio.run(answer())
        assert client.message(b"!").topic == "plain/x"
        client.quiet()


@pytest.mark.parametrize("who", ["gateway", "ctl"])
def test_without_the_right_to_its_inbox_the_error_names_it(
    who: str, nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """As with users of an earlier version, who had `_INBOX.>`."""
    rights = '{publish: ">", subscribe: ["_INBOX.>", "$MQTT.gateways.>"]}'
    server = nats_factory(config=f'authorization {{ users: [{{user: old, password: "o", permissions: {rights}}}] }}')
    env = {"MQTT_NATS_NATS_USER": "old", "MQTT_NATS_NATS_PASSWORD": "o"}
    if who == "ctl":
        done = CliRunner().invoke(command, ["ctl", "--nats", server.url, "status"], env=env)
        assert done.exit_code == 1
        said = str(done.exception)
    else:
        gateway = gateway_factory(server, env=env, start=False)
        gateway.launch()
        assert gateway.wait() == 1
        said = gateway.log
    assert "the NATS user may not subscribe to $MQTT.inbox.>" in said
    assert "docs/upgrading.md" in said
