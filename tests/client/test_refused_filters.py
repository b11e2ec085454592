# SPDX-License-Identifier: Apache-2.0
"""Filters that are beyond a limit: each is counted by it, and the log has one line of a session."""

from __future__ import annotations

from typing import Any

import nats
import pytest

from mqtt_nats.base.logs import FAILURES
from mqtt_nats.config.settings import Settings
from mqtt_streams.messages import STREAM as MESSAGES
from tests.conftest import Logged, NatsFactory
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

QUOTA_EXCEEDED = {4: 0x80, 5: 0x97}


def settings(server: NatsServer, **values: Any) -> Settings:
    return Settings.model_validate({"listen": "127.0.0.1:0", "nats": (server.url,), **values})


async def connect(gateway: InProcess, version: int, name: str, durable: bool) -> RawClient:
    if version == 4:
        return await RawClient.connect(gateway.port, name, clean=not durable)
    expiry = 600 if durable else 0
    return await RawClient5.connect5(gateway.port, name, clean=not durable, session_expiry_interval=expiry)


def refused(gateway: InProcess) -> dict[str, int]:
    return {name: count for name, count in gateway.account.services.counters.filters_refused.items() if count}


def lines(logged: Logged) -> list[str]:
    return [line for line in logged.messages if "refused by limits" in line]


@pytest.mark.parametrize("durable", [False, True], ids=["clean", "durable"])
@pytest.mark.parametrize("version", [4, 5])
async def test_more_than_a_session_may_have(
    nats_server: NatsServer, logged: Logged, version: int, durable: bool
) -> None:
    """Those with QoS 0, 1 and 2, and shared ones: whatever is above is counted, packet after packet."""
    name = f"greedy{version}{durable}"
    with running(settings(nats_server, max_subscriptions=3)) as gateway:
        async with await connect(gateway, version, name, durable) as client:
            code, failures = QUOTA_EXCEEDED[version], FAILURES["filters"]
            assert await client.subscribe("a", "b", "c", "d", "e", qos=1) == (1, 1, 1, code, code)
            assert await client.subscribe("f", qos=0) == (code,)
            assert await client.subscribe("g", qos=2) == (code,)
            assert await client.subscribe("$share/g/h", "a", qos=1) == (code, 1)
            assert refused(gateway) == {"max_subscriptions": 5}
            assert lines(logged) == [
                f"client {name!r}: 2 filters are refused by limits (max_subscriptions 2); more of this connection are "
                "counted only"
            ]
            assert FAILURES["filters"] == failures + 4
        async with await connect(gateway, version, name, durable) as client:
            await client.subscribe(*(f"again/{number}" for number in range(4)))
            assert len(lines(logged)) == 1, "a session that connects again and again has no more lines"
        async with await connect(gateway, version, f"another{name}", False) as client:
            await client.subscribe(*(f"again/{number}" for number in range(4)))
            assert len(lines(logged)) == 2
        async with await RawClient.connect(gateway.port, name) as client:
            await client.disconnect()


