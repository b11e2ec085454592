# SPDX-License-Identifier: Apache-2.0
"""What the shared reader has nats-server choose for it, and that nothing is missed when that changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import _gateway_factory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.integration.conftest import Connector, Stored, until

EVERYTHING = ["$MQTT.msgs.>"]
NOTHING = ["$MQTT.msgs.$MQTT"]


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a shared reader, the only one on its nats-server."""
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server)


async def read(stored: Stored) -> list[str]:
    """The filters of the reader."""
    (reader,) = [one for one in await stored.js.consumers_info("$MQTT_msgs") if "_reader_" in one.name]
    return sorted(reader.config.filter_subjects or [reader.config.filter_subject or ""])


async def deliver(publisher: RawClient, receiver: RawClient | None, topic: str, start: int) -> int:
    """Publish a hundred messages, and see them received; returns the number of the next."""
    payloads = [b"%d" % number for number in range(start, start + 100)]
    await publisher.deliver_all(topic, payloads, 1)
    if receiver is not None:
        for payload in payloads:
            await receiver.receive(topic, payload, qos=1)
    return start + 100


@pytest.mark.long
async def test_what_most_is_wanted_of(connect: Connector, name: str, stored: Stored) -> None:
    """Filters while little is wanted, none while most is, nothing when nobody is there."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/a", qos=1)
    await stored.live(name)
    assert await read(stored) == [f"$MQTT.msgs.{name}.a"]
    publisher = await connect(f"{name}-publisher")
    number = 0

    async def wanted() -> None:
        nonlocal number
        number = await deliver(publisher, client, f"{name}/a", number)
        assert await read(stored) == EVERYTHING

    await until(wanted, 60)
    await client.subscribe(f"{name}/b", qos=1)
    await stored.live(name, 2)
    await deliver(publisher, client, f"{name}/b", 0)
    assert await read(stored) == EVERYTHING
    other = 0

    async def of_others() -> None:
        nonlocal number, other
        other = await deliver(publisher, None, f"{name}/c", other)
        number = await deliver(publisher, client, f"{name}/a", number)
        assert await read(stored) == [f"$MQTT.msgs.{name}.a", f"$MQTT.msgs.{name}.b"]

    await until(of_others, 60)
    await deliver(publisher, client, f"{name}/a", number)
    await client.subscribe(f"{name}/d", qos=1)
    await stored.live(name, 3)
    await deliver(publisher, client, f"{name}/d", 0)
    await client.quiet()
    await client.disconnect()
    await stored.detached(name)

    async def nobody() -> None:
        nonlocal other
        other = await deliver(publisher, None, f"{name}/c", other)
        assert await read(stored) == NOTHING

    await until(nobody, 60)
    client = await connect(name, clean=False)
    await stored.live(name, 3)
    assert await read(stored) == [f"$MQTT.msgs.{name}.{one}" for one in "abd"]
    for one in "abd":
        await deliver(publisher, client, f"{name}/{one}", 0)
    await client.quiet()
