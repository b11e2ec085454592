# SPDX-License-Identifier: Apache-2.0
"""Who comes and goes is nobody's business whom no rule permits it, also where there are no rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtt_nats.access.acl import EVERYTHING, Both, Identity
from mqtt_nats.access.acl_file import own_rules
from mqtt_nats.authenticators.subject_rules import SubjectRules, Subjects
from mqtt_nats.config.settings import Settings
from tests.harness.inprocess import running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.plugins.conftest import installed, running_with

pytestmark = pytest.mark.anyio

HELD = (
    "$SYS/#",
    "$SYS/+/#",
    "$SYS/brokers/#",
    "$SYS/brokers/+/#",
    "$SYS/brokers/+/+/#",
    "$SYS/brokers/+/clients",
    "$SYS/brokers/+/clients/#",
    "$SYS/brokers/+/clients/victim/connected",
    "$SYS/brokers/+/+/+/+",
    "$share/g/$SYS/brokers/+/clients/+/connected",
)
FREE = (
    "#",
    "+/brokers/+/clients/#",
    "$SYS/broker/#",
    "$SYS/brokers",
    "$SYS/brokers/+/version",
    "$SYS/brokers/+/stats/#",
)


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_without_rules(nats_server: NatsServer, qos: int) -> None:
    """3.1.1 and 5.0, clean and kept, shared too; the others of `$SYS` are everybody's."""
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,))) as gateway:
        for clean in (True, False):
            async with (
                await RawClient.connect(gateway.port, "old", clean=clean) as old,
                await RawClient5.connect5(gateway.port, "new", clean=clean, session_expiry_interval=9) as new,
            ):
                plain = [one for one in HELD if not one.startswith("$share")]
                assert await old.subscribe(*plain, qos=qos) == (0x80,) * len(plain)
                assert await new.subscribe(*HELD, qos=qos) == (0x87,) * len(HELD)
                async with await RawClient.connect(gateway.port, "victim"):
                    await old.quiet()
                    await new.quiet()
                assert await new.subscribe(*FREE, qos=0) == (0,) * len(FREE)


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ('default = "allow"\n', False),
        ('[[rules]]\neffect = "allow"\ntopics = "#"\n', False),
        ('[[rules]]\neffect = "allow"\ntopics = "$SYS/#"\n', True),
        ('default = "allow"\n[[rules]]\neffect = "allow"\ntopics = "$SYS/brokers/+/clients/#"\n', True),
        ('[[rules]]\neffect = "allow"\nuser = "ann"\ntopics = "$SYS/#"\n', False),
    ],
)
async def test_with_rules(nats_server: NatsServer, tmp_path: Path, text: str, granted: bool) -> None:
    """One of them has to name the topics: a default is not enough."""
    file = tmp_path / "acl.toml"
    file.write_text(text, encoding="utf-8")
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=file)) as gateway:
        async with await RawClient5.connect5(gateway.port, "reader") as reader:
            wanted = "$SYS/brokers/+/clients/+/connected"
            assert await reader.subscribe(wanted) == (0 if granted else 0x87,)
            async with await RawClient.connect(gateway.port, "victim"):
                if granted:
                    assert b"victim" in (await reader.messages(1))[0].payload
                await reader.quiet()


async def test_subscriptions_that_no_client_has_asked_for(nats_server: NatsServer) -> None:
    """Those of a plugin are held against the same."""
    wanted = [{"filter": "$SYS/brokers/+/clients/#"}]
    with installed(), running_with({"subscriptions": {"subscriptions": wanted}}, nats_server.url) as gateway:
        async with (
            await RawClient.connect(gateway.port, "reader") as reader,
            await RawClient.connect(gateway.port, "victim"),
        ):
            await reader.quiet()


async def test_a_session_that_has_such_a_subscription_already(nats_server: NatsServer, tmp_path: Path) -> None:
    """It had a rule, or an earlier version needed none."""
    file = tmp_path / "acl.toml"
    file.write_text('[[rules]]\neffect = "allow"\ntopics = "$SYS/#"\n', encoding="utf-8")
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=file)
    with running(settings) as gateway:
        async with await RawClient.connect(gateway.port, "kept", clean=False) as client:
            assert await client.subscribe("$SYS/brokers/+/clients/#", qos=1) == (1,)
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,))) as gateway:
        async with await RawClient.connect(gateway.port, "kept", clean=False) as client:
            assert client.session_present
            async with await RawClient.connect(gateway.port, "victim"):
                await client.quiet()
            await client.disconnect()
        async with await RawClient.connect(gateway.port, "kept"):
            pass


def test_rules_that_an_authentication_brings() -> None:
    """They count as rules; a user of NATS without permissions has none."""
    one = Identity("ann", "c")
    wanted = "$SYS/brokers/+/clients/#"
    own = own_rules([{"effect": "allow", "topics": "$SYS/#"}]).permissions(one)
    all_of_nats = SubjectRules(Subjects(None), Subjects(None))
    named = SubjectRules(Subjects(None), Subjects(("$MQTT_SYS.brokers.*.clients.>", "$MQTT_SYS.brokers.*.clients")))
    assert own.may_subscribe(wanted, 0)
    assert named.may_subscribe(wanted, 0)
    assert not all_of_nats.may_subscribe(wanted, 0)
    assert all_of_nats.may_subscribe("$SYS/broker/#", 0)
    assert Both(own, all_of_nats).may_subscribe(wanted, 0)
    assert not Both(EVERYTHING, all_of_nats).may_subscribe(wanted, 0)