@pytest.mark.parametrize("durable", [False, True], ids=["clean", "durable"])
@pytest.mark.parametrize("version", [4, 5])
async def test_subscriptions_of_all_sessions(
    nats_server: NatsServer, logged: Logged, version: int, durable: bool
) -> None:
    """What is above is refused and counted; there is room again when a session has ended or has fewer."""
    name = f"all{version}{durable}"
    code = QUOTA_EXCEEDED[version]
    with running(settings(nats_server, max_subscriptions_per_gateway=50)) as gateway:
        async with await connect(gateway, version, f"one{name}", durable) as one:
            texts = [f"{name}/{number}" for number in range(40)]
            assert await one.subscribe(*texts, qos=1) == (1,) * 40
            async with await connect(gateway, version, f"other{name}", durable) as other:
                found = await other.subscribe(*(f"{name}/other/{number}" for number in range(40)), qos=1)
                assert found == (1,) * 10 + (code,) * 30
                assert refused(gateway) == {"max_subscriptions_per_gateway": 30}
                assert len(lines(logged)) == 1
                assert await other.subscribe(f"{name}/other/3", qos=0) == (0,), "it is there"
                await one.unsubscribe(texts[0])
                assert await other.subscribe(f"{name}/x", f"{name}/y", qos=1) == (1, code)
        await aeventually(lambda: gateway.call(lambda: not gateway.account.services.path.table.subscriptions))
        if durable:
            async with await connect(gateway, version, f"one{name}", durable):
                pass
    with running(settings(nats_server, max_subscriptions_per_gateway=5)) as gateway:
        if durable:
            async with await connect(gateway, version, f"one{name}", durable) as one:
                await aeventually(lambda: gateway.call(lambda: gateway.account.services.path.table.subscriptions == 39))
                assert await one.subscribe(f"{name}/new", qos=0) == (code,), "a session keeps what it has"
                client = gateway.account.services.registry.clients[f"one{name}"]
                epoch = gateway.call(lambda: client.epoch)
                assert await one.subscribe(f"{name}/higher", qos=1) == (code,)
                assert gateway.call(lambda: client.epoch) == epoch, "no record and no consumer that would be removed"
        for client_id in (f"one{name}", f"other{name}"):
            async with await RawClient.connect(gateway.port, client_id) as last:
                await last.disconnect()


@pytest.mark.long
async def test_levels_and_the_size_of_the_record(nats_factory: NatsFactory, logged: Logged) -> None:
    nats_server = nats_factory(config="max_payload: 1MB")
    with running(settings(nats_server, max_subscriptions=4, max_topic_levels=40)) as gateway:
        async with await RawClient.connect(gateway.port, "deep") as client:
            deep = ["/".join("x" * 39) + f"/{number}" for number in range(3)]
            assert await client.subscribe(*deep) == (0, 0x80, 0x80)
            assert refused(gateway) == {"filter_levels": 2}
    with running(settings(nats_server)) as gateway:
        async with await RawClient.connect(gateway.port, "long", clean=False) as client:
            codes = await client.subscribe(*(f"{'level/' * 30}{number:04}/#" for number in range(400)), qos=1)
            count = codes.count(0x80)
            assert 0 < count < 200
            assert refused(gateway) == {"max_payload": count}
        async with await RawClient.connect(gateway.port, "long") as client:
            await client.disconnect()
    assert len(lines(logged)) == 2


async def test_consumers_of_a_user(nats_server: NatsServer, logged: Logged) -> None:
    with running(settings(nats_server, max_durable_consumers=2, max_durable_consumers_per_gateway=1000)) as gateway:
        async with await RawClient.connect(gateway.port, "consuming", clean=False) as client:
            assert await client.subscribe("a", "b", "c", "d", qos=1) == (1, 1, 0x80, 0x80)
            assert refused(gateway) == {"consumers": 2}
            assert len(lines(logged)) == 1
        async with await RawClient.connect(gateway.port, "consuming") as client:
            await client.disconnect()


async def test_consumers_that_jetstream_refuses(nats_factory: NatsFactory, logged: Logged) -> None:
    """Filters are granted all the same: their consumers lie dormant, and readers serve them."""
    server = nats_factory()
    with running(settings(server)) as gateway:
        async with (
            await RawClient.connect(gateway.port, "unlucky", clean=False) as client,
            await RawClient.connect(gateway.port, "publisher") as publisher,
        ):
            assert await client.subscribe("first", qos=1) == (1,)
            await publisher.deliver("first", b"served", 1)  # the reader is one of the consumers
            await client.receive("first", b"served", qos=1)
            one = await nats.connect(server.url)
            try:
                js = one.jetstream()
                config = (await js.stream_info(MESSAGES)).config
                await js.update_stream(config.evolve(max_consumers=4))
            finally:
                await one.close()
            assert await client.subscribe(*(f"j/{number}" for number in range(30)), qos=1) == (1,) * 30
            assert refused(gateway) == {}
            for number in (0, 29):
                await publisher.deliver(f"j/{number}", b"served", 1)
                await client.receive(f"j/{number}", b"served", qos=1)
            assert lines(logged) == []
