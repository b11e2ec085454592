# SPDX-License-Identifier: Apache-2.0
"""QoS 2 messages of groups, assigned by a gateway of the version before, or by today's one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mqtt_nats.codec import Subscription
from mqtt_streams.shared import ASSIGNED
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.crash.test_group_redelivery import (
    DURABLE,
    TEXT,
    acknowledged,
    connect,
    nobodys,
    proxy,
    server,
    soon_again,
    stored,
)
from tests.crash.test_shared import Connect
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.integration.conftest import Stored
from tests.integration.test_shared import all_of

__all__ = ["connect", "proxy", "server", "stored"]

BEFORE = "tests.rolling.by_sequence"
PAYLOADS = [b"%d" % number for number in range(5)]


@pytest.fixture
def run(server: NatsServer, gateway_factory: GatewayFactory) -> Callable[[str], Gateway]:
    """Start a gateway of some version; "" is today's."""

    def start(module: str) -> Gateway:
        return gateway_factory(server, module=module)

    return start


@pytest.mark.parametrize("before", ["first", "second"])
async def test_a_session_goes_on_with_what_is_assigned_to_it(
    run: Callable[[str], Gateway], stored: Stored, connect: Connect, before: str
) -> None:
    """Under the identifiers that its client knows; of two groups where today's gateway has assigned it."""
    one, two = run(BEFORE if before == "first" else ""), run(BEFORE if before == "second" else "")
    groups = 1 if before == "first" else 2
    member = await connect(one.port, "member", **DURABLE)
    for number in range(groups):
        wanted = Subscription(f"$share/g{number}/work", 2)
        await member.subscribe5(wanted, subscription_identifier=[number + 1])
    publisher = await connect(two.port, "publisher")
    await publisher.deliver_all("work", PAYLOADS, 2)
    known = await member.messages(groups * len(PAYLOADS))
    former = await stored.count("$MQTT_shared", f"{ASSIGNED}*.{await stored.last_sequence()}")
    assert former == (1 if before == "first" else 0)
    member.drop()
    member = await connect(two.port, "member", clean=False, **DURABLE)
    again = await member.messages(len(known))
    assert all(one.dup for one in again)
    found = {(one.payload, one.packet_id, str(one.properties)) for one in again}
    assert found == {(one.payload, one.packet_id, str(one.properties)) for one in known}
    for one_of_them in again:
        await member.complete(one_of_them)
    await member.quiet()
    await nobodys(stored)


async def test_groups_with_members_at_both(run: Callable[[str], Gateway], stored: Stored, connect: Connect) -> None:
    """Each group gets each message."""
    members = [
        await connect(run(module).port, f"member-{number}", **DURABLE) for number, module in enumerate((BEFORE, ""))
    ]
    for number, member in enumerate(members):
        await member.subscribe(f"$share/g{number}/work", qos=2)
    publisher = await connect(run("").port, "publisher")
    await publisher.deliver_all("work", PAYLOADS, 2)
    found = await all_of(members, 2 * len(PAYLOADS))
    assert [[one.payload for one in each] for each in found] == [PAYLOADS, PAYLOADS]
    await nobodys(stored)


@pytest.mark.parametrize("durable", [True, pytest.param(False, marks=pytest.mark.long)], ids=["durable", "regular"])
async def test_one_dies_before_the_group_has_its_acknowledgement(
    run: Callable[[str], Gateway],
    gateway_factory: GatewayFactory,
    proxy: NatsProxy,
    stored: Stored,
    connect: Connect,
    durable: bool,
) -> None:
    """Another member at today's gateway finds whose the message is."""
    first = gateway_factory(proxy.url, "--gateway-lease", "60", module=BEFORE, start=False)
    await asyncio.to_thread(first.start)
    second = run("")
    member = await connect(first.port, "member", **DURABLE)
    await member.subscribe(TEXT, qos=2)
    other = await connect(second.port, "other", **(DURABLE if durable else {}))
    (consumer,) = await soon_again(stored)
    publisher = await connect(second.port, "publisher")
    trap = proxy.set("up", "$JS.ACK.$MQTT_msgs.share_", Action.HOLD)
    await publisher.deliver("work", b"1", 2)
    await asyncio.wait_for(trap.sprung.wait(), 20)
    proxy.deafen()
    first.kill()
    await other.subscribe(TEXT, qos=2)
    await acknowledged(stored, consumer)
    await other.quiet()
    again = await connect(second.port, "member", clean=False, **DURABLE)
    await again.complete(await again.message("work", b"1", qos=2, dup=True))
    await again.quiet()
    await other.quiet()
    await nobodys(stored)
