# SPDX-License-Identifier: Apache-2.0
"""Who comes and goes is nobody's business whom no rule permits it, also where there are no rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtt_nats.access.acl import EVERYTHING, Both, Identity
from mqtt_nats.access.acl_file import own_rules
from mqtt_nats.authenticators.subject_rules import SubjectRules, Subjects
from mqtt_nats.codec import Publish
from mqtt_nats.config.settings import Settings
from tests.harness.inprocess import running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.plugins.conftest import installed, running_with

pytestmark = pytest.mark.anyio

HELD = (
    "$SYS/brokers/+/clients",
    "$SYS/brokers/+/clients/#",
    "$SYS/brokers/+/clients/victim/connected",
    "$share/g/$SYS/brokers/+/clients/+/connected",
    "$share/g/$SYS/#",
    "$share/g/$SYS/brokers/+/+/#",
)
WIDE = (
    "$SYS/#",
    "$SYS/+/#",
    "$SYS/brokers/#",
    "$SYS/brokers/+/#",
    "$SYS/brokers/+/+/#",
    "$SYS/brokers/+/+/+/+",
)
"""Filters that are granted, and bring no presence."""
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


@pytest.mark.parametrize("topic_filter", WIDE)
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_wide_filter_without_rules(nats_server: NatsServer, topic_filter: str, qos: int) -> None:
    """3.1.1 and 5.0, clean and kept, with clients here and at another gateway: values come, but no presence."""
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,))
    with running(settings) as gateway, running(settings) as other:
        for clean in (True, False):
            async with (
                await RawClient.connect(gateway.port, "old", clean=clean) as old,
                await RawClient5.connect5(gateway.port, "new", clean=clean, session_expiry_interval=9) as new,
            ):
                for client in (old, new):
                    assert await client.subscribe(topic_filter, "end", qos=qos) == (qos, qos)
                for where in (gateway, other):
                    async with await RawClient.connect(where.port, "victim") as victim:
                        await victim.deliver("end", b"", 1)
                for client in (old, new):
                    topics = await topics_until(client, "end", 2)
                    assert any(one.endswith("/version") for one in topics) == (topic_filter != "$SYS/brokers/+/+/+/+")
                    assert [one for one in topics if "/clients/victim" in one] == []


async def topics_until(client: RawClient, last: str, count: int) -> list[str]:
    """The topics of all messages until the one with the topic ``last`` has come so often."""
    found: list[str] = []
    while found.count(last) < count:
        message = await client.expect(Publish)
        await client.complete(message)
        found.append(topic_of(message))
    return found


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ('default = "allow"\n', False),
        ('[[rules]]\neffect = "allow"\ntopics = ["#", "$SYS/broker/#"]\n', None),
        ('[[rules]]\neffect = "allow"\ntopics = ["#", "$SYS/#"]\n', True),
        ('default = "allow"\n[[rules]]\neffect = "allow"\ntopics = "$SYS/brokers/+/clients/#"\n', True),
        ('default = "allow"\n[[rules]]\neffect = "allow"\nuser = "ann"\ntopics = "$SYS/#"\n', False),
    ],
)
async def test_a_wide_filter_with_rules(nats_server: NatsServer, tmp_path: Path, text: str, heard: bool | None) -> None:
    """Presence comes where a rule names it; without a rule for the filter, and no default, it is refused (None)."""
    file = tmp_path / "acl.toml"
    file.write_text(text, encoding="utf-8")
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=file)) as gateway:
        async with await RawClient5.connect5(gateway.port, "reader") as reader:
            assert await reader.subscribe("$SYS/#", "end") == (0x87 if heard is None else 0, 0)
            if heard is None:
                return
            async with await RawClient.connect(gateway.port, "victim") as victim:
                await victim.deliver("end", b"", 1)
            topics = await topics_until(reader, "end", 1)
            assert any("/clients/victim/connected" in one for one in topics) is heard


async def test_two_filters_of_which_one_names_presence(nats_server: NatsServer, tmp_path: Path) -> None:
    """The order of the subscriptions does not matter, and other clients get nothing by them."""
    file = tmp_path / "acl.toml"
    file.write_text(
        'default = "allow"\n[[rules]]\neffect = "allow"\nuser = "nobody"\ntopics = "$SYS/#"\n'
        '[[rules]]\neffect = "allow"\nclient = "reader"\ntopics = "$SYS/brokers/+/clients/#"\n',
        encoding="utf-8",
    )
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=file)) as gateway:
        async with (
            await RawClient5.connect5(gateway.port, "reader") as reader,
            await RawClient5.connect5(gateway.port, "other") as other,
        ):
            assert await reader.subscribe("$SYS/#", "$SYS/brokers/+/clients/#", "end") == (0, 0, 0)
            assert await other.subscribe("$SYS/#", "end") == (0, 0)
            async with await RawClient.connect(gateway.port, "victim") as victim:
                await victim.deliver("end", b"", 1)
            topics = await topics_until(reader, "end", 1)
            assert len([one for one in topics if "/clients/victim/connected" in one]) == 1
            assert [one for one in await topics_until(other, "end", 1) if "/clients/victim" in one] == []


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
