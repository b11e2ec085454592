# SPDX-License-Identifier: Apache-2.0
"""Answers to administrators: which rule decides, which sessions are ended, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from mqtt_nats.access import acl_file
from mqtt_nats.access.acl import Rules
from mqtt_nats.access.authenticator import Allow
from mqtt_nats.client.account import Account, ClientRules
from mqtt_nats.client.client import Client
from mqtt_nats.config.settings import Settings
from mqtt_nats.control.actions import ANSWERS
from mqtt_nats.control.selection import CONNECTED, RECONNECTED, Refusal
from mqtt_nats.control.server import Control, Powers
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE, SESSION_TERMINATED
from mqtt_nats.observability.history import RATES, History
from mqtt_nats.transport.connection import Connection
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import PREFIX, V5, SessionRecord
from mqtt_streams.sessions import STREAM as SESSIONS
from tests.conftest import Logged
from tests.harness.doubles import stands_for
from tests.lifecycle.fakes import FakeEndingWills


@stands_for(Settings)
class FakeSettings:
    """Stands for `Settings`: what answers tell of it."""

    acl_subscribe = "filter"
    max_topic_levels = 128

    def drain_seconds(self, connections: int) -> float:
        return 2.0 + connections


@stands_for(Account)
class FakeAccount:
    """Stands for `Account`: JetStream in memory, rules, and no clients."""

    def __init__(self) -> None:
        self.wills = FakeEndingWills()
        self.services = self.wills.services
        self.registry = self.services.registry
        self.rules = ClientRules(None)
        cast("Any", self.services).settings = FakeSettings()

    @property
    def accounts(self) -> dict[str, FakeAccount]:
        return {"": self}


@stands_for(Control)
class FakeControl:
    """Stands for `Control`: an account, and what the gateway allows there."""

    def __init__(self, powers: Powers) -> None:
        self.account = FakeAccount()
        self.powers = powers


class Gateway:
    """A gateway that is asked; ``stops`` counts the orders to drain it."""

    def __init__(self) -> None:
        self.stops = 0
        self.history = History()
        self.control = FakeControl(Powers({}, self.stop, None, self.history))
        self.account = self.control.account

    def stop(self) -> None:
        self.stops += 1

    def tenant(self) -> None:
        """Ask in the account of a tenant."""
        self.control.powers = Powers({}, None)

    async def ask(self, question: str, **given: Any) -> list[Any]:
        return [one async for one in ANSWERS[question](cast("Control", self.control), given)]


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


# -- rules ------------------------------------------------------------------------------------------------

RULES = """
[groups]
staff = ["carl"]
[[rules]]
effect = "deny"
topics = ["secret/#"]

[[rules]]
effect = "allow"
user = "ann"
access = "publish"
topics = ["ann/#"]
qos = [0, 1]

[[rules]]
effect = "allow"
group = "staff"
topics = ["#"]
"""


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    file = tmp_path / "acl.toml"
    file.write_text(RULES, encoding="utf-8")
    return acl_file.load(file)


async def decisions(gateway: Gateway, **given: Any) -> dict[tuple[str, int], tuple[bool, str]]:
    found = await gateway.ask("acl", **given)
    return {(one["access"], one["qos"]): (one["allowed"], one["why"]) for one in found}


async def test_without_rules_everything_is_allowed(gateway: Gateway) -> None:
    found = await decisions(gateway, user=None, topic="a/b")
    assert set(found) == {(access, qos) for access in ("publish", "subscribe") for qos in (0, 1, 2)}
    assert set(found.values()) == {(True, "there are no rules")}
    for_filter = await decisions(gateway, user=None, topic="a/+")
    assert set(for_filter) == {("subscribe", qos) for qos in (0, 1, 2)}


async def test_the_rule_that_decides_is_named(gateway: Gateway, rules: Rules) -> None:
    gateway.account.rules.use(rules)
    found = await decisions(gateway, user="ann", topic="ann/x", access="publish")
    said = "the ACL file, rule 2: allow publish ann/# at QoS 0, 1"
    nothing = "the ACL file: no rule applies"
    assert found == {("publish", 0): (True, said), ("publish", 1): (True, said), ("publish", 2): (False, nothing)}
    assert await decisions(gateway, user="bob", topic="secret/x", access="subscribe", qos=1) == {
        ("subscribe", 1): (False, "the ACL file, rule 1: deny publish and subscribe secret/#")
    }
    assert await decisions(gateway, user="bob", topic="x", access="subscribe", qos=0, groups=["staff"]) == {
        ("subscribe", 0): (True, "the ACL file, rule 3: allow publish and subscribe #")
    }


@stands_for(Connection)
class FakeConnection:
    """Stands for `Connection`: its address."""

    host = "192.0.2.1"


@stands_for(Client)
class FakeAsked:
    """Stands for `Client`: a connected client with a group, and with rules of its own."""

    def __init__(self, own: Rules) -> None:
        self.client_id, self.user = "lamp", "bob"
        self.connection = FakeConnection()
        self.granted = Allow("bob", frozenset({"staff"}), own)


async def test_a_connected_client_has_its_groups_and_its_own_rules_too(
    gateway: Gateway, rules: Rules, tmp_path: Path
) -> None:
    gateway.account.rules.use(rules)
    file = tmp_path / "own.toml"
    file.write_text('[[rules]]\neffect = "allow"\ntopics = ["own/#", "secret/#"]\nretain = false\n', encoding="utf-8")
    fake = FakeAsked(acl_file.load(file))
    gateway.account.registry.clients["lamp"] = cast("Client", fake)
    question: dict[str, Any] = {"client": "lamp", "access": "publish", "qos": 0}
    (own,) = await gateway.ask("acl", user="bob", topic="own/x", **question)
    assert (own["allowed"], own["connected"]) == (True, True)
    assert own["why"] == "the client's own rules, rule 1: allow publish and subscribe own/#, secret/# not retained"
    (other,) = await gateway.ask("acl", user="bob", topic="other", **question)
    assert (other["allowed"], other["why"]) == (False, "the client's own rules: no rule applies")
    (secret,) = await gateway.ask("acl", user="bob", topic="secret/x", **question)
    denied = "the ACL file, rule 1: deny publish and subscribe secret/#"
    assert (secret["allowed"], secret["why"]) == (False, denied)  # each part has to allow it
    (stranger,) = await gateway.ask("acl", user="eve", topic="own/x", **question)
    assert (stranger["allowed"], stranger["connected"]) == (False, False)


async def test_hooks_that_decide_are_mentioned(gateway: Gateway) -> None:
    assert not any(one["hooks"] for one in await gateway.ask("acl", user=None, topic="a"))
    gateway.account.services.hooks.add(CLIENT_AUTHORIZE, lambda event, value: None)
    assert all(one["hooks"] for one in await gateway.ask("acl", user=None, topic="a"))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topic": "a/+", "access": "publish"}, "'a/[+]': "),
        ({"topic": "", "access": "publish"}, "'': "),
        ({"topic": "a/#/b", "access": "subscribe"}, "'a/#/b': "),
        ({"topic": "a" * 70_000, "access": "publish"}, "has more than 65535 bytes"),
        ({"topic": "a", "address": "somewhere"}, "'somewhere' is not an IP address"),
    ],
)
async def test_a_question_about_no_topic_or_address_is_refused(
    gateway: Gateway, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(Refusal, match=text):
        await gateway.ask("acl", user=None, **given)


# -- sessions ---------------------------------------------------------------------------------------------


def stored(gateway: Gateway, name: str, **more: Any) -> int:
    """Store the record of an absent session; return its sequence."""
    record = SessionRecord(name, **({"v5": V5(kind="durable", expiry=60)} | more))
    return gateway.account.services.fake_inbox.put(PREFIX + name_hash(name), record.encode())


async def end(gateway: Gateway, *names: str, written: dict[str, int] | None = None) -> dict[str, str]:
    found = await gateway.ask("sessions.end", clients=list(names), written=written)
    return {one["client"]: one["why"] for one in found}


@pytest.mark.sources
async def test_an_absent_session_is_ended_and_announced(gateway: Gateway) -> None:
    told: list[Any] = []
    gateway.account.services.hooks.add(SESSION_TERMINATED, told.append)
    sequence = stored(gateway, "lamp")
    assert await end(gateway, "lamp", "nobody", written={"lamp": sequence}) == {
        "lamp": "",
        "nobody": "there is no such session",
    }
    assert gateway.account.services.fake_inbox.messages[SESSIONS] == []
    assert [(one.client_id, one.epoch) for one in told] == [("lamp", sequence)]


async def test_the_session_of_a_connected_client_stays(gateway: Gateway) -> None:
    stored(gateway, "lamp")
    gateway.account.registry.clients["lamp"] = cast("Client", object())
    assert await end(gateway, "lamp") == {"lamp": CONNECTED}
    assert len(gateway.account.services.fake_inbox.messages[SESSIONS]) == 1


async def test_a_session_whose_record_was_written_since_the_list_stays(gateway: Gateway) -> None:
    sequence = stored(gateway, "lamp")
    assert await end(gateway, "lamp", written={"lamp": sequence - 1}) == {"lamp": RECONNECTED}
    assert len(gateway.account.services.fake_inbox.messages[SESSIONS]) == 1


async def test_a_session_that_nats_servers_listener_serves_stays(gateway: Gateway) -> None:
    """Its record names no gateway; a client listens on the deliver subject of its consumer."""
    name = f"{name_hash('lamp')}_theirs"
    consumer = ConsumerRef(name, "$MQTT.sub.theirs", "$MQTT.msgs.a", 100)
    stored(gateway, "lamp", v5=None, cons={"a": consumer})
    js = gateway.account.services.fake_inbox
    js.consumers[MESSAGES][name] = {"config": {}, "push_bound": True}
    assert await end(gateway, "lamp") == {"lamp": "the client seems to be connected to nats-server's own listener"}
    assert len(js.messages[SESSIONS]) == 1


async def test_a_record_that_cannot_be_read_is_left_alone(gateway: Gateway) -> None:
    gateway.account.services.fake_inbox.put(PREFIX + name_hash("lamp"), b"no record")
    (why,) = (await end(gateway, "lamp")).values()
    assert why
    assert len(gateway.account.services.fake_inbox.messages[SESSIONS]) == 1


# -- the gateway ------------------------------------------------------------------------------------------


async def test_a_drain_stops_the_gateway_that_was_named(gateway: Gateway) -> None:
    gateway.account.registry.connections.add(cast("Client", object()))
    assert await gateway.ask("drain", gateway="gateway0") == [{"connections": 1, "seconds": 3.0}]
    assert gateway.stops == 1
    with pytest.raises(Refusal, match="name one gateway"):
        await gateway.ask("drain", gateway="")
    gateway.tenant()
    with pytest.raises(Refusal, match="only from its own account"):
        await gateway.ask("drain", gateway="gateway0")
    assert gateway.stops == 1


async def test_history_is_the_gateways_own(gateway: Gateway) -> None:
    for at in (100.0, 110.0, 120.0):
        totals = dict.fromkeys(RATES, 0) | {"dropped": {}, "stored": (0.0, 0), "lag": (0.0, 0)}
        gateway.history.add(at, totals, {"clients": 1})
    assert [one["time"] for one in await gateway.ask("history")] == [110.0, 120.0]
    assert [one["time"] for one in await gateway.ask("history", since=110)] == [120.0]
    gateway.tenant()
    with pytest.raises(Refusal, match="in its own account only"):
        await gateway.ask("history")


@pytest.fixture
def logger() -> Iterator[str]:
    name = "mqtt_nats.messages"
    yield name
    logging.getLogger(name).setLevel(logging.NOTSET)


async def test_a_log_level_is_set_and_the_message_log_follows(gateway: Gateway, logger: str, logged: Logged) -> None:
    before = {one["logger"]: one["level"] for one in await gateway.ask("log.levels")}
    assert before[logger] != "debug"
    assert gateway.account.services.hooks.accounts() == []
    assert await gateway.ask("log.levels", logger=logger, level="debug") == [{"logger": logger, "level": "debug"}]
    assert gateway.account.services.hooks.accounts() != []
    assert any(f"has set the log level of {logger} to debug" in line for line in logged.messages)
    await gateway.ask("log.levels", logger=logger, level="default")
    assert gateway.account.services.hooks.accounts() == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"logger": "mqtt_nats.messages", "level": "loud"}, "'loud' is not a level"),
        ({"logger": "asyncio", "level": "debug"}, "there is no logger 'asyncio'"),
    ],
)
async def test_a_wrong_log_level_is_refused(gateway: Gateway, given: dict[str, str], text: str) -> None:
    with pytest.raises(Refusal, match=text):
        await gateway.ask("log.levels", **given)


async def test_log_levels_are_not_a_tenants(gateway: Gateway) -> None:
    gateway.tenant()
    with pytest.raises(Refusal, match="belong to its own account"):
        await gateway.ask("log.levels")
